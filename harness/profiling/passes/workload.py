"""The requests that a profile runs, from its three numbers."""

from __future__ import annotations

import random
from dataclasses import dataclass

from harness.errors import Code, HarnessError
from harness.profiling.passes.load import ProfileRequests

_SEED = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileWorkload:
    """The number and the lengths of the requests.

    Raises:
        HarnessError: BAD_OPTION: a number is not positive.
    """

    batch_size: int = 1
    num_prompt_tokens: int = 128
    max_new_tokens: int = 32

    def __post_init__(self) -> None:
        for option, value in (
            ("--batch-size", self.batch_size),
            ("--prompt-tokens", self.num_prompt_tokens),
            ("--max-new-tokens", self.max_new_tokens),
        ):
            if value < 1:
                raise HarnessError(
                    Code.BAD_OPTION, "the number must be positive", where=option, expected="at least 1", actual=value
                )

    def load(self, vocab_size: int) -> ProfileRequests:
        """Return requests of random tokens, the same ones every time, that all arrive at once."""
        return ProfileRequests(prompts=self._prompts(vocab_size)[:-1], max_new_tokens=self.max_new_tokens)

    def mixed_load(self, vocab_size: int) -> ProfileRequests:
        """Return the same with one more request, which arrives while the others are being decoded."""
        *prompts, late = self._prompts(vocab_size)
        return ProfileRequests(prompts=tuple(prompts), max_new_tokens=self.max_new_tokens, late=late)

    def _prompts(self, vocab_size: int) -> tuple[tuple[int, ...], ...]:
        draw = random.Random(_SEED)
        lengths = [self.num_prompt_tokens] * (self.batch_size + 1)
        return tuple(tuple(draw.randrange(vocab_size) for _ in range(length)) for length in lengths)
