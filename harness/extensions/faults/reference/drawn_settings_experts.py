"""Mistakes of decoders with and without experts, each under a dtype, checkpoint and schedule that were drawn."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.nn.functional import gelu, silu

from harness.extensions.faults.fault import NOTHING, Category
from harness.extensions.faults.reference.attention import attend
from harness.extensions.faults.reference.cache import stored
from harness.extensions.faults.reference.drawn_settings import (
    _fault,
    attention,
    ids_changed,
    mlp,
    once,
    projected,
    weight,
)
from harness.extensions.faults.reference.experts import mixed, routed, sum_of
from harness.extensions.faults.reference.injection import replacing
from harness.extensions.faults.reference.norm import branches, edited_layers, norm_scaled_by
from harness.extensions.faults.reference.position import frequencies_changed, positions_changed, rotary
from harness.extensions.faults.reference.weights import loaded
from reference_engine.families.experts import Expert
from reference_engine.kv_cache import KVCache
from reference_engine.layers import RMSNorm
from reference_engine.rotary import rotate_half


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


FAULTS = [
    _fault("frequencies-rooted", Category.POSITION, "Frequencies rooted.", frequencies_changed(lambda c, f: f.sqrt()),
        "theta", "model.layers.0.q_rope", "qwen3-tiny", "float32", "prefix-hit"),
    _fault("frequencies-one-off", Category.POSITION, "Frequencies one off.", frequencies_changed(lambda c,
            f: f.roll(1)),
        "another order", "model.layers.0.q_rope", "qwen2-tiny", "bfloat16", "plain"),
    _fault("positions-reversed-in-a-step", Category.POSITION, "Positions reversed in a step.",
        positions_changed(lambda p, chunks: p.flip(0)), "position", "model.layers.0.q_rope", "qwen3-tiny", "float16",
        "batched"),
    _fault("positions-halved", Category.POSITION, "Positions halved.", positions_changed(lambda p, chunks: p // 2),
        NOTHING, "model.layers.0.q_rope", "qwen3-tiny", "float32", "chunked:7"),
    _fault("first-head-not-turned", Category.POSITION, "First head not turned.", rotary(rotated_head), NOTHING,
        "model.layers.0.q_rope", "qwen2-tiny", "float16", "forked"),
    _fault("one-pair-twice-as-fast", Category.POSITION, "One pair twice as fast.", frequencies_changed(one_pair_faster),
        NOTHING, "model.layers.0.q_rope", "llama-tiny", "bfloat16", "mixed:8"),
    _fault("eps-hundredfold", Category.NORM, "Eps hundredfold.",
        norm_scaled_by(lambda norm, x: torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 100 * norm.eps)), "eps",
        "model.layers.0.input_layernorm", "llama-tiny", "bfloat16", "batched"),
    _fault("root-of-8-bits", Category.NORM, "Root of 8 bits.", norm_scaled_by(coarse_root), "lower precision|bfloat16",
        "model.layers.0.input_layernorm", "llama-tiny", "float32", "mixed:8"),
    _fault("last-element-not-in-the-mean", Category.NORM, "Last element not in the mean.",
        norm_scaled_by(without_the_last), NOTHING, "model.layers.0.input_layernorm", "qwen3-tiny", "bfloat16",
        "batched"),
    _fault("norm-weight-squared", Category.NORM, "Norm weight squared.", replacing((RMSNorm, "__call__",
        once(weight_squared))),
        "applied twice", "model.layers.0.input_layernorm", "qwen2-tiny", "bfloat16", "batched"),
    _fault("final-norm-of-a-layer", Category.NORM, "Final norm of a layer.",
        copied("model.norm.weight", "model.layers.2.input_layernorm.weight"), "weights? (is|are) th", "model.norm",
        "qwen3-tiny", "bfloat16", "mixed:8"),
    _fault("norms-of-a-layer-exchanged", Category.NORM, "Norms of a layer exchanged.",
        exchanged("input_layernorm.weight", "post_attention_layernorm.weight"), "weights? (is|are) th",
        "model.layers.1.input_layernorm", "llama-tiny", "float32", "mixed:8"),
    _fault("gate-of-a-sigmoid", Category.WIRING, "Gate of a sigmoid.", mlp(lambda g, u: g.sigmoid() * u), "sigmoid",
        "model.layers.0.mlp.act", "qwen2-tiny", "bfloat16", "batched"),
    _fault("silu-with-a-slope", Category.WIRING, "Silu with a slope.", mlp(lambda g, u: g * (1.1 * g).sigmoid() * u),
        NOTHING, "model.layers.0.mlp.act", "llama-tiny", "float16", "forked"),
    _fault("up-negated", Category.WIRING, "Up negated.", mlp(lambda g, u: silu(g) * -u), "gain of -1|sign",
        "model.layers.0.mlp.act", "qwen3-tiny", "float16", "chunked:7"),
    _fault("gelu-by-tanh", Category.WIRING, "Gelu by tanh.", mlp(lambda g, u: gelu(g, approximate="tanh") * u), "GELU",
        "model.layers.0.mlp.act", "qwen3-tiny", "bfloat16", "mixed:8"),
    _fault("gate-with-a-bias", Category.WIRING, "Gate with a bias.", mlp(lambda g, u: silu(g + 0.1) * u), NOTHING,
        "model.layers.0.mlp.act", "qwen2-tiny", "float32", "mixed:8"),
    _fault("gate-clamped-before", Category.WIRING, "Gate clamped before.", mlp(lambda g, u: silu(g.clamp(max=0.5)) * u),
        NOTHING, "model.layers.0.mlp.act", "llama-tiny", "bfloat16", "preempted"),
    _fault("two-heads-exchanged", Category.ATTENTION, "Two heads exchanged.",
        attention(lambda q, k, v, m: attend(q, k, v, m)[:, [3, 1, 2, 0, *range(4, q.shape[1])]]),
        "heads are in another", "model.layers.0.attention", "qwen3-tiny", "bfloat16", "plain"),
    _fault("first-kv-head-for-all", Category.ATTENTION, "First kv head for all.",
        attention(lambda q, k, v, m: attend(q, k, v, m, heads=lambda n, kv: torch.zeros(n, dtype=torch.int64))),
        "wrong KV heads", "model.layers.0.attention", "qwen2-tiny", "float32", "prefix-hit"),
    _fault("values-without-their-mean", Category.CACHE, "Values without their mean.",
        attention(lambda q, k, v, m: attend(q, k, v - v.mean(dim=0, keepdim=True), m)), NOTHING,
        "model.layers.0.attention", "llama-tiny", "bfloat16", "forked"),
    _fault("softmax-with-a-one", Category.ATTENTION, "Softmax with a one.",
        scored(lambda s, n: torch.cat((s, torch.zeros_like(s[..., :1])), dim=-1).softmax(-1)[..., :-1]),
        "keys of zeros|sink|padding", "model.layers.0.attention", "llama-tiny", "bfloat16", "preempted"),
    _fault("last-five-keys", Category.ATTENTION, "Last five keys.",
        scored(lambda s, n: s.masked_fill(s.isfinite().flip(-1).cumsum(-1).flip(-1) > 5, -torch.inf).softmax(-1)),
        "last 5 tokens|window", "model.layers.0.attention", "qwen2-tiny", "float32", "chunked:7"),
    _fault("best-eight-keys", Category.ATTENTION, "Best eight keys.",
        scored(lambda s, n: s.masked_fill(s < s.topk(min(8, n), dim=-1).values[..., -1:], -torch.inf).softmax(-1)),
        NOTHING, "model.layers.0.attention", "qwen3-tiny", "float32", "plain"),
    _fault("scores-on-a-grid", Category.ATTENTION, "Scores on a grid.",
        scored(lambda s, n: ((8 * s).round() / 8).softmax(-1)), NOTHING, "model.layers.0.attention", "qwen2-tiny",
        "float32", "chunked:7"),
    _fault("probabilities-squared", Category.ATTENTION, "Probabilities squared.",
        scored(lambda s, n: (2 * s).softmax(-1)), "scale is", "model.layers.0.attention", "llama-tiny", "float32",
        "mixed:8"),
    _fault("probabilities-cut-off", Category.ATTENTION, "Probabilities cut off.",
        scored(lambda s, n: torch.where(s.softmax(-1) < 0.02, 0, s.softmax(-1))), NOTHING, "model.layers.0.attention",
        "qwen3-tiny", "float16", "forked"),
    _fault("heads-louder-one-by-one", Category.ATTENTION, "Heads louder one by one.",
        attention(lambda q, k, v, m: attend(q, k, v, m) * torch.linspace(1, 1.2, q.shape[1])[:, None].to(q)), NOTHING,
        "model.layers.0.attention", "qwen2-tiny", "float16", "prefix-hit"),
    _fault("values-negated", Category.CACHE, "Values negated.", stored(lambda c, k, v, s: (k, -v, s)),
            "gain of -1|sign",
        "model.layers.0.v_cache", "qwen2-tiny", "float32", "mixed:8"),
    _fault("keys-of-four-bits", Category.CACHE, "Keys of four bits.", stored(four_bits), "lower dtype|4 bits|grid",
        "model.layers.0.k_(rope|cache)", "qwen3-tiny", "bfloat16", "forked"),
    _fault("every-fourth-slot-zero", Category.CACHE, "Every fourth slot zero.", stored(every_fourth_lost),
        "zero|never written", "model.layers.0.(k_cache|v_cache|attention)", "llama-tiny", "float16", "prefix-hit"),
    _fault("one-element-sixteenfold", Category.CACHE, "One element sixteenfold.", stored(one_bit), "bit",
        "model.layers.0.k_(rope|cache)", "qwen3-tiny", "float32", "plain"),
    _fault("values-of-the-layer-before", Category.CACHE, "Values of the layer before.",
        replacing((KVCache, "store", once(by_layer_before))), "layer 0|model.layers.0",
        "model.layers.1.(v_cache|attention)",
        "llama-tiny", "float32", "prefix-hit"),
    _fault("key-before-its-norm", Category.POSITION, "Key before its norm.", projected(lambda q, k, v: (q, 1.01 * k,
            v)),
        "gain|scaled", "model.layers.0.(self_attn.k_(proj|norm)|k_rope|k_cache)", "qwen2-tiny", "float16", "preempted"),
    _fault("k-rows-half-a-head-off", Category.WEIGHTS, "K rows half a head off.", loaded(k_rows_rotated),
            "another order",
        "model.layers.1.self_attn.k_proj", "qwen2-tiny", "float32", "preempted"),
    _fault("columns-with-scales", Category.WEIGHTS, "Columns with scales.", weight("down_proj.weight", column_scales),
        "not quite|none of", "model.layers.1.mlp.down_proj", "qwen3-tiny", "float16", "forked"),
    _fault("half-of-a-weight-pruned", Category.WEIGHTS, "Half of a weight pruned.", weight("o_proj.weight", pruned),
        "not quite|none of", "model.layers.1.self_attn.o_proj", "qwen3-tiny", "bfloat16", "forked"),
    _fault("biases-doubled", Category.WEIGHTS, "Biases doubled.", loaded(biases_doubled), "added twice",
        "model.layers.0.self_attn.q_proj", "qwen2-tiny", "float16", "batched"),
    _fault("biases-of-k-and-v", Category.WEIGHTS, "Biases of k and v.", loaded(k_and_v_bias), "bias|offset",
        "model.layers.0.self_attn.k_proj", "qwen2-tiny", "float16", "prefix-hit"),
    _fault("head-rows-one-off", Category.WEIGHTS, "Head rows one off.",
        in_place("lm_head.weight", lambda w: w.roll(1, 0)), "another order", "lm_head", "qwen2-tiny", "float32",
        "plain"),
    _fault("ids-taken-for-others", Category.WEIGHTS, "Ids taken for others.", ids_changed(one_id_for_another), "token",
        "model.embed_tokens", "llama-tiny", "bfloat16", "chunked:7"),
    _fault("two-layers-of-one", Category.WEIGHTS, "Two layers of one.", weight("o_proj.weight", lambda w: w.flip(0)),
        "another order", "model.layers.1.self_attn.o_proj", "qwen2-tiny", "float32", "plain"),
    _fault("branch-subtracted", Category.WIRING, "Branch subtracted.", branches(lambda x, y: x - y), "subtracted",
        "model.layers.0.output", "qwen3-tiny", "float16", "preempted"),
    _fault("branch-of-the-row-before", Category.WIRING, "Branch of the row before.",
        branches(lambda x, y: x + y.roll(1, 0)), NOTHING, "model.layers.0.output", "qwen2-tiny", "bfloat16", "plain"),
    _fault("mlp-on-the-old-stream", Category.WIRING, "Mlp on the old stream.",
        branches(lambda stream, branch: stream + branch, of_input=True),
        "in the place of|residual is|residual = hidden_states` comes after",
        "model.layers.0.output", "llama-tiny", "bfloat16", "preempted"),
    _fault("stream-of-8-bits", Category.WIRING, "Stream of 8 bits.",
        branches(lambda x, y: (x + y).to(torch.float8_e4m3fn).to(x.dtype)), "float8", "model.layers.0.output",
        "qwen2-tiny", "float32", "chunked:7"),
    _fault("stream-bent", Category.WIRING, "Stream bent.", branches(lambda x, y: 4 * ((x + y) / 4).tanh()),
        "soft cap of 4", "model.layers.0.output", "llama-tiny", "bfloat16", "mixed:8"),
    _fault("layers-with-one-norm", Category.NORM, "Layers with one norm.",
        edited_layers(lambda layer: replace(layer, post_attention_layernorm=layer.input_layernorm)),
        "weights? (is|are) th", "model.layers.0.post_attention_layernorm", "llama-tiny", "bfloat16", "plain"),
    _fault("experts-with-gelu", Category.EXPERTS, "Experts with gelu.", replacing((Expert, "__call__",
        once(expert_gelu))),
        "GELU", "model.layers.0.mlp.experts", "qwen3-moe-tiny", "float32", "plain"),
    _fault("router-sharper", Category.EXPERTS, "Router sharper.", routed(hot), NOTHING,
        "model.layers.0.mlp.gate.(1|topk)", "qwen3-moe-tiny", "float16", "batched"),
    _fault("second-expert-behind-the-first", Category.EXPERTS, "Second expert behind the first.",
            routed(second_is_first),
        NOTHING, "model.layers.0.mlp.gate.(1|topk)", "qwen3-moe-tiny", "float32", "preempted"),
    _fault("experts-full", Category.EXPERTS, "Experts full.", mixed(full), NOTHING, "model.layers.0.mlp.experts",
        "qwen3-moe-tiny", "float16", "mixed:8"),
]  # fmt: skip
