"""Placement on nodes, simulated: goldens go to few nodes, no node idles while there is work, and cases end as soon."""

import heapq
import itertools
import random
from collections import Counter

import pytest

from harness.extensions.suite.nodes import Look
from harness.extensions.suite.placement import ClusterNode, choose
from harness.extensions.suite.preflight import Installation
from harness.extensions.suite.task import Resources, StoredGolden, SuiteCase, Task
from harness.extensions.suite.task_queue import TaskQueue
from harness.formats.case import Case, RequestSpec

ENGINE = "reference"
HAS = Installation(versions={}, engines=[ENGINE])


def nodes_of(number: int, cpus: float) -> list[ClusterNode]:
    looks = [
        Look(name="node", default=HAS, missing_models=[], environments={}, store_error=None) for _ in range(number)
    ]
    return [ClusterNode(id=str(at), all=Resources(cpus=cpus), look=look) for at, look in enumerate(looks)]


def tasks_of(num_models: int, num_goldens: int, num_cases: int, **resources: float) -> list[Task]:
    """Return the cases of some models, each of which has some goldens."""
    tasks = []
    for model, golden in itertools.product(range(num_models), range(num_goldens)):
        spec = RequestSpec(token_ids=[golden, 2])
        case = Case(schema_version=1, model=f"model {model}", engine=ENGINE, requests=[spec])
        for at in range(num_cases):
            suite_case = SuiteCase(
                name=f"{model} {golden} {at}", case=case, labels={}, resources=Resources(**resources)
            )
            tasks.append(Task(kind="case", case=suite_case))
    return tasks


class Cluster:
    """Runs a suite on nodes in virtual time, each task on the node that `choose` gives it."""

    def __init__(self, nodes: list[ClusterNode], tasks: list[Task], *, are_goldens_there: bool, seed: int = 0) -> None:
        stored = {task.case.golden_digest(): () for task in tasks} if are_goldens_there else {}
        self.nodes, self.queue = nodes, TaskQueue(tasks, stored)
        self.random, self.now, self.ran = random.Random(seed), 0.0, Counter[str]()
        self.events: list[tuple[float, int, ClusterNode, Task]] = []
        self.places: dict[str, set[str]] = {}
        """By golden: the nodes that have made or fetched it."""

    def run(self) -> None:
        while len(self.queue) or self.events:
            while (chosen := choose(self.nodes, self.queue)) is not None:
                self.begin(*chosen)
            self.end(*heapq.heappop(self.events))

    def begin(self, node: ClusterNode, group) -> None:
        task = self.queue.take(group)
        assert task.case.resources.within(node.free)
        node.begin(task, group.golden)
        self.places.setdefault(group.golden, set()).add(node.id)
        ends = self.now + self.random.lognormvariate(3.4, 0.5)
        heapq.heappush(self.events, (ends, len(self.ran) + len(self.events), node, task))

    def end(self, now: float, _: int, node: ClusterNode, task: Task) -> None:
        self.now = now
        node.end(task)
        self.ran[f"{task.kind} {task.case.name}"] += 1
        if task.kind == "golden":
            self.queue.release(task, [StoredGolden(name="golden", index="0")])

    @property
    def nodes_per_golden(self) -> float:
        return sum(map(len, self.places.values())) / len(self.places)


@pytest.mark.slow
@pytest.mark.parametrize(("are_goldens_there", "most_nodes"), [(True, 2.0), (False, 4.0)])
def test_a_golden_goes_to_few_of_100_nodes_and_the_suite_ends_as_soon(are_goldens_there, most_nodes):
    """10,000 cases of 100 models. In the order of the queue a golden went to 55 nodes, in 356 s."""
    tasks = tasks_of(100, 1, 100)
    cluster = Cluster(nodes_of(100, 16.0), tasks, are_goldens_there=are_goldens_there)
    cluster.run()
    ran = Counter({f"case {task.case.name}": 1 for task in tasks})
    assert Counter({name: times for name, times in cluster.ran.items() if name.startswith("case")}) == ran
    assert cluster.nodes_per_golden < most_nodes
    assert cluster.now < 380.0


@pytest.mark.parametrize("are_goldens_there", [True, False])
def test_no_node_idles_while_something_waits_that_it_can_run(are_goldens_there):
    """Models that some nodes lack, nodes with GPUs, cases of different sizes."""
    nodes = nodes_of(6, 4.0)
    for at, node in enumerate(nodes):
        node.look.missing_models.append(f"model {at}")
        node.all = node.free = Resources(cpus=4.0, gpus=float(at % 2))
    tasks = [*tasks_of(7, 1, 9), *tasks_of(2, 3, 4, gpus=1.0), *tasks_of(3, 2, 3, cpus=3.0)]
    cluster = Cluster(nodes, tasks, are_goldens_there=are_goldens_there)
    begin = cluster.begin

    def begin_checked(node, group):
        assert f"model {node.id}" != group.case.case.model, "the node lacks it"
        begin(node, group)

    cluster.begin = begin_checked
    while len(cluster.queue) or cluster.events:
        while (chosen := choose(nodes, cluster.queue)) is not None:
            cluster.begin(*chosen)
        assert not any(node.fits(group) for node in nodes for group in cluster.queue.groups())
        cluster.end(*heapq.heappop(cluster.events))
    assert sum(times for name, times in cluster.ran.items() if name.startswith("case")) == len(tasks)


def placed(nodes: list[ClusterNode], tasks: list[Task]) -> tuple[str, str] | None:
    """Return the node and the model of the task that is placed first."""
    queue = TaskQueue(tasks, {task.case.golden_digest(): () for task in tasks})
    chosen = choose(nodes, queue)
    return None if chosen is None else (chosen[0].id, chosen[1].case.case.model)


def test_a_node_takes_first_what_waits_of_its_goldens_then_what_waits_most():
    few, many = tasks_of(1, 1, 2), tasks_of(2, 1, 5)[5:]
    nodes = nodes_of(2, 2.0)
    assert placed(nodes, [*few, *many]) == ("0", "model 1")
    nodes[1].goldens.add(few[0].case.golden_digest())
    assert placed(nodes, [*few, *many]) == ("1", "model 0")
    nodes[1].is_trusted = False
    assert placed(nodes, [*few, *many]) == ("0", "model 1")


def test_a_node_takes_another_golden_of_a_model_that_it_has_run_before_one_of_another_model():
    nodes, tasks = nodes_of(1, 2.0), [*tasks_of(1, 2, 2), *tasks_of(2, 1, 5)[5:]]
    assert placed(nodes, tasks[2:]) == ("0", "model 1")
    nodes[0].models.add("model 0")
    assert placed(nodes, tasks[2:]) == ("0", "model 0")


def test_a_golden_that_many_nodes_have_is_taken_by_another_node_only_if_more_waits_for_each():
    nodes, tasks = nodes_of(4, 1.0), [*tasks_of(1, 1, 8), *tasks_of(2, 1, 3)[3:]]
    for node in nodes[:3]:
        node.begin(tasks[0], tasks[0].case.golden_digest())
    assert placed(nodes, tasks) == ("3", "model 1")
    nodes[2].goldens.clear()
    nodes[1].goldens.clear()
    assert placed(nodes, tasks) == ("3", "model 0")
