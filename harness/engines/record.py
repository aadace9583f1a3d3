"""One run of an engine, recorded: the same in this process, in one of the engine's own, and in another environment's.

What is imported here must be there in all of them: neither torch nor pydantic.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.base.environment import environment
from harness.base.numerics import Numerics
from harness.engines.adapter import Engine, Workload, engine_errors
from harness.formats.recording.arguments import validated
from harness.formats.recording.format import RunInfo
from harness.formats.recording.writer import RecordingWriter, plain
from harness.formats.schedule import Schedule, ScheduleKind
from harness.version import __version__

if TYPE_CHECKING:
    from harness.formats.recording import ModelInfo, RequestInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDescription:
    """A run to be recorded."""

    engine: str
    """Name of the engine, as the user gave it."""
    folder: Path
    """The folder of the recording: new, or empty."""
    model: ModelInfo
    dtype: str
    device: str
    schedule: Schedule
    requests: Sequence[RequestInfo]
    copies: Sequence[RequestInfo] = ()
    taps: str = "all"
    """See `Workload.taps`."""

    @property
    def workload(self) -> Workload:
        """The work that the engine is asked to do."""
        return Workload(requests=self.requests, schedule=self.schedule, copies=self.copies, taps=self.taps)

    def to_json(self) -> dict[str, Any]:
        """Return the description as what JSON can hold, for another process."""
        return {**plain(self), "folder": str(self.folder)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> RunDescription:
        """Return the description of `to_json`."""
        requests, copies = ([_info("RequestInfo", item) for item in data[name]] for name in ("requests", "copies"))
        model, schedule, folder = _info("ModelInfo", data["model"]), _schedule(data["schedule"]), Path(data["folder"])
        parts = {"folder": folder, "model": model, "schedule": schedule, "requests": requests, "copies": copies}
        return cls(**{**data, **parts})


def _schedule(fields: Mapping[str, Any]) -> Schedule:
    return Schedule(**{**fields, "kind": ScheduleKind(fields["kind"])})


def _info(kind: str, fields: Mapping[str, Any]) -> Any:
    return validated(kind, "the run's description is invalid", "RunDescription", **fields)


def record(engine: Engine, run: RunDescription) -> None:
    """Run the engine and record it; nothing is left of a run that fails.

    Raises:
        HarnessError: ENGINE_FAILED, or what the engine or the recorder raises.
    """
    with open_writer(engine, run) as writer, engine_errors(f"{run.engine}, schedule {run.schedule}"):
        engine.run(run.workload, writer)


def open_writer(engine: Engine, run: RunDescription, *, schedule: str | None = None) -> RecordingWriter:
    """Begin the recording of a run; `schedule` is what it is called if that is not the schedule's name.

    Raises:
        HarnessError: as `RecordingWriter`.
    """
    return RecordingWriter(
        run.folder,
        RunInfo(
            producer=_info("Producer", {"name": f"harness.engines.{run.engine}", "version": __version__}),
            model=run.model,
            dtype=run.dtype,
            device=run.device,
            environment={**environment(), **getattr(engine, "environment", {})},
            schedule=schedule or str(run.schedule),
            numerics=_numerics(engine.capabilities.numerics, run.schedule),
        ),
        [*run.requests, *run.copies],
    )


def _numerics(declared: Numerics | None, schedule: Schedule) -> Numerics | None:
    """Return what is known of the engine's arithmetic under a schedule."""
    if schedule.num_ranks == 1:
        return declared
    return replace(declared or Numerics(), num_ranks=schedule.num_ranks)
