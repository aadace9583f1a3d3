"""A sound server of the reference engine, in this process."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from harness.extensions.server.address import Address
from harness.plan import plan_engine

from ..served import FOLDER, serve


@contextmanager
def served(**options: Any) -> Iterator[Address]:
    """Serve the tiny model to many clients; `options` are those of `serve`."""
    with serve(max_num_seqs=64, enable_prefix_caching=True, **options) as server:
        yield server.address(concurrency=32)


@pytest.fixture(scope="session")
def address() -> Iterator[Address]:
    with served() as served_address:
        yield served_address


def plan_of(dtype: str = "float32") -> Any:
    """Return the plan of a check of that server."""
    return plan_engine(model=str(FOLDER), dtype=dtype)
