"""A sketch as data, and as JSON with one line a request and a tap, so that a diff shows which of them changed."""

import json
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from harness.base.files import read_bytes, write_text
from harness.errors import Code, HarnessError

NUM_PROJECTIONS = 3


class RequestSketch(BaseModel):
    """The tokens that were fed for one request."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    prompt_length: int
    token_ids: list[int]
    """Prompt and continuation without its last token."""


class TapSketch(BaseModel):
    """One tap of the truth."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    num_rows: int
    norm: float
    """Mean L2 norm of the rows."""
    projections: Annotated[list[float], Field(min_length=NUM_PROJECTIONS, max_length=NUM_PROJECTIONS)]

    @property
    def figures(self) -> tuple[float, ...]:
        """All that is compared at a tolerance."""
        return (self.norm, *self.projections)


class Sketch(BaseModel):
    """A golden in brief."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    schema_version: Literal[1] = 1
    made_with: dict[str, str]
    """Versions of the libraries: for a reader who looks for the cause of a change; never compared."""
    requests: list[RequestSketch]
    taps: dict[str, TapSketch]


def sketch_path(case_path: Path) -> Path:
    """Return where the sketch of a case is kept."""
    return case_path.parent / "sketches" / f"{case_path.stem}.json"


def read_sketch(path: Path, *, command: str | None = None) -> Sketch:
    """Read a sketch; `command` is what makes it anew.

    Raises:
        HarnessError: BAD_CASE: it is damaged.
    """
    try:
        return Sketch.model_validate_json(read_bytes(path))
    except (OSError, ValidationError) as error:
        detail = error.errors()[0]["msg"] if isinstance(error, ValidationError) else error
        raise HarnessError(
            Code.BAD_CASE, f"the golden's sketch cannot be read: {detail}", where=path, hint=command
        ) from error


def write_sketch(path: Path, sketch: Sketch) -> None:
    """Write a sketch whole, or leave what is there.

    Raises:
        HarnessError: CANNOT_WRITE.
    """
    write_text(path, _to_text(sketch))


def _to_text(sketch: Sketch) -> str:
    document = sketch.model_dump()
    requests = ",\n".join(f"  {json.dumps(request)}" for request in document["requests"])
    taps = ",\n".join(f"  {json.dumps(name)}: {json.dumps(tap)}" for name, tap in document["taps"].items())
    made_with = json.dumps(document["made_with"])
    return (
        f'{{\n "schema_version": {sketch.schema_version},\n "made_with": {made_with},\n'
        f' "requests": [\n{requests}\n ],\n "taps": {{\n{taps}\n }}\n}}\n'
    )
