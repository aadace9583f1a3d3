"""The reference engine under test: the one place where the harness imports it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import torch

from harness.engines.adapter import Engine, Offer, Workload, refuse_unknown_options
from harness.errors import Code, HarnessError
from harness.recording import RecordingWriter
from harness.schedule import SCHEDULES
from harness.taps import LOGITS
from reference_engine import EngineConfig, LLMEngine, SamplingParams, StepInfo
from reference_engine.errors import (
    CapacityError,
    CheckpointError,
    ConfigError,
    DeviceError,
    EngineError,
    RequestError,
    UnsupportedModelError,
)

_CODES: dict[type[EngineError], Code] = {
    CheckpointError: Code.TENSORS_CONTRADICT_CONFIG,
    UnsupportedModelError: Code.UNSUPPORTED_ARCHITECTURE,
    ConfigError: Code.BAD_OPTION,
    DeviceError: Code.NO_DEVICE,
    RequestError: Code.ENGINE_CANNOT_SERVE,
    CapacityError: Code.ENGINE_CANNOT_SERVE,
}
_INTEGER_OPTIONS = ("block_size", "num_blocks", "max_num_batched_tokens", "max_num_seqs", "max_model_len")


def open_engine(folder: Path, *, dtype: str, device: str, options: Mapping[str, str]) -> Engine:
    """Open the reference engine; options are the fields of its `EngineConfig`."""
    known = [field.name for field in fields(EngineConfig) if field.name not in ("dtype", "device")]
    refuse_unknown_options("reference", options, known)
    return ReferenceEngine(folder=folder, dtype=dtype, device=device, options=_parsed(options))


def _parsed(options: Mapping[str, str]) -> dict[str, str | int]:
    parsed: dict[str, str | int] = dict(options)
    for name in _INTEGER_OPTIONS:
        if name in options:
            try:
                parsed[name] = int(options[name])
            except ValueError:
                raise HarnessError(
                    Code.BAD_OPTION, f"{name} must be an integer", where="--engine-option", actual=options[name]
                ) from None
    return parsed


class ReferenceEngine:
    """Adapter of `reference_engine.LLMEngine`."""

    name = "reference"

    def __init__(self, *, folder: Path, dtype: str, device: str, options: Mapping[str, str | int]) -> None:
        self._folder, self._options = folder, {**options, "dtype": dtype, "device": device}
        keeps_cache = options.get("attention_backend", "paged") != "recompute"
        self.offer = Offer(schedules=tuple(SCHEDULES), keeps_cache=keeps_cache)

    def run(self, workload: Workload, writer: RecordingWriter) -> None:
        """Run the workload on a fresh engine; see `Engine.run`."""
        try:
            engine = LLMEngine(self._folder, self._config(workload))
            observer = _Recorder(writer)
            for request in workload.requests:
                forced = request.token_ids[request.prompt_length :]
                params = SamplingParams(
                    max_new_tokens=len(forced) + 1, forced_token_ids=forced if forced else None, ignore_eos=True
                )
                observer.request_ids[engine.add_request(request.token_ids[: request.prompt_length], params)] = (
                    request.id
                )
            engine.observer = observer
            while engine.has_unfinished():
                engine.step()
        except EngineError as error:
            code = next((code for kind, code in _CODES.items() if isinstance(error, kind)), Code.ENGINE_FAILED)
            raise HarnessError(code, f"the reference engine: {error}", where=self._folder) from error

    def _config(self, workload: Workload) -> EngineConfig:
        """Translate the schedule into the engine's own limits; explicit options win."""
        schedule = workload.schedule
        options: dict[str, str | int] = {"max_num_seqs": len(workload.requests) if schedule.is_batched else 1}
        if schedule.chunk_size is not None:
            options["max_num_batched_tokens"] = schedule.chunk_size
        return EngineConfig(**{**options, **self._options})  # type: ignore[arg-type]


@dataclass(slots=True)
class _Recorder:
    """The engine's observer: hands every step to the recording."""

    writer: RecordingWriter
    request_ids: dict[int, int]

    def __init__(self, writer: RecordingWriter) -> None:
        self.writer, self.request_ids = writer, {}

    def begin_step(self, step: StepInfo) -> None:
        self.writer.begin_step(
            phase=step.phase,
            request=[self.request_ids[request] for request in step.request_ids],
            position=step.positions,
            sampled_rows=step.sampled_rows,
            slot_mapping=step.slot_mapping or None,
            block_tables={self.request_ids[request]: blocks for request, blocks in step.block_tables.items()} or None,
            partial_rows={LOGITS: step.sampled_rows} if len(step.sampled_rows) else None,
        )

    def tap(self, name: str, tensor: torch.Tensor) -> None:
        self.writer.tap(name, tensor)

    def end_step(self, sampled: Sequence[int]) -> None:
        self.writer.end_step(sampled)
