"""`harness record`: record an engine without comparing it."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from harness.command import forms
from harness.command import options as opt
from harness.command.grouped import grouped
from harness.command.progress import progress_bar
from harness.errors import Code, ExitStatus, HarnessError
from harness.formats.case import RequestSpec

if TYPE_CHECKING:
    from harness.formats.recording import RequestInfo
    from harness.formats.taps import Graph
    from harness.plan import Plan


@grouped
def record(
    *,
    out: Annotated[Path, typer.Option(metavar="DIR", help="New folder for the recording.")],
    golden: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Golden that sets model and tokens, and the dtype unless --dtype does. [default: none]"
        ),
    ] = None,
    fields: Annotated[opt.Fields, opt.CaseOptions("model", *opt.ENGINE, "dtype", *opt.WORKLOAD, "lora", "mtp", "case")],
    schedule: Annotated[str, typer.Option(metavar="NAME", help="Schedule, as in `harness check`.")] = "plain",
    local_files_only: opt.LocalFilesOnly = False,
    format: Annotated[str, forms.RECORDING.option()] = "human",
) -> int:
    """Record an engine for `harness diff`.

    The engine computes the tokens of a golden: the one in --golden, or the one that `harness golden` makes with the
    same options.
    """
    with progress_bar() as report:
        from harness.judge.jobs.opened import match_taps, new_output_dir, open_planned, record_run, run_golden

        plan, requests, graph = _planned({**fields, "schedules": [schedule]}, golden, local_files_only)
        if len(plan.schedules) != 1:
            what = "a recording has one schedule"
            raise HarnessError(Code.BAD_OPTION, what, where="--schedule", expected="one", actual=schedule)
        with new_output_dir(out), open_planned(plan) as subject:
            if graph is None:
                made = run_golden(plan, progress=report, keeps_values=False)
                requests, graph = list(made.requests), made.graph
            match_taps(plan, subject, graph)
            report(f"{plan.case.engine}, {schedule}", 0, 1)
            record_run(plan, subject, plan.schedules[0], requests, out)
    summary = _summary(plan, out)
    forms.RECORDING.show(summary, format)
    return ExitStatus.PASS if summary["num_rows"] and summary["num_taps"] else ExitStatus.NOTHING_CHECKED


def _summary(plan: "Plan", out: Path) -> dict[str, Any]:
    """Return the number of steps, rows and taps in the recording in `out`."""
    from harness.formats.recording import Recording

    with Recording.open(out, verify=False) as recording:
        manifest = recording.manifest
    return {
        "schema_version": 1,
        "recording": str(out),
        "engine": plan.case.engine,
        "model": plan.case.model,
        "dtype": plan.case.dtype,
        "schedule": str(plan.schedules[0]),
        "num_steps": len(manifest.steps),
        "num_rows": sum(step.num_rows for step in manifest.steps if step.phase != "readback"),
        "num_taps": len(manifest.taps),
    }


def _planned(
    fields: opt.Fields, golden: Path | None, local_files_only: bool
) -> "tuple[Plan, list[RequestInfo], Graph | None]":
    """Return the plan, with the requests and graph of the golden if there is one."""
    from harness.formats.recording import Recording
    from harness.oracle.golden import Golden
    from harness.plan import plan_request

    if golden is None:
        return plan_request(**fields, local_files_only=local_files_only), [], None
    if not fields.keys() <= {"model", "dtype", "device", "schedules", "lora", "isolate", *opt.ENGINE}:
        names = "--truth, --prompt, --prompt-file, --token-ids, --max-new-tokens and --case"
        raise HarnessError(
            Code.BAD_OPTION, f"the golden sets what {names} would set", where="--golden", hint="leave them out"
        )
    with Recording.open(golden) as expected:
        manifest, graph = expected.manifest, Golden(expected).graph
    said: opt.Fields = {
        "model": manifest.model.id,
        "dtype": manifest.dtype,
        "requests": [RequestSpec(token_ids=request.token_ids) for request in manifest.requests],
    }
    return plan_request(**(said | fields), local_files_only=local_files_only), manifest.requests, graph


def recording_text(summary: Mapping[str, Any]) -> str:
    """Return the number of steps, rows and taps as one line."""
    counts = f"{summary['num_steps']} steps, {summary['num_rows']} rows, {summary['num_taps']} taps"
    return f"{summary['recording']}: {counts}"
