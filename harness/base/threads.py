"""The number of torch threads for a model: small matrices are faster on one."""

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

SMALL_HIDDEN_SIZE = 512
"""Below it a product of a few rows takes microseconds, and waking a second thread takes longer; on a machine that is
busy otherwise, a thousand times longer (measured: 8 ms an operation)."""


@contextmanager
def one_thread() -> Iterator[None]:
    """Use one thread, and put the number back afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def limit_threads(hidden_size: int) -> AbstractContextManager[None]:
    """Use one thread for a small model, and put the number back afterwards; `OMP_NUM_THREADS` is left to rule."""
    is_small = hidden_size < SMALL_HIDDEN_SIZE and "OMP_NUM_THREADS" not in os.environ
    return one_thread() if is_small else nullcontext()
