"""The number of an engine's threads in commands that generate tokens.

A check keeps torch's own number: the sums of a matrix product may depend on it.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from harness.base.threads import SMALL_HIDDEN_SIZE, limit_threads
from reference_engine.fast.threads import choose_num_threads


@contextmanager
def engine_threads(hidden_size: int, device: str) -> Iterator[str]:
    """Use as many threads as were measured to be fast, one for a small model; put the number back afterwards.

    Gives the number in words, with its source; nothing is said and done for a GPU.
    """
    if torch.device(device).type != "cpu":
        yield ""
    elif hidden_size < SMALL_HIDDEN_SIZE:
        with limit_threads(hidden_size):
            yield ""
    else:
        before, chosen = torch.get_num_threads(), choose_num_threads()
        torch.set_num_threads(chosen.num_threads)
        try:
            yield str(chosen)
        finally:
            torch.set_num_threads(before)
