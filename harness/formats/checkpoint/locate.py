"""Finds the folder of a checkpoint by the name that a user gives, and the reader of one in another layout.

Extensions and other packages bring readers of checkpoints that are not in HuggingFace's layout.
"""

import itertools
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.base import plugins
from harness.base.files import exists
from harness.errors import Code, HarnessError
from harness.formats.checkpoint.cache import embedded_cases
from harness.formats.checkpoint.checkpoint import CONFIG_NAME, Checkpoint, not_a_checkpoint

if TYPE_CHECKING:
    import torch

    from harness.formats.checkpoint.quantised import OpenedQuantised, QuantisedSource


class Reader:
    """A reader; an entry point of the group `inference_harness.readers` names an instance."""

    takes_origin = False
    """Whether `--hf` can name the checkpoint in HuggingFace's layout that such a one was made from."""

    def reads(self, path: Path) -> bool:
        """Return whether a file or folder is a checkpoint of this kind."""
        raise NotImplementedError

    def convert(self, path: Path, origin: Checkpoint | None = None) -> Path:
        """Return a folder in HuggingFace's layout with the same weights, made first where the cache lacks it.

        `origin` is what `--hf` names.
        """
        raise NotImplementedError

    def describe(self, path: Path) -> dict[str, Any] | None:
        """Return what `harness inspect` shows of a file; None where its own tables of HuggingFace's layout do."""
        return None

    def tensors(self, path: Path) -> "Mapping[str, Callable[[], torch.Tensor]] | None":
        """Return how each tensor of a file is read, by its name; None where safetensors files hold them."""
        return None

    def open_source(self, source: "QuantisedSource") -> "OpenedQuantised":
        """Return the quantised checkpoint that `convert` made a folder of. Only readers of such checkpoints have it."""
        raise NotImplementedError


def reader_of(path: Path) -> Reader | None:
    """Return the reader of a path; None for HuggingFace's layout, and where no reader applies.

    Raises:
        HarnessError: EXTENSION_FAILED, also where a reader of another package is not the only one of a path.
    """
    foreign, ours = _readers()
    claims: list[Reader] = [reader for reader in foreign if reader.reads(path)]
    claims += itertools.islice((reader for reader in ours if reader.reads(path)), 1)
    if len(claims) > 1 and isinstance(claims[0], _Foreign):
        plugins.refuse(plugins.READERS, claims[0].name, f"is not the only one that reads {path}")
    return claims[0] if claims else None


def foreign_reader_note(model: str) -> str | None:
    """Say which package's reader converts a model; None for the harness's own, and where none does.

    Raises:
        HarnessError: as `reader_of`.
    """
    foreign, _ = _readers()
    path = _local_path(model) if foreign else None
    reader = None if path is None else reader_of(path)
    if not isinstance(reader, _Foreign):
        return None
    return f"the weights are those that the reader {reader.name!r} of another package makes of {path}"


def _readers() -> "tuple[list[_Foreign], list[Reader]]":
    """Return the readers of other packages, and the harness's own."""
    ours: list[Reader] = []
    foreign: list[_Foreign] = []
    for name, reader in plugins.load_all(plugins.READERS, Reader).items():
        if plugins.is_ours(plugins.READERS, name):
            ours.append(reader)
        else:
            foreign.append(_Foreign(name, reader))
    return foreign, ours


class _Foreign(Reader):
    """A reader of another package: whatever it raises is told as an error of that package."""

    def __init__(self, name: str, reader: Reader) -> None:
        self.name, self._reader = name, reader
        self.takes_origin = reader.takes_origin

    def reads(self, path: Path) -> bool:
        """See `Reader.reads`."""
        return bool(self._call(self._reader.reads, path))

    def convert(self, path: Path, origin: Checkpoint | None = None) -> Path:
        """See `Reader.convert`."""
        folder = self._call(self._reader.convert, path, origin)
        if not isinstance(folder, Path) or not (folder / CONFIG_NAME).is_file():
            plugins.refuse(plugins.READERS, self.name, f"converts {path} to no folder with a {CONFIG_NAME}: {folder!r}")
        return folder

    def describe(self, path: Path) -> dict[str, Any] | None:
        """See `Reader.describe`."""
        described = self._call(self._reader.describe, path)
        if not isinstance(described, dict | None):
            plugins.refuse(plugins.READERS, self.name, f"describes {path} by no dictionary: {described!r}")
        return described

    def tensors(self, path: Path) -> "Mapping[str, Callable[[], torch.Tensor]] | None":
        """See `Reader.tensors`."""
        tensors = self._call(self._reader.tensors, path)
        if not isinstance(tensors, Mapping | None):
            plugins.refuse(plugins.READERS, self.name, f"reads {path} as no mapping: {tensors!r}")
        return tensors

    def _call(self, method: Callable[..., Any], *arguments: object) -> Any:
        try:
            return method(*arguments)
        except (HarnessError, OSError):  # what the operating system refuses has an error of its own
            raise
        except Exception as error:
            plugins.refuse(plugins.READERS, self.name, f"failed: {type(error).__name__}: {error}", error)


_DOWNLOADED = ["*.json", "*.safetensors", "tokenizer*", "*.model", "merges.txt", "vocab.txt", "*.jinja"]
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9_][\w.-]*)?")
_EMBEDDED_NAME = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")


def resolve(model: str, *, local_files_only: bool = False, revision: str | None = None, hf: str | None = None) -> Path:
    """Return the folder of a checkpoint: `model` itself, an embedded one, or the snapshot of the hub id `model`.

    Args:
        model: a local folder with a config.json, a GGUF file (its weights are dequantised into a folder of the cache,
            as those of a quantised checkpoint are),
            the name of an embedded checkpoint such as `qwen3-tiny`, or an id such as `Qwen/Qwen3-0.6B`.
        local_files_only: whether to do with what was downloaded before.
        revision: branch, tag or commit of a hub id.
        hf: of a GGUF file or an export of ONNX Runtime GenAI or OpenVINO, the checkpoint that it was made from.

    Raises:
        HarnessError: NOT_A_CHECKPOINT; what a reader raises; BAD_OPTION for `hf` with anything else.
    """
    path = _local_path(model)
    reader = None if path is None else reader_of(path)
    if hf is not None and (reader is None or not reader.takes_origin):
        what = "--hf names what a GGUF file, or an export of a graph engine, was made from"
        hint = "leave --hf out, or name a .gguf file or the folder of an export as --model"
        expected = "a .gguf file or an export as --model"
        raise HarnessError(Code.BAD_OPTION, what, where="--hf", expected=expected, actual=model, hint=hint)
    if path is not None and reader is not None:
        origin = None if hf is None else Checkpoint(resolve(hf, local_files_only=local_files_only))
        return reader.convert(path, origin)
    if path is not None:
        if not (path / CONFIG_NAME).is_file():
            what = f"the folder has no {CONFIG_NAME}" if path.is_dir() else "the path is a file, not a folder"
            not_a_checkpoint(what, path, "pass the folder that holds config.json and the safetensors files")
        return path
    if (embedded := embedded_folder(model)) is not None:
        return embedded
    if not _HUB_ID.fullmatch(model) or ".." in model:
        not_a_checkpoint("there is no such folder, and this is no hub id", model, "check the path")
    return _download(model, local_files_only, revision)


def embedded_folder(model: str) -> Path | None:
    """Return the folder of the embedded checkpoint of that name; None if there is none."""
    if not _EMBEDDED_NAME.fullmatch(model):
        return None
    folder = embedded_cases() / "checkpoints" / model
    return folder if exists(folder / CONFIG_NAME) else None


def embedded_model() -> str:
    """Return the embedded checkpoint that is used if none is named."""
    return str(embedded_cases() / "checkpoints" / "qwen3-tiny")


def at_hand(path: Path) -> Path:
    """Return the folder of an embedded checkpoint where a path is its name, and else the path."""
    embedded = None if path.exists() else embedded_folder(str(path))
    return path if embedded is None else embedded


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
        not_a_checkpoint("the hub asks for a licence to be accepted", model, "accept it there, then `hf auth login`")
    except LocalEntryNotFoundError:
        hint = "pass a local folder, or download it where the hub can be reached: `hf download " + model + "`"
        not_a_checkpoint("there is no such folder; the hub cannot be reached, nor is it in its cache", model, hint)
    except RepositoryNotFoundError:
        not_a_checkpoint("there is no such folder, nor such a model on the hub", model, "check the name")
    except Exception as error:  # the network may fail in any way; the error names what could not be downloaded
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        not_a_checkpoint(f"the hub does not deliver it: {reason}", model, "pass a local folder, or try again")
    return resolve(folder)
