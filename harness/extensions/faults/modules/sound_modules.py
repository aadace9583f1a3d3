"""Sound products, norms, rotary embeddings, mixtures, caches, and styles of a step engine."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from harness.extensions.faults.fault import EngineKind
from harness.extensions.faults.modules.changes import Plant, all_of, cache, forward, half_turned, names, output
from harness.extensions.faults.modules.declaring import way
from harness.extensions.faults.modules.rotary import turning


def at_modules(condition: Callable[[nn.Module], bool], replace: Callable[[nn.Module], Callable[..., Any]]) -> Plant:
    def plant(model: nn.Module) -> None:
        for module in model.modules():
            if condition(module):
                module.forward = replace(module)

    return plant


def is_linear(module: nn.Module) -> bool:
    return type(module) is nn.Linear


def is_rms(module: nn.Module) -> bool:
    return (
        type(module).__name__.endswith("RMSNorm") and hasattr(module, "variance_epsilon") and module.weight.mean() > 0.5
    )


# --- products ---


def halves(m: Any) -> Callable[..., Any]:
    """The sum in two halves, as two ranks or a split-K kernel have it; float32 between them."""

    def run(x: torch.Tensor) -> torch.Tensor:
        at = m.in_features // 2
        done = x[..., :at].float() @ m.weight[:, :at].float().T + x[..., at:].float() @ m.weight[:, at:].float().T
        return (done if m.bias is None else done + m.bias.float()).to(x.dtype)

    return run


def transposed(m: nn.Linear) -> Callable[..., Any]:
    stored = m.weight.detach().T.contiguous()
    return lambda x: (
        x @ stored if m.bias is None else torch.addmm(m.bias, x.flatten(0, -2), stored).view(*x.shape[:-1], -1)
    )


def by_row(m: nn.Linear) -> Callable[..., Any]:
    """One token at a time: what a kernel for decode does."""
    return lambda x: torch.stack([functional.linear(row, m.weight, m.bias) for row in x.flatten(0, -2)]).view(
        *x.shape[:-1], -1
    )


def padded_rows(m: nn.Linear) -> Callable[..., Any]:
    """Rows padded to a multiple of 16."""

    def run(x: torch.Tensor) -> torch.Tensor:
        rows = x.flatten(0, -2)
        done = functional.linear(functional.pad(rows, (0, 0, 0, -len(rows) % 16)), m.weight, m.bias)[: len(rows)]
        return done.view(*x.shape[:-1], -1)

    return run


def no_contiguity(m: nn.Linear) -> Callable[..., Any]:
    wide = torch.empty(*m.weight.shape, 2, dtype=m.weight.dtype)
    wide[..., 0] = m.weight.detach()
    return lambda x: functional.linear(x, wide[..., 0], m.bias)


way(
    "split-K", at_modules(is_linear, halves), "gpt_neox b plain", "mixtral f plain", "mamba f plain", "mamba2 b plain",
    "phimoe h plain", "qwen3_next f plain", "falcon_h1 b plain", "stablelm f chunked:7",
)  # fmt: skip
way(
    "transposed weights", at_modules(is_linear, transposed), "granite f plain", "opt f plain", "persimmon b plain",
    "lfm2 h plain", "zamba2 f plain", "gemma2 h plain",
)  # fmt: skip
way(
    "row by row", at_modules(is_linear, by_row), "olmo f batched", "biogpt b plain", "cohere h plain",
    "recurrent_gemma f plain", "deepseek_v3 f plain",
)  # fmt: skip
way(
    "padded rows", at_modules(is_linear, padded_rows), "arcee f plain", "seed_oss b plain", "bamba f plain",
    "minimax b chunked:7", "ernie4_5_moe h plain",
)  # fmt: skip
way(
    "weights not contiguous", at_modules(is_linear, no_contiguity), "phi3 f plain", "nemotron b plain", "gptj f plain",
)  # fmt: skip


def fused_qkv(model: nn.Module) -> None:
    """q, k and v as one product, of which the three modules return slices."""
    for module in model.modules():
        parts = [getattr(module, name, None) for name in ("q_proj", "k_proj", "v_proj")]
        if not all(is_linear(part) for part in parts):
            continue
        weight = torch.cat([part.weight.detach() for part in parts])
        bias = None if parts[0].bias is None else torch.cat([part.bias.detach() for part in parts])
        begin = 0
        for part in parts:
            rows = slice(begin, begin := begin + part.out_features)
            part.forward = lambda x, rows=rows, weight=weight, bias=bias: functional.linear(x, weight, bias)[..., rows]


way(
    "fused qkv", fused_qkv, "olmo2 f plain", "starcoder2 f plain", "cohere2 b plain", "glm4 f plain",
    "gpt_oss h plain", "exaone4 h plain",
)  # fmt: skip

# --- norms, activations, rotary, embeddings ---


def rms_by_division(m: nn.Module) -> Callable[..., Any]:
    def run(x: torch.Tensor) -> torch.Tensor:
        f = x.float()
        return (
            f / torch.sqrt(f.square().sum(-1, keepdim=True) / f.shape[-1] + m.variance_epsilon) * m.weight.float()
        ).to(x.dtype)

    return run


def layer_norm_by_hand(m: nn.LayerNorm) -> Callable[..., Any]:
    def run(x: torch.Tensor) -> torch.Tensor:
        f = x.float()
        mean = f.mean(-1, keepdim=True)
        done = (f - mean) * ((f - mean).square().mean(-1, keepdim=True) + m.eps).rsqrt() * m.weight.float()
        return (done if m.bias is None else done + m.bias.float()).to(x.dtype)

    return run


way(
    "rms by division, weight in float32", at_modules(is_rms, rms_by_division), "granite b plain", "mistral f plain",
    "mixtral h plain", "deepseek_v3 h plain", "mamba b plain", "exaone4 b chunked:9", "falcon_h1 h plain",
    "olmoe f plain", "glm4_moe f plain",
)  # fmt: skip
way(
    "layer norm by hand", at_modules(lambda m: type(m) is nn.LayerNorm, layer_norm_by_hand), "gpt2 f plain",
    "bloom h plain", "phi h plain", "opt h batched", "mpt b plain", "stablelm h plain", "starcoder2 f chunked:7",
    "dbrx f plain",
)  # fmt: skip
way(
    "silu by sigmoid",
    at_modules(
        lambda m: type(m).__name__ == "SiLUActivation",
        lambda m: lambda x: (x.float() * torch.sigmoid(x.float())).to(x.dtype),
    ),
    "cohere b batched",
    "glm4 b plain",
    "granitemoe f plain",
    "qwen3_next b plain",
    "helium f plain",
)
way(
    "gelu by erf",
    at_modules(
        lambda m: type(m).__name__ == "GELUActivation",
        lambda m: lambda x: (0.5 * x.float() * (1 + torch.erf(x.float() / math.sqrt(2)))).to(x.dtype),
    ),
    "gpt_neox h plain",
    "falcon b plain",
    "xglm b plain",
    "biogpt f plain",
)


def turned_in_float32(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *_: Any, **__: Any
) -> Any:
    done = turning(half_turned)(q.float(), k.float(), cos.float(), sin.float())
    return done[0].to(q.dtype), done[1].to(k.dtype)


def rotary_in_float32(path: str) -> Plant:
    return all_of(*(names(path.replace("*", str(at)), apply_rotary_pos_emb=turned_in_float32) for at in (0, 1)))


way(
    "rotary in float32", rotary_in_float32("model.layers.*.self_attn"), "olmo b plain", "arcee h plain",
    "granite b chunked:7", "mixtral b batched",
)  # fmt: skip
way("rotary in float32", rotary_in_float32("gpt_neox.layers.*.attention"), "gpt_neox b batched")


def one_hot(m: nn.Embedding) -> Callable[..., Any]:
    return lambda ids: functional.one_hot(ids, m.num_embeddings).to(m.weight.dtype) @ m.weight


way(
    "embedding as a product", at_modules(lambda m: type(m) is nn.Embedding, one_hot), "gpt2 f plain", "olmo b plain",
    "mamba h plain",
)  # fmt: skip

# --- residuals, experts, states, caches ---


def neox_layer(self: Any, hidden_states: torch.Tensor, **named: Any) -> torch.Tensor:
    attended = self.attention(self.input_layernorm(hidden_states), **named)[0]
    return hidden_states + (attended + self.mlp(self.post_attention_layernorm(hidden_states)))


def neox_order(model: nn.Module) -> None:

    all_of(*(forward(f"gpt_neox.layers.{at}", neox_layer) for at in (0, 1)))(model)


way("other order of parallel residuals", neox_order, "gpt_neox f plain", "gpt_neox b plain", "gpt_neox h chunked:7")


def every_expert(m: nn.Module) -> Callable[..., Any]:
    """All experts compute all tokens; weights of zero leave them out."""

    def run(x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        gate, up = torch.einsum("td,efd->tef", x, m.gate_up_proj).chunk(2, dim=-1)
        out = torch.einsum("tef,edf->ted", m.act_fn(gate) * up, m.down_proj)
        factors = torch.zeros(len(x), m.num_experts, dtype=torch.float32).scatter_add(1, chosen, weights.float())
        return (out.float() * factors[..., None]).sum(1).to(x.dtype)

    return run


def last_expert_first(m: nn.Module) -> Callable[..., Any]:
    inner = m.forward
    return lambda x, chosen, weights: inner(x, chosen.flip(-1), weights.flip(-1))


has_experts = lambda m: hasattr(m, "gate_up_proj") and isinstance(m.gate_up_proj, nn.Parameter)  # noqa: E731
way(
    "every expert", at_modules(has_experts, every_expert), "mixtral f plain", "olmoe h plain",
    "deepseek_v3 b chunked:7", "glm4_moe b plain", "granitemoe f batched", "ernie4_5_moe b plain",
)  # fmt: skip
way(
    "experts in another order", at_modules(has_experts, last_expert_first), "mixtral b plain", "jamba h plain",
    "qwen3_next h plain", "minimax h plain", "dots1 f plain",
)  # fmt: skip


def scan_blocks(size: int) -> Plant:
    def plant(model: nn.Module) -> None:
        for module in model.modules():
            if hasattr(module, "chunk_size") and hasattr(module, "A_log"):
                module.chunk_size = size

    return plant


way(
    "blocks of 8 in the scan", scan_blocks(8), "mamba2 f plain", "falcon_h1 f chunked:9", "bamba b plain",
    "zamba2 h plain",
)  # fmt: skip
way("blocks of 64 in the scan", scan_blocks(64), "mamba2 h plain", "bamba f plain")


def strided(inner: Any, k: torch.Tensor, v: torch.Tensor, *rest: Any, **named: Any) -> Any:
    """A cache whose heads lie innermost."""
    return tuple(x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2) for x in inner(k, v, *rest, **named))


way(
    "cache with heads innermost", cache(update=strided), "stablelm f plain", "phi b chunked:7", "cohere2 h plain",
    "deepseek_v3 f chunked:5", "gemma2 f batched",
)  # fmt: skip
way(
    "as it is", None, "mistral f rewound", "olmo2 b rewound", "gpt_neox f speculative", "granite b speculative",
    "cohere f rewound", "mamba2 f chunked:1", "gpt_oss b chunked:13", "llama4_text f chunked:5",
    "qwen3_next f chunked:17",
)  # fmt: skip
way("two threads", None, "gpt_neox f plain", "mixtral b batched", "mamba f plain", "cohere2 h plain", threads=2)
way(
    "compiled MLP",
    lambda model: setattr(model.model.layers[0].mlp, "forward", torch.compile(model.model.layers[0].mlp.forward)),
    "olmo f plain", "granite b plain",
)  # fmt: skip
way(
    "bias in float32",
    at_modules(
        is_linear,
        lambda m: (
            lambda x: (functional.linear(x.float(), m.weight.float(), None if m.bias is None else m.bias.float())).to(
                x.dtype
            )
        ),
    ),
    "persimmon f plain",
    "opt b chunked:9",
    "glm4 h batched",
)
way(
    "logits in float32", lambda model: output("lm_head", lambda out, *_: out.float())(model), "olmo b plain",
    "phi h plain",
)  # fmt: skip

# --- the step engine ---

for style, cases in {
    "sdpa": ("f plain", "b chunked:7", "h batched"),
    "eager": ("f batched", "b plain", "h rewound"),
    "by-hand": ("f chunked:5", "b batched"),
    "transposed": ("f rewound", "h plain"),
    "other-order": ("f plain", "b rewound"),
    "in-order": ("f batched", "b chunked:9"),
    "cache-bfloat16": ("f batched",),  # it says so: `cached` returns bfloat16
}.items():
    way(f"own engine, {style}", style, *(f"gpt_neox {case}" for case in cases), engine=EngineKind.STEP)
