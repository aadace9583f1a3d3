"""What rules of comparison get where no module shows it: of a recording, a folder of tensors, an engine of steps."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch

from harness.base.files import scratch_folder
from harness.extensions.faults.subject import DUMP_FILE, ToolSubject, dump
from harness.extensions.faults.tools import driving
from harness.formats.recording import Recording
from harness.formats.taps import LOGITS
from harness.judge.compare.align import Locator, match_requests, step_rows
from harness.judge.jobs.opened import planned_model, record_run, with_duplicate_requests
from harness.oracle.make_golden import checked_golden

Row = tuple[int, int]
Pair = tuple[str, list[Row], torch.Tensor, torch.Tensor]
"""An operation, its rows, and their values [rows, width] in float64: the engine's and HuggingFace's."""


def paired(
    expected: Mapping[str, torch.Tensor], actual: Mapping[str, torch.Tensor], rows: Sequence[Row | None]
) -> Iterator[Pair]:
    kept = [at for at, row in enumerate(rows) if row is not None]
    known = [row for row in rows if row is not None]
    for path, value in expected.items():
        right = driving.as_rows(value, len(rows))
        said = driving.as_rows(actual[path], len(rows)) if path in actual else None
        if right is not None and said is not None and right.shape == said.shape:
            yield path or LOGITS, known, said[kept], right[kept]


def of_folder(subject: ToolSubject) -> Iterator[Pair]:
    rows = [(0, at) for at in range(len(subject.prompts[0]))]
    with scratch_folder("harness-") as folder:
        dump(driving.sound_model(subject), subject.prompts[0], folder)
        expected, actual = (torch.load(Path(at) / DUMP_FILE) for at in (folder, subject.engine))
    yield from paired(expected, actual, rows)


def of_steps(subject: ToolSubject) -> Iterator[Pair]:
    """Compare the logits of single requests: what a step returns."""
    sound = driving.sound_model(subject)
    for forward in driving.forwards(subject, sound):
        forward.run(forward.expected)
        lanes = len(forward.inputs["input_ids"])
        per_lane = len(forward.rows) // lanes
        work, rows = [], []
        for lane in range(lanes):
            held = [row for row in forward.rows[lane * per_lane : (lane + 1) * per_lane] if row is not None]
            if held:
                ids = forward.inputs["input_ids"][lane, -len(held) :].tolist()
                work.append((held[0][0], ids, held[0][1]))
                rows.append(held[-1])
        logits = subject.engine.step(work)
        picked = [lane for lane in range(lanes) if forward.rows[(lane + 1) * per_lane - 1] is not None]
        yield LOGITS, rows, logits.double(), forward.expected.logits[picked, -1].double()


def of_recording(subject: ToolSubject) -> Iterator[Pair]:
    plan = subject.plan
    assert plan is not None
    hf = planned_model(plan)
    golden = checked_golden(hf, plan.prompts, truth=plan.case.truth)
    golden, copies = with_duplicate_requests(plan, golden, plan.schedules[0], hf)
    requests = golden.requests[: len(plan.prompts)]
    with scratch_folder("harness-") as folder:
        record_run(plan, plan.open_engine(), plan.schedules[0], requests, folder / "run", copies=copies)
        with Recording.open(folder / "run", verify=False) as actual:
            expected = Locator(golden.truth.recording, match_requests(golden.truth.recording, actual))
            order = {op.tap: at for at, op in enumerate(hf.graph)}
            taps = sorted((entry.name for entry in actual.manifest.taps), key=lambda tap: order.get(tap, len(order)))
            for tap in taps:
                yield from _of_tap(tap, actual, expected)


def _of_tap(tap: str, actual: Recording, expected: Locator) -> Iterator[Pair]:
    """Yield the rows of one tap in all steps at once, so that the first row is the first of a request."""
    rows, values, truths = [], [], []
    for step in actual.steps:
        if not step.has(tap):
            continue
        at = step_rows(step, tap)
        places = expected.find(tap, at)
        present = places[:, 0] >= 0
        if not bool(present.any()) or not step.tap(tap).is_floating_point():
            continue
        at, places = at.select(present), places[present]
        rows += list(zip(at.request.tolist(), at.position.tolist(), strict=True))
        values.append(step.tap(tap)[present].flatten(1).double())
        truths.append(expected.gather(tap, places).flatten(1).double())
    if rows:
        yield tap, rows, torch.cat(values), torch.cat(truths)
