"""`harness rollout`: where the gap between a trainer's and an engine's log probabilities comes from."""

from collections.abc import Mapping
from inspect import signature
from pathlib import Path
from typing import Annotated, Any

import typer

from harness.base.files import write_text
from harness.command import options as opt
from harness.command.forms import DOCUMENT, Forms
from harness.command.output import STATUS, refuse_existing
from harness.command.progress import progress_bar
from harness.errors import Code, HarnessError

ROLLOUT = Forms(human="harness.extensions.rollout.report:rollout_text", json=DOCUMENT, is_fenced=True)
GAP_HISTORY = Forms(human="harness.extensions.rollout.report:history_text", json=DOCUMENT, is_fenced=True)

_OF_HISTORY = ("history", "out", "format")


def rollout(
    rollouts: Annotated[
        Path | None,
        typer.Argument(
            metavar="ROLLOUTS", help="Rollouts as JSON lines or Parquet, as logged by verl, TRL, OpenRLHF or slime."
        ),
    ] = None,
    model: opt.Model = None,
    trainer: Annotated[
        str | None,
        typer.Option(
            metavar="PATH", help="Checkpoint of the trainer; HuggingFace runs it. [default: use only the log]"
        ),
    ] = None,
    layout: Annotated[
        str,
        typer.Option(
            metavar="alone|right|left|packed",
            help="Layout of the rows in the batches of the trainer: padding, or packing.",
        ),
    ] = "right",
    engine: Annotated[
        str | None, typer.Option(metavar="NAME", help="Engine to run on the rows. [default: use only the log]")
    ] = None,
    engine_option: opt.EngineOption = None,
    previous: Annotated[
        str | None, typer.Option(metavar="PATH", help="Earlier weights, of which the engine may still use parts.")
    ] = None,
    engine_weights: Annotated[
        str | None, typer.Option(metavar="PATH", help="Weights of the engine. [default: those of --model]")
    ] = None,
    head: Annotated[
        str | None, typer.Option(metavar="DTYPE", help="Intended dtype of the head in trainer and engine.")
    ] = None,
    weight_version: Annotated[
        str | None, typer.Option(metavar="NAME", help="Compare only rows of this version of the weights.")
    ] = None,
    rows: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Maximum number of rows to compare. [default: all]")
    ] = None,
    dtype: opt.Dtype = None,
    device: opt.Device = None,
    truth: opt.TruthChoice = None,
    local_files_only: opt.LocalFilesOnly = False,
    history: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Show the history that RolloutMonitor recorded, step by step, without a comparison."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="HTML", help="New HTML file that plots the terms of --history over the steps."),
    ] = None,
    format: Annotated[str, ROLLOUT.option()] = "human",
) -> int:
    """Split the gap between the log probabilities of a trainer and an engine into terms that add up.

    The terms are tokens, positions, weights, routing, cache, head, the intended distribution, operations, and rounding.
    Each is measured against the model in high precision.
    """
    arguments: dict[str, Any] = dict(locals())
    if history is not None:
        return _show_history(history, arguments)
    if rollouts is None or out is not None:
        what = (
            "there is nothing to compare" if rollouts is None else "a page shows the steps of a run, and none is given"
        )
        where = "ROLLOUTS" if rollouts is None else "--out"
        raise HarnessError(Code.BAD_OPTION, what, where=where, hint="name a file of rollouts, or --history FILE")
    with progress_bar() as report:
        from harness.extensions.rollout.api import compare

        arguments |= {"engine_options": opt.parse_engine_options(engine_option), "num_rows": rows, "progress": report}
        result = compare({**arguments, "dtype": dtype or "auto", "truth": truth or "auto"})
    ROLLOUT.show(result, format)
    return STATUS[result.outcome]


def _show_history(file: Path, arguments: Mapping[str, Any]) -> int:
    """Show a history; options of a comparison are refused beside it."""
    from harness.extensions.rollout.monitor import read_history
    from harness.extensions.rollout.report import gap_html

    defaults = {name: parameter.default for name, parameter in signature(rollout).parameters.items()}
    for name in [name for name in arguments if name not in _OF_HISTORY and arguments[name] != defaults[name]]:
        where = "ROLLOUTS" if name == "rollouts" else f"--{name.replace('_', '-')}"
        what, hint = "a history is shown as it is: nothing is compared", f"leave {where} or --history out"
        raise HarnessError(Code.BAD_OPTION, what, where=where, hint=hint)
    out, history = arguments["out"], read_history(file)
    refuse_existing(out)
    if out is not None:
        write_text(out, gap_html(history))
    GAP_HISTORY.show(history, arguments["format"])
    return STATUS[history.outcome]
