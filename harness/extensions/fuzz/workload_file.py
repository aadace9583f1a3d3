"""A workload on disk: what `harness fuzz run --replay` runs again.

It has the tokens fed, so it needs neither the seed nor the pool of the search that found it.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from harness.base.files import exists
from harness.extensions.fuzz.result import FuzzFinding, SentRequest, SentWorkload
from harness.formats.case import read_case_file
from harness.formats.schedule import parse_schedule
from harness.plan import Plan

_Strict = ConfigDict(frozen=True, extra="forbid", strict=True)
_TokenId = Annotated[int, Field(ge=0, lt=2**63)]


class RequestEntry(BaseModel):
    """One request of a workload's file."""

    model_config = _Strict

    token_ids: Annotated[list[_TokenId], Field(min_length=1)]
    """The tokens fed."""
    prompt_length: Annotated[int, Field(ge=1)]
    arrival: Annotated[int, Field(ge=0)] = 0
    is_aborted: bool = False
    fork_of: Annotated[int, Field(ge=0)] | None = None

    @model_validator(mode="after")
    def _is_sound(self) -> "RequestEntry":
        if self.prompt_length + (self.fork_of is not None) > len(self.token_ids):
            raise ValueError(f"prompt_length {self.prompt_length} exceeds the {len(self.token_ids)} token_ids")
        return self

    def goes_on_from(self, original: "RequestEntry") -> bool:
        """Whether it can be forked from another request that has made its first token: or rows would be others'."""
        num_shared = original.prompt_length + 1
        return (
            original.fork_of is None
            and len(original.token_ids) >= num_shared
            and self.prompt_length == original.prompt_length
            and self.token_ids[:num_shared] == original.token_ids[:num_shared]
        )


class WorkloadFile(BaseModel):
    """A workload on disk, and what it was found with."""

    model_config = _Strict

    schema_version: Literal[1]
    description: str = ""
    model: str
    engine: str
    dtype: Literal["float32", "bfloat16", "float16"]
    device: str = "cpu"
    fault: str | None = None
    """Id of the known bug that was in the engine."""
    schedule: str | None = None
    engine_options: dict[str, str] = {}
    limits: dict[
        Literal["max_num_batched_tokens", "max_num_seqs", "block_size", "num_blocks", "enable_prefix_caching"],
        bool | Annotated[int, Field(ge=1)],
    ] = {}
    requests: Annotated[list[RequestEntry], Field(min_length=1)]

    @model_validator(mode="after")
    def _is_sound(self) -> "WorkloadFile":
        if self.schedule is not None:
            parse_schedule(self.schedule)
        for number, request in enumerate(self.requests):
            original = request.fork_of
            if original is None:
                continue
            if original >= len(self.requests) or original == number:
                raise ValueError(f"requests.{number}.fork_of is {original}, expected another request's number")
            if not request.goes_on_from(self.requests[original]):
                raise ValueError(f"request {number} does not go on from prompt and first token of request {original}")
        return self

    def workload(self) -> SentWorkload:
        """Return the workload."""
        return SentWorkload(
            requests=tuple(
                SentRequest(**{**entry.model_dump(), "token_ids": tuple(entry.token_ids)}) for entry in self.requests
            ),
            limits={str(name): value for name, value in self.limits.items()},
            schedule=self.schedule,
        )


def load_workload(path: Path) -> WorkloadFile:
    """Read a workload's file; its model may be relative to it.

    Raises:
        HarnessError: BAD_CASE: it is absent, is not TOML, or breaks the schema; the message names the field.
    """
    found = read_case_file(WorkloadFile, path, "workload")
    model = path.parent / found.model
    return found.model_copy(update={"model": str(model)}) if exists(model) else found


def workload_toml(finding: FuzzFinding, plan: Plan, fault: str | None) -> str:
    """Return the text of a finding's workload file."""
    workload = finding.workload
    lines = ["schema_version = 1", *header(f"found by harness fuzz: {finding.signature}", plan)]
    lines += [f"fault = {toml(fault)}"] if fault else []
    lines += [f"schedule = {toml(workload.schedule)}"] if workload.schedule else []
    lines += table("engine_options", plan.engine_options)
    lines += table("limits", workload.limits)
    for request in workload.requests:
        lines += ["", "[[requests]]", f"token_ids = {list(request.token_ids)}"]
        lines += [f"prompt_length = {request.prompt_length}"]
        lines += [f"arrival = {request.arrival}"] if request.arrival else []
        lines += ["is_aborted = true"] if request.is_aborted else []
        lines += [f"fork_of = {request.fork_of}"] if request.fork_of is not None else []
    return "\n".join(lines) + "\n"


def header(description: str, plan: Plan) -> list[str]:
    """Return the lines that a workload and a case have in common."""
    return [
        f"description = {toml(description)}",
        f"model = {toml(str(plan.folder))}",
        f"engine = {toml(plan.case.engine)}",
        f"dtype = {toml(plan.case.dtype)}",
        f"device = {toml(plan.case.device)}",
    ]


def table(name: str, values: Mapping[str, object]) -> list[str]:
    """Return the lines of a table of strings and numbers; none for an empty one."""
    return ["", f"[{name}]", *(f"{key} = {toml(value)}" for key, value in values.items())] if values else []


def toml(value: object) -> str:
    """Return a string, number or truth value as TOML, which writes them as JSON does."""
    return json.dumps(value, ensure_ascii=False)
