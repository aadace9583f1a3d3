"""`harness inspect`: what is in a safetensors or GGUF file or a checkpoint, and what is missing."""

from pathlib import Path
from typing import Annotated

import typer

from harness.cli import forms
from harness.errors import ExitStatus


def inspect(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="A .safetensors or .gguf file, or a checkpoint folder.")],
    format: Annotated[str, forms.INSPECTED.option()] = "human",
) -> int:
    """Show what is in a safetensors or GGUF file, or a checkpoint.

    Header, tensors, dtypes, shapes, offsets and shards; for a checkpoint also what is missing for its config.
    """
    from harness.formats.inspect import inspect_path

    forms.INSPECTED.show(inspect_path(path), format)
    return ExitStatus.PASS
