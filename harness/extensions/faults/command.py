"""`harness faults`: the score of the harness on bugs that were put in on purpose."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from harness.command.forms import Forms
from harness.command.progress import progress_bar
from harness.errors import Code, ExitStatus, HarnessError

FAULTS = Forms(
    human="harness.extensions.faults.report:as_text",
    markdown="harness.extensions.faults.report:as_text",
    json="harness.extensions.faults.report:as_json",
)


def faults(
    only: Annotated[list[str] | None, typer.Option(metavar="ID", help="Run only this fault. Repeatable.")] = None,
    category: Annotated[
        list[str] | None, typer.Option(metavar="C", help="Run only the faults of this category. Repeatable.")
    ] = None,
    seeds: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=0, help="Sets of prompts per benign variant. [default: 3; 0 with --only or --category]"
        ),
    ] = None,
    check: Annotated[
        str | None,
        typer.Option(metavar="ID", help="Show the complete check of the engine with this fault, without a score."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="With --check: new folder for report.html and the recordings.")
    ] = None,
    device: Annotated[str, typer.Option(metavar="DEVICE", help="Device of the engine: cpu, cuda, ...")] = "cpu",
    format: Annotated[str, FAULTS.option()] = "human",
) -> int:
    """Put known bugs into the reference engine, and show which ones the check detects.

    Also checks benign variants of the engine, which must pass.
    """
    if check is not None:
        refused = {"--only": only, "--category": category, "--seeds": seeds}
        for option in (name for name, value in refused.items() if value is not None):
            what, hint = "one check is shown, and nothing is scored", f"leave {option} or --check out"
            raise HarnessError(Code.BAD_OPTION, what, where=option, hint=hint)
        return _checked(check, device, out, format)
    if out is not None:
        what, hint = "the score is written to standard output alone", "add --check ID, or leave --out out"
        raise HarnessError(Code.BAD_OPTION, what, where="--out", hint=hint)
    with progress_bar() as report:
        from harness.extensions.faults.catalogue import choose
        from harness.extensions.faults.run import keep_score
        from harness.extensions.faults.variants import variants

        chosen = choose(only, category)
        is_selection = bool(only or category)
        num_seeds = (0 if is_selection else 3) if seeds is None else seeds
        score = keep_score(chosen, variants(), seeds=num_seeds, device=device, progress=report)
    FAULTS.show(score, format)
    missed = score.detected < len(score.faults)
    return ExitStatus.MISMATCH if missed or score.false_alarms else ExitStatus.PASS


def _checked(fault: str, device: str, out: Path | None, format: str) -> int:
    """Check the reference engine with a fault in it, on the model, prompts and schedule that show the fault."""
    with progress_bar() as report:
        from harness.cli.check import checked, show_checks
        from harness.extensions.faults.catalogue import choose
        from harness.extensions.faults.run import checkpoint, plan_of

        (chosen,) = choose([fault])
        with checkpoint(chosen.setting) as folder, chosen.inject():
            plan = replace(plan_of(chosen.setting, folder, device=device), notes=(f"planted: {chosen.summary}",))
            result = checked(plan, out, report)
    return show_checks([result], format)
