"""Which task goes to which node: a golden is made or fetched by as few nodes as keep all of them busy.

A node that has room takes what waits of the goldens that it has, and else of the models that it has run. Only if there
is nothing of its own left it takes another golden, the one with most tasks for each node that has it: in the end all
nodes help with what is left. So a golden travels to 2 nodes of 100, not to half of them.
"""

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from harness.extensions.suite.nodes import Look
from harness.extensions.suite.task import Resources, SuiteCase, Task
from harness.extensions.suite.task_queue import TaskGroup, TaskGroups, TaskQueue


@dataclass(slots=True, kw_only=True)
class ClusterNode:
    """A node, and what of it is in use."""

    id: str
    all: Resources
    look: Look
    running: list[Resources] = field(default_factory=list)
    models: set[str] = field(default_factory=set)
    """Models that it has run: their weights are in its memory, as far as it reaches."""
    goldens: set[str] = field(default_factory=set)
    """Digests of goldens that it has made or fetched."""
    free: Resources = field(init=False)
    """What no task of ours occupies."""
    is_trusted: bool = True
    """False from a loss on it until it has been looked at again. A node that is dead, or whose disk is full, ends every
    task at once: it would take all that there are before that is noticed."""

    def __post_init__(self) -> None:
        self.free = self.all

    def begin(self, task: Task, golden: str) -> None:
        """Note that the node runs a task."""
        self.models.add(task.case.case.model)
        self.goldens.add(golden)
        self._occupy([*self.running, task.case.resources])

    def end(self, task: Task) -> None:
        """Note that a task has ended."""
        self.running.remove(task.case.resources)
        self._occupy(self.running)

    def _occupy(self, running: list[Resources]) -> None:
        self.running = running
        self.free = Resources.model_construct(
            cpus=self.all.cpus - sum(item.cpus for item in running),
            memory_gib=self.all.memory_gib - sum(item.memory_gib for item in running),
            gpus=self.all.gpus - sum(item.gpus for item in running),
        )

    def fits(self, group: TaskGroup) -> bool:
        """Return whether the node can run a task of a group now."""
        return group.case.resources.within(self.free) and self.has(group.case)

    def has(self, case: SuiteCase) -> bool:
        """Return whether the node has the model, environment and engine, and, when it is idle, the resources."""
        place = self.look.installed(case.environment)
        has_engine = place is not None and case.case.engine in place.engines
        return case.case.model not in self.look.missing_models and has_engine and case.resources.within(self.all)


def choose(nodes: Collection[ClusterNode], queue: TaskQueue) -> tuple[ClusterNode, TaskGroup] | None:
    """Return the task that runs next, as the first of its group, and its node; None where nothing has room.

    Goldens come before cases. Of the nodes with room, one that has the golden of a task comes first, then the one with
    most CPUs that are free.
    """
    roomy = [node for node in nodes if node.is_trusted and node.free.cpus > 0]
    roomy.sort(key=lambda node: -node.free.cpus)
    for groups in (queue.goldens, queue.cases) if roomy else ():
        chosen = _choose_held(roomy, groups) or _choose_lacking(roomy, groups, nodes)
        if chosen is not None:
            return chosen
    return None


def _choose_held(roomy: Iterable[ClusterNode], groups: TaskGroups) -> tuple[ClusterNode, TaskGroup] | None:
    """Choose among the goldens that a node has."""
    for node in roomy:
        there = [golden for golden in node.goldens if golden in groups]
        fitting = [group for golden in there for group in groups.of(golden) if node.fits(group)]
        if fitting:
            return node, max(fitting, key=lambda group: (len(group.tasks), group.golden))
    return None


def _choose_lacking(
    roomy: Iterable[ClusterNode], groups: TaskGroups, nodes: Iterable[ClusterNode]
) -> tuple[ClusterNode, TaskGroup] | None:
    """Choose a golden that a node lacks: of a model that it has run, and with most tasks for each node."""
    asked = {group.asked: group.case.resources for group in groups}.values()
    for node in roomy:
        has_room = any(resources.within(node.free) for resources in asked)
        if has_room and (fitting := [group for group in groups if node.fits(group)]):
            num_nodes = Counter(golden for having in nodes for golden in having.goldens)
            return node, max(
                fitting,
                key=lambda group: (
                    group.case.case.model in node.models, len(group.tasks) / (num_nodes[group.golden] + 1)
                ),
            )  # fmt: skip
    return None
