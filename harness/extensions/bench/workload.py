"""The engines' workloads: prompts of random tokens, and how many tokens are to follow each."""

import random
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class UnevenSize:
    """The number of requests, and the lengths between which they vary."""

    num_requests: int
    prompt_lens: tuple[int, int]
    output_lens: tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchWorkload:
    """Requests that are handed over at once."""

    name: str
    prompts: Sequence[Sequence[int]]
    output_lens: Sequence[int]
    """Tokens to generate for each prompt; no token ends a request early."""

    @property
    def request_lens(self) -> list[int]:
        """Tokens of each request at its end."""
        return [len(prompt) + length for prompt, length in zip(self.prompts, self.output_lens, strict=True)]

    @property
    def num_output_tokens(self) -> int:
        """Tokens that are asked for, all together."""
        return sum(self.output_lens)

    @property
    def mean_decode_context(self) -> float:
        """Tokens that a decode step sees of a request, on average over the steps of an even workload."""
        return len(self.prompts[0]) + self.output_lens[0] / 2


def even_workload(batch_size: int, *, prompt_len: int, output_len: int, vocab_size: int, seed: int) -> BenchWorkload:
    """Return requests of one length."""
    rng = random.Random(seed)
    return BenchWorkload(
        name=f"batch {batch_size}",
        prompts=[_prompt(rng, prompt_len, vocab_size) for _ in range(batch_size)],
        output_lens=[output_len] * batch_size,
    )


def uneven_workload(size: UnevenSize, *, vocab_size: int, seed: int) -> BenchWorkload:
    """Return requests whose lengths are drawn uniformly."""
    rng = random.Random(seed)
    lens = [(rng.randint(*size.prompt_lens), rng.randint(*size.output_lens)) for _ in range(size.num_requests)]
    return BenchWorkload(
        name="uneven",
        prompts=[_prompt(rng, prompt_len, vocab_size) for prompt_len, _ in lens],
        output_lens=[output_len for _, output_len in lens],
    )


def _prompt(rng: random.Random, length: int, vocab_size: int) -> list[int]:
    return [rng.randrange(vocab_size) for _ in range(length)]
