"""Faults planted in the sampler of `reference-engine serve`, each with the setting that shows it and its name."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from reference_engine import model_runner, sampler, scores
from reference_engine.requests.outputs import TokenLogprobs

Plant = Callable[[Any], None]
PENALTIES = ("penalise", "_add", "_counted_penalties")
ORIGINAL = {
    name: getattr(scores if name in PENALTIES else sampler, name)
    for name in ("sample", "penalise", "allowed_tokens", "_draw", "_add")
}
COUNTED, WITH_LOGPROBS, UNIFORMS = scores._counted_penalties, sampler.token_logprobs, sampler.uniforms


@dataclass(frozen=True)
class Fault:
    """One thing that a sampler does wrong."""

    name: str
    plant: Plant
    """Takes pytest's monkeypatch."""
    settings: str
    """Names, with commas between them."""
    says: str
    """Part of a finding, or of the chain that the draws follow."""
    code: str = "H210"


def params(**changes: Any) -> Plant:
    """Serve requests with other parameters; a change may be a function of those that were asked for."""

    def changed_sequence(sequence: Any) -> Any:
        changed = {name: value(sequence.params) if callable(value) else value for name, value in changes.items()}
        return replace(sequence, params=replace(sequence.params, **changed))

    return patched(
        "sample", lambda logits, sequences: ORIGINAL["sample"](logits, [changed_sequence(item) for item in sequences])
    )


def patched(name: str, function: Any) -> Plant:
    def plant(monkeypatch: Any) -> None:
        monkeypatch.setattr(scores if name in PENALTIES else sampler, name, function)
        if name == "sample":
            monkeypatch.setattr(model_runner, name, function)

    return plant


def temperatures(asked: Any) -> torch.Tensor:
    return torch.tensor([item.temperature or 1.0 for item in asked])[:, None]


def allowed_by(change: Callable[[torch.Tensor, Any], torch.Tensor]) -> Plant:
    return patched("allowed_tokens", change)


def before_temperature(scores: torch.Tensor, asked: Any) -> torch.Tensor:
    return ORIGINAL["allowed_tokens"](scores * temperatures(asked), asked)


def without_crossing(scores: torch.Tensor, asked: Any) -> torch.Tensor:
    top_p = torch.tensor([item.top_p for item in asked])[:, None]
    ordered, order = scores.softmax(dim=-1).sort(dim=-1, descending=True)
    kept = torch.zeros_like(ordered, dtype=torch.bool).scatter(1, order, ordered.cumsum(dim=-1) < top_p)
    return ORIGINAL["allowed_tokens"](scores, asked) & (kept | (scores == scores.amax(dim=-1, keepdim=True)))


def min_p_of_the_whole(scores: torch.Tensor, asked: Any) -> torch.Tensor:
    p, min_p = scores.softmax(dim=-1), torch.tensor([item.min_p for item in asked])[:, None]
    return (p >= min_p) | (p == p.amax(dim=-1, keepdim=True))


def seeing(part: Callable[[Any], list[int]]) -> Plant:
    return patched(
        "penalise",
        lambda scores, sequences: ORIGINAL["penalise"](
            scores, [replace(sequence, token_ids=part(sequence)) for sequence in sequences]
        ),
    )


def counting_the_prompt(sequence: Any) -> dict[int, float]:
    return COUNTED(replace(sequence, num_prompt_tokens=0))


def of_the_neighbour(scores: torch.Tensor, sequences: Any) -> torch.Tensor:
    """Each row is penalised for the tokens of the row before, with its own penalty."""
    others = [
        replace(sequence, token_ids=before.token_ids)
        for sequence, before in zip(sequences, sequences[-1:] + sequences[:-1], strict=True)
    ]
    return ORIGINAL["penalise"](scores, others)


def next_token(scores: torch.Tensor, sequences: Any) -> torch.Tensor:
    return (ORIGINAL["_draw"](scores, sequences) + 1) % scores.shape[1]


def unseeded(seeds: Any, indices: Any) -> Any:
    return UNIFORMS([random.getrandbits(60) for _ in seeds], indices)


def by_row(seeds: Any, indices: Any) -> Any:
    return UNIFORMS([seed + row for row, seed in enumerate(seeds)], indices)


def spoilt_logprobs(change: Callable[[Any, int], Any]) -> Plant:
    def spoilt(logits: Any, token_ids: Any, sequences: Any) -> Any:
        sampled = WITH_LOGPROBS(logits, token_ids, sequences)
        changed = [change(sampled.logprobs, row) for row in range(len(sampled.logprobs))]
        return sampler.Sampled(sampled.token_ids, changed)

    return patched("token_logprobs", spoilt)


def scaled(factor: float) -> Callable[[Any, int], Any]:
    def change(logprobs: Any, row: int) -> Any:
        of_row = logprobs[row]
        return of_row and TokenLogprobs(
            logprob=of_row.logprob * factor, top=tuple((token, value * factor) for token, value in of_row.top)
        )

    return change


def stale(monkeypatch: Any) -> None:
    """A request that came before gets log probabilities of the step before: those of a prefix that is kept."""
    seen: dict[tuple[int, ...], Any] = {}

    def spoilt(logits: Any, token_ids: Any, sequences: Any) -> Any:
        sampled, changed = WITH_LOGPROBS(logits, token_ids, sequences), []
        for logprobs, sequence in zip(sampled.logprobs, sequences, strict=True):
            place = tuple(sequence.token_ids)
            changed.append(seen.get(place[:-1], logprobs) if place in seen else logprobs)
            seen.setdefault(place, logprobs)
        return sampler.Sampled(sampled.token_ids, changed)

    monkeypatch.setattr(sampler, "_with_logprobs", spoilt)


EOS = 2
MANY = "hot,top_p,min_p,repetition_penalty,frequency_penalty"
HOT = lambda asked: max(asked.temperature, 1e-9)  # noqa: E731
FAULTS = [
    Fault("temperature ignored", params(temperature=1.0), "hot", "temperature ignored"),
    Fault("temperature twice", params(temperature=lambda asked: asked.temperature**2), "hot",
          "temperature applied twice"),
    Fault("temperature multiplies", params(temperature=lambda asked: 1 / HOT(asked)), "hot", "logits multiplied by"),
    Fault("nothing is drawn", params(temperature=0.0), "hot", "the likeliest token, nothing is drawn"),
    Fault("top-k ignored", params(top_k=0), "top_k", "top_k ignored"),
    Fault("top-k one too large", params(top_k=lambda asked: asked.top_k and asked.top_k + 1), "top_k",
          "top_k one too large"),
    Fault("top-k one too small", params(top_k=lambda asked: max(0, asked.top_k - 1)), "top_k", "top_k one too small"),
    Fault("top-p ignored", params(top_p=1.0), "top_p", "top_p ignored"),
    Fault("top-p before the temperature",
          allowed_by(before_temperature), "top_p",
          "top_p before temperature"),
    Fault("top-p without the crossing token", allowed_by(without_crossing), "top_p", "top_p without the token that"),
    Fault("min-p ignored", params(min_p=0.0), "min_p", "min_p ignored"),
    Fault("min-p before the temperature",
          allowed_by(before_temperature), "min_p",
          "min_p before temperature"),
    Fault("min-p of the whole", allowed_by(min_p_of_the_whole), "min_p", "min_p as a share of the whole"),
    Fault("repetition ignored", params(repetition_penalty=1.0), "repetition_penalty", "repetition_penalty ignored"),
    Fault("repetition the wrong way", params(repetition_penalty=lambda asked: 1 / asked.repetition_penalty),
          "repetition_penalty", "repetition_penalty the wrong way round"),
    Fault("repetition over the answer", seeing(lambda sequence: sequence.token_ids[sequence.num_prompt_tokens :]),
          "repetition_penalty", "repetition_penalty over the answer"),
    Fault("repetition over the prompt", seeing(lambda sequence: sequence.token_ids[: sequence.num_prompt_tokens]),
          "repetition_penalty", "repetition_penalty over the prompt"),
    Fault("penalty of another request", patched("penalise", of_the_neighbour), "repetition_penalty",
          "repetition_penalty ignored, or over another request's tokens"),
    Fault("presence ignored", params(presence_penalty=0.0), "presence_penalty", "presence_penalty ignored"),
    Fault("presence raises", params(presence_penalty=lambda asked: -asked.presence_penalty), "presence_penalty",
          "presence_penalty with the opposite sign"),
    Fault("presence over the prompt", patched("_counted_penalties", counting_the_prompt), "presence_penalty",
          "presence_penalty over prompt and answer"),
    Fault("frequency ignored", params(frequency_penalty=0.0), "frequency_penalty", "frequency_penalty ignored"),
    Fault("frequency once", params(frequency_penalty=0.0, presence_penalty=lambda asked: asked.frequency_penalty),
          "frequency_penalty", "frequency_penalty applied once"),
    Fault("bias ignored", params(logit_bias={}), "logit_bias", "logit_bias ignored"),
    Fault("bias with the opposite sign",
          params(logit_bias=lambda asked: {token: -value for token, value in asked.logit_bias.items()}), "logit_bias",
          "logit_bias with the opposite sign"),
    Fault("top-k 20 by itself", params(top_k=20), MANY, "top_k 20, which was not asked for"),
    Fault("min-p by itself", params(min_p=0.05), "hot", "min_p 0.05, which was not asked for"),
    Fault("ends are never drawn", params(logit_bias={EOS: -100.0}), MANY, "end tokens are never drawn"),
    Fault("the token after it", patched("_draw", next_token), "hot", "no known chain of steps fits"),
    Fault("one number for each request", patched("uniforms", lambda seeds, at: UNIFORMS(seeds, [0] * len(at))), MANY,
          "the draws of one request depend on each other"),
    Fault("one number for each step", patched("uniforms", lambda seeds, at: UNIFORMS([7] * len(seeds), at)), MANY,
          "the random numbers are not uniform"),
    Fault("seeds of no meaning", patched("uniforms", lambda seeds, at: UNIFORMS([7] * len(seeds), at)), "hot",
          "the server takes a seed and does not follow it: other seeds draw the same", "H211"),
    Fault("numbers that are not uniform", patched("uniforms", lambda seeds, at: UNIFORMS(seeds, at) ** 2), MANY,
          "the draws are not"),
    Fault("seeds ignored", patched("uniforms", unseeded), "hot",
          "the server takes a seed and does not follow it: one seed draws twice differently", "H211"),
    Fault("draws by the row of the batch", patched("uniforms", by_row), "hot", "with the same seed", "H211"),
    Fault("log probabilities doubled", spoilt_logprobs(scaled(2.0)), "hot", "of no distribution that is known", "H117"),
    Fault("log probabilities of the row before", spoilt_logprobs(lambda logprobs, row: logprobs[row - 1]), "hot",
          "of no distribution that is known", "H117"),
    Fault("stale log probabilities", stale, "hot", "were right before: they are stale", "H117"),
    Fault("sums above one", spoilt_logprobs(scaled(0.1)), "hot", "add up to", "H117"),
]  # fmt: skip
