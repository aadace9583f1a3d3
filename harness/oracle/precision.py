"""High precision without touching the library: HF's own modules in float64, one at a time, put back afterwards.

HF's decoders ask for float32 in places (norm statistics, eager softmax). In a float64 run those casts would round the
truth to float32; `keeping_double` leaves such tensors in float64. The rotary table stays as HF defines it: computed in
float32 from integer positions, whatever the dtype of the model.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

TRUTH_DTYPE = torch.float64


class KeepDouble(TorchFunctionMode):
    """Ignore requests to lower a float64 tensor to float32, but for the time that it is paused."""

    def __init__(self) -> None:
        super().__init__()
        self._is_paused = False

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Let casts do what they say: for code that is not the model's."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if self._is_paused:
            return func(*args, **kwargs)
        if args and isinstance(args[0], torch.Tensor) and args[0].dtype == TRUTH_DTYPE:
            if func is torch.Tensor.float:
                return args[0]
            args = tuple(TRUTH_DTYPE if arg is torch.float32 else arg for arg in args)
            if kwargs.get("dtype") is torch.float32:
                kwargs["dtype"] = TRUTH_DTYPE
        return func(*args, **kwargs)


@contextmanager
def keeping_double() -> Iterator[KeepDouble]:
    """Keep float64 tensors in float64 where HF's code asks for float32."""
    with KeepDouble() as mode:
        yield mode


@contextmanager
def raised(*modules: nn.Module) -> Iterator[None]:
    """Hold the parameters and buffers of `modules` in float64 for the duration of the block.

    The original tensors are kept and put back, so nothing is rounded twice and a tied parameter stays tied. Extra
    memory: the modules once in float64.
    """
    originals: list[tuple[torch.Tensor, torch.Tensor]] = []
    try:
        for module in modules:
            for tensor in [*module.parameters(), *module.buffers()]:
                if tensor.is_floating_point() and tensor.dtype != TRUTH_DTYPE:
                    originals.append((tensor, tensor.data))
                    tensor.data = tensor.data.to(TRUTH_DTYPE)
        yield
    finally:
        for tensor, data in reversed(originals):
            tensor.data = data


@contextmanager
def without_tf32() -> Iterator[None]:
    """Switch TF32 off in matrix products, so that float32 on CUDA means float32; put the setting back afterwards.

    Torch has an older and a newer switch and lets a process use one of them: whichever is in use here is used.
    """
    matmul: Any = torch.backends.cuda.matmul
    switch: tuple[str, Any]
    try:
        switch, before = ("allow_tf32", False), matmul.allow_tf32
    except RuntimeError:  # somebody set the newer switch
        switch, before = ("fp32_precision", "ieee"), matmul.fp32_precision
    setattr(matmul, *switch)
    try:
        yield
    finally:
        setattr(matmul, switch[0], before)


def linear_in_double(module: nn.Module, x: torch.Tensor, *, block_bytes: int = 64 << 20) -> torch.Tensor:
    """Apply a linear module to `x` [T, in] in float64, a block of output features at a time: [T, out] float64.

    The head of a large vocabulary is the largest matrix of a model; raising it whole would double the peak memory.
    """
    x = x.to(TRUTH_DTYPE)
    if type(module) is not nn.Linear:
        with raised(module), keeping_double():
            result: torch.Tensor = module(x)
            return result
    num_out, num_in = module.weight.shape
    rows = max(1, block_bytes // (8 * num_in))
    y = torch.empty(*x.shape[:-1], num_out, dtype=TRUTH_DTYPE, device=x.device)
    for begin in range(0, num_out, rows):
        y[..., begin : begin + rows] = x @ module.weight[begin : begin + rows].to(TRUTH_DTYPE).T
    return y if module.bias is None else y + module.bias.to(TRUTH_DTYPE)
