"""Sound recordings of HF itself under several schedules, and the golden they are compared with."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from harness.compare import compare_run
from harness.engines import Workload, open_engine
from harness.oracle.decoder import load_decoder
from harness.oracle.golden import Golden, Prompt, cached_golden
from harness.oracle.replay import Replayer
from harness.recording import ModelInfo, Producer, Recording, RecordingWriter
from harness.results import RunResult
from harness.schedule import parse_schedule

from .recordings import Copy

LENGTHS = (11, 4, 7)
NUM_NEW = 4


class Bench:
    """One checkpoint in one dtype: its golden, sound recordings of it, and the comparison."""

    def __init__(self, folder: Path, dtype: torch.dtype, runs: Path) -> None:
        generator = torch.Generator().manual_seed(5)
        self.dtype = str(dtype).removeprefix("torch.")
        self.folder, self._runs = folder, runs
        self.decoder = load_decoder(folder, dtype=dtype)
        self.replayer = Replayer(self.decoder)
        prompts = [
            Prompt(token_ids=tuple(torch.randint(3, 256, (n,), generator=generator).tolist()), max_new_tokens=NUM_NEW)
            for n in LENGTHS
        ]
        self.golden: Golden = cached_golden(self.decoder, prompts)

    def recorded(self, schedule: str = "batched", *, engine: str = "hf") -> Copy:
        """Return what an engine recorded under a schedule, made once, copied for each test."""
        path = self._runs / f"{self.folder.name}-{self.dtype}-{schedule}-{engine}".replace(":", "-")
        if not path.exists():
            writer = RecordingWriter(
                path,
                producer=Producer(name="tests", version="1"),
                model=ModelInfo(id=str(self.folder)),
                dtype=self.dtype,
                device="cpu",
                environment={},
                requests=self.golden.requests,
                schedule=schedule,
            )
            with writer:
                opened = open_engine(engine, self.folder, dtype=self.dtype, device="cpu")
                opened.run(Workload(requests=self.golden.requests, schedule=parse_schedule(schedule)), writer)
        with Recording.open(path) as recording:
            return Copy.of(recording)

    def compare(self, actual: Recording, **given: object) -> RunResult:
        """Compare with the golden, by replay and by propagation."""
        return self.measure(actual, **{"replayer": self.replayer} | given)

    def measure(self, actual: Recording, **given: object) -> RunResult:
        """Compare with the golden without replay, which is most of the work."""
        given = {"noise": self.golden.noise} | given
        return compare_run(actual, given.pop("expected", self.golden.recording), **given)


@pytest.fixture(scope="session")
def bench(checkpoints: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Bench]:
    """Return the bench of a checkpoint and a dtype."""
    runs, benches = tmp_path_factory.mktemp("runs"), {}

    def get(name: str = "qwen3-tiny", dtype: torch.dtype = torch.float32) -> Bench:
        if (name, dtype) not in benches:
            benches[name, dtype] = Bench(checkpoints / name, dtype, runs)
        return benches[name, dtype]

    return get
