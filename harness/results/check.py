"""Results of a check, and what one would cost, as plain data for the reports and the pytest plugin.

Nothing here imports torch.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import combinations
from typing import Annotated, ClassVar, Self

from harness.errors import Code
from harness.results.merging import (
    COMMON,
    LARGEST,
    LARGEST_COMPUTED,
    MEDIAN,
    MEDIAN_COMPUTED,
    MERGED,
    SMALLEST,
    TOTAL,
    UNION,
    WORST,
    Rule,
    common,
    mergeable,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TapSource:
    """The tensor of an engine that is a tap."""

    tensor: str
    """For people: the module or operator that makes it, and which columns."""
    code: str | None = None
    """Line of the engine's code that makes it, `path/to/file.py:12`; None where that is not known."""
    evidence: str = "named by the adapter"
    """Why it was chosen as the tap."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenTensors:
    """What was seen of an engine whose tensors no adapter names."""

    attached: str
    """What the engine is: `a step object`, `a module`, `a folder of tensors`."""
    rows_by: str
    """What tells which token a row belongs to."""
    num_tensors: int
    """Tensors that were looked at."""
    num_taps: Mapping[str, int]
    """Taps by what identified their tensors: content, consumers, name, definition."""
    num_forwards: tuple[int, int] | None = None
    """Fewest and most forwards in a small step; None if the engine shows no look-up of token ids."""
    lost: Mapping[str, str] = field(default_factory=dict)
    """For each site or tap that no tensor was taken for: why, and what would bring it."""


class Verdict(StrEnum):
    """The judgement of one operation, or of one row of it; in the order of the members, from the best to the worst."""

    EXACT = "exact", "green"
    """Bit for bit what the oracle gives."""
    NOISE = "noise", "green"
    """As good as rounding permits."""
    CONVENTION = "convention", "cyan"
    """Another legitimate order of rounding, compared with its own floor."""
    UNJUDGED = "unjudged", "dim"
    """Measured, but nothing recorded allows a judgement."""
    SYSTEMATIC = "systematic", "red", "wrong"
    """Within bounds row by row, but biased in one direction over all rows; rounding has no direction."""
    MISSING = "missing", "yellow", "missing"
    """Expected and not recorded."""
    BUG = "bug", "red", "wrong"
    """Out of bounds: rounding cannot explain it."""

    color: str
    """In which a terminal shows it."""
    failure: str
    """`wrong` if the operation is at fault, `missing` if it was not recorded; empty if nothing failed."""

    def __new__(cls, word: str, color: str, failure: str = "") -> Self:
        """Make a member whose value is its name."""
        verdict = str.__new__(cls, word)
        verdict._value_, verdict.color, verdict.failure = word, color, failure
        return verdict

    @property
    def severity(self) -> int:
        """Rank among all verdicts; 0 is the best."""
        return list(Verdict).index(self)

    @property
    def is_wrong(self) -> bool:
        """Whether the operation is at fault."""
        return self.failure == "wrong"


class Outcome(StrEnum):
    """The verdict on a whole check."""

    PASS = "pass"
    MISMATCH = "mismatch"
    NOTHING = "nothing"

    @classmethod
    def of_all(cls, outcomes: Iterable["Outcome"]) -> "Outcome":
        """Return a mismatch if any outcome is one, and a pass only if all are, with at least one."""
        kinds = set(outcomes)
        if cls.MISMATCH in kinds:
            return cls.MISMATCH
        return cls.PASS if kinds == {cls.PASS} else cls.NOTHING


@dataclass(frozen=True, slots=True, kw_only=True)
class RowId:
    """One token of one request, and optionally an element of its row."""

    request: int
    position: int
    index: int | None = None
    """Index into the flattened row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """The request whose content one place of the KV cache holds, and how it got there."""

    layer: int
    head: int | None
    """KV head that is furthest off; None if all are alike."""
    request: int
    """The request whose history the place belongs to."""
    position: int
    block: int | None
    """Physical block, of the engine's own numbering; None if the engine did not say."""
    slot: int | None
    writer_request: int | None
    """Request whose step wrote the slot last, by the recorded slot mappings; None if no step did."""
    writer_step: int | None
    holds: str
    """The request whose content it is, by comparison with all recorded keys and values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """The mistake that reproduces the engine's numbers."""

    cause: str
    """The mistake in words; says so if no known mistake fits."""
    scope: str = ""
    """The wrong rows: `decode rows`, `request 1`, `every row`."""
    residual_before: float | None = None
    """Median error of the wrong rows in roundings, compared with the truth; None if none was measured."""
    residual_after: float | None = None
    """Median error of the wrong rows compared with the rows under the cause; None if no known cause fits."""
    num_rows: int = 0
    """Wrong rows that were examined."""
    num_explained: int = 0
    """Rows whose error falls to the rounding floor under the cause."""
    num_fitted: int = 0
    """Numbers that were fitted to these rows, over all of them."""
    is_cause: bool = True
    """Whether a cause is asserted; False if only observations are reported."""
    tap: str | None = None
    """Operation whose mistake it is, if that was not recorded: the one that is explained was judged through it."""
    detail: str = ""
    provenance: Provenance | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """A direction that an operation's error has over all rows."""

    kind: str
    """`gain`, `gain of head`, `trend` (gain from the first position to the last), `softmax scale` (of attention in 16
    bits), or `offset` (of one channel)."""
    which: str
    """Head or channel; empty if it is all of them."""
    size: float
    """Relative: 3e-4 is a gain of 1.0003; an offset is in units of the channel's RMS."""
    low: float
    high: float
    """Interval of the size at 95 %."""
    roundings: float
    """The size in roundings to the engine's dtype."""
    statistic: float
    """Size over its standard error, clustered by row and by channel."""
    num_rows: int
    """Distinct rows that show it."""


@mergeable
@dataclass(frozen=True, slots=True, kw_only=True)
class TapResult:
    """One operation over all rows that were compared."""

    name: Annotated[str, WORST]
    site: Annotated[str, WORST]
    """The tap's name without the layer."""
    layer: Annotated[int | None, WORST]
    kind: Annotated[str, WORST]
    num_rows: Annotated[int, TOTAL]
    verdict: Annotated[Verdict, WORST]
    judged_by: Annotated[str, WORST] = "none"
    """`local` (replay), `propagated` (against the golden's noise), `cache` (bit for bit), or `none`."""
    convention: Annotated[str | None, WORST] = None
    """The legitimate convention the engine follows if it is not the default one."""
    local_roundings_median: Annotated[float | None, MEDIAN_COMPUTED] = None
    local_roundings_p99: Annotated[float | None, LARGEST_COMPUTED] = None
    local_roundings_max: Annotated[float | None, LARGEST_COMPUTED] = None
    local_bound_share_max: Annotated[float | None, LARGEST_COMPUTED] = None
    """Largest local error of a row as a share of that row's bound; above 1 is out of bounds."""
    control_roundings_max: Annotated[float | None, LARGEST_COMPUTED] = None
    """Largest error of the control: HF's own module in the engine's dtype on the same inputs."""
    control_bound_share_max: Annotated[float | None, LARGEST_COMPUTED] = None
    """The same as a share of the bound."""
    is_bounded_by_control: Annotated[bool, WORST] = False
    """Whether the control makes the bound, rather than a derivation for this kind of operation."""
    propagated_relative_l2_max: Annotated[float | None, LARGEST] = None
    propagated_ratio_median: Annotated[float | None, MEDIAN] = None
    propagated_ratio_max: Annotated[float | None, LARGEST] = None
    """Propagated error over HF's own in the engine's dtype."""
    max_abs: Annotated[float | None, LARGEST] = None
    cosine_min: Annotated[float | None, SMALLEST] = None
    sqnr_db_min: Annotated[float | None, SMALLEST] = None
    max_ulp: Annotated[float | None, LARGEST] = None
    num_nan: Annotated[int, TOTAL] = 0
    num_inf: Annotated[int, TOTAL] = 0
    worst: Annotated[RowId | None, WORST] = None
    """Row of the largest local error, or of the largest propagated one if nothing is local."""
    num_bad_rows: Annotated[int, TOTAL] = 0
    first_bad: Annotated[RowId | None, WORST] = None
    effect: Annotated[Effect | None, WORST] = None
    """The effect that makes the verdict `systematic`."""
    through: Annotated[tuple[str, ...], WORST] = ()
    """Taps that the engine did not record and that the replay computed; an error may be in any of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """The first operation in graph order that is wrong, at its first wrong row."""

    tap: str
    request: int
    position: int
    verdict: Verdict
    code: Code
    local_roundings: float | None = None
    bound_roundings: float | None = None
    propagated_ratio: float | None = None
    schedule: str | None = None
    step: int | None = None
    phase: str | None = None
    explanation: Explanation | None = None
    source: TapSource | None = None
    """The engine's tensor, with the line of code that makes it, if known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that is wrong or was not checked, in words."""

    code: Code
    message: str
    tap: str | None = None
    request: int | None = None
    position: int | None = None
    explanation: Explanation | None = None


@mergeable
@dataclass(frozen=True, slots=True, kw_only=True)
class TokenResult:
    """Greedy choices of the engine against those of the truth."""

    compared: Annotated[int, TOTAL] = 0
    equal: Annotated[int, TOTAL] = 0
    ties: Annotated[int, TOTAL] = 0
    """Unequal, but the truth's own margin is below the noise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifiedStep:
    """A step of one request that computes drafts beside the next token."""

    step: int
    request: int
    position: int
    """Of the first row: the token before the drafts."""
    num_drafts: int
    num_accepted: int
    """Drafts that the engine's own greedy choices accept."""
    truth_least: int
    """Drafts that HF's logits accept under any rounding."""
    truth_most: int
    """Drafts that HF's logits may accept where rounding decides ties."""

    @property
    def differs(self) -> bool:
        """Whether the engine accepts a number that rounding does not explain."""
        return not self.truth_least <= self.num_accepted <= self.truth_most


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitResult:
    """Logits against the truth's, over the sampled rows."""

    num_rows: int
    top1_agreement: float
    kl_max: float
    """Kullback-Leibler divergence of the engine's distribution from the truth's, nats."""
    margin_min: float
    """Smallest distance between the truth's two best logits."""


@mergeable
@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """How much of what a model and an engine can be given a workload had."""

    steps: Annotated[int | None, LARGEST] = None
    """Most steps of one schedule."""
    step_sizes: Annotated[tuple[int, ...], UNION] = ()
    """Numbers of tokens of the steps."""
    requests: Annotated[int | None, LARGEST] = None
    """Most requests of one schedule."""
    shortest_prompt: Annotated[int | None, SMALLEST] = None
    """Tokens of the shortest prompt."""
    requests_at_once: Annotated[int | None, LARGEST] = None
    """Most requests in one step."""
    positions: Annotated[int | None, LARGEST] = None
    """Most positions of one request."""
    token_ids: Annotated[int | None, LARGEST] = None
    """Different token ids that were computed."""
    chunks: Annotated[tuple[int, ...], UNION] = ()
    """Numbers of tokens of a prompt that a step computed, other than to its end."""
    most_chunks: Annotated[int | None, LARGEST] = None
    """Most steps that computed one prompt."""
    longest_pause: Annotated[int | None, LARGEST] = None
    """Most steps of others that a request sat out between two of its own."""
    taken_back: Annotated[int | None, LARGEST] = None
    """Most tokens of a request that were given up at once: rejected drafts, or a continuation that was taken back."""
    hit_sizes: Annotated[tuple[int, ...], UNION] = ()
    """Numbers of tokens that requests found in the cache."""
    most_hits: Annotated[int | None, LARGEST] = None
    """Most requests that found one beginning in the cache."""
    all_positions: Annotated[int | None, LARGEST] = None
    """Positions that the model has; None where its configuration does not say."""
    all_token_ids: Annotated[int | None, LARGEST] = None
    """Token ids that the model has."""


_AFTER = {"evicted": "prefix_hit", "forked": "prefix_hit", "drafts_together": "drafts_accepted"}
"""Conditions that an engine can meet where any schedule reached another one."""


_MEET = ("chunked_prefill", "batch", "prefix_hit", "forked", "preempted", "rewound")
"""Conditions that a schedule is made for, and that a server meets together."""


def _not_reached(parts: "Sequence[Coverage]", name: str) -> tuple[str, ...]:
    """Return what no part reached: conditions that some part shows the engine can meet, and two of them together."""
    reached = {trigger for part in parts for trigger in part.triggers}
    alone = (item for item in common(parts, name) if _AFTER.get(item) in (None, *reached))
    pairs = (pair for pair in combinations(_MEET, 2) if reached.issuperset(pair))
    apart = (pair for pair in pairs if not any(set(pair).issubset(part.triggers) for part in parts))
    return (*alone, *(f"{first} with {second}" for first, second in apart))


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """Rows of taps that were to be recorded, and those that were."""

    expected: Annotated[int, TOTAL] = 0
    recorded: Annotated[int, TOTAL] = 0
    missing: Annotated[int, TOTAL] = 0
    missing_taps: Annotated[tuple[str, ...], UNION] = ()
    not_offered: Annotated[tuple[str, ...], UNION] = ()
    """Sites the engine declares it cannot record."""
    triggers: Annotated[tuple[str, ...], UNION] = ()
    """Conditions the workload reached: decode, chunked_prefill, batch, block_boundary, ..."""
    only_through: Annotated[tuple[str, ...], UNION] = ()
    """Sites, or single taps, that were judged only through operations that use them."""
    not_judged: Annotated[tuple[str, ...], UNION] = ()
    """Sites, or single taps, that were not judged at all, nor through operations that use them."""
    experts_not_chosen: Annotated[tuple[str, ...], COMMON] = ()
    """Experts whose weights no row was computed with, by the tap of their router: `model.layers.0.mlp.gate[17]`."""
    not_reached: Annotated[tuple[str, ...], Rule(_not_reached)] = ()
    """Conditions that this model and engine may meet and that the workload did not reach; of all schedules together
    also pairs of conditions that no schedule reached both of, `prefix_hit with rewound`."""
    extent: Annotated[Extent, MERGED] = Extent()
    states_left_out: Annotated[tuple[str, ...], UNION] = ()
    """Positions after which a state was read back and not judged: the truth would need to run too many tokens."""
    steps_mislabelled: Annotated[int, TOTAL] = 0
    """Steps whose phase is decode and that compute several tokens of a prompt."""
    rows_ambiguous: Annotated[int, TOTAL] = 0
    """Rows that could not be told from others, by their token ids and the order of requests; none of their taps was
    judged."""
    rows_not_judged: Annotated[int, TOTAL] = 0
    """Rows of `taps_partly_judged` whose inputs were not recorded, where other experts or a convention explain any
    distance from the golden."""
    taps_partly_judged: Annotated[tuple[str, ...], UNION] = ()
    rows_seen_before: Annotated[int, TOTAL] = 0
    """Rows that equal those of an earlier schedule bit for bit, with all that they read, and were judged there."""
    rows_left_out: Annotated[int, TOTAL] = 0
    """Rows at which products and attention were not judged, as a sample of rows was asked for."""
    least_rows_found: Annotated[int | None, LARGEST] = None
    """Wrong rows of an operation in one request of which the sample holds one with 95 %; None without a sample."""
    judged_compute: Annotated[float | None, SMALLEST] = None
    """Share of the model's multiply-adds whose output was judged, by itself or through what is computed from it; None
    without the model."""
    judged_compute_of_rows: Annotated[float | None, SMALLEST] = None
    """The same over all rows that the engine computed: what was judged by itself counts by the rows in which it was."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PositionError:
    """Error that has built up by the last tap of the hidden state, over the rows of one position or a few."""

    tap: str
    position: int
    """The first of them."""
    ratio_median: float
    """Propagated error over HF's own in the engine's dtype."""
    ratio_max: float


class ServedStatus(StrEnum):
    """How the logits of a run with nothing attached to the engine compare with those of the watched run."""

    EQUAL = "equal"
    """Bit for bit."""
    WITHIN_NOISE = "within noise"
    DIFFERS = "differs"
    NOT_DETERMINISTIC = "not deterministic"
    """Two watched runs differ as well, so that nothing can be said."""
    NOT_RUN = "not run"


@dataclass(frozen=True, slots=True, kw_only=True)
class AsServed:
    """One schedule run once more with nothing attached to the engine, compared with the watched run."""

    status: ServedStatus
    schedule: str
    reason: str | None = None
    """Why it was not run."""
    num_rows: int = 0
    """Rows of logits that were compared."""
    num_different: int = 0
    """Rows that differ by more than `allowed_ratio`, or that are missing."""
    num_other_choices: int = 0
    """Rows whose largest logit is another."""
    ratio_max: float | None = None
    """Largest distance of a row from the watched run's, over HF's own error in the engine's dtype."""
    allowed_ratio: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownMistake:
    """A mistake that the harness can name, and whether a sound run would have shown it."""

    tap: str
    mistake: str
    bound_share: float
    """Largest error of a row under the mistake, as a share of the bound of the row."""
    is_seen: bool
    """Whether a row would have been out of bounds."""
    needs: str | None = None
    """What would bring it into sight; None if it is seen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DetectionPower:
    """What a pass would have shown of the mistakes that the harness can name."""

    mistakes: tuple[KnownMistake, ...]
    tried: tuple[str, ...]
    """Taps of the operations, one of each site, whose mistakes were tried."""
    in_part: tuple[str, ...] = ()
    """Those of them of which there was no time for all mistakes: changes of HF's code come last."""
    not_tried: tuple[str, ...] = ()
    """Taps of operations for which there was no time."""
    not_covered: tuple[str, ...] = ()
    """Sites of which no mistake was tried: they were judged only through other operations."""
    bit_for_bit: tuple[str, ...] = ()
    """Sites of caches that were read back, where any bit that differs from what was written is seen."""
    smallest_change: float | None = None
    """Relative change of a row that is out of bounds in each operation of `tried`, at the rows that were tried; None if
    none was tried."""
    failures: tuple[str, ...] = ()
    """Explanations that raised an error, and where."""

    @property
    def num_seen(self) -> int:
        """Mistakes that the run would have shown."""
        return sum(mistake.is_seen for mistake in self.mistakes)


class Reference(StrEnum):
    """What propagated errors and logits are measured against."""

    TRUTH = "truth"
    """HF in high precision, in multiples of HF's own error in the engine's dtype."""
    HF = "hf"
    """HF in the engine's dtype, in multiples of what rounding adds up to; the truth was not needed for the verdict."""
    RECORDING = "recording"
    """Another recording, in multiples of what rounding adds up to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """One schedule of one engine against the golden."""

    schedule: str
    outcome: Outcome
    num_rows: int
    taps: tuple[TapResult, ...]
    findings: tuple[Finding, ...]
    first_divergence: Divergence | None
    tokens: TokenResult
    logits: LogitResult | None
    coverage: Coverage
    propagated_from: Reference = Reference.TRUTH
    engine_s: float | None = None
    compare_s: float | None = None
    positions: tuple[PositionError, ...] = ()
    """Growth of the error from token to token; empty if the engine recorded no hidden state."""
    acceptance: tuple[VerifiedStep, ...] = ()
    """Steps that verify drafts."""
    bits: str | None = None
    """Digest of the whole recording: equal if and only if every number is equal. None if a step has no digest."""
    as_served: AsServed | None = None
    """The same schedule as served; None for all schedules but the last."""
    power: DetectionPower | None = None
    """What the run would have shown of known mistakes; None for all schedules but the last, and if it is no pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NextPlace:
    """The next step after a failed check."""

    tap: str | None
    cause: str | None
    """The cause; None if none is asserted."""
    command: str | None
    """A narrower check, as a shell command; None where a shell cannot express it."""
    file: str | None = None
    """Of the engine's code that produced the tensor; None where it is not known."""
    line: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    """A whole check: every schedule of one engine against one golden."""

    engine: str
    model: str
    dtype: str
    device: str
    num_requests: int
    runs: tuple[RunResult, ...]
    golden_s: float | None = None
    """Seconds until the golden was there, after the model had been loaded."""
    notes: tuple[str, ...] = field(default=())
    """Remarks for the reader that are neither errors nor findings."""
    sources: Mapping[str, TapSource] = field(default_factory=dict)
    """The tensors that were taken for taps, where these were found and not declared."""
    seen: SeenTensors | None = None
    """None if an adapter names the tensors."""
    schedules_not_run: tuple[str, ...] = ()
    """Schedules that were requested and that the time budget did not reach."""
    next_place: NextPlace | None = None
    """None if nothing was found."""

    @property
    def outcome(self) -> Outcome:
        """Mismatch if any run mismatches; nothing if no run compared anything, or if one was not made."""
        not_run = (Outcome.NOTHING for _ in self.schedules_not_run)
        return Outcome.of_all((*(run.outcome for run in self.runs), *not_run))

    @property
    def as_served(self) -> AsServed | None:
        """The schedule that was run as served; None if recordings were compared."""
        return next((run.as_served for run in self.runs if run.as_served), None)

    @property
    def power(self) -> DetectionPower | None:
        """What the check would have shown of known mistakes; None if it is no pass, or if recordings were compared."""
        return next((run.power for run in self.runs if run.power), None) if self.outcome is Outcome.PASS else None

    @property
    def first_divergence(self) -> Divergence | None:
        """The first divergence of the first run that has one."""
        return next((run.first_divergence for run in self.runs if run.first_divergence), None)


class Memory(StrEnum):
    """Memory that no live row may depend on."""

    UNUSED = "unused cache", "blocks of no request, and places after a request's last token"
    PADDING = "padded rows", "rows of a step that are no request's"
    OTHERS = "another request", "keys, values and states of another request"
    SCRATCH = "scratch", "what torch allocates without setting it"

    help: str

    def __new__(cls, word: str, text: str) -> "Memory":
        """Make a member whose value is its name."""
        member = str.__new__(cls, word)
        member._value_, member.help = word, text
        return member


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseCost:
    """One phase of a check."""

    name: str
    seconds: float
    read_bytes: int
    """Bytes of weights, golden and recordings that are read from files; the system may cache some."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckCost:
    """The estimated cost of a check."""

    kind: ClassVar = "check-cost"
    IN_DOCUMENT: ClassVar = ("kind", "seconds", "read_bytes")
    model: str
    dtype: str
    num_requests: int
    num_tokens: int
    """Tokens of all requests: prompts and continuations."""
    num_layers: int
    num_measured: int
    """The first layers of the model, which the measurement ran."""
    has_golden: bool
    """Whether the golden is in the cache."""
    phases: tuple[PhaseCost, ...]
    num_engine_runs: int
    """Runs of the engine, whose time is not known: one for each schedule, and one as served."""
    golden_bytes: int
    """On disk, kept."""
    recording_bytes: int
    """On disk while a schedule is judged."""
    peak_bytes: int | None
    """Memory of the process beside mapped files; None where the system does not say."""
    available_bytes: int

    @property
    def seconds(self) -> float:
        """Time of all phases; without the engine's own."""
        return sum(phase.seconds for phase in self.phases)

    @property
    def read_bytes(self) -> int:
        """Bytes that all phases read."""
        return sum(phase.read_bytes for phase in self.phases)
