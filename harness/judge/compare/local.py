"""Local judgement: every operation by itself, in one forward of HF's with the engine's own rows put back.

At every tap the engine's row is compared with what HF's code gives from the engine's rows before it, and HF goes on
with the engine's row. So a wrong operation is wrong once, and what follows is judged on its own inputs. What was not
recorded flows through HF's code, in the truth and in the control alike.
"""

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from harness.base.numerics import Numerics
from harness.base.progress import Progress
from harness.base.threads import Workers, num_spare_threads
from harness.formats.recording import Recording
from harness.formats.taps import KINDS, Graph, Kind, Operation, layer_of
from harness.judge.compare.align import Rows
from harness.judge.compare.batch import PaddedBatch, RowSample, SampledRows, make_batches, spread
from harness.judge.compare.conventions.entry import HALF
from harness.judge.compare.evidence import MAX_LAYERS, MAX_ROWS, Evidence, PartInputs, histories, merged
from harness.judge.compare.projected import EXACT_ROWS, VERIFYING_ROWS, exact_places, projections_of
from harness.judge.compare.replay import DecidedError, Judge, Replay, TapRows, unrecorded_before
from harness.judge.compare.row_judge import LocalErrors, RowJudge, choice_errors, judged_queries
from harness.judge.compare.seen import NumberedRows
from harness.judge.compare.sequences import sequences
from harness.judge.compare.shapes import engine_dtype
from harness.judge.compare.systematic import Effects, beyond_control
from harness.oracle.attention import score_slope
from harness.oracle.images import inputs_of
from harness.oracle.model import HFModel
from harness.oracle.paired import run_pair
from harness.oracle.precision import SoftplusByLog, truth_dtype
from harness.oracle.requests import batch_tokens
from harness.oracle.scan_order import ScanInAnyChunks
from harness.results.check import Effect


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalJudgement:
    """The result of forced replay: of operations, or of states that were read back."""

    errors: Mapping[str, LocalErrors] = field(default_factory=dict)
    """By tap, in the order of the run."""
    evidence: Mapping[str, Evidence] = field(default_factory=dict)
    """Of taps with wrong rows."""
    sound: Mapping[str, Evidence] = field(default_factory=dict)
    """Some rows of one sound operation of each site: what known mistakes would have made of them."""
    not_chosen: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """By tap of a router: the experts that no row chose."""
    is_partial: bool = False
    """Whether the replay ended at the first part of the model with a wrong operation: later parts were not judged."""
    sampled: SampledRows = field(default_factory=SampledRows)
    num_seen: int = 0
    """Rows that an earlier schedule had bit for bit, with all that they read: their errors are those of then."""
    left_out: tuple[str, ...] = ()
    """Positions of each request whose states were not judged, as text: the truth would have to run too many tokens."""


@dataclass(slots=True)
class _TapTotals:
    """What has been judged of one operation so far; the lists have an entry for each batch."""

    errors: list[LocalErrors] = field(default_factory=list)
    effects: Effects | None = None
    control_effects: Effects | None = None
    evidence: list[Evidence] = field(default_factory=list)

    def direction(self, errors: Sequence[LocalErrors]) -> Effect | None:
        """Return the direction of all rows so far that rounding does not have, under the conventions of some errors."""
        allowance = max((part.allowance for part in errors), default=0.0)
        return beyond_control(self.effects, self.control_effects, allowance=allowance)


OrderOfSums = Callable[[], AbstractContextManager[Any]]
"""Entered on the thread of the control: how it orders sums that HF's code leaves to the engine."""
_SOUND_ROWS, _SOUND_QUERIES = 48, 8
"""Sound rows that are kept of an operation; of attention, whose rows are those of the two longest requests."""
_Measured = tuple[TapRows, LocalErrors, torch.Tensor]
"""Rows of one operation, their errors, and [R] bool which of them are wrong: those out of bounds; or all of them, where
only together they have a direction that rounding does not have."""


class LocalJudge(Judge):
    """Judges the rows of every operation and joins the results.

    `add` and `settle` run on the thread of the truth. `add` lets a worker measure (`_measure`), while the model
    continues to the next operation; the results are then added to the totals (`_take`), in the order of the run. A
    worker changes only the effects of its operation, whose batches are measured one after the other.
    """

    def __init__(
        self,
        hf: HFModel,
        dtype: torch.dtype,
        usable: set[str],
        *,
        is_alone: bool,
        declared: Numerics | None = None,
        may_truncate: bool = False,
        stops_early: bool = False,
        is_final: bool = True,
        keeps_sound: bool = True,
        workers: Workers[_Measured] | None = None,
    ) -> None:
        super().__init__(hf.graph, usable)
        self.unrecorded_before = unrecorded_before(hf.graph, usable)
        self._dtype = dtype
        self._rows = RowJudge(hf, dtype, usable, declared or Numerics(), is_final=is_final)
        self._is_alone, self._may_truncate = is_alone, may_truncate
        self._workers = Workers[_Measured]() if workers is None else workers
        self._totals: dict[str, _TapTotals] = {}
        self._num_kept = Counter[str]()
        self._sound: dict[tuple[str, int | None], Evidence] = {}
        self._not_chosen: dict[str, set[int]] = {}
        self._keeps_sound = keeps_sound
        self._stops_early, self._has_bad, self._is_final = stops_early or not is_final, False, is_final

    def add(self, rows: TapRows) -> None:
        """See `Judge.add`."""
        totals = self._totals.setdefault(rows.operation.tap, _TapTotals())
        if rows.operation.kind is not Kind.CHOICE:
            self.settle()  # so the rows of two operations are held at most
            self._workers.submit(partial(self._measure, rows, totals))
            if not self.reads_later:
                self.settle()
            return
        distances = choice_errors(rows)
        errors = LocalErrors(rows=rows.rows, roundings=distances, bound=torch.ones_like(distances))
        totals.errors.append(errors)
        if errors.num_bad:
            self._keep_evidence(rows, totals, errors, errors.bad)

    def add_estimated(self, operation: Operation, rows: Rows, roundings: torch.Tensor, bound: torch.Tensor) -> None:
        """See `Judge.add_estimated`."""
        errors = LocalErrors(rows=rows, roundings=roundings, bound=bound, dtype=self._dtype)
        self._totals.setdefault(operation.tap, _TapTotals()).errors.append(errors)

    def choose(self, operation: Operation, chosen: torch.Tensor, num_scores: int) -> None:
        """See `Judge.choose`."""
        self._not_chosen.setdefault(operation.tap, set(range(num_scores))).difference_update(chosen.unique().tolist())

    def settle(self) -> None:
        """See `Judge.settle`."""
        for rows, errors, wrong in self._workers.finished():
            self._take(rows, errors, wrong, self._totals[rows.operation.tap])

    @property
    def reads_later(self) -> bool:
        """See `Judge.reads_later`."""
        return self._workers.num_threads > 0

    @property
    def is_decided(self) -> bool:
        """See `Judge.is_decided`: if the judge stops early, whether an operation that was judged by itself is wrong."""
        return self._stops_early and self._has_bad

    def _measure(self, rows: TapRows, totals: _TapTotals) -> _Measured:
        """Measure some rows: their errors, their bounds, and what direction the errors have."""
        errors = self._rows.judge(rows, dtype=totals.errors[-1].dtype if totals.errors else None)
        if totals.effects is None:
            totals.effects, totals.control_effects = (self._new_effects(rows, errors) for _ in range(2))
        before = None if self._is_alone else copy.deepcopy(totals.effects)
        self._add_effects(rows, totals, errors)
        has_direction = not rows.unrecorded and totals.direction([*totals.errors, errors]) is not None
        if has_direction and errors.convention is None and (self._is_final or not errors.num_bad):
            totals.effects, errors = self._without_direction(rows, totals.effects, before, errors)
            has_direction = errors.convention is None
        wrong = errors.bad
        if has_direction and not bool(wrong.any()):  # any row is as good as another
            wrong = errors.roundings.isfinite()
        return rows, errors, wrong

    def _take(self, rows: TapRows, errors: LocalErrors, wrong: torch.Tensor, totals: _TapTotals) -> None:
        """Take what was measured into the totals."""
        totals.errors.append(replace(errors, expected=None))
        if rows.unrecorded and not self._is_within_part(rows):
            return  # a cause would have to run several parts of the model again
        self._has_bad |= bool(errors.bad.any()) and not rows.unrecorded
        if bool(wrong.any()):
            self._keep_evidence(rows, totals, errors, wrong)
        else:
            self._keep_sound(rows, errors)

    def _is_within_part(self, rows: TapRows) -> bool:
        """Whether the unrecorded taps before the operation all stand in its part of the model, or outside of layers.

        Or are sums that it reads itself, as the first norm of a layer reads the residual of the layer before.
        """
        if rows.part is None:
            return all(layer_of(tap) is None for tap in rows.unrecorded)
        part, graph = f"{rows.part.path}.", self.graph
        outside = [tap for tap in rows.unrecorded if not f"{graph[tap].module}.".startswith(part)]
        return all(tap in rows.operation.inputs and graph[tap].kind is Kind.ADD for tap in outside)

    def _new_effects(self, rows: TapRows, errors: LocalErrors) -> Effects:
        assert errors.dtype is not None
        shape = rows.value.rows.shape
        num_heads = shape[1] if len(shape) == 3 else 1
        return Effects(rows.operation.kind, errors.dtype, num_heads=num_heads, may_truncate=self._may_truncate)

    def _add_effects(self, rows: TapRows, totals: _TapTotals, errors: LocalErrors) -> None:
        """Add the rows to the sums that show a direction; the control's rows only where they are needed."""
        assert totals.effects is not None
        assert totals.control_effects is not None
        slope = _slope(rows, errors)
        judged = _add(totals.effects, rows, errors, slope)
        if rows.control is None or errors.control is None:
            return
        if not self._is_alone or totals.effects.strongest() is not None:
            position = rows.places % rows.batch.num_tokens
            finite = judged & errors.control.isfinite()
            totals.control_effects.add(position, rows.control, rows.expected, finite, slope)

    def _without_direction(
        self, rows: TapRows, effects: Effects, before: Effects | None, errors: LocalErrors
    ) -> tuple[Effects, LocalErrors]:
        """Return effects and errors under the convention that causes the direction; unchanged if there is no such."""
        best = self._rows.under_best_convention(rows, errors)
        if best is None or best.num_bad > errors.num_bad or best.typical >= errors.typical:
            return effects, errors
        under_best = before or self._new_effects(rows, errors)
        _add(under_best, rows, best, _slope(rows, best))
        return (effects, errors) if beyond_control(under_best, None, allowance=best.allowance) else (under_best, best)

    def _keep_evidence(self, rows: TapRows, totals: _TapTotals, errors: LocalErrors, bad: torch.Tensor) -> None:
        """Keep wrong rows."""
        if self._is_kept(rows.operation, totals):
            totals.evidence.append(self._evidence(rows, errors, bad))

    def _keep_sound(self, rows: TapRows, errors: LocalErrors) -> None:
        """Keep some sound rows of the first layer of each site, with the bounds that wrong rows would have."""
        operation = rows.operation
        site = operation.site, operation.window
        if site in self._sound or rows.unrecorded or not self._keeps_sound:
            return
        usable, most = errors.roundings.isfinite(), _SOUND_ROWS
        if operation.kind is Kind.ATTENTION:
            lines, sequences = rows.places // rows.batch.num_tokens, rows.batch.sequences
            longest = sorted(range(len(sequences)), key=lambda line: -len(sequences[line]))[:2]
            usable, most = usable & torch.isin(lines, torch.tensor(longest)), _SOUND_QUERIES
        chosen = torch.zeros_like(usable)
        chosen[spread(usable.nonzero()[:, 0].flip(0).tolist(), most)] = True
        if bool(chosen.any()):
            bound = errors.bound.clone()
            bound[chosen] = self._rows.bound_if_wrong(rows.select(chosen), errors, bound[chosen])
            self._sound[site] = self._evidence(rows, replace(errors, bound=bound), chosen)

    def _evidence(self, rows: TapRows, errors: LocalErrors, mask: torch.Tensor) -> Evidence:
        """Return some of the rows with their inputs; of choices, with the truth's scores as their inputs."""
        operation, is_choice = rows.operation, rows.operation.kind is Kind.CHOICE
        if operation.kind is Kind.ATTENTION and rows.value.call is not None:
            contexts, kept = histories(rows.batch, rows.value.call, rows.places[mask])
            where = {place: at for at, place in enumerate(rows.places.tolist())}
            chosen = torch.tensor([where[place] for place in kept.tolist()])
            inputs = list[torch.Tensor]()
        else:
            some = mask.nonzero()[:, 0]
            contexts, chosen = (), some[torch.tensor(spread(range(len(some)), MAX_ROWS))]
            inputs = [_scores(rows, rows.places[chosen])] if is_choice else rows.inputs(rows.places[chosen])
        return Evidence(
            operation=operation,
            rows=rows.batch.rows(rows.places[chosen]),
            expected=rows.expected[chosen.to(rows.expected.device)].to("cpu", torch.float64).flatten(1),
            inputs=[_kept_input(x) for x in inputs],
            roundings=errors.roundings[chosen],
            bound=errors.bound[chosen],
            dtype=errors.dtype or torch.float32,  # the distances of choices have no unit
            views=contexts,
            unrecorded=() if is_choice else rows.unrecorded,
            part_inputs=None if rows.part is None else PartInputs(batch=rows.batch, call=rows.part),
        )

    def _is_kept(self, operation: Operation, totals: _TapTotals) -> bool:
        """Whether more evidence of an operation is kept: of a site, that of the first layers."""
        if not totals.evidence and self._num_kept[operation.site] == MAX_LAYERS:
            return False
        self._num_kept[operation.site] += not totals.evidence
        return True

    def judgement(self) -> LocalJudgement:
        """Return all judgements, in the order of the run."""
        in_order = [op.tap for op in self.graph if op.tap in self._totals]
        return LocalJudgement(
            errors={tap: self._errors(tap, self._totals[tap]) for tap in in_order},
            evidence={tap: merged(self._totals[tap].evidence) for tap in in_order if self._totals[tap].evidence},
            sound={evidence.operation.tap: evidence for evidence in self._sound.values()},
            not_chosen={tap: tuple(sorted(experts)) for tap, experts in self._not_chosen.items() if experts},
            is_partial=self.is_decided,
        )

    def _errors(self, tap: str, totals: _TapTotals) -> LocalErrors:
        return replace(
            LocalErrors.concat(totals.errors),
            effect=totals.direction(totals.errors),
            unrecorded=self.unrecorded_before.get(tap) or (),
            failures=tuple(self._rows.failures.get(tap, ())),
        )


def _add(effects: Effects, rows: TapRows, errors: LocalErrors, slope: torch.Tensor | None) -> torch.Tensor:
    """Add the rows that can be judged, and return which rows these are: [R] bool."""
    assert errors.expected is not None
    judged = errors.roundings.isfinite()
    effects.add(rows.places % rows.batch.num_tokens, rows.actual, errors.expected, judged, slope)
    return judged


def _slope(rows: TapRows, errors: LocalErrors) -> torch.Tensor | None:
    """[R, W]: how the rows move with the softmax scale; None where single rows show that, or there is no such scale."""
    if rows.value.call is None or errors.dtype not in HALF or errors.num_bad:
        return None
    call, at = judged_queries(rows)
    slope = score_slope(call).flatten(0, 1)
    return slope[at.to(slope.device)]


def _scores(rows: TapRows, places: torch.Tensor) -> torch.Tensor:
    """Return the truth's scores at some places of the batch, [places, ...]."""
    assert rows.value.scores is not None
    return rows.value.scores[places.to(rows.value.scores.device)]


def _kept_input(x: torch.Tensor) -> torch.Tensor:
    return x.to("cpu", torch.float64).flatten(1) if x.is_floating_point() else x.cpu()


def local_errors(
    recording: Recording,
    hf: HFModel,
    usable: set[str],
    *,
    truth: str = "auto",
    stops_early: bool = False,
    sample: RowSample | None = None,
    progress: Progress | None = None,
    numbered: NumberedRows | None = None,
) -> LocalJudgement:
    """Run the model over all that the engine computed, every recorded value put back, and judge each operation.

    The control runs only where it can decide: it enlarges bounds, and excuses directions that its own rounding has. So
    what passes without it passes with it; else the replay ends at the first wrong operation, and all is judged again
    beside the control. Where a model with states is out of its control's bounds, a control that sums its decays in
    another order (`ScanInAnyChunks`) decides too.

    Args:
        recording: the engine's, its taps named as in the graph.
        hf: the model in the engine's dtype.
        usable: recorded taps whose shape and dtype fit.
        truth: `float64`, `float32` or `auto`.
        stops_early: end at the first part of the model with an operation that is out of bounds.
        sample: of the positions at which products and attention are judged; None for all.
        progress: told what is being done.
        numbered: the rows, some of which were judged before; where anything is wrong, all rows are judged again.
    """
    replayed = partial(
        _replayed, recording, hf, usable, truth=truth, stops_early=stops_early, sample=sample, progress=progress
    )
    if not needs_control(hf.graph, usable):
        judgement = replayed(has_control=False, numbered=numbered)
        if not any(map(_is_wrong, judgement.errors.values())):
            return judgement
        del judgement  # its evidence holds rows of all layers
    judgement = replayed(has_control=True)
    is_of_control = (errors.is_bounded_by_control and errors.num_bad for errors in judgement.errors.values())
    if not hf.graph.states or not any(is_of_control):
        return judgement
    return with_fewer_bad([judgement, replayed(has_control=True, order_of_sums=ScanInAnyChunks)])


def _is_wrong(errors: LocalErrors) -> bool:
    """Whether anything in the rows of an operation asks for the control."""
    return bool(errors.num_bad or errors.effect or errors.convention)


def with_fewer_bad(judgements: Sequence[LocalJudgement]) -> LocalJudgement:
    """Return the judgement that went farthest, each operation as where the fewest of its rows are out of bounds."""
    farthest = max(judgements, key=lambda judgement: len(judgement.errors))
    errors, evidence = dict[str, LocalErrors](), dict[str, Evidence]()
    for tap in farthest.errors:
        best = min((item for item in judgements if tap in item.errors), key=lambda item: item.errors[tap].num_bad)
        errors[tap] = best.errors[tap]
        if tap in best.evidence:
            evidence[tap] = best.evidence[tap]
    return replace(farthest, errors=errors, evidence=evidence)


def needs_control(graph: Graph, usable: set[str]) -> bool:
    """Whether a bound cannot be told without the control: that of a kind without an error model, or across taps."""
    judged = (op for op in graph if op.tap in usable and not op.is_kept)
    return bool(unrecorded_before(graph, usable)) or any(KINDS[op.kind].error_model is None for op in judged)


def _replayed(
    recording: Recording,
    hf: HFModel,
    usable: set[str],
    *,
    truth: str,
    stops_early: bool,
    sample: RowSample | None,
    progress: Progress | None,
    has_control: bool,
    order_of_sums: OrderOfSums = nullcontext,
    numbered: NumberedRows | None = None,
) -> LocalJudgement:
    """Judge as `local_errors`; without the control, bounds may be too small and directions those of all rounding."""
    ahead, sampled = max(hf.graph.drafted_from, default=0), SampledRows()
    unseen = sequences(recording) if numbered is None else numbered.unseen
    batches = make_batches(recording, unseen, batch_tokens(hf), sample, ahead=ahead)
    precision, declared, dtype = (
        replay_dtype(truth, recording, hf),
        recording.manifest.numerics,
        engine_dtype(recording),
    )
    projections = None if sample is not None else projections_of(recording, hf, precision)
    is_last = numbered is None or bool(numbered.seen.num_for_power)
    needs_history = is_last or numbered is None or not numbered.num_seen
    least = VERIFYING_ROWS if numbered is not None and numbered.are_few else EXACT_ROWS
    # A worker reads weights, which change for the turns of a control. More than one only wait for the interpreter.
    with Workers[_Measured](0 if has_control else min(1, num_spare_threads(hf.device))) as workers:
        judge = LocalJudge(
            hf,
            dtype,
            usable,
            is_alone=len(batches) == 1,
            declared=declared,
            may_truncate=recording.manifest.device.startswith("cuda"),
            stops_early=stops_early,
            is_final=has_control,
            keeps_sound=is_last,
            workers=workers,
        )
        with suppress(DecidedError):
            for index, batch in enumerate(batches):
                exact = None if projections is None else exact_places(batch, index, least)
                watcher = Replay(judge, batch, projections, exact, needs_history=needs_history)
                sampled = _with_batch(sampled, batch, sample if watcher.is_sampled else None)
                report = None if progress is None else partial(progress, f"replay {index + 1}/{len(batches)}")
                run_pair(
                    hf,
                    batch.token_ids,
                    watcher,
                    truth_dtype=precision,
                    logit_positions=watcher.logit_positions,
                    progress=report,
                    inputs=inputs_of(hf, batch.sequences[0].request, batch.num_tokens),
                    sample=watcher.sample,
                    control_arithmetic=control_arithmetic(recording, order_of_sums),
                    has_control=has_control,
                )
    if projections is not None:
        projections.save()
    judgement = replace(judge.judgement(), sampled=sampled)
    if numbered is None or any(map(_is_wrong, judgement.errors.values())):
        return judgement
    errors = numbered.seen.with_seen(judgement.errors, numbered)
    numbered.seen.remember(judgement.errors, numbered)
    in_order = {op.tap: errors[op.tap] for op in hf.graph if op.tap in errors}
    return replace(judgement, errors=in_order, num_seen=numbered.num_seen)


def control_arithmetic(
    recording: Recording, order_of_sums: OrderOfSums = nullcontext
) -> Callable[[], AbstractContextManager[Any]]:
    """Return the context in which the control computes as the engine declares, and sums in an order."""
    numerics = recording.manifest.numerics
    declared = SoftplusByLog if numerics is not None and numerics.softplus_by_log else nullcontext

    @contextmanager
    def arithmetic() -> Iterator[None]:
        with declared(), order_of_sums():
            yield

    return arithmetic


def _with_batch(sampled: SampledRows, batch: PaddedBatch, sample: RowSample | None) -> SampledRows:
    """Add the rows of a batch, all of them judged or a sample."""
    num_rows = int(batch.is_own.sum())
    if sample is None:
        return replace(sampled, judged=sampled.judged + num_rows)
    least_found = sample.least_found(max(map(len, batch.sequences)))
    return SampledRows(
        judged=sampled.judged + batch.num_sampled,
        left_out=sampled.left_out + num_rows - batch.num_sampled,
        least_found=max(least_found, sampled.least_found or 0),
    )


def replay_dtype(choice: str, recording: Recording, hf: HFModel) -> torch.dtype:
    """Return the dtype of the truth: for `auto` float64 where the engine's activations are float32.

    Logits alone do not count: many engines give those of 16 bits in float32.
    """
    finer = {tap.name for tap in recording.taps if tap.dtype == "F32"} - {hf.graph.logits, *hf.graph.head}
    return torch.float64 if choice == "auto" and finer else truth_dtype(choice, hf.dtype)
