"""`harness golden`: dump what HuggingFace computes."""

import json
from pathlib import Path
from typing import Annotated

import typer

from harness.cli import options as opt
from harness.cli.progress import progress_bar


def golden(
    out: Annotated[Path, typer.Option(help="Folder, new or empty, to write the golden to.")],
    model: opt.Model = None,
    dtype: opt.Dtype = "auto",
    device: opt.Device = "cpu",
    prompt: opt.PromptText = None,
    prompt_file: opt.PromptFile = None,
    token_ids: opt.TokenIds = None,
    max_new_tokens: opt.MaxNewTokens = None,
    local_files_only: opt.LocalFilesOnly = False,
    format: opt.OutFormat = opt.Format.HUMAN,
) -> int:
    """Dump every tap of an HF model in float64, with a greedy continuation and the noise of its own dtype."""
    with progress_bar() as report:
        report("loading libraries", 0, 1)
        import torch  # noqa: PLC0415: seconds to import

        from harness.check import refuse_used_folder  # noqa: PLC0415
        from harness.oracle.decoder import load_decoder  # noqa: PLC0415
        from harness.oracle.golden import make_golden  # noqa: PLC0415

        refuse_used_folder(out)
        plan = opt.build_plan(
            model=model,
            engine="hf",
            engine_options=None,
            dtype=dtype,
            device=device,
            prompts=prompt,
            prompt_file=prompt_file,
            token_ids=token_ids,
            max_new_tokens=max_new_tokens,
            schedules=["plain"],
            local_files_only=local_files_only,
        )
        decoder = load_decoder(plan.folder, dtype=getattr(torch, plan.dtype), device=plan.device)
        made = make_golden(decoder, plan.prompts, out, progress=report)
    manifest = made.recording.manifest
    summary = {
        "schema_version": 1,
        "golden": str(out),
        "model": plan.model,
        "dtype": plan.dtype,
        "num_requests": len(manifest.requests),
        "num_rows": sum(step.num_rows for step in manifest.steps),
        "num_taps": len(manifest.taps),
        "num_bytes": sum(step.num_bytes for step in manifest.steps),
    }
    if format is opt.Format.JSON:
        typer.echo(json.dumps(summary, indent=1))
    else:
        typer.echo(
            f"{out}: {summary['num_requests']} requests, {summary['num_rows']} rows, {summary['num_taps']} taps, "
            f"{summary['num_bytes']:,} bytes ({plan.model}, weights in {plan.dtype}, truth in float64)"
        )
    return 0
