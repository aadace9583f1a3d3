"""Workloads for adapters, and a writer to run them into."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from harness.engines import Engine, Timeline
from harness.formats.recording import Recording
from harness.formats.recording.manifest import RequestInfo
from harness.formats.recording.reader import Step

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


def computed(recording: Recording) -> list[Step]:
    """Return the steps that are not read back."""
    return [step for step in recording.steps if step.phase != "readback"]


def rows(step: Step, tap: str) -> list[tuple[int, int]]:
    """Return (request, position) of each row of a tap."""
    pairs = list(zip(step.request.tolist(), step.position.tolist(), strict=True))
    covered = step.rows_of(tap)
    return pairs if covered is None else [pairs[row] for row in covered.tolist()]
