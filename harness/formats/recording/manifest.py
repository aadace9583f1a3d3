"""`manifest.json`: who recorded what, from which tokens, in which files. The schema of docs/recording-format.md.

A recording crosses the boundary of the process and often of the language, so every field is validated strictly, and
what contradicts itself across fields is refused here too, before any step file is opened.
"""

import hashlib
import reprlib
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
    model_validator,
)

from harness.base.files import read_bytes
from harness.base.numerics import Numerics
from harness.errors import Code, HarnessError
from harness.formats.recording.format import SCHEMA_VERSION

MAX_MANIFEST_BYTES = 1 << 28
RESERVED_PREFIXES = ("rows.", "kv.", "__")
"""Names of step-file tensors that are not taps begin with one of these."""

Phase = Literal["prefill", "decode", "mixed", "readback"]
TapDtype = Literal[
    "F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2", "I64", "I32", "I16", "I8", "U8",
]  # fmt: skip
Scalar = str | int | float | bool | None

_Size = Annotated[int, Field(ge=1, lt=2**48)]
_TokenId = Annotated[int, Field(ge=0, lt=2**63)]


class _Model(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, use_attribute_docstrings=True)


class Producer(_Model):
    """The program that wrote the recording."""

    name: str
    version: str


class ModelInfo(_Model):
    """The checkpoint that was run."""

    id: str
    """Hub id or path."""
    revision: str | None = None
    config_hash: str | None = None
    """sha256 of config.json, in hexadecimal."""
    weights_hash: str | None = None
    """Over the shards' bytes, in the order of their names: "blake3:" and BLAKE3 in hexadecimal, or a sha256 alone."""


class RequestInfo(_Model):
    """One request."""

    id: int = Field(ge=0, lt=2**31)
    token_ids: list[_TokenId] = Field(min_length=1)
    """The tokens fed to the model: the prompt and its continuation without the last sampled token."""
    prompt_length: int = Field(ge=1)
    inputs: str | None = Field(default=None, pattern=r"^[0-9a-f]{64}$")
    """Digest of what the model is given beside the tokens, its images; absent: text alone."""
    draft_of: int | None = Field(default=None, ge=0, lt=2**31)
    """Request for which the tokens from `prompt_length` on were computed and then given up; absent: they were kept.

    A row is a request, a position, and what it was computed from: rows of rejected drafts have a request of their own.
    """

    @model_validator(mode="after")
    def _prompt_within_tokens(self) -> Self:
        if self.prompt_length > len(self.token_ids):
            raise ValueError(f"prompt_length {self.prompt_length} exceeds the {len(self.token_ids)} token_ids")
        return self

    @model_serializer(mode="wrap")
    def _without_absent_fields(self, serialize: SerializerFunctionWrapHandler) -> dict[str, object]:
        fields: dict[str, object] = serialize(self)
        return {name: value for name, value in fields.items() if value is not None}


class StepEntry(_Model):
    """One step of the engine: one file."""

    index: int = Field(ge=0)
    """Place in the list of steps."""
    phase: Phase
    """`readback` rows were read back from the KV cache through the block table; the others were computed."""
    file: str = Field(pattern=r"^step-[0-9]{5,9}\.safetensors$")
    num_rows: int = Field(ge=1, lt=2**31)
    num_bytes: int = Field(ge=8)
    """Size of the file."""
    sha256: str | None = Field(default=None, pattern=r"^[0-9a-f]{64}$")
    """Digest of the whole file; null if the producer computes none: the file is then reported as unverified."""


class Concat(_Model):
    """Each rank holds a slice of the tap."""

    mode: Literal["concat"] = "concat"
    dim: int = Field(ge=1)
    """Dimension of the tap along which the ranks are concatenated; dimension 0 is the row."""


class Sum(_Model):
    """Each rank holds an addend of the tap."""

    mode: Literal["sum"] = "sum"


class Replicated(_Model):
    """Each rank holds the whole tap."""

    mode: Literal["replicated"] = "replicated"


Shard = Annotated[Concat | Sum | Replicated, Field(discriminator="mode")]


class TapEntry(_Model):
    """One tap: the same dtype and trailing shape in every step."""

    name: str = Field(min_length=1, max_length=1024)
    dtype: TapDtype
    shape: list[_Size] = Field(max_length=8)
    """Trailing dimensions, without the row."""
    shard: Shard | None = None
    """The way in which the ranks' parts make up the whole; null if the engine is not sharded."""

    @model_validator(mode="after")
    def _is_sound(self) -> Self:
        if self.name.startswith(RESERVED_PREFIXES):
            raise ValueError(f"the tap name {self.name!r} begins with a reserved prefix {RESERVED_PREFIXES}")
        if isinstance(self.shard, Concat) and self.shard.dim > len(self.shape):
            raise ValueError(f"shard.dim {self.shard.dim} is not a dimension of a row of shape {self.shape}")
        return self


class Manifest(_Model):
    """Everything about a recording but its tensors."""

    schema_version: Literal[1]
    producer: Producer
    model: ModelInfo
    dtype: str = Field(min_length=1)
    """The engine's dtype, as torch names it: `bfloat16`."""
    device: str
    environment: dict[str, Scalar] = Field(default_factory=dict)
    """Library versions, thread counts, the GPU: anything that helps to reproduce the run."""
    requests: list[RequestInfo] = Field(min_length=1)
    steps: list[StepEntry]
    taps: list[TapEntry]
    schedule: str | None = None
    """Name of the schedule under which the engine ran."""
    rank: int = Field(default=0, ge=0)
    world_size: int = Field(default=1, ge=1)
    numerics: Numerics | None = None
    """The engine's declaration of its arithmetic, if it makes one."""

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        _check_unique("requests", "id", (request.id for request in self.requests))
        _check_unique("steps", "file", (step.file for step in self.steps))
        _check_unique("taps", "name", (tap.name for tap in self.taps))
        for place, step in enumerate(self.steps):
            if step.index != place:
                raise ValueError(f"steps.{place}.index is {step.index}, expected {place}")
        _check_drafts(self.requests)
        if self.rank >= self.world_size:
            raise ValueError(f"rank {self.rank} is not below world_size {self.world_size}")
        return self


def _check_unique(table: str, field: str, values: Iterable[object]) -> None:
    seen = set()
    for place, value in enumerate(values):
        if value in seen:
            raise ValueError(f"{table}.{place}.{field} repeats {reprlib.repr(value)}")
        seen.add(value)


def _check_drafts(requests: Iterable[RequestInfo]) -> None:
    """Refuse drafts of a request that is not there, is a draft itself, or has other tokens before them."""
    kept = {request.id: request for request in requests if request.draft_of is None}
    for place, draft in enumerate(requests):
        if draft.draft_of is None:
            continue
        if draft.draft_of not in kept:
            raise ValueError(
                f"requests.{place}.draft_of is {draft.draft_of}, which is no request that keeps its tokens"
            )
        original, end = kept[draft.draft_of], draft.prompt_length
        if len(original.token_ids) < end or original.token_ids[:end] != draft.token_ids[:end]:
            raise ValueError(f"requests.{place} begins with other tokens than request {original.id}, whose draft it is")


class _Version(BaseModel):
    """The one field that every version of the schema has."""

    model_config = ConfigDict(strict=True, extra="ignore")
    schema_version: int


def load_manifest(path: Path) -> tuple[Manifest, str]:
    """Read and validate the manifest at `path`, and return it with the sha256 of its bytes.

    Raises:
        HarnessError: BAD_MANIFEST with the path of the field, or UNKNOWN_SCHEMA.
    """
    text = _read(path)
    try:
        version = _Version.model_validate_json(text).schema_version
        if version != SCHEMA_VERSION:
            raise HarnessError(
                Code.UNKNOWN_SCHEMA,
                "the recording follows another version of the format",
                where=path,
                expected=f"schema_version {SCHEMA_VERSION}",
                actual=version,
                hint="read it with the version of the harness that wrote it, or record again",
            )
        return Manifest.model_validate_json(text), hashlib.sha256(text).hexdigest()
    except ValidationError as error:
        raise _bad_manifest(path, error) from None


def _read(path: Path) -> bytes:
    hint = "docs/recording-format.md describes the manifest"
    try:
        num_bytes = path.stat().st_size
        if num_bytes > MAX_MANIFEST_BYTES:
            expected = f"at most {MAX_MANIFEST_BYTES} bytes"
            what = "the manifest is too large"
            raise HarnessError(Code.BAD_MANIFEST, what, where=path, expected=expected, actual=num_bytes, hint=hint)
        return read_bytes(path)
    except OSError as error:
        what = f"the manifest cannot be read: {error.strerror}"
        raise HarnessError(Code.BAD_MANIFEST, what, where=path, hint=hint) from error


def _bad_manifest(path: Path, error: ValidationError) -> HarnessError:
    first, *others = error.errors(include_url=False)
    field = ".".join(map(str, first["loc"]))
    more = f" ({len(others)} more)" if others else ""
    return HarnessError(
        Code.BAD_MANIFEST,
        f"the manifest does not follow the schema: {first['msg']}{more}",
        where=f"{path}: {field}" if field else path,
        actual=reprlib.repr(first["input"]),
        hint="docs/recording-format.md describes every field",
    )
