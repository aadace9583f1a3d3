"""Addresses and sizes of tensors, also of those in oneDNN's own layout, which hide their storage."""

from collections.abc import Iterable

import torch


def storages(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    """Return the bytes of each storage behind the tensors by its address."""
    return dict(_storage(tensor) for tensor in tensors)


def _storage(tensor: torch.Tensor) -> tuple[int, int]:
    if tensor.is_mkldnn:
        return int(torch.ops.mkldnn.data_ptr(tensor)), int(torch.ops.mkldnn._nbytes(tensor))
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.nbytes()
