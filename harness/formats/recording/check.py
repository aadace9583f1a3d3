"""Checks a step file against its manifest: its size and digest, every tensor in it, and every row that it names."""

import hashlib
import reprlib
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NoReturn

import torch

from harness.errors import Code, HarnessError
from harness.formats.recording.arguments import RequestLengths, first_invalid_index
from harness.formats.recording.manifest import Manifest, StepEntry
from harness.formats.safetensors_header import Header, TensorEntry, read_header

PARTIAL = "rows.of."
"""Prefix of the index tensor of a tap that covers only some of the step's rows."""
AMBIGUOUS = "rows.ambiguous"
"""Index tensor of the rows that could not be told from others."""

_Read = Callable[[str], torch.Tensor]


class StepRules:
    """The manifest's rules for the contents of every step."""

    def __init__(self, manifest: Manifest) -> None:
        self._taps = {tap.name: (tap.dtype, tuple(tap.shape)) for tap in manifest.taps}
        self._tokens = RequestLengths(manifest.requests)
        self._headers = dict[bytes, Header]()
        self._checked = dict[tuple[int, int], tuple[Mapping[str, TensorEntry], list[str]]]()
        """Headers' tensors, by their `id` and the number of rows, and which of them are indices."""

    def header(self, path: Path, entry: StepEntry) -> Header:
        """Return the header of a step file, the same object for steps alike.

        Raises:
            HarnessError: STEP_MALFORMED or STEP_TRUNCATED.
        """
        return read_step_header(path, entry, self._headers)

    def check(self, path: Path, entry: StepEntry, tensors: Mapping[str, TensorEntry], read: _Read) -> None:
        """Check the step file at `path`, whose tensors `read` maps.

        Raises:
            HarnessError: STEP_MALFORMED, naming the tensor and the values.
        """
        key = (id(tensors), entry.num_rows)
        if key not in self._checked:
            self._check_layout(path, entry.num_rows, tensors)
            indices = [name for name in tensors if name.startswith(PARTIAL) or name == AMBIGUOUS]
            self._checked[key] = (tensors, indices)
        self._check_rows(path, read("rows.request"), read("rows.position"))
        for name in self._checked[key][1]:
            _check_indices(f"{path}: {name}", read(name), entry.num_rows)
        for name in ("rows.sampled", "kv.slot_mapping", "kv.block_table"):
            if name in tensors and (read(name) < -1).any():
                malformed(f"{path}: {name}", "a value is below -1", actual=int(read(name).min()))
        if "kv.requests" in tensors:
            self._check_kv_requests(f"{path}: kv.requests", read("kv.requests"))

    def _check_layout(self, path: Path, num_rows: int, tensors: Mapping[str, TensorEntry]) -> None:
        for name in ("rows.request", "rows.position"):
            if name not in tensors:
                malformed(path, "a step names the request and the position of its rows", expected=name)
        if ("kv.requests" in tensors) != ("kv.block_table" in tensors):
            malformed(path, "kv.requests and kv.block_table come together")
        for name, entry in tensors.items():
            actual = (entry.dtype, entry.shape)
            expected = _index_layout(name, num_rows, tensors) or self._tap_layout(path, name, num_rows, tensors)
            if actual != expected:
                what, where = "a tensor contradicts the manifest", f"{path}: {reprlib.repr(name)}"
                malformed(where, what, expected=_layout_text(*expected), actual=_layout_text(*actual))

    def _tap_layout(
        self, path: Path, name: str, num_rows: int, tensors: Mapping[str, TensorEntry]
    ) -> tuple[str, tuple[int, ...]]:
        if name not in self._taps:
            what = "the manifest lists no such tap"
            malformed(f"{path}: {reprlib.repr(name)}", what, expected="one of the manifest's taps")
        dtype, shape = self._taps[name]
        indices = tensors.get(PARTIAL + name)
        return dtype, (num_rows if indices is None else indices.num_elements, *shape)

    def _check_rows(self, path: Path, request: torch.Tensor, position: torch.Tensor) -> None:
        row = self._tokens.first_unknown(request)
        if row is not None:
            malformed(f"{path}: row {row}", "a row is of an unknown request", actual=int(request[row]))
        row = self._tokens.first_outside(request, position)
        if row is not None:
            expected = f"0 to {int(self._tokens.of(request[row])) - 1} for request {int(request[row])}"
            what = "a position is outside of its request's tokens"
            malformed(f"{path}: row {row}", what, expected=expected, actual=int(position[row]))

    def _check_kv_requests(self, where: str, requests: torch.Tensor) -> None:
        place = self._tokens.first_unknown(requests)
        if place is not None:
            malformed(where, "a block table is of an unknown request", actual=int(requests[place]))
        if len(set(requests.tolist())) != len(requests):
            malformed(where, "a request has two block tables", actual=requests.tolist())


def _index_layout(name: str, num_rows: int, tensors: Mapping[str, TensorEntry]) -> tuple[str, tuple[int, ...]] | None:
    """Return the dtype and shape of an index tensor; None if the name is not one of an index tensor."""
    shape = tensors[name].shape
    if name in ("rows.request", "rows.position"):
        return "I32", (num_rows,)
    if name in ("rows.sampled", "kv.slot_mapping"):
        return "I64", (num_rows,)
    if name == "kv.requests":
        return "I32", (shape[0] if shape else 0,)
    if name == "kv.block_table":
        return "I32", (tensors["kv.requests"].num_elements, shape[1] if len(shape) == 2 else 0)
    if name.startswith(PARTIAL) or name == AMBIGUOUS:
        return "I64", (shape[0] if shape else 0,)
    return None


def _check_indices(where: str, indices: torch.Tensor, num_rows: int) -> None:
    place = first_invalid_index(indices, num_rows)
    if place is not None:
        expected = f"different indices from 0 to {num_rows - 1}"
        malformed(where, "an index names no row, or one twice", expected=expected, actual=int(indices[place]))


def _layout_text(dtype: str, shape: tuple[int, ...]) -> str:
    return f"{dtype} {list(shape)}"


def malformed(where: object, what: str, *, expected: object = None, actual: object = None) -> NoReturn:
    """Raise STEP_MALFORMED."""
    hint = "docs/recording-format.md describes the step files; record again"
    raise HarnessError(Code.STEP_MALFORMED, what, where=where, expected=expected, actual=actual, hint=hint)


def check_file(path: Path, entry: StepEntry) -> None:
    """Refuse a step file that is not there, is no regular file of the right size, or leads out of its folder."""
    try:
        status = path.stat()
    except OSError as error:
        hint = "copy the recording again, with all of its files, or record again"
        what = f"a step file is missing: {error.strerror}"
        raise HarnessError(Code.STEP_MISSING, what, where=path, expected=entry.file, hint=hint) from None
    if not stat.S_ISREG(status.st_mode):
        malformed(path, "a step file is not a regular file")
    folder = path.parent
    if path.is_symlink() and not path.resolve().is_relative_to(folder.resolve()):
        malformed(path, "a step file leads out of the recording", expected=folder, actual=path.resolve())
    if status.st_size != entry.num_bytes:
        raise truncated(path, entry, status.st_size)


def truncated(path: Path, entry: StepEntry, num_bytes: int) -> HarnessError:
    """Return STEP_TRUNCATED."""
    return HarnessError(
        Code.STEP_TRUNCATED,
        "a step file has another size than the manifest says",
        where=path,
        expected=f"{entry.num_bytes} bytes",
        actual=f"{num_bytes} bytes",
        hint="copy the recording again, or record again",
    )


def read_step_header(path: Path, entry: StepEntry, known: dict[bytes, Header]) -> Header:
    """Return the header of a step file, one of the `known` if it has that; raises STEP_MALFORMED or STEP_TRUNCATED."""
    try:
        header = read_header(path, known)
    except HarnessError as error:
        raise HarnessError(
            Code.STEP_MALFORMED,
            f"a step file is no safetensors file: {error.what}",
            where=error.where,
            expected=error.expected,
            actual=error.actual,
            hint=error.hint,
        ) from error
    if header.file_bytes != entry.num_bytes:
        raise truncated(path, entry, header.file_bytes)
    return header


def check_digest(path: Path, expected: str) -> None:
    """Compare the digest of a step file with that of its manifest; raises STEP_ALTERED."""
    try:
        with path.open("rb", buffering=0) as file:
            actual = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        actual = f"cannot be read: {error.strerror}"
    if actual != expected:
        raise HarnessError(
            Code.STEP_ALTERED,
            "a step file is not the one that was recorded: its sha256 differs",
            where=path,
            expected=expected,
            actual=actual,
            hint="copy the recording again, or record again",
        )
