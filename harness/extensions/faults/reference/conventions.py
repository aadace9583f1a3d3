"""Legitimate orders of rounding, of which none may alarm, and orders just outside of them, which are wrong.

Numbers in 8 bits are kept as ggml keeps them; the formulas are written once more here, apart from the judge's own.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.nn.functional import linear

import reference_engine.attention.paged
from harness.base.numerics import Numerics
from harness.extensions.faults.fault import FIRST, SECOND, Category, FaultConfig, Variant, table_of
from harness.extensions.faults.reference.cache import stored
from harness.extensions.faults.reference.injection import replacing
from harness.extensions.faults.reference.norm import edited_layers
from harness.extensions.faults.reference.position import frequencies_changed
from reference_engine.kv_cache import KVCache
from reference_engine.layers import Linear
from reference_engine.model import DecoderLayer
from reference_engine.rotary import RotaryEmbedding

_BLOCK = 32


def quantised(x: torch.Tensor, block: int = _BLOCK) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the integers [..., I/block, block] and scales [..., I/block, 1] of Q8_0, or of other blocks."""
    blocks = x.float().unflatten(-1, (-1, block))
    scale = blocks.abs().amax(dim=-1, keepdim=True) / 127
    inverse = torch.where(scale > 0, 1 / scale, 0.0)
    return (blocks * inverse).round(), scale.half().float()


def in_format(x: torch.Tensor, name: str) -> torch.Tensor:
    """Return a checkpoint's tensor rounded to a dtype; to `Q8_0` if it is a matrix."""
    if name != "Q8_0":
        return x.to(getattr(torch, name)).to(x.dtype)
    if x.dim() != 2:
        return x
    integers, scale = quantised(x)
    return (integers * scale).flatten(-2).to(x.dtype)


MODELS = ("llama-tiny", "qwen2-tiny", "qwen3-tiny")
_FLOAT32, _HALF = ("float32",), ("bfloat16", "float16")
_SAME = 1e-6
"""Relative distance of two frequencies that float32 makes of one."""
Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


# Rotary embeddings.


def _angles(compute: Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]) -> Any:
    """Replace the angles [T, H/2]: `compute` gets positions [T, 1], the frequencies [H/2] and theta."""

    def make(init: Callable[..., None], self: Any, config: Any, *args: Any) -> None:
        init(self, config, *args)
        self.theta = config.rope.theta

    def call(original: Any, self: Any, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        angles = compute(positions[:, None], self.inv_freq, self.theta)
        turned = torch.cat((angles, angles), dim=-1)[:, None]
        return turned.cos().to(self._dtype), turned.sin().to(self._dtype)

    return replacing((RotaryEmbedding, "__init__", make), (RotaryEmbedding, "__call__", call))


def _exponents(inv_freq: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(len(inv_freq), dtype=dtype) / len(inv_freq)


def _stretch(inv_freq: torch.Tensor, theta: float) -> torch.Tensor:
    """The factor of rope scaling on a frequency: exactly 1 without any, as engines then have no such step."""
    factor = inv_freq * theta ** _exponents(inv_freq, torch.float32)
    return torch.where((factor - 1).abs() < _SAME, 1.0, factor)


def _in_float64(positions: torch.Tensor, inv_freq: torch.Tensor, theta: float) -> torch.Tensor:
    return positions.double() * inv_freq.double()


def _frequencies_in_float64(positions: torch.Tensor, inv_freq: torch.Tensor, theta: float) -> torch.Tensor:
    exact = theta ** -_exponents(inv_freq, torch.float64) * _stretch(inv_freq, theta)
    return positions.float() * exact.float()


def _divided(positions: torch.Tensor, inv_freq: torch.Tensor, theta: float) -> torch.Tensor:
    return positions.float() / theta ** _exponents(inv_freq, torch.float32) * _stretch(inv_freq, theta)


def _by_logarithm(positions: torch.Tensor, inv_freq: torch.Tensor, theta: float) -> torch.Tensor:
    rate = torch.exp(_exponents(inv_freq, torch.float32) * -torch.tensor(theta).log())
    return positions.float() * (rate * _stretch(inv_freq, theta))


def _one_from_another(positions: torch.Tensor, inv_freq: torch.Tensor, theta: float) -> torch.Tensor:
    factor = torch.tensor(theta, dtype=torch.float32) ** (-1.0 / len(inv_freq))
    columns = [positions.float()]
    for _ in range(len(inv_freq) - 1):
        columns.append(columns[-1] * factor)
    return torch.cat(columns, dim=1) * _stretch(inv_freq, theta)


# Products.


def products(compute: Product) -> Any:
    """Replace every product with a weight: `compute` gets x [T, I] and the weight [O, I], both in float32."""

    def call(original: Any, self: Linear, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight_OI.to_dense() if self.weight_OI.is_mkldnn else self.weight_OI
        out = compute(x.float(), weight.float())
        return (out if self.bias_O is None else out + self.bias_O.float()).to(x.dtype)

    return replacing((Linear, "__call__", call))


def rounded_inputs(dtype: torch.dtype, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Multiply in float32 what is rounded first."""
    return linear(x.to(dtype).float(), weight)


def quantised_inputs(block: int, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Add up the products of integers block by block, as ggml does; the weight is one of Q8_0."""
    (xs, scale_x), (ws, scale_w) = quantised(x, block), quantised(weight)
    ws = (ws * scale_w).flatten(-2).unflatten(-1, (-1, block))
    return torch.einsum("tbi,obi,tb->to", xs, ws, scale_x[..., 0])


def _in_parts(count: int, sums: torch.dtype, x: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Round what each of so many ranks makes of its share, and add all up in `sums`."""
    shares = zip(x.chunk(count, dim=-1), weight.chunk(count, dim=-1), strict=True)
    total = torch.zeros((), dtype=sums)
    for share, columns in shares:
        total = total + linear(share, columns).to(dtype).to(sums)
    return total


def _ranks(count: int, sums: torch.dtype, dtype: torch.dtype) -> Any:
    """Output projections as so many ranks compute them."""

    def product(projection: Any) -> Callable[[torch.Tensor], torch.Tensor]:
        weight = projection.weight_OI.to_dense() if projection.weight_OI.is_mkldnn else projection.weight_OI
        return lambda x: _in_parts(count, sums, x.float(), weight.float(), dtype).to(dtype)

    def edit(layer: DecoderLayer) -> DecoderLayer:
        attention: Any = layer.attention
        mlp: Any = layer.mlp  # of a dense model
        attention = replace(attention, o_proj=product(attention.o_proj))
        return replace(layer, attention=attention, mlp=replace(mlp, down_proj=product(mlp.down_proj)))

    return edited_layers(edit)


# Norms and the residual stream.


def _normalised(x: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


def _summed_in_order(norm: Any, gain: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """Add the squares one after the other in float32, as a plain loop does."""

    def normed(x: torch.Tensor) -> torch.Tensor:
        squares = np.square(x.cpu().numpy(), dtype=np.float32)
        total = torch.from_numpy(np.add.accumulate(squares, axis=-1, dtype=np.float32)[..., -1:]).to(x.device)
        result: torch.Tensor = norm.weight_X * (x * (gain * torch.rsqrt(total / x.shape[-1] + norm.eps)))
        return result

    return normed


def norms_in_order(gain: float = 1.0) -> Callable[[DecoderLayer], DecoderLayer]:
    """Return what sums the squares of a layer's norms in order, and makes these too large."""

    def edit(layer: DecoderLayer) -> DecoderLayer:
        first: Any = _summed_in_order(layer.input_layernorm, gain)
        second: Any = _summed_in_order(layer.post_attention_layernorm, gain)
        return replace(layer, input_layernorm=first, post_attention_layernorm=second)

    return edit


def _unrounded_sums(
    call: Callable[..., Any], self: DecoderLayer, x: torch.Tensor, rotation: Any, batch: Any
) -> torch.Tensor:
    """Fused kernels normalise the sum of the stream before it is rounded."""
    normed = self.input_layernorm(x)
    batch.tap(self.prefix, "input_layernorm", normed)
    exact = x.float() + self.attention(normed, rotation, batch, self.prefix).float()
    x = exact.to(x.dtype)
    batch.tap(self.prefix, "attn_residual", x)
    norm = self.post_attention_layernorm
    normed = (norm.weight_X * _normalised(exact, norm.eps)).to(x.dtype)
    batch.tap(self.prefix, "post_attention_layernorm", normed)
    x = x + self.mlp(normed, batch, self.prefix)
    batch.tap(self.prefix, "output", x)
    return x


# A cache in a lower dtype.


def coarse_cache(dtype: torch.dtype) -> Any:
    """Keys and values are rounded when they are stored."""

    def rounded(x: torch.Tensor) -> torch.Tensor:
        return x.to(dtype).to(x.dtype)

    return stored(lambda cache, k, v, slots: (rounded(k), rounded(v), slots))


Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""q [N, H], keys and values [C, N, H] of one row, in float32, to its context [N, H]."""


def patched_attention(attend: Attend, kept: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Attend row by row from a cache; `kept` gives what it makes of keys and values."""

    def row(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        group = q.shape[0] // k.shape[1]
        return attend(q.float(), *(x.float().repeat_interleave(group, dim=1) for x in (k, v))).to(q.dtype)

    def chunk(
        original: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None = None
    ) -> torch.Tensor:
        ends = range(len(k) - len(q) + 1, len(k) + 1)
        return torch.stack([row(query, k[:end], v[:end]) for query, end in zip(q, ends, strict=True)])

    def single(
        original: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        keep = torch.ones(k.shape[:2], dtype=torch.bool) if mask is None else mask[:, 0, 0]
        return torch.stack([row(query, k[at, keep[at]], v[at, keep[at]]) for at, query in enumerate(q)])

    def store(original: Any, self: KVCache, layer: int, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
        original(self, layer, kept(k), kept(v), slots)

    return replacing(
        (reference_engine.attention.paged, "attend_chunk", chunk),
        (reference_engine.attention.paged, "attend_single", single),
        (KVCache, "store", store),
    )


def _in_float16(x: torch.Tensor) -> torch.Tensor:
    return x.half().to(x.dtype)


def _in_q8(x: torch.Tensor) -> torch.Tensor:
    integers, scale = quantised(x.float())
    return (integers * scale).flatten(-2).to(x.dtype)


def _products_with_q8(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Quantise the queries, too, as a product with quantised keys does; the values are added up in float32."""
    scores = torch.einsum("nh,cnh->nc", _in_q8(q), k) * q.shape[-1] ** -0.5
    return torch.einsum("nc,cnh->nh", scores.softmax(dim=-1), v)


def products_in(dtype: torch.dtype) -> Attend:
    """Round queries and probabilities to the cache's dtype, as a product with a cache of 16 bits does."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        scores = torch.einsum("nh,cnh->nc", q.to(dtype).float(), k) * q.shape[-1] ** -0.5
        return torch.einsum("nc,cnh->nh", scores.softmax(dim=-1).to(dtype).float(), v)

    return attend


def scaled_first(dtype: torch.dtype, factor: float = 1.0) -> Attend:
    """Scale the queries in a dtype by a scale of it, and round scores and probabilities to it, as MLX does."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        query = q.to(dtype) * torch.tensor(factor * q.shape[-1] ** -0.5, dtype=dtype)
        scores = torch.einsum("nh,cnh->nc", query.float(), k).to(dtype).float()
        return torch.einsum("nc,cnh->nh", scores.softmax(dim=-1).to(dtype).float(), v)

    return attend


def flash_in(dtype: torch.dtype) -> Attend:
    """Go through the keys one by one and keep the sum of the values in the cache's dtype, as ggml's kernel does."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        scores = torch.einsum("nh,cnh->nc", q.to(dtype).float(), k) * q.shape[-1] ** -0.5
        most, total = torch.full((len(q), 1), -torch.inf), torch.zeros(len(q), 1)
        context = torch.zeros_like(q).to(dtype)
        for score, value in zip(scores.T[..., None], v, strict=True):
            above = torch.maximum(most, score)
            shrunk, weight = (most - above).exp(), (score - above).exp()
            context = ((context * shrunk.to(dtype)).float() + value * weight).to(dtype)
            total, most = total * shrunk + weight, above
        return context.float() / total

    return attend


_F16 = Numerics(cache="float16")
_CONVENTIONS: dict[str, tuple[tuple[str, ...], Callable[[str], Any], Mapping[str, Any]]] = {
    "rotary-float64": (_FLOAT32, lambda dtype: _angles(_in_float64), {}),
    "rotary-frequencies-float64": (_FLOAT32, lambda dtype: _angles(_frequencies_in_float64), {}),
    "rotary-divided": (_FLOAT32, lambda dtype: _angles(_divided), {}),
    "rotary-by-logarithm": (_FLOAT32, lambda dtype: _angles(_by_logarithm), {}),
    "rotary-one-from-another": (_FLOAT32, lambda dtype: _angles(_one_from_another), {}),
    "inputs-bfloat16": (
        _FLOAT32, lambda dtype: products(partial(rounded_inputs, torch.bfloat16)), {"weights_in": "bfloat16"},
    ),
    "inputs-float16": (
        _FLOAT32, lambda dtype: products(partial(rounded_inputs, torch.float16)), {"weights_in": "float16"},
    ),
    "inputs-q8": (
        _FLOAT32, lambda dtype: products(partial(quantised_inputs, 32)),
        {"weights_in": "Q8_0", "numerics": Numerics(weights=("Q8_0",))},
    ),
    "two-ranks": (_HALF, lambda dtype: _ranks(2, torch.float32, getattr(torch, dtype)), {}),
    "four-ranks-in-16-bits": (
        _HALF, lambda dtype: _ranks(4, getattr(torch, dtype), getattr(torch, dtype)),
        {"numerics": Numerics(num_ranks=4)},
    ),
    "queries-scaled-first": (
        _HALF, lambda dtype: patched_attention(scaled_first(getattr(torch, dtype)), lambda x: x), {},
    ),
    "unrounded-sums": (_HALF, lambda dtype: replacing((DecoderLayer, "__call__", _unrounded_sums)), {}),
    "squares-summed-in-order": (_FLOAT32, lambda dtype: edited_layers(norms_in_order()), {}),
    "cache-float16": (_FLOAT32, lambda dtype: coarse_cache(torch.float16), {"numerics": _F16}),
    "cache-bfloat16": (_FLOAT32, lambda dtype: coarse_cache(torch.bfloat16), {"numerics": Numerics(cache="bfloat16")}),
    "cache-float16-products": (
        _FLOAT32, lambda dtype: patched_attention(products_in(torch.float16), _in_float16), {"numerics": _F16},
    ),
    "cache-float16-flash": (
        _FLOAT32, lambda dtype: patched_attention(flash_in(torch.float16), _in_float16), {"numerics": _F16},
    ),
    "cache-q8": (
        _FLOAT32, lambda dtype: patched_attention(_products_with_q8, _in_q8), {"numerics": Numerics(cache="Q8_0")},
    ),
}  # fmt: skip
"""By name: dtypes, what plants it, and fields of the setting."""


def variants() -> Iterator[Variant]:
    """Yield an engine of every convention, of every model."""
    for model in MODELS:
        for name, (dtypes, inject, fields) in _CONVENTIONS.items():
            for dtype in dtypes:
                yield Variant(
                    id=f"{name}/{model}/{dtype}",
                    summary=name,
                    setting=FaultConfig(model=model, dtype=dtype, **fields),
                    inject=inject(dtype),
                )


_SITES = ("input_layernorm", "self_attn.q_proj", "q_rope", "k_cache", "attention")
_NORM, _Q_PROJ, _Q_ROPE, _K_CACHE, _ATTENTION = (f"model.layers.0.{site}" for site in _SITES)


_fault = table_of(category=Category.NUMBERS, tap=_Q_PROJ, row=FIRST)
FAULTS = [
    _fault("inputs-bf16-of-fp32-weights", "Inputs are rounded to bfloat16, and the weights are float32.",
           products(partial(rounded_inputs, torch.bfloat16)), "input of the product is rounded to bfloat16"),
    _fault("inputs-fp16-of-bf16-weights", "Inputs are rounded to float16, and the weights are bfloat16.",
           products(partial(rounded_inputs, torch.float16)), "inputs? .*float16", weights_in="bfloat16"),
    _fault("inputs-q8-undeclared", "Inputs are quantised in blocks of 32, and the engine says nothing of it.",
           products(partial(quantised_inputs, 32)), "input.*int8.*for 32 inputs", weights_in="Q8_0"),
    _fault("inputs-q8-blocks-of-16", "Inputs are quantised in blocks of 16 where Q8_0 has blocks of 32.",
           products(partial(quantised_inputs, 16)), "input.*int8.*for 16 inputs", weights_in="Q8_0",
           numerics=Numerics(weights=("Q8_0",))),
    _fault("rope-frequencies-fp16", "The frequencies are kept in float16.",
           frequencies_changed(lambda config, inv_freq: inv_freq.half().float()), "frequencies in float16",
           tap=_Q_ROPE, row=SECOND),
    _fault("rope-frequencies-off-by-1e-6", "The frequencies are too high by a part in a million.",
           frequencies_changed(lambda config, inv_freq: inv_freq * (1 + 1e-6)),
           "frequencies are off by a factor of 1.000001", tap=_Q_ROPE, row=SECOND),
    _fault("squares-summed-in-order-and-large", "The squares are summed in order, and the norm is too large by 4e-6.",
           edited_layers(norms_in_order(1 + 4e-6)), "constant gain", tap=_NORM),
    _fault("queries-scaled-first-and-large", "The queries are scaled in bfloat16, by 1.25 times the scale.",
           patched_attention(scaled_first(torch.bfloat16, 1.25), lambda x: x), "softmax scale", tap=_ATTENTION,
           row=SECOND, dtype="bfloat16"),
    _fault("cache-bf16-declared-fp16", "The cache is declared to be float16, and is bfloat16.",
           coarse_cache(torch.bfloat16), "lower dtype: bfloat16", tap=_K_CACHE, numerics=Numerics(cache="float16")),
]  # fmt: skip
