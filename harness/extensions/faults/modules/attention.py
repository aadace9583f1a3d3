"""Faults of attention."""

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from harness.extensions.faults.fault import Category, Fault
from harness.extensions.faults.modules.changes import Plant, Scores, kernel
from harness.extensions.faults.modules.declaring import (
    BF16,
    CHUNK,
    F16,
    HEADS,
    MASK,
    ORDER,
    PROMPT,
    ROUND,
    SCALE,
    WINDOW,
    declaring,
)

FAULTS: list[Fault] = []
fault = declaring(FAULTS, Category.ATTENTION)


def scores(**values: Any) -> Callable[[Scores], None]:
    def change(s: Scores) -> None:
        for name, value in values.items():
            setattr(s, name, value)

    return change


def tiled(s: Scores) -> None:
    s.repeated = lambda x: x.repeat(1, s.q.shape[1] // x.shape[1], 1, 1)


fault(
    "olmo2", "kv-heads-tiled", "query head h reads KV head h modulo KV heads", r"layers\.0\.(attention|.*o_proj)", 0,
    HEADS, kernel(tiled),
)  # fmt: skip
fault(
    "starcoder2", "kv-heads-tiled-decode", "the same, in decode only", r"layers\.0\.(attention|.*o_proj)", PROMPT,
    HEADS, kernel(lambda s: tiled(s) if s.is_decode else None), dtype=BF16,
)  # fmt: skip
fault(
    "gemma2", "cap-dropped-layer-1", "scores of layer 1 are not capped", r"layers\.1\.attention", 1, "cap",
    kernel(scores(cap=None), layer=1),
)  # fmt: skip
fault(
    "gemma2", "cap-before-scale", "scores are capped before they are scaled", r"layers\.0\.attention", 1, "cap",
    kernel(scores(is_cap_first=True)),
)  # fmt: skip


def windowed(size: int | None, layer: int | None = None, *, decode: bool | None = None) -> Plant:
    def change(s: Scores) -> None:
        if decode is not None and s.is_decode != decode:
            return
        queries, keys = s.positions()
        s.allow((keys <= queries) & (keys > queries - (size or 10**6)))

    return kernel(change, layer=layer)


fault("cohere2", "window-15", "the window is 15, not 16", r"layers\.0\.attention", 15, WINDOW, windowed(15, 0))
fault(
    "cohere2", "window-in-full-layer", "the full layer has the window of the others", r"layers\.1\.attention", 16,
    WINDOW, windowed(16, 1),
)  # fmt: skip
fault(
    "exaone4", "window-missing-prefill", "prefill has no window, decode has it", r"layers\.0\.attention", 16, WINDOW,
    windowed(None, 0, decode=False),
)  # fmt: skip
fault(
    "recurrent_gemma", "window-17", "the window is 17", r"layers\.2\.attention", 16, WINDOW,
    windowed(17, decode=False), dtype=BF16,
)  # fmt: skip
fault(
    "gpt_oss", "window-8-decode", "decode has half of the window", r"layers\.0\.attention", PROMPT, WINDOW,
    windowed(8, 0, decode=True),
)  # fmt: skip
fault(
    "gpt_oss", "sinks-dropped", "attention has no sinks", r"layers\.0\.attention", 0, "sink", kernel(scores(sinks=None))
)


def sinks(change: Callable[[torch.Tensor], torch.Tensor]) -> Plant:
    return kernel(lambda s: setattr(s, "sinks", change(s.sinks)))


fault(
    "gpt_oss", "sinks-of-the-next-head", "each head has the sink of the next one", r"layers\.0\.attention", 0, "sink",
    sinks(lambda x: x.roll(1)), dtype=BF16,
)  # fmt: skip
fault(
    "gpt_oss", "sinks-scaled", "the sinks are scaled as the scores are", r"layers\.0\.attention", 0, "sink",
    sinks(lambda x: x * 0.25), dtype=F16, schedule="batched",
)  # fmt: skip
fault(
    "granite", "attention-multiplier-ignored", "scores are scaled by 1/sqrt(head size), not by attention_multiplier",
    r"layers\.0\.attention", 1, SCALE, kernel(scores(scale=0.25)),
)  # fmt: skip
fault(
    "persimmon", "scale-of-rotary-size", "scores are scaled by 1/sqrt(rotary size)",
    r"layers\.0\..*(attention|context|dense)", 1, SCALE, kernel(scores(scale=8**-0.5)),
)  # fmt: skip
fault(
    "deepseek_v3", "scale-of-nope-size", "scores are scaled by 1/sqrt of the part that is not rotated",
    r"layers\.0\.attention", 1, SCALE, kernel(scores(scale=0.25)),
)  # fmt: skip
fault(
    "phi", "scale-of-hidden-size", "scores are scaled by 1/sqrt(hidden size)", r"layers\.0\.(attention|.*dense)", 1,
    SCALE, kernel(scores(scale=0.125)), dtype=BF16,
)  # fmt: skip
fault(
    "gpt2", "scale-by-layer", "scores are divided by the layer's number", r"h\.1\..*(attention|context|c_proj)", 1,
    SCALE, kernel(lambda s: setattr(s, "scale", s.scale / 2), layer=1),
)  # fmt: skip


def scaled_neo(model: Any) -> None:
    attention = model.transformer.h[0].attn.attention
    inner = attention._attn
    attention._attn = lambda q, *rest, **named: inner(q * 0.25, *rest, **named)


fault(
    "gpt_neo", "scaled-scores", "scores are scaled, which this family does not do",
    r"h\.0\..*(attention|context|out_proj)", 1, SCALE + r"|`0\.25 \* \(attn_weights\)", scaled_neo,
)  # fmt: skip


def unseen(
    which: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], *, decode: bool | None = None, layer: int | None = None
) -> Plant:
    def change(s: Scores) -> None:
        if decode is None or s.is_decode == decode:
            s.hide(which(*s.positions()))

    return kernel(change, layer=layer)


# In bfloat16 a row that gives little weight to its token differs by less than rounding.
fault(
    "stablelm", "own-token-hidden-decode", "decode does not see its own token", r"layers\.0\.attention", None, MASK,
    unseen(lambda q, k: k == q, decode=True), dtype=BF16,
)  # fmt: skip


def one_future(s: Scores) -> None:
    queries, keys = s.positions()
    s.allow(keys <= queries + 1)


fault("olmo", "one-future-token", "each token sees the next one", r"layers\.0\.attention", 0, MASK, kernel(one_future))
fault(
    "nemotron",
    "chunk-sees-itself",
    "a chunk sees its own tokens only",
    r"layers\.0\.attention",
    7,
    MASK + "|" + CHUNK,
    kernel(
        lambda s: (
            s.hide((s.positions()[1] < s.positions()[0][0]).expand(s.q.shape[2], -1))
            if s.q.shape[2] < s.k.shape[2]
            else None
        )
    ),
    schedule="chunked:7",
)


def top_left(s: Scores) -> None:
    if 1 < s.q.shape[2] < s.k.shape[2]:
        s.allow(torch.arange(s.k.shape[2]) <= torch.arange(s.q.shape[2])[:, None])


fault(
    "mixtral", "mask-top-left", "the causal mask of a chunk is aligned at the top left", r"layers\.0\.attention", 9,
    MASK + "|align|chunk|position", kernel(top_left), schedule="chunked:9",
)  # fmt: skip


def one_more(s: Scores) -> None:
    s.sinks = torch.zeros(s.q.shape[1], dtype=s.q.dtype)


fault(
    "opt", "one-in-the-sum", "the sum of exponentials has one more (an empty slot)",
    r"layers\.0\..*(attention|context|out_proj)", 0, "sum|slot|sink|zero|empty|pad|softmax", kernel(one_more),
)  # fmt: skip


def with_context(change: Callable[[torch.Tensor], torch.Tensor]) -> Plant:
    return kernel(lambda s: change(s.context()))


fault(
    "gpt_bigcode", "heads-reversed", "the heads of the context are in reverse order",
    r"h\.0\..*(attention|context|c_proj)", 1, HEADS, with_context(lambda x: x.flip(2)),
)  # fmt: skip
fault(
    "biogpt", "context-transposed", "the context is laid out by element, then by head",
    r"layers\.0\..*(attention|context|out_proj)", 0, ORDER + "|head|element",
    with_context(lambda x: x.transpose(2, 3).reshape(x.shape)), dtype=F16,
)  # fmt: skip
fault(
    "jetmoe", "value-heads-swapped", "the heads of the values are exchanged",
    r"layers\.0\..*(attention|value|context)", 0, HEADS, kernel(lambda s: setattr(s, "v", s.v.flip(1))),
)  # fmt: skip
fault(
    "arcee", "last-key-dropped", "decode reads one key too few: the oldest is left out", r"layers\.0\.attention",
    PROMPT, MASK + "|oldest|first|window|block|slot", unseen(lambda q, k: (k == 0).expand(len(q), -1), decode=True),
)  # fmt: skip
fault(
    "olmoe",
    "slot-of-the-next",
    "decode reads the newest key where the one before it should be",
    r"layers\.0\.(attention|k_cache)",
    PROMPT,
    "slot|position|key|cache|block|place",
    kernel(
        lambda s: (
            setattr(s, "k", torch.cat([s.k[:, :, :-2], s.k[:, :, -1:], s.k[:, :, -1:]], dim=2)) if s.is_decode else None
        )
    ),
)
fault(
    "cohere", "wrong-request", "in a batch every request reads the keys and values of the first one",
    r"layers\.0\.(attention|.*cache|.*)", None, "request|head|slot|place|block|history|position|cache",
    kernel(lambda s: [setattr(s, "k", s.k[:1].expand_as(s.k)), setattr(s, "v", s.v[:1].expand_as(s.v))] and None),
    schedule="batched", request=None,
)  # fmt: skip
fault(
    "glm4", "weights-half-precision", "the weights of attention are rounded to float8 before the values",
    r"layers\.0\.attention", 1, ROUND, kernel(lambda s: float8_weights(s)),
)  # fmt: skip


def float8_weights(s: Scores) -> torch.Tensor:
    k, v = s.repeated(s.k), s.repeated(s.v)
    weights = functional.softmax((s.q @ k.transpose(2, 3)) * s.scale + s.mask[..., : k.shape[2]], dim=-1)
    return (weights.to(torch.float8_e4m3fn).to(s.q.dtype) @ v).transpose(1, 2).contiguous()
