"""The reference engine's attention backend where tokens are wanted and speed counts: its own kernels, if they can run.

A check names its backend, or takes the engine's own default: what it judges must not depend on the machine's compiler.
"""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

import torch

from harness.base.threads import SMALL_HIDDEN_SIZE
from reference_engine import EngineConfig
from reference_engine.checkpoint.model_config import ModelConfig
from reference_engine.errors import DeviceError, EngineError
from reference_engine.fast.cpp_operators import load_operators
from reference_engine.fast.kernels.tiling import MAX_HEAD_DIM

OPTION = "attention_backend"


@dataclass(frozen=True, slots=True)
class BackendChoice:
    """Options with a backend among them."""

    options: Mapping[str, str]
    why_slower: str = ""
    """The reason why the fast backend is not used for a model that it would serve; empty if there is none."""

    @property
    def description(self) -> str:
        """One line."""
        return f"{OPTION}={self.options[OPTION]}" + (f", slower: {self.why_slower}" if self.why_slower else "")


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
    slower = BackendChoice({OPTION: EngineConfig().attention_backend, **options})
    if OPTION in options or has_adapters or "compile_layers" in options:
        return slower
    with suppress(EngineError):
        config = ModelConfig.from_folder(folder)
        if config.latent is None:
            return _on_gpu(slower, config) if torch.device(device).type == "cuda" else _on_cpu(slower, config)
    return slower


def _on_cpu(slower: BackendChoice, config: ModelConfig) -> BackendChoice:
    if config.hidden_size < SMALL_HIDDEN_SIZE:
        return slower
    try:
        load_operators()
    except DeviceError as error:
        return replace(slower, why_slower=f"{error.what} ({error.hint})")
    return BackendChoice({**slower.options, OPTION: "cpp"})


def _on_gpu(slower: BackendChoice, config: ModelConfig) -> BackendChoice:
    if config.head_dim > MAX_HEAD_DIM:
        return slower
    if find_spec("triton") is None:
        return replace(slower, why_slower="there is no package triton (pip install triton)")
    return BackendChoice({**slower.options, OPTION: "triton"})
