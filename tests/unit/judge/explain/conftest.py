"""Sound recordings of the reference engine, in which a test replaces one tap by what a mistake would have given."""

from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from harness.engines import open_engine
from harness.errors import Code
from harness.formats.recording import Recording
from harness.formats.recording.reader import Step
from harness.formats.taps import Kind
from harness.judge.compare import compare_run
from harness.judge.compare.align import Locator, Rows, step_rows
from harness.judge.compare.cache import cache_errors
from harness.judge.compare.local import LocalJudgement, local_errors
from harness.judge.compare.run import Comparison
from harness.judge.explain import explain_run
from harness.oracle.make_golden import cached_golden
from harness.oracle.model import load_model
from harness.oracle.requests import Prompt
from harness.results.check import Coverage, Explanation, Finding, Outcome, RunResult, TokenResult
from reference_engine.checkpoint.families import FAMILIES

from ....recording_writer import record
from .toy_attention import Toy

LENGTHS = (37, 11)
NUM_NEW = 5
BLOCK_SIZE = 8


class PlantedStep:
    """A step of a recording, some of whose tensors a test has replaced."""

    kept = None  # beside other steps

    def __init__(self, step: Step, replaced: Mapping[str, object]) -> None:
        self._step, self._replaced = step, replaced

    def __getattr__(self, name: str) -> object:
        return self._replaced[name] if name in self._replaced else getattr(self._step, name)

    def tap(self, name: str) -> torch.Tensor:
        return self._replaced[name] if name in self._replaced else self._step.tap(name)

    def beside(self, name: str) -> tuple[torch.Tensor, int]:
        return self.tap(name), 0


class Bench:
    """One checkpoint in one dtype: a recording under one schedule, and the explanation of what is planted in it."""

    def __init__(self, folder: Path, dtype: torch.dtype, schedule: str, path: Path) -> None:
        generator = torch.Generator().manual_seed(11)
        name = str(dtype).removeprefix("torch.")
        self.hf = load_model(folder, dtype=dtype)
        self.config, self.head_dim, self.dtype = self.hf.config, self.hf.head_dim, dtype
        highest = min(256, self.hf.vocab_size)
        prompts = [
            Prompt(
                token_ids=tuple(torch.randint(3, highest, (n,), generator=generator).tolist()), max_new_tokens=NUM_NEW
            )
            for n in LENGTHS
        ]
        self.golden = cached_golden(self.hf, prompts)
        is_served = self.hf.config.model_type in FAMILIES
        options = {"block_size": str(BLOCK_SIZE)} if is_served else {}
        engine = open_engine("reference" if is_served else "hf", folder, dtype=name, device="cpu", options=options)
        record(engine, schedule, self.golden.requests, path, dtype=dtype, model=str(folder))
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
        return self.hf.module(module).weight.detach().double()

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
        """Return the explanation of a finding on a tap; nothing but that tap is judged."""
        finding = Finding(code=code, message="", tap=tap, request=request, position=position)
        run = RunResult(
            schedule="plain",
            outcome=Outcome.MISMATCH,
            num_rows=0,
            taps=tuple(SimpleNamespace(name=name, verdict=None) for name in self._usable(tap)),  # type: ignore[misc]
            findings=(finding,),
            first_divergence=None,
            tokens=TokenResult(),
            logits=None,
            coverage=Coverage(),
        )
        explanation = self._judged(run, recording, tap)
        return explain_run(explanation, recording, self.golden, self.hf).findings[0].explanation

    def _usable(self, tap: str) -> set[str]:
        return {tap, *self.hf.graph[tap].inputs} if tap in self.hf.graph else set()

    def _judged(self, run: RunResult, recording: Recording, tap: str) -> Comparison:
        graph, local, caches = self.hf.graph, LocalJudgement(), {}
        usable = self._usable(tap)
        if usable and graph[tap].kind is Kind.CACHE:
            theirs = Locator(self.golden.recording)
            errors = cache_errors(Locator(recording), graph, usable, theirs, self.golden.noise)
            caches = {operation.tap: item for operation, item in errors}
        elif usable:
            local = local_errors(recording, self.hf, usable)
        return Comparison(result=run, expected=self.golden, errors={**local.errors, **caches}, evidence=local.evidence)

    def compare(self, recording: Recording) -> Comparison:
        """Compare all of a recording with the golden."""
        return compare_run(recording, self.golden, hf=self.hf)


@pytest.fixture(scope="session")
def bench_of(
    checkpoints: Path, tiny_folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Bench]:
    """Return the bench of a checkpoint, embedded or of a tiny model of a family, in a dtype and under a schedule."""
    runs, benches = tmp_path_factory.mktemp("explain"), {}

    def get(name: str = "qwen3-tiny", dtype: torch.dtype = torch.float32, schedule: str = "batched") -> Bench:
        key = (name, dtype, schedule)
        if key not in benches:
            folder = checkpoints / name if (checkpoints / name).exists() else tiny_folder(name)
            benches[key] = Bench(folder, dtype, schedule, runs / f"run-{len(benches)}")
        return benches[key]

    return get


@pytest.fixture(scope="session")
def bench(bench_of: Callable[..., Bench]) -> Bench:
    """Return the bench of the default checkpoint in float32."""
    return bench_of()


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    """Return a recording of attention that is made by hand."""
    return Toy(tmp_path_factory.mktemp("toy") / "r")
