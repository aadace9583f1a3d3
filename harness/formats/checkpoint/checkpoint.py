"""A checkpoint on disk, opened once: each part of it is read when it is first asked for, and kept.

The hashes name what a recording was made from, and are the keys under which goldens are cached. Nothing here needs
torch; the tokenizer needs transformers.
"""

import hashlib
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from harness.errors import Code, HarnessError
from harness.formats.checkpoint.digest import FileStamp, files_digest
from harness.formats.checkpoint.refusals import not_a_checkpoint
from harness.formats.checkpoint.shards import ShardIndex, locate_tensors, read_shard_index
from harness.formats.checkpoint.table import read_table
from harness.formats.checkpoint.tokenizer import HFTokenizer, has_tokenizer
from harness.formats.safetensors_header import Header, TensorEntry, read_header

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
        return *_read_config(path, stamp), stamp

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
        """The sha256 over the bytes of all shards in order, in hexadecimal; raises as `shards`."""
        return files_digest(self._index[1])

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
