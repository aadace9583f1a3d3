"""How one request is to be continued."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from reference_engine.errors import RequestError

__all__ = ["SamplingParams"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Length, stopping and forcing of a greedy continuation.

    Raises:
        RequestError: `max_new_tokens` is below one, or more tokens are forced than generated.
    """

    max_new_tokens: int = 16
    """Tokens to sample. The last one is never fed back, so positions up to prompt + max_new_tokens - 2 are computed."""
    forced_token_ids: Sequence[int] | None = None
    """Tokens to feed in place of the engine's own choices, which are still reported as the sampled tokens."""
    ignore_eos: bool | None = None
    """Whether to go on after an end-of-sequence token. Unset, it is true exactly when tokens are forced."""

    cache_salt: str = ""
    """Requests share cached prefixes only with those of the same salt."""

    def __post_init__(self) -> None:
        if not isinstance(self.max_new_tokens, int) or isinstance(self.max_new_tokens, bool) or self.max_new_tokens < 1:
            raise RequestError(
                "max_new_tokens is impossible",
                where="SamplingParams",
                expected="an integer above 0",
                actual=repr(self.max_new_tokens),
            )
        if not isinstance(self.cache_salt, str):
            raise RequestError(
                "cache_salt is no string", where="SamplingParams", expected="a string", actual=repr(self.cache_salt)
            )
        if self.forced_token_ids is not None:
            object.__setattr__(self, "forced_token_ids", tuple(self.forced_token_ids))
        num_forced = len(self.forced_token_ids or ())
        if num_forced > self.max_new_tokens:
            raise RequestError(
                "more tokens are forced than generated",
                where="SamplingParams",
                expected=f"at most max_new_tokens = {self.max_new_tokens} forced_token_ids",
                actual=num_forced,
                hint="Raise max_new_tokens or shorten forced_token_ids.",
            )

    @property
    def stops_at_eos(self) -> bool:
        """Whether an end-of-sequence token ends the request."""
        return self.forced_token_ids is None if self.ignore_eos is None else not self.ignore_eos
