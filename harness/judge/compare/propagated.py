"""Propagated judgement: the distance of an engine's rows to the golden's, as a ratio to the error that HF itself makes.

It is one pass over two recordings, tap by tap, memory-mapped; each row is found by (request, position).
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from harness.base.metrics import RowMetrics, logit_metrics, rounding_unit, row_metrics
from harness.formats.recording import Recording, Step
from harness.formats.recording.reader import Located
from harness.formats.taps import Graph, Kind
from harness.judge.compare.align import Locator, Rows, chunks, places_in_steps, rows_of_steps
from harness.judge.compare.shapes import engine_dtype
from harness.oracle.sketch_rows import estimated_metrics
from harness.results.check import LogitResult, PositionError

RATIO_BOUND = 10.0
"""Largest ratio of a row's error to HF's own that passes if only propagation can judge. HF's eager against
HF's sdpa reaches 4 on the tiny models (reports/cpu/noise-floors.md); a bug upstream gives hundreds."""
_MOST_CARRIED = 1000.0
"""Largest factor by which sound operations may enlarge noise that is estimated. Two backends of the reference engine
differ by 110 times the estimate after two layers of qwen3-tiny in float32."""
_NONE = torch.empty(0, dtype=torch.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class PropagatedErrors:
    """Distances of one tap to the golden; tensors [rows] in the order of `rows`."""

    rows: Rows
    metrics: RowMetrics
    ratio: torch.Tensor
    """float64: relative L2 error over the noise of the same row."""
    bound: float = RATIO_BOUND
    """Largest ratio that passes."""
    has_noise: bool = True
    """Whether the noise is HF's own and was measured; otherwise it is estimated."""

    @property
    def is_far(self) -> torch.Tensor:
        """[rows] bool: beyond the bound, where the expected side is finite."""
        return ~(self.ratio <= self.bound) & self.metrics.expected_norm.isfinite()

    @property
    def is_bad(self) -> torch.Tensor:
        """[rows] bool: far, or not finite. Where the expected side is not, there is no reference: another finding."""
        return self.is_far | ~self.metrics.is_finite

    @staticmethod
    def concat(parts: Sequence["PropagatedErrors"]) -> "PropagatedErrors":
        """Join the distances of one tap in several chunks, all of the default bound."""
        return PropagatedErrors(
            rows=Rows.concat([part.rows for part in parts]),
            metrics=RowMetrics.concat([part.metrics for part in parts]),
            ratio=torch.cat([part.ratio for part in parts]),
        )


@dataclass(slots=True)
class Propagation:
    """All taps' distances."""

    errors: dict[str, PropagatedErrors] = field(default_factory=dict)
    logits: LogitResult | None = None
    other_choices: dict[str, Rows] = field(default_factory=dict)
    """Rows in which a router chose other indices than the golden's: later rows then differ by more than rounding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pair:
    """Where rows are in both recordings."""

    rows: Rows
    at: torch.Tensor
    """[rows] place of each among those of its step that the tap covers."""
    places: torch.Tensor
    """What `Locator.find` returns."""
    contents: torch.Tensor | None
    """[rows] int64, equal for equal rows; None where they are not compared."""
    ours: Located
    theirs: Located

    def values(self, tap: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the rows of a tap in both."""
        return self.ours.rows(tap).flatten(1), self.theirs.rows(tap).flatten(1)


@dataclass(slots=True)
class _Located:
    """Where rows of some steps are in both recordings: the same for taps of the same rows."""

    actual: Recording
    expected: Locator
    contents: Mapping[int, torch.Tensor] | None
    """By step, [rows] int64."""
    _pairs: dict[tuple[object, ...], _Pair | None] = field(default_factory=dict)

    def pair(self, steps: Sequence[Step], tap: str) -> _Pair | None:
        """Return where the rows of a tap in some steps are; rows that are not expected are left out."""
        indices = tuple(step.index for step in steps)
        is_whole = all(step.is_whole(tap) for step in steps)
        key = (indices, None if is_whole else tap, self.expected.signature(tap))
        if key not in self._pairs:
            rows, at = rows_of_steps(steps, tap), places_in_steps(steps, tap)
            contents = None if self.contents is None else torch.cat([self._contents(step, tap) for step in steps])
            self._pairs[key] = self._located(rows, at, self.expected.find(tap, rows), contents)
        return self._pairs[key]

    def _contents(self, step: Step, tap: str) -> torch.Tensor:
        assert self.contents is not None
        covered = step.rows_of(tap)
        return self.contents[step.index] if covered is None else self.contents[step.index][covered]

    def part(self, pair: _Pair, keep: torch.Tensor) -> _Pair | None:
        """Return where some of the rows of a pair are, [rows] bool; None for no row."""
        key = id(pair), keep.numpy().tobytes()
        if key not in self._pairs:
            contents = None if pair.contents is None else pair.contents[keep]
            self._pairs[key] = self._located(pair.rows.select(keep), pair.at[keep], pair.places[keep], contents)
        return self._pairs[key]

    def _located(
        self, rows: Rows, at: torch.Tensor, places: torch.Tensor, contents: torch.Tensor | None
    ) -> _Pair | None:
        present = places[:, 0] >= 0
        if not bool(present.any()):
            return None
        rows, at, places = rows.select(present), at[present], places[present]
        return _Pair(
            rows=rows,
            at=at,
            places=places,
            contents=None if contents is None else contents[present],
            ours=self.actual.located(rows.step, at),
            theirs=self.expected.recording.located(places[:, 0], places[:, 1]),
        )


@dataclass(slots=True)
class KnownDistances:
    """Distances of the rows of some recordings to the sketches of one golden."""

    _errors: dict[str, tuple[PropagatedErrors, torch.Tensor]] = field(default_factory=dict)
    """By tap: distances, and the place of the row in the golden."""
    _at: dict[str, torch.Tensor] = field(default_factory=dict)
    """By tap: where among these each content is, -1 for nowhere."""

    def of(
        self, tap: str, located: _Located, pair: _Pair, measure: Callable[[str, _Pair], PropagatedErrors]
    ) -> PropagatedErrors | None:
        """Return the distances of the rows of a pair, of which those not known are measured.

        None where elements are not numbers: these are counted, and belong to no row.
        """
        at = self._find(tap, pair)
        new = located.part(pair, at < 0)
        if new is not None:
            errors = measure(tap, new)
            if errors.metrics.num_nan or errors.metrics.num_inf:
                return None
            at[at < 0] = self._add(tap, errors, new)
        errors, _ = self._errors[tap]
        return replace(errors, rows=pair.rows, metrics=errors.metrics.select(at), ratio=errors.ratio[at])

    def _find(self, tap: str, pair: _Pair) -> torch.Tensor:
        """[rows] int64: where the distances of a pair's rows are, -1 where they are not known."""
        assert pair.contents is not None
        table, known_at = self._at.get(tap, _NONE), torch.full_like(pair.contents, -1)
        is_noted = pair.contents < len(table)
        known_at[is_noted] = table[pair.contents[is_noted]]
        if len(table):  # two requests with the same tokens may have two rows in the golden
            known_at[self._errors[tap][1][known_at] != pair.places[:, 2]] = -1
        return known_at

    def _add(self, tap: str, errors: PropagatedErrors, pair: _Pair) -> torch.Tensor:
        """Note the distances of a pair's rows, and return where they are, [rows] int64."""
        assert pair.contents is not None
        before, table, rows = self._errors.get(tap), self._at.get(tap, _NONE), pair.places[:, 2]
        at, largest = torch.arange(len(rows)) + (0 if before is None else len(before[1])), int(pair.contents.max())
        if len(table) <= largest:
            table = torch.cat([table, torch.full((largest + 1 - len(table),), -1)])
        table[pair.contents] = at
        self._at[tap] = table
        if before is not None:
            errors, rows = PropagatedErrors.concat([before[0], errors]), torch.cat([before[1], rows])
        self._errors[tap] = errors, rows
        return at


@dataclass(frozen=True, slots=True, kw_only=True)
class _Noise:
    """Relative L2 errors of HF itself, by tap."""

    rows: Mapping[str, torch.Tensor]
    """Measured, per row of the golden."""
    floors: Mapping[str, float]
    """Median of the measured ones: the least noise, since HF may happen to be exact in a row."""
    unit: float
    """Rounding unit of the engine's dtype."""
    depths: Mapping[str, int]
    """Number of operations up to a tap."""

    def of(self, tap: str, places: torch.Tensor) -> torch.Tensor:
        """Return the noise of a tap's rows at some places, float64; an estimate for a tap that was not measured."""
        if tap in self.floors:
            return self.rows[tap][places[:, 2]].to(torch.float64).clamp(min=self.floors[tap])
        return torch.full((len(places),), self.unit * math.sqrt(self.depths.get(tap, 1)), dtype=torch.float64)

    def ratio(self, error: torch.Tensor, tap: str, places: torch.Tensor) -> torch.Tensor:
        """Return errors of a tap's rows as multiples of their noise; no error is none of it, even without noise."""
        noise = self.of(tap, places)
        return torch.where((error == 0) & (noise == 0), 0.0, error / noise)


def propagated_errors(
    actual: Recording,
    expected: Locator,
    noise: Mapping[str, torch.Tensor],
    graph: Graph,
    usable: Collection[str],
    *,
    sketched: Collection[str] = (),
    contents: Mapping[int, torch.Tensor] | None = None,
    known: KnownDistances | None = None,
) -> Propagation:
    """Compare every usable tap that both recordings hold.

    Args:
        actual: the engine's recording.
        expected: a golden, or any recording of the same requests.
        noise: HF's own relative L2 error per row of `expected`; for taps without it, the noise is estimated as the sum
            of independent roundings, `unit * sqrt(operations so far)`.
        graph: of the model.
        usable: taps whose shape and dtype fit.
        sketched: taps of which `expected` holds sketches: their distances are estimated.
        contents: by step, [rows] int64 that are equal for equal rows, of this and of earlier recordings.
        known: distances of earlier recordings to the same sketches, which are not estimated again.
    """
    result, parts, logits = Propagation(), dict[str, list[PropagatedErrors]](), list[torch.Tensor]()
    other_choices: dict[str, list[Rows]] = {}
    choices = {tap for tap in usable if tap in graph and graph[tap].kind is Kind.CHOICE}
    of_hf = _Noise(
        rows=noise,
        floors={tap: float(rows.nanmedian()) for tap, rows in noise.items() if len(rows)},
        unit=rounding_unit(engine_dtype(actual)),
        depths={operation.tap: depth for depth, operation in enumerate(graph, start=1)},
    )
    located = _Located(actual, expected, contents)

    def measured(tap: str, pair: _Pair) -> PropagatedErrors:
        ours, theirs = pair.values(tap)
        metrics = (estimated_metrics if tap in sketched else row_metrics)(ours, theirs)
        ratio = of_hf.ratio(metrics.relative_l2, tap, pair.places)
        return PropagatedErrors(rows=pair.rows, metrics=metrics, ratio=ratio)

    for chunk in chunks(actual.steps):
        for tap in dict.fromkeys(tap for step in chunk for tap in step.tap_names if tap in usable):
            pair = located.pair([step for step in chunk if step.has(tap)], tap)
            if pair is None:
                continue
            if tap in choices:
                ours, theirs = pair.values(tap)
                is_other = (ours.sort(dim=-1).values != theirs.sort(dim=-1).values).any(dim=-1)
                if bool(is_other.any()):
                    other_choices.setdefault(tap, []).append(pair.rows.select(is_other))
                continue
            if known is None or tap not in sketched or (errors_here := known.of(tap, located, pair, measured)) is None:
                errors_here = measured(tap, pair)
            parts.setdefault(tap, []).append(errors_here)
            if tap == graph.logits:
                logits.append(logit_metrics(*pair.values(tap)))
    errors = {tap: PropagatedErrors.concat(chunk_errors) for tap, chunk_errors in parts.items()}
    result.errors = _with_bounds(errors, of_hf.floors, graph)
    result.other_choices = {tap: Rows.concat(rows) for tap, rows in other_choices.items()}
    result.logits = _logit_result(logits)
    return result


def _with_bounds(
    errors: dict[str, PropagatedErrors], measured: Collection[str], graph: Graph
) -> dict[str, PropagatedErrors]:
    """Give taps without measured noise a bound that grows with the ratios of the taps before them.

    A softmax and a norm may enlarge an error, and only the model says by how much. So an operation is far off if its
    ratio exceeds `RATIO_BOUND` times the largest ratio of all rows before it. An operation after a wrong one is
    compared with the ratio of the wrong one.
    """
    largest = 1.0
    for tap in (operation.tap for operation in graph if operation.tap in errors and operation.tap not in measured):
        bounded = replace(errors[tap], bound=RATIO_BOUND * largest, has_noise=False)
        errors[tap] = bounded
        most = _MOST_CARRIED if not bool(bounded.is_far.any()) else math.inf
        largest = max(largest, min(most, max(bounded.ratio[bounded.ratio.isfinite()].tolist(), default=0.0)))
    return errors


def what_logits_show(noise: torch.Tensor, graph: Graph) -> str:
    """Return a note of what a comparison of logits alone can find: `errors of 12 % of a row, ...`.

    A relative change of each weight by its own random amount moves the output of each product by as much, and the
    products add up as independent errors do, to the root of their number. Planted changes in four tiny models in
    three dtypes were found from 1 to 2 times the estimate on, and from 5 times in one model in float32
    (docs/how-verdicts-work.md). The note states twice the estimate.

    Args:
        noise: [rows] HF's own relative L2 error of the logits.
        graph: of the model.
    """
    num_products = max(1, sum(operation.kind is Kind.LINEAR for operation in graph))
    row = RATIO_BOUND * float(noise.nanmedian())
    return (
        f"errors from {100 * row:.2g} % of a row's norm on, {RATIO_BOUND:g} times HF's own; a change of all weights "
        f"from about {200 * row / math.sqrt(num_products):.2g} % on, or of one matrix from about {200 * row:.2g} % on"
    )


def _logit_result(parts: list[torch.Tensor]) -> LogitResult | None:
    if not parts:
        return None
    agreement, kl, margin = torch.cat(parts, dim=1)
    return LogitResult(
        num_rows=len(kl), top1_agreement=float(agreement.mean()), kl_max=float(kl.max()), margin_min=float(margin.min())
    )


MAX_POSITIONS = 256
"""Largest number of entries; in longer requests neighbouring positions share one."""


def position_errors(propagation: Propagation, graph: Graph) -> tuple[PositionError, ...]:
    """Return median and largest ratio by position, at the deepest tap that was compared at every row.

    The head is left out: an engine may compute it only where it samples.
    """
    compared = [op.tap for op in graph if op.tap in propagation.errors and not op.sampled_only and not op.is_kept]
    return tuple(_by_position(propagation, compared[-1])) if compared else ()


def _by_position(propagation: Propagation, tap: str) -> Iterator[PositionError]:
    errors = propagation.errors[tap]
    positions = errors.rows.position
    if not len(positions):
        return
    width = -(-(int(positions.max()) + 1) // MAX_POSITIONS)
    bins = positions // width
    for place in bins.unique().tolist():
        ratio = errors.ratio[bins == place]
        yield PositionError(
            tap=tap, position=place * width, ratio_median=float(ratio.median()), ratio_max=float(ratio.max())
        )
