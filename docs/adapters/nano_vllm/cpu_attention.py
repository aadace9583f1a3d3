"""Stand-ins for what nano-vllm imports and a CPU lacks: Triton, flash-attn, pinned memory, copies to a GPU.

Import it before nano-vllm. Its attention and its writer of the cache are replaced, and it is not compiled; all else is its
own.
"""

import sys
from types import ModuleType, SimpleNamespace

import torch
from torch.nn.functional import scaled_dot_product_attention


def attend(query, keys, values, scale):
    """Attend causally: [tokens, heads, size] queries are the last of [tokens, KV heads, size] keys."""
    seen = torch.ones(len(query), len(keys), dtype=torch.bool).tril(len(keys) - len(query))
    heads = (x.transpose(0, 1) for x in (query, keys, values))
    return scaled_dot_product_attention(*heads, attn_mask=seen, scale=scale, enable_gqa=True).transpose(0, 1)


def flash_attn_varlen_func(q, k, v, *, cu_seqlens_q, cu_seqlens_k, softmax_scale, block_table, **_):
    out = torch.empty_like(q)
    for at, (start, stop) in enumerate(zip(cu_seqlens_q.tolist(), cu_seqlens_q[1:].tolist(), strict=False)):
        first, last = cu_seqlens_k[at : at + 2].tolist()
        context_rows = slice(first, last) if block_table is None else slice(0, last - first)
        blocks = None if block_table is None else block_table[at].clamp(min=0).long()
        keys, values = (cache if blocks is None else cache[blocks].flatten(0, 1) for cache in (k, v))
        out[start:stop] = attend(q[start:stop], keys[context_rows], values[context_rows], softmax_scale)
    return out


def flash_attn_with_kvcache(q, k_cache, v_cache, *, cache_seqlens, block_table, softmax_scale, **_):
    out = torch.empty_like(q)
    for at, length in enumerate(cache_seqlens.tolist()):
        blocks = block_table[at].clamp(min=0).long()
        keys, values = (cache[blocks].flatten(0, 1)[:length] for cache in (k_cache, v_cache))
        out[at] = attend(q[at], keys, values, softmax_scale)
    return out


def store_kvcache(key, value, k_cache, v_cache, slot_mapping):
    for rows, cache in ((key, k_cache), (value, v_cache)):
        cache.flatten(0, 1)[slot_mapping.long()] = rows


def module(name, **members):
    made = ModuleType(name)
    vars(made).update(members)
    sys.modules[name] = made
    return made


language = module("triton.language", constexpr=object)
module("triton", jit=lambda function: function, language=language)
module("flash_attn", flash_attn_varlen_func=flash_attn_varlen_func, flash_attn_with_kvcache=flash_attn_with_kvcache)

compiled, torch.compile = torch.compile, lambda function: function  # its decorators; compiling takes a minute

from nanovllm.engine import model_runner  # noqa: E402
from nanovllm.layers import attention  # noqa: E402

torch.compile = compiled
for name in ("triton", "triton.language", "flash_attn"):
    del sys.modules[name]  # others look for the real ones
attention.store_kvcache = store_kvcache
torch.Tensor.cuda = lambda self, **_: self
model_runner.torch = SimpleNamespace(
    **{**vars(torch), "tensor": lambda *args, pin_memory=False, **named: torch.tensor(*args, **named)}
)
