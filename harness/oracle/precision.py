"""The arithmetic of the two forwards: HF's own modules in float64 or float32, put back afterwards.

HF's decoders ask for float32 in places (norm statistics, eager softmax), and for the dtype of a weight in others. In
the truth those casts would round; `PreservePrecision` leaves such tensors as they are. The rotary table stays as HF
defines it: computed in float32 from integer positions, whatever the dtype of the model.

On a CPU, MKL splits a float64 product of some hundred rows badly: 259 rows by a matrix of 3072 x 1024 take 18 ms with
four threads, of which two do nothing, and 6 ms in four blocks (reports/cpu/check-cost.md). So in the truth's products
every thread computes as many of the output features as every other.

On a GPU a float32 product takes some 15 times as long as one of 16-bit numbers, whose products are exact in float32.
So a truth in float32 of 16-bit weights leaves them as they are, where the device sums such products well
(`has_wide_products`): inputs that 16 bits hold, as recorded rows are, take one product, all others three.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from harness.base.metrics import rounding_unit

TRUTH_DTYPES = {"float64": torch.float64, "float32": torch.float32}
_FREQUENCIES = "inv_freq"
"""Part of the name of the buffers from which HF computes rotary tables, in float32 by definition."""
_LARGE_BYTES = 64 << 20
"""Weights above this size are upcast where they are used, and not as a whole."""
_BLOCK_BYTES = 4 << 20
"""Weights that are upcast at a time on a CPU, whose caches then hold them: with blocks of 64 MB, 1024 x 32000 takes 3.5
times as long for 9 rows, and 2.3 times as long for 58."""
_PROBE_INPUTS = 4096
_LARGEST_LOSS = 0.02
"""Roundings of the weight's dtype by which a sum of positive products may be off: a bound allows more than two."""


def truth_dtype(choice: str, engine_dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the truth: the chosen one; for `auto` float32 where that is far finer than the engine's.

    A truth in float32 is 4,000 times finer than a rounding to bfloat16 and 500 times finer than one to float16.
    """
    if choice != "auto":
        return TRUTH_DTYPES[choice]
    return torch.float32 if engine_dtype in (torch.bfloat16, torch.float16) else torch.float64


class PreservePrecision(TorchFunctionMode):
    """Ignores requests to lower a tensor of the truth's dtype, and splits its products well among the threads."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype
        self._lower = {lower for lower in _FLOATING if lower.itemsize < dtype.itemsize}
        self._casts = {_CASTS[lower] for lower in self._lower}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if _is_number(func, args) and "dtype" not in kwargs:
            kwargs["dtype"] = self._dtype  # the lowest number of the truth's dtype is none of torch's default one
        if not (args and isinstance(args[0], torch.Tensor) and args[0].dtype == self._dtype):
            return func(*args, **kwargs)
        if func is nn.functional.linear:
            return linear(*args, **kwargs)
        if func in self._casts:
            return args[0]
        if func in (torch.Tensor.to, torch.Tensor.type_as) and self._is_lower(args[1:2] or (kwargs.get("other"),)):
            return args[0]
        if self._names_one(args):
            args = tuple(self._dtype if isinstance(arg, torch.dtype) and arg in self._lower else arg for arg in args)
        if kwargs.get("dtype") in self._lower:
            kwargs["dtype"] = self._dtype
        return func(*args, **kwargs)

    def _is_lower(self, others: tuple[Any, ...]) -> bool:
        return any(isinstance(argument, torch.Tensor) and argument.dtype in self._lower for argument in others)

    def _names_one(self, args: tuple[Any, ...]) -> bool:
        return any(isinstance(arg, torch.dtype) and arg in self._lower for arg in args)


def _is_number(func: Callable[..., Any], args: tuple[Any, ...]) -> bool:
    """Whether a tensor of no dimensions is made of a float; computed with, it does not change another's dtype."""
    if func is torch.tensor:
        return isinstance(args[0], float)
    return func is torch.full and len(args) > 1 and tuple(args[0]) == () and isinstance(args[1], float)


_FLOATING = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_CASTS = {
    torch.float64: torch.Tensor.double,
    torch.float32: torch.Tensor.float,
    torch.bfloat16: torch.Tensor.bfloat16,
    torch.float16: torch.Tensor.half,
}


@contextmanager
def upcast(dtype: torch.dtype, *modules: nn.Module) -> Iterator[None]:
    """Hold `modules` in `dtype` for the duration of the block, large ones as in `upcast_on_use`."""
    with upcast_parameters(dtype, *modules), upcast_on_use(dtype, *modules):
        yield


class Buffers:
    """Memory that tensors are upcast into, the same for one layer after the other.

    Fresh memory would be mapped and cleared page by page for every layer, and what is freed is not always given back.
    """

    def __init__(self) -> None:
        self._free: dict[tuple[Any, ...], list[torch.Tensor]] = {}

    @contextmanager
    def copy(self, tensor: torch.Tensor, dtype: torch.dtype) -> Iterator[torch.Tensor]:
        """Lend a copy of `tensor` in `dtype` for the duration of the block."""
        free = self._free.setdefault((tensor.shape, dtype, tensor.device), [])
        buffer = free.pop() if free else torch.empty(tensor.shape, dtype=dtype, device=tensor.device)
        try:
            yield buffer.copy_(tensor)
        finally:
            free.append(buffer)


class Upcast:
    """Tensors that hold copies of their content in another dtype."""

    def __init__(self) -> None:
        self._originals: list[tuple[torch.Tensor, torch.Tensor]] = []

    def add(self, tensor: torch.Tensor, copy: torch.Tensor) -> None:
        """Let a tensor hold a copy of its content."""
        self._originals.append((tensor, tensor.data))
        tensor.data = copy

    @contextmanager
    def undone(self) -> Iterator[None]:
        """Let the tensors hold what they held before, during the block."""
        copies = [tensor.data for tensor, _ in self._originals]
        for tensor, original in self._originals:
            tensor.data = original
        try:
            yield
        finally:
            for (tensor, _), copy in zip(self._originals, copies, strict=True):
                tensor.data = copy


@contextmanager
def upcast_parameters(dtype: torch.dtype, *modules: nn.Module, buffers: Buffers | None = None) -> Iterator[Upcast]:
    """Hold parameters and buffers of `modules`, but for embeddings and large matrices, in `dtype` during the block.

    The original tensors are kept and put back, so nothing is rounded twice and a tied parameter stays tied. Frequencies
    of rotary tables stay in float32. Extra memory: the modules once in `dtype`, in `buffers` where some are given.
    """
    buffers, held = buffers or Buffers(), Upcast()
    with ExitStack() as stack:
        for part in (part for module in modules for part in module.modules()):
            tensors = list(part.named_buffers(recurse=False))
            if not _is_large(part, dtype):
                tensors += part.named_parameters(recurse=False)
            for name, tensor in tensors:
                if tensor.is_floating_point() and tensor.dtype != dtype and _FREQUENCIES not in name:
                    copy = stack.enter_context(buffers.copy(tensor.data, dtype))
                    stack.callback(setattr, tensor, "data", tensor.data)
                    held.add(tensor, copy)
        yield held


@contextmanager
def upcast_on_use(
    dtype: torch.dtype,
    *modules: nn.Module,
    applies: Callable[[], bool] = lambda: True,
    device: torch.device | None = None,
) -> Iterator[None]:
    """Run the embeddings and large matrices among `modules` in `dtype` without a copy of them in `dtype`.

    Of an embedding the rows that are looked up are upcast, of a matrix a block of output features at a time.

    Args:
        dtype: float64 or float32.
        modules: searched with all that is in them.
        applies: asked at every call; where it says no, the module runs as it is.
        device: where the weights will be while they are used; None: where they are.
    """
    with ExitStack() as stack:
        for part in (part for module in modules for part in module.modules()):
            if _is_large(part, dtype, device):
                run: Any = _upcast_embedding if isinstance(part, nn.Embedding) else blocked_linear
                stack.callback(part.__dict__.pop, "forward", None)
                part.forward = _either(part, run, dtype, applies)
        yield


def _is_large(module: nn.Module, dtype: torch.dtype, device: torch.device | None = None) -> bool:
    """Whether a module is one whose weight need not be upcast as a whole, and is too large for that."""
    is_linear = type(module) is nn.Linear and dtype == torch.float32
    if is_linear and has_wide_products(device or module.weight.device, module.weight.dtype):
        return True
    if not isinstance(module, (nn.Embedding, nn.Linear)) or module.weight.numel() * dtype.itemsize <= _LARGE_BYTES:
        return False
    if isinstance(module, nn.Embedding):  # one that looks up something else, positions for one, is run as it is
        _, first, *_ = (*inspect.signature(type(module).forward).parameters, "")
        return first in ("input", "input_ids")
    return type(module) is nn.Linear


def _either(
    module: nn.Module, run: Callable[..., torch.Tensor], dtype: torch.dtype, applies: Callable[[], bool]
) -> Callable[..., torch.Tensor]:
    plain = module.forward
    return lambda x, *args, **kwargs: run(module, x, dtype) if applies() else plain(x, *args, **kwargs)


def _upcast_embedding(module: nn.Embedding, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Look `ids` up in the rows that they use, upcast; what a subclass does besides is done in `dtype` too."""
    table = module.weight.data
    used, places = ids.unique(return_inverse=True)
    try:
        module.weight.data = table[used].to(dtype)
        result: torch.Tensor = type(module).forward(module, places)
    finally:
        module.weight.data = table
    return result


def blocked_linear(module: nn.Linear, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Apply a linear module to `x` [..., in] in `dtype`, a block of output features at a time."""
    x = x.to(dtype)
    num_out, num_in = module.weight.shape
    y = None
    if dtype == torch.float32 and has_wide_products(module.weight.device, module.weight.dtype):
        y = _wide_product(x, module.weight)
    if y is None:
        block = _BLOCK_BYTES if x.device.type == "cpu" else _LARGE_BYTES
        rows = max(1, block // (x.element_size() * num_in))
        y = x.new_empty(*x.shape[:-1], num_out)
        for begin in range(0, num_out, rows):
            y[..., begin : begin + rows] = linear(x, module.weight[begin : begin + rows].to(x.dtype))
    return y if module.bias is None else y + module.bias.to(x.dtype)


@cache
def has_wide_products(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a device gives products of 16-bit numbers in float32, and sums them well enough to judge their dtype by.

    Matrix units drop bits of a sum that do not fit. Positive products lose the most, so those are measured.
    """
    if dtype not in (torch.bfloat16, torch.float16) or device.type == "meta":
        return False
    generator = torch.Generator().manual_seed(0)
    with torch._C.DisableTorchFunction():
        x, weight = (torch.rand(64, _PROBE_INPUTS, generator=generator).to(device, dtype) for _ in range(2))
        try:
            actual = torch.mm(x, weight.T, out_dtype=torch.float32).double()
        except (RuntimeError, TypeError):  # not on this device, or not in this release
            return False
        expected = x.double() @ weight.double().T
        return float(((actual - expected) / expected).abs().max()) <= _LARGEST_LOSS * rounding_unit(dtype)


def _wide_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor | None:
    """Return x [..., in], float32, times a 16-bit weight [out, in]; None if pieces in 16 bits do not hold x."""
    with torch._C.DisableTorchFunction():  # the mode of the truth keeps every tensor in its dtype
        pieces = _pieces(x.reshape(-1, x.shape[-1]), weight.dtype)
        products = [torch.mm(piece, weight.T, out_dtype=torch.float32) for piece in reversed(pieces)]
        return sum(products[1:], products[0]).view(*x.shape[:-1], len(weight)) if products else None


def _pieces(x: torch.Tensor, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return tensors of a 16-bit dtype whose sum is x to all bits of float32, the largest first; none where none are.

    The range of float16 does not hold what is left of small numbers.
    """
    first = x.to(dtype)
    rest = x - first.float()
    largest = float(rest.abs().amax()) if rest.numel() else 0.0
    if largest == 0:
        return [first]
    if dtype != torch.bfloat16 or not largest < torch.inf:
        return []
    second = rest.to(dtype)
    return [first, second, (rest - second.float()).to(dtype)]


@contextmanager
def eager_experts(*configs: Any) -> Iterator[None]:
    """Let HF compute experts one after the other: its grouped products know no float64."""
    before = [getattr(config, "_experts_implementation", None) for config in configs]
    for config in configs:
        config._experts_implementation = "eager"
    try:
        yield
    finally:
        for config, implementation in zip(configs, before, strict=True):
            config._experts_implementation = implementation


@contextmanager
def without_tf32() -> Iterator[None]:
    """Switch TF32 off in products and convolutions, so that float32 on CUDA means float32; put it back afterwards.

    Torch has an older and a newer switch for each, and refuses to read the older one where they disagree. So the older
    one is used, which sets both, unless they disagree already.
    """
    cuda, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    with _without_tf32(cuda, [cuda]), _without_tf32(cudnn, [cudnn.conv, cudnn.rnn]):  # type: ignore[attr-defined]
        yield


@contextmanager
def _without_tf32(older: Any, newer: list[Any]) -> Iterator[None]:
    precisions = [switch.fp32_precision for switch in newer]
    try:
        allowed = older.allow_tf32
    except RuntimeError:  # they disagree
        allowed = None
    if allowed is not None:
        older.allow_tf32 = False
    for switch in newer:
        switch.fp32_precision = "ieee"
    try:
        yield
    finally:
        if allowed is not None:
            older.allow_tf32 = allowed
        for switch, precision in zip(newer, precisions, strict=True):
            switch.fp32_precision = precision


_LEAST_ELEMENTS = 1 << 18
"""Of a weight that is worth more than one thread."""


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Apply `functional.linear`: x [..., in], weight [out, in], bias [out]; returns [..., out]."""
    num_blocks = torch.get_num_threads()
    if not _is_split(x, weight, num_blocks):
        return functional.linear(x, weight, bias)
    num_out, num_in = weight.shape
    rows, blocks = x.reshape(-1, num_in), weight.view(num_blocks, num_out // num_blocks, num_in)
    y = torch.bmm(rows.expand(num_blocks, -1, -1), blocks.mT).transpose(0, 1).reshape(*x.shape[:-1], num_out)
    return y if bias is None else y.add_(bias)


def _is_split(x: torch.Tensor, weight: torch.Tensor, num_blocks: int) -> bool:
    is_alike = x.dtype == weight.dtype == torch.float64 and x.device.type == "cpu"
    is_large = weight.dim() == 2 and weight.numel() >= _LEAST_ELEMENTS and weight.is_contiguous()
    return is_alike and is_large and num_blocks > 1 and len(weight) % num_blocks == 0


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
