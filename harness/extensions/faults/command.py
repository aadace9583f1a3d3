"""`harness faults`: the benchmark of tools on engines with mistakes in them."""

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from harness.base.progress import Progress
from harness.command.forms import Forms
from harness.command.progress import progress_bar
from harness.errors import Code, ExitStatus, HarnessError

if TYPE_CHECKING:
    from harness.extensions.faults.answer import Tool
    from harness.extensions.faults.benchmark import Questions
    from harness.extensions.faults.fault import Fault, Variant
    from harness.extensions.faults.power import SmallestError
    from harness.extensions.faults.report import Benchmark

FAULTS = Forms(
    human="harness.extensions.faults.report:as_text",
    markdown="harness.extensions.faults.report:as_markdown",
    json="harness.extensions.faults.report:as_json",
)
POWER = Forms(
    human="harness.extensions.faults.power:as_table",
    markdown="harness.extensions.faults.power:as_table",
    json="harness.extensions.faults.power:as_json",
)


def faults(
    tool: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Tool to ask: harness, hooks, model-debugger, debug-mode, torchlens, msprobe, pytest-torch, or "
            "module:object. Repeatable. [default: harness]",
        ),
    ] = None,
    only: Annotated[list[str] | None, typer.Option(metavar="ID", help="Run only this fault. Repeatable.")] = None,
    category: Annotated[
        list[str] | None, typer.Option(metavar="C", help="Run only the faults of this category. Repeatable.")
    ] = None,
    engine: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KIND", help="Run only engines of this kind: reference, module, step, dump or server. Repeatable."
        ),
    ] = None,
    sample: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Draw so many faults. [default: all of them]")
    ] = None,
    drawn: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Draw N faults that nobody chose, in place of those of the catalogue."),
    ] = None,
    variants: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=0,
            help="Draw so many sound variants. [default: half of --sample or --drawn; all of them without "
            "either; 0 with --only or --category]",
        ),
    ] = None,
    power: Annotated[
        bool,
        typer.Option("--power", help="Search the smallest error of five quantities that each tool finds, by dtype."),
    ] = False,
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="Seed of what is drawn, and of the prompts.")] = 0,
    limit: Annotated[float, typer.Option(metavar="S", min=1, help="Longest time in seconds for an answer.")] = 120.0,
    check: Annotated[
        str | None,
        typer.Option(metavar="ID", help="Show the complete check of the engine with this fault, without a score."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Folder of the answers: a run that was interrupted goes on from there. With --check: new folder for "
            "report.html and the recordings.",
        ),
    ] = None,
    device: Annotated[
        str, typer.Option(metavar="DEVICE", help="Device of the reference engine: cpu, cuda, ...")
    ] = "cpu",
    format: Annotated[str, FAULTS.option()] = "human",
) -> int:
    """Ask tools about engines with known mistakes in them and about sound ones, and count the right answers.

    Each tool runs in its own process. Sound variants of the engines must pass.
    """
    chosen = {
        "--only": only, "--category": category, "--engine": engine, "--sample": sample, "--drawn": drawn,
        "--variants": variants,
    }  # fmt: skip
    if check is not None:
        _refuse({"--tool": tool, "--power": power or None, **chosen}, "one check is shown, and nothing is scored")
        return _checked(check, device, out, format)
    if power:
        _refuse(chosen, "the power has faults and sound engines of its own")
    with progress_bar() as report:
        from harness.extensions.faults.benchmark import Questions
        from harness.plan import check_device

        check_device(device)
        tools = _opened(tool or ["harness"])
        with Questions(seed=seed, device=device, limit_s=limit, out=out) as questions:
            if power:
                powers = _power(tools, questions, report)
            else:
                entries = _entries(only, category, engine, sample, drawn, variants, seed, report)
                result = _benchmark(tools, entries, questions, seed, report)
    if power:
        POWER.show(powers, format)
        return ExitStatus.PASS
    FAULTS.show(result, format)
    return ExitStatus.PASS if result.is_clean else ExitStatus.MISMATCH


def _opened(names: Sequence[str]) -> "dict[str, Tool]":
    """Return the adapters by name; the processes of tools look for modules where this one does, also in this folder."""
    from harness.extensions.faults.tools import open_tool

    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    return {name: open_tool(name) for name in names}


def _refuse(options: Mapping[str, object], why: str) -> None:
    """Raise BAD_OPTION for the first of the options that has a value."""
    for option in (name for name, value in options.items() if value is not None):
        raise HarnessError(Code.BAD_OPTION, why, where=option, hint=f"leave {option} out")


def _entries(
    only: list[str] | None, category: list[str] | None, engine: list[str] | None, sample: int | None,
    drawn: int | None, variants: int | None, seed: int, report: Progress
) -> "list[Fault | Variant]":  # fmt: skip
    """Return the faults and sound variants that the options choose."""
    from harness.extensions.faults.benchmark import sampled
    from harness.extensions.faults.catalogue import VARIANTS, choose, kinds_of

    kinds = kinds_of(engine)
    if drawn is None:
        faults = sampled([fault for fault in choose(only, category, kinds) if not fault.equivalent], sample, seed)
    else:
        faults = [fault for at in range(drawn) if (fault := _drawn(seed, at, drawn, report)) is not None]
    size = sample or drawn
    if variants is None:
        variants = 0 if only or category else None if size is None else size // 2
    sound = [item for item in VARIANTS.values() if not kinds or item.engine in kinds]
    return [*faults, *sampled(sound, variants, seed)]


def _benchmark(
    tools: "Mapping[str, Tool]", entries: "Sequence[Fault | Variant]", questions: "Questions", seed: int,
    report: Progress
) -> "Benchmark":  # fmt: skip
    """Ask every tool of every engine, and return the score of each name that a tool answers for."""
    from harness.extensions.faults.benchmark import ask_all
    from harness.extensions.faults.report import Benchmark
    from harness.extensions.faults.score import score
    from harness.extensions.faults.tools import num_lines

    begin = time.perf_counter()
    asked = ask_all(list(tools), entries, questions, report)
    by_id = {entry.id: entry for entry in entries}
    scores = [
        score(
            label, [item for item in asked if item.tool == name], by_id,
            is_rule=label in opened.rules, num_lines=num_lines(name),
        )
        for name, opened in tools.items()
        for label in opened.names
    ]  # fmt: skip
    return Benchmark(seed=seed, scores=scores, seconds=time.perf_counter() - begin)


def _power(tools: "Mapping[str, Tool]", questions: "Questions", report: Progress) -> "list[SmallestError]":
    from harness.extensions.faults.power import measure

    return measure({name: opened.names for name, opened in tools.items()}, questions, report)


def _drawn(seed: int, index: int, total: int, report: Progress) -> "Fault | None":
    from harness.extensions.faults.drawn.draw import draw
    from harness.extensions.faults.zoo.quiet import quiet

    report("draw faults", index, total)
    with quiet():
        return draw(seed, index)


def _checked(fault: str, device: str, out: Path | None, format: str) -> int:
    """Check an engine with a fault in it, on the model, prompts and schedule that show the fault."""
    with progress_bar() as report:
        from harness.cli.check import checked, show_checks
        from harness.extensions.faults.catalogue import choose
        from harness.extensions.faults.fault import EngineKind
        from harness.extensions.faults.subject import checkpoint, plan_of

        (chosen,) = choose([fault], kinds=[EngineKind.REFERENCE])
        with checkpoint(chosen.setting) as folder, chosen.inject():
            plan = replace(plan_of(chosen.setting, folder, device=device), notes=(f"planted: {chosen.summary}",))
            result = checked(plan, out, report)
    return show_checks([result], format)
