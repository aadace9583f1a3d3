"""192 faults that engine writers make, in families that no cause was written for. Written before any was run.

Each says where it must be found (a pattern of the first tap that is wrong, the position of its first wrong row in
request 0 or None if the tokens decide that), and which words of a cause would be right (None: no known cause is true,
any that is asserted is wrong). Prompts are of 40 and 23 tokens, windows of 16, of experts 2 in 8.
"""

import copy
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from plants import (
    Plant,
    Scores,
    all_of,
    arguments,
    attribute,
    cache,
    exchanged,
    forward,
    frequencies,
    half_turned,
    inputs,
    is_decode,
    kernel,
    names,
    output,
    pair_turned,
    powers,
    rotary,
    setting,
    weight,
    weight_of,
)
from torch.nn import functional
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.deepseek_v3 import modeling_deepseek_v3

F16, BF16 = "float16", "bfloat16"
PROMPT = 40  # of request 0: the first row of decode is at this position


@dataclass(frozen=True, kw_only=True)
class Fault:
    id: str
    family: str
    plant: Plant | None
    what: str
    """The mistake, in words."""
    where: str
    row: int | None
    says: str | None
    """Pattern of words, any of which makes a cause a right one."""
    dtype: str = "float32"
    schedule: str = "plain"
    settings: Mapping[str, Any] = field(default_factory=dict)
    request: int | None = 0
    engine: str = "hf"


FAULTS: list[Fault] = []


def fault(
    family: str, id: str, what: str, where: str, row: int | None, says: str | None, plant: Plant | None, **more: Any
) -> None:
    FAULTS.append(
        Fault(id=f"{family}/{id}", family=family, what=what, where=where, row=row, says=says, plant=plant, **more)
    )


def scores(**values: Any) -> Callable[[Scores], None]:
    def change(s: Scores) -> None:
        for name, value in values.items():
            setattr(s, name, value)

    return change


ATTENTION = r"attention|context|o_proj|out_proj|dense|c_proj|q_rope|query"
HEADS = r"head"
WINDOW = r"window"
SCALE = r"scale|scaling"
MASK = r"mask|causal|future|later|own token|own position|newest|history|sees|hidden|not seen|key"
POSITION = r"position"
ROTARY = r"rotat|rotary|rope|cos|sin"
ORDER = r"order|row|permut|interleav|exchang|swap|transpos|other output|of output"
FACTOR = r"factor|gain|scal|multipl|times"
CHUNK = r"chunk|step|history|earlier|forgot|state|lost|block|cache"
STATE = r"state|forgot|history|zero|step|earlier"
ROUND = r"round|bits|quanti|bfloat16|float8|int8|precision|e4m3|dtype"
EXPERT = r"expert"

# --- attention kernels -------------------------------------------------------------------------------------------------


def tiled(s: Scores) -> None:
    s.repeated = lambda x: x.repeat(1, s.q.shape[1] // x.shape[1], 1, 1)


fault(
    "olmo2",
    "kv-heads-tiled",
    "query head h reads KV head h modulo KV heads",
    r"layers\.0\.(attention|.*o_proj)",
    0,
    HEADS,
    kernel(tiled),
)
fault(
    "starcoder2",
    "kv-heads-tiled-decode",
    "the same, in decode only",
    r"layers\.0\.(attention|.*o_proj)",
    PROMPT,
    HEADS,
    kernel(lambda s: tiled(s) if s.is_decode else None),
    dtype=BF16,
)
fault(
    "gemma2",
    "cap-dropped-layer-1",
    "scores of layer 1 are not capped",
    r"layers\.1\.attention",
    1,
    "cap",
    kernel(scores(cap=None), layer=1),
)
fault(
    "gemma2",
    "cap-before-scale",
    "scores are capped before they are scaled",
    r"layers\.0\.attention",
    1,
    "cap",
    kernel(scores(is_cap_first=True)),
)


def windowed(size: int | None, layer: int | None = None, *, decode: bool | None = None) -> Plant:
    def change(s: Scores) -> None:
        if decode is not None and s.is_decode != decode:
            return
        queries, keys = s.positions()
        s.allow((keys <= queries) & (keys > queries - (size or 10**6)))

    return kernel(change, layer=layer)


fault("cohere2", "window-15", "the window is 15, not 16", r"layers\.0\.attention", 15, WINDOW, windowed(15, 0))
fault(
    "cohere2",
    "window-in-full-layer",
    "the full layer has the window of the others",
    r"layers\.1\.attention",
    16,
    WINDOW,
    windowed(16, 1),
)
fault(
    "exaone4",
    "window-missing-prefill",
    "prefill has no window, decode has it",
    r"layers\.0\.attention",
    16,
    WINDOW,
    windowed(None, 0, decode=False),
)
fault(
    "recurrent_gemma",
    "window-17",
    "the window is 17",
    r"layers\.2\.attention",
    16,
    WINDOW,
    windowed(17, decode=False),
    dtype=BF16,
)
fault(
    "gpt_oss",
    "window-8-decode",
    "decode has half of the window",
    r"layers\.0\.attention",
    PROMPT,
    WINDOW,
    windowed(8, 0, decode=True),
)
fault(
    "gpt_oss", "sinks-dropped", "attention has no sinks", r"layers\.0\.attention", 0, "sink", kernel(scores(sinks=None))
)


def sinks(change: Callable[[torch.Tensor], torch.Tensor]) -> Plant:
    return kernel(lambda s: setattr(s, "sinks", change(s.sinks)))


fault(
    "gpt_oss",
    "sinks-of-the-next-head",
    "each head has the sink of the next one",
    r"layers\.0\.attention",
    0,
    "sink",
    sinks(lambda x: x.roll(1)),
    dtype=BF16,
)
fault(
    "gpt_oss",
    "sinks-scaled",
    "the sinks are scaled as the scores are",
    r"layers\.0\.attention",
    0,
    "sink",
    sinks(lambda x: x * 0.25),
    dtype=F16,
)
fault(
    "granite",
    "attention-multiplier-ignored",
    "scores are scaled by 1/sqrt(head size), not by attention_multiplier",
    r"layers\.0\.attention",
    1,
    SCALE,
    kernel(scores(scale=0.25)),
)
fault(
    "persimmon",
    "scale-of-rotary-size",
    "scores are scaled by 1/sqrt(rotary size)",
    r"layers\.0\..*(attention|context|dense)",
    1,
    SCALE,
    kernel(scores(scale=8**-0.5)),
)
fault(
    "deepseek_v3",
    "scale-of-nope-size",
    "scores are scaled by 1/sqrt of the part that is not rotated",
    r"layers\.0\.attention",
    1,
    SCALE,
    kernel(scores(scale=0.25)),
)
fault(
    "phi",
    "scale-of-hidden-size",
    "scores are scaled by 1/sqrt(hidden size)",
    r"layers\.0\.(attention|.*dense)",
    1,
    SCALE,
    kernel(scores(scale=0.125)),
    dtype=BF16,
)
fault(
    "gpt2",
    "scale-by-layer",
    "scores are divided by the layer's number",
    r"h\.1\..*(attention|context|c_proj)",
    1,
    SCALE,
    kernel(lambda s: setattr(s, "scale", s.scale / 2), layer=1),
)


def scaled_neo(model: Any) -> None:
    attention = model.transformer.h[0].attn.attention
    inner = attention._attn
    attention._attn = lambda q, *rest, **named: inner(q * 0.25, *rest, **named)


fault(
    "gpt_neo",
    "scaled-scores",
    "scores are scaled, which this family does not do",
    r"h\.0\..*(attention|context|out_proj)",
    1,
    SCALE,
    scaled_neo,
)


def unseen(
    which: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], *, decode: bool | None = None, layer: int | None = None
) -> Plant:
    def change(s: Scores) -> None:
        if decode is None or s.is_decode == decode:
            s.hide(which(*s.positions()))

    return kernel(change, layer=layer)


fault(
    "stablelm",
    "own-token-hidden-decode",
    "decode does not see its own token",
    r"layers\.0\.attention",
    PROMPT,
    MASK,
    unseen(lambda q, k: k == q, decode=True),
    dtype=BF16,
)


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
    "mixtral",
    "mask-top-left",
    "the causal mask of a chunk is aligned at the top left",
    r"layers\.0\.attention",
    9,
    MASK + "|align|chunk|position",
    kernel(top_left),
    schedule="chunked:9",
)


def one_more(s: Scores) -> None:
    s.sinks = torch.zeros(s.q.shape[1], dtype=s.q.dtype)


fault(
    "opt",
    "one-in-the-sum",
    "the sum of exponentials has one more (an empty slot)",
    r"layers\.0\..*(attention|context|out_proj)",
    0,
    "sum|slot|sink|zero|empty|pad|softmax",
    kernel(one_more),
)


def with_context(change: Callable[[torch.Tensor], torch.Tensor]) -> Plant:
    return kernel(lambda s: change(s.context()))


fault(
    "gpt_bigcode",
    "heads-reversed",
    "the heads of the context are in reverse order",
    r"h\.0\..*(attention|context|c_proj)",
    1,
    HEADS,
    with_context(lambda x: x.flip(2)),
)
fault(
    "biogpt",
    "context-transposed",
    "the context is laid out by element, then by head",
    r"layers\.0\..*(attention|context|out_proj)",
    0,
    ORDER + "|head|element",
    with_context(lambda x: x.transpose(2, 3).reshape(x.shape)),
    dtype=F16,
)
fault(
    "jetmoe",
    "value-heads-swapped",
    "the heads of the values are exchanged",
    r"layers\.0\..*(attention|value|context)",
    0,
    HEADS,
    kernel(lambda s: setattr(s, "v", s.v.flip(1))),
)
fault(
    "arcee",
    "last-key-dropped",
    "decode reads one key too few: the oldest is left out",
    r"layers\.0\.attention",
    PROMPT,
    MASK + "|oldest|first|window|block|slot",
    unseen(lambda q, k: (k == 0).expand(len(q), -1), decode=True),
)
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
    "cohere",
    "wrong-request",
    "in a batch every request reads the keys and values of the first one",
    r"layers\.0\.(attention|.*cache|.*)",
    None,
    "request|head|slot|place|block|history|position|cache",
    kernel(lambda s: [setattr(s, "k", s.k[:1].expand_as(s.k)), setattr(s, "v", s.v[:1].expand_as(s.v))] and None),
    schedule="batched",
    request=None,
)
fault(
    "glm4",
    "weights-half-precision",
    "the weights of attention are rounded to float8 before the values",
    r"layers\.0\.attention",
    1,
    ROUND,
    kernel(lambda s: float8_weights(s)),
)


def float8_weights(s: Scores) -> torch.Tensor:
    k, v = s.repeated(s.k), s.repeated(s.v)
    weights = functional.softmax((s.q @ k.transpose(2, 3)) * s.scale + s.mask[..., : k.shape[2]], dim=-1)
    return (weights.to(torch.float8_e4m3fn).to(s.q.dtype) @ v).transpose(1, 2).contiguous()


# --- positions, rotary -------------------------------------------------------------------------------------------------

ROPE = r"q_rope|k_rope|query|key|attention|context|dense|cache|out_proj"

fault(
    "gpt_neox",
    "whole-head-rotated",
    "the whole head is rotated instead of a quarter",
    r"layers\.0\..*(" + ROPE + ")",
    1,
    ROTARY + "|partial",
    frequencies(lambda f: powers(1e4, 16), "gpt_neox.rotary_emb"),
)
fault(
    "phi",
    "frequencies-of-head-size",
    "frequencies are computed for the head's size, not for the rotary part's",
    r"layers\.0\.q_rope",
    1,
    ROTARY + "|theta|frequenc",
    frequencies(lambda f: powers(1e4, 2 * len(f), 4 * len(f))),
)
fault(
    "stablelm",
    "position-off-decode",
    "decode rotates by the position before",
    r"layers\.0\.q_rope",
    PROMPT,
    POSITION + "|" + ROTARY,
    rotary(lambda c, s, p: (shifted(c, s)) if c.shape[1] == 1 else (c, s), "model.rotary_emb"),
    dtype=BF16,
)


def shifted(
    cos: torch.Tensor, sin: torch.Tensor, by: int = -1, theta: float = 1e4
) -> tuple[torch.Tensor, torch.Tensor]:
    """Turn by one position more or less; frequencies are those of the tensor's size."""
    size = cos.shape[-1]
    angle = by * powers(theta, size).repeat(2)
    fine_cos, fine_sin = cos.float(), sin.float()
    return (fine_cos * angle.cos() - fine_sin * angle.sin()).to(cos.dtype), (
        fine_sin * angle.cos() + fine_cos * angle.sin()
    ).to(sin.dtype)


def turning(
    turn: Callable[[torch.Tensor], torch.Tensor], *, is_pairs: bool = False, sign: int = 1, only: str = "qk"
) -> Callable[..., Any]:
    def apply(
        q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *_: Any, unsqueeze_dim: int = 1
    ) -> Any:
        cos, sin = cos.unsqueeze(unsqueeze_dim), sign * sin.unsqueeze(unsqueeze_dim)
        if is_pairs:
            cos, sin = (x[..., : x.shape[-1] // 2].repeat_interleave(2, dim=-1) for x in (cos, sin))
        size = cos.shape[-1]

        def turned(x: torch.Tensor) -> torch.Tensor:
            part = x[..., :size]
            return torch.cat([part * cos + turn(part) * sin, x[..., size:]], dim=-1)

        return turned(q) if "q" in only else q, turned(k) if "k" in only else k

    return apply


L0 = "model.layers.0.self_attn"
fault(
    "glm4",
    "halves-for-pairs",
    "the pairs of rotary are halves instead of neighbours",
    r"layers\.0\.q_rope",
    1,
    ROTARY + "|pair|interleav|halves",
    names(L0, apply_rotary_pos_emb=turning(half_turned)),
)
fault(
    "persimmon",
    "pairs-for-halves",
    "the pairs of rotary are neighbours instead of halves",
    r"layers\.0\.q_rope",
    1,
    ROTARY + "|pair|interleav|halves",
    names(L0, apply_rotary_pos_emb=turning(pair_turned, is_pairs=True)),
    dtype=BF16,
)
fault(
    "gpt_neox",
    "query-not-rotated",
    "only keys are rotated",
    r"layers\.0\.(q_rope|attention.*)",
    1,
    ROTARY,
    names("gpt_neox.layers.0.attention", apply_rotary_pos_emb=turning(half_turned, only="k")),
    dtype=F16,
)
fault(
    "falcon",
    "rotated-backwards",
    "the sine has the other sign",
    r"h\.0\..*(" + ROPE + ")",
    1,
    ROTARY + "|sign|negative|backward",
    rotary(lambda c, s, p: (c, -s), "transformer.rotary_emb"),
)


def key_ahead() -> Callable[..., torch.Tensor]:
    """GPT-J turns the keys first, then the queries."""
    calls = [0]

    def apply(x: torch.Tensor, sin: torch.Tensor, cos: torch.Tensor) -> torch.Tensor:
        if calls[0] % 2 == 0:
            angle = powers(1e4, 2 * sin.shape[-1])
            sin, cos = sin * angle.cos() + cos * angle.sin(), cos * angle.cos() - sin * angle.sin()
        calls[0] += 1
        sin, cos = (y[:, :, None].repeat_interleave(2, 3).to(x.dtype) for y in (sin, cos))
        return x * cos + pair_turned(x) * sin

    return apply


fault(
    "gptj",
    "key-one-position-off",
    "keys are rotated by the next position",
    r"h\.0\..*(" + ROPE + ")",
    1,
    ROTARY + "|position",
    names("transformer.h.0.attn", apply_rotary_pos_emb=key_ahead()),
)
fault(
    "mistral",
    "theta-1e6",
    "theta is 1e6, the default of a newer version",
    r"layers\.0\.q_rope",
    1,
    "theta",
    frequencies(lambda f: powers(1e6, 2 * len(f))),
)
fault(
    "ernie4_5_moe",
    "theta-500000",
    "theta is 500000",
    r"layers\.0\.q_rope",
    1,
    "theta",
    frequencies(lambda f: powers(5e5, 2 * len(f))),
    dtype=BF16,
)
fault(
    "granitemoe",
    "theta-1000",
    "theta is 1000 in layer 1 alone",
    r"layers\.1\.q_rope",
    1,
    "theta",
    arguments("model.layers.1", "position_embeddings", lambda x: of_theta(x, 1e3)),
    dtype=F16,
)


def of_theta(embeddings: tuple[torch.Tensor, torch.Tensor], theta: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosines and sines of other frequencies: the position is read off the fastest one, within a circle."""
    cos, sin = embeddings
    size, length = cos.shape[-1], cos.shape[1]
    turns = torch.arange(512).float()
    guess = (
        torch.stack([turns.cos(), turns.sin()], -1)[None, None]
        - torch.stack([cos[..., 0], sin[..., 0]], -1).float()[:, :, None]
    ).norm(dim=-1)
    slow = powers(1e4, size)[1]
    guess = guess + (
        torch.stack([(turns * slow).cos(), (turns * slow).sin()], -1)[None, None]
        - torch.stack([cos[..., 1], sin[..., 1]], -1).float()[:, :, None]
    ).norm(dim=-1)
    angle = (guess.argmin(-1).float()[..., None] * powers(theta, size)).repeat(1, 1, 2)
    return angle.cos().to(cos.dtype).reshape(-1, length, size), angle.sin().to(sin.dtype).reshape(-1, length, size)


LINEAR = {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}
YARN = {
    "rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 64}
}
LLAMA3 = {
    "rope_parameters": {
        "rope_type": "llama3",
        "factor": 8.0,
        "rope_theta": 1e4,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
}
fault(
    "olmoe",
    "linear-scaling-ignored",
    "linear rope scaling is ignored",
    r"layers\.0\.q_rope",
    1,
    "scaling|linear|factor|positions",
    frequencies(lambda f: 2 * f),
    settings=LINEAR,
)
fault(
    "granitemoe",
    "yarn-factor-dropped",
    "yarn's factor of cos and sin is left out",
    r"layers\.0\.q_rope",
    0,
    "factor|yarn|scal|gain",
    attribute("model.rotary_emb", "attention_scaling", 1.0),
    settings=YARN,
)
fault(
    "mixtral",
    "yarn-ignored",
    "yarn is ignored but for its factor",
    r"layers\.0\.q_rope",
    1,
    "yarn|scaling|frequenc|theta",
    frequencies(lambda f: powers(1e4, 16)),
    settings=YARN,
    dtype=BF16,
)
fault(
    "seed_oss",
    "llama3-ignored",
    "llama3 rope scaling is ignored",
    r"layers\.0\.q_rope",
    1,
    "scaling|llama3",
    frequencies(lambda f: powers(1e4, 16)),
    settings=LLAMA3,
)


def llama3_of_4(model: Any) -> None:
    config = copy.deepcopy(model.config)
    config.rope_parameters["factor"] = 4.0
    frequencies(lambda _: ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")[0])(model)


def short_factors(self: Any, x: torch.Tensor, position_ids: torch.Tensor, *_: Any) -> Any:
    short = torch.tensor(self.config.rope_parameters["short_factor"])
    angles = (position_ids[..., None].float() * (powers(1e4, 16) / short)).repeat(1, 1, 2)
    return (angles.cos() * self.attention_scaling).to(x.dtype), (angles.sin() * self.attention_scaling).to(x.dtype)


fault(
    "arcee",
    "llama3-factor-4",
    "llama3 rope scaling has a factor of 4 instead of 8",
    r"layers\.0\.q_rope",
    1,
    "scaling|llama3|frequenc|factor",
    llama3_of_4,
    settings=LLAMA3,
)
fault(
    "phi3",
    "longrope-short",
    "longrope: beyond the original length the short factors are used",
    r"layers\.0\.q_rope",
    1,
    "long|short|scaling|frequenc|factor",
    forward("model.rotary_emb", short_factors),
    settings={
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "short_factor": [1.0 + 0.1 * i for i in range(8)],
            "long_factor": [1.0 + 0.5 * i for i in range(8)],
            "factor": 4.0,
            "original_max_position_embeddings": 32,
        },
        "original_max_position_embeddings": 32,
    },
)
fault(
    "cohere2",
    "nope-layer-rotated",
    "the layer without positions is rotated",
    r"layers\.1\.(q_rope|k_rope|attention|.*cache|query|key)",
    1,
    ROTARY,
    attribute("model.layers.1.self_attn", "sliding_window", 16),
    dtype=BF16,
)
fault(
    "exaone4",
    "nope-layer-rotated",
    "the full layer is rotated, which has no positions",
    r"layers\.1\.(q_rope|k_rope|attention|.*cache|query|key)",
    1,
    ROTARY,
    attribute("model.layers.1.self_attn", "is_sliding", True),
)
fault(
    "deepseek_v3",
    "rope-interleave-ignored",
    "the rotary part is taken for halves, and is neighbours",
    r"layers\.0\.q_rope",
    0,
    ROTARY + "|pair|interleav|halves|order",
    setting("rope_interleave", False),
)


def query_alone(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *_: Any, **__: Any) -> Any:
    turned = modeling_deepseek_v3.apply_rotary_pos_emb_interleave
    return turned(q, k, cos, sin)[0], turned(q, k, torch.ones_like(cos), torch.zeros_like(sin))[1]


fault(
    "deepseek_v3",
    "latent-key-not-rotated",
    "the shared part of the keys is not rotated",
    r"layers\.0\.(k_rope|attention)",
    1,
    ROTARY,
    names(L0, apply_rotary_pos_emb_interleave=query_alone),
    dtype=BF16,
)
fault(
    "nemotron",
    "whole-head-rotated",
    "the whole head is rotated instead of half",
    r"layers\.0\.q_rope",
    1,
    ROTARY + "|partial",
    frequencies(lambda f: powers(1e4, 16)),
    dtype=F16,
)
fault(
    "helium",
    "half-of-the-frequencies-zero",
    "the slower half of the frequencies is zero",
    r"layers\.0\.q_rope",
    1,
    ROTARY + "|frequenc",
    frequencies(lambda f: torch.cat([f[: len(f) // 2], 0 * f[len(f) // 2 :]])),
)
fault(
    "llama4_text",
    "temperature-dropped",
    "queries of the layer without positions are not scaled by their position",
    r"layers\.1\.(.*query|attention|q_.*|.*o_proj)",
    15,
    "temperature|scal|position|factor|gain",
    attribute("model.layers.1.self_attn", "attn_temperature_tuning", False),
)
fault(
    "llama4_text",
    "qk-norm-dropped",
    "queries and keys are not normalised",
    r"layers\.0\.(.*qk_norm.*|attention|.*query|q_rope)",
    0,
    "norm|skipped|not applied",
    forward("model.layers.0.self_attn.qk_norm", lambda self, x: x),
)
fault(
    "biogpt",
    "position-offset-dropped",
    "the offset of 2 of learned positions is left out",
    r"embed_positions|layers\.0\.",
    0,
    POSITION + "|row|offset",
    attribute("biogpt.embed_positions", "offset", 0),
)
fault(
    "opt",
    "positions-stop-at-31",
    "positions stop at 31",
    r"embed_positions|layers\.0\.",
    32,
    POSITION + "|row|stop|clamp",
    arguments("model.decoder.embed_positions", "position_ids", lambda p: p.clamp(max=31)),
    dtype=F16,
)
fault(
    "gpt2",
    "position-before-in-decode",
    "decode has the position before",
    r"wpe|h\.0\.",
    PROMPT,
    POSITION + "|row",
    inputs("transformer.wpe", lambda p: p - 1 if p.shape[-1] == 1 else p, "input"),
)
fault(
    "gpt_bigcode",
    "no-position-in-decode",
    "decode has no position embedding",
    r"wpe|h\.0\.",
    PROMPT,
    POSITION + "|zero|not added|left out|missing|skipped",
    output("transformer.wpe", lambda out, ids: 0 * out if ids.shape[-1] == 1 else out),
    dtype=BF16,
)


def slopes(change: Callable[[torch.Tensor], torch.Tensor]) -> Plant:
    return all_of(*(arguments(f"transformer.h.{at}.self_attention", "alibi", change) for at in (0, 1)))


def no_alibi_in_decode(model: Any) -> None:
    module = model.transformer.h[0].self_attention
    inner = module.forward
    module.forward = lambda x, *rest, alibi, **named: inner(
        x, *rest, alibi=0 * alibi if is_decode(x) else alibi, **named
    )


def unscaled_alibi(model: Any) -> None:
    for block in model.transformer.h:
        module = block.self_attention
        inner = module.forward

        def run(*args: Any, _inner: Any = inner, attention_mask: Any, alibi: Any, **named: Any) -> Any:
            more = 0.75 * alibi.reshape(len(attention_mask), 4, 1, -1)
            return _inner(
                *args,
                attention_mask=attention_mask.masked_fill(attention_mask > -1e4, 0) * 1
                + (attention_mask > -1e4) * (attention_mask + more),
                alibi=alibi,
                **named,
            )

        module.forward = run


ALIBI = "alibi|slope|bias|distance|position"
fault(
    "bloom",
    "alibi-exponent-off-by-one",
    "slopes are 2^(-8h/n) instead of 2^(-8(h+1)/n)",
    r"h\.0\..*(attention|context|dense.*)",
    1,
    ALIBI,
    slopes(lambda a: 4 * a),
)
fault(
    "bloom",
    "alibi-dropped-in-decode",
    "decode has no ALiBi",
    r"h\.0\..*(attention|context|dense.*)",
    PROMPT,
    ALIBI,
    no_alibi_in_decode,
    dtype=BF16,
)


def mpt_slopes(model: Any) -> None:
    inner = model.transformer.build_mpt_alibi_tensor
    model.transformer.build_mpt_alibi_tensor = lambda heads, length, *args, **named: inner(
        heads, length, *args, **named
    ).flip(0)


fault(
    "mpt",
    "alibi-slopes-reversed",
    "the slopes of the heads are in reverse order",
    r"blocks\.0\..*(attn|attention|context|out_proj.*)",
    1,
    ALIBI + "|head",
    mpt_slopes,
)
RW = {"alibi": True, "multi_query": False, "parallel_attn": False, "bias": True, "new_decoder_architecture": False}
fault(
    "falcon",
    "alibi-not-scaled",
    "ALiBi is added after the scores were scaled",
    r"h\.0\..*(attention|context|dense.*)",
    1,
    ALIBI,
    unscaled_alibi,
    settings=RW,
)

# --- norms -------------------------------------------------------------------------------------------------------------


def per_head(self: Any, x: torch.Tensor) -> torch.Tensor:
    heads = x.unflatten(-1, (-1, 16)).float()
    return (
        self.weight.float()
        * (heads * (heads.pow(2).mean(-1, keepdim=True) + self.variance_epsilon).rsqrt()).flatten(-2)
    ).to(x.dtype)


def rms(self: Any, x: torch.Tensor, *_: Any) -> torch.Tensor:
    eps = getattr(self, "eps", None) or self.variance_epsilon
    fine = x.float()
    done = self.weight.float() * (fine * (fine.pow(2).mean(-1, keepdim=True) + eps).rsqrt())
    return (done if getattr(self, "bias", None) is None else done + self.bias.float()).to(x.dtype)


def same(self: Any, x: torch.Tensor, *_: Any) -> torch.Tensor:
    return x


WEIGHT = r"weight|scale|norm|parameter"
SKIPPED = (
    r"not applied|skipped|left out|identity|is the input|unchanged|no norm|without|passes|its input|not normed|input"
)
fault(
    "olmo2",
    "norm-per-head",
    "the norm of queries is per head instead of over all",
    r"layers\.0\.self_attn\.q_norm",
    0,
    "head|group",
    forward(L0 + ".q_norm", per_head),
)
fault(
    "persimmon",
    "mean-not-taken",
    "a LayerNorm does not take the mean off",
    r"layers\.0\.input_layernorm",
    0,
    "mean|RMS",
    forward("model.layers.0.input_layernorm", rms),
)
fault(
    "cohere",
    "mean-not-taken",
    "the LayerNorm is an RMSNorm",
    r"layers\.0\.input_layernorm",
    0,
    "mean|RMS",
    forward("model.layers.0.input_layernorm", rms),
    dtype=F16,
)
fault(
    "starcoder2",
    "norm-bias-dropped",
    "the bias of a norm is left out",
    r"layers\.0\.post_attention_layernorm",
    0,
    "bias",
    weight("model.layers.0.post_attention_layernorm.bias", lambda x: 0 * x),
    dtype=BF16,
)
fault(
    "nemotron",
    "weight-without-one",
    "the norm's weight is used without the one",
    r"layers\.0\.input_layernorm",
    0,
    WEIGHT + "|1",
    weight("model.layers.0.input_layernorm.weight", lambda x: x - 1),
)
fault(
    "gemma2",
    "final-weight-without-one",
    "the last norm's weight is used without the one",
    r"model\.norm",
    None,
    WEIGHT + "|1",
    weight("model.norm.weight", lambda x: x - 1),
    request=None,
)
fault(
    "glm4",
    "sandwich-norms-exchanged",
    "the norms behind attention and behind the MLP are exchanged",
    r"layers\.0\.post_self_attn_layernorm",
    0,
    WEIGHT,
    exchanged("model.layers.0.post_self_attn_layernorm.weight", "model.layers.0.post_mlp_layernorm.weight"),
)
fault(
    "glm4",
    "sandwich-norm-skipped",
    "the norm behind attention is skipped",
    r"layers\.0\.post_self_attn_layernorm",
    0,
    SKIPPED,
    forward("model.layers.0.post_self_attn_layernorm", same),
    dtype=BF16,
)
fault(
    "gemma2",
    "norm-of-the-other-site",
    "the norm behind the MLP has the weight of the one before it",
    r"layers\.0\.post_feedforward_layernorm",
    0,
    WEIGHT,
    weight_of("model.layers.0.post_feedforward_layernorm.weight", "model.layers.0.pre_feedforward_layernorm.weight"),
    dtype=BF16,
)
fault(
    "olmo",
    "eps-1e-3",
    "the eps of a norm without weight is 1e-3",
    r"layers\.0\.input_layernorm",
    0,
    "eps",
    forward("model.layers.0.input_layernorm", lambda self, x: functional.layer_norm(x, (64,), eps=1e-3)),
)
fault(
    "mamba",
    "final-eps",
    "the eps of the last norm is 1e-3",
    r"norm_f",
    None,
    "eps",
    attribute("backbone.norm_f", "variance_epsilon", 1e-3),
    request=None,
)
fault(
    "falcon_h1",
    "norm-of-the-layer-before",
    "layer 1 has layer 0's norm",
    r"layers\.1\.input_layernorm",
    0,
    WEIGHT + "|layer",
    weight_of("model.layers.1.input_layernorm.weight", "model.layers.0.input_layernorm.weight"),
    dtype=BF16,
)
fault(
    "dbrx",
    "norms-exchanged",
    "the two norms of a layer are exchanged",
    r"blocks\.0\.norm_attn_norm\.norm_1",
    0,
    WEIGHT,
    exchanged("transformer.blocks.0.norm_attn_norm.norm_1.weight", "transformer.blocks.0.norm_attn_norm.norm_2.weight"),
)
fault(
    "bitnet",
    "sub-norm-skipped",
    "the norm before o_proj is skipped",
    r"layers\.0\.self_attn\.attn_sub_norm",
    0,
    SKIPPED,
    forward(L0 + ".attn_sub_norm", same),
)
fault(
    "stablelm",
    "norm-heads-reversed",
    "the weights of the heads' norms are in reverse order",
    r"layers\.0\.self_attn\.q_layernorm.*",
    0,
    WEIGHT + "|head|order",
    exchanged(L0 + ".q_layernorm.norms.0.weight", L0 + ".q_layernorm.norms.3.weight"),
    settings={"qk_layernorm": True},
)
fault(
    "jamba",
    "dt-norm-skipped",
    "the norm of the scan's steps is skipped",
    r"layers\.0\.mamba\.dt_layernorm|layers\.0\.mamba",
    0,
    SKIPPED + "|step|dt",
    forward("model.layers.0.mamba.dt_layernorm", same),
)


def gate_last(self: Any, x: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
    groups = x.float().unflatten(-1, (-1, self.group_size))
    done = self.weight.float() * (
        groups * (groups.pow(2).mean(-1, keepdim=True) + self.variance_epsilon).rsqrt()
    ).flatten(-2)
    return (done * functional.silu(gate.float())).to(x.dtype)


fault(
    "mamba2",
    "gate-after-norm",
    "the gate is multiplied after the norm instead of before",
    r"layers\.0\.mixer\.norm",
    0,
    "gate|order|before|after",
    forward("backbone.layers.0.mixer.norm", gate_last),
)
fault(
    "mamba2",
    "gate-skipped",
    "the gate of the norm is left out",
    r"layers\.0\.mixer\.norm",
    0,
    "gate",
    forward("backbone.layers.0.mixer.norm", lambda self, x, gate=None: type(self).forward(self, x, None)),
    dtype=BF16,
)

# --- wiring, factors ---------------------------------------------------------------------------------------------------


def post_norm_first(model: Any) -> None:
    """A post-norm layer computed as a pre-norm one: attention reads the normed stream."""
    norm = model.model.layers[0].post_attention_layernorm
    inputs(L0, lambda x: type(norm).forward(norm, x))(model)


fault(
    "exaone4",
    "pre-norm",
    "attention reads the normed stream (a pre-norm layer)",
    r"layers\.0\.self_attn\.(q_proj|k_proj|v_proj|input)|layers\.0\.input",
    0,
    "norm|input",
    post_norm_first,
)
fault(
    "olmo2",
    "mlp-pre-norm",
    "the MLP reads the normed stream (a pre-norm layer)",
    r"layers\.0\.(mlp.*|attn_residual)",
    0,
    "norm|input",
    lambda model: inputs(
        "model.layers.0.mlp",
        lambda x: type(model.model.layers[0].post_feedforward_layernorm).forward(
            model.model.layers[0].post_feedforward_layernorm, x
        ),
        "x",
    )(model),
)
fault(
    "gpt_neox",
    "sequential-residual",
    "the residuals are sequential instead of parallel",
    r"layers\.0\.post_attention_layernorm",
    0,
    "residual|parallel|sequential|input|attention",
    attribute("gpt_neox.layers.0", "use_parallel_residual", False),
)
fault(
    "gpt_neox",
    "parallel-residual",
    "the residuals are parallel instead of sequential",
    r"layers\.0\.(post_attention_layernorm.*|attn_residual|output)",
    0,
    "residual|parallel|sequential|input|attention",
    attribute("gpt_neox.layers.0", "use_parallel_residual", True),
    settings={"use_parallel_residual": False},
    dtype=BF16,
)


def raw_mlp(model: Any) -> None:
    held: list[torch.Tensor] = []
    inputs("model.layers.0.input_layernorm", lambda x: held.append(x) or x, "input")(model)
    inputs("model.layers.0.mlp", lambda _: held[-1])(model)


fault(
    "phi",
    "mlp-without-norm",
    "the parallel MLP reads the stream before its norm",
    r"layers\.0\.mlp\.(fc1|input)",
    0,
    "norm|input",
    raw_mlp,
)
fault(
    "falcon",
    "norms-of-branches-exchanged",
    "the norms of attention and MLP are exchanged",
    r"h\.0\.ln_attn",
    0,
    WEIGHT,
    exchanged("transformer.h.0.ln_attn.weight", "transformer.h.0.ln_mlp.weight"),
    settings={"new_decoder_architecture": True, "num_kv_heads": 2},
)


def without_residual_factor(model: Any) -> None:
    output("model.layers.0.mlp", lambda out, *_: out / 0.6)(model)


fault(
    "granite",
    "residual-multiplier-on-attention-only",
    "the MLP's branch is added without residual_multiplier",
    r"layers\.0\.(output|mlp)",
    0,
    FACTOR,
    without_residual_factor,
)
fault(
    "granite",
    "embedding-multiplier-twice",
    "embedding_multiplier is applied twice",
    r"layers\.0\.input|embed_tokens",
    0,
    FACTOR,
    attribute("model", "embedding_multiplier", 2.25),
    dtype=BF16,
)
fault(
    "granite",
    "logits-scaling-multiplies",
    "logits are multiplied by logits_scaling instead of divided",
    r"logits",
    None,
    FACTOR,
    setting("logits_scaling", 1 / 1.5),
    request=None,
)
fault(
    "cohere",
    "logit-scale-dropped",
    "logits are not scaled",
    r"logits",
    None,
    FACTOR,
    attribute("", "logit_scale", 1.0),
    request=None,
)
fault(
    "gemma2",
    "final-cap-dropped",
    "logits are not capped",
    r"logits",
    None,
    "cap",
    setting("final_logit_softcapping", None),
    request=None,
)
fault(
    "recurrent_gemma",
    "final-cap-30",
    "logits are capped at 30 instead of 3",
    r"logits",
    None,
    "cap",
    setting("logits_soft_cap", 30.0),
    request=None,
    dtype=F16,
)
fault(
    "falcon_h1",
    "gate-multiplier-dropped",
    "the gate of the MLP has no multiplier",
    r"layers\.0\.feed_forward\.act.*",
    0,
    FACTOR + "|gate|slope",
    attribute("model.layers.0.feed_forward", "gate_multiplier", 1.0),
)
fault(
    "falcon_h1",
    "ssm-out-multiplier-dropped",
    "the mixer's branch of layer 1 has no multiplier",
    r"layers\.1\.(pre_ff_layernorm\.input|attn_residual|mamba)",
    0,
    FACTOR + "|branch",
    attribute("model.layers.1", "ssm_out_multiplier", 1.0),
    dtype=BF16,
)
fault(
    "falcon_h1",
    "key-multiplier-dropped",
    "keys have no multiplier",
    r"layers\.0\.(k_rope|self_attn\.k_proj)",
    0,
    FACTOR,
    attribute(L0, "key_multiplier", 1.0),
)
fault(
    "falcon_h1",
    "multipliers-of-segments",
    "B has the multiplier of C",
    r"layers\.0\.mamba",
    0,
    FACTOR + "|segment|B|input",
    weight("model.layers.0.mamba.mup_vector", lambda x: torch.where(x == x[..., 256:257], x[..., 288:289], x)),
)
fault(
    "biogpt",
    "embedding-scale-dropped",
    "embeddings are not scaled",
    r"embed_tokens|layers\.0\.",
    0,
    FACTOR,
    attribute("biogpt.embed_tokens", "embed_scale", 1.0),
    dtype=BF16,
)
fault(
    "recurrent_gemma",
    "embedding-normaliser-dropped",
    "embeddings are not scaled",
    r"layers\.0\.input|embed_tokens",
    0,
    FACTOR,
    weight("model.normalizer", lambda x: 0 * x + 1),
)
fault(
    "minimax",
    "beta-dropped",
    "the attention branch of layer 0 has a factor that the model does not know",
    r"layers\.0\.(attn_residual|.*input|post_attention_layernorm.*|output)",
    0,
    FACTOR + "|residual|branch",
    attribute("model.layers.0", "attn_beta_factor", 0.5),
)


def normed_residual(self: Any, hidden_states: torch.Tensor, **named: Any) -> torch.Tensor:
    normed = self.input_layernorm(hidden_states)
    hidden = normed + self.self_attn(hidden_states=normed, **named)[0]
    return hidden + self.mlp(self.post_attention_layernorm(hidden))


def mlp_only(self: Any, hidden_states: torch.Tensor, **named: Any) -> torch.Tensor:
    hidden = hidden_states + self.self_attn(hidden_states=self.input_layernorm(hidden_states), **named)[0]
    return self.mlp(self.post_attention_layernorm(hidden))


fault(
    "mixtral",
    "residual-of-the-normed",
    "the normed stream is added instead of the stream",
    r"layers\.1\.attn_residual",
    0,
    "residual|norm|stream|branch|input",
    forward("model.layers.1", normed_residual),
)
fault(
    "olmoe",
    "residual-dropped",
    "the MLP's output stands for the sum",
    r"layers\.0\.output",
    0,
    "residual|not added|left out|stream|branch|missing|alone",
    forward("model.layers.0", mlp_only),
    dtype=F16,
)
fault(
    "arcee",
    "activation-not-squared",
    "ReLU instead of its square",
    r"layers\.0\.mlp\.(act.*|down_proj\.input)",
    0,
    "relu|ReLU|activation|square",
    forward("model.layers.0.mlp.act_fn", lambda self, x: functional.relu(x)),
)
fault(
    "gpt_neox",
    "gelu-tanh",
    "GELU by its tanh formula",
    r"layers\.0\.mlp\.(act.*|dense_4h_to_h\.input)",
    0,
    "tanh|gelu|GELU|activation",
    forward("gpt_neox.layers.0.mlp.act", lambda self, x: functional.gelu(x, approximate="tanh")),
)
fault(
    "diffllama",
    "lambda-of-the-next-layer",
    "lambda_init is that of the next layer",
    r"layers\.0\.(.*groupnorm.*|attention.*|.*o_proj.*)",
    0,
    None,
    attribute(L0, "lambda_init", 0.8 - 0.6 * 2.718281828459045**-0.3),
)


def other_half(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    up, gate = self.gate_up_proj(hidden_states).chunk(2, dim=-1)
    return self.down_proj(up * self.activation_fn(gate))


fault(
    "phi3",
    "gate-and-up-exchanged",
    "the activation is on the other half",
    r"layers\.0\.mlp\.(act.*|down_proj.*)",
    0,
    "gate|up|half|exchang|swap",
    forward("model.layers.0.mlp", other_half),
)

# --- weights -----------------------------------------------------------------------------------------------------------

fault(
    "starcoder2",
    "weight-of-the-next-layer",
    "c_proj of layer 0 holds layer 1's",
    r"layers\.0\.mlp\.c_proj",
    0,
    "layer|weight",
    weight_of("model.layers.0.mlp.c_proj.weight", "model.layers.1.mlp.c_proj.weight"),
)
fault(
    "phi3",
    "k-and-v-exchanged",
    "rows of k and v are exchanged in the fused product",
    r"layers\.0\.self_attn\.(qkv_proj)",
    0,
    ORDER,
    weight(L0 + ".qkv_proj.weight", lambda w: torch.cat([w[:64], w[96:], w[64:96]])),
    dtype=BF16,
)
fault(
    "gpt_neox",
    "fused-by-part",
    "rows of the fused product are by part instead of by head",
    r"layers\.0\.attention\.query_key_value",
    0,
    ORDER,
    weight(
        "gpt_neox.layers.0.attention.query_key_value.weight",
        lambda w: w.unflatten(0, (4, 3, 16)).transpose(0, 1).flatten(0, 2),
    ),
)
fault(
    "bloom",
    "fused-by-part",
    "rows of the fused product are by part instead of by head",
    r"h\.0\.self_attention\.query_key_value",
    0,
    ORDER,
    weight(
        "transformer.h.0.self_attention.query_key_value.weight",
        lambda w: w.unflatten(0, (4, 3, 16)).transpose(0, 1).flatten(0, 2),
    ),
    dtype=BF16,
)
fault(
    "mpt",
    "q-and-k-exchanged",
    "rows of q and k are exchanged",
    r"blocks\.0\.attn\.Wqkv",
    0,
    ORDER,
    weight("transformer.blocks.0.attn.Wqkv.weight", lambda w: torch.cat([w[64:128], w[:64], w[128:]])),
    dtype=F16,
)
fault(
    "gpt2",
    "conv1d-transposed",
    "a square weight is not transposed",
    r"h\.0\.attn\.c_proj",
    0,
    "transpos",
    weight("transformer.h.0.attn.c_proj.weight", lambda w: w.T),
)
fault(
    "opt",
    "out-proj-transposed",
    "a square weight is transposed",
    r"layers\.0\.self_attn\.out_proj",
    0,
    "transpos",
    weight("model.decoder.layers.0.self_attn.out_proj.weight", lambda w: w.T),
    dtype=BF16,
)
fault(
    "codegen",
    "value-and-key-exchanged",
    "the parts of each shard are q, k, v instead of q, v, k",
    r"h\.0\.attn\.qkv_proj",
    0,
    ORDER,
    weight("transformer.h.0.attn.qkv_proj.weight", lambda w: w.unflatten(0, (4, 3, 16))[:, [0, 2, 1]].flatten(0, 2)),
)
fault(
    "jetmoe",
    "kv-halves-exchanged",
    "keys and values are exchanged in the fused product",
    r"layers\.0\.self_attention\.kv_proj",
    0,
    ORDER + "|half",
    weight("model.layers.0.self_attention.kv_proj.weight", lambda w: w.roll(32, 0)),
    dtype=BF16,
)
fault(
    "deepseek_v3",
    "kv-b-by-part",
    "rows of kv_b_proj are by part instead of by head",
    r"layers\.0\.self_attn\.kv_b_proj",
    0,
    ORDER,
    weight(L0 + ".kv_b_proj.weight", lambda w: w.unflatten(0, (4, 2, 16)).transpose(0, 1).flatten(0, 2)),
)
fault(
    "nemotron",
    "int8-weights",
    "a weight is rounded to int8 with a scale of its own",
    r"layers\.0\.mlp\.down_proj",
    0,
    ROUND,
    weight("model.layers.0.mlp.down_proj.weight", lambda w: (w / w.abs().amax() * 127).round() * w.abs().amax() / 127),
)
fault(
    "olmo",
    "head-tied",
    "the head is the embedding, which is not tied",
    r"lm_head",
    None,
    "embed|tied|weight",
    weight_of("lm_head.weight", "model.embed_tokens.weight"),
    request=None,
)
fault(
    "stablelm",
    "head-rows-zero",
    "the last 8 rows of the head are zero",
    r"lm_head",
    None,
    "zero|row|output",
    weight("lm_head.weight", lambda w: torch.cat([w[:-8], 0 * w[-8:]])),
    request=None,
)
fault(
    "falcon",
    "rank-repeated",
    "the second half of the inputs has the first half's weights",
    r"h\.0\.self_attention\.dense",
    0,
    "half|input|column|rank|weight|shard|part",
    weight("transformer.h.0.self_attention.dense.weight", lambda w: torch.cat([w[:, :32], w[:, :32]], 1)),
    dtype=BF16,
)
fault(
    "cohere",
    "partial-sum",
    "the second half of the inputs is not summed",
    r"layers\.0\.self_attn\.o_proj",
    0,
    "half|input|column|rank|sum|part|zero|shard",
    weight(L0 + ".o_proj.weight", lambda w: torch.cat([w[:, :32], 0 * w[:, 32:]], 1)),
)
fault(
    "gptj",
    "head-bias-dropped",
    "the bias of the head is left out",
    r"lm_head",
    None,
    "bias",
    weight("lm_head.bias", lambda x: 0 * x),
    request=None,
    dtype=BF16,
)
fault(
    "glm4",
    "key-bias-dropped",
    "the bias of the keys is left out",
    r"layers\.0\.self_attn\.k_proj",
    0,
    "bias",
    weight(L0 + ".k_proj.bias", lambda x: 0 * x),
    dtype=F16,
)
fault(
    "gpt_oss",
    "router-bias-dropped",
    "the bias of the router is left out",
    r"layers\.0\.mlp\.router",
    0,
    "bias",
    weight("model.layers.0.mlp.router.bias", lambda x: 0 * x),
)
fault(
    "persimmon",
    "bias-of-the-next-layer",
    "a bias is that of the next layer",
    r"layers\.0\.mlp\.dense_h_to_4h",
    0,
    "bias",
    weight_of("model.layers.0.mlp.dense_h_to_4h.bias", "model.layers.1.mlp.dense_h_to_4h.bias"),
    dtype=F16,
)
fault(
    "mamba",
    "x-and-z-exchanged",
    "the halves of in_proj are exchanged",
    r"layers\.0\.mixer\.in_proj",
    0,
    ORDER + "|half",
    weight("backbone.layers.0.mixer.in_proj.weight", lambda w: w.roll(128, 0)),
)
fault(
    "lfm2",
    "in-proj-order",
    "the parts of in_proj are C, B, x instead of B, C, x",
    r"layers\.0\.conv\.in_proj",
    0,
    ORDER,
    weight("model.layers.0.conv.in_proj.weight", lambda w: torch.cat([w[64:128], w[:64], w[128:]])),
)
fault(
    "helium",
    "token-ids-int8",
    "ids from 128 on wrap around (a signed byte)",
    r"embed_tokens",
    None,
    "token|row|embed|id",
    inputs("model.embed_tokens", lambda ids: torch.where(ids > 127, ids - 128, ids), "input"),
    request=None,
)
fault(
    "arcee",
    "next-token-id",
    "the embedding of the next id is looked up",
    r"embed_tokens",
    0,
    "token|row|embed|id",
    inputs("model.embed_tokens", lambda ids: ids + 1, "input"),
    dtype=BF16,
)
fault(
    "mixtral",
    "one-bit",
    "one element of a weight has another exponent",
    r"layers\.0\.self_attn\.q_proj",
    0,
    "element|weight|row|output|one",
    weight(L0 + ".q_proj.weight", lambda w: w.index_put((torch.tensor(5), torch.tensor(9)), w[5, 9] * 256)),
    dtype=BF16,
)
fault(
    "olmo2",
    "lora-left-merged",
    "an adapter of rank 1 is still merged",
    r"layers\.0\.self_attn\.v_proj",
    0,
    "rank|adapter|LoRA|update|merged",
    weight(
        L0 + ".v_proj.weight",
        lambda w: w + 0.3 * torch.outer(torch.linspace(-1, 1, 32), torch.linspace(1, 0, 64).cos()),
    ),
    dtype=F16,
)
fault(
    "xglm",
    "weight-scaled-twice",
    "a weight is multiplied by its scale twice",
    r"layers\.0\.fc1",
    0,
    FACTOR,
    weight("model.layers.0.fc1.weight", lambda w: 0.5 * w),
)

# --- experts -----------------------------------------------------------------------------------------------------------

NORMAL = "normali|renormal|sum"


def softmax_router(*, is_normal: bool) -> Callable[..., Any]:
    def route(self: Any, hidden_states: torch.Tensor) -> Any:
        logits = functional.linear(hidden_states.reshape(-1, self.hidden_dim), self.weight)
        values, chosen = torch.topk(functional.softmax(logits.float(), dim=-1), self.top_k, dim=-1)
        return logits, (values / values.sum(-1, keepdim=True) if is_normal else values).to(logits.dtype), chosen

    return route


M1 = "model.layers.1.mlp"
fault(
    "mixtral",
    "weights-not-renormalised",
    "the weights of the chosen experts are not renormalised",
    r"layers\.0\.mlp\.gate\.1",
    0,
    NORMAL,
    forward("model.layers.0.mlp.gate", softmax_router(is_normal=False)),
)
fault(
    "olmoe",
    "weights-renormalised",
    "the weights of the chosen experts are renormalised, which this model does not",
    r"layers\.0\.mlp\.gate\.1",
    0,
    NORMAL,
    attribute("model.layers.0.mlp.gate", "norm_topk_prob", True),
    dtype=BF16,
)
fault(
    "deepseek_v3",
    "routed-scaling-dropped",
    "routed_scaling_factor is left out",
    r"layers\.1\.mlp\.gate\.1",
    0,
    FACTOR,
    attribute(M1 + ".gate", "routed_scaling_factor", 1.0),
)


def with_corrected_weights(model: Any) -> None:
    gate = model.get_submodule(M1 + ".gate")

    def change(out: Any, *_: Any) -> Any:
        logits, _weights, chosen = out
        scores_ = (logits.float().sigmoid() + gate.e_score_correction_bias).gather(1, chosen)
        return logits, (scores_ / scores_.sum(-1, keepdim=True) * gate.routed_scaling_factor).to(out[1].dtype), chosen

    output(M1 + ".gate", change)(model)


fault(
    "deepseek_v3",
    "corrected-weights",
    "the correction that chooses experts is in their weights, too",
    r"layers\.1\.mlp\.gate\.1",
    0,
    "bias|correct",
    with_corrected_weights,
    dtype=BF16,
)
fault(
    "glm4_moe",
    "correction-dropped",
    "experts are chosen without the correction",
    r"layers\.1\.mlp\.gate.*",
    None,
    "bias|correct|expert",
    weight(M1 + ".gate.e_score_correction_bias", lambda x: 0 * x),
    request=None,
)
fault(
    "glm4_moe",
    "groups-ignored",
    "experts are chosen from all groups",
    r"layers\.1\.mlp\.gate.*",
    None,
    "group|expert",
    attribute(M1 + ".gate", "topk_group", 2),
    request=None,
    dtype=BF16,
)
fault(
    "ernie4_5_moe",
    "one-expert",
    "one expert a token instead of two",
    r"layers\.1\.mlp.*",
    0,
    "one|fewer|top|expert",
    attribute(M1 + ".gate", "top_k", 1),
)
fault(
    "granitemoe",
    "experts-exchanged",
    "two experts are exchanged",
    r"layers\.0\.block_sparse_moe.*",
    None,
    EXPERT,
    all_of(
        weight("model.layers.0.block_sparse_moe.experts.gate_up_proj", lambda w: w[[0, 1, 2, 5, 4, 3, 6, 7]]),
        weight("model.layers.0.block_sparse_moe.experts.down_proj", lambda w: w[[0, 1, 2, 5, 4, 3, 6, 7]]),
    ),
    request=None,
)
fault(
    "olmoe",
    "one-expert-gate-and-up",
    "one expert has gate and up exchanged",
    r"layers\.0\.mlp\.experts.*",
    None,
    EXPERT + "|gate",
    weight(
        "model.layers.0.mlp.experts.gate_up_proj",
        lambda w: torch.stack([x.roll(96, 0) if at == 2 else x for at, x in enumerate(w)]),
    ),
    request=None,
    dtype=BF16,
)
fault(
    "mixtral",
    "expert-dropped",
    "expert 3 is on a rank that adds nothing",
    r"layers\.0\.mlp\.experts.*",
    None,
    EXPERT,
    weight(
        "model.layers.0.mlp.experts.down_proj",
        lambda w: torch.stack([0 * x if at == 3 else x for at, x in enumerate(w)]),
    ),
    request=None,
    schedule="chunked:9",
)
fault(
    "jamba",
    "weights-renormalised",
    "the weights of the chosen experts are renormalised, which this model does not",
    r"layers\.0\.feed_forward\.(router.*|experts.*)",
    0,
    NORMAL + "|" + FACTOR,
    output(
        "model.layers.0.feed_forward.router",
        lambda out, *_: tuple(
            x / x.sum(-1, keepdim=True) if x.is_floating_point() and x.shape[-1] == 2 else x for x in out
        ),
    ),
)
fault(
    "qwen3_next",
    "shared-gate-without-sigmoid",
    "the shared expert's gate has no sigmoid",
    r"layers\.0\.mlp(\..*)?$",
    0,
    "gate|sigmoid|shared",
    names("model.layers.0.mlp", F=types.SimpleNamespace(sigmoid=lambda x: x)),
)


def routed_only(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    _, weights, chosen = self.gate(hidden_states)
    self.shared_experts(hidden_states)
    return self.experts(hidden_states.flatten(0, -2), chosen, weights).view_as(hidden_states)


fault(
    "deepseek_v3",
    "shared-expert-dropped",
    "the shared experts are not added",
    r"layers\.1\.mlp$",
    0,
    "shared|not added|left out|expert",
    forward(M1, routed_only),
)
fault(
    "dbrx",
    "p-norm-2",
    "the experts' weights are normalised by their L2 norm",
    r"blocks\.0\.ffn.*",
    0,
    NORMAL + "|" + FACTOR + "|norm",
    attribute("transformer.blocks.0.ffn", "moe_normalize_expert_weights", 2.0),
)
fault(
    "jetmoe",
    "expert-bias-dropped",
    "the bias behind the experts of attention is left out",
    r"layers\.0\.self_attention",
    0,
    "bias|offset|constant",
    weight("model.layers.0.self_attention.experts.bias", lambda x: 0 * x),
)
fault(
    "gpt_oss",
    "clamp-dropped",
    "the experts' activation is not clamped",
    r"layers\.0\.mlp\.experts",
    None,
    "clamp|limit|cap",
    attribute("model.layers.0.mlp.experts", "limit", 1e4),
    request=None,
)
fault(
    "gpt_oss",
    "alpha-1",
    "the experts' activation is SiLU instead of x * sigmoid(1.702 x)",
    r"layers\.0\.mlp\.experts",
    0,
    "alpha|1\\.702|silu|SiLU|activation|slope",
    attribute("model.layers.0.mlp.experts", "alpha", 1.0),
    dtype=BF16,
)
fault(
    "minimax",
    "router-of-the-next-layer",
    "the router has the next layer's weight",
    r"layers\.0\.mlp\.gate",
    0,
    "layer|weight",
    weight_of("model.layers.0.mlp.gate.weight", "model.layers.1.mlp.gate.weight"),
    dtype=BF16,
)
fault(
    "phimoe",
    "softmax-for-sparsemixer",
    "weights are a softmax over the two chosen",
    r"layers\.0\.mlp\.router.*",
    0,
    "softmax|weight|normali|router",
    output("model.layers.0.mlp.router", lambda out, *_: (out[0], out[0].gather(1, out[2]).softmax(-1), out[2])),
)

# --- states ------------------------------------------------------------------------------------------------------------

CONV = r"layers\.0\.(mixer|mamba|linear_attn|conv)\.?.*"


def held(change: Callable[[torch.Tensor], torch.Tensor], which: str = "recurrent") -> Plant:
    def get(inner: Any, *args: Any, **named: Any) -> Any:
        state = inner(*args, **named)
        return None if state is None else state.copy_(change(state))

    return cache(**{f"get_{which}_state": get})


fault(
    "mamba",
    "conv-state-shifted",
    "the state of the convolution is one token late",
    CONV,
    PROMPT,
    "conv|state|shift|token",
    held(lambda x: x.roll(1, -1), "conv"),
)
fault(
    "mamba",
    "state-bfloat16",
    "the state is kept in bfloat16",
    CONV,
    PROMPT,
    ROUND + "|state",
    held(lambda x: x.bfloat16().to(x.dtype)),
)
fault(
    "mamba2",
    "conv-state-lost",
    "the convolution begins anew in each chunk",
    CONV,
    7,
    CHUNK + "|conv",
    held(lambda x: 0 * x, "conv"),
    schedule="chunked:7",
)
fault(
    "mamba2",
    "skip-dropped",
    "the skip D x is left out",
    r"layers\.0\.mixer.*",
    0,
    "skip|D",
    weight("backbone.layers.0.mixer.D", lambda x: 0 * x),
)
fault(
    "mamba2",
    "dt-bias-dropped",
    "dt_bias is left out",
    r"layers\.0\.mixer.*",
    0,
    "dt|step|bias",
    weight("backbone.layers.0.mixer.dt_bias", lambda x: 0 * x),
    dtype=BF16,
)
fault(
    "mamba2",
    "state-lost",
    "the state begins anew in each chunk",
    CONV,
    7,
    CHUNK,
    held(lambda x: 0 * x),
    schedule="chunked:7",
)
fault(
    "falcon_h1",
    "decay-heads-reversed",
    "the decays of the heads are in reverse order",
    r"layers\.0\.mamba.*",
    1,
    "decay|A_log|head|A",
    weight("model.layers.0.mamba.A_log", lambda x: x.flip(0)),
)
fault(
    "zamba2",
    "b-and-c-exchanged",
    "B and C are exchanged in the fused product",
    r"layers\.0\.mamba\.in_proj",
    0,
    ORDER,
    weight("model.layers.0.mamba.in_proj.weight", lambda w: torch.cat([w[:256], w[272:288], w[256:272], w[288:]])),
    dtype=BF16,
)
fault(
    "recurrent_gemma",
    "decay-of-the-next-layer",
    "the decay is the next layer's",
    r"layers\.0\.temporal_block\.rg_lru",
    1,
    "decay|layer|weight|param|recurrent",
    weight_of(
        "model.layers.0.temporal_block.rg_lru.recurrent_param", "model.layers.1.temporal_block.rg_lru.recurrent_param"
    ),
)
fault(
    "recurrent_gemma",
    "state-forgotten-in-decode",
    "decode begins with a state of zero",
    r"layers\.0\.temporal_block\.rg_lru",
    PROMPT,
    STATE,
    lambda model: inputs(
        "model.layers.0.temporal_block.rg_lru",
        lambda x: (
            [setattr(model.model.layers[0].temporal_block.rg_lru, "recurrent_states", None), x][1]
            if x.shape[1] == 1
            else x
        ),
        "activations",
    )(model),
)
fault(
    "qwen3_next",
    "state-bfloat16",
    "the state is kept in bfloat16",
    CONV,
    PROMPT,
    ROUND + "|state",
    held(lambda x: x.bfloat16().to(x.dtype)),
)
fault(
    "qwen3_next",
    "conv-state-lost",
    "the convolution begins anew in each chunk",
    CONV,
    7,
    CHUNK + "|conv",
    held(lambda x: 0 * x, "conv"),
    schedule="chunked:7",
    dtype=BF16,
)
fault(
    "jamba",
    "b-and-c-exchanged",
    "B and C are exchanged in x_proj",
    r"layers\.0\.mamba\.x_proj",
    0,
    ORDER,
    weight("model.layers.0.mamba.x_proj.weight", lambda w: torch.cat([w[:4], w[20:36], w[4:20]])),
)
fault(
    "lfm2",
    "kernel-reversed",
    "the kernel of the convolution is in reverse order",
    r"layers\.0\.conv.*",
    0,
    "kernel|revers|order|flip|conv",
    weight("model.layers.0.conv.conv.weight", lambda w: w.flip(-1)),
)
fault(
    "bamba",
    "state-doubled",
    "the state is added twice on the way from prefill to decode",
    CONV,
    PROMPT,
    STATE + "|decay|twice|factor",
    held(lambda x: 2 * x),
    dtype=BF16,
)


def faster_slopes(model: Any) -> None:
    module = model.model.layers[1].self_attn
    module.slope_rate = 2 * module.slope_rate
    module.query_decay, module.key_decay, module.diagonal_decay = module.decay_factors(module.slope_rate)


fault(
    "minimax",
    "slopes-doubled",
    "the decay of linear attention is twice as fast",
    r"layers\.1\.self_attn.*",
    1,
    "decay|slope|state",
    faster_slopes,
)

# --- the cache ---------------------------------------------------------------------------------------------------------


def written(change: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]) -> Plant:
    return cache(update=lambda inner, k, v, *rest, **named: inner(*change(k, v), *rest, **named))


def float8(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.float8_e4m3fn).to(x.dtype)


CACHE = r"layers\.0\..*(cache|k_rope|key|value|v_proj|attention|context)"
fault(
    "cohere",
    "cache-float8",
    "keys and values are kept in float8 without scales",
    CACHE,
    0,
    ROUND,
    written(lambda k, v: (float8(k), float8(v))),
)
fault(
    "gpt_neox",
    "cache-clipped",
    "values are kept in int8 with a scale that clips at 1",
    CACHE,
    0,
    ROUND + "|clip|cap|clamp|limit",
    written(lambda k, v: (k, (v.clamp(-1, 1) * 127).round() / 127)),
    dtype=F16,
)
fault(
    "phi",
    "last-key-of-the-chunk-lost",
    "the last key of a chunk is not written",
    r"layers\.0\..*(cache|k_rope|attention|context|dense)",
    None,
    "zero|key|slot|position|written|cache",
    written(lambda k, v: (torch.cat([k[:, :, :-1], 0 * k[:, :, -1:]], 2) if k.shape[2] > 1 else k, v)),
    schedule="chunked:16",
    request=None,
)
fault(
    "starcoder2",
    "values-of-the-wrong-head",
    "the heads of the values are exchanged where they are written",
    CACHE,
    0,
    HEADS,
    written(lambda k, v: (k, v.flip(1))),
)
fault(
    "exaone4",
    "keys-scaled-in-cache",
    "keys are kept with a scale that is not undone",
    CACHE,
    0,
    FACTOR,
    written(lambda k, v: (1.25 * k, v)),
    dtype=BF16,
)

# --- a step engine, whose taps are found by content ----------------------------------------------------------------------

LAYER_0 = r"layers\.0\..*"


def stepped(wrong: str, what: str, where: str, row: int | None, says: str | None, **more: Any) -> None:
    fault("gpt_neox", f"own-{wrong}", what, where, row, says, None, engine=f"own:{wrong}", **more)


stepped(
    "whole-head",
    "the whole head is rotated instead of a quarter",
    LAYER_0 + "(rope|attention|context|cache|dense)",
    1,
    ROTARY + "|partial",
)
stepped(
    "fused-by-part",
    "rows of the fused product are read by part instead of by head",
    LAYER_0,
    0,
    ORDER + "|head|part",
    dtype=BF16,
)
stepped(
    "chunk-positions",
    "positions begin anew in each chunk",
    LAYER_0 + "(rope|attention|context|cache|dense)",
    7,
    POSITION + "|" + ROTARY,
    schedule="chunked:7",
)
stepped(
    "decode-position",
    "queries of decode are rotated by the position before",
    LAYER_0 + "(rope|attention|context|dense)",
    PROMPT,
    POSITION + "|" + ROTARY,
    schedule="batched",
)
stepped(
    "block-boundary",
    "the first slot of the third block is not written: its key goes into the slot before",
    LAYER_0,
    None,
    "slot|position|key|cache|block|place|written",
    request=None,
)
stepped(
    "pages-of-layer-0",
    "layer 1 stores into the pages of layer 0",
    r"layers\.0\..*cache|layers\.\d\..*(attention|context|cache|dense)",
    None,
    "layer|cache|slot|key|block|place|position|history",
    request=None,
)
stepped(
    "value-heads-rolled",
    "values are stored under the next head",
    LAYER_0 + "(cache|attention|context|dense|value)",
    0,
    HEADS,
    dtype=F16,
)
stepped(
    "table-of-the-first",
    "every request reads by the first one's block table",
    LAYER_0 + "(attention|context|dense)",
    None,
    "request|table|block|slot|place|position|history",
    schedule="batched",
    request=None,
)
stepped("strict-mask", "no token but the first sees itself", LAYER_0 + "(attention|context|dense)", 1, MASK, dtype=BF16)
stepped("scale", "scores are scaled by 1/sqrt(hidden size)", LAYER_0 + "(attention|context|dense)", 1, SCALE)
stepped("eps", "the eps of a norm is 1e-3", r"layers\.0\.input_layernorm", 0, "eps")
stepped("dense-bias", "a bias is left out", r"layers\.0\.attention\.dense", 0, "bias", dtype=F16)
stepped(
    "sequential",
    "the residuals are sequential",
    r"layers\.0\.(post_attention_layernorm.*|mlp.*)",
    0,
    "residual|parallel|sequential|input|attention",
)
stepped("gelu", "GELU by its tanh formula", r"layers\.0\.mlp\..*", 0, "tanh|gelu|GELU|activation")
stepped(
    "cache-bfloat16",
    "keys and values are kept in bfloat16 by a float32 engine",
    LAYER_0 + "(cache|attention|context|dense|rope|value)",
    0,
    ROUND,
)
stepped("stale-layer", "layer 1 was loaded with layer 0's weights", r"layers\.1\.input_layernorm", 0, "layer|" + WEIGHT)
stepped(
    "final-norm-bias",
    "the bias of the last norm is left out",
    r"final_layer_norm",
    None,
    "bias",
    request=None,
    dtype=BF16,
)
stepped("head-tied", "the head is the embedding", r"lm_head|embed_out", None, "embed|tied|weight", request=None)
stepped(
    "head-rolled",
    "rows of the head are one off",
    r"lm_head|embed_out",
    None,
    ORDER + "|off by|shift|token",
    request=None,
)
stepped(
    "logits-of-the-row-before",
    "logits are those of the row before",
    r"lm_head|embed_out|logits|final_layer_norm",
    None,
    "row|token|position|other",
    request=None,
    schedule="chunked:7",
)

# What is wrong from the first token on is so under every schedule: some of it runs in batches and in chunks.
for at, entry in enumerate(FAULTS):
    if entry.row == 0 and entry.schedule == "plain" and at % 5 in (1, 3):
        FAULTS[at] = replace(entry, schedule="batched" if at % 5 == 1 else "chunked:11")
