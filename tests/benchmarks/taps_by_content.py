"""Taps found by content in HF's own models, wrapped as modules of which no name is known.

    python -m tests.benchmarks.taps_by_content [FAMILY ...]

Prints a line for each family: taps found of those there are (caches and a router's indices left out), the verdict, and
the seconds of the whole check. Names of families follow as arguments; all of the zoo's without any.
"""

import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import nn

import harness
from harness.extensions.faults.zoo.models import load, save
from harness.extensions.faults.zoo.quiet import quiet
from harness.formats.taps import Kind
from harness.oracle.model import load_model
from tests.families.architectures import architectures, why_not


class Renamed(nn.Module):
    """A model under another name, which computes all tokens again in each step."""

    def __init__(self, model: nn.Module) -> None:
        """Wrap a model."""
        super().__init__()
        self.inner = model

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Return the logits [1, T, V] of [1, T]."""
        return self.inner(input_ids, use_cache=False).logits


def line(name: str, folder: Path) -> str:
    """Check a family's tiny model and return what came of it."""
    model, begin = load(folder), time.perf_counter()
    graph = load_model(folder, dtype=torch.float32).graph
    vocabulary = model.get_input_embeddings().weight.shape[0]
    ids = torch.randint(3, vocabulary, (23,), generator=torch.Generator().manual_seed(3)).tolist()
    report = harness.check(
        Renamed(model), model=folder, prompts=[ids[:9], ids[9:]], max_new_tokens=3, schedules=["plain"]
    )
    there = [op for op in graph if op.kind not in (Kind.CACHE, Kind.CHOICE)]
    (run,) = report.runs
    lost = {op.tap for op in there} & set(run.coverage.not_offered) | {
        op.tap for op in there if op.site in run.coverage.not_offered
    }
    first = "" if run.first_divergence is None else f"{run.first_divergence.tap}"
    took = time.perf_counter() - begin
    return f"| {name} | {len(there) - len(lost)} of {len(there)} | {report.outcome} | {first} | {took:.1f} |"


def main(names: list[str]) -> None:
    """Print the table."""
    print("| family | taps found | verdict | first divergence | s |\n|---|---:|---|---|---:|", flush=True)
    for name in names or [architecture for architecture in architectures() if why_not(architecture) is None]:
        with tempfile.TemporaryDirectory() as folder, quiet():
            try:
                save(name, Path(folder))
                shown = line(name, Path(folder))
            except Exception as error:  # a line of the table says what a family ends in
                shown = f"| {name} | | {' '.join(str(error).split())[:100] or type(error).__name__} | | |"
        print(shown, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
