"""`harness rollout`: where the gap between a trainer's and an engine's log probabilities comes from."""

from pathlib import Path
from typing import Annotated, Any

import typer

from harness.cli import forms
from harness.cli import options as opt
from harness.cli.output import STATUS
from harness.cli.progress import progress_bar


def rollout(
    rollouts: Annotated[
        Path, typer.Argument(metavar="ROLLOUTS", help="JSON lines or Parquet, as verl, TRL, OpenRLHF or slime log it.")
    ],
    model: opt.Model = None,
    trainer: Annotated[
        str | None,
        typer.Option(metavar="PATH", help="Checkpoint of the trainer, run by HuggingFace. [default: the log alone]"),
    ] = None,
    layout: Annotated[
        str, typer.Option(metavar="alone|right|left|packed", help="How the trainer gets its rows.")
    ] = "right",
    engine: Annotated[
        str | None, typer.Option(metavar="NAME", help="Engine to run over the rows. [default: the log alone]")
    ] = None,
    engine_option: opt.EngineOption = None,
    previous: Annotated[
        str | None, typer.Option(metavar="PATH", help="Earlier weights, parts of which may be in use still.")
    ] = None,
    engine_weights: Annotated[
        str | None, typer.Option(metavar="PATH", help="The engine's weights, where they are other than --model.")
    ] = None,
    head: Annotated[
        str | None, typer.Option(metavar="DTYPE", help="Dtype that both sides mean to compute their head in.")
    ] = None,
    weight_version: Annotated[
        str | None, typer.Option(metavar="NAME", help="Version of the weights whose rows are compared.")
    ] = None,
    rows: Annotated[int | None, typer.Option(min=1, metavar="N", help="Most rows to compare. [default: all]")] = None,
    dtype: opt.Dtype = None,
    device: opt.Device = None,
    truth: opt.TruthChoice = None,
    local_files_only: opt.LocalFilesOnly = False,
    format: Annotated[str, forms.ROLLOUT.option()] = "human",
) -> int:
    """Split the gap between a trainer's and an engine's log probabilities in terms that add up.

    Each term is measured against the model in high precision: tokens, positions, weights, routing, cache, head, the
    distribution that is meant, operations. What rounding explains is called rounding.
    """
    given: dict[str, Any] = dict(locals())
    with progress_bar() as report:
        from harness.api.training import compare

        given |= {"engine_options": opt.parse_engine_options(engine_option), "num_rows": rows, "progress": report}
        result = compare({**given, "dtype": dtype or "auto", "truth": truth or "auto"})
    forms.ROLLOUT.show(result, format)
    return STATUS[result.outcome]
