"""Workloads for adapters, and a writer to run them into."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from harness.engines import Engine, Timeline
from harness.formats.recording import Recording
from harness.formats.recording.manifest import RequestInfo

from ... import recording_writer

REQUESTS = (
    RequestInfo(id=3, token_ids=[1, 4, 5, 6, 7, 8, 9, 10, 11, 12], prompt_length=8),
    RequestInfo(id=0, token_ids=[1, 20, 21, 22, 23, 24], prompt_length=2),
    RequestInfo(id=7, token_ids=[30, 31, 32, 33], prompt_length=4),
)
"""Uneven prompts and continuations, ids out of order; the last decodes nothing."""


@pytest.fixture
def record(tmp_path: Path) -> Callable[..., Recording]:
    """Run an engine under a schedule and open what it recorded."""

    def run(
        engine: Engine,
        schedule: str,
        requests: Sequence[RequestInfo] = REQUESTS,
        timeline: Timeline | None = None,
    ) -> Recording:
        recording_writer.record(engine, schedule, requests, tmp_path / "recording", timeline=timeline)
        return Recording.open(tmp_path / "recording")

    return run
