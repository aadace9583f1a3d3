"""Graphs of the pretended device: lists of operations, which have not happened until they are replayed."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

GARBAGE = 77777


class CUDAGraph:
    """Stands for `torch.cuda.CUDAGraph`."""

    def __init__(self, keep_graph: bool = False) -> None:
        self.calls: list[tuple[Any, Any, Any, list[torch.Tensor]]] = []

    def replay(self) -> None:
        with _disable_current_modes():  # nobody sees into a replay
            for operation, args, kwargs, fresh in self.calls:
                made = made_anew(operation(*args, **kwargs), tensors((args, kwargs)))
                for old, new in zip(fresh, made, strict=False):
                    host(old).copy_(host(new))

    def reset(self) -> None:
        self.calls = []

    def pool(self) -> tuple[int, int]:
        return (0, 1)


class graph:  # noqa: N801, stands for `torch.cuda.graph`
    """Records what is computed in its block."""

    def __init__(self, cuda_graph: CUDAGraph, **_: Any) -> None:
        self.recording = Recording(cuda_graph)

    def __enter__(self) -> None:
        torch.ops.pretended_gpu.capture(True)
        self.recording.__enter__()

    def __exit__(self, *error: Any) -> None:
        self.recording.__exit__(*error)
        torch.ops.pretended_gpu.capture(False)


class Recording(TorchDispatchMode):
    """Notes operations, takes back what they wrote, and makes garbage of what they returned."""

    def __init__(self, cuda_graph: CUDAGraph) -> None:
        super().__init__()
        self.graph = cuda_graph

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inputs, written = tensors((args, kwargs)), written_by(func, args, kwargs)
        before = [x.clone() for x in written]
        result = func(*args, **kwargs)
        for x, old in zip(written, before, strict=True):
            x.copy_(old)
        outputs = tensors(result)
        if not any(x.is_cuda for x in (*outputs, *inputs)):
            return result
        fresh = made_anew(result, inputs)
        if fresh or written or not outputs:  # and no view
            self.graph.calls.append((func, args, kwargs, fresh))
        for x in fresh:
            if x.is_cuda and x.numel():
                host(x).copy_(torch.tensor(garbage(x.dtype)))
        return result


def written_by(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """Return the tensors on the device that an operation writes into, as its schema says."""
    written = list[torch.Tensor]()
    for at, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written += tensors(args[at] if at < len(args) else kwargs.get(argument.name))
    return [x for x in written if x.is_cuda]


def made_anew(result: Any, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the tensors of a result that share no memory with what was given."""
    known = {x.untyped_storage()._cdata for x in inputs}
    return [x for x in tensors(result) if x.untyped_storage()._cdata not in known]


def tensors(value: Any) -> list[torch.Tensor]:
    return [x for x in tree_leaves(value) if isinstance(x, torch.Tensor)]


def garbage(dtype: torch.dtype) -> float | int | bool:
    return (
        float("nan")
        if dtype.is_floating_point
        else True
        if dtype == torch.bool
        else min(GARBAGE, torch.iinfo(dtype).max)
    )


def host(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor on the device as one of the host, over the same memory."""
    return torch.ops.pretended_gpu.alias(x)  # type: ignore[no-any-return]
