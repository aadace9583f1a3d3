"""`harness inspect`: what is in a safetensors file or a checkpoint, and what is missing."""

import json
from pathlib import Path
from typing import Annotated

import typer

from harness.cli import options as opt
from harness.errors import ExitStatus


def inspect(
    path: Annotated[Path, typer.Argument(help="A .safetensors file or a checkpoint folder.")],
    format: opt.OutFormat = opt.Format.HUMAN,
) -> int:
    """Show header, tensors, dtypes, shapes, offsets and shards, and what is missing for the config."""
    from harness.inspect import inspect_path, render_text  # noqa: PLC0415: imports torch for a checkpoint

    info = inspect_path(path)
    if format is opt.Format.JSON:
        typer.echo(json.dumps(info, allow_nan=False, indent=1))
    else:
        typer.echo(render_text(info))
    return ExitStatus.PASS
