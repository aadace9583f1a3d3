"""The copy bandwidth of this machine: decoding one token at a time cannot exceed it."""

import time

import torch

NUM_BYTES = {"cpu": 256 << 20, "cuda": 2 << 30}
NUM_COPIES = 5


def copy_bandwidth(device: str) -> float:
    """Return bytes read plus bytes written a second, of the fastest of a few copies far larger than any cache."""
    kind = torch.device(device).type
    source = torch.zeros(NUM_BYTES[kind], dtype=torch.uint8, device=device)
    target = torch.ones_like(source)
    return 2 * NUM_BYTES[kind] / min(_seconds(source, target) for _ in range(NUM_COPIES))


def _seconds(source: torch.Tensor, target: torch.Tensor) -> float:
    _synchronize(source)
    start = time.perf_counter()
    target.copy_(source)
    _synchronize(source)
    return time.perf_counter() - start


def _synchronize(tensor: torch.Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)
