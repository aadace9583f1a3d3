"""A profile kept in a folder: captures, `profile.json`, and one page, with the check it belongs to if there is one."""

import json
from dataclasses import replace
from pathlib import Path

from harness.case import ProfileSection
from harness.files import write_text
from harness.plan import Plan
from harness.profile_results import ProfileResult
from harness.profiling.baseline import PROFILE_NAME
from harness.profiling.profile import ProfileSpec, Progress, run_profile
from harness.profiling.workload import ProfileWorkload
from harness.report.html import REPORT_NAME, report_html
from harness.report.profile_json import profile_document
from harness.results import CheckResult


def planned_profile(plan: Plan) -> ProfileSpec:
    """Return the profile of a plan's engine: of the case's own `[profile]`, or of the default workload."""
    section = plan.profile or ProfileSection()
    return ProfileSpec(
        model=plan.model,
        folder=plan.folder,
        engine=plan.engine,
        subject=plan.subject,
        dtype=plan.dtype,
        device=plan.device,
        engine_options=plan.engine_options,
        workload=ProfileWorkload(
            batch_size=section.batch_size,
            num_prompt_tokens=section.prompt_tokens,
            max_new_tokens=section.max_new_tokens,
        ),
        phases=tuple(dict.fromkeys(section.phases)),
    )


def keep_profile(
    spec: ProfileSpec, out: Path, *, check: CheckResult | None = None, progress: Progress | None = None
) -> ProfileResult:
    """Profile an engine into a folder that exists.

    Raises:
        HarnessError: as `run_profile`; what was captured before stays.
    """
    result = replace(run_profile(spec, out, progress), report=REPORT_NAME)
    write_text(out / REPORT_NAME, report_html(check, result))
    write_text(out / PROFILE_NAME, json.dumps(profile_document(result), allow_nan=False))
    return result
