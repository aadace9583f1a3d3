"""Sound recordings of the reference engine, in which a test replaces one tap by what a mistake would have given."""

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch

from harness.compare.align import Rows, step_rows
from harness.engines import Workload, open_engine
from harness.errors import Code
from harness.explain import explain_run
from harness.oracle.decoder import load_decoder
from harness.oracle.golden import Prompt, cached_golden
from harness.oracle.replay import Replayer
from harness.recording import ModelInfo, Producer, Recording, RecordingWriter
from harness.recording.reader import Step
from harness.results import Coverage, Explanation, Finding, Outcome, RunResult, TokenResult
from harness.schedule import parse_schedule

LENGTHS = (37, 11)
NUM_NEW = 5
BLOCK_SIZE = 8


class PlantedStep:
    """A step of a recording, some of whose tensors a test has replaced."""

    def __init__(self, step: Step, replaced: Mapping[str, object]) -> None:
        self._step, self._replaced = step, replaced

    def __getattr__(self, name: str) -> object:
        return self._replaced[name] if name in self._replaced else getattr(self._step, name)

    def tap(self, name: str) -> torch.Tensor:
        return self._replaced[name] if name in self._replaced else self._step.tap(name)


class Bench:
    """One checkpoint in one dtype: a recording under one schedule, and the explanation of what is planted in it."""

    def __init__(self, folder: Path, dtype: torch.dtype, schedule: str, path: Path) -> None:
        generator = torch.Generator().manual_seed(11)
        name = str(dtype).removeprefix("torch.")
        self.decoder = load_decoder(folder, dtype=dtype)
        self.replayer = Replayer(self.decoder)
        self.config, self.head_dim, self.dtype = self.decoder.config, self.decoder.head_dim(), dtype
        prompts = [
            Prompt(token_ids=tuple(torch.randint(3, 256, (n,), generator=generator).tolist()), max_new_tokens=NUM_NEW)
            for n in LENGTHS
        ]
        self.golden = cached_golden(self.decoder, prompts)
        writer = RecordingWriter(
            path,
            producer=Producer(name="tests", version="1"),
            model=ModelInfo(id=str(folder)),
            dtype=name,
            device="cpu",
            environment={},
            requests=self.golden.requests,
            schedule=schedule,
        )
        with writer:
            engine = open_engine("reference", folder, dtype=name, device="cpu", options={"block_size": str(BLOCK_SIZE)})
            engine.run(Workload(requests=self.golden.requests, schedule=parse_schedule(schedule)), writer)
        self.recording = Recording.open(path, verify=False)
        self.tensors: dict[str, torch.Tensor] = {}

    def steps(self, tap: str) -> list[Step]:
        """Return the steps that have a tap."""
        return [step for step in self.recording.steps if step.has(tap)]

    def rows(self, tap: str = "model.layers.0.q_rope") -> Rows:
        """Return the rows of a tap, over all steps."""
        return Rows.concat([step_rows(step, tap) for step in self.steps(tap)])

    def tap(self, name: str) -> torch.Tensor:
        """Return a tap over all steps, [rows, width] float64."""
        if name not in self.tensors:
            self.tensors[name] = torch.cat([step.tap(name).flatten(1) for step in self.steps(name)]).double()
        return self.tensors[name].clone()

    def weight(self, module: str) -> torch.Tensor:
        """Return a weight in float64."""
        return self.decoder.module(module).weight.detach().double()

    def planted(self, taps: Mapping[str, torch.Tensor]) -> Recording:
        """Return the recording with some taps replaced, given as `tap` returns them."""
        parts: dict[int, dict[str, object]] = {}
        for name, tensor in taps.items():
            steps = self.steps(name)
            pieces = tensor.to(self.dtype).split([len(step.tap(name)) for step in steps])
            for step, piece in zip(steps, pieces, strict=True):
                parts.setdefault(step.index, {})[name] = piece.view_as(step.tap(name))
        return self.replaced(parts)

    def replaced(self, parts: Mapping[int, Mapping[str, object]]) -> Recording:
        """Return the recording with tensors or properties of some steps replaced, by the steps' indices."""
        steps = [PlantedStep(step, parts.get(step.index, {})) for step in self.recording.steps]
        return Recording(self.recording.path, self.recording.manifest, steps)

    def explain(
        self, tap: str, tensor: torch.Tensor, *, code: Code = Code.LOCAL_ERROR, **others: object
    ) -> Explanation:
        """Return the explanation of a tap that holds `tensor` instead of what it should."""
        explanation = self.explained(self.planted({tap: tensor, **others}), tap, code)
        assert explanation is not None
        return explanation

    def explained(
        self,
        recording: Recording,
        tap: str,
        code: Code = Code.LOCAL_ERROR,
        request: int | None = None,
        position: int | None = None,
    ) -> Explanation | None:
        """Return the explanation of a finding on a tap."""
        finding = Finding(code=code, message="", tap=tap, request=request, position=position)
        run = RunResult(
            schedule="plain",
            outcome=Outcome.MISMATCH,
            num_rows=0,
            taps=(),
            findings=(finding,),
            first_divergence=None,
            tokens=TokenResult(),
            logits=None,
            coverage=Coverage(),
        )
        noise = self.golden.noise
        return explain_run(run, recording, self.golden.recording, self.replayer, noise).findings[0].explanation


@pytest.fixture(scope="session")
def bench(checkpoints: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Bench]:
    """Return the bench of a checkpoint, a dtype and a schedule; recorded once."""
    runs, benches = tmp_path_factory.mktemp("explain"), {}

    def get(name: str = "qwen3-tiny", dtype: torch.dtype = torch.float32, schedule: str = "batched") -> Bench:
        key = (name, dtype, schedule)
        if key not in benches:
            benches[key] = Bench(checkpoints / name, dtype, schedule, runs / f"run-{len(benches)}")
        return benches[key]

    return get
