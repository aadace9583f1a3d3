"""What a command line needs to open the engine: a model's folder, options as text, the fastest kernels that can run.

The engine itself chooses nothing by the machine: what a check judges must not depend on its compiler.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields, replace
from importlib.util import find_spec
from os import environ
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_type_hints

import torch

from reference_engine.checkpoint.model_config import ModelConfig
from reference_engine.config import EngineConfig
from reference_engine.errors import CheckpointError, ConfigError, DeviceError, EngineError

__all__ = ["BackendChoice", "choose_backend", "engine_threads", "find_model", "parse_options"]

DEFAULT_MODEL = "qwen3-tiny"
"""An embedded checkpoint, which recites."""
SMALL_HIDDEN_SIZE = 512
"""Below it a product of a few rows takes microseconds, and neither a second thread nor compiled kernels pay."""
_BACKEND = "attention_backend"
_OPTIONS_OF_THEIR_OWN = ("dtype", "device", "kv_cache_scales")
_DOWNLOADED = ("*.json", "*.safetensors", "*.jinja", "merges.txt")


def find_model(model: str | None, *, local_files_only: bool = False) -> Path:
    """Return the folder of a checkpoint: of a path, of the name of an embedded one, or of a model of the hub.

    Raises:
        CheckpointError: there is none.
    """
    model = DEFAULT_MODEL if model is None else model
    folder = Path(model).expanduser()
    if folder.exists():
        if not (folder / "config.json").is_file():
            raise CheckpointError("the folder has no config.json", where=folder, hint="Name a checkpoint's folder.")
        return folder
    root = Path(__file__).parents[1]
    for checkpoints in (root / "harness" / "embedded" / "checkpoints", root / "cases" / "checkpoints"):
        if "/" not in model and (checkpoints / model / "config.json").is_file():
            return checkpoints / model
    return _download(model, local_files_only)


def _download(model: str, local_files_only: bool) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    try:
        return Path(snapshot_download(model, local_files_only=local_files_only, allow_patterns=list(_DOWNLOADED)))
    except HFValidationError as error:
        raise CheckpointError(
            "there is no such folder, and this is no hub id", where=model, hint="Check the path."
        ) from error
    except Exception as error:  # the network and the hub raise whatever they like
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise CheckpointError(
            f"there is no such folder, and the hub does not deliver it: {reason}", where=model,
            hint="Name a local folder, or try again.",
        ) from error  # fmt: skip


def parse_options(options: Mapping[str, str]) -> dict[str, Any]:
    """Return options of the engine with values of the types that the fields of `EngineConfig` have.

    Raises:
        ConfigError: there is no such field, or its value has another type.
    """
    known = [field.name for field in fields(EngineConfig) if field.name not in _OPTIONS_OF_THEIR_OWN]
    for name in (name for name in options if name not in known):
        raise ConfigError(
            f"the engine has no option {name!r}", where="--engine-option", expected=", ".join(known),
            actual=f"{name}={options[name]}",
        )  # fmt: skip
    hints = get_type_hints(EngineConfig)
    return {name: _parse(name, text, hints[name]) for name, text in options.items()}


def _parse(name: str, text: str, hint: Any) -> Any:
    kinds = set(get_args(hint) or (hint,)) - {NoneType}
    if kinds == {bool}:
        if text not in ("true", "false"):
            what = f"{name} must be true or false"
            raise ConfigError(what, where="--engine-option", expected="true or false", actual=text)
        return text == "true"
    if kinds == {int}:
        try:
            return int(text)
        except ValueError:
            raise ConfigError(f"{name} must be an integer", where="--engine-option", actual=text) from None
    return text


@dataclass(frozen=True, slots=True)
class BackendChoice:
    """Options with a backend among them."""

    options: Mapping[str, str]
    why_slower: str = ""
    """The reason why the fast backend is not used for a model that it would serve; empty if there is none."""

    @property
    def description(self) -> str:
        """One line."""
        return f"{_BACKEND}={self.options[_BACKEND]}" + (f", slower: {self.why_slower}" if self.why_slower else "")


def choose_backend(
    options: Mapping[str, str], *, folder: Path, device: str, has_adapters: bool = False
) -> BackendChoice:
    """Return engine options in which the backend is named: the caller's, else `cpp` or `triton`, else the default.

    Adapters and compiled layers are not served with fused kernels, and on a CPU a small model is not worth a compiler's
    five seconds. Where a compiler or a package is missing, the choice says so.

    Args:
        options: of the engine, as on the command line.
        folder: the checkpoint; one that the engine does not read gets the default.
        device: as torch names it.
        has_adapters: whether adapters are served.
    """
    slower = BackendChoice({_BACKEND: EngineConfig().attention_backend, **options})
    if _BACKEND in options or has_adapters or "compile_layers" in options:
        return slower
    if find_spec("reference_engine.fast") is None:
        return replace(slower, why_slower="this installation has no kernels")
    with suppress(EngineError):
        config = ModelConfig.from_folder(folder)
        if config.latent is None:
            return _on_gpu(slower, config) if torch.device(device).type == "cuda" else _on_cpu(slower, config)
    return slower


def _on_cpu(slower: BackendChoice, config: ModelConfig) -> BackendChoice:
    from reference_engine.fast import cpp_operators

    if config.hidden_size < SMALL_HIDDEN_SIZE:
        return slower
    try:
        cpp_operators.load_operators()
    except DeviceError as error:
        return replace(slower, why_slower=f"{error.what} ({error.hint})")
    return BackendChoice({**slower.options, _BACKEND: "cpp"})


def _on_gpu(slower: BackendChoice, config: ModelConfig) -> BackendChoice:
    from reference_engine.fast.kernels.tiling import MAX_HEAD_DIM

    if config.head_dim > MAX_HEAD_DIM:
        return slower
    if find_spec("triton") is None:
        return replace(slower, why_slower="there is no package triton (pip install triton)")
    return BackendChoice({**slower.options, _BACKEND: "triton"})


@contextmanager
def engine_threads(hidden_size: int, device: str) -> Iterator[str]:
    """Use as many threads as were measured to be fast, one for a small model; put the number back afterwards.

    Yields the number in words, with its source; nothing is said and done for a GPU. A check does without: the sums of a
    matrix product may depend on the number of threads.
    """
    chosen, description = None, ""
    if torch.device(device).type == "cpu" and hidden_size < SMALL_HIDDEN_SIZE:
        chosen = None if "OMP_NUM_THREADS" in environ else 1
    elif torch.device(device).type == "cpu" and find_spec("reference_engine.fast") is not None:
        from reference_engine.fast import threads

        count = threads.choose_num_threads()
        chosen, description = count.num_threads, str(count)
    before = torch.get_num_threads()
    if chosen is not None:
        torch.set_num_threads(chosen)
    try:
        yield description
    finally:
        torch.set_num_threads(before)
