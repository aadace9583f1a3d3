"""Progress on standard error: a bar on a terminal, nothing elsewhere."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


@contextmanager
def progress_bar() -> Iterator[Callable[[str, int, int], None]]:
    """Yield a function that is told what is being done, how much of it is done, and how much there is."""
    console = Console(stderr=True)
    counted = (TextColumn("{task.description:24}"), BarColumn(), TextColumn("{task.completed}/{task.total}"))
    columns = (*counted, TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task, last = bar.add_task("starting", total=1), "starting"

        def report(label: str, done: int, total: int) -> None:
            nonlocal last
            if label != last:  # what was done before says nothing of how long this takes
                bar.reset(task, description=label, total=total)
                last = label
            bar.update(task, completed=done, total=total)

        yield report
