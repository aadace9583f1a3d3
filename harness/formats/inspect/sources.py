"""Tensors by their names, wherever they lie: weights, recordings and goldens, dumps."""

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from harness.base.files import parse_json, read_bytes
from harness.errors import Code, HarnessError
from harness.formats.checkpoint import CONFIG_NAME, Checkpoint
from harness.formats.checkpoint.names import embedded_folder
from harness.formats.checkpoint.readers import reader_of
from harness.formats.checkpoint.shards import read_shard
from harness.formats.recording import Recording
from harness.formats.recording.format import MANIFEST_NAME
from harness.formats.safetensors_header import read_header
from harness.formats.tensors.folder import read_tensors

Row = tuple[int, int]
"""Request and position."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """What a path holds."""

    kind: str
    """`checkpoint`, `gguf`, `recording`, `safetensors` or `tensors`."""
    names: tuple[str, ...]
    read: Callable[[str], torch.Tensor]
    """Return a tensor; of a recording, a tap's rows in the order in which they were computed."""
    rows: Callable[[str], Mapping[Row, int]] | None = None
    """Of a recording: place of each of a tap's rows in its tensor; the last, where it was computed again."""

    def tensor(self, name: str) -> torch.Tensor:
        """Return the tensor of a name; raises HarnessError (BAD_OPTION) with the nearest names where there is none."""
        if name not in self.names:
            near = difflib.get_close_matches(name, self.names, n=3, cutoff=0.4) or self.names[:3]
            raise HarnessError(
                Code.BAD_OPTION,
                f"there is no tensor {name!r}",
                where="--tensor",
                expected=f"one of {len(self.names)} names, such as {', '.join(near)}",
                actual=name,
            )
        return self.read(name)

    def row(self, name: str, row: Row) -> torch.Tensor:
        """Return a tap's row; raises HarnessError (BAD_OPTION) where there is no such row."""
        tensor = self.tensor(name)
        if self.rows is None:
            what, hint = "only the taps of a recording have rows of requests", "leave --row out; --slice takes a part"
            raise HarnessError(Code.BAD_OPTION, what, where="--row", actual=self.kind, hint=hint)
        places = self.rows(name)
        if row not in places:
            what = f"the tap has no row of request {row[0]} at position {row[1]}"
            shown = ", ".join(f"{request}:{position}" for request, position in sorted(places)[:6])
            raise HarnessError(Code.BAD_OPTION, what, where="--row", expected=f"one of {len(places)}: {shown}, ...")
        return tensor[places[row]]


def at_hand(path: Path) -> Path:
    """Return the folder of an embedded checkpoint where a path is its name, and else the path."""
    embedded = None if path.exists() else embedded_folder(str(path))
    return path if embedded is None else embedded


def open_source(path: Path) -> Source:
    """Return the tensors of a checkpoint, a GGUF or safetensors file, a recording or golden, or a folder of tensors.

    The path is a file, a folder, or an embedded checkpoint's name.

    Raises:
        HarnessError: as the reader of what lies there.
    """
    path = at_hand(path)
    if (path / MANIFEST_NAME).is_file():
        return _recording(Recording.open(path, verify=False))
    if (path / CONFIG_NAME).is_file():
        return _weights("checkpoint", {name: file for name, (_, file) in Checkpoint(path).tensors.items()})
    reader = reader_of(path) if path.is_file() else None
    if reader is not None and (tensors := reader.tensors(path)) is not None:
        return Source(kind=path.suffix[1:], names=tuple(tensors), read=lambda name: tensors[name]())
    if path.suffix == ".safetensors":
        return _weights("safetensors", {entry.name: path for entry in read_header(path).tensors})
    dumped = {tensor.name: tensor.tensor for tensor in read_tensors(path).tensors}
    return Source(kind="tensors", names=tuple(dumped), read=dumped.__getitem__)


def _weights(kind: str, files: Mapping[str, Path]) -> Source:
    return Source(kind=kind, names=tuple(files), read=lambda name: read_shard(files[name], name))


def _sketched(folder: Path) -> frozenset[str]:
    """Return the taps of a golden that are kept as sketches (`oracle/golden.py` writes their list)."""
    info = folder / "golden.json"
    if not info.is_file():
        return frozenset()
    try:
        return frozenset(parse_json(read_bytes(info)).get("sketched", ()))
    except (ValueError, AttributeError, TypeError) as error:
        what, hint = "the golden is damaged", "make the golden again"
        raise HarnessError(Code.BAD_MANIFEST, what, where=info, hint=hint) from error


def _recording(recording: Recording) -> Source:
    steps, sketched = recording.steps, _sketched(recording.path)

    def read(name: str) -> torch.Tensor:
        if name in sketched:
            raise HarnessError(
                Code.BAD_OPTION,
                f"this golden of a check's cache holds sketches of {name}, and no values",
                where=recording.path,
                hint="write a golden with all values: harness golden --out DIR",
            )
        return torch.cat([step.tap(name) for step in steps if step.has(name)])

    def rows(name: str) -> Mapping[Row, int]:
        found: list[Row] = []
        for step in steps:
            if step.has(name):
                own = step.rows_of(name)
                at = slice(None) if own is None else own
                found += zip(step.request[at].tolist(), step.position[at].tolist(), strict=True)
        return {row: place for place, row in enumerate(found)}

    names = tuple(entry.name for entry in recording.manifest.taps)
    return Source(kind="recording", names=names, read=read, rows=rows)
