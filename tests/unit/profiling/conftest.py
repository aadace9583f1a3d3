"""Sessions of both engines on the smallest checkpoint with q and k norms, and a load that all passes share."""

from collections.abc import Callable
from pathlib import Path

import pytest

from harness.engines import open_engine
from harness.engines.stepping import Session, open_session
from harness.profiling.load import CaptureSchedule, ProfileRequests, Window, dry_run, window

PROMPTS = (tuple(range(10, 34)), tuple(range(30, 54)))


@pytest.fixture(scope="session")
def load() -> ProfileRequests:
    """Two requests of 24 tokens and 6 new ones each."""
    return ProfileRequests(prompts=PROMPTS, max_new_tokens=(6, 6))


@pytest.fixture(scope="session")
def open_on(checkpoints: Path) -> Callable[..., Session]:
    """Open a fresh session of an engine with options."""

    def opened(engine: str, *, model: str = "qwen3-tiny", dtype: str = "float32", **options: object) -> Session:
        option_texts = {name: str(value) for name, value in options.items()}
        opened = open_engine(engine, checkpoints / model, dtype=dtype, device="cpu", options=option_texts)
        return open_session(opened, max_num_tokens=64, max_num_seqs=3)

    return opened


@pytest.fixture(scope="session", params=["reference", "hf"])
def session(request: pytest.FixtureRequest, open_on: Callable[..., Session]) -> Session:
    """One of the two engines."""
    return open_on(request.param)


@pytest.fixture(scope="session")
def reference(open_on: Callable[..., Session]) -> Session:
    """The reference engine."""
    return open_on("reference")


@pytest.fixture(scope="session")
def find_window(load: ProfileRequests) -> Callable[..., Window]:
    """Rehearse the load and return the window of a phase."""

    def find(session: Session, phase: str, requests: ProfileRequests = load, **schedule: int) -> Window:
        return window(phase, requests, dry_run(session, requests), CaptureSchedule(**schedule))

    return find
