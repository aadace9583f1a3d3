"""`harness run`: record an engine without comparing it."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from harness.cli import options as opt
from harness.cli.output import write, write_json
from harness.cli.progress import progress_bar
from harness.errors import Code, ExitStatus, HarnessError

if TYPE_CHECKING:
    from harness.plan import Plan
    from harness.progress import Progress
    from harness.recording import RequestInfo
    from harness.taps import Graph


def run(
    out: Annotated[Path, typer.Option(metavar="DIR", help="New folder to write the recording to.")],
    golden: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Golden that says what to feed: model, dtype and tokens. [default: none]"),
    ] = None,
    model: opt.Model = None,
    engine: opt.EngineName = None,
    engine_option: opt.EngineOption = None,
    isolate: opt.Isolate = None,
    engine_timeout: opt.EngineTimeout = None,
    engine_python: opt.EnginePython = None,
    dtype: opt.Dtype = None,
    device: opt.Device = None,
    truth: opt.TruthChoice = None,
    prompt: opt.PromptText = None,
    prompt_file: opt.PromptFile = None,
    token_ids: opt.TokenIds = None,
    max_new_tokens: opt.MaxNewTokens = None,
    schedule: Annotated[str, typer.Option(metavar="NAME", help="One of those of `harness check`.")] = "plain",
    case: opt.CaseFile = None,
    local_files_only: opt.LocalFilesOnly = False,
    format: opt.OutFormat = opt.Format.HUMAN,
) -> int:
    """Record an engine, for `harness diff`.

    The engine is fed the tokens of a golden: the one that --golden names, or that of the same model and prompts as
    `harness golden` with the same options makes.
    """
    given = opt.CliOptions(
        case=case,
        model=model,
        engine=engine,
        engine_options=engine_option,
        dtype=dtype,
        device=device,
        truth=truth,
        prompts=prompt,
        prompt_file=prompt_file,
        token_ids=token_ids,
        max_new_tokens=max_new_tokens,
        schedules=[schedule],
        isolate=isolate,
        engine_timeout_s=engine_timeout,
        engine_python=engine_python,
    )
    with progress_bar() as report:
        report("loading libraries", 0, 1)
        from harness.jobs.check import match_taps, new_output_dir, open_planned, record_run
        from harness.recording import Recording

        if golden is None:
            plan = given.plan(local_files_only=local_files_only)
        else:
            plan, requests, graph = _planned_by_golden(golden, given, local_files_only)
        if len(plan.schedules) != 1:
            what = "a recording has one schedule"
            raise HarnessError(Code.BAD_OPTION, what, where="--schedule", expected="one", actual=schedule)
        with new_output_dir(out), open_planned(plan) as subject:
            if golden is None:
                requests, graph = _continued(plan, report)
            match_taps(plan, subject, graph)
            report(f"{plan.engine}, {schedule}", 0, 1)
            record_run(plan, subject, plan.schedules[0], requests, out)
    with Recording.open(out, verify=False) as recording:
        manifest = recording.manifest
    summary = {
        "schema_version": 1,
        "recording": str(out),
        "engine": plan.engine,
        "model": plan.model,
        "dtype": plan.dtype,
        "schedule": str(plan.schedules[0]),
        "num_steps": len(manifest.steps),
        "num_rows": sum(step.num_rows for step in manifest.steps if step.phase != "readback"),
        "num_taps": len(manifest.taps),
    }
    if format is opt.Format.JSON:
        write_json(summary)
    else:
        write(f"{out}: {summary['num_steps']} steps, {summary['num_rows']} rows, {summary['num_taps']} taps")
    return ExitStatus.PASS


def _continued(plan: "Plan", report: "Progress") -> "tuple[list[RequestInfo], Graph]":
    """Return the plan's prompts with the continuation of their golden, and the model's graph."""
    import torch

    from harness.oracle.make_golden import cached_golden
    from harness.oracle.model import load_model

    hf = load_model(plan.folder, dtype=getattr(torch, plan.dtype), device=plan.device)
    return list(cached_golden(hf, plan.prompts, truth=plan.truth, progress=report).requests), hf.graph


def _planned_by_golden(
    golden: Path, given: opt.CliOptions, local_files_only: bool
) -> "tuple[Plan, list[RequestInfo], Graph]":
    """Return what the golden and the remaining options say, the golden's requests, and the model's graph."""
    from harness.checkpoint import resolve
    from harness.oracle.golden import Golden
    from harness.plan import Plan, check_device
    from harness.recording import Recording
    from harness.schedule import parse_schedules

    said_by_golden = replace(
        given, model=None, engine=None, engine_options=None, device=None, schedules=None, isolate=None,
        engine_timeout_s=None, engine_python=None,
    )  # fmt: skip
    if said_by_golden != opt.CliOptions():
        names = "--dtype, --prompt, --prompt-file, --token-ids, --max-new-tokens and --case"
        raise HarnessError(
            Code.BAD_OPTION, f"{names} say what the golden says", where="--golden", hint="leave them out"
        )
    check_device(given.device or "cpu")
    with Recording.open(golden) as expected:
        manifest, graph = expected.manifest, Golden(expected).graph
    model = given.model or manifest.model.id
    plan = Plan(
        model=model,
        folder=resolve(model, local_files_only=local_files_only),
        engine=given.engine or "reference",
        dtype=manifest.dtype,
        device=given.device or "cpu",
        prompts=(),
        schedules=tuple(parse_schedules(given.schedules or ())),
        engine_options=opt.parse_engine_options(given.engine_options),
        isolate=given.isolate,
        engine_timeout_s=given.engine_timeout_s,
        engine_python=given.engine_python,
    )
    return plan, manifest.requests, graph
