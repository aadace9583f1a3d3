"""nano-vllm on a CPU, operation by operation, with its attention replaced: see cpu_attention.py."""

from functools import partial
from types import SimpleNamespace

import cpu_attention  # noqa: F401  # before nano-vllm
import torch
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence
from nanovllm.layers.attention import store_kvcache
from nanovllm.layers.sampler import Sampler
from nanovllm.models.qwen3 import Qwen3ForCausalLM
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.context import get_context
from nanovllm.utils.loader import load_model
from torch import distributed
from transformers import AutoConfig

from harness.engines import Capabilities
from harness.engines.torch_modules import ForwardBatch, PagedCache, StepWatcher, find_table

BLOCK = 16


class Watcher(StepWatcher):
    step = ()

    def read_batch(self, inputs):
        lengths = [sequence.num_scheduled_tokens for sequence in self.step]
        return ForwardBatch(
            requests=[sequence.request_id for sequence in self.step],
            starts=torch.tensor([0, *lengths]).cumsum(0).tolist(),
            positions=inputs["positions"].tolist(),
            num_padded_rows=len(inputs["input_ids"]),
            slot_mapping=get_context().slot_mapping,
            block_tables={"": {sequence.request_id: sequence.block_table for sequence in self.step}},
        )

    def sampled_tokens(self, output):
        return output


class Engine:
    name = "nano-vllm"
    capabilities = Capabilities(schedules=("plain", "chunked", "batched", "prefix-hit", "preempted"))

    def __init__(self, folder, dtype):
        self.config, self.dtype = AutoConfig.from_pretrained(folder), getattr(torch, dtype)
        if not distributed.is_initialized():
            distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
        before = torch.get_default_dtype()
        torch.set_default_dtype(self.dtype)
        self.model = Qwen3ForCausalLM(self.config).eval()
        torch.set_default_dtype(before)
        load_model(self.model, str(folder))

    def match_taps(self, graph):
        self.table = find_table(self.model, graph, fused_sizes=sizes)

    def run(self, workload, writer):
        requests, num_blocks = workload.all_requests, workload.num_blocks(BLOCK)
        runner = object.__new__(ModelRunner)  # its own constructor wants a GPU
        runner.block_size, runner.enforce_eager, runner.rank = BLOCK, True, 0
        runner.model, runner.sampler = self.model, Sampler()
        config = SimpleNamespace(
            num_kvcache_blocks=num_blocks, kvcache_block_size=BLOCK, eos=-1,
            max_num_seqs=max(map(len, workload.batches)),
            max_num_batched_tokens=workload.schedule.chunk_size or sum(len(request.token_ids) for request in requests),
        )  # fmt: skip
        Sequence.block_size = BLOCK
        caches = list(self.caches(num_blocks))
        with Watcher(self.model, runner.sampler, self.table, requests, writer, caches=caches) as watcher:
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
        shape = self.config.num_key_value_heads, self.config.head_dim
        for at, layer in enumerate(self.model.model.layers):
            attention = layer.self_attn.attn
            attention.k_cache, attention.v_cache = torch.zeros(2, num_blocks, BLOCK, *shape, dtype=self.dtype)
            for name in ("k_cache", "v_cache"):
                cache = getattr(attention, name)
                yield PagedCache(
                    tap=f"model.layers.{at}.{name}", tensor=cache, write=partial(store, cache),
                    num_slots=num_blocks * BLOCK, block_size=BLOCK, row_shape=shape,
                )  # fmt: skip


def store(cache, rows, slots):
    store_kvcache(rows, rows, cache, cache, slots)


def greedy(request):
    num_new = len(request.token_ids) - request.prompt_length + 1
    return SamplingParams(temperature=1e-6, max_tokens=num_new, ignore_eos=True)  # 0 is refused


def sizes(linear):
    heads = [linear.num_heads, linear.num_kv_heads, linear.num_kv_heads] if hasattr(linear, "head_size") else []
    return [count * linear.head_size for count in heads] or linear.output_sizes


def open_engine(folder, *, dtype, device, options):
    return Engine(folder, dtype)
