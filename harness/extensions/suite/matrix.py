"""A matrix: one TOML file with the models, engines, dtypes, schedules and prompts that cases are multiplied by."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from harness.errors import Code, HarnessError
from harness.extensions.suite.task import Environment
from harness.formats.case import RequestSpec, read_case_file
from harness.formats.schedule import parse_schedules

_STRICT = ConfigDict(frozen=True, extra="forbid", strict=True)
_Name = Annotated[str, Field(min_length=1)]


class ModelValue(BaseModel):
    """A model of the matrix; a text stands for a path or id that is its own name."""

    model_config = _STRICT

    name: _Name
    path: _Name
    """Folder, relative to the matrix; embedded checkpoint; or hub id."""

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, value: object) -> object:
        return {"name": value.rstrip("/").rpartition("/")[2], "path": value} if isinstance(value, str) else value


class EngineValue(BaseModel):
    """An engine of the matrix, with its options; a text stands for an engine that is its own name."""

    model_config = _STRICT

    name: _Name
    engine: _Name
    options: dict[str, str | int] = {}
    only: Literal["tokens", "logits"] | None = None

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, value: object) -> object:
        return {"name": value, "engine": value} if isinstance(value, str) else value


class PromptsValue(BaseModel):
    """Requests of the matrix."""

    model_config = _STRICT

    requests: Annotated[list[RequestSpec], Field(min_length=1)]
    max_new_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None


class CaseRule(BaseModel):
    """Needs of the cases that it selects; of several rules, the last that names a need counts."""

    model_config = _STRICT

    where: dict[str, str] = {}
    """Labels that a case has, all of them; empty: every case."""
    cpus: Annotated[float, Field(gt=0)] | None = None
    memory_gib: Annotated[float, Field(ge=0)] | None = None
    gpus: Annotated[float, Field(ge=0)] | None = None
    environment: str | None = None
    time_limit_s: Annotated[float, Field(gt=0)] | None = None


class Matrix(BaseModel):
    """The axes that cases are multiplied by. An axis that is left out leaves the case's own value."""

    model_config = _STRICT

    schema_version: Literal[1] = 1
    model: list[ModelValue] = []
    engine: list[EngineValue] = []
    dtype: list[Literal["auto", "float32", "bfloat16", "float16"]] = []
    schedule: list[_Name] = []
    """Each one schedule, or several as a comma list: those are run by one case."""
    prompts: dict[str, PromptsValue] = {}
    exclude: list[dict[str, str]] = []
    """Labels of cases that are left out."""
    rules: list[CaseRule] = []
    environments: dict[str, Environment] = {}

    @model_validator(mode="after")
    def _has_known_schedules(self) -> "Matrix":
        for schedule in self.schedule:
            parse_schedules([schedule])
        return self


def load_matrix(path: Path) -> Matrix:
    """Read a matrix file; folders of models become absolute.

    Raises:
        HarnessError: BAD_SUITE: it is absent, is not TOML, or breaks the schema; the message names the field.
    """
    matrix = read_case_file(Matrix, path, "matrix", code=Code.BAD_SUITE)
    _refuse_unknown_environments(matrix, path)
    return matrix.model_copy(update={"model": [_absolute(model, path.parent) for model in matrix.model]})


def _absolute(model: ModelValue, base: Path) -> ModelValue:
    folder = base / model.path
    return model.model_copy(update={"path": str(folder.absolute())}) if folder.exists() else model


def _refuse_unknown_environments(matrix: Matrix, path: Path) -> None:
    for rule in matrix.rules:
        if rule.environment is not None and rule.environment not in matrix.environments:
            raise HarnessError(
                Code.BAD_SUITE,
                f"a rule names the environment {rule.environment!r}, which is not there",
                where=f"{path}: rules",
                expected=", ".join(matrix.environments) or "an [environments.NAME] table",
                actual=rule.environment,
            )
