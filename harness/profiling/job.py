"""A profile kept in a folder: captures, `profile.json`, and one page, with the check it belongs to if there is one."""

import json
from dataclasses import replace
from pathlib import Path

from harness.base.files import write_text
from harness.base.progress import Progress
from harness.formats.case import ProfileSection
from harness.plan import Plan
from harness.profiling.gate.baseline import PROFILE_NAME
from harness.profiling.passes.workload import ProfileWorkload
from harness.profiling.profile import ProfileInterrupted, ProfileSpec, run_profile
from harness.report.page.html import REPORT_NAME, report_html
from harness.report.profile.json import profile_document
from harness.results.check import CheckResult
from harness.results.profile import ProfileResult


def planned_profile(plan: Plan) -> ProfileSpec:
    """Return the profile of a plan's engine: of the case's own `[profile]`, or of the default workload."""
    section = plan.case.profile or ProfileSection()
    workload = ProfileWorkload(
        batch_size=section.batch_size,
        num_prompt_tokens=section.prompt_tokens,
        max_new_tokens=section.max_new_tokens,
    )
    return ProfileSpec(plan=plan, workload=workload, phases=tuple(section.phases))


def keep_profile(
    spec: ProfileSpec, out: Path, *, check: CheckResult | None = None, progress: Progress | None = None
) -> ProfileResult:
    """Profile an engine into a folder that exists.

    Raises:
        HarnessError: as `run_profile`; what was captured before stays.
        ProfileInterrupted: Ctrl-C; the phases that were finished are written.
    """
    try:
        result = replace(run_profile(spec, out, progress), report=REPORT_NAME)
    except ProfileInterrupted as interrupted:
        _write(replace(interrupted.result, report=REPORT_NAME), out, check)
        raise
    _write(result, out, check)
    return result


def _write(result: ProfileResult, out: Path, check: CheckResult | None) -> None:
    write_text(out / REPORT_NAME, report_html(check, result))
    write_text(out / PROFILE_NAME, json.dumps(profile_document(result), allow_nan=False))
