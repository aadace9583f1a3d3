"""A case: one TOML file that says what to check (checkpoint, requests, schedules, dtype, device, engine)."""

import tomllib
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from harness.errors import Code, HarnessError
from harness.schedule import DEFAULT_SCHEDULES, Schedule, parse_schedule

DTYPES = ("float32", "bfloat16", "float16")


class RequestSpec(BaseModel):
    """One request of a case: text or token ids."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    prompt: str | None = None
    token_ids: list[int] | None = None
    max_new_tokens: Annotated[int, Field(ge=1)] | None = None

    @model_validator(mode="after")
    def _one_of_both(self) -> "RequestSpec":
        if (self.prompt is None) == (self.token_ids is None):
            raise ValueError("a request needs either prompt or token_ids, and not both")
        return self


class Case(BaseModel):
    """What to check. Paths are relative to the case's file."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    schema_version: Literal[1]
    description: str = ""
    model: str
    engine: str = "reference"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: str = "cpu"
    schedules: list[str] = list(DEFAULT_SCHEDULES)
    max_new_tokens: Annotated[int, Field(ge=1)] = 24
    engine_options: dict[str, str | int] = {}
    require: list[Literal["decode", "chunked_prefill", "batch", "block_boundary"]] = []
    requests: Annotated[list[RequestSpec], Field(min_length=1)]

    def parsed_schedules(self) -> list[Schedule]:
        """Return the schedules, parsed."""
        return [parse_schedule(text) for text in self.schedules]


def load_case(path: Path) -> Case:
    """Read a case file.

    Raises:
        HarnessError: BAD_CASE: it is absent, is not TOML, or breaks the schema; the message names the field.
    """
    try:
        text = path.read_text(encoding="utf-8")
        case = Case.model_validate(tomllib.loads(text))
        case.parsed_schedules()
    except FileNotFoundError:
        raise HarnessError(Code.BAD_CASE, "there is no such case file", where=path) from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise HarnessError(Code.BAD_CASE, f"the case cannot be read: {error}", where=path) from error
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"])) or "the case"
        raise HarnessError(Code.BAD_CASE, f"{field}: {first['msg']}", where=path, actual=first["input"]) from error
    model = path.parent / case.model
    return case.model_copy(update={"model": str(model)}) if model.exists() else case
