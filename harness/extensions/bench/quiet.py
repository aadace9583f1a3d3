"""Peers that keep their notes to themselves."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from harness.base.progress import quiet_transformers

CONTINUOUS_BATCHING_LOGGER = "ContinuousBatchingLogger"


@contextmanager
def quiet_peers() -> Iterator[None]:
    """Silence transformers, with its continuous batching, which warns of its memory at every start."""
    logger = logging.getLogger(CONTINUOUS_BATCHING_LOGGER)
    was_disabled = logger.disabled
    logger.disabled = True
    try:
        with quiet_transformers():
            yield
    finally:
        logger.disabled = was_disabled
