"""Reads a recording: everything is checked at opening but the digests, which are checked beside the comparison.

A large tensor is a memory mapping of its own that goes when the tensor is dropped, a small one is read, so that peak
memory does not grow with the recording. Nothing is unpickled. A file that shrinks while it is mapped ends the process
(SIGBUS), as with any mapping.
"""

import hashlib
import os
import stat
import weakref
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import torch

from harness.errors import Code, HarnessError
from harness.formats.checkpoint.bound import Hold, hold
from harness.formats.recording.check import PARTIAL, StepRules, check_digest, check_file, truncated
from harness.formats.recording.format import DTYPES, MANIFEST_NAME
from harness.formats.recording.manifest import (
    RESERVED_PREFIXES,
    Manifest,
    Phase,
    StepEntry,
    TapEntry,
    load_manifest,
)
from harness.formats.safetensors_header import TensorEntry

TORCH_DTYPES: dict[str, torch.dtype] = {short: getattr(torch, name) for name, short in DTYPES.items()}
"""The dtypes that a recording holds, as torch's own."""
_MAX_DIGEST_THREADS = 4
_MAP_FROM_BYTES = 1 << 20
"""Smaller tensors are read: a copy costs less than the page faults of a mapping."""
_KEPT_BYTES = 64 << 20
"""Small step files that a recording keeps in memory: those of decode are read tap by tap, and are many."""


class Recording:
    """A recording opened for reading.

    Use it as a context manager: the digests of the step files are computed in the background, and leaving the block
    waits for them. Trust what was read before only after that, or after `verify_all`.
    """

    path: Path
    manifest: Manifest
    manifest_sha256: str
    """Digest of the bytes that the manifest was read from; empty if it was not read from a file."""
    steps: Sequence["Step"]

    taps: Sequence[TapEntry]
    """Its taps, under the names that `with_names` gives them."""

    def __init__(self, path: Path, manifest: Manifest, steps: Sequence["Step"], *, manifest_sha256: str = "") -> None:
        """Use `Recording.open`."""
        self.path = path
        self.manifest = manifest
        self.manifest_sha256 = manifest_sha256
        self.steps = steps
        self.taps = manifest.taps
        self._hold: Hold | None = None
        """Of a recording in the cache."""

    def with_names(self, aliases: Mapping[str, str]) -> Self:
        """Show taps under other names, from now on; of two taps that get one name the first is shown.

        `aliases` has the new name of every tap that gets one.
        """
        names: dict[str, str] = {}
        for entry in self.manifest.taps:
            names.setdefault(aliases.get(entry.name, entry.name), entry.name)
        self.taps = [
            entry.model_copy(update={"name": name})
            for entry in self.manifest.taps
            for name, stored in names.items()
            if stored == entry.name
        ]
        is_as_stored = list(names) == [entry.name for entry in self.manifest.taps]
        for step in self.steps:
            step.names = {} if is_as_stored else names
        return self

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, verify: bool = True) -> Self:
        """Open the recording in the folder `path` and check all of it, the digests in the background.

        `verify` says whether to compute the digests of the step files.

        Raises:
            HarnessError: NOT_A_RECORDING, BAD_MANIFEST, UNKNOWN_SCHEMA, STEP_MISSING, STEP_TRUNCATED, STEP_MALFORMED.
        """
        path = Path(path)
        held = hold(path)
        manifest, digest = load_manifest(_manifest_path(path))
        rules = StepRules(manifest)
        small = _small_files(manifest.steps)
        steps = [Step(path, entry, rules, is_kept=entry.index in small) for entry in manifest.steps]
        for step in steps:
            step.read_header()
        _share_content(steps)
        for step in steps:
            step.check()
        recording = cls(path, manifest, steps, manifest_sha256=digest)
        recording._hold = held
        if verify:
            recording._start_digests()
        return recording

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self._cancel_digests()

    def located(self, steps: torch.Tensor, places: torch.Tensor) -> "Located":
        """Return where rows are by the index of their step and their place in the taps there, [n] int64, n > 0."""
        groups = self._groups[steps]
        _, counts = groups.unique(return_counts=True)
        order = groups.argsort(stable=True)
        parts = [
            (self.steps[int(steps[at[0]])], self._places[steps[at]], places[at]) for at in order.split(counts.tolist())
        ]
        return Located(parts, order.argsort())

    @cached_property
    def _groups(self) -> torch.Tensor:
        """[steps] int64: a number that steps share whose content is kept side by side."""
        kept = [step.index if step.kept is None else step.kept.steps[0].index for step in self.steps]
        return torch.tensor(kept)

    @cached_property
    def _places(self) -> torch.Tensor:
        """[steps] int64: which of the steps whose content is kept side by side a step is."""
        return torch.tensor([step.place for step in self.steps])

    @property
    def unverified(self) -> tuple[str, ...]:
        """Step files whose digest the producer did not compute, or that were not verified."""
        return tuple(step.entry.file for step in self.steps if step.digest is None)

    @property
    def bits(self) -> str | None:
        """Digest of all numbers in it, equal where these are; None if the digest of a step is not known."""
        digests = [step.entry.sha256 for step in self.steps]
        known = [digest for digest in digests if digest is not None]
        return hashlib.sha256("".join(known).encode()).hexdigest() if len(known) == len(digests) else None

    def verify_all(self) -> None:
        """Wait until the digest of every step file is known to be right.

        Raises:
            HarnessError: STEP_ALTERED for the first that is not.
        """
        for step in self.steps:
            step.raise_if_altered(wait=True)

    def close(self) -> None:
        """Verify all digests, and stop verifying.

        Raises:
            HarnessError: STEP_ALTERED.
        """
        try:
            self.verify_all()
        finally:
            self._cancel_digests()

    def _cancel_digests(self) -> None:
        for step in self.steps:
            if step.digest is not None:
                step.digest.cancel()

    def _start_digests(self) -> None:
        num_threads = min(_MAX_DIGEST_THREADS, os.cpu_count() or 1)
        pool = ThreadPoolExecutor(num_threads, thread_name_prefix="recording-digest")
        for step in self.steps:
            if step.entry.sha256 is not None:
                step.digest = pool.submit(check_digest, step.path, step.entry.sha256)
        weakref.finalize(self, pool.shutdown, wait=False, cancel_futures=True)


class Step:
    """One step of a recording. Its tensors may be views of the file: read them only, and drop them when done."""

    def __init__(self, folder: Path, entry: StepEntry, rules: StepRules, *, is_kept: bool = False) -> None:
        """Use `Recording.steps`."""
        self.is_kept = is_kept
        self.kept: _Kept | None = None
        """The content of the file beside that of steps alike, if it is kept."""
        self.place = 0
        """Which of these steps it is."""
        self.path = folder / entry.file
        self.entry = entry
        self.digest: Future[None] | None = None
        self.names: Mapping[str, str] = {}
        """Stored name of each tap by the name under which it is shown; empty if they are the same."""
        self._rules = rules
        self._layout: Mapping[str, TensorEntry] = {}
        self._data_offset = 0
        self._indices: dict[str, torch.Tensor] = {}

    @property
    def index(self) -> int:
        """Place in the recording."""
        return self.entry.index

    @property
    def phase(self) -> Phase:
        """The phase of this step."""
        return self.entry.phase

    @property
    def request(self) -> torch.Tensor:
        """Request id of each row: int32[rows]."""
        return self._index("rows.request")

    @property
    def position(self) -> torch.Tensor:
        """Position of each row's token in its request: int32[rows]."""
        return self._index("rows.position")

    @property
    def sampled(self) -> torch.Tensor | None:
        """The engine's choice after each row, -1 for none: int64[rows]; None if it sampled nothing."""
        return self._optional("rows.sampled")

    @property
    def ambiguous(self) -> torch.Tensor | None:
        """Indices of rows that could not be told from others: int64[some]; None if there are none."""
        return self._optional("rows.ambiguous")

    @property
    def slot_mapping(self) -> torch.Tensor | None:
        """KV cache slot of each row, -1 for none: int64[rows]; None if the engine did not say."""
        return self._optional("kv.slot_mapping")

    @property
    def block_tables(self) -> Mapping[int, list[int]] | None:
        """KV cache blocks of each request, by request id; None if the engine did not say."""
        requests, table = self._optional("kv.requests"), self._optional("kv.block_table")
        if requests is None or table is None:
            return None
        rows = zip(requests.tolist(), table.tolist(), strict=True)
        return {request: [block for block in blocks if block >= 0] for request, blocks in rows}

    @property
    def tap_names(self) -> list[str]:
        """Taps of this step, in the order in which they were written."""
        stored = [name for name in self._layout if not name.startswith(RESERVED_PREFIXES)]
        if not self.names:
            return stored
        shown = {stored: name for name, stored in self.names.items()}
        return [shown[name] for name in stored if name in shown]

    def has(self, name: str) -> bool:
        """Whether this step holds the tap `name`."""
        return self._stored(name) in self._layout and not name.startswith(RESERVED_PREFIXES)

    def _stored(self, name: str) -> str:
        return self.names.get(name, "") if self.names else name

    def tap(self, name: str) -> torch.Tensor:
        """Return the tap `name`, [rows that it covers, ...]: mapped if it is large, and gone when it is dropped.

        Raises:
            KeyError: this step has no such tap.
            HarnessError: STEP_ALTERED, where the file's digest is already known to be wrong.
        """
        if name.startswith(RESERVED_PREFIXES):
            raise KeyError(name)
        self.raise_if_altered()
        return self._tensor(self._layout[self._stored(name)])

    def beside(self, name: str) -> tuple[torch.Tensor, int]:
        """Return the tap of this step and those that are kept beside it, and the number of its rows in one step."""
        if self.kept is None:
            return self.tap(name), 0
        for step in self.kept.steps:
            step.raise_if_altered()
        tensor = self._layout[self._stored(name)]
        return self.kept.tensor(tensor, self._data_offset, 0, len(self.kept.steps)), tensor.shape[0]

    def rows_of(self, name: str) -> torch.Tensor | None:
        """Return which of the step's rows the tap covers, int64[its rows]; None for all of them."""
        return self._optional(PARTIAL + self._stored(name))

    def is_whole(self, name: str) -> bool:
        """Whether the tap covers all of the step's rows."""
        return PARTIAL + self._stored(name) not in self._layout

    def num_bytes_of(self, name: str) -> int:
        """Return how many bytes the tap has in this step."""
        return self._layout[self._stored(name)].num_bytes

    def num_rows_of(self, name: str) -> int:
        """Return how many of the step's rows the tap covers."""
        covered = self.rows_of(name)
        return self.entry.num_rows if covered is None else len(covered)

    def read_header(self) -> None:
        """Read the file's header, and check it against the size of the file and the manifest's.

        Raises:
            HarnessError: STEP_MISSING, STEP_TRUNCATED or STEP_MALFORMED.
        """
        check_file(self.path, self.entry)
        with self._altered_first():
            header = self._rules.header(self.path, self.entry)
        self._data_offset, self._layout = header.data_offset, header.by_name

    def check(self) -> None:
        """Check the tensors against the manifest, but for the file's digest.

        Raises:
            HarnessError: STEP_MALFORMED.
        """
        with self._altered_first():
            self._rules.check(self.path, self.entry, self._layout, self._index)

    @contextmanager
    def _altered_first(self) -> Iterator[None]:
        """If a file is not as it was recorded, say that instead of what is wrong in it."""
        try:
            yield
        except HarnessError:
            if self.entry.sha256 is not None:
                check_digest(self.path, self.entry.sha256)
            raise

    def raise_if_altered(self, *, wait: bool = False) -> None:
        """Raise STEP_ALTERED if the digest is known to be wrong, or with `wait` as soon as it is known."""
        if self.digest is None or self.entry.sha256 is None:
            return
        if self.digest.cancelled():
            if wait:
                check_digest(self.path, self.entry.sha256)
        elif wait or self.digest.done():
            self.digest.result()

    def _optional(self, name: str) -> torch.Tensor | None:
        return self._index(name) if name in self._layout else None

    def _index(self, name: str) -> torch.Tensor:
        """Return an index tensor; they are small and asked for often, so what was checked stays."""
        if name not in self._indices:
            self._indices[name] = self._tensor(self._layout[name])
        return self._indices[name]

    @property
    def layout(self) -> int:
        """A number that is equal for steps of a recording with the same tensors in the same places."""
        return id(self._layout)

    def _tensor(self, tensor: TensorEntry) -> torch.Tensor:
        return self._read(tensor) if self.kept is None else self.kept.tensor(tensor, self._data_offset, self.place)

    def _read(self, tensor: TensorEntry) -> torch.Tensor:
        """Return a tensor of the file: read if it is small, else a private mapping that goes when the tensor does."""
        dtype, begin = TORCH_DTYPES[tensor.dtype], self._data_offset + tensor.begin
        if not tensor.num_bytes:
            return torch.empty(tensor.shape, dtype=dtype)
        try:
            with self.path.open("rb", buffering=0) as file:
                if (size := os.fstat(file.fileno()).st_size) != self.entry.num_bytes:
                    raise truncated(self.path, self.entry, size)
                if tensor.num_bytes < _MAP_FROM_BYTES or begin % dtype.itemsize:
                    file.seek(begin)
                    data = np.empty(tensor.num_bytes, np.uint8)
                    if file.readinto(data.data) != tensor.num_bytes:
                        raise truncated(self.path, self.entry, self.path.stat().st_size)
                else:
                    data = np.memmap(file, mode="c", offset=begin, shape=tensor.num_bytes)
        except (OSError, ValueError) as error:  # a mapping raises ValueError beyond the end of the file
            raise _unreadable(self.path, error) from None
        return torch.from_numpy(data).view(dtype).view(tensor.shape)


class Located:
    """Places of rows, worked out once for all taps that cover the same rows of the same steps."""

    def __init__(self, parts: Sequence[tuple[Step, torch.Tensor, torch.Tensor]], order: torch.Tensor) -> None:
        """Use `Recording.located`."""
        self._parts = parts
        """A step of each group that is kept side by side, which of these steps each row is in, and where there."""
        self._order = as_slice(order)
        self._indices: dict[tuple[int, int], torch.Tensor | slice] = {}

    def rows(self, name: str) -> torch.Tensor:
        """Return the rows of a tap, [n, ...]: a view where they lie side by side.

        Raises:
            KeyError: one of the steps has no such tap.
            HarnessError: STEP_ALTERED.
        """
        parts = []
        for at, (step, places, rows) in enumerate(self._parts):
            tensor, num_rows = step.beside(name)
            key = at, num_rows
            if key not in self._indices:
                self._indices[key] = as_slice(places * num_rows + rows)
            parts.append(tensor[self._indices[key]])
        together = parts[0] if len(parts) == 1 else torch.cat(parts)
        return together[self._order]


def as_slice(indices: torch.Tensor) -> torch.Tensor | slice:
    """Return indices [n], n > 0, as a slice where each is one more than that before it."""
    first, last = int(indices[0]), int(indices[-1])
    is_run = last - first == len(indices) - 1 and bool((indices.diff() == 1).all())
    return slice(first, last + 1) if is_run else indices


class _Kept:
    """The content of small step files with the same layout, read at once: a tap of all of them is one tensor."""

    def __init__(self) -> None:
        self.steps = list[Step]()

    @cached_property
    def _content(self) -> torch.Tensor:
        """[steps, bytes] uint8."""
        content = bytearray().join(_read_file(step.path, step.entry) for step in self.steps)
        return torch.frombuffer(content, dtype=torch.uint8).view(len(self.steps), -1)

    def tensor(self, tensor: TensorEntry, data_offset: int, place: int, count: int = 1) -> torch.Tensor:
        """Return a tensor of some of the files, from the one at `place` on, one after the other: [rows, ...]."""
        begin, dtype = data_offset + tensor.begin, TORCH_DTYPES[tensor.dtype]
        part = self._content[place : place + count, begin : begin + tensor.num_bytes]
        part = part.reshape(-1)
        if part.storage_offset() % dtype.itemsize:
            part = part.clone()
        return part.view(dtype).view(count * tensor.shape[0], *tensor.shape[1:])


def _share_content(steps: Sequence[Step]) -> None:
    """Have steps of the same layout and size keep their content together, if it is kept."""
    alike = dict[tuple[int, int], _Kept]()
    for step in steps:
        if step.is_kept:
            step.kept = alike.setdefault((step.layout, step.entry.num_bytes), _Kept())
            step.place = len(step.kept.steps)
            step.kept.steps.append(step)


def _small_files(entries: Sequence[StepEntry]) -> set[int]:
    """Return the steps whose files are kept in memory, as many of the small ones as there is room for."""
    chosen, room = set(), _KEPT_BYTES
    for entry in entries:
        if entry.num_bytes < min(room, _MAP_FROM_BYTES):
            chosen.add(entry.index)
            room -= entry.num_bytes
    return chosen


def _read_file(path: Path, entry: StepEntry) -> bytearray:
    content = bytearray(entry.num_bytes)
    try:
        with path.open("rb", buffering=0) as file:
            size = file.readinto(content)
            if size != entry.num_bytes or file.read(1):
                raise truncated(path, entry, path.stat().st_size)
    except OSError as error:
        raise _unreadable(path, error) from None
    return content


def _unreadable(path: Path, error: Exception) -> HarnessError:
    hint = "the recording changed while it was read: copy it again, or record again"
    return HarnessError(Code.STEP_MISSING, f"a step file cannot be read: {error}", where=path, hint=hint)


def _manifest_path(folder: Path) -> Path:
    try:
        is_file = stat.S_ISREG((folder / MANIFEST_NAME).stat().st_mode)
    except (OSError, ValueError):
        is_file = False
    if is_file:
        return folder / MANIFEST_NAME
    raise HarnessError(
        Code.NOT_A_RECORDING,
        f"the folder has no {MANIFEST_NAME}",
        where=folder,
        expected=f"a folder with {MANIFEST_NAME} and one safetensors file per step",
        hint="record again: a recording that was interrupted has no manifest",
    )
