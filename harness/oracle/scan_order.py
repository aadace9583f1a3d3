"""Chunked scans sum the logarithms of their decays, and take the decay between two tokens from a difference of sums.

Where a chunk holds a token that forgets nearly everything, the sums are large, and small differences of them are left
with few digits. Which differences a row meets depends on where chunks begin: at multiples of the chunk's size, where a
prompt ends, where a step begins. HF's forward over a whole request, the control, has them at the ends of its own chunks
alone; kernels take all of them from differences.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

_SUMS = (torch.cumsum, torch.Tensor.cumsum)


class ScanInAnyChunks(TorchFunctionMode):
    """Rounds the sums of decays as if a chunk ended at every token: each by one rounding of the sum of a whole chunk.

    Entered on the control's thread, it shows what the order of these sums does to every row. The seed chooses the sides
    to which they are rounded.
    """

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self._generator = torch.Generator().manual_seed(seed)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Round cumulative sums over the tokens of a chunk, and those of all spans in a chunk.

        Decays are [..., chunks, tokens], or of each channel [..., chunks, tokens, channels].
        """
        kwargs = kwargs or {}
        sums = func(*args, **kwargs)
        if func not in _SUMS or not sums.is_floating_point() or sums.dim() < 4:
            return sums
        x, dim = args[0].to(sums.dtype), kwargs.get("dim", args[1] if len(args) > 1 else None)
        if dim in (-1, x.dim() - 1):
            return sums + self._roundings(x)
        if dim not in (-2, x.dim() - 2) or x.dim() < 5:
            return sums  # of whole chunks, which are passed on one after the other: no differences
        if not _are_spans(x):
            return sums + self._roundings(x.movedim(-1, -3)).movedim(-3, -1)
        roundings = self._roundings(x[..., :, 0])
        return sums + (roundings[..., :, None] - roundings[..., None, :]).tril(-1)

    def _roundings(self, x: torch.Tensor) -> torch.Tensor:
        """Return one rounding, up or down, of each sum of as many terms as a chunk has: [..., chunks, tokens]."""
        earlier = functional.pad(x.abs().flatten(-2), (x.shape[-1] - 1, 0))
        largest = earlier.unfold(-1, x.shape[-1], 1).sum(dim=-1).view_as(x) * (torch.finfo(x.dtype).eps / 2)
        is_up = torch.randint(2, x.shape, generator=self._generator).to(x.device, torch.bool)
        return torch.where(is_up, largest, -largest)


def _are_spans(x: torch.Tensor) -> bool:
    """Whether a tensor [..., tokens, tokens] repeats numbers below its diagonal, and is 0 elsewhere (`segment_sum`)."""
    return x.shape[-1] == x.shape[-2] and torch.equal(x, x[..., :, :1].expand_as(x).tril(-1))
