"""The nodes of a cluster: the look at a node before it is used, what is refused, and tasks in processes.

A process of the cluster's lends its place to a process of ours, which has the imports, may crash and hang, and is ended
with it. So time limits and crashes are told apart in one way here and on a cluster.
"""

import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from harness.base.files import scratch_folder
from harness.errors import Code, HarnessError
from harness.extensions.suite.pool import ProcessShelf
from harness.extensions.suite.preflight import (
    Installation,
    fingerprint,
    installation,
    installed_in,
    missing_models,
    node_name,
    unknown_engine,
)
from harness.extensions.suite.store import DamagedBlobError, Store
from harness.extensions.suite.task import TASK_OUTCOME, Environment, SuiteCase, Task

_shelf = ProcessShelf(1)
"""Of this process: it runs one task at a time."""


class Look(BaseModel):
    """The machine and the versions of a node."""

    model_config = ConfigDict(extra="forbid")

    name: str
    default: Installation
    """Of the Python that the cluster runs there."""
    missing_models: list[str]
    environments: dict[str, Installation | None]
    """By name of an environment: what it has, None if it cannot run the harness."""
    store_error: str | None

    def installed(self, environment: str | None) -> Installation | None:
        """Return what an environment has, None being the node's own; None if it is not there."""
        return self.default if environment is None else self.environments.get(environment)


def look(models: Sequence[str], environments: Mapping[str, Mapping[str, Any]], store: str, probe: str) -> str:
    """Return a `Look` as JSON.

    Each environment is given as its fields; `probe` is the digest of a file that the driver has put into the store.
    """
    seen = Look(
        name=node_name(),
        default=installation(),
        missing_models=missing_models(models),
        environments={name: _installed_in(Environment(**environment)) for name, environment in environments.items()},
        store_error=_store_error(store, probe),
    )
    return seen.model_dump_json()


def _installed_in(environment: Environment) -> Installation | None:
    installed = installed_in(environment)
    return None if installed is None or installed.missing_packages else installed


def run_on_node(task: str) -> str:
    """Do a task, as JSON; return what came of it, as JSON of `TASK_OUTCOME`."""
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES")
    outcome = _shelf.run(Task.model_validate_json(task), {} if gpus is None else {"CUDA_VISIBLE_DEVICES": gpus})
    return TASK_OUTCOME.dump_json(outcome).decode()


def _store_error(url: str, probe: str) -> str | None:
    try:
        store = Store(url, patience_s=0.0)
        store.check()
        with scratch_folder("harness-") as folder:
            store.get(probe, Path(folder) / "probe")
    except DamagedBlobError as error:
        return f"{error}: it is another folder than the driver's"
    except HarnessError as error:
        return error.summary
    return None


def refuse_store(seen: Look, store: str) -> None:
    """Refuse a node that cannot use the store; raises HarnessError (STORE_FAILED)."""
    if seen.store_error is not None:
        raise HarnessError(
            Code.STORE_FAILED,
            f"a node cannot use the store: {seen.store_error}",
            where=f"{seen.name}: {store}",
            hint="name a folder or URL that every node can write: --store s3://bucket/folder",
        )


def refuse_differences(looks: Sequence[Look]) -> None:
    """Refuse versions that differ: goldens and figures of two nodes would be of different programs.

    Raises:
        HarnessError: NODES_DIFFER.
    """
    expected = fingerprint()
    for seen in looks:
        if seen.default.versions != expected:
            raise _differing("a node has other versions than this machine", seen.name, expected, seen.default.versions)
    for name in sorted({name for seen in looks for name in seen.environments}):
        having = [
            (seen.name, installed.versions) for seen in looks if (installed := seen.environments.get(name)) is not None
        ]
        for node, versions in having:
            if versions != having[0][1]:
                what = f"the environment {name!r} has other versions on two nodes"
                raise _differing(what, f"{having[0][0]} and {node}", having[0][1], versions)


def _differing(what: str, where: str, expected: Mapping[str, str], actual: Mapping[str, str]) -> HarnessError:
    names = [name for name in {**expected, **actual} if expected.get(name) != actual.get(name)]
    return HarnessError(
        Code.NODES_DIFFER,
        what,
        where=where,
        expected={name: expected.get(name) for name in names},
        actual={name: actual.get(name) for name in names},
        hint="install the same versions on every node",
    )


def refuse_missing(looks: Sequence[Look], cases: Sequence[SuiteCase]) -> None:
    """Refuse cases whose model, environment or engine no node has.

    Raises:
        HarnessError: NOT_A_CHECKPOINT, BAD_SUITE, UNKNOWN_ENGINE.
    """
    for case in cases:
        if all(case.case.model in seen.missing_models for seen in looks):
            what, hint = "no node has the model", "download it, or mount it at the same path, on at least one node"
            raise HarnessError(
                Code.NOT_A_CHECKPOINT, what, where=case.name, expected="a folder or a cached hub id",
                actual=case.case.model, hint=hint,
            )  # fmt: skip
        places = [installed for seen in looks if (installed := seen.installed(case.environment)) is not None]
        if not places:
            what = f"no node has the environment {case.environment!r}"
            hint = "install it, with the harness in it, at the same path on at least one node"
            raise HarnessError(Code.BAD_SUITE, what, where=case.name, hint=hint)
        if all(case.case.engine not in installed.engines for installed in places):
            known = sorted({engine for installed in places for engine in installed.engines})
            raise unknown_engine(case, f"no node has an engine called {case.case.engine!r}", known)


_CONNECT_S = 5.0


def connected(address: str) -> Any:
    """Return the module `ray`, connected to the cluster.

    Raises:
        HarnessError: NO_CLUSTER; NODES_DIFFER: it runs another Ray or Python.
    """
    try:
        import ray
    except ImportError as error:
        hint = "pip install -e '.[ray]' in the harness's checkout, or leave --ray out"
        raise HarnessError(Code.NO_CLUSTER, "Ray is not installed", where="--ray", hint=hint) from error
    _refuse_unreachable(address)
    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR", configure_logging=False)
    except RuntimeError as error:
        if "mismatch" not in str(error):
            raise _no_cluster(address, error) from error
        what = "the cluster runs another Ray or another Python than this machine"
        actual = " ".join(str(error).split())
        raise HarnessError(Code.NODES_DIFFER, what, where=address, actual=actual) from error
    except (ConnectionError, ValueError, TimeoutError) as error:
        raise _no_cluster(address, error) from error
    return ray


def _refuse_unreachable(address: str) -> None:
    """Ray itself waits for minutes."""
    if address == "auto":
        return
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdecimal() or "/" in host:
        what, expected = "this is no address of a cluster", "HOST:PORT of its head, or auto"
        raise HarnessError(Code.NO_CLUSTER, what, where="--ray", expected=expected, actual=address)
    try:
        socket.create_connection((host, int(port)), timeout=_CONNECT_S).close()
    except (OSError, OverflowError) as error:
        raise _no_cluster(address, error) from error


def _no_cluster(address: str, error: Exception) -> HarnessError:
    reason = (str(error).splitlines() or [type(error).__name__])[0]
    hint = "ray status --address HOST:PORT says whether it runs; ray start --head starts one"
    return HarnessError(Code.NO_CLUSTER, f"the cluster cannot be reached: {reason}", where=address, hint=hint)
