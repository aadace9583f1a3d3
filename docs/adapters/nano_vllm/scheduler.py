"""nano-vllm's scheduler, of April 2026: pytest --pyargs harness.properties --scheduler scheduler:Adapter"""

from types import SimpleNamespace

from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence
from nanovllm.sampling_params import SamplingParams


class Adapter:
    block_sizes = (2, 4, 256)
    budget_covers = "prompts"  # a step that generates has one token for each request, whatever the budget
    max_num_seqs_limits = "step"
    refuses_impossible = False
    reuses_prefixes = True

    def __init__(self, *, num_blocks, block_size, max_num_batched_tokens, max_num_seqs, max_model_len):
        Sequence.block_size = block_size
        config = SimpleNamespace(
            num_kvcache_blocks=num_blocks, kvcache_block_size=block_size, eos=2, max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
        )  # fmt: skip
        self.scheduler, self.sequences = Scheduler(config), {}
        self.manager = self.scheduler.block_manager

    def add(self, request_id, token_ids, max_new_tokens):
        sequence = Sequence(list(token_ids), SamplingParams(max_tokens=max_new_tokens))
        sequence.request_id, self.sequences[request_id] = request_id, sequence
        self.scheduler.add(sequence)

    def schedule(self):
        self.step, self.is_prefill = self.scheduler.schedule()
        chunks = [(s.request_id, s.num_cached_tokens, s.num_scheduled_tokens) for s in self.step]
        return [(request_id, start, start + number) for request_id, start, number in chunks]

    def update(self, sampled):
        token_ids = [sampled.get(sequence.request_id, 0) for sequence in self.step]
        self.scheduler.postprocess(self.step, token_ids, self.is_prefill)

    def running(self):
        queues = (*self.scheduler.running, *self.scheduler.waiting)
        return [sequence.request_id for sequence in queues if sequence.block_table]

    def block_table(self, request_id):
        return list(self.sequences[request_id].block_table)

    def free_list(self):
        return list(self.manager.free_block_ids)

    def num_owners(self, block):
        return self.manager.blocks[block].ref_count
