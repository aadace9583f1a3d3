"""vLLM's worker processes, one for each rank: each records its own part, and the parts are merged."""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from harness.engines.vllm.steps import VllmWatcher
from harness.recording import ModelInfo, Producer, Recording, RecordingWriter, RequestInfo
from harness.recording.merge import merge_ranks
from harness.taps import Graph


class RankRecorder:
    """What vLLM adds to each of its workers (`worker_extension_cls`); called by `collective_rpc`."""

    rank: int
    model_runner: Any

    def harness_begin(self, folder: str, graph: Mapping[str, Any], requests: Sequence[Mapping[str, Any]]) -> list[str]:
        """Begin to record into `folder/rank-N`; return what the modules do not show."""
        own = [RequestInfo(**request) for request in requests]
        self.harness_resources = ExitStack()
        writer = RecordingWriter(
            Path(folder) / f"rank-{self.rank}",
            producer=Producer(name="harness.engines.vllm", version="rank"),
            model=ModelInfo(id="rank"),
            dtype="any",
            device="any",
            environment={},
            requests=own,
        )
        self.harness_resources.enter_context(writer)
        known = Graph.from_json(graph)
        watcher = self.harness_resources.enter_context(VllmWatcher(self.model_runner, known, own, writer))
        return list(watcher.unsupported_taps(known))

    def harness_end(self) -> None:
        """Finish the recording."""
        self.harness_resources.close()


EXTENSION = f"{RankRecorder.__module__}.{RankRecorder.__name__}"


@contextmanager
def recorded_workers(
    engine: Any, graph: Graph, requests: Sequence[RequestInfo], writer: RecordingWriter
) -> Iterator[tuple[str, ...]]:
    """Record what the block does on every rank, merge it into `writer`, and yield what the modules do not show."""
    plain = [request.model_dump() for request in requests]
    with tempfile.TemporaryDirectory(prefix="ranks-", dir=writer.path.parent) as folder:
        unsupported = engine.collective_rpc("harness_begin", args=(folder, graph.to_json(), plain))
        yield tuple(unsupported[0])
        engine.collective_rpc("harness_end")
        with ExitStack() as stack:
            ranks = [
                stack.enter_context(Recording.open(Path(folder) / f"rank-{rank}")) for rank in range(len(unsupported))
            ]
            merge_ranks(ranks, graph, writer)
