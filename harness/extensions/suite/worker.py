"""A suite's worker process: it runs one task after the other, and answers each with its result."""

import base64
import hashlib
import math
import os
import time
import traceback
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harness.base.files_read import LEFT_OUT, files_read, watch_files
from harness.engines.worker import serve
from harness.errors import Code, HarnessError
from harness.extensions.suite.preflight import fingerprint
from harness.extensions.suite.store import DamagedBlobError, Store, fetch_goldens, share_golden
from harness.extensions.suite.task import TASK_OUTCOME, Loss, Task, TaskOutcome, TaskResult
from harness.formats.checkpoint import cache_dir
from harness.report.check.json import check_json_text
from harness.report.check.table import merge_taps, sum_tokens
from harness.report.document import plain
from harness.report.page.html import REPORT_NAME, report_html
from harness.results.check import CheckResult, Divergence, Outcome
from harness.results.merging import largest

CHECK_NAME = "check.json"
"""File with a check's result in a case's folder."""


def main() -> None:
    """Answer tasks on standard input until it ends."""
    os.environ[LEFT_OUT] = str(cache_dir().absolute())
    watch_files()
    serve(answer)


def answer(message: Mapping[str, Any]) -> dict[str, Any]:
    """Do what a message asks: import what tasks need, or do a task."""
    if "task" not in message:
        from harness.judge.jobs import opened  # noqa: F401  seconds to import, once a process

        return {"versions": fingerprint()}
    return {"found": TASK_OUTCOME.dump_python(run_task(Task.model_validate(message["task"])), mode="json")}


def run_task(task: Task) -> TaskOutcome:
    """Do a task; an exception is its outcome."""
    begin = time.perf_counter()
    try:
        store = None if task.store is None else Store(task.store, patience_s=task.store_patience_s)
        outcome = _make_goldens(task, store) if task.kind == "golden" else _check(task, store)
    except DamagedBlobError as error:
        return Loss(reason=f"its golden did not arrive: {error}", needs_golden=True)
    except HarnessError as error:
        if error.code is Code.STORE_FAILED:
            return Loss(reason=f"{error.code}: {error.summary}")
        outcome = _error(error.code, error.summary)
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{Path(where.filename).name}, line {where.lineno}"
        outcome = _error(Code.INTERNAL, f"{type(error).__name__}: {error} ({place})")
    seconds = time.perf_counter() - begin
    return outcome.model_copy(update={"seconds": seconds, "files_read": files_read()})


def _make_goldens(task: Task, store: Store | None) -> TaskResult:
    from harness.formats.schedule import Schedule
    from harness.judge.jobs.opened import planned_model, with_duplicate_requests
    from harness.oracle.make_golden import checked_golden
    from harness.plan import plan_case

    plan = plan_case(task.case.case)
    hf = planned_model(plan)
    opened = checked_golden(hf, plan.prompts, truth=plan.case.truth)
    folders = [opened.recording.path]
    if task.is_forked:
        larger, _ = with_duplicate_requests(plan, opened, Schedule.of("forked"), hf)
        folders.append(larger.recording.path)
    shared = () if store is None else tuple(share_golden(folder, store) for folder in folders)
    return TaskResult(verdict="pass", goldens=shared)


def _check(task: Task, store: Store | None) -> TaskResult:
    from harness.judge.jobs.check import run_check
    from harness.plan import plan_case

    plan = plan_case(task.case.case)
    if store is not None:
        fetch_goldens(task.goldens, store)
    result = run_check(plan)
    if result.outcome is Outcome.NOTHING:
        note = next(iter(result.notes), "")
        return _error(Code.NOTHING_CHECKED, f"nothing was checked {f'({note})' if note else ''}".strip())
    answered = TaskResult(verdict="pass", figures=_figures(result), bits=_bits(result))
    return answered if result.outcome is Outcome.PASS else _mismatch(answered, result)


def _mismatch(answered: TaskResult, result: CheckResult) -> TaskResult:
    finding = next(finding for run in result.runs for finding in run.findings)
    divergence = result.first_divergence
    files = {REPORT_NAME: report_html(result), CHECK_NAME: check_json_text(result)}
    return answered.model_copy(
        update={
            "verdict": "mismatch",
            "code": str(divergence.code if divergence else finding.code),
            "reason": finding.message,
            "first_divergence": _place(divergence) if divergence else None,
            "files": {name: _packed(text) for name, text in files.items()},
        }
    )


def _place(divergence: Divergence) -> dict[str, Any]:
    names = ("tap", "request", "position", "schedule", "step", "phase", "code", "local_roundings")
    place: dict[str, Any] = {name: plain(getattr(divergence, name)) for name in names}
    explanation = divergence.explanation
    return place | {"cause": explanation.cause if explanation and explanation.is_cause else None}


def _figures(result: CheckResult) -> dict[str, float]:
    """Return the numbers that a comparison of suites looks at; what was not measured, or is not finite, is left out."""
    taps, tokens = merge_taps(result.runs), sum_tokens(result.runs)
    figures = {
        "bound_share_max": largest(tap.local_bound_share_max for tap in taps),
        "propagated_ratio_max": largest(tap.propagated_ratio_max for tap in taps),
        "kl_max": largest(run.logits.kl_max for run in result.runs if run.logits),
        "tokens_equal_share": tokens.equal / tokens.compared if tokens.compared else None,
    }
    return {name: value for name, value in figures.items() if value is not None and math.isfinite(value)}


def _bits(result: CheckResult) -> str | None:
    bits = [run.bits for run in result.runs if run.bits is not None]
    return hashlib.sha256("".join(bits).encode()).hexdigest() if len(bits) == len(result.runs) else None


def _error(code: Code, reason: str) -> TaskResult:
    return TaskResult(verdict="error", code=code.value, reason=reason)


def _packed(text: str) -> str:
    return base64.b64encode(zlib.compress(text.encode())).decode()
