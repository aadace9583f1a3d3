"""Goldens on disk: the expected value of every row of a set of requests, and the rounding error of HF.

A golden is a recording of the high-precision forward (docs/recording-format.md) with two additional files.
`noise.safetensors` holds the relative L2 error of HF in the engine's dtype, for every tap and row. `golden.json` holds
what the golden was made from, the graph of the model, and digests of the noise, of the manifest (which holds those of
the steps) and of itself. One golden serves every schedule.

A *plain* golden, with which a check begins, is a recording of HF's own run in the engine's dtype
(oracle/continuation.py). It has no noise, and knows how to get the truth of the same tokens.
"""

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, Self

import safetensors
import safetensors.torch
import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from harness.base.files import json_digest, read_bytes, write_text
from harness.base.metrics import rounding_unit
from harness.errors import Code, HarnessError
from harness.formats.recording import Recording, RequestInfo
from harness.formats.recording.format import MANIFEST_NAME
from harness.formats.taps import LOGITS, Graph, Kind, Operation, graph_of_taps

INFO_FILE = "golden.json"
NOISE_FILE = "noise.safetensors"
LOGIT_NOISE = "logits.max_abs"
"""Entry of the noise file: the largest absolute error of HF's logits per sampled row, which decides ties."""
_MOST_NOISE = 500
"""Largest plausible noise of a tap in roundings, times the square root of its depth in the graph. Measured medians over
the rows, for tiny models of 136 families in float32 and 16 bits: at most 14, with five exceptions, the largest 75 (Doge
in float16, whose router chooses other experts)."""
_LOGIT_NOISE_1 = f"{LOGITS}.max_abs"
"""Name of this entry in goldens of the first version."""
PLAIN = "none"
"""The truth of a plain golden, as its key names it."""


class _OperationEntry(BaseModel):
    """One operation of the graph, as in golden.json."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    tap: str
    kind: Kind
    inputs: tuple[str, ...] = ()
    source: str = ""
    shape: tuple[int, ...] = ()
    token_dim: Annotated[int, Field(ge=0, le=2)] = 1
    sampled_only: bool = False
    is_head: bool = False
    among_tokens: bool = False
    window: int | None = None
    tokens_ahead: Annotated[int, Field(ge=0, le=64)] = 0


class GoldenInfo(BaseModel):
    """The inputs of a golden, and the meaning of its numbers."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    schema_version: Literal[1] = 1
    key: dict[str, Any]
    """Everything that the values depend on: weights, config, prompts, dtypes, versions."""
    noise_sha256: str
    """Empty for a plain golden."""
    manifest_sha256: str
    """Digest of the manifest of the recording, to whose steps the noise and the graph belong."""
    operations: tuple[_OperationEntry, ...]
    aliases: dict[str, str]
    sketched: dict[str, tuple[int, ...]] = {}
    """Row shapes of taps that are stored as sketches (oracle/sketch_rows.py); empty if all values are stored."""
    sha256: str = ""
    """Digest of all other fields."""

    @model_validator(mode="after")
    def _of_taps_in_it(self) -> Self:
        taps = {operation.tap for operation in self.operations}
        strange = [tap for operation in self.operations for tap in operation.inputs if tap not in taps]
        if strange:
            raise ValueError(f"an operation reads {strange[0]}, which is no operation of the golden")
        return self

    @classmethod
    def of(
        cls, folder: Path, key: Mapping[str, Any], graph: Graph, sketched: Mapping[str, tuple[int, ...]]
    ) -> "GoldenInfo":
        """Describe the golden in `folder`, whose recording and noise were just written."""
        info = cls(
            key=dict(key),
            noise_sha256="" if key.get("truth") == PLAIN else _sha256(folder / NOISE_FILE),
            manifest_sha256=_sha256(folder / MANIFEST_NAME),
            operations=tuple(_OperationEntry(**asdict(operation)) for operation in graph),
            aliases=dict(graph.aliases),
            sketched=dict(sketched),
        )
        return info.model_copy(update={"sha256": info.digest()})

    def digest(self) -> str:
        """Return the digest of all fields except `sha256`, and except newer fields that have their default."""
        others: dict[str, Any] = {"sha256": True}
        if not self.sketched:
            others["sketched"] = True
        if not any(operation.tokens_ahead for operation in self.operations):
            others["operations"] = {"__all__": {"tokens_ahead"}}
        return hashlib.sha256(self.model_dump_json(exclude=others).encode()).hexdigest()

    def graph(self) -> Graph:
        """Return the graph of the model that the golden is of."""
        return _graph(self)


class Golden:
    """A golden on disk: the truth and the noise of HF in the engine's dtype.

    Raises:
        HarnessError: DAMAGED_SAFETENSORS: its noise cannot be read, or is implausible; BAD_MANIFEST: golden.json is
            damaged, or belongs to another golden.
    """

    def __init__(self, recording: Recording, *, is_pool: bool = False) -> None:
        self.recording = recording
        self.notes: tuple[str, ...] = ()
        """Notes for the report of a comparison with this golden."""
        self.is_pool = is_pool
        """Whether an engine may compute any of the requests, or prefixes of them, under different ids."""
        self.info = _read_info(recording)
        """None for the recording of another engine, and for a golden of the first version."""
        self.noise = _read_noise(recording, self.graph, self.info)
        """Relative L2 error per row of every tap, float64 [rows], in the order of the steps; empty if unknown."""
        self.make_truth: Callable[[], Golden] | None = None
        """Returns the truth of the same tokens, of a plain golden."""

    @property
    def is_plain(self) -> bool:
        """Whether the rows are HF's in the engine's dtype, and the truth can be had."""
        return self.make_truth is not None

    @cached_property
    def truth(self) -> "Golden":
        """The golden itself, or the truth of a plain one: read or made at the first demand."""
        return self if self.make_truth is None else self.make_truth()

    @property
    def at_hand(self) -> "Golden":
        """The truth if it was asked for before, else the golden itself."""
        return self.truth if "truth" in vars(self) else self

    @property
    def requests(self) -> Sequence[RequestInfo]:
        """The requests with their tokens: prompt, and continuation without its last token."""
        return self.recording.manifest.requests

    @property
    def sketched(self) -> Mapping[str, tuple[int, ...]]:
        """Row shapes of taps that are stored as sketches; see `GoldenInfo.sketched`."""
        return {} if self.info is None else self.info.sketched

    @cached_property
    def graph(self) -> Graph:
        """Graph of the model; without golden.json, the graph that can be derived from the names of the taps."""
        if self.info is not None:
            return self.info.graph()
        return graph_of_taps(entry.name for entry in self.recording.manifest.taps)


def open_golden(folder: Path) -> Golden:
    """Open a golden; raises HarnessError as `Recording.open` and `Golden` do."""
    return Golden(Recording.open(folder))


def write_golden_files(
    folder: Path,
    key: Mapping[str, Any],
    graph: Graph,
    noise: Mapping[str, torch.Tensor],
    sketched: Mapping[str, tuple[int, ...]] = MappingProxyType({}),
) -> None:
    """Write the noise and golden.json beside a recording.

    Raises:
        HarnessError: CANNOT_WRITE.
    """
    try:
        if key.get("truth") != PLAIN:
            safetensors.torch.save_file(dict(noise), folder / NOISE_FILE)
        (folder / INFO_FILE).write_text(GoldenInfo.of(folder, key, graph, sketched).model_dump_json(), encoding="utf-8")
    except (OSError, safetensors.SafetensorError) as error:
        raise HarnessError(Code.CANNOT_WRITE, f"the golden cannot be written: {error}", where=folder) from error


class _KeptGraph(BaseModel):
    """The graph of a model by itself, as it is kept in the cache."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    key: dict[str, Any]
    operations: tuple[_OperationEntry, ...]
    aliases: dict[str, str]


def write_graph(path: Path, key: Mapping[str, Any], graph: Graph) -> None:
    """Write a graph to a file, with all that it depends on; a file that cannot be written is left out."""
    operations = tuple(_OperationEntry(**asdict(operation)) for operation in graph)
    kept = _KeptGraph(key=dict(key), operations=operations, aliases=dict(graph.aliases))
    with suppress(OSError, HarnessError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, kept.model_dump_json())


def read_graph(path: Path, key: Mapping[str, Any]) -> Graph | None:
    """Return the graph of a file of `write_graph`; None if it is not there, damaged, or that of something else."""
    try:
        kept = _KeptGraph.model_validate_json(read_bytes(path))
    except (OSError, ValidationError):
        return None
    return _graph(kept) if kept.key == key else None


def _graph(info: _KeptGraph | GoldenInfo) -> Graph:
    return Graph(tuple(Operation(**entry.model_dump()) for entry in info.operations), info.aliases)


def _read_info(recording: Recording) -> GoldenInfo | None:
    folder = recording.path
    try:
        info = GoldenInfo.model_validate_json(read_bytes(folder / INFO_FILE))
    except FileNotFoundError:
        return None
    except (OSError, ValidationError) as error:
        raise _bad_info(
            folder, f"what the golden was made from cannot be read: {str(error).splitlines()[0]}"
        ) from error
    if info.digest() != info.sha256:
        raise _bad_info(folder, "what the golden was made from was altered: its sha256 differs")
    if recording.manifest_sha256 != info.manifest_sha256:
        raise _bad_info(folder, "the golden's manifest is not the one that it was made with: its sha256 differs")
    return info


def _bad_info(folder: Path, what: str) -> HarnessError:
    hint = "delete the golden's folder and make it again"
    return HarnessError(Code.BAD_MANIFEST, what, where=folder / INFO_FILE, hint=hint)


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _read_noise(recording: Recording, graph: Graph, info: GoldenInfo | None) -> dict[str, torch.Tensor]:
    path = recording.path / NOISE_FILE
    try:
        data = path.read_bytes()
        noise: dict[str, torch.Tensor] = safetensors.torch.load(data)
    except FileNotFoundError:
        return {}
    except (safetensors.SafetensorError, OSError) as error:
        raise _damaged(path, f"the golden's noise cannot be read: {error}") from error
    if info is not None and hashlib.sha256(data).hexdigest() != info.noise_sha256:
        raise _damaged(path, "the golden's noise is not the one that was measured: its sha256 differs")
    if _LOGIT_NOISE_1 in noise:
        noise[LOGIT_NOISE] = noise.pop(_LOGIT_NOISE_1)
    rows = _num_rows(recording)
    for tap, values in noise.items():
        expected = rows.get(graph.logits if tap == LOGIT_NOISE else tap)
        if values.shape != (expected,):
            raise _damaged(path, f"noise of {tap} has shape {list(values.shape)}", expected=[expected])
        if not bool((torch.isfinite(values) & (values >= 0)).all()):
            raise _damaged(path, f"noise of {tap} is not finite, or negative", expected="errors of 0 and more")
    _refuse_implausible(path, recording, graph, noise)
    return noise


def _refuse_implausible(path: Path, recording: Recording, graph: Graph, noise: Mapping[str, torch.Tensor]) -> None:
    """Refuse noise that is too large to be rounding, since any result of an engine would be within it."""
    dtype = getattr(torch, recording.manifest.dtype, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        return  # a comparison refuses such a dtype
    depths = {operation.tap: depth for depth, operation in enumerate(graph, start=1)}
    for tap, values in noise.items():
        limit = min(1.0, _MOST_NOISE * rounding_unit(dtype) * math.sqrt(depths.get(tap, len(graph) + 1)))
        if tap != LOGIT_NOISE and len(values) and float(values.median()) > limit:
            what = f"noise of {tap} is too large for {recording.manifest.dtype}"
            raise _damaged(path, what, expected=f"a median of at most {limit:.2g}", actual=float(values.median()))
    if LOGIT_NOISE in noise and graph.logits in noise:
        # No element of an error vector exceeds the norm of the vector.
        norms = [
            step.tap(graph.logits).to(torch.float64).norm(dim=-1) for step in recording.steps if step.has(graph.logits)
        ]
        largest = noise[graph.logits] * torch.cat(norms) * (1 + 1e-6) + torch.finfo(torch.float64).tiny
        if bool((noise[LOGIT_NOISE] > largest).any()):
            raise _damaged(path, f"noise of {LOGIT_NOISE} is larger than that of {graph.logits}")


def _num_rows(recording: Recording) -> dict[str, int]:
    """Count the rows of every tap over all steps."""
    counts = Counter[str]()
    for step in recording.steps:
        for tap in step.tap_names:
            counts[tap] += step.num_rows_of(tap)
    return counts


def _damaged(path: Path, what: str, *, expected: object = None, actual: object = None) -> HarnessError:
    return HarnessError(
        Code.DAMAGED_SAFETENSORS,
        what,
        where=path,
        expected=expected,
        actual=actual,
        hint="delete the folder and make the golden again",
    )


def key_name(key: Mapping[str, Any]) -> str:
    """Return the name under which a golden is cached: a digest of everything that its values depend on."""
    return json_digest(dict(key))[:32]
