"""A sound server of the reference engine, in this process."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from harness.extensions.server.address import Address
from harness.plan import plan_engine

from ....loopback import serving

FOLDER = Path(__file__).parents[4] / "cases" / "checkpoints" / "qwen3-tiny"


@contextmanager
def served(*, dtype: str = "float32", drafter: Any = None, **options: Any) -> Iterator[Address]:
    """Serve the tiny model, with what guesses tokens for it to verify."""
    from reference_engine import EngineConfig, LLMEngine
    from reference_engine.server.app import build_app
    from reference_engine.server.text import Text

    config = EngineConfig(dtype=dtype, max_num_seqs=64, enable_prefix_caching=True, **options)
    with LLMEngine(FOLDER, config) as engine, serving(build_app(engine, Text(FOLDER), model="tiny")) as url:
        engine.drafter = drafter
        yield Address(url=url, concurrency=32, timeout_s=600)


@pytest.fixture(scope="session")
def address() -> Iterator[Address]:
    with served() as own:
        yield own


def plan_of(dtype: str = "float32") -> Any:
    """Return the plan of a check of that server."""
    return plan_engine(model=str(FOLDER), dtype=dtype)
