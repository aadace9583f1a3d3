"""One run of an engine, recorded: the same in this process and in one of the engine's own."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from harness.engines.adapter import Engine, Workload, blaming
from harness.environment import environment
from harness.numerics import Numerics
from harness.recording import ModelInfo, Producer, RecordingWriter, RequestInfo
from harness.schedule import Schedule
from harness.version import __version__


class RunDescription(BaseModel):
    """What is to be run and recorded."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    engine: str
    """Name of the engine, as the user gave it."""
    folder: Path
    """Where the recording goes: new, or empty."""
    model: ModelInfo
    dtype: str
    device: str
    schedule: Schedule
    requests: list[RequestInfo]
    copies: list[RequestInfo] = []

    @property
    def workload(self) -> Workload:
        """What the engine is asked to compute."""
        copies: Sequence[RequestInfo] = self.copies
        return Workload(requests=self.requests, schedule=self.schedule, copies=copies)


def record(engine: Engine, run: RunDescription) -> None:
    """Run the engine and record it; nothing is left of a run that fails.

    Raises:
        HarnessError: ENGINE_FAILED, or what the engine or the recorder raises.
    """
    writer = RecordingWriter(
        run.folder,
        producer=Producer(name=f"harness.engines.{run.engine}", version=__version__),
        model=run.model,
        dtype=run.dtype,
        device=run.device,
        environment=environment(),
        requests=[*run.requests, *run.copies],
        schedule=str(run.schedule),
        numerics=_numerics(engine.offer.numerics, run.schedule),
    )
    with writer, blaming(f"{run.engine}, schedule {run.schedule}"):
        engine.run(run.workload, writer)


def _numerics(declared: Numerics | None, schedule: Schedule) -> Numerics | None:
    """Return what is known of the engine's arithmetic under a schedule."""
    if schedule.num_ranks == 1:
        return declared
    return replace(declared or Numerics(), num_ranks=schedule.num_ranks)
