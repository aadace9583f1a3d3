"""Progress on standard error: a bar on a terminal, nothing elsewhere."""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as ProgressBar

from harness.progress import Progress


@contextmanager
def progress_bar() -> Iterator[Progress]:
    """Yield what is told how far the work is."""
    console = Console(stderr=True)
    counted = (TextColumn("{task.description:24}"), BarColumn(), TextColumn("{task.completed}/{task.total}"))
    columns = (*counted, TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
    with ProgressBar(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task, last = bar.add_task("starting", total=1), "starting"

        def report(label: str, done: int, total: int) -> None:
            nonlocal last
            if label != last:  # what was done before says nothing of how long this takes
                bar.reset(task, description=label, total=total)
                last = label
            bar.update(task, completed=done, total=total)

        yield report
