"""Tasks on the nodes of a Ray cluster: placed by what nodes have and what is free on them."""

import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.base.files import scratch_folder
from harness.errors import Code, HarnessError
from harness.extensions.suite.nodes import (
    Look,
    connected,
    look,
    refuse_differences,
    refuse_missing,
    refuse_store,
    run_on_node,
)
from harness.extensions.suite.placement import ClusterNode, choose
from harness.extensions.suite.pool import START_LIMIT_S, Ended
from harness.extensions.suite.preflight import fingerprint
from harness.extensions.suite.store import Store
from harness.extensions.suite.task import GIB, TASK_OUTCOME, Environment, Loss, Resources, SuiteCase, Task
from harness.extensions.suite.task_queue import TaskQueue

_REFRESH_S = 2.0
_LOOK_LIMIT_S = 300.0
_SILENCE_S = 300.0
"""Time beyond a task's limit and its process's start after which its node is taken for hung."""


@dataclass(slots=True, kw_only=True)
class _Running:
    task: Task
    node: ClusterNode
    deadline: float


class RayPool:
    """Tasks of Ray's, one a task of ours, never retried by Ray itself."""

    def __init__(
        self, address: str, cases: Sequence[SuiteCase], environments: Mapping[str, Environment], store: str
    ) -> None:
        """Connect to a cluster and look at its nodes.

        The address is HOST:PORT of the head, or `auto` for the cluster of this machine; all nodes reach the store.

        Raises:
            HarnessError: NO_CLUSTER; STORE_FAILED; NODES_DIFFER; NOT_A_CHECKPOINT: no node has a model of the suite;
                BAD_SUITE: no node has an environment. UNKNOWN_ENGINE: no node has an engine.
        """
        self._ray = connected(address)
        self._models = sorted({case.case.model for case in cases})
        self._environments = {name: environment.model_dump() for name, environment in environments.items()}
        self._store = store
        self._run: Any = self._ray.remote(max_retries=0)(run_on_node)
        self._look: Any = self._ray.remote(max_retries=0, num_cpus=0)(look)
        self._nodes: dict[str, ClusterNode] = {}
        self._running: dict[Any, _Running] = {}
        self._looks: dict[Any, str] = {}
        self._refused: set[str] = set()
        self._refreshed = 0.0
        try:
            self._probe = _put_probe(store)
            self._look_at_all(cases)
        except BaseException:
            self._ray.shutdown()
            raise

    @property
    def num_workers(self) -> int:
        """See `Pool.num_workers`."""
        return max(1, int(sum(node.all.cpus for node in self._nodes.values())))

    def refusal(self, case: SuiteCase) -> str | None:
        """See `Pool.refusal`."""
        if any(node.has(case) for node in self._nodes.values()):
            return None
        having = [node for node in self._nodes.values() if case.case.model not in node.look.missing_models]
        return "; ".join(f"{node.look.name} has {node.all}" for node in having[:3]) or "no node is left"

    def start(self, queue: TaskQueue) -> Task | None:
        """See `Pool.start`."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        chosen = choose(self._nodes.values(), queue)
        if chosen is None:
            return None
        node, group = chosen
        task = queue.take(group)
        resources = task.case.resources
        reference = self._run.options(
            num_cpus=resources.cpus,
            num_gpus=resources.gpus,
            memory=int(resources.memory_gib * GIB) or None,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=node.id, soft=False),
            name=task.label,
        ).remote(task.model_dump_json())
        node.begin(task, group.golden)
        deadline = time.monotonic() + task.case.time_limit_s + START_LIMIT_S + _SILENCE_S
        self._running[reference] = _Running(task=task, node=node, deadline=deadline)
        return task

    def wait(self, timeout_s: float) -> list[Ended]:
        """See `Pool.wait`."""
        self._refresh()
        if not self._running:
            time.sleep(timeout_s)
            return []
        self._ray.wait(list(self._running), num_returns=1, timeout=timeout_s)
        done, _ = self._ray.wait(list(self._running), num_returns=len(self._running), timeout=0)
        return [self._ended(reference) for reference in done] + self._give_up_silent()

    def close(self) -> None:
        """See `Pool.close`."""
        self._ray.shutdown()

    def _ended(self, reference: Any) -> Ended:
        running = self._running.pop(reference)
        running.node.end(running.task)
        name = running.node.look.name
        try:
            outcome = TASK_OUTCOME.validate_json(self._ray.get(reference))
        except self._ray.exceptions.RayError as error:
            outcome = Loss(reason=_reason(error, name))
        if isinstance(outcome, Loss) and not outcome.needs_golden:
            running.node.is_trusted, self._refreshed = False, 0.0
        return Ended(task=running.task, outcome=outcome, node=name)

    def _give_up_silent(self) -> list[Ended]:
        now, silent = time.monotonic(), []
        for reference, running in list(self._running.items()):
            if now > running.deadline:
                self._ray.cancel(reference, force=True)
                del self._running[reference]
                running.node.end(running.task)
                loss = Loss(reason=f"node {running.node.look.name} gave no answer long after the time limit")
                silent.append(Ended(task=running.task, outcome=loss, node=running.node.look.name))
        return silent

    def _refresh(self) -> None:
        """Forget nodes that are lost, and look at new ones; those are used once they are seen to be like the others."""
        if time.monotonic() - self._refreshed < _REFRESH_S:
            return
        self._refreshed = time.monotonic()
        alive = self._alive()
        self._nodes = {id: node for id, node in self._nodes.items() if id in alive}
        trusted = {id for id, node in self._nodes.items() if node.is_trusted}
        for id in alive.keys() - trusted - set(self._looks.values()) - self._refused:
            self._looks[self._look_at(id)] = id
        done, _ = self._ray.wait(list(self._looks), num_returns=len(self._looks), timeout=0) if self._looks else ([], 0)
        for reference in done:
            self._admit(self._looks.pop(reference), reference, alive)

    def _admit(self, id: str, reference: Any, alive: Mapping[str, Resources]) -> None:
        try:
            seen = Look.model_validate_json(self._ray.get(reference))
        except self._ray.exceptions.RayError:
            return  # it is lost already, or is looked at once more
        if seen.default.versions != fingerprint() or seen.store_error or id not in alive:
            self._refused.add(id)
            self._nodes.pop(id, None)
        elif id in self._nodes:
            self._nodes[id].is_trusted = True
        else:
            self._nodes[id] = ClusterNode(id=id, all=alive[id], look=seen)

    def _alive(self) -> dict[str, Resources]:
        """Return the nodes that are there, by id, with all that they have."""
        nodes = {}
        for node in self._ray.nodes():
            has = node["Resources"]
            if node["Alive"] and has.get("CPU"):
                memory, gpus = has.get("memory", 0.0) / GIB, has.get("GPU", 0.0)
                nodes[node["NodeID"]] = Resources(cpus=float(has["CPU"]), memory_gib=memory, gpus=float(gpus))
        return nodes

    def _look_at(self, id: str) -> Any:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        strategy = NodeAffinitySchedulingStrategy(node_id=id, soft=False)
        options = self._look.options(scheduling_strategy=strategy, name="look at the node")
        return options.remote(self._models, self._environments, self._store, self._probe)

    def _look_at_all(self, cases: Sequence[SuiteCase]) -> None:
        alive = self._alive()
        references = {id: self._look_at(id) for id in alive}
        for id, reference in references.items():
            try:
                seen = Look.model_validate_json(self._ray.get(reference, timeout=_LOOK_LIMIT_S))
            except self._ray.exceptions.RayError as error:
                raise _no_harness(id, error) from error
            refuse_store(seen, self._store)
            self._nodes[id] = ClusterNode(id=id, all=alive[id], look=seen)
        refuse_differences([node.look for node in self._nodes.values()])
        refuse_missing([node.look for node in self._nodes.values()], cases)


def _put_probe(url: str) -> str:
    store = Store(url, patience_s=0.0)
    store.check()
    with scratch_folder("harness-") as folder:
        file = Path(folder) / "probe"
        file.write_text(f"{socket.gethostname()} {time.time_ns()}")
        return store.put(file)


def _no_harness(id: str, error: Exception) -> HarnessError:
    reason = next((line for line in reversed(str(error).splitlines()) if line.strip()), type(error).__name__)
    hint = "install the same inference-harness on every node"
    return HarnessError(Code.NODES_DIFFER, f"a node cannot run the harness: {reason}", where=f"node {id}", hint=hint)


def _reason(error: Exception, node: str) -> str:
    """Say in a line why Ray has no result: a worker was killed, a node was lost, a result went with it."""
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__} on {node}: {first[:300]}"
