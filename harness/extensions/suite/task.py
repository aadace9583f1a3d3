"""A task of a suite: a case or a golden, and its needs. All of it travels to other machines."""

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from harness.base.files import json_digest
from harness.formats.case import Case

GIB = 1 << 30
DEFAULT_TIME_LIMIT_S = 3600.0

_Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Resources(BaseModel):
    """Resources that a task occupies while it runs."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    cpus: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    memory_gib: _Amount = 0.0
    """0: nothing is reserved."""
    gpus: _Amount = 0.0

    def within(self, free: "Resources") -> bool:
        """Return whether all of it is in what is free."""
        return self.cpus <= free.cpus and self.memory_gib <= free.memory_gib and self.gpus <= free.gpus

    def __str__(self) -> str:
        parts = [f"{self.cpus:g} CPUs"] + ([f"{self.memory_gib:g} GiB"] if self.memory_gib else [])
        return ", ".join([*parts, *([f"{self.gpus:g} GPUs"] if self.gpus else [])])


class Environment(BaseModel):
    """An interpreter with packages of its own, at the same path on every machine that has it."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    python: str | None = None
    """Path of the interpreter; None for the harness's own. The harness is installed there, too."""
    variables: dict[str, str] = {}
    """Put into the environment of its processes."""


class SuiteCase(BaseModel):
    """One case of a suite: a check with a name."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    case: Case
    labels: dict[str, str]
    """Labels for the reader: case, model, engine, dtype, schedule, prompts."""
    resources: Resources = Resources()
    environment: str | None = None
    """Name of the environment; None for the harness's own."""
    time_limit_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] = DEFAULT_TIME_LIMIT_S
    model_digest: str = ""
    """Of the model's files; see `harness.extensions.suite.preflight`."""
    inputs: str = ""
    """Digest of all files and packages that it is checked with."""

    def digest(self) -> str:
        """Return what tells this case from one of the same name that checks something else."""
        told = {"case": self.case.model_dump(mode="json"), "environment": self.environment, "inputs": self.inputs}
        return json_digest(told)

    def golden_digest(self) -> str:
        """Return what tells its golden from others: engine, schedules and resources do not matter."""
        fields = {"model", "dtype", "device", "truth", "requests", "max_new_tokens"}
        of = {"environment": self.environment, "model_digest": self.model_digest}
        return json_digest({**self.case.model_dump(mode="json", include=fields), **of})


class StoredGolden(BaseModel):
    """The place of a golden: its name in a cache, and its digest in the store."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    """Name of its folder in a machine's cache."""
    index: str
    """Digest of the list of its files in the store."""


class Task(BaseModel):
    """A request to a worker: make goldens for a case, or check it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["golden", "case"]
    case: SuiteCase
    environment: Environment = Environment()
    store: str | None = None
    """URL of the store; None if all workers share one machine's cache."""
    store_patience_s: float = 60.0
    """Time for which a store may fail before the task is given up."""
    is_forked: bool = False
    """Whether a golden is also made for the copies of the schedule `forked`."""
    goldens: tuple[StoredGolden, ...] = ()
    """Those that a case needs."""

    @property
    def label(self) -> str:
        """The task in words."""
        return f"golden of {self.case.name}" if self.kind == "golden" else self.case.name


def case_tasks(
    cases: Iterable[SuiteCase],
    environments: Mapping[str, Environment],
    *,
    store: str | None = None,
    store_patience_s: float = 60.0,
) -> list[Task]:
    """Return a task for each case; `environments` are those of the matrix, by name."""
    return [
        Task(
            kind="case", case=case, store=store, store_patience_s=store_patience_s,
            environment=environments[case.environment] if case.environment else Environment(),
        )
        for case in cases
    ]  # fmt: skip


class TaskResult(BaseModel):
    """Outcome of a task that ran to its end."""

    model_config = ConfigDict(extra="forbid")

    verdict: Literal["pass", "mismatch", "error"]
    code: str | None = None
    reason: str | None = None
    """The reason, in a sentence."""
    first_divergence: dict[str, Any] | None = None
    figures: dict[str, float] = {}
    bits: str | None = None
    """Digest of all that the engine recorded."""
    goldens: tuple[StoredGolden, ...] = ()
    seconds: float = 0.0
    """The check itself, as the worker timed it."""
    files_read: dict[str, str] = {}
    """By path: digests of the files that it rests on (`harness.base.files_read`)."""
    files: dict[str, str] = {}
    """By name: files to be kept, compressed by zlib, in base64."""


class Loss(BaseModel):
    """Why a task did not run to its end; another attempt may."""

    model_config = ConfigDict(extra="forbid")

    reason: str
    needs_golden: bool = False
    """Whether its golden is gone from the store, and is to be made again first."""


TaskOutcome = TaskResult | Loss
TASK_OUTCOME: TypeAdapter[TaskOutcome] = TypeAdapter(TaskOutcome)
"""Reads and writes what came of a task, on its way from a process."""
