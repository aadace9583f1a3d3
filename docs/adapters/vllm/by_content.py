"""vLLM 0.32 without a table of its tensors: which of them are which taps is found by what they hold."""

import os
from itertools import chain

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # before vLLM

import torch
from vllm import EngineArgs, SamplingParams
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
from vllm.v1.engine.llm_engine import LLMEngine

from harness.engines.by_content import StepEngine
from harness.engines.torch_modules.paged_cache import CacheLayout

BLOCK, NUM_BLOCKS = 32, 256


class Vllm:
    """Its model runner and its KV cache; requests are put together here and not by its scheduler."""

    def __init__(self, folder, dtype):
        arguments = EngineArgs(
            model=str(folder), dtype=dtype, enforce_eager=True, skip_tokenizer_init=True, block_size=BLOCK,
            max_model_len=512, max_num_seqs=256, max_num_batched_tokens=4096, kv_cache_memory_bytes=1 << 28,
            gpu_memory_utilization=0.01, num_gpu_blocks_override=NUM_BLOCKS, async_scheduling=False,
            enable_prefix_caching=False,
        )  # fmt: skip
        self.engine = LLMEngine.from_engine_args(arguments, enable_multiprocessing=False)
        self.runner = self.engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
        self.model, self.tokens, self.blocks, self.left = self.runner.get_model(), {}, {}, set()
        self.free = list(range(1, NUM_BLOCKS))
        self.groups = [group.layer_names for group in self.runner.kv_cache_config.kv_cache_groups]
        self.layers = self.runner.compilation_config.static_forward_context
        self.layouts = {name: [self.layout(self.layers[name], part) for part in (0, 1)] for name in chain(*self.groups)}

    def step(self, work):
        left, self.left = self.left, {str(number) for number, _, _ in work}
        for number, tokens, first in work:
            known = self.tokens.setdefault(number, [])
            groups = self.blocks.setdefault(number, [[] for _ in self.groups])
            known[first:] = tokens
            while len(groups[0]) * BLOCK < len(known):
                for blocks in groups:
                    blocks.append(self.free.pop())
        batch = SchedulerOutput.make_empty()
        batch.finished_req_ids = left  # each step's requests are new ones, whose first tokens are in the cache
        batch.scheduled_new_reqs = [self.request(number, first) for number, _, first in work]
        batch.num_scheduled_tokens = {str(number): len(tokens) for number, tokens, _ in work}
        batch.total_num_scheduled_tokens = sum(batch.num_scheduled_tokens.values())
        assert self.runner.execute_model(batch) is None
        logits = self.runner.execute_model_state.logits
        self.runner.sample_tokens(None)
        assert self.runner.input_batch.req_ids == [str(number) for number, _, _ in work]
        return logits

    def request(self, number, first):
        params, blocks = SamplingParams(temperature=0.0), tuple(map(list, self.blocks[number]))
        return NewRequestData(str(number), list(self.tokens[number]), [], params, None, blocks, first, None)

    def finish(self, number):
        self.free += chain(*self.blocks.pop(number))
        del self.tokens[number]

    def layout(self, layer, part):
        """Learn where the elements of keys, or of values, are: its kernels keep them in an order of their own."""

        def write(rows, slots):
            both = [rows if at == part else torch.zeros_like(rows) for at in (0, 1)]
            layer.impl.do_kv_cache_update(layer, *both, layer.kv_cache, slots)

        shape = layer.num_kv_heads, layer.head_size
        return CacheLayout.learn(layer.kv_cache, write, num_slots=NUM_BLOCKS * BLOCK, row_shape=shape)

    def cached(self, number):
        held = {}
        for names, blocks in zip(self.groups, self.blocks[number], strict=True):
            slots = [block * BLOCK + at for block in blocks for at in range(BLOCK)][: len(self.tokens[number])]
            for name in names:
                cache = self.layers[name].kv_cache
                held[extract_layer_index(name)] = [layout.read(cache, slots) for layout in self.layouts[name]]
        return held


def open_engine(folder, *, dtype, device, options):
    engine = Vllm(folder, dtype)  # one for the process: its settings are of the process
    return StepEngine(lambda: engine, name="vllm", folder=folder, dtype=dtype)
