"""SGLang 0.5.23 on a CPU without a table of its tensors: which of them are which taps is found by what they hold."""

from array import array

import torch
from engine import Engine, SamplingParams
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from harness.engines.by_content import StepEngine


class SGLang:
    """Its model runner and its pools; requests are put together here and not by its scheduler."""

    def __init__(self, folder, dtype):
        engine = Engine(folder, dtype)
        self.runner, self.tree, self.requests = engine.runner, engine.scheduler.tree_cache, {}
        self.allocator, self.rows = self.runner.token_to_kv_pool_allocator, self.runner.req_to_token_pool

    @torch.inference_mode()
    def step(self, work):
        for number, tokens, first in work:
            request = self.requests.setdefault(number, new_request(number))
            request.full_untruncated_fill_ids.extend(tokens)
            request.prefix_len, request.extend_end = first, first + len(tokens)
        batch = ScheduleBatch.init_new(
            reqs=[self.requests[number] for number, _, _ in work], req_to_token_pool=self.rows,
            token_to_kv_pool_allocator=self.allocator, tree_cache=self.tree, model_config=self.runner.model_config,
            enable_overlap=False, spec_algorithm=SpeculativeAlgorithm.NONE,
        )  # fmt: skip
        if all(first and len(tokens) == 1 for _, tokens, first in work):
            batch.req_pool_indices_cpu = batch.req_pool_indices = torch.tensor([r.kv.req_pool_idx for r in batch.reqs])
            batch.seq_lens_cpu = batch.seq_lens = batch.orig_seq_lens = torch.tensor([first for _, _, first in work])
            batch.sampling_info = SamplingBatchInfo.from_schedule_batch(batch, self.runner.model_config.vocab_size)
            batch.prepare_for_decode()
        else:
            batch.prepare_for_extend()
        batch.input_ids = torch.tensor([token for _, tokens, _ in work for token in tokens])
        forward = ForwardBatch.init_new(batch, self.runner, return_hidden_states_before_norm=False)
        return self.runner.forward(forward).logits_output.next_token_logits

    def slots(self, request):
        return self.rows.req_to_token[request.kv.req_pool_idx, : request.extend_end].long()

    def finish(self, number):
        request = self.requests.pop(number)
        self.allocator.free(self.slots(request))
        self.rows.free(request)

    def cached(self, number):
        pool, slots = self.allocator.get_kvcache(), self.slots(self.requests[number])
        return {at: [keys[slots], pool.v_buffer[at][slots]] for at, keys in enumerate(pool.k_buffer)}


def new_request(number):
    params = SamplingParams(max_new_tokens=1 << 20, temperature=0.0)
    params.normalize(None)
    request = Req(str(number), "", array("q"), params, vocab_size=1 << 30)
    request.full_untruncated_fill_ids = array("q")
    return request


def open_engine(folder, *, dtype, device, options):
    engine = SGLang(folder, dtype)  # one for the process: its settings are of the process
    return StepEngine(lambda: engine, name="sglang", folder=folder, dtype=dtype)
