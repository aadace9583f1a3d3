"""HF's forward with the softplus of engines that compute it as log(1 + exp(x)): of small values it has few digits."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode


class SoftplusByLog(TorchFunctionMode):
    """Computes softplus so on the thread that entered it: ggml's `ggml_compute_softplus_f32`."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Replace the one function; its further arguments are left at their defaults by all of HF's models."""
        if func is functional.softplus:
            return torch.log(1 + torch.exp(args[0] if args else (kwargs or {})["input"]))
        return func(*args, **(kwargs or {}))
