"""`harness run`: record an engine without comparing it."""

import json
from pathlib import Path
from typing import Annotated

import typer

from harness.cli import options as opt
from harness.cli.progress import progress_bar


def run(
    out: Annotated[Path, typer.Option(help="Folder, new or empty, to write the recording to.")],
    golden: Annotated[Path, typer.Option(help="Golden whose tokens are fed (`harness golden --out`).")],
    model: opt.Model = None,
    engine: opt.EngineName = "reference",
    engine_option: opt.EngineOption = None,
    device: opt.Device = "cpu",
    schedule: Annotated[str, typer.Option(help="plain, chunked[:N], batched, mixed[:N].")] = "plain",
    local_files_only: opt.LocalFilesOnly = False,
    format: opt.OutFormat = opt.Format.HUMAN,
) -> int:
    """Run an engine on a golden's tokens and record its taps, for `harness diff`."""
    with progress_bar() as report:
        report("loading libraries", 0, 1)
        from harness.check import Plan, check_device, record_run, refuse_used_folder  # noqa: PLC0415
        from harness.checkpoint import resolve  # noqa: PLC0415
        from harness.recording import Recording  # noqa: PLC0415
        from harness.schedule import parse_schedule  # noqa: PLC0415

        refuse_used_folder(out)
        check_device(device)
        with Recording.open(golden) as expected:
            requests, dtype, recorded_model = (
                expected.manifest.requests,
                expected.manifest.dtype,
                expected.manifest.model.id,
            )
        name = model or recorded_model
        plan = Plan(
            model=name,
            folder=resolve(name, local_files_only=local_files_only),
            engine=engine,
            dtype=dtype,
            device=device,
            prompts=(),
            schedules=(),
            engine_options=opt.parse_engine_options(engine_option),
        )
        report(f"{engine}, {schedule}", 0, 1)
        record_run(plan, parse_schedule(schedule), requests, out)
    with Recording.open(out, verify=False) as recording:
        manifest = recording.manifest
    summary = {
        "schema_version": 1,
        "recording": str(out),
        "engine": engine,
        "model": name,
        "dtype": dtype,
        "schedule": schedule,
        "num_steps": len(manifest.steps),
        "num_rows": sum(step.num_rows for step in manifest.steps),
        "num_taps": len(manifest.taps),
    }
    if format is opt.Format.JSON:
        typer.echo(json.dumps(summary, indent=1))
    else:
        typer.echo(f"{out}: {summary['num_steps']} steps, {summary['num_rows']} rows, {summary['num_taps']} taps")
    return 0
