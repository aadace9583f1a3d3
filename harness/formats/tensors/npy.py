"""Files of numpy's `np.save`, one array each; objects, which need pickle, are refused."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from harness.formats.tensors.mapping import check_size, kept, refuse

_DTYPES = ("float16", "float32", "float64")


def read(path: Path) -> Iterator[tuple[str, torch.Tensor | str]]:
    """Yield the file's array under the empty name, or why it is left out."""
    array = _mapped(path)
    if array.dtype.hasobject:
        hint = "np.save(path, array.astype(np.float32))"
        refuse(path, "the array holds Python objects, which are never unpickled", actual=array.dtype, hint=hint)
    if array.dtype.name not in _DTYPES or not array.size:
        yield "", f"no floating-point numbers ({array.dtype}, shape {list(array.shape)})"
    else:
        check_size(path, "", array.nbytes)
        yield "", kept(torch.from_numpy(np.asarray(array, dtype=array.dtype.newbyteorder("="), order="C")))


def _mapped(path: Path) -> np.memmap:
    """Return the array; an empty one, or one of objects, is no mapping and has no content."""
    try:
        with path.open("rb") as file:
            version = np.lib.format.read_magic(file)
            read_header = (
                np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            )
            shape, _is_fortran, dtype = read_header(file)
        if dtype.hasobject or 0 in shape:
            return np.empty(0 if dtype.hasobject else shape, dtype=dtype)  # type: ignore[return-value]
        return np.load(path, mmap_mode="c", allow_pickle=False)  # type: ignore[no-any-return]
    except (ValueError, EOFError, OSError, OverflowError, MemoryError, SyntaxError, TypeError, RecursionError) as error:
        refuse(path, f"the array cannot be read: {' '.join(str(error).split())[:200]}")
