"""Progress of a suite on standard error: a bar on a terminal, a line now and then elsewhere, for a log."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

if TYPE_CHECKING:
    from harness.campaigns.suite.run import Progress

_LINE_EVERY_S = 30.0


@contextmanager
def suite_progress() -> "Iterator[Callable[[Progress], None]]":
    """Yield a function that is told how far a suite is."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _lines()
        return
    columns = (BarColumn(), TextColumn("{task.completed}/{task.total} {task.description}"), TimeElapsedColumn())
    with Bar(*columns, console=console, transient=True) as bar:
        task = bar.add_task("starting", total=None)
        yield lambda progress: bar.update(
            task, completed=progress.done, total=progress.total, description=_describe(progress)
        )


def _lines() -> "Callable[[Progress], None]":
    last = time.monotonic()

    def report(progress: "Progress") -> None:
        nonlocal last
        if time.monotonic() - last >= _LINE_EVERY_S:
            last = time.monotonic()
            typer.echo(f"{progress.done}/{progress.total} done, {_describe(progress)}", err=True)

    return report


def _describe(progress: "Progress") -> str:
    parts = [f"{progress.running} running", f"{progress.failed} failed"]
    parts += [f"{progress.goldens_left} goldens to make"] if progress.goldens_left else []
    if progress.seconds_left is not None:
        parts.append(f"{_duration(progress.seconds_left)} left")
    return ", ".join(parts)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
