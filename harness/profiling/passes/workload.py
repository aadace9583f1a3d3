"""The requests that a profile runs: from three numbers, or prompts of the user's own."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from harness.errors import Code, HarnessError
from harness.oracle.requests import Prompt
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
    """Of each request; of the longest where there are `prompts`."""
    prompts: tuple[Prompt, ...] = ()
    """Empty: random ones, as many and as long as the numbers say."""

    @classmethod
    def of_prompts(cls, prompts: Sequence[Prompt]) -> "ProfileWorkload":
        """Return the workload of prompts that all arrive at once."""
        return cls(
            batch_size=len(prompts),
            num_prompt_tokens=max(len(prompt.token_ids) for prompt in prompts),
            max_new_tokens=max(prompt.max_new_tokens for prompt in prompts),
            prompts=tuple(prompts),
        )

    def __post_init__(self) -> None:
        for option, value in (
            ("--batch-size", self.batch_size),
            ("--prompt-tokens", self.num_prompt_tokens),
            ("--max-new-tokens", min([self.max_new_tokens, *(prompt.max_new_tokens for prompt in self.prompts)])),
        ):
            if value < 1:
                raise HarnessError(
                    Code.BAD_OPTION, "the number must be positive", where=option, expected="at least 1", actual=value
                )

    @property
    def lengths(self) -> tuple[tuple[int, int], ...]:
        """Tokens of each prompt, and the new ones that follow it."""
        if self.prompts:
            return tuple((len(prompt.token_ids), prompt.max_new_tokens) for prompt in self.prompts)
        return ((self.num_prompt_tokens, self.max_new_tokens),) * self.batch_size

    @property
    def max_num_tokens(self) -> int:
        """Tokens of all prompts, and one more of each request: what a step may hold at most."""
        return sum(num_prompt for num_prompt, _ in self.lengths) + self.batch_size

    @property
    def notes(self) -> tuple[str, ...]:
        """Lengths that are not alike."""
        prompts, new = zip(*self.lengths, strict=True)
        return tuple(
            f"{what} {', '.join(map(str, counts[:8]))}{', ...' * (len(counts) > 8)} tokens: {sum(counts):,} together"
            for what, counts in (("the prompts have", prompts), ("the requests generate", new))
            if len(set(counts)) > 1
        )

    def load(self, vocab_size: int) -> ProfileRequests:
        """Return the requests, the same ones every time, that all arrive at once."""
        return replace(self.mixed_load(vocab_size), late=None)

    def mixed_load(self, vocab_size: int) -> ProfileRequests:
        """Return the same with one more request, which arrives while the others are being decoded.

        Of the user's own prompts it is the first one again.
        """
        *prompts, late = self._prompts(vocab_size)
        limits = tuple(num_new for _, num_new in self.lengths)
        return ProfileRequests(prompts=tuple(prompts), max_new_tokens=limits, late=late)

    def _prompts(self, vocab_size: int) -> tuple[tuple[int, ...], ...]:
        if self.prompts:
            return tuple(prompt.token_ids for prompt in (*self.prompts, self.prompts[0]))
        draw = random.Random(_SEED)
        lengths = [self.num_prompt_tokens] * (self.batch_size + 1)
        return tuple(tuple(draw.randrange(vocab_size) for _ in range(length)) for length in lengths)
