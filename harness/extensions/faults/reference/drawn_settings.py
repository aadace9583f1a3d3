"""Mistakes of dense decoders in the reference engine, each under a dtype, checkpoint and schedule that were drawn."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.nn.functional import silu

import reference_engine.attention.paged
import reference_engine.kv_cache
import reference_engine.model
from harness.extensions.faults.fault import ANY_ROW, NOTHING, Category, Fault, FaultConfig
from harness.extensions.faults.reference.attention import attend, causal
from harness.extensions.faults.reference.cache import stored
from harness.extensions.faults.reference.injection import replacing
from harness.extensions.faults.reference.norm import branches, edited_layers, norm_scaled_by
from harness.extensions.faults.reference.position import frequencies_changed, positions_changed, rotary
from harness.extensions.faults.reference.weights import loaded
from reference_engine.layers import MLP, Embedding, RMSNorm
from reference_engine.model import Attention


def once(make: Callable[[Any], Callable[..., Any]]) -> Callable[..., Any]:
    """Call what `make` returns for the original; it may keep something from call to call."""
    held: list[Callable[..., Any]] = []

    def call(original: Any, *args: Any, **named: Any) -> Any:
        held[:] = held or [make(original)]
        return held[0](*args, **named)

    return call


def attention(change: Callable[..., torch.Tensor]) -> Any:
    """Compute attention of every row by `change`, of query [T, N, H], K and V [C, K, H] and a mask [T, C]."""

    def chunk(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None = None) -> torch.Tensor:
        return change(q, k, v, causal(len(q), len(k), window))

    def single(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: torch.Tensor | None) -> torch.Tensor:
        rows = []
        for at in range(len(q)):
            seen = torch.ones(k.shape[1], dtype=torch.bool) if visible is None else visible[at].flatten()
            rows.append(change(q[at : at + 1], k[at][seen], v[at][seen], torch.ones(1, int(seen.sum())).bool()))
        return torch.cat(rows)

    file = reference_engine.attention.paged
    return replacing((file, "attend_chunk", once(lambda _: chunk)), (file, "attend_single", once(lambda _: single)))


def mlp(act: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Any:
    def make(_: Any) -> Any:
        def call(self: MLP, x: torch.Tensor, batch: Any, prefix: str) -> torch.Tensor:
            gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
            inner = act(gate, up)
            out = self.down_proj(inner)
            for name, value in (("gate_proj", gate), ("up_proj", up), ("act", inner), ("down_proj", out)):
                batch.tap(prefix, f"mlp.{name}", value)
            return out

        return call

    return replacing((MLP, "__call__", once(make)))


def weight(ending: str, change: Callable[[torch.Tensor], torch.Tensor], layer: int = 1) -> Any:
    def changed(weights: dict[str, torch.Tensor], _config: Any) -> None:
        for name in [name for name in weights if name.startswith(f"model.layers.{layer}.") and name.endswith(ending)]:
            weights[name] = change(weights[name]).contiguous()

    return loaded(changed)


def half_turned(x: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def keys_unrotated() -> Any:
    """The query is turned, and the key is not: the query is turned first."""

    def make(original: Any) -> Any:
        calls = [0]

        def turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
            calls[0] += 1
            return original(x, cos, sin) if calls[0] % 2 else x

        return turn

    return replacing((reference_engine.model, "apply_rotary", once(make)))


def with_alibi(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    distance = torch.arange(len(k)) - (len(k) - len(q) + torch.arange(len(q)))[:, None]
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = torch.einsum("tnh,cnh->ntc", q.float(), k.float()) / q.shape[-1] ** 0.5 + 0.05 * distance
    weights = scores.masked_fill(~mask, -torch.inf).softmax(dim=-1)
    return torch.einsum("ntc,cnh->tnh", weights, v.float()).to(q.dtype)


def capped(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = torch.einsum("tnh,cnh->ntc", q.float(), k.float()) / q.shape[-1] ** 0.5
    weights = (2 * (scores / 2).tanh()).masked_fill(~mask, -torch.inf).softmax(dim=-1)
    return torch.einsum("ntc,cnh->tnh", weights, v.float()).to(q.dtype)


def without(places: Callable[[int], torch.Tensor]) -> Any:
    """Attention that does not see some keys, each row its own where it has no other."""

    def compute(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        is_self = torch.arange(len(k)) == (len(k) - len(q) + torch.arange(len(q)))[:, None]
        return attend(q, k, v, mask & (is_self | ~places(len(k))))

    return attention(compute)


def channel(x: torch.Tensor, at: int, factor: float) -> torch.Tensor:
    x = x.clone()
    x[at] *= factor
    return x


def noisy(x: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return x + 0.2 * x.std() * torch.randn(x.shape, generator=generator).to(x)


def rows_noisy(x: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator().manual_seed(4)
    return x * (1 + 0.05 * torch.randn(len(x), generator=generator)).to(x)[:, None]


def head_negated(x: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    x[:32] *= -1
    return x


def norms_of_q_and_k(weights: dict[str, torch.Tensor], _config: Any) -> None:
    for name in [name for name in weights if name.endswith("q_norm.weight")]:
        k_name = name.replace("q_norm", "k_norm")
        weights[name], weights[k_name] = weights[k_name], weights[name]


def layers_exchanged(weights: dict[str, torch.Tensor], _config: Any) -> None:
    for name in [name for name in weights if name.startswith("model.layers.1.")]:
        next_name = name.replace("layers.1.", "layers.2.")
        weights[name], weights[next_name] = weights[next_name], weights[name]


def last_key_twice(original: Any) -> Any:
    def gather(self: Any, layer: int, slots: torch.Tensor) -> Any:
        return original(self, layer, torch.cat((slots[:-1], slots[-2:-1])) if len(slots) > 1 else slots)

    return gather


def projected(change: Callable[[Any, Any, Any], Any]) -> Any:
    """Change query, key and value; what gates them stays."""

    def call(original: Any, self: Attention, *args: Any) -> Any:
        q, k, v, *gates = original(self, *args)
        return *change(q, k, v), *gates

    return replacing((Attention, "_project", call))


def first_head_only(cache: Any, k: torch.Tensor, v: torch.Tensor, slots: Any) -> Any:
    v = v.clone()
    v[:, 1:] = 0
    return k, v, slots


def ids_changed(change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    return replacing((Embedding, "__call__", lambda original, self, ids: original(self, change(ids))))


def layer_norm(_: Any) -> Any:
    def call(self: RMSNorm, x: torch.Tensor) -> torch.Tensor:
        x32 = x.float() - x.float().mean(-1, keepdim=True)
        return self.weight_X * (x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)

    return call


def _fault(
    id: str, category: Category, summary: str, inject: Any, cause: str, tap: str, model: str, dtype: str, schedule: str
) -> Fault:
    """The schedule decides which row is wrong first."""
    setting = FaultConfig(model=model, dtype=dtype, schedule=schedule)
    return Fault(
        id=f"odd/{id}", category=category, summary=summary, inject=inject, cause=cause, tap=tap, row=ANY_ROW,
        setting=setting,
    )  # fmt: skip


FAULTS = [
    _fault("theta-halved", Category.POSITION, "Theta halved.",
        frequencies_changed(lambda c, f: 1 / ((c.rope.theta / 2) ** (torch.arange(0, len(f) * 2,
            2).float() / (2 * len(f))))),
        "theta", "model.layers.0.q_rope", "qwen2-tiny", "float16", "forked"),
    _fault("cos-and-sin-exchanged", Category.POSITION, "Cos and sin exchanged.",
        rotary(lambda x, cos, sin: x * sin + half_turned(x) * cos), "cosine and sine", "model.layers.0.q_rope",
        "llama-tiny", "bfloat16", "plain"),
    _fault("sine-missing", Category.POSITION, "Sine missing.", rotary(lambda x, cos, sin: x * cos), "sine is left out",
        "model.layers.0.q_rope", "qwen2-tiny", "bfloat16", "mixed:8"),
    _fault("key-not-rotated", Category.POSITION, "Key not rotated.", keys_unrotated(), "rotary is not applied",
        "model.layers.0.k_(rope|cache)", "qwen3-tiny", "bfloat16", "forked"),
    _fault("positions-doubled", Category.POSITION, "Positions doubled.", positions_changed(lambda p, chunks: p * 2),
        "factor of 2|factor 0.5|at .*pos", "model.layers.0.q_rope", "llama-tiny", "float32", "mixed:8"),
    _fault("positions-capped", Category.POSITION, "Positions capped.",
        positions_changed(lambda p, chunks: p.clamp(max=15)), "positions stop at 15", "model.layers.0.q_rope",
        "llama-tiny", "bfloat16", "mixed:8"),
    _fault("positions-modulo", Category.POSITION, "Positions modulo.", positions_changed(lambda p, chunks: p % 16),
        "taken modulo 16", "model.layers.0.q_rope", "qwen3-tiny", "float32", "preempted"),
    _fault("second-half-of-the-frequencies-zero", Category.POSITION, "Second half of the frequencies zero.",
        frequencies_changed(lambda c, f: torch.where(torch.arange(len(f)) < len(f) // 2, f, 0)), "partial|do not turn",
        "model.layers.0.q_rope", "qwen2-tiny", "bfloat16", "preempted"),
    _fault("q-and-k-norms-exchanged", Category.NORM, "Q and k norms exchanged.", loaded(norms_of_q_and_k),
        "weights? (is|are) th", "model.layers.0.self_attn.q_norm", "qwen3-tiny", "float16", "plain"),
    _fault("norm-of-mean-size", Category.NORM, "Norm of mean size.",
        norm_scaled_by(lambda norm, x: 1 / (x.abs().mean(-1, keepdim=True) + norm.eps)), NOTHING,
        "model.layers.0.input_layernorm", "qwen2-tiny", "float32", "plain"),
    _fault("norm-of-largest", Category.NORM, "Norm of largest.",
        norm_scaled_by(lambda norm, x: 1 / x.abs().amax(-1, keepdim=True)), NOTHING, "model.layers.0.input_layernorm",
        "llama-tiny", "float16", "prefix-hit"),
    _fault("norm-with-mean", Category.NORM, "Norm with mean.", replacing((RMSNorm, "__call__", once(layer_norm))),
        "mean",
        "model.layers.0.input_layernorm", "llama-tiny", "bfloat16", "preempted"),
    _fault("quick-gelu", Category.WIRING, "Quick gelu.", mlp(lambda g, u: g * torch.sigmoid(1.702 * g) * u),
            r"quick GELU|sigmoid\(1\.702",  # it is that times its input
        "model.layers.0.mlp.act", "llama-tiny", "bfloat16", "preempted"),
    _fault("activation-clamped", Category.WIRING, "Activation clamped.", mlp(lambda g, u: silu(g).clamp(-0.5, 0.5) * u),
        NOTHING, "model.layers.0.mlp.act", "llama-tiny", "float16", "batched"),
    _fault("up-plus-one", Category.WIRING, "Up plus one.", mlp(lambda g, u: silu(g) * (u + 1)), NOTHING,
        "model.layers.0.mlp.act", "qwen2-tiny", "bfloat16", "prefix-hit"),
    _fault("mish", Category.WIRING, "Mish.", mlp(lambda g, u: torch.nn.functional.mish(g) * u), NOTHING,
        "model.layers.0.mlp.act", "llama-tiny", "bfloat16", "batched"),
    _fault("scale-of-seven-eighths", Category.ATTENTION, "Scale of seven eighths.",
        attention(lambda q, k, v, m: attend(q, k, v, m, scale=0.875 * q.shape[-1] ** -0.5)), "softmax scale is",
        "model.layers.0.attention", "qwen3-tiny", "float32", "forked"),
    _fault("alibi-added", Category.ATTENTION, "Alibi added.", attention(with_alibi), NOTHING,
            "model.layers.0.attention",
        "qwen2-tiny", "bfloat16", "plain"),
    _fault("soft-cap-added", Category.ATTENTION, "Soft cap added.", attention(capped), "soft ?cap",
        "model.layers.0.attention", "qwen2-tiny", "float16", "preempted"),
    _fault("even-keys-only", Category.ATTENTION, "Even keys only.", without(lambda n: torch.arange(n) % 2 == 1),
            NOTHING,
        "model.layers.0.attention", "llama-tiny", "float32", "preempted"),
    _fault("third-key-unseen", Category.ATTENTION, "Third key unseen.", without(lambda n: torch.arange(n) == 2),
        "position 2|does not see|one position", "model.layers.0.attention", "qwen3-tiny", "bfloat16", "plain"),
    _fault("first-block-unseen", Category.ATTENTION, "First block unseen.", without(lambda n: torch.arange(n) < 8),
        "block|first|does not see", "model.layers.0.attention", "qwen3-tiny", "bfloat16", "preempted"),
    _fault("context-heads-rolled", Category.ATTENTION, "Context heads rolled.",
        attention(lambda q, k, v, m: attend(q, k, v, m).roll(1, dims=1)), "heads", "model.layers.0.attention",
        "qwen3-tiny", "float16", "mixed:8"),
    _fault("context-of-other-values", Category.ATTENTION, "Context of other values.",
        attention(lambda q, k, v, m: attend(q, k, v.flip(1), m)), "heads|value", "model.layers.0.attention",
        "qwen3-tiny", "float16", "batched"),
    _fault("last-key-twice", Category.CACHE, "Last key twice.",
        replacing((reference_engine.kv_cache.KVCache, "gather", once(last_key_twice))),
        "place|slot|block|position|newest|does not see", "model.layers.0.(k_cache|v_cache|attention)", "qwen2-tiny",
        "bfloat16", "prefix-hit"),
    _fault("value-heads-lost", Category.CACHE, "Value heads lost.", stored(first_head_only), "head|zeros?",
        "model.layers.0.v_cache", "qwen2-tiny", "float16", "mixed:8"),
    _fault("values-louder", Category.CACHE, "Values louder.", stored(lambda c, k, v, s: (k, v * 1.01, s)), "gain",
        "model.layers.0.v_cache", "qwen3-tiny", "float32", "mixed:8"),
    _fault("keys-noisy", Category.CACHE, "Keys noisy.", stored(lambda c, k, v, s: (noisy(k), v, s)), NOTHING,
        "model.layers.0.k_(rope|cache)", "llama-tiny", "float16", "forked"),
    _fault("keys-reversed", Category.CACHE, "Keys reversed.", stored(lambda c, k, v, s: (k, v, s.flip(0))), "slot",
        "model.layers.0.(k_cache|v_cache|attention)", "qwen2-tiny", "bfloat16", "preempted"),
    _fault("keys-shifted-a-row", Category.CACHE, "Keys shifted a row.", stored(lambda c, k, v, s: (k.roll(1, 0), v, s)),
        "slot|positions? away|another", "model.layers.0.k_(rope|cache)", "llama-tiny", "bfloat16", "prefix-hit"),
    _fault("query-scaled", Category.POSITION, "Query scaled.", projected(lambda q, k, v: (q * 1.02, k, v)),
            "gain|scaled",
        "model.layers.0.(self_attn.q_(proj|norm)|q_rope)", "qwen3-tiny", "float16", "preempted"),
    _fault("values-in-other-heads", Category.CACHE, "Values in other heads.",
        projected(lambda q, k, v: (q, k, v.flip(1))), "heads|order|written|value|slot",
        "model.layers.0.(self_attn.v_proj|v_cache)", "qwen2-tiny", "float32", "mixed:8"),
    _fault("gate-rows-rolled", Category.WEIGHTS, "Gate rows rolled.",
        weight("gate_up_proj.weight", lambda w: w.roll(1, 0)), "another order|wrong order",
        "model.layers.1.mlp.gate_proj", "qwen3-tiny", "float16", "plain"),
    _fault("down-rows-noisy", Category.WEIGHTS, "Down rows noisy.", weight("down_proj.weight", rows_noisy),
        "scales? of|weights are not quite|none of", "model.layers.1.mlp.down_proj", "llama-tiny", "float16", "forked"),
    _fault("down-row-zero", Category.WEIGHTS, "Down row zero.", weight("down_proj.weight", lambda w: channel(w, 17,
            0.0)),
        "17|rows? of the weight|not quite", "model.layers.1.mlp.down_proj", "qwen2-tiny", "bfloat16", "mixed:8"),
    _fault("o-proj-noisy", Category.WEIGHTS, "O proj noisy.", weight("o_proj.weight", noisy),
        "not quite|none of|other weights", "model.layers.1.self_attn.o_proj", "qwen3-tiny", "float32", "mixed:8"),
    _fault("first-query-head-negated", Category.WEIGHTS, "First query head negated.",
        weight("qkv_proj.weight", head_negated), "not quite|none of|sign", "model.layers.1.self_attn.q_proj",
        "llama-tiny", "bfloat16", "preempted"),
    _fault("layers-exchanged", Category.NORM, "Layers exchanged.", loaded(layers_exchanged),
        "weights are those of|weight is that of|layers", "model.layers.1.input_layernorm", "qwen3-tiny", "float16",
        "prefix-hit"),
    _fault("ids-clamped", Category.WEIGHTS, "Ids clamped.", ids_changed(lambda ids: ids.clamp(max=200)), "token",
        "model.embed_tokens", "qwen2-tiny", "float16", "batched"),
    _fault("ids-reversed", Category.WEIGHTS, "Ids reversed.", ids_changed(lambda ids: ids.flip(0)), "token",
        "model.embed_tokens", "llama-tiny", "float16", "batched"),
    _fault("branch-at-nine-tenths", Category.WIRING, "Branch at nine tenths.", branches(lambda x, y: x + 0.9 * y),
        "factor of 0.9", "model.layers.0.output", "llama-tiny", "float32", "prefix-hit"),
    _fault("stream-halved", Category.WIRING, "Stream halved.", branches(lambda x, y: 0.5 * x + y),
        "residual .*0.5|stream", "model.layers.0.output", "qwen3-tiny", "float32", "mixed:8"),
    _fault("stream-clamped", Category.WIRING, "Stream clamped.", branches(lambda x, y: (x + y).clamp(-1, 1)),
        "are cut off", "model.layers.0.output", "qwen3-tiny", "bfloat16", "forked"),
    _fault("branch-dropped-in-odd-rows", Category.WIRING, "Branch dropped in odd rows.",
        branches(lambda x, y: x + y * (torch.arange(len(y)) % 2 == 0)[:, None].to(y.dtype)),
        "branch is not added|output is that of attn_residual", "model.layers.0.output", "qwen3-tiny", "bfloat16",
        "mixed:8"),
    _fault("norm-two-heads", Category.NORM, "Norm two heads.",
        edited_layers(lambda layer: replace(layer, input_layernorm=lambda x: layer.input_layernorm(x.unflatten(-1,
            (2, -1)).flip(-2).flatten(-2)))),
        NOTHING, "model.layers.0.input_layernorm", "qwen2-tiny", "float16", "prefix-hit"),
]  # fmt: skip
