"""Results of a comparison of a trainer with a rollout engine, as plain data for the reports. Nothing imports torch."""

from dataclasses import dataclass
from typing import ClassVar

from harness.results.check import Finding, Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class GapFigures:
    """The gap over all compared tokens: log probability of the trainer less that of the engine, nats."""

    mean: float
    mean_abs: float
    rms: float
    max_abs: float
    k1: float
    """Estimate of KL(engine || trainer) from the engine's samples: the mean of the negative log ratio."""
    k3: float
    """The same with less variance: mean of ratio - 1 - log ratio (Schulman, Approximating KL divergence, 2020)."""
    max_ratio: float
    """Largest importance weight of a token, trainer over engine; infinite if it is above what a float holds."""
    effective_samples: float
    """Effective sample size of the tokens' importance weights, as a share of the tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GapTerm:
    """One term of the gap; token by token all terms add up to it."""

    kind: str
    side: str
    """`trainer`, `engine`, `both`."""
    detail: str
    mean: float
    """With its sign, as part of the gap, nats."""
    mean_abs: float
    rms: float
    floor_rms: float
    """What rounding alone gives: of HF in the sides' dtype, for the same tokens."""
    is_rounding: bool
    explains: float
    """By how much the mean absolute gap falls if this remedy alone is applied, in a replay of the rows.

    Where there is no remedy: if the term is taken out."""
    remedy: str
    """What to change; empty for rounding."""
    worst_row: int
    worst_token: int
    """Position in its row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SideFigures:
    """One side against the truth of the named model."""

    name: str
    source: str
    """`recorded`, or the class or engine that was run."""
    meaning: str
    """The distribution that its log probabilities are of, as they fit."""
    rms: float
    """From the truth of the named model, nats."""
    floor_rms: float
    rest_rms: float
    """What no term explains."""
    is_explained: bool
    """Whether the rest is inside of the floor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenCounts:
    """Every token of the file is in exactly one of these."""

    tokens: int
    prompt: int
    masked: int
    """Of responses, taken out by the mask."""
    padding: int
    """Taken out by the attention mask."""
    without_value: int
    """Counted tokens for which a side has no log probability."""
    left_out: int
    """Of rows that were not asked for: another weight version, or above the limit."""
    compared: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutResult:
    """A whole comparison."""

    IN_DOCUMENT: ClassVar = ("outcome",)
    rollouts: str
    model: str
    dtype: str
    num_rows: int
    tokens: TokenCounts
    gap: GapFigures | None
    """None if nothing was compared."""
    terms: tuple[GapTerm, ...]
    sides: tuple[SideFigures, ...]
    findings: tuple[Finding, ...]
    not_judged: tuple[str, ...]
    """What the given inputs do not allow to tell."""
    remedied: float | None = None
    """Mean absolute gap with all remedies applied, in a replay of the rows, nats; None without any."""
    notes: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def outcome(self) -> Outcome:
        """Mismatch if a term is outside of its floor; nothing, if no token was compared."""
        if self.gap is None:
            return Outcome.NOTHING
        return Outcome.MISMATCH if self.findings else Outcome.PASS


@dataclass(frozen=True, slots=True, kw_only=True)
class GapStep:
    """A comparison of one step of a training run, as its history has it."""

    step: int
    verdict: Outcome
    gap: GapFigures | None
    terms: tuple[GapTerm, ...]
    seconds: float
    share: float
    """Of the time since the comparison before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GapHistory:
    """What a monitor kept of a training run."""

    IN_DOCUMENT: ClassVar = ("outcome",)
    file: str
    steps: tuple[GapStep, ...]
    """By their numbers; of a step that a resumed run has done again, the later line."""
    num_cut: int
    """Lines that end in the middle: the run was killed."""
    num_replaced: int = 0
    """Lines with a term outside of its floor, of steps that a resumed run has done again."""

    @property
    def outcome(self) -> Outcome:
        """Mismatch if a term was outside of its floor at some step; nothing, if no step compared a token."""
        verdicts = {step.verdict for step in self.steps}
        return next((item for item in (Outcome.MISMATCH, Outcome.PASS) if item in verdicts), Outcome.NOTHING)
