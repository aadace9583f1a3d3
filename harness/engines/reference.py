"""The reference engine under test: the one place where the harness imports it."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import torch

from harness.engines.adapter import Engine, Offer, Workload
from harness.engines.reference_errors import reference_errors
from harness.engines.reference_options import parse_reference_options
from harness.engines.reference_session import ReferenceSession
from harness.recording import RecordingWriter, RequestInfo
from harness.schedule import SCHEDULES
from harness.taps import LOGITS
from reference_engine import EngineConfig, LLMEngine, SamplingParams, StepInfo
from reference_engine.worker import parallel_engine

_NOT_SERVED = {"contiguous": ("prefix-hit", "preempted"), "recompute": ("prefix-hit", "forked", "preempted")}
"""Schedules that mean nothing to a backend without blocks, or without a cache."""
_SMALL_BLOCK = 4
"""Tokens of a block where requests are to run out of blocks: the smaller, the sooner."""


def open_engine(folder: Path, *, dtype: str, device: str, options: Mapping[str, str]) -> Engine:
    """Open the reference engine; options are the fields of its `EngineConfig`."""
    return ReferenceEngine(folder=folder, dtype=dtype, device=device, options=parse_reference_options(options))


class ReferenceEngine:
    """Adapter of `reference_engine.LLMEngine`."""

    name = "reference"

    def __init__(self, *, folder: Path, dtype: str, device: str, options: Mapping[str, str | int]) -> None:
        self._folder, self._options = folder, {**options, "dtype": dtype, "device": device}
        backend = str(options.get("attention_backend", "paged"))
        unserved = _NOT_SERVED.get(backend, ())
        schedules = tuple(name for name in SCHEDULES if name not in unserved)
        self.offer = Offer(schedules=schedules, keeps_cache=backend != "recompute")

    def run(self, workload: Workload, writer: RecordingWriter) -> None:
        """Run the workload on a fresh engine; see `Engine.run`."""
        with reference_errors(self._folder), self._opened(workload) as engine:
            _run(engine, workload, _Recorder(writer))

    def open_session(self, *, max_num_tokens: int, max_num_seqs: int) -> ReferenceSession:
        """See `Steppable.open_session`; explicit options win."""
        limits = {"max_num_batched_tokens": max_num_tokens, "max_num_seqs": max_num_seqs}
        with reference_errors(self._folder):
            engine = LLMEngine(self._folder, EngineConfig(**{**limits, **self._options}))  # type: ignore[arg-type]
        return ReferenceSession(engine, self._folder)

    def _opened(self, workload: Workload) -> AbstractContextManager[LLMEngine]:
        config, num_ranks = self._config(workload), workload.schedule.num_ranks
        if num_ranks == 1:
            return LLMEngine(self._folder, config)
        return parallel_engine(self._folder, config, num_ranks)

    def _config(self, workload: Workload) -> EngineConfig:
        """Translate the schedule into the engine's own limits; explicit options win."""
        schedule, num_requests = workload.schedule, len(workload.requests)
        options: dict[str, str | int] = {"max_num_seqs": 1}
        if schedule.is_batched:
            options["max_num_seqs"] = num_requests + len(workload.copies)
        if schedule.chunk_size is not None:
            options["max_num_batched_tokens"] = schedule.chunk_size
        if schedule.trigger == "prefix_hit":
            options["enable_prefix_caching"] = True
        if schedule.trigger == "preempted":
            options["block_size"] = int(self._options.get("block_size", _SMALL_BLOCK))
            options["num_blocks"] = _too_few_blocks(workload.requests, int(options["block_size"]))
        return EngineConfig(**{**options, **self._options})  # type: ignore[arg-type]


def _run(engine: LLMEngine, workload: Workload, observer: "_Recorder") -> None:
    copies = dict(zip((request.id for request in workload.requests), workload.copies, strict=False))
    forks = copies if workload.schedule.trigger == "forked" else {}
    _drive(engine, observer, workload.requests, forks)
    if not forks:
        _drive(engine, observer, workload.copies, {})


def _drive(
    engine: LLMEngine, observer: "_Recorder", requests: Sequence[RequestInfo], forks: Mapping[int, RequestInfo]
) -> None:
    """Run requests to their end; one named in `forks` is forked when it has made its first token."""
    prompt_lengths = {request.id: request.prompt_length for request in requests}
    for request in requests:
        prompt = request.token_ids[: request.prompt_length]
        observer.request_ids[engine.add_request(prompt, _forced(request, request.prompt_length))] = request.id
    engine.observer = observer
    pending = dict(forks)
    while engine.has_unfinished():
        for output in engine.step():
            original = observer.request_ids[output.request_id]
            if original in pending and output.finish_reason is None:
                fork = pending.pop(original)
                params = _forced(fork, prompt_lengths[original])
                observer.request_ids[engine.fork(output.request_id, params)] = fork.id


def _forced(request: RequestInfo, prompt_length: int) -> SamplingParams:
    """Feed what follows the prompt; what the engine would have chosen is still reported."""
    forced = request.token_ids[prompt_length:]
    return SamplingParams(max_new_tokens=len(forced) + 1, forced_token_ids=forced or None, ignore_eos=True)


def _too_few_blocks(requests: Sequence[RequestInfo], block_size: int) -> int:
    """Return a pool that all prompts fit into but not all that follows them, the null block included.

    The longest request must fit by itself, or no schedule could ever finish it.
    """
    prompts = sum(-(-request.prompt_length // block_size) for request in requests)
    longest = max(-(-(len(request.token_ids) + 1) // block_size) for request in requests)
    return 1 + max(prompts, longest)


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
