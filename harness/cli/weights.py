"""`harness weights`: which tensors of two checkpoints differ."""

from typing import Annotated

import typer

from harness.cli import forms
from harness.cli import options as opt
from harness.cli.output import STATUS
from harness.cli.progress import progress_bar


def weights(
    first: Annotated[str, typer.Argument(metavar="A", help="Checkpoint with the weights that are right.")],
    second: Annotated[str, typer.Argument(metavar="B", help="Checkpoint with the weights under test.")],
    before: Annotated[
        str | None,
        typer.Option(metavar="PATH", help="Checkpoint before the update: how much of it arrived in B."),
    ] = None,
    local_files_only: opt.LocalFilesOnly = False,
    format: Annotated[str, forms.WEIGHTS.option()] = "human",
) -> int:
    """Compare the weights of two checkpoints, tensor by tensor.

    Tensors of other names, fused and sharded ones are found by what they hold. Of one dtype, values must be equal; of
    two, equal within the coarser one's rounding.
    """
    with progress_bar() as report:
        report("comparing", 0, 1)
        from harness.campaigns.weights.compare import compare_weights

        result = compare_weights(first, second, before=before, local_files_only=local_files_only)
    forms.WEIGHTS.show(result, format)
    return STATUS[result.outcome]
