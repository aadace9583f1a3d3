"""Records one run of an engine: in this process, in a process of the engine's own, or in another environment's.

What a cache holds of a request is a step of the recording, too: keys and values at its end, states after any step.

What is imported here must be there in all of them: neither torch nor pydantic.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.base.environment import environment
from harness.base.numerics import Numerics
from harness.engines.adapter import Capabilities, Engine, Workload, engine_errors, own_adapter
from harness.engines.process import EngineProcess
from harness.formats.recording.arguments import RunInfo, validated
from harness.formats.recording.writer import RecordingWriter, discard_unfinished, plain
from harness.formats.schedule import Schedule, ScheduleKind
from harness.formats.taps import Graph
from harness.results.settings import ModelSettings
from harness.version import __version__

if TYPE_CHECKING:
    import torch

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
    is_served: bool = False
    """See `Workload.is_served`."""

    @property
    def workload(self) -> Workload:
        """The work that the engine is asked to do."""
        return Workload(
            requests=self.requests,
            schedule=self.schedule,
            copies=self.copies,
            taps=self.taps,
            is_served=self.is_served,
        )

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
    how = ", as served" if run.is_served else ""
    if run.is_served:
        _compile_again()
    with open_writer(engine, run) as writer, engine_errors(f"{run.engine}, schedule {run.schedule}{how}"):
        engine.run(run.workload, writer)


def _compile_again() -> None:
    """Let torch compile what has been watched: it never does again where a function once ran under a dispatch mode."""
    if "torch._dynamo" in sys.modules:
        sys.modules["torch"].compiler.reset()


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


DEFAULT_TIMEOUT_S = 3600.0
"""Longest time for opening an engine, and for each schedule, where no other is given."""


class IsolatedEngine:
    """An engine that is opened and run in another process."""

    def __init__(self, process: EngineProcess, answer: Mapping[str, Any], name: str, timeout_s: float) -> None:
        """Use `isolated_engine`."""
        self._process, self._key, self._timeout_s = process, name, timeout_s
        self.name, self.capabilities = str(answer["name"]), _capabilities(answer)

    def match_taps(self, graph: Graph) -> None:
        """Tell the engine the model's graph, where it wants to know; see `TapMatcher`.

        Raises:
            HarnessError: as `record`.
        """
        job = {"engine": self._key, "match": graph.to_json()}
        answer = self._process.ask(job, doing="matching taps", timeout_s=self._timeout_s)
        self.capabilities = _capabilities(answer)

    def resolved_settings(self) -> ModelSettings:
        """Ask the engine for its settings; nothing where it shows none. See `SettingsShower`.

        Raises:
            HarnessError: as `record`.
        """
        job = {"engine": self._key, "settings": True}
        answer = self._process.ask(job, doing="showing its settings", timeout_s=self._timeout_s)
        settings: ModelSettings = _validated(ModelSettings, answer["settings"])
        return settings

    def record(self, run: RunDescription) -> None:
        """Run the engine and record it; nothing is left of a run that fails.

        Raises:
            HarnessError: ENGINE_FAILED, ENGINE_TIMED_OUT, or what the engine or the recorder raises.
        """
        existed = run.folder.exists()
        job = {"engine": self._key, "run": run.to_json()}
        try:
            answer = self._process.ask(job, doing=f"schedule {run.schedule}", timeout_s=self._timeout_s)
        except BaseException:
            discard_unfinished(run.folder, keep_folder=existed)
            raise
        self.capabilities = _capabilities(answer)


def _capabilities(answer: Mapping[str, Any]) -> Capabilities:
    """Return the capabilities of the engine in the other process, with their parts as what they are."""
    capabilities: Capabilities = _validated(Capabilities, answer["capabilities"])
    return capabilities


def _validated(kind: type, fields: object) -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(kind).validate_json(json.dumps(fields))


@contextmanager
def isolated_engine(
    name: str,
    folder: Path,
    *,
    dtype: str,
    device: str,
    options: Mapping[str, str],
    timeout_s: float | None,
    python: Path | None = None,
) -> Iterator[IsolatedEngine]:
    """Open the engine of that name in a process of its own, which ends with the block.

    Args:
        name: of the engine. One that is not installed here is looked for in the other Python's environment.
        folder: of the checkpoint.
        dtype: of the engine.
        device: of the engine.
        options: of the engine.
        timeout_s: longest time for each job; None for an hour.
        python: interpreter of the environment that the engine is installed in; None for this one.

    Raises:
        HarnessError: as `open_engine`; ENGINE_FAILED: the process ended; ENGINE_TIMED_OUT; BAD_ENGINE_PYTHON.
    """
    limit_s = DEFAULT_TIMEOUT_S if timeout_s is None else timeout_s
    process = EngineProcess(name) if python is None else EngineProcess(name, python=str(python), brings_harness=True)
    try:
        opened = {"name": name, "folder": str(folder.absolute()), "dtype": dtype, "device": device}
        adapter = own_adapter(name) if python is not None else None
        job = {"engine": name, "open": {**opened, "options": dict(options), "adapter": adapter}}
        yield IsolatedEngine(process, process.ask(job, doing="opening", timeout_s=limit_s), name, limit_s)
    except BaseException:
        process.kill()
        raise
    process.close()


def write_read_back(
    writer: RecordingWriter, request: RequestInfo, held: Mapping[str, tuple[range, torch.Tensor]]
) -> None:
    """Write what a cache holds of a request: nothing if that is nothing.

    Args:
        writer: of the recording.
        request: the one that ends.
        held: of each tap the positions, and their rows [positions, KV heads, head size].
    """
    if not held:
        return
    num_rows = len(request.token_ids)
    writer.begin_step(
        phase="readback",
        request=[request.id] * num_rows,
        position=range(num_rows),
        partial_rows={tap: kept for tap, (kept, _rows) in held.items() if len(kept) < num_rows} or None,
    )
    for tap, (_kept, rows) in held.items():
        writer.tap(tap, rows)
    writer.end_step()


def write_states(
    writer: RecordingWriter,
    graph: Graph,
    states: Mapping[tuple[int, str], torch.Tensor],
    rows: Sequence[tuple[int, int, int]],
) -> set[str]:
    """Write the states that a cache holds of some requests, and return their taps: nothing if that is nothing.

    Args:
        writer: of the recording.
        graph: of the model.
        states: [requests, ...] by layer and name (`conv_state`, `recurrent_state`).
        rows: of each request its place in the batch, its id, and the position of the last row that is in its states.
    """
    held = {graph.states[key]: state for key, state in states.items() if key in graph.states}
    if not held or not rows:
        return set()
    places, requests, positions = zip(*rows, strict=True)
    writer.begin_step(phase="readback", request=requests, position=positions)
    for tap, state in held.items():
        writer.tap(tap, state[list(places)])
    writer.end_step()
    return set(held)
