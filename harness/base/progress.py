"""Progress of long work, and transformers without its own progress bars and loading reports."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

Progress = Callable[[str, int, int], None]
"""Receives the current task, its finished part, and its total."""


def no_progress(_label: str, _done: int, _total: int) -> None:
    """Report nothing."""


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence transformers' loading reports and bars: the harness reports a bad checkpoint itself."""
    from transformers.utils import logging

    # Its handlers, not its logger: thousands of loggers remember the level of that one, and reset it in 0.3 ms.
    handlers = [(handler, handler.level) for handler in logging.get_logger("transformers").handlers]
    bars = logging.is_progress_bar_enabled()
    for handler, _ in handlers:
        handler.setLevel(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        yield
    finally:
        for handler, level in handlers:
            handler.setLevel(level)
        if bars:
            logging.enable_progress_bar()
