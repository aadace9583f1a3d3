"""An installed engine under the engine suite: what it computes along tokens that it is given, by its `run` alone.

The suite compares the same requests run in two ways. It need not be the engine's own choice that they continue with:
here the tokens after a prompt are drawn from it, so all rows of both ways have equal inputs, and what the engine would
have chosen is compared at each of them.
"""

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

from harness.base.files import scratch_folder
from harness.engines import Engine, Timeline, Workload, engine_errors, open_engine
from harness.engines.adapter import TapMatcher
from harness.engines.record import RunDescription, open_writer
from harness.errors import Code, HarnessError
from harness.formats.checkpoint import Checkpoint, embedded_cases, resolve
from harness.formats.recording import ModelInfo, Recording, RequestInfo
from harness.formats.recording.reader import Step
from harness.formats.schedule import Schedule
from harness.properties.engine.adapter import OPTIONS, Taps

_LIMITS = {
    "block_size": "block_size",
    "num_blocks": "num_blocks",
    "max_num_batched_tokens": "max_num_batched_tokens",
    "max_num_seqs": "max_num_seqs",
    "prefix_caching": "enable_prefix_caching",
}
"""Parameters of the suite, and the limits of `Control` that they are."""
MAX_MODEL_LEN = 48


@cache
def installed_engine(name: str, model: str | None = None, dtype: str = "float32") -> type:
    """Return an adapter for the engine suite of the installed engine of that name.

    `model` is a folder, the name of an embedded checkpoint, or a hub id; None for the embedded qwen3-tiny.

    Raises:
        HarnessError: as `resolve` and `open_engine`; ENGINE_LACKS_METHOD: it cannot run requests together.
    """
    name_of_model = model or str(embedded_cases() / "checkpoints" / "qwen3-tiny")
    checkpoint = Checkpoint(resolve(name_of_model, local_files_only=True))
    engine = open_engine(name, checkpoint.folder, dtype=dtype, device="cpu")
    control = engine.capabilities.control
    if control is None and "batched" not in engine.capabilities.schedules:
        raise HarnessError(
            Code.ENGINE_LACKS_METHOD, f"engine {name!r} cannot run requests together", where="--engine",
            expected="Capabilities.control, or the schedule batched", actual=", ".join(engine.capabilities.schedules),
            hint="harness check takes it",
        )  # fmt: skip
    _match_taps(engine, checkpoint, dtype)
    limits = () if control is None else control.limits
    described = {
        "keywords": tuple(option for option, limit in _LIMITS.items() if limit in limits),
        "refusals": {option: _refusal(option) for option in OPTIONS},
        "vocab_size": int(checkpoint.config["vocab_size"]),
        "max_model_len": MAX_MODEL_LEN,
        "engine": engine,
        "folder": checkpoint.folder,
        "dtype": dtype,
    }
    return type(f"Installed_{name}", (_Installed,), described)


def _refusal(option: str) -> str:
    limit = _LIMITS.get(option)
    return f"Capabilities.control does not name {limit}" if limit else f"no workload of the harness decides {option}"


def _match_taps(engine: Engine, checkpoint: Checkpoint, dtype: str) -> None:
    """Tell an engine whose taps depend on the model what the model's taps are."""
    if isinstance(engine, TapMatcher):
        from harness.oracle.model import load_model

        engine.match_taps(load_model(checkpoint, dtype=getattr(torch, dtype), device="cpu").graph)


class _Installed:
    """An adapter as `EngineAdapter` has it; `keywords` names the options that the engine leaves to a workload."""

    keywords: tuple[str, ...]
    vocab_size: int
    engine: Engine
    folder: Path
    dtype: str

    def __init__(self, **options: int | bool) -> None:
        self._limits = {_LIMITS[option]: value for option, value in options.items()}
        if "num_blocks" in self._limits:
            self._limits["num_blocks"] += 1  # one that no request can have
        self._earlier: list[RequestInfo] = []
        self._num_steps = 0
        """That the engine took for the earlier requests."""
        self._run = _Run()

    def generate(self, prompts: Sequence[Sequence[int]], max_new_tokens: Sequence[int]) -> list[list[int]]:
        """Run the prompts with tokens drawn from each, and return what the engine would have chosen instead.

        A run of an engine leaves nothing behind, so earlier requests are run again before these.
        """
        first = len(self._earlier)
        pairs = zip(prompts, max_new_tokens, strict=True)
        requests = [self._request(first + place, prompt, num_new) for place, (prompt, num_new) in enumerate(pairs)]
        arrivals = {request.id: self._num_steps for request in requests} if self._num_steps else {}
        self._run = self._record([*self._earlier, *requests], arrivals)
        self._run.first = first
        self._earlier, self._num_steps = [*self._earlier, *requests], self._run.num_steps
        return [self._run.chosen(request) for request in requests]

    def taps(self) -> Taps:
        """Return the intermediates of the last call, of rows computed twice the later ones."""
        first = self._run.first
        return {
            tap: {(request - first, position): row for (request, position), row in rows.items() if request >= first}
            for tap, rows in self._run.taps.items()
        }

    def num_preemptions(self) -> int:
        """Count the requests that had rows computed again."""
        return len({request for (request, _), count in self._run.num_computed.items() if count > 1})

    def num_cached_tokens(self) -> int:
        """Count the tokens that were found in the prefix cache: those without a row."""
        return sum(len(request.token_ids) for request in self._earlier) - len(self._run.num_computed)

    def _request(self, number: int, prompt: Sequence[int], num_new: int) -> RequestInfo:
        draw = random.Random(",".join(map(str, prompt)))
        drawn = [draw.randrange(self.vocab_size) for _ in range(num_new - 1)]
        return RequestInfo(id=number, token_ids=[*prompt, *drawn], prompt_length=len(prompt))

    def _record(self, requests: Sequence[RequestInfo], arrivals: Mapping[int, int]) -> "_Run":
        has_control = self.engine.capabilities.control is not None
        timeline = Timeline(limits=self._limits, arrivals=arrivals) if has_control else None
        schedule = Schedule.of("batched")
        with scratch_folder("harness-") as folder:
            path = folder / "recording"
            run = RunDescription(
                engine=self.engine.name, folder=path, model=ModelInfo(id=str(self.folder)), dtype=self.dtype,
                device="cpu", schedule=schedule, requests=requests,
            )  # fmt: skip
            with open_writer(self.engine, run) as writer, engine_errors(self.engine.name):
                self.engine.run(Workload(requests=requests, schedule=schedule, timeline=timeline), writer)
            with Recording.open(path, verify=False) as recording:
                return _Run.read(recording)


class _Run:
    """The record of an engine's run."""

    def __init__(self) -> None:
        self.first = 0
        """Id of the first request of the last call."""
        self.num_steps = 0
        self.taps: dict[str, dict[tuple[int, int], torch.Tensor]] = {}
        self.num_computed: Counter[tuple[int, int]] = Counter()
        """Times that a row was computed."""
        self._chosen: dict[tuple[int, int], int] = {}

    @classmethod
    def read(cls, recording: Recording) -> "_Run":
        """Copy all rows of all steps."""
        run = cls()
        for step in recording.steps:
            if step.phase != "readback":
                run._add(step)
        return run

    def chosen(self, request: RequestInfo) -> list[int]:
        """Return the engine's choices behind the prompt's last token and each later one."""
        positions = range(request.prompt_length - 1, len(request.token_ids))
        return [self._chosen.get((request.id, position), -1) for position in positions]

    def _add(self, step: Step) -> None:
        rows = list(zip(step.request.tolist(), step.position.tolist(), strict=True))
        self.num_steps += 1
        self.num_computed.update(rows)
        sampled: Any = step.sampled
        if sampled is not None:
            pairs = zip(rows, sampled.tolist(), strict=True)
            self._chosen |= {row: token for row, token in pairs if token >= 0}
        for tap in step.tap_names:
            covered = step.rows_of(tap)
            recorded_rows = rows if covered is None else [rows[row] for row in covered.tolist()]
            self.taps.setdefault(tap, {}).update(zip(recorded_rows, step.tap(tap).clone(), strict=True))
