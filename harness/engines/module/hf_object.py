"""A model object of transformers as an engine: a user's own kernels in HF's model, run as the engine `hf` runs."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from math import prod

import torch

from harness.engines.adapter import Workload
from harness.engines.hf import HFEngine
from harness.engines.hf_forward import ShownTap
from harness.engines.module.names import operation_of
from harness.engines.module.values import evaluating
from harness.errors import Code, HarnessError
from harness.formats.recording import RecordingWriter
from harness.formats.taps import Graph
from harness.oracle.model import HFModel
from harness.oracle.rows import as_rows, token_dim
from harness.oracle.trace import unmistakable_sizes
from harness.oracle.watch import Seeing, watching


class HFObjectEngine(HFEngine):
    """Runs a model object, some modules of which may not be HF's.

    Its taps are those of HF's own model that it shows under the same paths; the others are not offered.
    """

    def __init__(self, hf: HFModel) -> None:
        """Take a model that is loaded."""
        super().__init__(hf, attention=None)
        self.name = type(hf.model).__name__

    def match_taps(self, graph: Graph) -> None:
        """See `TapMatcher.match_taps`."""
        self._hf.graph = graph  # HF's own: the object's may lack what it does not compute
        self.sources = self._find(graph)
        found = {shown.operation.tap for shown in self.sources.values()}
        self.capabilities = replace(self.capabilities, unsupported_taps=graph.not_shown(found))

    def run(self, workload: Workload, writer: RecordingWriter) -> None:
        """See `Engine.run`."""
        with evaluating(self._hf.model), _failures_are_the_engines():
            super().run(workload, writer)

    def _find(self, graph: Graph) -> dict[str, ShownTap]:
        """Run the model over a few tokens and return where it shows each tap first."""
        num_requests, (num_tokens, _) = unmistakable_sizes(self._hf)
        shape = num_requests, num_tokens
        sources, found = dict[str, ShownTap](), set[str]()

        def see(source: str, value: torch.Tensor) -> None:
            operation, dim = operation_of(graph, source), token_dim(value, *shape)
            if operation is None or dim is None or operation.tap in found:
                return
            if operation.tap == graph.logits and source != "logits":
                return  # what the model returns counts, whatever it makes it of
            if as_rows(value, dim, *shape)[0].numel() == prod(operation.shape):
                found.add(operation.tap)
                sources[source] = ShownTap(operation, dim)

        vocabulary = graph[graph.logits].shape[-1]
        ids = torch.randint(0, vocabulary, shape, generator=torch.Generator().manual_seed(0)).to(self._hf.device)
        with evaluating(self._hf.model), watching(self._hf) as watch, watch.showing(Seeing(see)):
            see("logits", self._hf.model(input_ids=ids, use_cache=False).logits)
        return sources


@contextmanager
def _failures_are_the_engines() -> Iterator[None]:
    """Let go of an error that says HF's code raised: here it was called by what is under test."""
    try:
        yield
    except HarnessError as error:
        if error.code is Code.HF_FAILED and error.__cause__ is not None:
            raise error.__cause__ from None
        raise
