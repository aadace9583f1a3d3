"""As served: a schedule once more with nothing attached to the engine, its logits compared with the watched run's.

Observation may change what an engine computes: hooks switch fast paths off. The verdict on the watched run is then
about another computation than that of a server.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path

import torch

from harness.base.files import scratch_folder
from harness.base.metrics import rounding_unit, row_errors
from harness.engines import Engine
from harness.engines.record import IsolatedEngine
from harness.errors import Code, HarnessError
from harness.formats.recording import Recording, RequestInfo
from harness.formats.schedule import Schedule
from harness.judge.compare.align import Locator, Rows, match_requests
from harness.judge.compare.bits import rows_differ
from harness.judge.compare.propagated import RATIO_BOUND, propagated_errors
from harness.judge.compare.shapes import engine_dtype
from harness.judge.jobs.opened import record_run
from harness.oracle.golden import Golden
from harness.oracle.model import HFModel
from harness.plan import Plan
from harness.results.check import AsServed, Finding, Outcome, Reference, RunResult, ServedStatus

_BLOCK_ROWS = 256


def with_served_run(
    result: RunResult,
    plan: Plan,
    engine: Engine | IsolatedEngine,
    schedule: Schedule,
    watched: Recording,
    golden: Golden,
    hf: HFModel,
    *,
    copies: Sequence[RequestInfo] | None,
) -> RunResult:
    """Run the schedule once more as served; return the result with the comparison, and a finding if the logits differ.

    If they differ, a second watched run tells an engine that is not deterministic from one that computes something else
    when it is not watched.

    Raises:
        HarnessError: as `record_run`: the engine fails where it is not watched, and passes else. Where it has shown
            a mistake already, that stays the result; where it fails in a second watched run, it frees too little.
    """
    served = AsServed(status=ServedStatus.NOT_RUN, schedule=result.schedule)
    reason = _reason_not_to_run(plan, engine, watched, result, hf)
    if reason is None:
        record = partial(record_run, plan, engine, schedule, golden.requests[: len(plan.prompts)], copies=copies)
        compare = _Comparison(watched, golden, hf, result)
        with scratch_folder("harness-") as folder:
            try:
                return _with_runs(result, served, record, compare, folder)
            except HarnessError as error:
                if result.outcome is Outcome.PASS and _runs_again(engine, record, folder):
                    raise
                reason = error.summary
    return replace(result, as_served=replace(served, reason=reason))


def ended_before_served(result: RunResult) -> RunResult:
    """Say of the last run of a check that ended early that none was made as served."""
    reason = "the check ended before its last schedule"
    served = AsServed(status=ServedStatus.NOT_RUN, schedule=result.schedule, reason=reason)
    return replace(result, as_served=served)


def _with_runs(
    result: RunResult, served: AsServed, record: Callable[..., None], compare: "_Comparison", folder: Path
) -> RunResult:
    """Run as served, and watched once more if the logits differ."""
    record(folder=folder / "served", is_served=True)
    difference = compare.with_run(folder / "served")
    if not difference.num_different:
        status = ServedStatus.EQUAL if difference.is_exact else ServedStatus.WITHIN_NOISE
        return replace(result, as_served=difference.as_served(served, status))
    record(folder=folder / "again")
    again = compare.with_run(folder / "again")
    if again.num_different:
        return replace(result, as_served=again.as_served(served, ServedStatus.NOT_DETERMINISTIC))
    differs = difference.as_served(served, ServedStatus.DIFFERS)
    findings = (*result.findings, difference.finding(differs, compare.tap))
    return replace(result, as_served=differs, findings=findings, outcome=Outcome.MISMATCH)


def _runs_again(engine: Engine | IsolatedEngine, record: Callable[..., None], folder: Path) -> bool:
    """Whether an engine that failed as served can be run once more while it is watched."""
    if isinstance(engine, IsolatedEngine):  # its process may be gone
        return True
    try:
        record(folder=folder / "after")
    except HarnessError:
        return False
    return True


def _reason_not_to_run(
    plan: Plan, engine: Engine | IsolatedEngine, watched: Recording, result: RunResult, hf: HFModel
) -> str | None:
    if engine.capabilities.not_served is not None:
        return engine.capabilities.not_served
    if any(prompt.inputs for prompt in plan.prompts):
        return "images reach the model through a hook"
    if not any(step.has(hf.graph.logits) for step in watched.steps):
        return "the watched run recorded no logits"
    if plan.case.stops_early and result.outcome is Outcome.MISMATCH:
        return "the check ends at the first mistake, as asked"
    return None


def _allowed_ratio(ratios: Iterable[float | None]) -> float:
    """Return how far a row may be from the watched run's, over HF's own error, if that has these `ratios` and passes.

    Each of two sound runs is as far from the truth as `RATIO_BOUND` allows, or the watched one is if it passes: it may
    follow another convention than HF, or choose other experts.
    """
    return max([RATIO_BOUND, *(2 * ratio for ratio in ratios if ratio and math.isfinite(ratio))])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Difference:
    """The logits of a run compared with the watched ones; tensors [rows]."""

    rows: Rows
    is_exact: bool
    ratio: torch.Tensor
    """float64: distance over HF's own error; infinite where the row is missing."""
    is_other_choice: torch.Tensor
    """bool: another logit is the largest."""
    allowed: float

    @property
    def is_different(self) -> torch.Tensor:
        """[rows] bool; a distance that is no number differs, too."""
        return ~(self.ratio <= self.allowed)

    @property
    def num_different(self) -> int:
        """Number of rows that differ."""
        return int(self.is_different.sum())

    def as_served(self, served: AsServed, status: ServedStatus) -> AsServed:
        """Return the result with what was compared."""
        return replace(
            served,
            status=status,
            num_rows=len(self.rows),
            num_different=self.num_different,
            num_other_choices=int(self.is_other_choice.sum()),
            ratio_max=float(self.ratio.nan_to_num(nan=math.inf, posinf=math.inf).max()),
            allowed_ratio=self.allowed,
        )

    def finding(self, served: AsServed, tap: str) -> Finding:
        """Return the finding that the logits differ."""
        first = self.rows.first(self.is_different)
        request, position = int(self.rows.request[first]), int(self.rows.position[first])
        message = (
            f"with nothing attached to the engine {served.num_different} of {served.num_rows} rows of {tap} differ "
            "from the watched run, which a second watched run does not, the first at "
            f"request {request}, position {position}: {float(self.ratio[first]):.3g} times HF's own noise, "
            f"{self.allowed:.3g} allowed; the largest logit is another in {served.num_other_choices} rows"
        )
        return Finding(code=Code.OBSERVED_NOT_SERVED, message=message, tap=tap, request=request, position=position)


class _Comparison:
    """Compares the logits of other runs with the watched ones."""

    def __init__(self, watched: Recording, golden: Golden, hf: HFModel, result: RunResult) -> None:
        """Compare runs with the watched one, whose result is given; the golden is asked where bits differ."""
        self.tap, self._names, self._graph, self._result = hf.graph.logits, hf.graph.aliases, hf.graph, result
        self._recording, self._watched, self._expected = watched, Locator(watched), golden

    @cached_property
    def _truth(self) -> Golden:
        return self._expected.truth

    @cached_property
    def _golden(self) -> Locator:
        recording = self._truth.recording
        return Locator(recording, match_requests(recording, self._recording, is_pool=self._truth.is_pool))

    @cached_property
    def _noise(self) -> torch.Tensor:
        """HF's own error of the logits, by row of the truth."""
        return self._truth.noise[self.tap].to(torch.float64)

    @cached_property
    def _least(self) -> float:
        return max(float(self._noise.nanmedian()), rounding_unit(engine_dtype(self._recording)))

    @cached_property
    def _allowed(self) -> float:
        """How far a row may be from the watched run's, over HF's own error."""
        ratios: list[float | None] = [item.propagated_ratio_max for item in self._result.taps if item.name == self.tap]
        if self._result.propagated_from is Reference.HF:
            noise, tap = self._truth.noise, {self.tap}
            of_logits = propagated_errors(self._recording, self._golden, noise, self._graph, tap).errors
            ratios = [float(errors.ratio.max()) for errors in of_logits.values()]
        return _allowed_ratio(ratios if self._result.outcome is Outcome.PASS else ())

    def with_run(self, folder: Path) -> _Difference:
        """Compare the run that was recorded in a folder."""
        request, position = self._watched.recorded(self.tap).nonzero().unbind(1)
        rows = Rows(request=self._watched.request_ids[request], position=position, step=torch.full_like(request, -1))
        with Recording.open(folder, verify=False) as recording:  # this process, or the engine's, just wrote it
            run = Locator(recording.with_names(self._names))
            blocks = torch.arange(len(rows)).split(_BLOCK_ROWS)
            parts = [self._compared(rows.select(at), run) for at in blocks]
        is_exact, ratio, is_other = (torch.cat(column) for column in zip(*parts, strict=True))
        return _Difference(
            rows=rows,
            is_exact=bool(is_exact.all()),
            ratio=ratio,
            is_other_choice=is_other,
            allowed=RATIO_BOUND if bool(is_exact.all()) else self._allowed,
        )

    def _compared(self, rows: Rows, run: Locator) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return [rows] three times: whether all bits are equal, the distance in noise, whether the choice differs."""
        places = run.find(self.tap, rows)
        is_there = places[:, 0] >= 0
        is_exact, is_other = torch.zeros(2, len(rows), dtype=torch.bool)
        ratio = torch.full((len(rows),), math.inf, dtype=torch.float64)
        if not bool(is_there.any()):
            return is_exact, ratio, is_other
        expected = self._watched.gather(self.tap, self._watched.find(self.tap, rows.select(is_there))).flatten(1)
        actual = run.gather(self.tap, places[is_there]).flatten(1)
        if actual.shape == expected.shape:
            if actual.dtype == expected.dtype:
                is_exact[is_there] = ~rows_differ(actual, expected)
            ratio[is_there] = 0.0
            if bool((others := is_there & ~is_exact).any()):
                at = others[is_there]
                ratio[others] = row_errors(actual[at], expected[at]) / self._noise_at(rows.select(others))
            is_other[is_there] = actual.argmax(dim=1) != expected.argmax(dim=1)
        return is_exact, ratio, is_other

    def _noise_at(self, rows: Rows) -> torch.Tensor:
        """Return [rows] float64: HF's own relative L2 error, at least that of the median row, as of drafts."""
        running = self._golden.find(self.tap, rows)[:, 2]
        noise = torch.where(running >= 0, self._noise[running.clamp(min=0)], self._least)
        return noise.nan_to_num(self._least).clamp(min=self._least)
