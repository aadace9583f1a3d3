"""A pool, and an engine that leaves everything to workloads."""

import pytest

from harness.engines import LIMITS, Capabilities, Control
from harness.extensions.fuzz.workload import SequencePool, Translator, make_pool

CONTROL = Control(limits=LIMITS, aborts=True, forks=True)


@pytest.fixture(scope="session")
def pool() -> SequencePool:
    """The pool of a model with few tokens."""
    return make_pool(0, vocab_size=64, max_positions=None, window=None)


@pytest.fixture(scope="session")
def translator(pool: SequencePool) -> Translator:
    """What workloads have to fit."""
    return Translator(pool, CONTROL)


@pytest.fixture(scope="session")
def capabilities() -> Capabilities:
    """Of an engine that leaves everything to workloads."""
    return Capabilities(schedules=("plain",), control=CONTROL)
