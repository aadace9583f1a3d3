"""A quantised weight, unpacked and not yet scaled: one form for every format.

What distinguishes the formats is where their codes, scales and zero points lie. Once these are unpacked, a weight is
(value of the code - zero point) * scale, and a loader's mistake is a change to one of the three.

`O` outputs, `I` inputs, `R` rows of blocks, `C` columns of blocks. Experts come before these dimensions.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Words:
    """The codes that lie in one integer of the file."""

    dim: int
    """Dimension of the weight [O, I] along which they lie: 0 or 1."""
    order: tuple[int, ...]
    """Which of the neighbours along that dimension each place of the integer holds, lowest bits first."""

    @property
    def half(self) -> float:
        """The middle of the codes, 8 for 4 bits: two lie in a byte, more in a word of 32 bits."""
        bits = (8 if len(self.order) == 2 else 32) // len(self.order)
        return float(2 ** (bits - 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Codes:
    """A quantised weight, unpacked."""

    values: torch.Tensor
    """[..., O, I] float32: what each code stands for before it is scaled."""
    scale: torch.Tensor
    """[..., R, C] float32: one for a block of weights."""
    block: tuple[int, int]
    """Outputs and inputs that share a scale; the last blocks may be smaller."""
    zero: torch.Tensor | None = None
    """[..., R, C] float32, the zero points; None where the codes have a sign."""
    group: torch.Tensor | None = None
    """[I] int64: the column of blocks that an input belongs to, of weights that were sorted by their activations."""
    divisor: torch.Tensor | None = None
    """One float32 that the scales are divided by before they are used: the global scale of NVFP4."""
    factor: float = 1.0
    """What the scaled values are multiplied by at last."""
    words: Words | None = None
    shape: tuple[int, ...] | None = None
    """Shape of the weight where it is not that of the values: blocks that go on from one row to the next."""
    turned: bool = False
    """Whether HF's parameter is [..., I, O]."""

    def dequantised(self) -> torch.Tensor:
        """Return the weight in float32, each operation rounded as the format's own library rounds it."""
        scale = self.scale if self.divisor is None else self.scale / self.divisor
        values = self.values if self.zero is None else self.values - self.spread(self.zero)
        weight = values * self.spread(scale)
        if self.factor != 1.0:
            weight = weight * self.factor
        weight = weight if self.shape is None else weight.flatten()[: _count(self.shape)].reshape(self.shape)
        return weight.transpose(-1, -2).contiguous() if self.turned else weight

    def spread(self, blocks: torch.Tensor) -> torch.Tensor:
        """Return [..., O, I] of a number for each block: [..., R, C]."""
        (rows, columns), (outputs, inputs) = self.block, self.values.shape[-2:]
        if rows > 1:
            blocks = blocks.repeat_interleave(rows, dim=-2)[..., :outputs, :]
        if self.group is not None:
            return blocks.index_select(-1, self.group)
        return blocks.repeat_interleave(columns, dim=-1)[..., :inputs] if columns > 1 else blocks


def _count(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()


def unpacked(words: torch.Tensor, bits: int, dim: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """Return the unsigned codes of integers that each hold several, along a dimension: uint8.

    Codes have `bits`, a divisor of the integers' own, and lie along `dim`, the lowest bits first. `order` is the place
    among its neighbours of each code of an integer; None for the order of the bits.
    """
    count = 8 * words.dtype.itemsize // bits
    last = words.transpose(dim, -1)
    places = range(count) if order is None else [order.index(at) for at in range(count)]
    codes = torch.stack([((last >> (bits * at)) & ((1 << bits) - 1)).to(torch.uint8) for at in places], dim=-1)
    return codes.flatten(-2).transpose(dim, -1)


FLOAT4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""What the codes of E2M1 stand for."""


def float4(packed: torch.Tensor) -> torch.Tensor:
    """Return [..., 2 N] float32 of bytes [..., N] that hold two numbers of E2M1 each, the low half first."""
    return torch.tensor(FLOAT4)[unpacked(packed, 4, -1).long()]


def powers_of_two(exponents: torch.Tensor) -> torch.Tensor:
    """Return float32 of scales in E8M0, as bytes or in torch's dtype; NaN of 255."""
    return exponents.view(torch.float8_e8m0fnu).to(torch.float32)
