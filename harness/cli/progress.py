"""Progress on standard error: a bar on a terminal, nothing elsewhere."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn


@contextmanager
def progress_bar() -> Iterator[Callable[[str, int, int], None]]:
    """Yield a function that is told what is being done, how much of it is done, and how much there is."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description:24}"), BarColumn(), TextColumn("{task.completed}/{task.total}"))
    with Progress(
        *columns, TimeElapsedColumn(), console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("starting", total=1)

        def report(label: str, done: int, total: int) -> None:
            bar.update(task, description=label, completed=done, total=total)

        yield report
