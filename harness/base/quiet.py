"""transformers without its loading reports and progress bars."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence transformers' loading reports and bars: what they say of a bad checkpoint we say ourselves."""
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
