"""Sound kernels of attention: other orders of sums, other layouts, other precisions inside."""

import math

import torch
from torch.nn import functional

from harness.extensions.faults.modules.changes import Plant, Scores, kernel
from harness.extensions.faults.modules.declaring import way


def fine(s: Scores) -> torch.Tensor:
    """Everything in float32, rounded once."""
    k, v = s.repeated(s.k).float(), s.repeated(s.v).float()
    scores = (s.q.float() * s.scale) @ k.transpose(2, 3)
    if s.cap is not None:
        scores = torch.tanh(scores / s.cap) * s.cap
    if s.mask is not None:
        scores = scores + s.mask[..., : k.shape[2]].float().clamp(min=-1e9)
    return (scores.softmax(-1) @ v).to(s.q.dtype).transpose(1, 2).contiguous()


def online(s: Scores) -> torch.Tensor:
    """Blocks of 8 keys with a running maximum, as flash attention."""
    k, v = s.repeated(s.k).float(), s.repeated(s.v).float()
    top = torch.full((*s.q.shape[:3], 1), -1e30)
    total, out = torch.zeros_like(top), torch.zeros(*s.q.shape[:3], v.shape[-1])
    for begin in range(0, k.shape[2], 8):
        part = slice(begin, begin + 8)
        scores = s.q.float() @ k[:, :, part].transpose(2, 3) * s.scale
        if s.mask is not None:
            scores = scores + s.mask[..., part].float().clamp(min=-1e9)
        higher = torch.maximum(top, scores.amax(-1, keepdim=True))
        weights = torch.exp2((scores - higher) * math.log2(math.e))
        total = total * (top - higher).exp() + weights.sum(-1, keepdim=True)
        out, top = out * (top - higher).exp() + weights @ v[:, :, part], higher
    return (out / total).to(s.q.dtype).transpose(1, 2).contiguous()


def grouped(s: Scores) -> torch.Tensor:
    """Query heads of a group as rows of one product, instead of keys that are repeated."""
    groups = s.q.unflatten(1, (s.k.shape[1], -1))
    scores = torch.einsum("bgnqd,bgkd->bgnqk", groups, s.k) * s.scale + s.mask[..., : s.k.shape[2]].unsqueeze(1)
    weights = scores.float().softmax(-1).to(s.q.dtype)
    return torch.einsum("bgnqk,bgkd->bgnqd", weights, s.v).flatten(1, 2).transpose(1, 2).contiguous()


def padded_heads(s: Scores) -> torch.Tensor:
    """Heads padded with zeros to 32, as kernels that serve some sizes only do."""
    size = s.v.shape[-1]
    s.q, s.k, s.v = (functional.pad(x, (0, 32 - x.shape[-1])) for x in (s.q, s.k, s.v))
    return s.context()[..., :size]


def newest_first(s: Scores) -> None:
    """Keys in reverse order: a cache may hold them in any."""
    s.k, s.v = s.k.flip(2), s.v.flip(2)
    s.mask = s.mask[..., : s.k.shape[2]].flip(3)


ways_fine = (
    "olmo2 f plain",
    "olmo2 b plain",
    "cohere2 h chunked:7",
    "gemma2 b plain",
    "phi b plain",
    "granite h plain",
    "exaone4 b batched",
    "nemotron f chunked:5",
    "starcoder2 b plain",
    "persimmon h plain",
)
way("kernel in float32", kernel(fine), *ways_fine)
way(
    "online softmax", kernel(online), "olmo f plain", "mixtral b plain", "glm4 h plain", "stablelm b chunked:11",
    "seed_oss f batched", "opt b plain", "arcee h plain", "ernie4_5_moe f plain", "cohere b plain", "phi3 h plain",
)  # fmt: skip
way(
    "grouped queries", kernel(grouped), "cohere f plain", "olmoe b plain", "helium h plain", "granitemoe b batched",
    "smollm3 f chunked:9", "starcoder2 h plain",
)  # fmt: skip
way(
    "padded heads", kernel(padded_heads), "gpt_neox f plain", "gpt2 b plain", "biogpt h plain", "falcon_h1 f plain",
    "exaone4 f plain", "apertus b plain",
)  # fmt: skip
way(
    "keys newest first", kernel(newest_first), "phi f plain", "glm4 b plain", "cohere2 f plain", "olmo2 h chunked:8",
    "dbrx b plain",
)  # fmt: skip
way(
    "own kernel as eager", kernel(), "gpt_oss f plain", "gpt_oss b plain", "gemma2 f plain", "gpt_bigcode h plain",
    "deepseek_v3 b plain", "jetmoe f plain", "diffllama f plain", "llama4_text b plain",
)  # fmt: skip


def implementation(name: str) -> Plant:
    return lambda model: model.set_attn_implementation(name)


way(
    "eager", implementation("eager"), "olmo b plain", "nemotron h plain", "mistral b chunked:7", "bitnet f plain",
    "jamba b plain", "minimax f plain", "recurrent_gemma b plain", "glm4_moe h plain",
)  # fmt: skip
way(
    "sdpa", implementation("sdpa"), "bloom f plain", "bloom b plain", "mpt f plain", "codegen b plain", "gptj h plain",
    "gpt_neo b plain", "xglm f plain", "dots1 b plain",
)  # fmt: skip
