"""What a side may have computed with: the truth is run with it, and the difference is a term of the gap."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import torch

from harness.extensions.rollout.format import Sampling


class TermKind(StrEnum):
    """Terms of the gap, in the order in which they are applied to the truth."""

    TOKENS = "tokens"
    POSITIONS = "positions"
    WEIGHTS = "weights"
    ROUTING = "routing"
    CACHE = "cache"
    HEAD = "head"
    OPERATIONS = "operations"
    MEANING = "meaning"
    ALIGNMENT = "alignment"
    REST = "rest"


@dataclass(frozen=True, slots=True, kw_only=True)
class Meaning:
    """The distribution that a log probability is of."""

    temperature: float | None = None
    """None for the one that the row was sampled with."""
    is_truncated: bool = False
    """Whether it is normalised over the tokens that top-p, top-k and min-p of the row leave."""

    def __str__(self) -> str:
        """Name it, as the field does."""
        name = "the row's temperature" if self.temperature is None else f"temperature {self.temperature:g}"
        if self.temperature == 1 and not self.is_truncated:
            return "raw (temperature 1, no truncation)"
        return f"{name}, {'renormalised over the truncated distribution' if self.is_truncated else 'no truncation'}"


@dataclass(frozen=True, slots=True, eq=False)
class OtherWeights:
    """Tensors in the place of the model's, by HF's names."""

    name: str
    tensors: Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class ForcedExperts:
    """Routed experts of all tokens, row after row; -1 where none are known: the truth chooses by itself there."""

    name: str
    ids: torch.Tensor
    """[tokens, layers * k] int64."""


@dataclass(frozen=True, slots=True, eq=False)
class PutBack:
    """Recorded values that are put back: those of the leading operations of the graph."""

    values: Mapping[str, torch.Tensor]
    """[tokens, ...] by source; NaN, or -1 for a choice, where nothing was recorded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """How the truth is run. Two runs with the same setting give the same values."""

    drops_first: bool = False
    """The first token, a begin-of-text token, is not there."""
    added_first: int | None = None
    """A token before the first one."""
    is_packed: bool = False
    """Rows follow one another in one sequence, and each sees those before it."""
    restarts: bool = False
    """Of packed rows: positions begin at 0 in each row, though it sees those before it."""
    weights: OtherWeights | None = None
    experts: ForcedExperts | None = None
    cache: torch.dtype | None = None
    """Keys and values are rounded to it."""
    truncates: bool = False
    """Whether they are rounded towards zero: vLLM's CPU kernels write eight bits so."""
    caches_prompt: bool = True
    """Whether the prompt's own rows read rounded keys and values, too."""
    head: torch.dtype | None = None
    """Logits are rounded to it; None for what the run's dtype gives."""
    cut: PutBack | None = field(default=None)
    meaning: Meaning = Meaning()
    shift: int = 0
    """A token's value stands so many tokens later in the column."""

    @property
    def runs_plainly(self) -> bool:
        """Whether the model's operations are run as they are, on whatever tokens and weights."""
        return self.experts is None and self.cache is None and self.head is None and self.cut is None


def token_logprobs(
    logits: torch.Tensor, tokens: torch.Tensor, sampling: Sequence[Sampling], meaning: Meaning
) -> torch.Tensor:
    """Return the log probability of each row's token, [rows] float64.

    Args:
        logits: [rows, vocabulary] float64.
        tokens: [rows] int64.
        sampling: of each row.
        meaning: of the log probability.
    """
    own = [item.temperature if meaning.temperature is None else meaning.temperature for item in sampling]
    scaled = logits / torch.tensor(own, dtype=logits.dtype, device=logits.device)[:, None]
    if meaning.is_truncated:
        scaled = scaled.masked_fill(~_left(scaled, tokens, sampling), -torch.inf)
    return scaled.log_softmax(dim=-1).gather(1, tokens[:, None])[:, 0]


def _left(logits: torch.Tensor, tokens: torch.Tensor, sampling: Sequence[Sampling]) -> torch.Tensor:
    """[rows, vocabulary] bool: what can be chosen. The token that was chosen is there, if only by a rounding."""

    def column(values: Sequence[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=logits.dtype, device=logits.device)[:, None]

    order = logits.argsort(dim=-1, descending=True)
    ranked = logits.gather(1, order)
    least = column([item.min_p for item in sampling]).log() + ranked[:, :1]
    most = column([item.top_k or logits.shape[1] for item in sampling])
    kept = (ranked >= least) & (torch.arange(logits.shape[1], device=logits.device)[None] < most)
    chances = ranked.masked_fill(~kept, -torch.inf).softmax(dim=-1)
    before = chances.cumsum(dim=-1) - chances
    kept &= before < column([item.top_p for item in sampling])
    kept[:, 0] = True
    left = torch.zeros_like(kept).scatter(1, order, kept)
    return left.scatter(1, tokens[:, None], True)
