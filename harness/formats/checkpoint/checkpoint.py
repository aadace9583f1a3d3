"""A checkpoint on disk, opened once: each part of it is read when it is first asked for, and kept.

Its files may be damaged or hostile: what they say is checked against the files that are there. The hashes name what a
recording was made from, and are the keys under which goldens are cached. Nothing here needs torch; the tokenizer needs
transformers.
"""

import hashlib
import os
import reprlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, NoReturn

from harness.base.files import parse_json, read_bytes
from harness.errors import Code, HarnessError
from harness.formats.checkpoint.bound import Hold, hold
from harness.formats.checkpoint.cache import FileStamp, files_digest, folder_digest
from harness.formats.checkpoint.tokenizer import HFTokenizer, has_tokenizer
from harness.formats.safetensors_header import Header, TensorEntry, read_header

if TYPE_CHECKING:
    import torch


def not_a_checkpoint(what: str, where: object, hint: str) -> NoReturn:
    """Raise NOT_A_CHECKPOINT."""
    expected = "a folder in HuggingFace's layout, or a hub id"
    raise HarnessError(Code.NOT_A_CHECKPOINT, what, where=where, expected=expected, hint=hint)


def bad_config(what: str, where: object, actual: object) -> NoReturn:
    """Raise BAD_CONFIG."""
    raise HarnessError(Code.BAD_CONFIG, what, where=where, actual=actual, hint="download the checkpoint again")


def read_table(path: Path) -> tuple[dict[str, Any], bytes]:
    """Return the JSON object in a file, and the bytes that it was read from.

    Raises:
        HarnessError: BAD_CONFIG.
    """
    try:
        content = read_bytes(path)
        table = parse_json(content)
    except OSError as error:
        bad_config(f"the file cannot be read: {error.strerror}", path, None)
    except ValueError as error:  # JSON and UTF-8 alike
        bad_config("the file is not JSON", path, reprlib.repr(str(error)))
    if not isinstance(table, dict):
        bad_config("the file is not a JSON object", path, reprlib.repr(table))
    return table, content


WEIGHTS_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardIndex:
    """The safetensors files of a checkpoint."""

    files: tuple[Path, ...]
    """The single one, or those that the index names, by name."""
    file_of: Mapping[str, Path] = field(default_factory=dict)
    """The shard of each tensor, by the index; empty for a single file, which has no index."""


def read_shard_index(folder: Path) -> ShardIndex:
    """Return the safetensors files of a checkpoint, all of which exist inside of the folder.

    Raises:
        HarnessError: NOT_A_CHECKPOINT without weights, BAD_CONFIG for a bad index, MISSING_SHARD.
    """
    if (folder / WEIGHTS_NAME).is_file():
        return ShardIndex(files=(folder / WEIGHTS_NAME,))
    path = folder / INDEX_NAME
    if not path.is_file():
        others = sorted(file.name for file in folder.glob("*.bin")) if folder.is_dir() else []
        hint = f"convert {others[0]} to safetensors" if others else "pass the folder that holds the safetensors files"
        not_a_checkpoint(f"the folder has neither {WEIGHTS_NAME} nor {INDEX_NAME}", folder, hint)
    weight_map = read_table(path)[0].get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        bad_config("the index has no weight_map", path, reprlib.repr(weight_map))
    for tensor, file in weight_map.items():
        _check_shard(folder, tensor, file)
    files = tuple(folder / name for name in sorted(set(weight_map.values())))
    return ShardIndex(files=files, file_of={tensor: folder / file for tensor, file in weight_map.items()})


def locate_tensors(index: ShardIndex, headers: Mapping[Path, Header]) -> dict[str, tuple[TensorEntry, Path]]:
    """Return for every tensor its entry and the shard that holds it.

    Raises:
        HarnessError: TENSORS_CONTRADICT_CONFIG where index and shards disagree.
    """
    located: dict[str, tuple[TensorEntry, Path]] = {}
    for shard, header in headers.items():
        for entry in header.tensors:
            if entry.name in located:
                _contradiction("two shards hold the same tensor", shard, entry.name, located[entry.name][1].name)
            located[entry.name] = (entry, shard)
    for name, file in index.file_of.items():
        if name not in located:
            _contradiction("the index names a tensor that its shard lacks", file, name, None)
        if located[name][1].name != file.name:
            _contradiction("a tensor is in another shard than the index says", file, name, located[name][1])
    return located


def _check_shard(folder: Path, tensor: str, file: object) -> None:
    where = f"{folder / INDEX_NAME}: weight_map.{reprlib.repr(tensor)}"
    if not isinstance(file, str) or not file.endswith(".safetensors") or "\0" in file:
        bad_config("the index names no safetensors file", where, reprlib.repr(file))
    if PurePosixPath(file).is_absolute() or ".." in PurePosixPath(file).parts:  # not resolved: hub caches are links
        bad_config("a shard lies outside of the checkpoint's folder", where, reprlib.repr(file))
    try:
        is_there = (folder / file).is_file()
    except OSError as error:  # a name too long
        bad_config(f"the index names no file: {error.strerror}", where, reprlib.repr(file))
    if not is_there:
        raise HarnessError(
            Code.MISSING_SHARD,
            f"the shard {file} is missing",
            where=folder,
            expected=f"{file}, which holds {tensor} and others",
            actual=", ".join(sorted(shard.name for shard in folder.glob("*.safetensors"))) or "no safetensors files",
            hint="download the checkpoint again",
        )


def _contradiction(what: str, where: object, expected: object, actual: object) -> NoReturn:
    hint = f"write {INDEX_NAME} again, or download the checkpoint again"
    raise HarnessError(Code.TENSORS_CONTRADICT_CONFIG, what, where=where, expected=expected, actual=actual, hint=hint)


def read_shard(path: Path, name: str) -> "torch.Tensor":
    """Return a tensor of a shard whose header was read before.

    Raises:
        HarnessError: MISSING_SHARD, DAMAGED_SAFETENSORS: the file has gone since, or is another one now.
    """
    from safetensors import safe_open

    with reading_shard(path), safe_open(path, framework="pt") as file:
        tensor: torch.Tensor = file.get_tensor(name)
        return tensor


@contextmanager
def reading_shard(path: Path) -> Iterator[None]:
    """Say of what the library raises in the block that the file has gone or was changed; raises as `read_shard`."""
    from safetensors import SafetensorError

    try:
        yield
    except FileNotFoundError as error:
        raise HarnessError(Code.MISSING_SHARD, f"the file is gone: {error}", where=path) from error
    except (SafetensorError, OSError) as error:
        raise HarnessError(Code.DAMAGED_SAFETENSORS, f"the file was changed: {error}", where=path) from error


CONFIG_NAME = "config.json"


@lru_cache(maxsize=16)
def _read_config(path: Path, _stamp: FileStamp) -> tuple[Mapping[str, Any], str]:
    """Read the table in a config.json and the sha256 of the same bytes, once while the file stays as it is."""
    table, content = read_table(path)
    return table, hashlib.sha256(content).hexdigest()


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint in HuggingFace's layout. Two of the same folder are equal."""

    folder: Path

    @classmethod
    def of(cls, source: "Checkpoint | str | os.PathLike[str]") -> "Checkpoint":
        """Return `source` itself, or the checkpoint in the folder `source`."""
        return source if isinstance(source, Checkpoint) else cls(Path(source))

    @cached_property
    def _config(self) -> tuple[Mapping[str, Any], str, FileStamp]:
        """The table in config.json, the sha256 of the same bytes, and the file's stamp before they were read."""
        path = self.folder / CONFIG_NAME
        if not path.is_file():
            hint = "pass the folder that holds config.json"
            not_a_checkpoint(f"the folder has no {CONFIG_NAME}", self.folder, hint)
        stamp = FileStamp.of(path)
        _ = self._hold
        return *_read_config(path, stamp), stamp

    @cached_property
    def _hold(self) -> Hold | None:
        """Of weights of another form, which stand in the cache."""
        return hold(self.folder)

    @property
    def config(self) -> Mapping[str, Any]:
        """The content of config.json.

        Raises:
            HarnessError: NOT_A_CHECKPOINT where it is missing, BAD_CONFIG where it is no table.
        """
        return self._config[0]

    @property
    def config_hash(self) -> str:
        """The sha256 of config.json, in hexadecimal; raises as `config`."""
        return self._config[1]

    @property
    def dtype(self) -> str:
        """The dtype that the config names; float32 where it names none."""
        return str(self.config.get("dtype") or self.config.get("torch_dtype") or "float32")

    @property
    def hidden_size(self) -> int:
        """The config's hidden size; 0 if it names no number."""
        size = self.config.get("hidden_size")
        return size if isinstance(size, int) else 0

    @cached_property
    def _index(self) -> tuple[ShardIndex, Mapping[Path, FileStamp]]:
        index = read_shard_index(self.folder)
        return index, {file: FileStamp.of(file) for file in index.files}

    @property
    def shards(self) -> tuple[Path, ...]:
        """The safetensors files: the single one, or those of the index, by name.

        Raises:
            HarnessError: NOT_A_CHECKPOINT without weights, BAD_CONFIG for a bad index, MISSING_SHARD.
        """
        return self._index[0].files

    @property
    def num_bytes(self) -> int:
        """Size of all shards together; raises as `shards`."""
        return sum(stamp.num_bytes for stamp in self._index[1].values())

    @cached_property
    def headers(self) -> Mapping[Path, Header]:
        """The header of each shard.

        Raises:
            HarnessError: as `shards`; DAMAGED_SAFETENSORS.
        """
        return {shard: read_header(shard) for shard in self.shards}

    @cached_property
    def tensors(self) -> Mapping[str, tuple[TensorEntry, Path]]:
        """For every tensor its entry and the shard that holds it.

        Raises:
            HarnessError: as `headers`; TENSORS_CONTRADICT_CONFIG where index and shards disagree.
        """
        return locate_tensors(self._index[0], self.headers)

    @cached_property
    def weights_hash(self) -> str:
        """The digest over the bytes of all shards in order (`files_digest`); raises as `shards`."""
        return files_digest(self._index[1])

    def has_weights(self, digest: str | None) -> bool:
        """Whether the weights have a digest of a recording: None is that of any, one without a prefix is a sha256."""
        if digest is None or ":" in digest:
            return digest in (None, self.weights_hash)
        hasher = hashlib.sha256()
        for shard in self.shards:
            with shard.open("rb", buffering=0) as stream:
                hashlib.file_digest(stream, lambda: hasher)  # goes on with it
        return hasher.hexdigest() == digest

    @cached_property
    def settings_hash(self) -> str:
        """A digest over all JSON files of the folder: transformers reads more of them than config.json."""
        return folder_digest(self.folder, (".json",))

    @property
    def has_tokenizer(self) -> bool:
        """Whether there are files of a tokenizer."""
        return has_tokenizer(self.folder)

    @cached_property
    def tokenizer(self) -> HFTokenizer:
        """The tokenizer; raises HarnessError (NO_TOKENIZER)."""
        return HFTokenizer.load(self.folder)

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Note the files before the block, and refuse the checkpoint if they were written again by its end.

        Raises:
            HarnessError: as `config` and `shards`; CHECKPOINT_CHANGED.
        """
        _ = self._config, self._index
        yield
        self.refuse_changes()

    def refuse_changes(self) -> None:
        """Refuse a checkpoint whose config or weights were written again since they were read.

        Raises:
            HarnessError: CHECKPOINT_CHANGED; as `config` and `shards` where nothing was read yet.
        """
        _, _, config = self._config
        for file, stamp in {self.folder / CONFIG_NAME: config, **self._index[1]}.items():
            try:
                is_same = FileStamp.of(file) == stamp
            except OSError:
                is_same = False
            if not is_same:
                raise HarnessError(
                    Code.CHECKPOINT_CHANGED,
                    "the checkpoint was changed while it was in use",
                    where=file,
                    expected=f"{stamp.num_bytes:,} bytes, as when it was opened, not written again",
                    hint="run it again when nothing writes to the folder",
                )
