"""What runs on the nodes of a cluster: the look at a node before it is used, and tasks in processes of their own.

A process of the cluster's lends its place to a process of ours, which has the imports, may crash and hang, and is ended
with it. So time limits and crashes are told apart in one way here and on a cluster.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from harness.base.files import scratch_folder
from harness.errors import HarnessError
from harness.extensions.suite.fingerprint import Installation, installation, node_name
from harness.extensions.suite.preflight import installed_in, missing_models
from harness.extensions.suite.process import ProcessShelf
from harness.extensions.suite.store import DamagedBlobError, Store
from harness.extensions.suite.task import FOUND, Environment, Task

_shelf = ProcessShelf(1)
"""Of this process: it runs one task at a time."""


class Look(BaseModel):
    """The machine and the versions of a node."""

    model_config = ConfigDict(extra="forbid")

    name: str
    own: Installation
    """Of the Python that the cluster runs there."""
    missing_models: list[str]
    environments: dict[str, Installation | None]
    """By name of an environment: what it has, None if it cannot run the harness."""
    store_error: str | None

    def installed(self, environment: str | None) -> Installation | None:
        """Return what an environment has, None being the node's own; None if it is not there."""
        return self.own if environment is None else self.environments.get(environment)


def look(models: Sequence[str], environments: Mapping[str, Mapping[str, Any]], store: str, probe: str) -> str:
    """Return a `Look` as JSON.

    Each environment is given as its fields; `probe` is the digest of a file that the driver has put into the store.
    """
    found = Look(
        name=node_name(),
        own=installation(),
        missing_models=missing_models(models),
        environments={name: _installed_in(Environment(**environment)) for name, environment in environments.items()},
        store_error=_store_error(store, probe),
    )
    return found.model_dump_json()


def _installed_in(environment: Environment) -> Installation | None:
    found = installed_in(environment)
    return None if found is None or found.missing_packages else found


def run_on_node(task: str) -> str:
    """Do a task, as JSON; return what came of it, as JSON of `FOUND`."""
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES")
    found = _shelf.run(Task.model_validate_json(task), {} if gpus is None else {"CUDA_VISIBLE_DEVICES": gpus})
    return FOUND.dump_json(found).decode()


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
