"""What is kept of a tensor to find its partner: a digest, and samples of its values as several layouts order them."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, combinations
from operator import mul

import torch

_NUM_SAMPLES = 512
_LEAST_TELLING = 16
"""Different values in a sample, without which content does not tell tensors apart."""
_BLOCK_ELEMENTS = 1 << 20
_COARSER = {
    torch.float32: (torch.bfloat16, torch.float16),
    torch.float64: (torch.bfloat16, torch.float16, torch.float32),
}
_MOST_DIMS = 4


@dataclass(frozen=True, slots=True)
class Layout:
    """How a tensor is read: two of its dimensions exchanged, or a part of it."""

    exchanged: tuple[int, int] | None = None
    """Counted over the dimensions larger than one."""
    part: tuple[int, int, int] | None = None
    """Dimension, first index, and number of indices."""

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a view of a tensor."""
        tensor = tensor if self.part is None else tensor.narrow(*self.part)
        return tensor if self.exchanged is None else tensor.squeeze().transpose(*self.exchanged)

    @cache  # noqa: B019  there are few
    def ends(self, shape: torch.Size) -> set[int]:
        """Return after how many elements the dimensions of the view end, which tells what may be flattened to what."""
        return {1, *accumulate(reversed(self.of(torch.empty(shape, device="meta")).shape), mul)}

    def __str__(self) -> str:
        if self.part is not None:
            dim, start, length = self.part
            return f"{start} to {start + length - 1} of dimension {dim}"
        return "" if self.exchanged is None else "dimensions {} and {} exchanged".format(*self.exchanged)


AS_IT_IS = Layout()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Fingerprint:
    """A tensor without its values."""

    name: str
    shape: torch.Size
    dtype: torch.dtype
    precision: torch.dtype
    """The coarsest dtype that holds all of its values."""
    digest: bytes
    """Of dtype and values in the order of the file."""
    is_telling: bool
    """Whether its values are diverse enough to tell it from others."""
    is_of_positions: bool
    """Whether its first row is constant, as in tables of rotary embeddings, which all prompts have."""
    samples: dict[Layout, torch.Tensor]
    """[samples] float64 of each layout."""


def fingerprint(name: str, tensor: torch.Tensor) -> Fingerprint:
    """Return what is kept of a tensor, which is read once."""
    digest, precisions = hashlib.sha256(str(tensor.dtype).encode()), [*_COARSER.get(tensor.dtype, ()), tensor.dtype]
    for block in tensor.reshape(-1).split(_BLOCK_ELEMENTS):
        digest.update(block.contiguous().view(torch.uint8).numpy())
        precisions = [dtype for dtype in precisions if _holds(dtype, block)]
    samples = {layout: sample(layout.of(tensor)) for layout in _layouts(tensor.shape)}
    values = samples[AS_IT_IS]
    is_telling = len(values[values.isfinite()].unique()) >= _LEAST_TELLING
    return Fingerprint(
        name=name,
        shape=tensor.shape,
        dtype=tensor.dtype,
        precision=precisions[0] if is_telling else tensor.dtype,
        digest=digest.digest(),
        is_telling=is_telling,
        is_of_positions=tensor.dim() > 1 and len(tensor.reshape(-1, tensor.shape[-1])[0].unique()) == 1,
        samples=samples,
    )


def _holds(dtype: torch.dtype, block: torch.Tensor) -> bool:
    return dtype is block.dtype or bool(((block.to(dtype).to(block.dtype) == block) | block.isnan()).all())


def _layouts(shape: torch.Size) -> Iterator[Layout]:
    yield AS_IT_IS
    num_dims = sum(size > 1 for size in shape)
    if num_dims <= _MOST_DIMS:
        yield from (Layout(exchanged=dims) for dims in combinations(range(num_dims), 2))


def sample(tensor: torch.Tensor) -> torch.Tensor:
    """Return [samples] float64: values at places that the number of elements alone tells."""
    places = _places(tensor.numel())
    return tensor[torch.unravel_index(places, tensor.shape)].double() if tensor.dim() else tensor.reshape(1).double()


@cache
def _places(num_elements: int) -> torch.Tensor:
    if num_elements <= _NUM_SAMPLES:
        return torch.arange(num_elements)
    return torch.randint(num_elements, (_NUM_SAMPLES,), generator=torch.Generator().manual_seed(num_elements))
