"""Faults of rotary."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.deepseek_v3 import modeling_deepseek_v3

from harness.extensions.faults.fault import Category, Fault
from harness.extensions.faults.modules.changes import (
    Plant,
    all_of,
    arguments,
    attribute,
    forward,
    frequencies,
    half_turned,
    inputs,
    is_decode,
    names,
    output,
    pair_turned,
    powers,
    rotary,
    setting,
)
from harness.extensions.faults.modules.declaring import BF16, F16, POSITION, PROMPT, ROTARY, declaring

FAULTS: list[Fault] = []
fault = declaring(FAULTS, Category.POSITION)


ROPE = r"q_rope|k_rope|query|key|attention|context|dense|cache|out_proj"

fault(
    "gpt_neox", "whole-head-rotated", "the whole head is rotated instead of a quarter", r"layers\.0\..*(" + ROPE + ")",
    1, ROTARY + "|partial", frequencies(lambda f: powers(1e4, 16), "gpt_neox.rotary_emb"),
)  # fmt: skip
fault(
    "phi", "frequencies-of-head-size", "frequencies are computed for the head's size, not for the rotary part's",
    r"layers\.0\.q_rope", 1, ROTARY + "|theta|frequenc", frequencies(lambda f: powers(1e4, 2 * len(f), 4 * len(f))),
)  # fmt: skip
fault(
    "stablelm", "position-off-decode", "decode rotates by the position before", r"layers\.0\.q_rope", PROMPT,
    POSITION + "|" + ROTARY,
    rotary(lambda c, s, p: (shifted(c, s)) if c.shape[1] == 1 else (c, s), "model.rotary_emb"), dtype=BF16,
)  # fmt: skip


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
    "glm4", "halves-for-pairs", "the pairs of rotary are halves instead of neighbours", r"layers\.0\.q_rope", 1,
    ROTARY + "|pair|interleav|halves", names(L0, apply_rotary_pos_emb=turning(half_turned)),
)  # fmt: skip
fault(
    "persimmon", "pairs-for-halves", "the pairs of rotary are neighbours instead of halves", r"layers\.0\.q_rope", 1,
    ROTARY + "|pair|interleav|halves", names(L0, apply_rotary_pos_emb=turning(pair_turned, is_pairs=True)), dtype=BF16,
)  # fmt: skip
fault(
    "gpt_neox", "query-not-rotated", "only keys are rotated", r"layers\.0\.(q_rope|attention.*)", 1, ROTARY,
    names("gpt_neox.layers.0.attention", apply_rotary_pos_emb=turning(half_turned, only="k")), dtype=F16,
)  # fmt: skip
fault(
    "falcon", "rotated-backwards", "the sine has the other sign", r"h\.0\..*(" + ROPE + ")", 1,
    ROTARY + "|sign|negative|backward", rotary(lambda c, s, p: (c, -s), "transformer.rotary_emb"),
)  # fmt: skip


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
    "gptj", "key-one-position-off", "keys are rotated by the next position", r"h\.0\..*(" + ROPE + ")", 1,
    ROTARY + "|position", names("transformer.h.0.attn", apply_rotary_pos_emb=key_ahead()),
)  # fmt: skip
fault(
    "mistral", "theta-1e6", "theta is 1e6, the default of a newer version", r"layers\.0\.q_rope", 1, "theta",
    frequencies(lambda f: powers(1e6, 2 * len(f))),
)  # fmt: skip
fault(
    "ernie4_5_moe", "theta-50000", "theta is 50000", r"layers\.0\.q_rope", 1, "theta",
    frequencies(lambda f: powers(5e4, 2 * len(f))), dtype=BF16,
)  # fmt: skip
fault(
    "granitemoe", "theta-1000", "theta is 1000 in layer 1 alone", r"layers\.1\.q_rope", 1, "theta",
    arguments("model.layers.1", "position_embeddings", lambda x: of_theta(x, 1e3)), dtype=F16,
)  # fmt: skip


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
    "olmoe", "linear-scaling-ignored", "linear rope scaling is ignored", r"layers\.0\.q_rope", 1,
    "scaling|linear|factor|positions", frequencies(lambda f: 2 * f), settings=LINEAR,
)  # fmt: skip
fault(
    "granitemoe", "yarn-factor-dropped", "yarn's factor of cos and sin is left out", r"layers\.0\.q_rope", 0,
    "factor|yarn|scal|gain", attribute("model.rotary_emb", "attention_scaling", 1.0), settings=YARN,
)  # fmt: skip
fault(
    "mixtral", "yarn-ignored", "yarn is ignored but for its factor", r"layers\.0\.q_rope", 1,
    "yarn|scaling|frequenc|theta", frequencies(lambda f: powers(1e4, 16)), settings=YARN, dtype=BF16,
)  # fmt: skip
fault(
    "seed_oss", "llama3-ignored", "llama3 rope scaling is ignored", r"layers\.0\.q_rope", 1, "scaling|llama3",
    frequencies(lambda f: powers(1e4, 16)), settings=LLAMA3,
)  # fmt: skip


def llama3_of_4(model: Any) -> None:
    config = copy.deepcopy(model.config)
    config.rope_parameters["factor"] = 4.0
    frequencies(lambda _: ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")[0])(model)


def short_factors(self: Any, x: torch.Tensor, position_ids: torch.Tensor, *_: Any) -> Any:
    short = torch.tensor(self.config.rope_parameters["short_factor"])
    angles = (position_ids[..., None].float() * (powers(1e4, 16) / short)).repeat(1, 1, 2)
    return (angles.cos() * self.attention_scaling).to(x.dtype), (angles.sin() * self.attention_scaling).to(x.dtype)


fault(
    "arcee", "llama3-factor-4", "llama3 rope scaling has a factor of 4 instead of 8", r"layers\.0\.q_rope", 1,
    "scaling|llama3|frequenc|factor", llama3_of_4, settings=LLAMA3,
)  # fmt: skip
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
    "cohere2", "nope-layer-rotated", "the layer without positions is rotated",
    r"layers\.1\.(q_rope|k_rope|attention|.*cache|query|key)", 1, ROTARY,
    attribute("model.layers.1.self_attn", "sliding_window", 16), dtype=BF16,
)  # fmt: skip
fault(
    "exaone4", "nope-layer-rotated", "the full layer is rotated, which has no positions",
    r"layers\.1\.(q_rope|k_rope|attention|.*cache|query|key)", 1, ROTARY,
    attribute("model.layers.1.self_attn", "is_sliding", True),
)  # fmt: skip
# One function rotates both, and neither is computed from the other.
fault(
    "deepseek_v3", "rope-interleave-ignored", "the rotary part is taken for halves, and is neighbours",
    r"layers\.0\.[qk]_rope", 0, ROTARY + "|pair|interleav|halves|order", setting("rope_interleave", False),
)  # fmt: skip


def query_alone(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *_: Any, **__: Any) -> Any:
    turned = modeling_deepseek_v3.apply_rotary_pos_emb_interleave
    return turned(q, k, cos, sin)[0], turned(q, k, torch.ones_like(cos), torch.zeros_like(sin))[1]


fault(
    "deepseek_v3", "latent-key-not-rotated", "the shared part of the keys is not rotated",
    r"layers\.0\.(k_rope|attention)", 1, ROTARY, names(L0, apply_rotary_pos_emb_interleave=query_alone), dtype=BF16,
)  # fmt: skip
fault(
    "nemotron", "whole-head-rotated", "the whole head is rotated instead of half", r"layers\.0\.q_rope", 1,
    ROTARY + "|partial", frequencies(lambda f: powers(1e4, 16)), dtype=F16,
)  # fmt: skip
fault(
    "helium", "half-of-the-frequencies-zero", "the slower half of the frequencies is zero", r"layers\.0\.q_rope", 1,
    ROTARY + "|frequenc", frequencies(lambda f: torch.cat([f[: len(f) // 2], 0 * f[len(f) // 2 :]])),
)  # fmt: skip
fault(
    "llama4_text", "temperature-dropped", "queries of the layer without positions are not scaled by their position",
    r"layers\.1\.(.*query|attention|q_.*|.*o_proj)", 15, "temperature|scal|position|factor|gain",
    attribute("model.layers.1.self_attn", "attn_temperature_tuning", False),
)  # fmt: skip
fault(
    "llama4_text", "qk-norm-dropped", "queries and keys are not normalised",
    r"layers\.0\.(.*qk_norm.*|attention|.*query|q_rope)", 0, "norm|skipped|not applied",
    forward("model.layers.0.self_attn.qk_norm", lambda self, x: x),
)  # fmt: skip
fault(
    "biogpt", "position-offset-dropped", "the offset of 2 of learned positions is left out",
    r"embed_positions|layers\.0\.", 0, POSITION + "|row|offset", attribute("biogpt.embed_positions", "offset", 0),
)  # fmt: skip
fault(
    "opt", "positions-stop-at-31", "positions stop at 31", r"embed_positions|layers\.0\.", 32,
    POSITION + "|row|stop|clamp",
    arguments("model.decoder.embed_positions", "position_ids", lambda p: p.clamp(max=31)), dtype=F16,
)  # fmt: skip
fault(
    "gpt2", "position-before-in-decode", "decode has the position before", r"wpe|h\.0\.", PROMPT, POSITION + "|row",
    inputs("transformer.wpe", lambda p: p - 1 if p.shape[-1] == 1 else p, "input"),
)  # fmt: skip
fault(
    "gpt_bigcode", "no-position-in-decode", "decode has no position embedding", r"wpe|h\.0\.", PROMPT,
    POSITION + "|zero|not added|left out|missing|skipped",
    output("transformer.wpe", lambda out, ids: 0 * out if ids.shape[-1] == 1 else out), dtype=BF16,
)  # fmt: skip


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
    "bloom", "alibi-exponent-off-by-one", "slopes are 2^(-8h/n) instead of 2^(-8(h+1)/n)",
    r"h\.0\..*(attention|context|dense.*)", 1, ALIBI, slopes(lambda a: 4 * a),
)  # fmt: skip
fault(
    "bloom", "alibi-dropped-in-decode", "decode has no ALiBi", r"h\.0\..*(attention|context|dense.*)", PROMPT, ALIBI,
    no_alibi_in_decode, dtype=BF16,
)  # fmt: skip


def mpt_slopes(model: Any) -> None:
    inner = model.transformer.build_mpt_alibi_tensor
    model.transformer.build_mpt_alibi_tensor = lambda heads, length, *args, **named: inner(
        heads, length, *args, **named
    ).flip(0)


fault(
    "mpt", "alibi-slopes-reversed", "the slopes of the heads are in reverse order",
    r"blocks\.0\..*(attn|attention|context|out_proj.*)", 1, ALIBI + "|head", mpt_slopes,
)  # fmt: skip
RW = {"alibi": True, "multi_query": False, "parallel_attn": False, "bias": True, "new_decoder_architecture": False}
fault(
    "falcon", "alibi-not-scaled", "ALiBi is added after the scores were scaled",
    r"h\.0\..*(attention|context|dense.*)", 1, ALIBI, unscaled_alibi, settings=RW,
)  # fmt: skip
