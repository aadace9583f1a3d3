"""Sound recordings of HF itself under several schedules, and the golden they are compared with."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path

import pytest
import torch

from harness.engines import open_engine
from harness.formats.recording import Recording, RequestInfo
from harness.judge.compare import Requirements, compare_run
from harness.judge.compare.run import Comparison
from harness.oracle.golden import Golden
from harness.oracle.make_golden import cached_golden
from harness.oracle.model import load_model
from harness.oracle.requests import Prompt
from harness.results.check import RunResult

from ....recording_writer import record
from .recordings import Copy

LENGTHS = (11, 4, 7)
NUM_NEW = 4

REQUIRED = {field.name for field in fields(Requirements)}


def compare(actual: Recording, golden: Golden, **options: object) -> Comparison:
    """Call `compare_run`; the fields of `Requirements` are given as arguments of their own."""
    required = {name: options.pop(name) for name in REQUIRED & set(options)}
    return compare_run(actual, golden, requirements=Requirements(**required), **options)


class Bench:
    """One checkpoint in one dtype: its golden, sound recordings of it, and the comparison."""

    def __init__(self, folder: Path, dtype: torch.dtype, runs: Path) -> None:
        generator = torch.Generator().manual_seed(5)
        self.dtype = str(dtype).removeprefix("torch.")
        self.folder, self._runs = folder, runs
        self.hf = load_model(folder, dtype=dtype)
        highest = min(256, self.hf.vocab_size)
        prompts = [
            Prompt(
                token_ids=tuple(torch.randint(3, highest, (n,), generator=generator).tolist()), max_new_tokens=NUM_NEW
            )
            for n in LENGTHS
        ]
        self.golden: Golden = cached_golden(self.hf, prompts)

    def recorded(self, schedule: str = "batched", *, engine: str = "hf", label: str = "", **options: str) -> Copy:
        """Return what an engine recorded under a schedule, made once for each label, copied for each test."""
        name = "-".join([self.folder.name, self.dtype, schedule, engine, label, *options.values()])
        path = self._runs / name.replace(":", "-")
        if not path.exists():
            self.run(self.golden.requests, schedule, path, engine=engine, **options).close()
        with Recording.open(path) as recording:
            return Copy.of(recording)

    def run(
        self, requests: Sequence[RequestInfo], schedule: str, path: Path, *, engine: str = "hf", **options: str
    ) -> Recording:
        """Run an engine over some requests and open what it recorded."""
        opened = open_engine(engine, self.folder, dtype=self.dtype, device="cpu", options=options)
        record(opened, schedule, requests, path, dtype=self.dtype, model=str(self.folder))
        return Recording.open(path)

    def comparison(self, actual: Recording, **options: object) -> Comparison:
        """Compare with the golden, by replay and by propagation."""
        return compare(actual, self.golden, hf=self.hf, **options)

    def compare(self, actual: Recording, **options: object) -> RunResult:
        """Return what `comparison` found."""
        return self.comparison(actual, **options).result

    def measure(
        self,
        actual: Recording,
        *,
        expected: Recording | None = None,
        noise: Mapping[str, torch.Tensor] | None = None,
        **options: object,
    ) -> RunResult:
        """Compare with the golden without replay, which is most of the work.

        Args:
            actual: the engine's.
            expected: in the place of the golden's recording.
            noise: in the place of the golden's noise; none makes of `expected` just another engine's recording.
            given: fields of `Requirements`, and further arguments of `compare_run`.
        """
        golden = Golden(expected or self.golden.recording)
        golden.noise = dict(self.golden.noise if noise is None else noise)
        if golden.noise:
            golden.graph = self.golden.graph
        return compare(actual, golden, **options).result


@pytest.fixture(scope="session")
def bench(
    checkpoints: Path, tiny_folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Bench]:
    """Return the bench of a checkpoint, embedded or of a tiny model of a family, and a dtype."""
    runs, benches = tmp_path_factory.mktemp("runs"), {}

    def get(name: str = "qwen3-tiny", dtype: torch.dtype = torch.float32) -> Bench:
        if (name, dtype) not in benches:
            embedded = checkpoints / name
            benches[name, dtype] = Bench(embedded if embedded.exists() else tiny_folder(name), dtype, runs)
        return benches[name, dtype]

    return get


@pytest.fixture
def one(bench: Callable[..., Bench]) -> Bench:
    """Return the bench of the default checkpoint in float32."""
    return bench()


@pytest.fixture
def actual(one: Bench) -> Copy:
    """Return a sound recording of that bench, which the test may change."""
    return one.recorded()
