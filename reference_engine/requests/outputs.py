"""Outputs of the engine."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

__all__ = ["FinishReason", "RequestOutput", "TokenLogprobs", "TokenOutput"]


class FinishReason(Enum):
    """Why a request ended."""

    LENGTH = "length"
    """`max_new_tokens` were sampled."""
    EOS = "eos"
    """An end-of-sequence token was sampled."""
    STOP = "stop"
    """A stop string appeared, or a stop token was sampled."""
    ABORTED = "aborted"
    """The caller aborted it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """The model's probabilities for one new token, before temperature and all other changes to the logits."""

    logprob: float
    """Natural logarithm of the probability of the token that continues the request."""
    top: tuple[tuple[int, float], ...]
    """The likeliest tokens and theirs, the likeliest first."""


@dataclass(slots=True, kw_only=True)
class TokenOutput:
    """One new token of one request. Not frozen: every step makes one for each request, and that would be slow."""

    request_id: int
    token_id: int
    """The token that continues the request: the forced one where one is given."""
    sampled_token_id: int
    """The engine's own choice."""
    finish_reason: FinishReason | None
    """Set on the request's last token."""
    logprobs: TokenLogprobs | None = None
    """Present if the request asks for them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """One finished request."""

    request_id: int
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    """The continuation, forced tokens included."""
    sampled_token_ids: tuple[int, ...]
    """The engine's own choice at every step: equal to `token_ids` unless tokens were forced."""
    finish_reason: FinishReason
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One for each of `token_ids`, where the request asks for them."""
    text: str | None = None
    """The continuation up to the stop string, where the prompt was text or stop strings were given."""
