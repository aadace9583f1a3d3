"""Writers of recordings whose manifest says no more than a test asks for."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from harness.engines import Engine, Timeline, Workload
from harness.formats.recording import ModelInfo, Producer, RecordingWriter, RequestInfo, RunInfo
from harness.formats.schedule import parse_schedule


def new_writer(
    path: Path,
    requests: Sequence[RequestInfo],
    *,
    dtype: torch.dtype | str = "float32",
    model: str = "m",
    device: str = "cpu",
    schedule: str | None = None,
    environment: dict[str, Any] | None = None,
    **options: Any,
) -> RecordingWriter:
    """Return a writer; `options` are further arguments of `RecordingWriter`."""
    run = RunInfo(
        producer=Producer(name="tests", version="1"),
        model=ModelInfo(id=model),
        dtype=str(dtype).removeprefix("torch."),
        device=device,
        schedule=schedule,
        environment=environment or {},
    )
    return RecordingWriter(path, run, requests, **options)


def requests_of(tokens: dict[int, list[int]], *, prompt_length: int = 1) -> list[RequestInfo]:
    """Return requests by their ids and tokens."""
    return [RequestInfo(id=id_, token_ids=ids, prompt_length=prompt_length) for id_, ids in tokens.items()]


def record(
    engine: Engine,
    schedule: str,
    requests: Sequence[RequestInfo],
    path: Path,
    *,
    timeline: Timeline | None = None,
    **run: Any,
) -> None:
    """Write what an engine does under a schedule; `run` is for `new_writer`."""
    with new_writer(path, requests, schedule=schedule, **run) as writer:
        engine.run(Workload(requests=requests, schedule=parse_schedule(schedule), timeline=timeline), writer)
