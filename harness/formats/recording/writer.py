"""Writes a recording while the engine runs: taps go to their step's file as they come, the manifest comes last.

A quarter of a megabyte is held in memory at most. Until the manifest is in place the folder does not read as a
recording: a run that is killed, or that runs out of disk, leaves no half-truth behind.

A step's file is written front to back while its tensors are still being produced. The format puts a JSON header with
every tensor's place before the first tensor. `TensorStream` reserves room for it, streams the tensors after it, and
writes the header last, padded with spaces as the format allows. Only where the header outgrows its room is the data
moved.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import struct
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from types import SimpleNamespace, TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from harness.base.files import writing
from harness.errors import Code, HarnessError
from harness.formats.recording import arguments
from harness.formats.recording.arguments import Ints, RankInfo, RequestLengths, RunInfo, StepArguments, refuse
from harness.formats.recording.format import DTYPES as KNOWN_DTYPES
from harness.formats.recording.format import MANIFEST_NAME, SCHEMA_VERSION, as_bytes, dtype_name
from harness.formats.safetensors_header import LENGTH_BYTES

if TYPE_CHECKING:
    import torch

    from harness.formats.recording.manifest import RequestInfo


ALIGNMENT = 64
"""The data section begins at a multiple of this many bytes."""
_CHUNK_BYTES = 1 << 23
_KEPT_BYTES = 1 << 18
"""Small tensors that are written at once: a system call for each would be half of the time of a tiny model's taps."""


class TensorStream:
    """One safetensors file under construction. Every method raises CANNOT_WRITE where the system refuses to write."""

    def __init__(self, path: Path, *, reserve_bytes: int) -> None:
        """Create the file and reserve `reserve_bytes` for its header."""
        self.path = path
        self._entries: dict[str, dict[str, object]] = {}
        self._begins: dict[str, int] = {}
        self._room = _header_room(reserve_bytes)
        self._end, self._unwritten = 0, bytearray()
        with writing(path):
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def add(self, name: str, dtype: str, shape: tuple[int, ...], data: memoryview) -> None:
        """Append the tensor `name`, whose bytes are `data`."""
        begin, end = self._end, self._end + len(data)
        if len(self._unwritten) + len(data) > _KEPT_BYTES:
            self._flush()
        if len(data) > _KEPT_BYTES:
            self._write(data, begin)
        else:
            self._unwritten += data
        self._entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": (begin, end)}
        self._begins[name], self._end = begin, end

    def patch(self, name: str, data: memoryview) -> None:
        """Write the bytes of a tensor again, whose size stays as it is."""
        self._flush()
        self._write(data, self._begins[name])

    def finish(self) -> int:
        """Write the header, close the file and return its size in bytes."""
        text = json.dumps(self._entries, separators=(",", ":"), ensure_ascii=False).encode()
        room = max(self._room, _header_room(len(text)))
        self._flush()
        with writing(self.path):
            self._move_data(room - self._room)
            head = struct.pack("<Q", room) + text.ljust(room)
            _write_all(self._fd, memoryview(head), 0)
        self.close()
        return LENGTH_BYTES + room + self._end

    def close(self) -> None:
        """Close the file as it is."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            with writing(self.path):
                os.close(fd)

    def abandon(self) -> None:
        """Close the file and remove it."""
        with suppress(HarnessError):
            self.close()
        with suppress(OSError):
            self.path.unlink()

    def _flush(self) -> None:
        """Write what was appended since the last time."""
        self._write(memoryview(self._unwritten), self._end - len(self._unwritten))
        self._unwritten = bytearray()

    def _write(self, data: memoryview, begin: int) -> None:
        with writing(self.path):
            _write_all(self._fd, data, LENGTH_BYTES + self._room + begin)

    def _move_data(self, by: int) -> None:
        """Move the data `by` bytes towards the end of the file, its last bytes first."""
        stop = self._end if by else 0
        head = LENGTH_BYTES + self._room
        while stop > 0:
            start = max(0, stop - _CHUNK_BYTES)
            chunk = os.pread(self._fd, stop - start, head + start)
            _write_all(self._fd, memoryview(chunk), head + by + start)
            stop = start
        self._room += by


def _header_room(num_bytes: int) -> int:
    """Return the smallest header length of at least `num_bytes` after which the data is aligned."""
    return -(-(LENGTH_BYTES + num_bytes) // ALIGNMENT) * ALIGNMENT - LENGTH_BYTES


def _write_all(fd: int, data: memoryview, offset: int) -> None:
    while data:
        written = os.pwrite(fd, data, offset)
        data, offset = data[written:], offset + written


_HEADER_BYTES_PER_TAP = 192


@dataclass(slots=True, kw_only=True)
class _OpenStep:
    """The step between `begin_step` and `end_step`."""

    stream: TensorStream
    rows: StepArguments


class RecordingWriter:
    """Records one run of an engine in a new folder.

    Use it as a context manager: on leaving the block the manifest is written; on an exception inside the block no
    manifest is written and the step files are removed.

        run = RunInfo(producer=..., model=..., dtype="bfloat16", device="cpu")
        with RecordingWriter(path, run, [RequestInfo(id=0, token_ids=[5, 7], prompt_length=2)]) as writer:
            writer.begin_step(phase="prefill", request=[0, 0], position=[0, 1], sampled_rows=[1])
            writer.tap("model.embed_tokens", hidden)  # [2, hidden]
            writer.end_step(sampled=[9])

    Raises:
        HarnessError: OUTPUT_EXISTS, CANNOT_WRITE, or BAD_RECORDER_CALL for a call that contradicts an earlier one.
            After CANNOT_WRITE the recording is gone; after BAD_RECORDER_CALL it is as it was before the call.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        run: RunInfo,
        requests: Sequence[RequestInfo],
        *,
        ranks: RankInfo | None = None,
        expected_taps: int = 64,
    ) -> None:
        """Begin a recording.

        Args:
            path: its folder: new, or empty.
            run: who runs which model, where and how.
            requests: all that the steps may have rows of.
            ranks: the part of a sharded engine that this is; None for the whole.
            expected_taps: number of taps for which the step files' headers have space.
        """
        self.path, ranks = Path(path), ranks or RankInfo()
        self._manifest = arguments.validated(
            "Manifest", "the recording's description is invalid", "RecordingWriter", schema_version=SCHEMA_VERSION,
            producer=run.producer, model=run.model, dtype=run.dtype, device=run.device,
            environment=dict(run.environment), requests=list(requests), steps=[], taps=[], schedule=run.schedule,
            rank=ranks.rank, world_size=ranks.world_size, numerics=run.numerics,
        )  # fmt: skip
        self._tokens = RequestLengths(requests)
        self._expected_taps = expected_taps
        self._shards = dict(ranks.shards)
        self._taps: dict[str, Any] = {}
        self._step: _OpenStep | None = None
        self._entries: list[Future[dict[str, Any]]] = []
        self._is_closed = False
        self._made_folder = _make_folder(self.path)
        self._digests = ThreadPoolExecutor(max_workers=1, thread_name_prefix="recording-digest")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self.close()
        finally:
            self.abandon()  # does nothing to a recording that was closed

    def begin_step(
        self,
        *,
        phase: str,
        request: Ints,
        position: Ints,
        sampled_rows: Ints = (),
        slot_mapping: Ints | None = None,
        block_tables: Mapping[int, Sequence[int]] | None = None,
        partial_rows: Mapping[str, Ints] | None = None,
        ambiguous_rows: Ints = (),
    ) -> None:
        """Begin a step that computes `len(request)` rows.

        Args:
            phase: `prefill`, `decode`, `mixed`, or `readback` for rows read back from the KV cache.
            request: id of each row's request.
            position: position of each row's token in its request.
            sampled_rows: indices of the rows from which the engine samples; their choices go to `end_step`.
            slot_mapping: KV cache slot of each row; -1 for none.
            block_tables: blocks of each request, by request id.
            partial_rows: for a tap that covers only some of the rows, their indices, by the tap's name.
            ambiguous_rows: indices of rows that the observer of the engine cannot tell from others: taps may leave
                them out, and they are not judged.
        """
        where = self._where()
        if self._is_closed:
            refuse("begin_step after the recording was closed", where=self.path)
        if self._step is not None:
            refuse("begin_step before the last step ended", where=where)
        rows = arguments.step_rows(
            where,
            self._tokens,
            phase=phase,
            request=request,
            position=position,
            sampled_rows=sampled_rows,
            slot_mapping=slot_mapping,
            tables=block_tables,
            partial_rows=partial_rows or {},
            ambiguous_rows=ambiguous_rows,
        )
        self._step = _OpenStep(stream=self._new_stream(), rows=rows)
        for name, values in rows.tensors.items():
            self._add(self._step, name, values)

    def extend_request(self, request_id: int, token_ids: Sequence[int]) -> None:
        """Append tokens to a request that goes on with what was chosen; later steps may have rows of them."""
        next(one for one in self._manifest.requests if one.id == request_id).token_ids.extend(token_ids)
        self._tokens = RequestLengths(self._manifest.requests)

    def tap(self, name: str, tensor: torch.Tensor | np.ndarray[Any, Any]) -> None:
        """Write the tap `name` of this step: [rows, ...], torch's on any device or numpy's, with any strides."""
        step = self._open_step(f"tap {name!r}")
        where = f"{self._where()}: tap {name!r}"
        if name in step.stream:
            refuse("the tap is recorded twice in one step", where=where)
        partial = step.rows.partial_rows.get(name)
        expected = step.rows.num_rows if partial is None else len(partial)
        if tensor.ndim == 0 or len(tensor) != expected:
            refuse("a tap has one entry a row", where=where, expected=f"[{expected}, ...]", actual=list(tensor.shape))
        self._check_tap(where, name, tensor)
        self._add(step, name, tensor)

    def end_step(self, sampled: Ints = ()) -> None:
        """End the step; `sampled` are the engine's choices for each of the step's `sampled_rows`."""
        step = self._open_step("end_step")
        choices = arguments.column(f"{self._where()}: sampled", sampled, len(step.rows.sampled_rows), at_least=0)
        try:
            if len(choices):
                column = np.full(step.rows.num_rows, -1)
                column[step.rows.sampled_rows] = choices
                step.stream.patch("rows.sampled", as_bytes(column))
            num_bytes = step.stream.finish()
        except HarnessError:
            self.abandon()
            raise
        self._step = None
        # The digest covers the header, which was written last: the file is read again, out of the page cache and
        # beside the engine's next step.
        self._entries.append(self._digests.submit(_entry, len(self._entries), step, num_bytes))

    def close(self) -> None:
        """Finish the recording: wait for the digests, then put the manifest in place by an atomic rename."""
        if self._is_closed:
            return
        if self._step is not None:
            refuse("close before the last step ended", where=self._where())
        try:
            steps = [entry.result() for entry in self._entries]
            manifest = {**plain(self._manifest), "steps": steps, "taps": plain(list(self._taps.values()))}
            if manifest["numerics"] is None:  # one that declares nothing stays readable by those who know no such field
                del manifest["numerics"]
            _write_atomically(self.path / MANIFEST_NAME, json.dumps(manifest, separators=(",", ":")).encode())
        except BaseException:
            self.abandon()
            raise
        self._is_closed = True
        self._digests.shutdown()

    def abandon(self) -> None:
        """Give the recording up: remove its step files and write no manifest. A closed recording stays."""
        if self._is_closed:
            return
        self._is_closed = True
        self._digests.shutdown(cancel_futures=True)
        if self._step is not None:
            self._step.stream.abandon()
            self._step = None
        for index in range(len(self._entries)):
            with suppress(OSError):
                (self.path / _file_name(index)).unlink()
        if self._made_folder:
            with suppress(OSError):
                self.path.rmdir()

    def _new_stream(self) -> TensorStream:
        num_taps = max(self._expected_taps, len(self._taps))
        path = self.path / _file_name(len(self._entries))
        return TensorStream(path, reserve_bytes=(num_taps + 4) * _HEADER_BYTES_PER_TAP)

    def _add(self, step: _OpenStep, name: str, tensor: Any) -> None:
        try:
            step.stream.add(name, str(dtype_name(tensor)), tuple(tensor.shape), as_bytes(tensor))
        except HarnessError:
            self.abandon()
            raise

    def _where(self) -> str:
        return f"step {len(self._entries)}"

    def _open_step(self, call: str) -> _OpenStep:
        if self._step is None:
            refuse(f"{call} outside of a step", where=self.path)
        return self._step

    def _check_tap(self, where: str, name: str, tensor: Any) -> None:
        """Check that the tap's dtype and row are those of the steps before, or take them as the first."""
        dtype, shape = dtype_name(tensor), list(tensor.shape[1:])
        known = self._taps.get(name)
        if dtype is None:
            refuse(
                "no recording holds this dtype",
                where=where,
                expected=", ".join(KNOWN_DTYPES.values()),
                actual=tensor.dtype,
            )
        if known is None:
            self._taps[name] = arguments.validated(
                "TapEntry",
                "the tap is invalid",
                where,
                name=name,
                dtype=dtype,
                shape=shape,
                shard=self._shards.get(name),
            )
        elif (dtype, shape) != (known.dtype, known.shape):
            what, expected = "a tap keeps its dtype and its row's shape", f"{known.dtype} {known.shape}"
            refuse(what, where=where, expected=expected, actual=f"{dtype} {shape}")


def is_unfinished(folder: Path) -> bool:
    """Return whether the folder holds step files of a recording that never got its manifest."""
    return not (folder / MANIFEST_NAME).exists() and any(folder.glob("step-*.safetensors"))


def discard_unfinished(folder: Path, *, keep_folder: bool) -> None:
    """Remove the step files of a recording whose writer was killed; one that has its manifest stays."""
    if (folder / MANIFEST_NAME).exists():
        return
    with suppress(OSError):
        for path in (*folder.glob("step-*.safetensors"), folder / f".{MANIFEST_NAME}.tmp"):
            path.unlink(missing_ok=True)
        if not keep_folder:
            folder.rmdir()


def _entry(index: int, step: _OpenStep, num_bytes: int) -> dict[str, Any]:
    path = step.stream.path
    with writing(path), path.open("rb", buffering=0) as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {
        "index": index,
        "phase": step.rows.phase,
        "file": path.name,
        "num_rows": step.rows.num_rows,
        "num_bytes": num_bytes,
        "sha256": digest,
    }


def plain(value: Any) -> Any:
    """Return what JSON can hold of a part of the manifest: pydantic's models, or what stands for them."""
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, Mapping):
        return {name: plain(item) for name, item in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if hasattr(value, "model_dump"):
        return plain(value.model_dump())
    if is_dataclass(value) and not isinstance(value, type):
        return plain(asdict(value))
    return plain(vars(value)) if isinstance(value, SimpleNamespace) else value


def _file_name(index: int) -> str:
    return f"step-{index:05d}.safetensors"


def _make_folder(path: Path) -> bool:
    """Make the folder, unless an empty one is there; return whether it was made."""
    with writing(path):
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            if path.is_dir() and not any(path.iterdir()):
                return False
            what = "the output folder exists and is not empty" if path.is_dir() else "the output path is a file"
            hint = "choose another folder, or remove this one"
            raise HarnessError(Code.OUTPUT_EXISTS, what, where=path, hint=hint) from None
    return True


def _write_atomically(path: Path, text: bytes) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    with writing(path):
        try:
            with temporary.open("xb") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
