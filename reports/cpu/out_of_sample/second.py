"""A second list of bugs that are in no catalogue; see first.py.

    python reports/cpu/out_of_sample/second.py [--seed 0] [--draws 1] [--only NAME ...] [--out FILE]

They were written down, with what may truly be said of each, after the explanations of single pairs, heads, rows, caps
and states, and before any of them was run.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from first import (
    NOTHING,
    Bug,
    attention,
    ids_changed,
    main,
    mlp,
    projected,
    weight,
)
from torch.nn.functional import gelu, silu

from harness.extensions.faults.attention import attend
from harness.extensions.faults.cache import stored
from harness.extensions.faults.experts import mixed, routed, sum_of
from harness.extensions.faults.injection import replacing
from harness.extensions.faults.norm import branches, edited_layers, norm_scaled_by
from harness.extensions.faults.position import frequencies_changed, positions_changed, rotary
from harness.extensions.faults.weights import loaded
from reference_engine.families.experts import Expert
from reference_engine.kv_cache import KVCache
from reference_engine.layers import RMSNorm
from reference_engine.rotary import rotate_half

MOE = ("qwen3-moe-tiny",)


def scored(change: Callable[[torch.Tensor, int], torch.Tensor]) -> Any:
    """Change the probabilities: `change` gets masked scores [N, T, C] and the number of keys."""
    return attention(lambda q, k, v, m: attend(q, k, v, m, softmax=lambda scores: change(scores, len(k))))


def rotated_head(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """The first head stays as it was."""
    turned = x * cos + rotate_half(x) * sin
    return torch.cat((x[:, :1], turned[:, 1:]), dim=1)


def one_pair_faster(_config: Any, frequencies: torch.Tensor) -> torch.Tensor:
    return frequencies * torch.where(torch.arange(len(frequencies)) == 2, 2.0, 1.0)


def coarse_root(norm: RMSNorm, x: torch.Tensor) -> torch.Tensor:
    """A root from a table of 8 bits."""
    return torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + norm.eps).to(torch.bfloat16).to(torch.float32)


def without_the_last(norm: RMSNorm, x: torch.Tensor) -> torch.Tensor:
    return torch.rsqrt(x[..., :-1].pow(2).mean(-1, keepdim=True) + norm.eps)


def weight_squared(_: Any) -> Any:
    def call(self: RMSNorm, x: torch.Tensor) -> torch.Tensor:
        x32 = x.float()
        normed = x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight_X * self.weight_X * normed.to(x.dtype)

    return call


def exchanged(first: str, second: str, layer: int = 1) -> Any:
    def change(weights: dict[str, torch.Tensor], _config: Any) -> None:
        a, b = (f"model.layers.{layer}.{name}" for name in (first, second))
        weights[a], weights[b] = weights[b], weights[a]

    return loaded(change)


def copied(target: str, source: str) -> Any:
    def change(weights: dict[str, torch.Tensor], _config: Any) -> None:
        weights[target] = weights[source]

    return loaded(change)


def in_place(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    def changed(weights: dict[str, torch.Tensor], _config: Any) -> None:
        if name in weights:
            weights[name] = change(weights[name]).contiguous()

    return loaded(changed)


def k_and_v_bias(weights: dict[str, torch.Tensor], config: Any) -> None:
    size = config.num_key_value_heads * config.head_dim
    for name in [name for name in weights if name.endswith("qkv_proj.bias")]:
        q, k, v = weights[name].split([len(weights[name]) - 2 * size, size, size])
        weights[name] = torch.cat((q, v, k))


def biases_doubled(weights: dict[str, torch.Tensor], _config: Any) -> None:
    for name in [name for name in weights if name.endswith("qkv_proj.bias")]:
        weights[name] = weights[name] * 2


def k_rows_rotated(weights: dict[str, torch.Tensor], config: Any) -> None:
    """Within each head of k the second half of the rows stands before the first."""
    size = config.num_key_value_heads * config.head_dim
    name = "model.layers.1.self_attn.qkv_proj.weight"
    q, k, v = weights[name].split([len(weights[name]) - 2 * size, size, size])
    k = k.unflatten(0, (-1, config.head_dim)).roll(config.head_dim // 2, dims=1).flatten(0, 1)
    weights[name] = torch.cat((q, k, v))


def column_scales(x: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator().manual_seed(6)
    return x * (1 + 0.1 * torch.randn(x.shape[1], generator=generator)).to(x)


def pruned(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x.abs() < x.abs().median(), 0, x)


def one_id_for_another(ids: torch.Tensor) -> torch.Tensor:
    """Every fourth token of the vocabulary is taken for the one after it."""
    return torch.where(ids % 4 == 0, ids + 1, ids)


def four_bits(cache: Any, k: torch.Tensor, v: torch.Tensor, slots: Any) -> Any:
    scale = k.abs().amax(-1, keepdim=True) / 7
    return (k / scale).round() * scale, v, slots


def every_fourth_lost(cache: Any, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> Any:
    keep = (slots % 4 != 3)[:, None, None]
    return torch.where(keep, k, 0), torch.where(keep, v, 0), slots


def one_bit(cache: Any, k: torch.Tensor, v: torch.Tensor, slots: Any) -> Any:
    k = k.clone()
    k[:, 0, 0] *= 2.0**4
    return k, v, slots


def by_layer_before(store: Any) -> Any:
    """The values of layer 1 are those that layer 0 stored."""
    kept: dict[str, torch.Tensor] = {}

    def call(self: Any, layer: int, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
        store(self, layer, k, kept["v"] if layer == 1 else v, slots)
        kept["v"] = v

    return call


def hot(self: Any, logits: torch.Tensor) -> Any:
    weights, chosen = (2 * logits).softmax(-1, dtype=torch.float32).topk(self.num_chosen, dim=-1)
    return weights / weights.sum(-1, keepdim=True), chosen


def second_is_first(self: Any, logits: torch.Tensor) -> Any:
    weights, chosen = logits.softmax(-1, dtype=torch.float32).topk(self.num_chosen, dim=-1)
    chosen = chosen.clone()
    chosen[:, 1] = (chosen[:, 0] + 1) % logits.shape[1]
    return weights / weights.sum(-1, keepdim=True), chosen


def full(self: Any, x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """An expert takes four tokens of a step, and no more."""
    place = torch.zeros_like(chosen)
    for number in chosen.unique().tolist():
        taken = (chosen == number).flatten().cumsum(0).view_as(chosen)
        place = torch.where(chosen == number, taken, place)
    return sum_of(self, x, weights.masked_fill(place > 4, 0), chosen)


def expert_gelu(_: Any) -> Any:
    def call(self: Expert, x: torch.Tensor, activation: Any) -> torch.Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(gelu(gate) * up)

    return call


BUGS: dict[str, Bug] = {
    # rotary
    "frequencies-rooted": Bug(inject=frequencies_changed(lambda c, f: f.sqrt()), truth="theta"),
    "frequencies-one-off": Bug(inject=frequencies_changed(lambda c, f: f.roll(1)), truth="another order"),
    "positions-reversed-in-a-step": Bug(inject=positions_changed(lambda p, chunks: p.flip(0)), truth="position"),
    "positions-halved": Bug(inject=positions_changed(lambda p, chunks: p // 2), truth=NOTHING),
    "first-head-not-turned": Bug(inject=rotary(rotated_head), truth=NOTHING),
    "one-pair-twice-as-fast": Bug(inject=frequencies_changed(one_pair_faster), truth=NOTHING),
    # norms
    "eps-hundredfold": Bug(inject=norm_scaled_by(
        lambda norm, x: torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 100 * norm.eps)), truth="eps"),
    "root-of-8-bits": Bug(inject=norm_scaled_by(coarse_root), truth="lower precision|bfloat16"),
    "last-element-not-in-the-mean": Bug(inject=norm_scaled_by(without_the_last), truth=NOTHING),
    "norm-weight-squared": Bug(inject=replacing((RMSNorm, "__call__", weight_squared)), truth="applied twice"),
    "final-norm-of-a-layer": Bug(inject=copied("model.norm.weight", "model.layers.2.input_layernorm.weight"),
                                 truth="weight is that of"),
    "norms-of-a-layer-exchanged": Bug(inject=exchanged("input_layernorm.weight", "post_attention_layernorm.weight"),
                                      truth="weight is that of"),
    # MLP
    "gate-of-a-sigmoid": Bug(inject=mlp(lambda g, u: g.sigmoid() * u), truth="sigmoid"),
    "silu-with-a-slope": Bug(inject=mlp(lambda g, u: g * (1.1 * g).sigmoid() * u), truth=NOTHING),
    "up-negated": Bug(inject=mlp(lambda g, u: silu(g) * -u), truth="gain of -1|sign"),
    "gelu-by-tanh": Bug(inject=mlp(lambda g, u: gelu(g, approximate="tanh") * u), truth="GELU"),
    "gate-with-a-bias": Bug(inject=mlp(lambda g, u: silu(g + 0.1) * u), truth=NOTHING),
    "gate-clamped-before": Bug(inject=mlp(lambda g, u: silu(g.clamp(max=0.5)) * u), truth=NOTHING),
    # attention
    "two-heads-exchanged": Bug(inject=attention(
        lambda q, k, v, m: attend(q, k, v, m)[:, [3, 1, 2, 0, *range(4, q.shape[1])]]), truth="heads are in another"),
    "first-kv-head-for-all": Bug(inject=attention(
        lambda q, k, v, m: attend(q, k, v, m, heads=lambda n, kv: torch.zeros(n, dtype=torch.int64))),
        truth="wrong KV heads"),
    "values-without-their-mean": Bug(inject=attention(
        lambda q, k, v, m: attend(q, k, v - v.mean(dim=0, keepdim=True), m)), truth=NOTHING),
    "softmax-with-a-one": Bug(inject=scored(
        lambda s, n: torch.cat((s, torch.zeros_like(s[..., :1])), dim=-1).softmax(-1)[..., :-1]),
        truth="keys of zeros|sink|padding"),
    "last-five-keys": Bug(inject=scored(
        lambda s, n: s.masked_fill(s.isfinite().flip(-1).cumsum(-1).flip(-1) > 5, -torch.inf).softmax(-1)),
        truth="last 5 tokens|window"),
    "best-eight-keys": Bug(inject=scored(
        lambda s, n: s.masked_fill(s < s.topk(min(8, n), dim=-1).values[..., -1:], -torch.inf).softmax(-1)),
        truth=NOTHING),
    "scores-on-a-grid": Bug(inject=scored(lambda s, n: ((8 * s).round() / 8).softmax(-1)), truth=NOTHING),
    "probabilities-squared": Bug(inject=scored(lambda s, n: (2 * s).softmax(-1)), truth="scale is"),
    "probabilities-cut-off": Bug(inject=scored(lambda s, n: torch.where(s.softmax(-1) < 0.02, 0, s.softmax(-1))),
                                 truth=NOTHING),
    "heads-louder-one-by-one": Bug(inject=attention(
        lambda q, k, v, m: attend(q, k, v, m) * torch.linspace(1, 1.2, q.shape[1])[:, None].to(q)), truth=NOTHING),
    # cache
    "values-negated": Bug(inject=stored(lambda c, k, v, s: (k, -v, s)), truth="gain of -1|sign"),
    "keys-of-four-bits": Bug(inject=stored(four_bits), truth="lower dtype|4 bits|grid"),
    "every-fourth-slot-zero": Bug(inject=stored(every_fourth_lost), truth="zero|never written"),
    "one-element-sixteenfold": Bug(inject=stored(one_bit), truth="bit"),
    "values-of-the-layer-before": Bug(inject=replacing((KVCache, "store", by_layer_before)),
                                      truth="layer 0|model.layers.0"),
    "key-before-its-norm": Bug(inject=projected(lambda q, k, v: (q, 1.01 * k, v)), truth="gain|scaled"),
    # weights
    "k-rows-half-a-head-off": Bug(inject=loaded(k_rows_rotated), truth="another order"),
    "columns-with-scales": Bug(inject=weight("down_proj.weight", column_scales), truth="not quite|none of"),
    "half-of-a-weight-pruned": Bug(inject=weight("o_proj.weight", pruned), truth="not quite|none of"),
    "biases-doubled": Bug(inject=loaded(biases_doubled), truth="added twice", models=("qwen2-tiny",)),
    "biases-of-k-and-v": Bug(inject=loaded(k_and_v_bias), truth="bias|offset", models=("qwen2-tiny",)),
    "head-rows-one-off": Bug(inject=in_place("lm_head.weight", lambda w: w.roll(1, 0)), truth="another order",
                             models=("qwen2-tiny",)),
    "ids-taken-for-others": Bug(inject=ids_changed(one_id_for_another), truth="token"),
    "two-layers-of-one": Bug(inject=weight("o_proj.weight", lambda w: w.flip(0)), truth="another order"),
    # stream
    "branch-subtracted": Bug(inject=branches(lambda x, y: x - y), truth="subtracted"),
    "branch-of-the-row-before": Bug(inject=branches(lambda x, y: x + y.roll(1, 0)), truth=NOTHING),
    "mlp-on-the-old-stream": Bug(inject=branches(lambda stream, branch: stream + branch, of_input=True),
                                 truth="in the place of|residual is"),
    "stream-of-8-bits": Bug(inject=branches(lambda x, y: (x + y).to(torch.float8_e4m3fn).to(x.dtype)),
                            truth="float8"),
    "stream-bent": Bug(inject=branches(lambda x, y: 4 * ((x + y) / 4).tanh()), truth="soft cap of 4"),
    "layers-with-one-norm": Bug(inject=edited_layers(
        lambda layer: replace(layer, post_attention_layernorm=layer.input_layernorm)), truth="weight is that of"),
    # experts
    "experts-with-gelu": Bug(inject=replacing((Expert, "__call__", expert_gelu)), truth="GELU", models=MOE),
    "router-sharper": Bug(inject=routed(hot), truth=NOTHING, models=MOE),
    "second-expert-behind-the-first": Bug(inject=routed(second_is_first), truth=NOTHING, models=MOE),
    "experts-full": Bug(inject=mixed(full), truth=NOTHING, models=MOE),
}  # fmt: skip


if __name__ == "__main__":
    main(BUGS)
