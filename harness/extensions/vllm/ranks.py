"""vLLM's processes: each rank records its own part, the parts are merged, and a process that ends is named."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from vllm.v1.engine.exceptions import EngineDeadError

from harness.base.files import scratch_folder
from harness.engines.torch_modules import Calls
from harness.engines.worker_processes import watched_processes
from harness.extensions.vllm.steps import VllmWatcher
from harness.formats.recording import ModelInfo, Producer, Recording, RecordingWriter, RequestInfo, RunInfo
from harness.formats.recording.merge import merge_ranks
from harness.formats.taps import Graph


class RankRecorder:
    """Methods added to each of vLLM's workers (`worker_extension_cls`); called by `collective_rpc`."""

    rank: int
    model_runner: Any

    def harness_begin(
        self, folder: str, graph: Mapping[str, Any], calls: Mapping[str, Any], requests: Sequence[Mapping[str, Any]]
    ) -> list[str]:
        """Begin to record into `folder/rank-N`; return what the modules do not show."""
        own = [RequestInfo(**request) for request in requests]
        self.harness_resources = ExitStack()
        writer = RecordingWriter(
            Path(folder) / f"rank-{self.rank}",
            RunInfo(
                producer=Producer(name="harness.extensions.vllm", version="rank"),
                model=ModelInfo(id="rank"),
                dtype="any",
                device="any",
            ),
            own,
        )
        self.harness_resources.enter_context(writer)
        known = Graph.from_json(graph)
        watcher = VllmWatcher(self.model_runner, known, Calls.from_json(calls), own, writer)
        self.harness_resources.enter_context(watcher)
        return list(watcher.unsupported_taps(known))

    def harness_end(self) -> None:
        """Finish the recording."""
        self.harness_resources.close()


EXTENSION = f"{RankRecorder.__module__}.{RankRecorder.__name__}"


@contextmanager
def recorded_workers(
    engine: Any, graph: Graph, calls: Calls, requests: Sequence[RequestInfo], writer: RecordingWriter
) -> Iterator[tuple[str, ...]]:
    """Record what the block does on every rank, merge it into `writer`, and yield what the modules do not show."""
    plain = [request.model_dump() for request in requests]
    with scratch_folder(".ranks-", writer.path.parent) as folder:
        plain_calls = calls.to_json()
        unsupported = engine.collective_rpc("harness_begin", args=(str(folder), graph.to_json(), plain_calls, plain))
        yield tuple(unsupported[0])
        engine.collective_rpc("harness_end")
        with ExitStack() as stack:
            ranks = [stack.enter_context(Recording.open(folder / f"rank-{rank}")) for rank in range(len(unsupported))]
            merge_ranks(ranks, graph, writer)


def watched_workers(engine: Any) -> AbstractContextManager[None]:
    """Name the process of the engine that ends in the block; see `watched_processes`."""
    client = engine.engine_core
    return watched_processes("vLLM", _processes(client), wake=partial(_end_waiting, client))


def _processes(client: Any) -> dict[str, BaseProcess]:
    """Return the processes that an engine has started by itself."""
    if hasattr(client, "resources"):
        (core,) = client.resources.engine_manager.processes
        return {"vLLM's engine core": core}
    workers = getattr(client.engine_core.model_executor, "workers", ())
    return {f"rank {worker.rank} of {len(workers)}": worker.proc for worker in workers}


def _end_waiting(client: Any) -> None:
    """Let a client raise whose engine core has ended: vLLM's own waits without end (reports/cpu/vllm_dead_core.py)."""
    if hasattr(client, "outputs_queue"):
        client.outputs_queue.put(EngineDeadError())
        for answer in list(client.utility_results.values()):
            answer.set_exception(EngineDeadError())
