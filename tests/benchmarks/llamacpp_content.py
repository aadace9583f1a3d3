"""llama.cpp with the tensors of its graph shown under no name that means anything: its table of nodes is the truth."""

from collections import Counter
from collections.abc import Collection
from pathlib import Path
from typing import Any, Self

import torch

from harness.base.scratch import scratch_folder
from harness.engines.by_content import StepEngine
from harness.engines.by_content.sites import RETURNED, See, Site
from harness.engines.by_content.steps import Work
from harness.engines.llamacpp.capture import GraphWatcher
from harness.engines.llamacpp.context import Context, Model
from harness.engines.llamacpp.options import LlamaCppOptions
from harness.engines.llamacpp.tensor import Tensor
from harness.formats.checkpoint.gguf.writer import write_gguf

_VIEWS = ("NONE", "VIEW", "RESHAPE", "PERMUTE", "TRANSPOSE", "SET_ROWS")
"""Operators that make no values, or that write into the cache."""
NUM_SEQUENCES = 256


class NumberedNodes(GraphWatcher):
    """Shows the results of a step's nodes; a node is known by its operator and its number among those."""

    def __init__(self) -> None:
        """Show nothing yet."""
        super().__init__()
        self._see: See | None = None
        self._only: Collection[Site] | None = None
        self._calls = Counter[str]()
        self._sites: dict[int, Site] = {}

    def watching(self, see: See, only: Collection[Site] | None) -> Self:
        """Show the nodes of the next step."""
        self._see, self._only, self._calls, self._sites = see, only, Counter(), {}
        return self

    def wants(self, node: Tensor) -> bool:
        """See `GraphWatcher`."""
        if self._see is None or node.op in _VIEWS:
            return False
        site = Site("", self._calls[node.op], node.op)
        self._calls[node.op] += 1
        self._sites[node.address] = site
        return self._only is None or site in self._only

    def computed(self, node: Tensor) -> None:
        """See `GraphWatcher`."""
        if self._see is not None and node.address in self._sites:
            values = node.values()
            if values.is_floating_point():
                self._see(self._sites[node.address], values[0])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self._see = None
        self.raise_error()

    def returned(self, value: torch.Tensor) -> None:
        """See `Watching`."""
        if self._see is not None:
            self._see(Site("", 0, RETURNED), value)


class LlamaCpp:
    """A context of llama.cpp, driven by steps."""

    def __init__(self, path: Path) -> None:
        """Load a GGUF file."""
        self.nodes = NumberedNodes()
        self.held = Model(path)
        options = LlamaCppOptions(cache_type_k="F32", cache_type_v="F32", flash_attention="off")
        self.context = Context(self.held, options, self.nodes, num_seqs=NUM_SEQUENCES, num_cells=8192)
        self.watching = self.nodes.watching
        self.sequences: dict[int, int] = {}

    def step(self, work: Work) -> torch.Tensor:
        """See `Stepper.step`."""
        rows = []
        for request, tokens, first in work:
            sequence = self.sequences.get(request)
            if sequence is None:
                sequence = min(set(range(NUM_SEQUENCES)) - set(self.sequences.values()))
                self.sequences[request] = sequence
            rows += [(token, first + at, sequence, at == len(tokens) - 1) for at, token in enumerate(tokens)]
        self.context.decode(rows)
        return torch.stack([torch.tensor(self.context.logits(at)) for at, row in enumerate(rows) if row[3]])

    def cached(self, request: int) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
        """Return the keys and values of each layer: see `Cached`."""
        rows = self.context.read_back(self.sequences[request])
        return dict(enumerate(zip(rows.keys, rows.values, strict=True)))

    def finish(self, request: int) -> None:
        """Free a request's cells."""
        self.context.forget(self.sequences.pop(request))


def open_engine(folder: Path, *, dtype: str, device: str, options: Any) -> StepEngine:
    """Open a checkpoint: a GGUF file is made of it."""
    return engine_of(folder, folder)


def engine_of(folder: Path, right: Path) -> StepEngine:
    """Open a checkpoint; the truth is another one, which it should be."""
    with scratch_folder("harness-") as made:
        engine = LlamaCpp(write_gguf(folder, made / "model.gguf"))
    return StepEngine(lambda: engine, name="llamacpp", folder=right, dtype="float32")
