"""A server's answer to one request, in tokens."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Logprobs = Sequence[Mapping[int, float | None]]
"""For each token: log probabilities by token id, that of the token itself and those of the likeliest ones. None stands
for `null`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One continuation."""

    token_ids: tuple[int, ...]
    """Without an end-of-sequence token that the server does not name."""
    finish_reason: str | None
    """`length`, `stop`, or whatever else the server says."""
    logprobs: Logprobs | None = None
    """Of each new token; None if the server gives none."""
    logprobs_of: tuple[int | None, ...] = ()
    """Tokens that the log probabilities are of, in the server's own words; None where no id can be told."""
    num_named: tuple[int, ...] = ()
    """Likeliest tokens that it names of each new token, those without an id that can be told among them."""
    prompt_logprobs: Logprobs | None = None
    """Of each token of the prompt; the first is empty. None if the server gives none."""
    num_unechoed: int = 0
    """Tokens at the prompt's beginning that its echo leaves out: the one after them has no log probability."""
    num_prompt_tokens: int | None = None
    """Tokens of the prompt by the server's own count (`usage`)."""
    num_new_tokens: int | None = None
    """New tokens by the server's own count."""
    text: str | None = None
    seconds: float = 0.0
    """From the request to the end of the answer."""

    def logprobs_at(self, step: int) -> Mapping[int, float | None] | None:
        """Return the log probabilities of one new token; None if there are none."""
        return self.logprobs[step] if self.logprobs is not None and step < len(self.logprobs) else None
