"""What an engine tells the recorder of its run and of its rows, checked before anything is written.

An engine under test may be wrong in every way, and a recording that its reader would refuse is useless: a call that
contradicts the recording's own description is BAD_RECORDER_CALL, with the values, at the call that passed it.

A row is a request and a position, and must name a token of the recording. Like the writer, this needs neither torch nor
pydantic.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

import numpy as np

from harness.base.numerics import Numerics
from harness.errors import Code, HarnessError
from harness.formats.recording.format import PHASES

if TYPE_CHECKING:
    import torch

    from harness.formats.recording.manifest import ModelInfo, Producer, RequestInfo, Scalar, Shard


class RequestLengths:
    """The number of tokens of each request, for checks of whole columns of rows: arrays, or tensors on the CPU."""

    def __init__(self, requests: Iterable[RequestInfo]) -> None:
        counts = sorted((request.id, len(request.token_ids)) for request in requests)
        self._ids = np.array([identity for identity, _ in counts])
        self._counts = np.array([count for _, count in counts])

    def first_unknown(self, request: Any) -> int | None:
        """Return the index of the first request id that the recording does not list."""
        return _first(self._ids[self._places(request)] != np.asarray(request))

    def first_outside(self, request: Any, position: Any) -> int | None:
        """Return the index of the first row whose position is not one of its (known) request's tokens."""
        positions = np.asarray(position)
        return _first((positions < 0) | (positions >= self.of(request)))

    def of(self, request: Any) -> Any:
        """Return the number of tokens of each (known) request."""
        return self._counts[self._places(request)]

    def _places(self, request: Any) -> Any:
        return np.searchsorted(self._ids, np.asarray(request)).clip(max=len(self._ids) - 1)


def first_invalid_index(indices: Any, num_rows: int) -> int | None:
    """Return the place of the first entry that is no index into `num_rows` rows, or that repeats an earlier one."""
    values = np.asarray(indices)
    outside = _first((values < 0) | (values >= num_rows))
    if outside is not None:
        return outside
    order = np.argsort(values, kind="stable")
    repeats = np.diff(values[order]) == 0
    return int(order[1:][repeats].min()) if repeats.any() else None


def _first(mask: Any) -> int | None:
    return int(mask.argmax()) if mask.any() else None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    """Who ran which model, where and how: the fields of the manifest of the same names."""

    producer: Producer
    model: ModelInfo
    dtype: str
    device: str
    environment: Mapping[str, Scalar] = field(default_factory=dict)
    schedule: str | None = None
    numerics: Numerics | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankInfo:
    """The part of a sharded engine that a recording is of: the whole, if nothing is said."""

    rank: int = 0
    world_size: int = 1
    shards: Mapping[str, Shard] = field(default_factory=dict)
    """By tap, the way in which the ranks' parts make up the whole."""


Ints: TypeAlias = "Sequence[int] | torch.Tensor | np.ndarray[Any, Any]"
"""Integers as callers hold them: a list, a range, or a one-dimensional tensor on any device."""
Array: TypeAlias = "np.ndarray[Any, Any]"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepArguments:
    """The rows of a step that is about to be computed."""

    phase: str
    num_rows: int
    sampled_rows: Array
    """Indices of the rows that are sampled from."""
    partial_rows: dict[str, Array]
    """Indices of the rows that a tap covers, by its name; absent where it covers all."""
    tensors: dict[str, Array]
    """Index tensors of the step's file, int64 before int32, so that everything is aligned."""


def step_rows(
    where: str,
    tokens: RequestLengths,
    *,
    phase: str,
    request: Ints,
    position: Ints,
    sampled_rows: Ints,
    slot_mapping: Ints | None,
    tables: Mapping[int, Sequence[int]] | None,
    partial_rows: Mapping[str, Ints],
    ambiguous_rows: Ints = (),
) -> StepArguments:
    """Check the arguments of `RecordingWriter.begin_step`."""
    known = known_phase(where, phase)
    requests, positions = rows(where, tokens, request, position)
    num_rows = len(requests)
    sampled = indices(f"{where}: sampled_rows", sampled_rows, num_rows)
    partial = {name: indices(f"{where}: rows of {name}", rows, num_rows) for name, rows in partial_rows.items()}
    tensors = {f"rows.of.{name}": values for name, values in partial.items()}
    ambiguous = indices(f"{where}: ambiguous_rows", ambiguous_rows, num_rows)
    if len(ambiguous):
        tensors["rows.ambiguous"] = ambiguous
    if len(sampled):
        tensors["rows.sampled"] = np.full(num_rows, -1)
    if slot_mapping is not None:
        tensors["kv.slot_mapping"] = column(f"{where}: slot_mapping", slot_mapping, num_rows, at_least=-1)
    tensors |= {"rows.request": requests, "rows.position": positions}
    if tables is not None:
        tensors["kv.requests"], tensors["kv.block_table"] = block_tables(f"{where}: block_tables", tokens, tables)
    return StepArguments(phase=known, num_rows=num_rows, sampled_rows=sampled, partial_rows=partial, tensors=tensors)


def known_phase(where: str, phase: str) -> str:
    """Return the phase, if it is one."""
    if phase not in PHASES:
        refuse("the phase is unknown", where=where, expected=" | ".join(PHASES), actual=phase)
    return phase


def column(where: str, values: Ints, length: int | None = None, *, at_least: int | None = None) -> Array:
    """Return integers as int64[length] on the CPU."""
    try:
        array = _as_array(values)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        refuse(f"the values are not integers: {str(error).splitlines()[0]}", where=where)
    if array.ndim != 1 or (len(array) and not _is_integral(array)):
        refuse("the values are not a list of integers", where=where, actual=f"{array.dtype} {list(array.shape)}")
    if length is not None and len(array) != length:
        refuse("the number of values is wrong", where=where, expected=length, actual=len(array))
    array = array.astype(np.int64)
    if at_least is not None and len(array) and int(array.min()) < at_least:
        refuse("a value is too small", where=where, expected=f"at least {at_least}", actual=int(array.min()))
    return array


def _as_array(values: Ints) -> Array:
    if isinstance(values, np.ndarray):
        return values
    on_cpu = getattr(values, "cpu", None)  # a torch tensor, on any device
    array = np.asarray(list(values) if on_cpu is None else on_cpu())
    if array.dtype.kind not in "iufcb":
        raise TypeError(f"some are of another type, or too large ({array.dtype})")
    return array


def indices(where: str, values: Ints, num_rows: int) -> Array:
    """Return different indices into `num_rows` rows as int64."""
    array = column(where, values)
    place = first_invalid_index(array, num_rows)
    if place is not None:
        expected = f"different indices from 0 to {num_rows - 1}"
        refuse("an index names no row, or one twice", where=where, expected=expected, actual=int(array[place]))
    return array


def rows(where: str, tokens: RequestLengths, request: Ints, position: Ints) -> tuple[Array, Array]:
    """Return the request and the position of each row, int32, each row being a token of the recording."""
    requests = column(f"{where}: request", request)
    if len(requests) == 0:
        refuse("a step has at least one row", where=where)
    positions = column(f"{where}: position", position, len(requests))
    row = tokens.first_unknown(requests)
    if row is not None:
        refuse("a row is of an unknown request", where=f"{where}, row {row}", actual=int(requests[row]))
    row = tokens.first_outside(requests, positions)
    if row is not None:
        expected = f"0 to {int(tokens.of(requests[row])) - 1} for request {int(requests[row])}"
        what = "a position is outside of its request's tokens"
        refuse(what, where=f"{where}, row {row}", expected=expected, actual=int(positions[row]))
    return requests.astype(np.int32), positions.astype(np.int32)


def block_tables(where: str, tokens: RequestLengths, tables: Mapping[int, Sequence[int]]) -> tuple[Array, Array]:
    """Return the requests of the tables, int32, and their blocks as one int32 table, padded with -1."""
    requests = column(where, list(tables))
    place = tokens.first_unknown(requests)
    if place is not None:
        refuse("a block table is of an unknown request", where=where, actual=int(requests[place]))
    columns = [column(f"{where} of request {key}", blocks, at_least=0) for key, blocks in tables.items()]
    # An odd width: with the column of requests the number of int32 is even, and a float64 tap stays aligned.
    width = max((len(blocks) for blocks in columns), default=0) | 1
    table = np.full((len(columns), width), -1, dtype=np.int32)
    for row, blocks in zip(table, columns, strict=True):
        row[: len(blocks)] = blocks
    return requests.astype(np.int32), table


def validated(model: str, what: str, where: str, /, **fields: object) -> Any:
    """Return an instance of one of the manifest's models, or the fields as they are where pydantic is not installed.

    An engine's own environment may lack it: there the reader finds what is wrong with the manifest.
    """
    try:
        from pydantic import ValidationError

        from harness.formats.recording import manifest
    except ModuleNotFoundError as error:
        if error.name != "pydantic":
            raise
        return SimpleNamespace(**fields)
    try:
        return getattr(manifest, model).model_validate(fields)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(map(str, first["loc"]))
        refuse(what, where=f"{where}: {field}" if field else where, actual=first["msg"])


def refuse(what: str, *, where: object, expected: object = None, actual: object = None) -> NoReturn:
    """Raise BAD_RECORDER_CALL."""
    hint = "correct the call of the recorder; docs/recording-format.md describes what a recording holds"
    raise HarnessError(Code.BAD_RECORDER_CALL, what, where=where, expected=expected, actual=actual, hint=hint)


def _is_integral(values: Array) -> bool:
    return values.dtype.kind == "i" or (values.dtype.kind == "u" and int(values.max()) <= np.iinfo(np.int64).max)
