"""The interface of an engine that is timed, and its workload: prompts of random tokens, and how many follow."""

import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol


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
    def num_prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(map(len, self.prompts))

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


OURS = "reference"
"""The engine that is timed if none is named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchConfig:
    """The settings that all engines of a run share."""

    folder: Path
    """The checkpoint."""
    scratch: Path
    """A folder for what a peer makes of it."""
    dtype: str
    device: str
    num_threads: int
    max_request_len: int
    """Tokens of the longest request."""
    max_total_len: int
    """Tokens of all requests of the largest workload: what must fit into the KV cache."""
    max_requests: int
    engine_options: Mapping[str, str]
    """Options of `engine`."""
    engine: str = "reference"
    """The engine that is compared with its peers."""
    engine_folder: Path | None = None
    """The checkpoint that `engine` reads, if it is one with the same values in another form."""

    def folder_of(self, name: str) -> Path:
        """Return the checkpoint that an engine reads."""
        return self.engine_folder or self.folder if name == self.engine else self.folder

    def options_of(self, name: str) -> Mapping[str, str]:
        """Return the options of an engine; only the one that is compared with its peers has some."""
        return self.engine_options if name == self.engine else {}


@dataclass(slots=True)
class Generation:
    """The tokens of a workload, and their times."""

    start: float = field(default_factory=time.perf_counter)
    token_ids: list[list[int]] = field(default_factory=list)
    step_ends: list[float] = field(default_factory=list)
    """When each of the steps that brought tokens ended; one entry where an engine does not show its steps."""

    def end_step(self) -> None:
        """Note that the tokens of a step are on the host."""
        self.step_ends.append(time.perf_counter())

    def end_steps(self, num_steps: int) -> None:
        """Note that the tokens of several steps, of which each took as long, are on the host."""
        begin, end = self.step_ends[-1], time.perf_counter()
        self.step_ends += [begin + (end - begin) * (step + 1) / num_steps for step in range(num_steps)]

    @property
    def seconds(self) -> float:
        """From the first request to the last token."""
        return self.step_ends[-1] - self.start

    @property
    def prefill_seconds(self) -> float:
        """Until the first tokens."""
        return self.step_ends[0] - self.start

    @property
    def decode_step_seconds(self) -> float:
        """Mean of the steps after the first."""
        return (self.step_ends[-1] - self.step_ends[0]) / (len(self.step_ends) - 1)


class Peer(Protocol):
    """An engine that is timed."""

    name: str
    shows_steps: bool
    """Whether `Generation.step_ends` has every step, so that prefill and decode can be told apart."""

    def generate(self, workload: BenchWorkload) -> Generation:
        """Run the requests greedily, each to its length; an end-of-sequence token ends nothing."""

    def close(self) -> None:
        """Release the model and other memory."""


class PeerMissingError(Exception):
    """A peer is not installed; `package` is what pip would have to install, the peer's own extra if it is None."""

    def __init__(self, reason: str, *, package: str | None = None) -> None:
        super().__init__(reason)
        self.package = package
