"""nano-vllm on a CPU, operation by operation, with its attention replaced: see cpu_attention.py.

`NanoVllm` runs its model step by step, from which the taps are learned; `Engine` then runs its own scheduler.
"""

from functools import partial
from types import SimpleNamespace

import cpu_attention  # noqa: F401  # before nano-vllm
import torch
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence
from nanovllm.layers.attention import store_kvcache
from nanovllm.layers.sampler import Sampler
from nanovllm.models.qwen3 import Qwen3ForCausalLM
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.context import get_context, reset_context
from nanovllm.utils.loader import load_model
from torch import distributed
from transformers import AutoConfig

from harness.engines import Capabilities
from harness.engines.by_content.scheduled import ForwardBatch, StepWatcher, learn_taps
from harness.engines.paged_cache import PagedCache

BLOCK = 16


class NanoVllm:
    def __init__(self, folder, dtype):
        self.config, self.dtype = AutoConfig.from_pretrained(folder), getattr(torch, dtype)
        if not distributed.is_initialized():
            distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
        before = torch.get_default_dtype()
        torch.set_default_dtype(self.dtype)
        self.model = Qwen3ForCausalLM(self.config).eval()
        torch.set_default_dtype(before)
        load_model(self.model, str(folder))
        self.runner = object.__new__(ModelRunner)  # its own constructor wants a GPU
        self.runner.block_size, self.runner.enforce_eager, self.runner.rank = BLOCK, True, 0
        self.runner.model, self.runner.sampler = self.model, Sampler()
        Sequence.block_size = BLOCK
        self.reset(256)

    def reset(self, num_blocks):
        """Make an empty cache."""
        self.blocks, self.sequences = BlockManager(num_blocks, BLOCK), {}
        shape = num_blocks, BLOCK, self.config.num_key_value_heads, self.config.head_dim
        for layer in self.model.model.layers:
            layer.self_attn.attn.k_cache, layer.self_attn.attn.v_cache = torch.zeros(2, *shape, dtype=self.dtype)

    def step(self, work):
        for request, tokens, first in work:
            if request not in self.sequences:
                self.sequences[request] = Sequence(tokens[:1])
                self.blocks.allocate(self.sequences[request], 0)
            sequence = self.sequences[request]
            for token in tokens[not first :]:
                sequence.append_token(token)
                self.blocks.may_append(sequence)
            sequence.num_cached_tokens, sequence.num_scheduled_tokens = first, len(tokens)
        step = [self.sequences[request] for request, _, _ in work]
        is_prefill = any(first == 0 or len(tokens) > 1 for _, tokens, first in work)
        prepare = self.runner.prepare_prefill if is_prefill else self.runner.prepare_decode
        logits = self.runner.run_model(*prepare(step), is_prefill)
        reset_context()
        return logits

    def finish(self, request):
        self.blocks.deallocate(self.sequences.pop(request))


class Watcher(StepWatcher):
    step = ()

    def read_batch(self, inputs):
        lengths = [sequence.num_scheduled_tokens for sequence in self.step]
        return ForwardBatch(
            requests=[sequence.request_id for sequence in self.step],
            starts=torch.tensor([0, *lengths]).cumsum(0).tolist(),
            positions=inputs["positions"].tolist(),
            slot_mapping=get_context().slot_mapping,
            block_tables={"": {sequence.request_id: sequence.block_table for sequence in self.step}},
        )

    def logits(self, arguments, named):
        return arguments[0]

    def sampled_tokens(self, output):
        return output


class Engine:
    name = "nano-vllm"
    capabilities = Capabilities(schedules=("plain", "chunked", "batched", "prefix-hit", "preempted"))

    def __init__(self, folder, dtype):
        self.folder, self.dtype, self.nano = folder, dtype, NanoVllm(folder, dtype)

    def match_taps(self, graph):
        self.graph, self.taps = graph, learn_taps(self.nano, self.folder, graph, self.dtype)

    def run(self, workload, writer):
        requests, num_blocks = workload.all_requests, workload.num_blocks(BLOCK)
        model, runner = self.nano.model, self.nano.runner
        config = SimpleNamespace(
            num_kvcache_blocks=num_blocks, kvcache_block_size=BLOCK, eos=-1,
            max_num_seqs=max(map(len, workload.batches)),
            max_num_batched_tokens=workload.schedule.chunk_size or sum(len(request.token_ids) for request in requests),
        )  # fmt: skip
        self.nano.reset(num_blocks)
        caches = list(self.caches(num_blocks))
        with Watcher(model, runner.sampler, self.taps, self.graph, requests, writer, caches=caches) as watcher:
            scheduler = Scheduler(config)
            for batch in workload.batches:
                for request in batch:
                    sequence = Sequence(list(request.token_ids[: request.prompt_length]), greedy(request))
                    sequence.request_id = request.id
                    scheduler.add(sequence)
                while not scheduler.is_finished():
                    watcher.step, is_prefill = scheduler.schedule()
                    with torch.inference_mode():  # its sampler divides in place
                        tokens = runner.run(watcher.step, is_prefill)
                    scheduler.postprocess(watcher.step, tokens, is_prefill)

    def caches(self, num_blocks):
        for at, layer in enumerate(self.nano.model.model.layers):
            for name in ("k_cache", "v_cache"):
                cache = getattr(layer.self_attn.attn, name)
                yield PagedCache(
                    tap=f"model.layers.{at}.{name}", tensor=cache, write=partial(store, cache),
                    num_slots=num_blocks * BLOCK, block_size=BLOCK, row_shape=tuple(cache.shape[2:]),
                )  # fmt: skip


def store(cache, rows, slots):
    store_kvcache(rows, rows, cache, cache, slots)


def greedy(request):
    num_new = len(request.token_ids) - request.prompt_length + 1
    return SamplingParams(temperature=1e-6, max_tokens=num_new, ignore_eos=True)  # 0 is refused


def open_engine(folder, *, dtype, device, options):
    return Engine(folder, dtype)
