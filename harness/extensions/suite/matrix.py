"""A matrix multiplies cases: a TOML file with models, engines, dtypes, schedules, prompts."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path, PurePath
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from harness.errors import Code, HarnessError
from harness.extensions.suite.task import DEFAULT_TIME_LIMIT_S, Environment, Resources, SuiteCase
from harness.formats.case import Case, RequestSpec, load_case, read_case_file
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


_AXES = ("model", "engine", "dtype", "schedule", "prompts")


def expand(files: Sequence[Path], matrix: Matrix | None = None, *, where: object = None) -> list[SuiteCase]:
    """Return the cases of a suite.

    Without any case files, the matrix has models and prompts; `where` is its file, for errors.

    Raises:
        HarnessError: BAD_SUITE: there is no case, two have one name, or the matrix names what no case has; BAD_CASE.
    """
    matrix = matrix or Matrix()
    templates: list[tuple[Path | None, Case]] = [(path, load_case(path)) for path in _case_files(files)]
    cases: list[SuiteCase] = []
    sources: dict[str, tuple[object, str]] = {}
    """By name of a case: its file, and its model."""
    for path, case in templates or [(None, _from_matrix(matrix, where))]:
        for expanded in _multiplied(path, case, matrix):
            source = path or where, expanded.case.model
            if expanded.name in sources:
                raise _duplicate(expanded.name, sources[expanded.name], source)
            sources[expanded.name] = source
            cases.append(expanded)
    _refuse_unknown_labels(matrix, cases, where)
    kept = [_ruled(case, matrix.rules) for case in cases if not _matches_any(case, matrix.exclude)]
    if not kept:
        raise HarnessError(Code.BAD_SUITE, "the suite has no case", where=where, hint="see `exclude` in the matrix")
    return kept


def _case_files(paths: Sequence[Path]) -> Iterator[Path]:
    """Yield each file once, those of a folder by name."""
    seen = set()
    for path in paths:
        files = sorted(path.glob("*.toml")) if path.is_dir() else [path]
        if not files:
            raise HarnessError(Code.BAD_SUITE, "the folder has no case", where=path, expected="files *.toml")
        for file in files:
            if file.absolute() not in seen:
                seen.add(file.absolute())
                yield file


def _from_matrix(matrix: Matrix, where: object) -> Case:
    """Return the case that a matrix by itself multiplies: every field that matters is in it."""
    if not (matrix.model and matrix.prompts):
        raise HarnessError(
            Code.BAD_SUITE,
            "there is nothing to check",
            where=where,
            expected="case files, or a matrix with `model` and `prompts`",
            hint="harness suite cases/ --matrix FILE",
        )
    requests = next(iter(matrix.prompts.values())).requests
    return Case(schema_version=1, model=matrix.model[0].path, requests=requests)


def _multiplied(path: Path | None, case: Case, matrix: Matrix) -> Iterator[SuiteCase]:
    stem = "matrix" if path is None else path.stem
    for chosen in product(*_axes(matrix)):
        changed = case.replaced(**{name: value for item in chosen for name, value in item.changes.items()})
        labels = {"case": stem, **_own_labels(changed)} | {item.axis: item.label for item in chosen}
        name = f"{stem}[{','.join(item.label for item in chosen)}]" if chosen else stem
        yield SuiteCase(name=name, case=changed, labels=labels)


@dataclass(frozen=True, slots=True)
class _Value:
    """One value of an axis."""

    axis: str
    label: str
    changes: Mapping[str, Any]
    """The arguments of `Case.replaced`."""


def _axes(matrix: Matrix) -> list[list[_Value]]:
    """Return the axes that the matrix has."""
    axes = [
        [_Value("model", item.name, {"model": item.path}) for item in matrix.model],
        [_Value("engine", item.name, _engine_changes(item)) for item in matrix.engine],
        [_Value("dtype", item, {"dtype": item}) for item in matrix.dtype],
        [
            _Value("schedule", item, {"schedules": [name.strip() for name in item.split(",")]})
            for item in matrix.schedule
        ],
        [
            _Value("prompts", name, {"requests": prompt.requests, "max_new_tokens": prompt.max_new_tokens})
            for name, prompt in matrix.prompts.items()
        ],
    ]
    return [axis for axis in axes if axis]


def _engine_changes(value: EngineValue) -> dict[str, Any]:
    options = {name: str(option) for name, option in value.options.items()}
    return {"engine": value.engine, "engine_options": options, "only": value.only}


def _own_labels(case: Case) -> dict[str, str]:
    return {
        "model": PurePath(case.model).name,
        "engine": case.engine,
        "dtype": case.dtype,
        "schedule": ",".join(case.schedules) or "default",
        "prompts": "own",
    }


def _ruled(case: SuiteCase, rules: Sequence[CaseRule]) -> SuiteCase:
    needs: dict[str, Any] = {}
    for rule in rules:
        if _has(case, rule.where):
            needs |= rule.model_dump(exclude={"where"}, exclude_none=True)
    resources = Resources(**{name: needs[name] for name in ("cpus", "memory_gib", "gpus") if name in needs})
    limit = needs.get("time_limit_s", DEFAULT_TIME_LIMIT_S)
    update = {"resources": resources, "environment": needs.get("environment"), "time_limit_s": limit}
    return case.model_copy(update=update)


def _has(case: SuiteCase, labels: Mapping[str, str]) -> bool:
    return all(case.labels.get(axis) == value for axis, value in labels.items())


def _matches_any(case: SuiteCase, selections: Sequence[Mapping[str, str]]) -> bool:
    return any(_has(case, labels) for labels in selections)


def _refuse_unknown_labels(matrix: Matrix, cases: Sequence[SuiteCase], where: object) -> None:
    """Refuse a selection by what no case has: it would select nothing, in silence."""
    known = {axis: sorted({case.labels[axis] for case in cases}) for axis in ("case", *_AXES)}
    selections = [("rules", rule.where) for rule in matrix.rules] + [("exclude", labels) for labels in matrix.exclude]
    for field, labels in selections:
        for axis, value in labels.items():
            if value not in known.get(axis, ()):
                raise HarnessError(
                    Code.BAD_SUITE,
                    f"{field}: no case has the {axis} {value!r}",
                    where=where,
                    expected=", ".join(known.get(axis, known)),
                    actual=f"{axis} = {value!r}",
                )


def _duplicate(name: str, first: tuple[object, str], second: tuple[object, str]) -> HarnessError:
    """Say what has the same name: two files, or two models of one file; else two values of an axis."""
    differing = [f"{old} and {new}" for old, new in zip(first, second, strict=True) if old != new]
    return HarnessError(
        Code.BAD_SUITE,
        "two cases have one name",
        where=name,
        expected="a name for each case",
        actual=differing[0] if differing else "two values of one axis",
        hint='rename a file, or give the value of the matrix a name: {name = "...", path = "..."}',
    )
