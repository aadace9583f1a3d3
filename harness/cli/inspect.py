"""`harness inspect`: what is in a safetensors or GGUF file or a checkpoint, and what is missing."""

from pathlib import Path
from typing import Annotated

import typer

from harness.cli import options as opt
from harness.cli.output import write, write_json
from harness.errors import ExitStatus


def inspect(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="A .safetensors or .gguf file, or a checkpoint folder.")],
    format: opt.OutFormat = opt.Format.HUMAN,
) -> int:
    """Show what is in a safetensors or GGUF file, or a checkpoint.

    Header, tensors, dtypes, shapes, offsets and shards; for a checkpoint also what is missing for its config.
    """
    from harness.formats.inspect import inspect_path, render_text

    info = inspect_path(path)
    if format is opt.Format.JSON:
        write_json(info)
    else:
        write(render_text(info))
    return ExitStatus.PASS
