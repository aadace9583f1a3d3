"""One rollout, and those of a file."""

from collections.abc import Sequence
from dataclasses import dataclass

from harness.extensions.rollout.result import TokenCounts


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Parameters that the tokens of a row were sampled with, as far as they change the distribution."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 for all tokens."""
    min_p: float = 0.0

    @property
    def is_truncated(self) -> bool:
        """Whether some tokens could not be chosen."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One row. Its columns have an entry for each token, those of the prompt included."""

    row: int
    """Number in the file, from 0."""
    tokens: tuple[int, ...]
    num_prompt: int
    mask: tuple[bool, ...]
    """Tokens of the response that count."""
    engine: tuple[float | None, ...]
    """The engine's log probability of each token, nats."""
    trainer: tuple[float | None, ...] | None
    sampling: Sampling
    experts: tuple[tuple[int, ...], ...] | None = None
    """Routed experts of the leading tokens, those of all layers one after the other."""
    versions: tuple[str, ...] = ()
    """Versions of the weights that the record names, of either side."""
    num_padding: int = 0
    """Tokens of the record that the attention mask takes out; they are not in `tokens`."""
    pack: str | None = None
    """Rows with the same name were one sequence of the trainer's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollouts:
    """The rows of a file that are compared."""

    name: str
    rows: Sequence[Rollout]
    counts: TokenCounts

    @property
    def has_trainer(self) -> bool:
        """Whether a row has log probabilities of the trainer."""
        return any(row.trainer is not None for row in self.rows)
