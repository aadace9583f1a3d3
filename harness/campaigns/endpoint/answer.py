"""A server's answer to one request, in tokens."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Logprobs = Sequence[Mapping[int, float]]
"""For each token: log probabilities by token id, that of the token itself and those of the likeliest ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One continuation."""

    token_ids: tuple[int, ...]
    """Without an end-of-sequence token that the server does not name."""
    finish_reason: str | None
    """`length`, `stop`, or whatever else the server says."""
    logprobs: Logprobs | None = None
    """Of each new token; None if the server gives none."""
    num_top: int = 0
    """Likeliest tokens that it gives at least, of each."""
    prompt_logprobs: Logprobs | None = None
    """Of each token of the prompt; the first is empty. None if the server gives none."""
    text: str | None = None
    seconds: float = 0.0
    """From the request to the end of the answer."""
