"""The reference engine's attention backend where tokens are wanted and speed counts: the C++ kernels, if they can run.

A check names its backend, or takes the engine's own default: what it judges must not depend on the machine's compiler.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from harness.base.threads import SMALL_HIDDEN_SIZE
from reference_engine import EngineConfig
from reference_engine.errors import DeviceError
from reference_engine.fast.cpp_operators import load_operators

OPTION = "attention_backend"
FAST = "cpp"


@dataclass(frozen=True, slots=True)
class BackendChoice:
    """Options with a backend among them."""

    options: Mapping[str, str]
    why_slower: str = ""
    """The reason why the fast backend is not used on a CPU that it would serve; empty if there is none."""

    @property
    def description(self) -> str:
        """One line."""
        return f"{OPTION}={self.options[OPTION]}" + (f", slower: {self.why_slower}" if self.why_slower else "")


def choose_backend(
    options: Mapping[str, str], *, hidden_size: int, device: str, has_adapters: bool = False
) -> BackendChoice:
    """Return engine options in which the backend is named: the caller's, else `cpp` on a CPU, else the default.

    Adapters and compiled layers are not served with fused kernels, and a small model is not worth a compiler's five
    seconds. Where there is no compiler, the choice says so.
    """
    slower = {OPTION: EngineConfig().attention_backend, **options}
    is_served = torch.device(device).type == "cpu" and not has_adapters and "compile_layers" not in options
    if OPTION in options or not is_served or hidden_size < SMALL_HIDDEN_SIZE:
        return BackendChoice(slower)
    try:
        load_operators()
    except DeviceError as error:
        return BackendChoice(slower, f"{error.what} ({error.hint})")
    return BackendChoice({OPTION: FAST, **options})
