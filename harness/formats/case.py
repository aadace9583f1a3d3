"""A case: one TOML file that says what to check (checkpoint, requests, schedules, dtype, device, engine)."""

import reprlib
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict, Unpack, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from harness.base.files import exists, read_text
from harness.errors import Code, HarnessError
from harness.formats.schedule import parse_schedules

DTYPES = ("float32", "bfloat16", "float16")
Trigger = Literal[
    "decode", "chunked_prefill", "batch", "ragged_batch", "block_boundary", "new_block", "prefix_hit", "forked",
    "preempted", "gqa", "window_exceeded", "rope_extended", "near_tie",
]  # fmt: skip
TRIGGERS: tuple[str, ...] = get_args(Trigger)
"""Conditions that a workload can be required to reach."""


_Count = Annotated[int, Field(ge=1, lt=2**31)]


class RequestSpec(BaseModel):
    """One request of a case: text or token ids."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    prompt: str | None = None
    token_ids: list[int] | None = None
    max_new_tokens: _Count | None = None
    continuation: Annotated[list[int], Field(min_length=1)] | None = None
    """Token ids that follow the prompt in the place of HF's own greedy ones; max_new_tokens then says nothing."""

    @model_validator(mode="after")
    def _one_of_both(self) -> "RequestSpec":
        if (self.prompt is None) == (self.token_ids is None):
            raise ValueError("a request needs either prompt or token_ids, and not both")
        return self


class ProfileSection(BaseModel):
    """The profile that follows the check."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    prompt_tokens: _Count = 128
    max_new_tokens: _Count = 32
    batch_size: _Count = 1
    phases: list[Literal["prefill", "decode", "mixed"]] = []
    """Empty: all that the engine has."""
    baseline: str | None = None
    """File with what the profile may need, relative to the case's; None: it is held to nothing."""


class CaseChanges(TypedDict, total=False):
    """Replacements for a case's own values; None, or an empty sequence, leaves the case's."""

    model: str | None
    """Folder, GGUF file, name of an embedded checkpoint, or hub id."""
    hf: str | None
    """Of a GGUF file, the checkpoint that it was made from."""
    engine: str | None
    engine_options: Mapping[str, str] | None
    dtype: str | None
    """float32, bfloat16, float16, or `auto` for the checkpoint's own."""
    device: str | None
    """A torch device."""
    truth: str | None
    """`float64`, `float32`, or `auto` for what the engine's dtype needs."""
    requests: Sequence[RequestSpec]
    max_new_tokens: int | None
    """Tokens to generate for each request."""
    schedules: Sequence[str]
    """`plain`, `chunked:5`, ..."""
    only: str | None
    """`all`, `cache`, `logits` or `tokens`: what the engine must show."""
    isolate: bool | None
    """Whether the engine runs in a process of its own."""
    engine_timeout_s: float | None
    """Longest time for opening the engine, and for each schedule."""


class Case(BaseModel):
    """A check. Paths are relative to the case's file."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    schema_version: Literal[1]
    description: str = ""
    model: Annotated[str, Field(min_length=1)]
    hf: Annotated[str, Field(min_length=1)] | None = None
    """If the model is a GGUF file: the HuggingFace checkpoint that it was made from."""
    engine: Annotated[str, Field(min_length=1)] = "reference"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: str = "cpu"
    truth: Literal["auto", "float64", "float32"] = "auto"
    """Precision of the truth; `auto`: what the engine's dtype needs."""
    schedules: list[str] = []
    """Empty: those of the default ones that the prompts can reach."""
    max_new_tokens: _Count = 24
    engine_options: dict[str, str | int] = {}
    require: list[Trigger] = []
    """Triggers that the case as it is written reaches, and must go on reaching."""
    requests: Annotated[list[RequestSpec], Field(min_length=1)]
    only: Literal["all", "cache", "logits", "tokens"] | None = None
    """All that the engine must show; None: every tap that it does not declare lacking."""
    isolate: bool | None = None
    """Whether the engine runs in a process of its own; None: if another package provides it, or it has a time limit."""
    engine_timeout_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Longest time for opening the engine, and for each schedule."""
    profile: ProfileSection | None = None
    """None: the engine is checked and not profiled."""

    def replaced(self, **changes: Unpack[CaseChanges]) -> "Case":
        """Return the case with what is given in place of its own.

        Another engine has other options, so the case's own stay with its engine. What the case requires to be reached
        goes as soon as anything is replaced that decides what is reached: dtype, device, truth and process do not.
        """
        given: dict[str, Any] = {name: value for name, value in changes.items() if value is not None}
        engine = given.get("engine", self.engine)
        own_options = self.engine_options if engine == self.engine else {}
        requests, num_new = given.get("requests") or self.requests, given.get("max_new_tokens")
        decisive: dict[str, Any] = {
            "model": given.get("model", self.model),
            "hf": given.get("hf", None if "model" in given else self.hf),
            "engine": engine,
            "engine_options": {**own_options, **given.get("engine_options", {})},
            "requests": [_with_length(request, num_new) for request in requests],
            "max_new_tokens": self.max_new_tokens if num_new is None else num_new,
            "schedules": list(given.get("schedules") or self.schedules),
        }
        is_same = all(getattr(self, name) == value for name, value in decisive.items())
        return self.model_copy(update={**given, **decisive, "require": self.require if is_same else []})


def _with_length(request: RequestSpec, max_new_tokens: int | None) -> RequestSpec:
    """Drop the request's own number of new tokens where one was given for all."""
    return request if max_new_tokens is None else request.model_copy(update={"max_new_tokens": None})


def load_case(path: Path) -> Case:
    """Read a case file.

    Raises:
        HarnessError: BAD_CASE: it is absent, is not TOML, or breaks the schema; the message names the field.
    """
    try:
        case = Case.model_validate(tomllib.loads(read_text(path)))
        parse_schedules(case.schedules)
    except FileNotFoundError:
        raise HarnessError(Code.BAD_CASE, "there is no such case file", where=path) from None
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"])) or "the case"
        actual = _shown(first["input"])
        raise HarnessError(Code.BAD_CASE, f"{field}: {first['msg']}", where=path, actual=actual) from error
    except (OSError, ValueError, RecursionError) as error:  # not UTF-8, no TOML, a number of too many digits
        raise HarnessError(Code.BAD_CASE, f"the case cannot be read: {error}", where=path) from error
    except HarnessError as error:
        what = f"schedules: {error.what}"
        raise HarnessError(Code.BAD_CASE, what, where=path, expected=error.expected, actual=error.actual) from error
    model = path.parent / case.model
    return case.model_copy(update={"model": str(model)}) if exists(model) else case


def _shown(value: object) -> str:
    try:
        return reprlib.repr(value)
    except ValueError:  # TOML's hexadecimal numbers may have more digits than Python prints
        return "a number of too many digits"
