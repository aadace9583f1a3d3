"""A profile kept in a folder: captures, `profile.json`, and one page, with the check it belongs to if there is one."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from harness.base.files import write_text
from harness.base.progress import Progress
from harness.formats.case import ProfileSection
from harness.formats.checkpoint import Checkpoint, embedded_cases, resolve
from harness.plan import Plan, check_device, resolve_dtype
from harness.profiling.gate.baseline import PROFILE_NAME
from harness.profiling.passes.load import CaptureSchedule
from harness.profiling.passes.workload import ProfileWorkload
from harness.profiling.profile import ProfileInterrupted, ProfileSpec, run_profile
from harness.report.page.html import REPORT_NAME, report_html
from harness.report.profile.json import profile_document
from harness.results.check import CheckResult
from harness.results.profile import ProfileResult


def planned_profile(plan: Plan) -> ProfileSpec:
    """Return the profile of a plan's engine: of the case's own `[profile]`, or of the default workload."""
    section = plan.profile or ProfileSection()
    return ProfileSpec(
        model=plan.model,
        checkpoint=plan.checkpoint,
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


def resolve_profile(
    *,
    model: str | None = None,
    engine: str = "reference",
    dtype: str = "auto",
    device: str = "cpu",
    engine_options: Mapping[str, str] | None = None,
    prompt_tokens: int = 128,
    max_new_tokens: int = 32,
    batch_size: int = 1,
    phases: Sequence[str] = (),
    schedule: CaptureSchedule | None = None,
    num_runs: int = 5,
    local_files_only: bool = True,
) -> ProfileSpec:
    """Resolve names into what is to be profiled.

    Args:
        model: folder, name of an embedded checkpoint, or hub id; None for the embedded qwen3-tiny.
        engine: name of an engine.
        dtype: float32, bfloat16, float16, or `auto` for the checkpoint's own.
        device: a torch device.
        engine_options: passed to the engine.
        prompt_tokens: of each prompt; they are random.
        max_new_tokens: tokens to generate for each request.
        batch_size: requests that arrive together.
        phases: `prefill`, `decode`, `mixed`; empty for all that the engine has.
        schedule: which steps are captured; None for the default.
        num_runs: runs without a profiler, for the latencies.
        local_files_only: never ask the hub.

    Raises:
        HarnessError: any of it cannot be resolved.
    """
    name = model or str(embedded_cases() / "checkpoints" / "qwen3-tiny")
    checkpoint = Checkpoint(resolve(name, local_files_only=local_files_only))
    check_device(device)
    return ProfileSpec(
        model=name,
        checkpoint=checkpoint,
        engine=engine,
        dtype=resolve_dtype(dtype, checkpoint),
        device=device,
        engine_options=engine_options or {},
        workload=ProfileWorkload(batch_size=batch_size, num_prompt_tokens=prompt_tokens, max_new_tokens=max_new_tokens),
        phases=tuple(dict.fromkeys(phases)),
        schedule=schedule or CaptureSchedule(),
        num_runs=num_runs,
    )


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
