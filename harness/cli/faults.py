"""`harness faults`: the score of the harness on bugs that were put in on purpose."""

from typing import Annotated

import typer

from harness.cli import forms
from harness.cli.progress import progress_bar
from harness.errors import ExitStatus


def faults(
    only: Annotated[list[str] | None, typer.Option(metavar="ID", help="Try this fault alone. Repeatable.")] = None,
    category: Annotated[list[str] | None, typer.Option(metavar="C", help="Try the faults of this category.")] = None,
    seeds: Annotated[
        int | None,
        typer.Option(min=0, help="Sets of prompts for each benign variant. [default: 3, and 0 with a selection]"),
    ] = None,
    device: Annotated[str, typer.Option(metavar="DEVICE", help="Where the engine runs: cpu, cuda, ...")] = "cpu",
    format: Annotated[str, forms.FAULTS.option()] = "human",
) -> int:
    """Put known bugs into the reference engine, one at a time, and show what the check says of each.

    Benign variants of the engine are checked as well: none of them may alarm.
    """
    with progress_bar() as report:
        from harness.selfcheck.faults.catalogue import choose
        from harness.selfcheck.faults.scoreboard import keep_score
        from harness.selfcheck.faults.variants import variants

        chosen = choose(only, category)
        is_selection = bool(only or category)
        num_seeds = (0 if is_selection else 3) if seeds is None else seeds
        score = keep_score(chosen, variants(), seeds=num_seeds, device=device, progress=report)
    forms.FAULTS.show(score, format)
    missed = score.detected < len(score.faults)
    return ExitStatus.MISMATCH if missed or score.false_alarms else ExitStatus.PASS
