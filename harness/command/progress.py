"""Progress on standard error: a bar on a terminal; elsewhere a line now and then, and none for what takes seconds."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as ProgressBar

from harness.base.progress import Progress

LINE_EVERY_S = 20.0
"""Without a terminal: time until a first line is written, and between two."""


@contextmanager
def progress_bar() -> Iterator[Progress]:
    """Yield what is told how far the work is.

    Labels that are equal up to a colon are parts of one work, whose time left goes on from one to the next.
    """
    console = Console(stderr=True)
    if not console.is_terminal:
        yield Lines()
        return
    counted = (TextColumn("{task.description:24}"), BarColumn(), TextColumn("{task.percentage:3.0f} %"))
    columns = (*counted, TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
    with ProgressBar(*columns, console=console, transient=True) as bar:
        task, last = bar.add_task("loading libraries", total=1), ""

        def report(label: str, done: int, total: int) -> None:
            nonlocal last
            work = label.partition(":")[0]
            if work != last:  # what was done before says nothing of how long this takes
                bar.reset(task, total=total)
                last = work
            bar.update(task, description=label, completed=done, total=total)

        yield report


class Lines:
    """Says how far the work is, in lines, no more often than every so many seconds."""

    def __init__(self) -> None:
        self._work, self._begin, self._last = "", 0.0, time.monotonic()

    def __call__(self, label: str, done: int, total: int) -> None:
        """See `Progress`."""
        now, work = time.monotonic(), label.partition(":")[0]
        if work != self._work:
            self._work, self._begin = work, now
        if now - self._last < LINE_EVERY_S:
            return
        self._last, elapsed = now, now - self._begin
        left = f", about {elapsed * (total - done) / done:.0f} s left" if done else ""
        sys.stderr.write(f"{label}: {done / max(1, total):.0%}{left}\n")
        sys.stderr.flush()
