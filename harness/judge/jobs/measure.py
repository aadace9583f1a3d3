"""Measure how far two recordings in two precisions are apart: no bound holds between them, so nothing is judged."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path

import torch

from harness.base.metrics import rounding_unit
from harness.errors import Code, HarnessError
from harness.formats.recording import Recording
from harness.formats.taps import Graph
from harness.judge.compare.align import Locator, Rows, match_requests
from harness.judge.compare.propagated import PropagatedErrors, propagated_errors
from harness.judge.compare.shapes import check_taps, engine_dtype, refuse_part
from harness.judge.jobs.diff import wanted_taps
from harness.oracle.golden import INFO_FILE, Golden
from harness.results.measurement import Measurement, TapError

LEVEL = 10.0
"""Roundings from which a tap is named, by default."""


def has_two_precisions(expected: Path, actual: Path) -> bool:
    """Whether two engines' recordings state different dtypes; a golden's noise belongs to one, so it stays a judge.

    Raises:
        HarnessError: as `Recording.open`.
    """
    with Recording.open(expected, verify=False) as theirs, Recording.open(actual, verify=False) as ours:
        return not (expected / INFO_FILE).is_file() and theirs.manifest.dtype != ours.manifest.dtype


def run_measurement(expected: Path, actual: Path, *, taps: Sequence[str] = ("*",), level: float = LEVEL) -> Measurement:
    """Measure the rows of two recordings of the same tokens.

    Args:
        expected: the recording that errors are relative to, usually that of the finer dtype.
        actual: the other one.
        taps: globs or presets, as in `run_diff`.
        level: roundings from which a tap is named as the first above.

    Raises:
        HarnessError: a recording is missing or damaged, they hold other tokens, or have no row of a tap in common.
    """
    with Recording.open(expected) as theirs, Recording.open(actual) as ours:
        for recording in (theirs, ours):
            refuse_part(recording)
        locator, graph = _CommonRows(theirs, ours), Golden(theirs).graph
        findings, usable = check_taps(ours, theirs, graph)
        names = [entry.name for entry in theirs.taps]
        wanted = usable & {*wanted_taps(taps, (), names, graph)}
        measured = propagated_errors(ours, locator, {}, graph, wanted)
        for recording in (theirs, ours):
            recording.verify_all()
        unit = max((engine_dtype(recording) for recording in (theirs, ours)), key=rounding_unit)
        tap_errors = tuple(_tap_errors(graph, measured.errors, unit))
        if not tap_errors:
            what, hint = "the two recordings have no row of a tap in common", "record both with the same engine"
            raise HarnessError(Code.NOTHING_CHECKED, what, where=f"{expected} and {actual}", hint=hint)
        alone = [f"{tap}: in one of both" for tap in sorted({*names} ^ {entry.name for entry in ours.taps})]
        others = [f"{tap}: {len(rows)} rows of other experts" for tap, rows in measured.other_choices.items()]
        return Measurement(
            paths=(str(expected), str(actual)),
            dtypes=(theirs.manifest.dtype, ours.manifest.dtype),
            unit=str(unit).removeprefix("torch."),
            level=level,
            num_requests=len(theirs.manifest.requests),
            taps=tap_errors,
            logits=measured.logits,
            notes=(*locator.notes, *others, *(finding.message for finding in findings), *alone),
        )


class _CommonRows(Locator):
    """Finds the rows of requests as far as both recordings have the same tokens: later rows mean other things.

    Raises:
        HarnessError: DIFFERENT_PROMPTS: the prompts differ, too.
    """

    def __init__(self, expected: Recording, actual: Recording) -> None:
        theirs = {request.id: request for request in expected.manifest.requests}
        self._lengths: dict[int, int] = {}
        for request in (request for request in actual.manifest.requests if request.id in theirs):
            pairs = enumerate(zip_longest(theirs[request.id].token_ids, request.token_ids))
            if (at := next((at for at, (one, two) in pairs if one != two), None)) is not None:
                self._lengths[request.id] = at
        prompts = {request.id: request.prompt_length for request in actual.manifest.requests}
        is_behind = all(at >= prompts[id] and theirs[id].inputs is None for id, at in self._lengths.items())
        aliases = {} if self._lengths and is_behind else match_requests(expected, actual)
        super().__init__(expected, aliases)
        self.notes = [f"request {id}: the tokens differ from position {at} on" for id, at in self._lengths.items()]

    def find(self, tap: str, rows: Rows) -> torch.Tensor:
        """See `Locator`; rows behind the common tokens are not there."""
        entries = super().find(tap, rows)
        for request, length in self._lengths.items():
            entries[(rows.request == request) & (rows.position >= length)] = -1
        return entries


def _tap_errors(graph: Graph, errors: Mapping[str, PropagatedErrors], dtype: torch.dtype) -> Iterator[TapError]:
    """Yield the errors of the taps in the order of computation, with the growth from layer to layer."""
    operations = [op for op in graph if op.tap in errors]
    computed = [op for op in operations if not op.is_kept]
    ends = {*{op.tap if op.layer is None else op.layer: op.tap for op in computed}.values()}
    unit, before = rounding_unit(dtype), 0.0
    for op in operations:
        metrics = errors[op.tap].metrics
        relative = metrics.relative_l2.nan_to_num(nan=torch.inf, posinf=torch.inf)
        median, largest = float(relative.median()), float(relative.max())
        is_end = op.tap in ends
        yield TapError(
            tap=op.tap,
            layer=op.layer,
            num_rows=len(relative),
            roundings_median=median / unit,
            roundings_max=largest / unit,
            relative_l2_max=largest,
            num_not_finite=metrics.num_nan + metrics.num_inf,
            ends_layer=is_end,
            growth=median / before if is_end and before else None,
        )
        before = median if is_end else before
