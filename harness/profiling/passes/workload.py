"""The requests that a profile runs: from three numbers, or prompts of the user's own."""

from __future__ import annotations

import random
from collections.abc import Sequence
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
    """Of each prompt; of the longest where there are `prompts`."""
    max_new_tokens: int = 32
    prompts: tuple[tuple[int, ...], ...] = ()
    """Token ids; empty: random ones, as many and as long as the numbers say."""

    @classmethod
    def of_prompts(cls, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> ProfileWorkload:
        """Return the workload of prompts that all arrive at once."""
        return cls(
            batch_size=len(prompts),
            num_prompt_tokens=max(map(len, prompts)),
            max_new_tokens=max_new_tokens,
            prompts=tuple(map(tuple, prompts)),
        )

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

    @property
    def notes(self) -> tuple[str, ...]:
        """Lengths of prompts that are not alike."""
        lengths = [len(prompt) for prompt in self.prompts]
        if len(set(lengths)) < 2:
            return ()
        shown = ", ".join(map(str, lengths[:8])) + (", ..." if len(lengths) > 8 else "")
        return (f"the prompts have {shown} tokens: {sum(lengths):,} together",)

    def load(self, vocab_size: int) -> ProfileRequests:
        """Return the requests, the same ones every time, that all arrive at once."""
        return ProfileRequests(prompts=self._prompts(vocab_size)[:-1], max_new_tokens=self.max_new_tokens)

    def mixed_load(self, vocab_size: int) -> ProfileRequests:
        """Return the same with one more request, which arrives while the others are being decoded.

        Of the user's own prompts it is the first one again.
        """
        *prompts, late = self._prompts(vocab_size)
        return ProfileRequests(prompts=tuple(prompts), max_new_tokens=self.max_new_tokens, late=late)

    def _prompts(self, vocab_size: int) -> tuple[tuple[int, ...], ...]:
        if self.prompts:
            return (*self.prompts, self.prompts[0])
        draw = random.Random(_SEED)
        lengths = [self.num_prompt_tokens] * (self.batch_size + 1)
        return tuple(tuple(draw.randrange(vocab_size) for _ in range(length)) for length in lengths)
