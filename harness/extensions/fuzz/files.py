"""Files that repeat a finding: the workload itself, and a case where a case can say it."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

from harness.base.files import write_text
from harness.errors import HarnessError
from harness.extensions.fuzz.judge import WorkloadJudgement
from harness.extensions.fuzz.result import FuzzFinding
from harness.extensions.fuzz.workload_file import header, table, toml, workload_toml
from harness.formats.case import load_case
from harness.judge.jobs.check import run_check
from harness.plan import Plan, plan_case

_MANY_REQUESTS = 256
"""More than any workload has: a case of the schedule `plain` would run them one after the other."""


def write_findings(
    findings: Sequence[FuzzFinding],
    plan: Plan,
    out: Path,
    *,
    planted: Callable[[], AbstractContextManager[object]],
    fault: str | None,
) -> tuple[FuzzFinding, ...]:
    """Write the files of all findings and return the findings with the files' names.

    A case is kept if it was seen to fail in the same way: its continuation is HF's own, and may not show it.
    """
    written = []
    for number, finding in enumerate(findings, start=1):
        path = out / f"finding-{number}.workload.toml"
        write_text(path, workload_toml(finding, plan, fault))
        case = _write_case(finding, plan, out / f"finding-{number}.case.toml", planted)
        written.append(replace(finding, workload_file=str(path), case_file=None if case is None else str(case)))
    return tuple(written)


def _write_case(
    finding: FuzzFinding, plan: Plan, path: Path, planted: Callable[[], AbstractContextManager[object]]
) -> Path | None:
    text = case_toml(finding, plan)
    if text is None:
        return None
    write_text(path, text)
    try:
        with planted():
            judged = WorkloadJudgement(run=run_check(plan_case(load_case(path))).runs[0])
    except HarnessError as error:
        judged = WorkloadJudgement(error=error)
    if judged.signature == finding.signature:
        return path
    path.unlink()
    return None


def case_toml(finding: FuzzFinding, plan: Plan) -> str | None:
    """Return the text of a case with the same prompts, lengths and limits; None if a case cannot say it."""
    workload = finding.workload
    if any(request.arrival or request.is_aborted or request.fork_of is not None for request in workload.requests):
        return None
    limits = workload.limits if workload.schedule else {"max_num_seqs": _MANY_REQUESTS, **workload.limits}
    options = {name: _as_option(value) for name, value in {**limits, **plan.engine_options}.items()}
    lines = ["schema_version = 1", *header(f"found by harness fuzz: {finding.signature}", plan)]
    lines += [f"schedules = [{toml(workload.schedule or 'plain')}]", *table("engine_options", options)]
    fewest = 1 if any(request.num_new_tokens > 1 for request in workload.requests) else 2  # a case has to decode
    for request in workload.requests:
        prompt = list(request.token_ids[: request.prompt_length])
        num_new = max(fewest, request.num_new_tokens)
        lines += ["", "[[requests]]", f"token_ids = {prompt}", f"max_new_tokens = {num_new}"]
    return "\n".join(lines) + "\n"


def _as_option(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
