"""nano-vllm on a CPU without a table of its tensors: which of them are which taps is found by what they hold."""

import cpu_attention  # noqa: F401  # before nano-vllm
import torch
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.engine.sequence import Sequence
from nanovllm.models.qwen3 import Qwen3ForCausalLM
from nanovllm.utils.context import reset_context
from nanovllm.utils.loader import load_model
from torch import distributed
from transformers import AutoConfig

from harness.engines.by_content import StepEngine

BLOCK, NUM_BLOCKS = 16, 256


class NanoVllm:
    def __init__(self, folder, dtype):
        config, dtype = AutoConfig.from_pretrained(folder), getattr(torch, dtype)
        if not distributed.is_initialized():
            distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        self.model = Qwen3ForCausalLM(config).eval()
        torch.set_default_dtype(before)
        load_model(self.model, str(folder))
        self.runner = object.__new__(ModelRunner)  # its own constructor wants a GPU
        self.runner.block_size, self.runner.enforce_eager, self.runner.model = BLOCK, True, self.model
        Sequence.block_size = BLOCK
        self.blocks, self.sequences = BlockManager(NUM_BLOCKS, BLOCK), {}
        self.attention = [layer.self_attn.attn for layer in self.model.model.layers]
        shape = NUM_BLOCKS, BLOCK, config.num_key_value_heads, config.head_dim
        for attention in self.attention:
            attention.k_cache, attention.v_cache = torch.zeros(2, *shape, dtype=dtype)

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

    def cached(self, request):
        sequence = self.sequences[request]
        caches = enumerate((attention.k_cache, attention.v_cache) for attention in self.attention)
        return {at: [cache[sequence.block_table].flatten(0, 1)[: len(sequence)] for cache in both] for at, both in caches}


def open_engine(folder, *, dtype, device, options):
    return StepEngine(lambda: NanoVllm(folder, dtype), name="nano-vllm", folder=folder, dtype=dtype)
