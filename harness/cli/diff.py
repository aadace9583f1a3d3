"""`harness diff`: compare two recordings."""

from pathlib import Path
from typing import Annotated

import typer

from harness.command import forms
from harness.command import options as opt
from harness.command.output import STATUS
from harness.command.progress import progress_bar
from harness.formats.schedule import TRIGGERS


def diff(
    expected: Annotated[Path, typer.Argument(metavar="EXPECTED", help="A golden, or another engine's recording.")],
    actual: Annotated[Path, typer.Argument(metavar="ACTUAL", help="The recording under test.")],
    model: Annotated[
        str | None,
        typer.Option(metavar="PATH_OR_HUB_ID", help="Checkpoint, to judge every operation by replay as well."),
    ] = None,
    lora: opt.Lora = None,
    device: Annotated[str, typer.Option(metavar="DEVICE", help="Where to replay: cpu, cuda, cuda:1, ...")] = "cpu",
    truth: opt.TruthChoice = None,
    taps: Annotated[
        list[str] | None,
        typer.Option(
            metavar="GLOB",
            help="Taps that must have been recorded: all, cache, logits or tokens, as `harness check` has them, or a "
            "glob of names. Repeatable. [default: all]",
        ),
    ] = None,
    lacking: Annotated[
        list[str] | None,
        typer.Option(metavar="SITE", help="What the engine of ACTUAL cannot record: k_cache, mlp.act, ... Repeatable."),
    ] = None,
    require: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TRIGGER",
            help=f"What the recording must have reached: {', '.join(TRIGGERS)}. Repeatable. [default: decode]",
        ),
    ] = None,
    local_files_only: opt.LocalFilesOnly = False,
    format: Annotated[str, forms.CHECKS.option()] = "human",
) -> int:
    """Compare two recordings row by row.

    Without --model the rows are judged by their distance from the golden, as a ratio to the golden's own noise. With it
    every operation is judged by itself as well, by replaying it on the inputs that were recorded.
    """
    with progress_bar() as report:
        from harness.judge.jobs.diff import run_diff
        from harness.report.check.dtypes import DtypeChecks

        report("comparing", 0, 1)
        result = run_diff(
            expected,
            actual,
            model=model,
            lora=lora,
            taps=tuple(taps or ("*",)),
            lacking=tuple(lacking or ()),
            require=tuple(require or ("decode",)),
            truth=truth or "auto",
            device=device,
            progress=report,
            local_files_only=local_files_only,
        )
    forms.CHECKS.show(DtypeChecks(results=[result]), format)
    return STATUS[result.outcome]
