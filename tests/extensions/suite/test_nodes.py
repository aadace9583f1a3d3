"""Nodes of a cluster: where a case may run, and what is refused before the first task. Ray itself is not needed."""

import json

import pytest

from harness.errors import Code, HarnessError
from harness.extensions.suite import nodes
from harness.extensions.suite.nodes import Look, look, refuse_differences, refuse_missing, refuse_store
from harness.extensions.suite.placement import ClusterNode, choose
from harness.extensions.suite.preflight import Installation, fingerprint, installation
from harness.extensions.suite.ray_pool import RayPool, _Running
from harness.extensions.suite.store import Store
from harness.extensions.suite.task import TASK_OUTCOME, Loss, Resources, Task, TaskResult
from harness.extensions.suite.task_queue import TaskQueue


def seen(name: str = "n", **more) -> Look:
    seen_node = {"default": installation(), "missing_models": [], "environments": {}, "store_error": None}
    return Look(name=name, **{**seen_node, **more})


def installed(*engines: str, **versions: str) -> Installation:
    return Installation(versions=versions, engines=list(engines))


def node(name: str, *, cpus: float = 2.0, gpus: float = 0.0, **more) -> ClusterNode:
    return ClusterNode(id=name, all=Resources(cpus=cpus, memory_gib=8.0, gpus=gpus), look=seen(name, **more))


@pytest.fixture
def pool():
    """A pool that is not connected to anything."""
    pool = RayPool.__new__(RayPool)
    pool._nodes = {}
    return pool


def chosen(pool, case):
    return choose(pool._nodes.values(), TaskQueue([Task(kind="case", case=case)], {case.golden_digest(): ()}))


def place(pool, case):
    placed = chosen(pool, case)
    return placed and placed[0].id


def test_a_case_goes_where_its_golden_is_and_else_where_most_is_free(pool, make_case):
    pool._nodes = {name: node(name, cpus=cpus) for name, cpus in (("a", 4.0), ("b", 2.0))}
    case = make_case("x")
    assert place(pool, case) == "a"
    tasks = [Task(kind="case", case=case)] * 2
    pool._nodes["b"].begin(tasks[0], case.golden_digest())
    assert place(pool, case) == "b"
    pool._nodes["b"].begin(tasks[1], case.golden_digest())
    assert place(pool, case) == "a"
    pool._nodes["b"].end(tasks[0])
    assert place(pool, case) == "b"


@pytest.mark.slow
def test_a_case_goes_only_where_model_environment_and_resources_are(pool, make_case):
    case = make_case("x", gpus=1.0).model_copy(update={"environment": "old"})
    old = {"old": installed("reference")}
    lacking = {
        "no model": node("no model", gpus=1.0, missing_models=["some/model"], environments=old),
        "no environment": node("no environment", gpus=1.0, environments={"old": None}),
        "no gpu": node("no gpu", environments=old),
        "no engine": node("no engine", gpus=1.0, missing_models=["some/model"], environments={"old": installed("hf")}),
    }
    pool._nodes = dict(lacking)
    assert place(pool, case) is None
    assert pool.refusal(case) == "no environment has 2 CPUs, 8 GiB, 1 GPUs; no gpu has 2 CPUs, 8 GiB"
    pool._nodes["no engine"].look.missing_models.clear()
    assert place(pool, case) is None
    pool._nodes["all"] = node("all", gpus=1.0, environments=old)
    assert place(pool, case) == "all"
    assert pool.refusal(case) is None


class StubRay:
    """Results that are said beforehand: JSON, or an error."""

    class exceptions:  # noqa: N801  as in Ray
        class RayError(Exception):
            pass

    def get(self, said):
        if isinstance(said, Exception):
            raise said
        return said


def run_and_end(pool, task, said):
    """Put a task onto its node and end it."""
    placed, group = chosen(pool, task.case)
    placed.begin(task, group.golden)
    pool._running = {said: _Running(task=task, node=placed, deadline=0.0)}
    return pool._ended(said)


@pytest.mark.slow
def test_a_node_that_loses_a_task_gets_no_other_until_it_was_looked_at_again(pool, make_case):
    pool._ray, pool._refused, task = StubRay(), set(), Task(kind="case", case=make_case("x"))
    pool._nodes = {"dead": node("dead", cpus=4.0), "sound": node("sound")}
    seen_node = run_and_end(pool, task, StubRay.exceptions.RayError("the node died\nand more")).outcome
    assert seen_node == Loss(reason="RayError on dead: the node died")
    assert place(pool, make_case("y")) == "sound"
    assert pool._refreshed == 0.0, "it is looked at again at once"
    pool._admit("dead", seen("dead").model_dump_json(), {"dead": Resources(cpus=4.0)})
    assert place(pool, make_case("y")) == "dead"
    pool._admit("dead", seen("dead", store_error="full").model_dump_json(), {"dead": Resources(cpus=4.0)})
    assert place(pool, make_case("y")) == "sound"


def test_a_golden_that_is_gone_says_nothing_of_the_node(pool, make_case):
    pool._ray, pool._nodes = StubRay(), {"a": node("a")}
    gone = json.dumps({"reason": "gone", "needs_golden": True})
    run_and_end(pool, Task(kind="case", case=make_case("x")), gone)
    assert place(pool, make_case("y")) == "a"


def test_versions_that_differ_are_refused_with_the_node_and_both_versions():
    odd_node = seen("odd", default=installed(**{**fingerprint(), "torch": "1.0"}))
    with pytest.raises(HarnessError) as caught:
        refuse_differences([seen(), odd_node])
    error = caught.value
    assert (error.code, error.where, error.actual) == (Code.NODES_DIFFER, "odd", {"torch": "1.0"})


@pytest.mark.slow
def test_an_environment_that_is_another_one_on_another_node_is_refused():
    looks = [seen("a", environments={"old": installed(torch="2")}), seen("b", environments={"old": None})]
    refuse_differences(looks)
    with pytest.raises(HarnessError, match="the environment 'old' has other versions on two nodes") as caught:
        refuse_differences([*looks, seen("c", environments={"old": installed(torch="1")})])
    assert (caught.value.where, caught.value.actual) == ("a and c", {"torch": "1"})


@pytest.mark.slow
def test_a_model_or_environment_that_no_node_has_is_refused_with_its_case(make_case):
    case = make_case("x")
    refuse_missing([seen(missing_models=["some/model"]), seen()], [case])
    with pytest.raises(HarnessError) as caught:
        refuse_missing([seen(missing_models=["some/model"])], [case])
    assert (caught.value.code, caught.value.where) == (Code.NOT_A_CHECKPOINT, "x")
    with pytest.raises(HarnessError, match="no node has the environment 'old'"):
        refuse_missing([seen(environments={"old": None})], [case.model_copy(update={"environment": "old"})])


@pytest.mark.slow
def test_an_engine_that_no_node_has_is_refused_with_its_case_and_place(make_case):
    case, without = make_case("x"), seen(default=installed("hf", "mine"))
    refuse_missing([without, seen()], [case])
    with pytest.raises(HarnessError, match="no node has an engine called 'reference'") as caught:
        refuse_missing([without], [case])
    error = caught.value
    assert (error.code, error.where, error.expected) == (Code.UNKNOWN_ENGINE, "x", "hf, mine")
    with pytest.raises(HarnessError, match="no node has an engine called 'reference' in the environment 'old'"):
        refuse_missing([seen(environments={"old": without.default})], [case.model_copy(update={"environment": "old"})])


@pytest.mark.slow
def test_a_node_says_what_it_has(tmp_path):
    store = Store(str(tmp_path / "store"))
    store.check()
    (tmp_path / "probe").write_text("probe")
    digest = store.put(tmp_path / "probe")
    models = ["qwen3-tiny", "/no/such/model"]
    environments = {"own": {}, "none": {"python": "/no/python"}}
    seen_node = Look.model_validate_json(look(models, environments, str(tmp_path / "store"), digest))
    assert seen_node.missing_models == ["/no/such/model"]
    assert seen_node.environments["own"] == seen_node.default == installation()
    assert seen_node.environments["none"] is None
    assert seen_node.default.versions == fingerprint()
    assert "reference" in seen_node.default.engines
    assert seen_node.store_error is None


def test_a_store_that_is_another_folder_on_a_node_is_refused(tmp_path):
    seen_node = Look.model_validate_json(look([], {}, str(tmp_path / "another"), "0" * 64))
    with pytest.raises(HarnessError, match="it is another folder than the driver's") as caught:
        refuse_store(seen_node, "store")
    assert caught.value.code is Code.STORE_FAILED


def test_what_a_node_has_found_comes_back(make_case, monkeypatch):
    for said in (TaskResult(verdict="pass", seconds=2.0), Loss(reason="gone", needs_golden=True)):
        monkeypatch.setattr(nodes._shelf, "run", lambda _task, _more, said=said: said)
        text = nodes.run_on_node(Task(kind="case", case=make_case("x")).model_dump_json())
        assert TASK_OUTCOME.validate_json(text) == said
