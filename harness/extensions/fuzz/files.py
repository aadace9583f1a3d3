"""Files that repeat a finding: the workload for `harness fuzz --replay`, and a case where a case can say it.

A workload has the tokens fed, so it needs neither the seed nor the pool of the search that found it.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from harness.base.files import exists, write_text
from harness.errors import HarnessError
from harness.extensions.fuzz.judge import WorkloadJudgement
from harness.extensions.fuzz.result import FuzzFinding, SentRequest, SentWorkload
from harness.formats.case import load_case, read_case_file
from harness.formats.schedule import parse_schedule
from harness.judge.jobs.check import run_check
from harness.plan import Plan, plan_case

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
    file = read_case_file(WorkloadFile, path, "workload")
    model = path.parent / file.model
    return file.model_copy(update={"model": str(model)}) if exists(model) else file


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


_MANY_REQUESTS = 256
"""More than any workload has: a case of the schedule `plain` would run them one after the other."""


def write_findings(
    findings: Sequence[FuzzFinding],
    plan: Plan,
    out: Path,
    *,
    planted: Callable[[], AbstractContextManager[object]],
    fault: str | None,
) -> tuple[FuzzFinding, ...]:
    """Write the files of all findings and return the findings with the files' names.

    A case is kept if it was seen to fail in the same way: its continuation is HF's own, and may not show it.
    """
    written = []
    for number, finding in enumerate(findings, start=1):
        path = out / f"finding-{number}.workload.toml"
        write_text(path, workload_toml(finding, plan, fault))
        case = _write_case(finding, plan, out / f"finding-{number}.case.toml", planted)
        written.append(replace(finding, workload_file=str(path), case_file=None if case is None else str(case)))
    return tuple(written)


def _write_case(
    finding: FuzzFinding, plan: Plan, path: Path, planted: Callable[[], AbstractContextManager[object]]
) -> Path | None:
    text = case_toml(finding, plan)
    if text is None:
        return None
    write_text(path, text)
    try:
        with planted():
            judged = WorkloadJudgement(run=run_check(plan_case(load_case(path))).runs[0])
    except HarnessError as error:
        judged = WorkloadJudgement(error=error)
    if judged.signature == finding.signature:
        return path
    path.unlink()
    return None


def case_toml(finding: FuzzFinding, plan: Plan) -> str | None:
    """Return the text of a case with the same prompts, lengths and limits; None if a case cannot say it."""
    workload = finding.workload
    if any(request.arrival or request.is_aborted or request.fork_of is not None for request in workload.requests):
        return None
    limits = workload.limits if workload.schedule else {"max_num_seqs": _MANY_REQUESTS, **workload.limits}
    options = {name: _as_option(value) for name, value in {**limits, **plan.engine_options}.items()}
    lines = ["schema_version = 1", *header(f"found by harness fuzz: {finding.signature}", plan)]
    lines += [f"schedules = [{toml(workload.schedule or 'plain')}]", *table("engine_options", options)]
    fewest = 1 if any(request.num_new_tokens > 1 for request in workload.requests) else 2  # a case has to decode
    for request in workload.requests:
        prompt = list(request.token_ids[: request.prompt_length])
        num_new = max(fewest, request.num_new_tokens)
        lines += ["", "[[requests]]", f"token_ids = {prompt}", f"max_new_tokens = {num_new}"]
    return "\n".join(lines) + "\n"


def _as_option(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
