"""An engine in a process of its own, as the harness's side sees it."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from harness.engines.adapter import Capabilities, own_adapter
from harness.engines.process import EngineProcess
from harness.engines.record import RunDescription
from harness.formats.recording.writer import discard_unfinished
from harness.formats.taps import Graph
from harness.results.settings import ModelSettings

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
        return TypeAdapter(ModelSettings).validate_json(json.dumps(answer["settings"]))

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
    """Return the capabilities of the other side, with its parts as what they are."""
    return TypeAdapter(Capabilities).validate_json(json.dumps(answer["capabilities"]))


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
