"""Norms, residuals and the MLP's activation."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.nn.functional import gelu, silu

import reference_engine.families.build
import reference_engine.layers
import reference_engine.loader
from harness.extensions.faults.fault import FIRST, FIRST_DECODE, Category, FaultConfig, table_of
from harness.extensions.faults.reference.injection import replacing
from reference_engine.layers import MLP, RMSNorm
from reference_engine.model import Attention, Decoder, DecoderLayer

_LAYER = "model.layers.0."


def edited_layers(edit: Callable[[Any], Any]) -> Any:
    """Change what `build_layer` returns."""

    def make(build: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return edit(build(*args, **kwargs))

    return replacing((reference_engine.families.build, "build_layer", make))


def norm_scaled_by(statistic: Callable[[RMSNorm, torch.Tensor], torch.Tensor]) -> Any:
    """Replace every norm's scale, [..., 1] for an input in float32."""

    def call(original: Any, self: RMSNorm, x: torch.Tensor) -> torch.Tensor:
        x32 = x.to(torch.float32)
        return self.weight_X * (x32 * statistic(self, x32)).to(x.dtype)

    return replacing((RMSNorm, "__call__", call))


def _with_eps(eps: float) -> Any:
    return norm_scaled_by(lambda norm, x: torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps))


def _coarse_variance(norm: RMSNorm, x: torch.Tensor) -> torch.Tensor:
    variance = x.to(torch.bfloat16).pow(2).mean(-1, keepdim=True)
    return torch.rsqrt(variance + norm.eps).to(torch.float32)


def _squares_in_float16(norm: RMSNorm, x: torch.Tensor) -> torch.Tensor:
    squares = x.to(torch.float16).square().sum(-1, keepdim=True)
    return torch.rsqrt(squares.to(torch.float32) / x.shape[-1] + norm.eps)


def _unweighted(layer: DecoderLayer) -> DecoderLayer:
    norm = layer.post_attention_layernorm
    return replace(layer, post_attention_layernorm=replace(norm, weight_X=torch.ones_like(norm.weight_X)))


def _skip_qk_norm_in_decode(
    project: Callable[..., Any], self: Attention, x: torch.Tensor, batch: Any, prefix: str
) -> Any:
    if all(length == 1 for length in batch.query_lens):
        self = replace(self, q_norm=torch.clone, k_norm=torch.clone)  # type: ignore[arg-type]
    return project(self, x, batch, prefix)


def _over_all_heads(layer: DecoderLayer) -> DecoderLayer:
    def flattened(norm: RMSNorm) -> Callable[[torch.Tensor], torch.Tensor]:
        def call(x: torch.Tensor) -> torch.Tensor:
            x32 = x.to(torch.float32)
            scale = torch.rsqrt(x32.pow(2).mean((-2, -1), keepdim=True) + norm.eps)
            return norm.weight_X * (x32 * scale).to(x.dtype)

        return call

    attention = layer.attention
    assert isinstance(attention, Attention)
    assert attention.q_norm is not None
    assert attention.k_norm is not None
    wrong = replace(attention, q_norm=flattened(attention.q_norm), k_norm=flattened(attention.k_norm))  # type: ignore[arg-type]
    return replace(layer, attention=wrong)


def _residual_after_the_norm(
    call: Callable[..., Any], self: DecoderLayer, x: torch.Tensor, rotation: Any, batch: Any
) -> torch.Tensor:
    normed = self.input_layernorm(x)
    x = normed  # should be the stream
    batch.tap(self.prefix, "input_layernorm", normed)
    x = x + self.attention(normed, rotation, batch, self.prefix)
    return _second_half(self, x, batch)


def _second_half(layer: DecoderLayer, x: torch.Tensor, batch: Any) -> torch.Tensor:
    batch.tap(layer.prefix, "attn_residual", x)
    normed = layer.post_attention_layernorm(x)
    batch.tap(layer.prefix, "post_attention_layernorm", normed)
    x = x + layer.mlp(normed, batch, layer.prefix)
    batch.tap(layer.prefix, "output", x)
    return x


def _norm_in_place(layer: DecoderLayer) -> DecoderLayer:
    norm = layer.post_attention_layernorm

    def call(x: torch.Tensor) -> torch.Tensor:
        return x.copy_(norm(x))

    return replace(layer, post_attention_layernorm=call)  # type: ignore[arg-type]


def branches(change: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], *, of_input: bool = False) -> Any:
    """Make `change` of the stream and what the MLP gives, both [T, D], in the place of their sum.

    With `of_input`, the stream is the layer's input, without what attention added.
    """

    def call(original: Any, self: DecoderLayer, x: torch.Tensor, rotation: Any, batch: Any) -> torch.Tensor:
        normed = self.input_layernorm(x)
        batch.tap(self.prefix, "input_layernorm", normed)
        middle = x + self.attention(normed, rotation, batch, self.prefix)
        batch.tap(self.prefix, "attn_residual", middle)
        normed = self.post_attention_layernorm(middle)
        batch.tap(self.prefix, "post_attention_layernorm", normed)
        x = change(x if of_input else middle, self.mlp(normed, batch, self.prefix))
        batch.tap(self.prefix, "output", x)
        return x

    return replacing((DecoderLayer, "__call__", call))


def _activation(act: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Any:
    """Replace act(gate) * up."""

    def call(original: Any, self: MLP, x: torch.Tensor, batch: Any, prefix: str) -> torch.Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        batch.tap(prefix, "mlp.gate_proj", gate)
        batch.tap(prefix, "mlp.up_proj", up)
        batch.tap(prefix, "mlp.act", product := act(gate, up))
        batch.tap(prefix, "mlp.down_proj", out := self.down_proj(product))
        return out

    return replacing((MLP, "__call__", call))


def _without_final_norm(build: Callable[..., Decoder], *args: Any, **kwargs: Any) -> Decoder:
    return replace(build(*args, **kwargs), norm=torch.clone)  # type: ignore[arg-type]


_fault = table_of(category=Category.NORM, row=FIRST)
FAULTS = [
    _fault("qk-norm-skipped-in-decode", "Decode leaves q and k as they are projected.",
           replacing((Attention, "_project", _skip_qk_norm_in_decode)), "norm is skipped", _LAYER + "self_attn.q_norm",
           row=FIRST_DECODE, instance="aprender#2085"),
    _fault("qk-norm-over-all-heads", "q and k are normalised over all heads together.", edited_layers(_over_all_heads),
           "over all heads", _LAYER + "self_attn.q_norm", instance="vllm-metal#692"),
    _fault("norm-eps-too-large", "eps is 1e-5 where config.json says 1e-6.", _with_eps(1e-5), "eps: 1e-05",
           _LAYER + "input_layernorm", instance="llama.cpp#2373"),
    _fault("norm-eps-too-small", "eps is 1e-6 where config.json says 1e-5.", _with_eps(1e-6), "eps: 1e-06",
           _LAYER + "input_layernorm", setting=FaultConfig(model="llama-tiny"), instance="llama.cpp#2373"),
    _fault("norm-variance-bf16", "The variance is computed in bfloat16.", norm_scaled_by(_coarse_variance),
           "variance is computed in|lower precision", _LAYER + "input_layernorm", instance="sglang#27540"),
    _fault("norm-overflow-fp16", "The squares are summed up in float16, and overflow.",
           norm_scaled_by(_squares_in_float16), "overflow", _LAYER + "input_layernorm", row=FIRST,
           setting=FaultConfig(dtype="float16", model="qwen2-tiny", scaled={"model.embed_tokens.weight": 256.0})),
    _fault("norm-weight-skipped", "The second norm of each layer is used without its weight.",
           edited_layers(_unweighted), "not applied", _LAYER + "post_attention_layernorm"),
    _fault("final-norm-skipped", "The logits are made of the residual stream itself.",
           replacing((reference_engine.loader, "build_decoder", _without_final_norm)), "norm is skipped", "model.norm"),
    _fault("residual-after-norm", "The residual is taken after the first norm.",
           replacing((DecoderLayer, "__call__", _residual_after_the_norm)), "residual is taken after the norm",
           _LAYER + "attn_residual"),
    _fault("norm-in-place", "A norm that works in place overwrites the residual it reads.",
           edited_layers(_norm_in_place), "overwrites it in place", _LAYER + "output", instance="nano-vllm#170"),
    _fault("residual-dropped", "What the MLP gives replaces the residual stream.",
           branches(lambda stream, branch: branch), "residual is not added", _LAYER + "output"),
    _fault("activation-of-up", "The activation is applied to up instead of gate.",
           _activation(lambda gate, up: gate * silu(up)), "gate and up are swapped", _LAYER + "mlp.act",
           instance="sglang#32430"),
    _fault("activation-gelu", "GELU is used for SiLU.", _activation(lambda gate, up: gelu(gate) * up),
           "activation is GELU", _LAYER + "mlp.act"),
    _fault("activation-skipped", "Gate and up are multiplied as they are.", _activation(lambda gate, up: gate * up),
           "no activation", _LAYER + "mlp.act"),
]  # fmt: skip
