"""Finds a checkpoint and says what is in its folder: config, shards, tensors, and hashes of both.

Nothing here needs torch. The hashes name what a recording was made from, and are the keys under which goldens are
cached; hashing gigabytes takes seconds, so a checkpoint that has not changed is hashed once.
"""

import hashlib
import json
import os
import re
import reprlib
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any, NoReturn

from harness.checkpoint.gguf import checkpoint_of_gguf, is_gguf
from harness.errors import Code, HarnessError
from harness.files import exists, read_bytes
from harness.safetensors_header import TensorEntry, read_header

CONFIG_NAME = "config.json"
WEIGHTS_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"

_DOWNLOADED = ["*.json", "*.safetensors", "tokenizer*", "*.model", "merges.txt", "vocab.txt", "*.jinja"]
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9_][\w.-]*)?")
_EMBEDDED_NAME = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
_SHA256 = re.compile(r"[0-9a-f]{64}")


def resolve(model: str, *, local_files_only: bool = False, revision: str | None = None, hf: str | None = None) -> Path:
    """Return the folder of a checkpoint: `model` itself, an embedded one, or the snapshot of the hub id `model`.

    Args:
        model: a local folder with a config.json, a GGUF file (its weights are dequantised into a folder of the cache),
            the name of an embedded checkpoint such as `qwen3-tiny`, or an id such as `Qwen/Qwen3-0.6B`.
        local_files_only: whether to do with what was downloaded before.
        revision: branch, tag or commit of a hub id.
        hf: of a GGUF file, the checkpoint that it was made from.

    Raises:
        HarnessError: NOT_A_CHECKPOINT; of a GGUF file what `gguf.checkpoint_of_gguf` raises; BAD_OPTION for `hf` with
            anything else.
    """
    path = _local_path(model)
    if path is not None and is_gguf(path):
        origin = None if hf is None else resolve(hf, local_files_only=local_files_only)
        return checkpoint_of_gguf(path, cache_dir() / "gguf", hf=origin)
    if hf is not None:
        what, hint = "--hf names what a GGUF file was made from", "leave --hf out, or name a .gguf file as --model"
        raise HarnessError(
            Code.BAD_OPTION, what, where="--hf", expected="a .gguf file as --model", actual=model, hint=hint
        )
    if path is not None:
        if not (path / CONFIG_NAME).is_file():
            what = f"the folder has no {CONFIG_NAME}" if path.is_dir() else "the path is a file, not a folder"
            _not_a_checkpoint(what, path, "pass the folder that holds config.json and the safetensors files")
        return path
    if (embedded := _embedded(model)) is not None:
        return embedded
    if not _HUB_ID.fullmatch(model) or ".." in model:
        _not_a_checkpoint("there is no such folder, and this is no hub id", model, "check the path")
    return _download(model, local_files_only, revision)


def read_config(folder: Path) -> dict[str, Any]:
    """Return config.json.

    Raises:
        HarnessError: NOT_A_CHECKPOINT where it is missing, BAD_CONFIG where it is no table.
    """
    if not (folder / CONFIG_NAME).is_file():
        _not_a_checkpoint(f"the folder has no {CONFIG_NAME}", folder, "pass the folder that holds config.json")
    return _read_table(folder / CONFIG_NAME)


def shards(folder: Path) -> list[Path]:
    """Return the safetensors files of the checkpoint: the single one, or those of the index, by name.

    Raises:
        HarnessError: NOT_A_CHECKPOINT without weights, BAD_CONFIG for a bad index, MISSING_SHARD.
    """
    if (folder / WEIGHTS_NAME).is_file():
        return [folder / WEIGHTS_NAME]
    return [folder / name for name in sorted(set(_weight_map(folder).values()))]


def tensor_headers(folder: Path) -> dict[str, tuple[TensorEntry, Path]]:
    """Return for every tensor its entry and the shard that holds it.

    Raises:
        HarnessError: as `shards`; DAMAGED_SAFETENSORS; TENSORS_CONTRADICT_CONFIG where index and shards disagree.
    """
    found: dict[str, tuple[TensorEntry, Path]] = {}
    for shard in shards(folder):
        for entry in read_header(shard).tensors:
            if entry.name in found:
                _contradiction("two shards hold the same tensor", shard, entry.name, found[entry.name][1].name)
            found[entry.name] = (entry, shard)
    if not (folder / WEIGHTS_NAME).is_file():
        for name, file in _weight_map(folder).items():
            if name not in found:
                _contradiction("the index names a tensor that its shard lacks", folder / file, name, None)
            if found[name][1].name != PurePosixPath(file).name:
                _contradiction("a tensor is in another shard than the index says", folder / file, name, found[name][1])
    return found


def config_hash(folder: Path) -> str:
    """Return the sha256 of config.json, in hexadecimal."""
    read_config(folder)
    return hashlib.sha256((folder / CONFIG_NAME).read_bytes()).hexdigest()


def weights_hash(folder: Path) -> str:
    """Return the sha256 over the bytes of all shards in order, in hexadecimal; remembered while they do not change."""
    files = shards(folder)
    memo = cache_dir() / "weights" / _identity(files)
    with suppress(OSError, UnicodeDecodeError):
        known = memo.read_text().strip()
        if _SHA256.fullmatch(known):
            return known
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb", buffering=0) as stream:
            while chunk := stream.read(1 << 20):
                digest.update(chunk)
    with suppress(OSError):  # a cache that cannot be written costs time, not correctness
        _write_atomically(memo, digest.hexdigest())
    return digest.hexdigest()


def cache_dir() -> Path:
    """Return the folder for goldens and hashes: `$HARNESS_CACHE`, or `~/.cache/inference-harness`."""
    chosen = os.environ.get("HARNESS_CACHE")
    return Path(chosen) if chosen else Path("~/.cache/inference-harness").expanduser()


def embedded_cases() -> Path:
    """Return the folder of the cases that come with the harness, in a wheel and in a checkout."""
    package = Path(__file__).parents[1]
    for folder in (package / "embedded", package.parent / "cases"):
        if folder.is_dir():
            return folder
    raise HarnessError(
        Code.BAD_CASE,
        "this installation lacks the embedded cases",
        where=package,
        hint="install inference-harness again, or name a checkpoint with --model",
    )


def _embedded(model: str) -> Path | None:
    """Return the folder of the embedded checkpoint of that name; None if there is none."""
    if not _EMBEDDED_NAME.fullmatch(model):
        return None
    folder = embedded_cases() / "checkpoints" / model
    return folder if exists(folder / CONFIG_NAME) else None


def _local_path(model: str) -> Path | None:
    try:
        path = Path(model).expanduser()
        return path if model and path.exists() else None  # an empty path would be the working folder
    except (OSError, ValueError, RuntimeError):  # a name too long, with a NUL, or of an unknown user is no path
        return None


def _download(model: str, local_files_only: bool, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        folder = snapshot_download(
            model,
            revision=revision,
            local_files_only=local_files_only,
            allow_patterns=_DOWNLOADED,
            ignore_patterns=["*/*"],
        )
    except GatedRepoError:
        _not_a_checkpoint("the hub asks for a licence to be accepted", model, "accept it there, then `hf auth login`")
    except LocalEntryNotFoundError:
        hint = "pass a local folder, or download it where the hub can be reached: `hf download " + model + "`"
        _not_a_checkpoint("there is no such folder; the hub cannot be reached, nor is it in its cache", model, hint)
    except RepositoryNotFoundError:
        _not_a_checkpoint("there is no such folder, nor such a model on the hub", model, "check the name")
    except Exception as error:  # whatever the network does, it is this input that could not be had
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        _not_a_checkpoint(f"the hub does not deliver it: {reason}", model, "pass a local folder, or try again")
    return resolve(folder)


def _weight_map(folder: Path) -> dict[str, str]:
    """Return the index, every file of which exists inside of the folder."""
    path = folder / INDEX_NAME
    if not path.is_file():
        others = sorted(file.name for file in folder.glob("*.bin")) if folder.is_dir() else []
        hint = f"convert {others[0]} to safetensors" if others else "pass the folder that holds the safetensors files"
        _not_a_checkpoint(f"the folder has neither {WEIGHTS_NAME} nor {INDEX_NAME}", folder, hint)
    weight_map = _read_table(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        _bad_config("the index has no weight_map", path, reprlib.repr(weight_map))
    for tensor, file in weight_map.items():
        _check_shard(folder, tensor, file)
    return weight_map


def _check_shard(folder: Path, tensor: str, file: object) -> None:
    where = f"{folder / INDEX_NAME}: weight_map.{reprlib.repr(tensor)}"
    if not isinstance(file, str) or not file.endswith(".safetensors") or "\0" in file:
        _bad_config("the index names no safetensors file", where, reprlib.repr(file))
    if PurePosixPath(file).is_absolute() or ".." in PurePosixPath(file).parts:  # not resolved: hub caches are links
        _bad_config("a shard lies outside of the checkpoint's folder", where, reprlib.repr(file))
    try:
        is_there = (folder / file).is_file()
    except OSError as error:  # a name too long
        _bad_config(f"the index names no file: {error.strerror}", where, reprlib.repr(file))
    if not is_there:
        raise HarnessError(
            Code.MISSING_SHARD,
            f"the shard {file} is missing",
            where=folder,
            expected=f"{file}, which holds {tensor} and others",
            actual=", ".join(sorted(shard.name for shard in folder.glob("*.safetensors"))) or "no safetensors files",
            hint="download the checkpoint again",
        )


def _read_table(path: Path) -> dict[str, Any]:
    try:
        table = json.loads(read_bytes(path))
    except RecursionError:
        _bad_config("the file is nested too deeply", path, None)
    except OSError as error:
        _bad_config(f"the file cannot be read: {error.strerror}", path, None)
    except ValueError as error:  # JSON and UTF-8 alike
        _bad_config("the file is not JSON", path, reprlib.repr(str(error)))
    if not isinstance(table, dict):
        _bad_config("the file is not a JSON object", path, reprlib.repr(table))
    return table


def _identity(files: Iterable[Path]) -> str:
    """Return a name that changes whenever one of the files is another, or was written again."""
    stats = [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return hashlib.sha256(json.dumps(stats).encode()).hexdigest()


def _write_atomically(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
        file.write(text)
    Path(file.name).replace(path)


def _not_a_checkpoint(what: str, where: object, hint: str) -> NoReturn:
    expected = "a folder in HuggingFace's layout, or a hub id"
    raise HarnessError(Code.NOT_A_CHECKPOINT, what, where=where, expected=expected, hint=hint)


def _bad_config(what: str, where: object, actual: object) -> NoReturn:
    raise HarnessError(Code.BAD_CONFIG, what, where=where, actual=actual, hint="download the checkpoint again")


def _contradiction(what: str, where: object, expected: object, actual: object) -> NoReturn:
    hint = f"write {INDEX_NAME} again, or download the checkpoint again"
    raise HarnessError(Code.TENSORS_CONTRADICT_CONFIG, what, where=where, expected=expected, actual=actual, hint=hint)
