"""`harness golden`: record the reference values of HuggingFace."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from harness.command import forms
from harness.command import options as opt
from harness.command.grouped import grouped
from harness.command.progress import progress_bar
from harness.errors import ExitStatus


@grouped
def golden(
    fields: Annotated[
        opt.Fields, opt.CaseOptions("model", "hf", "dtype", *opt.WORKLOAD, "continuation", "case", "lora", "mtp")
    ],
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="New folder for the golden. [default: in the cache]")
    ] = None,
    local_files_only: opt.LocalFilesOnly = False,
    format: Annotated[str, forms.GOLDEN.option()] = "human",
) -> int:
    """Record the reference values of HuggingFace.

    A golden holds every tap of the model in high precision, for the prompts and a greedy continuation (or the tokens of
    --continuation). It also holds the rounding error that HuggingFace has in the engine's dtype.
    """
    with progress_bar() as report:
        import torch

        from harness.judge.jobs.opened import run_golden
        from harness.oracle.precision import truth_dtype
        from harness.plan import plan_request

        plan = plan_request(**fields, local_files_only=local_files_only)
        made = run_golden(plan, out=out, progress=report)
    manifest = made.recording.manifest
    summary = {
        "schema_version": 1,
        "golden": str(made.recording.path),
        "model": plan.case.model,
        "dtype": plan.case.dtype,
        "truth": str(truth_dtype(plan.case.truth, getattr(torch, plan.case.dtype))).removeprefix("torch."),
        "num_requests": len(manifest.requests),
        "num_rows": sum(step.num_rows for step in manifest.steps),
        "num_taps": len(manifest.taps),
        "num_bytes": sum(step.num_bytes for step in manifest.steps),
    }
    forms.GOLDEN.show(summary, format)
    return ExitStatus.PASS


def golden_text(summary: Mapping[str, Any]) -> str:
    """Return what a golden holds in a line."""
    return (
        f"{summary['golden']}: {summary['num_requests']} requests, {summary['num_rows']} rows, "
        f"{summary['num_taps']} taps, {summary['num_bytes']:,} bytes "
        f"({summary['model']}, weights in {summary['dtype']}, truth in {summary['truth']})"
    )
