"""The rotary embedding that a model applies, found among those that its code could apply.

`R` rows, `N` heads, `H` head size. The pair i of a head turns by position * frequency_i.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from harness.oracle.model import HFModel


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rotation:
    """One way to rotate heads by their position."""

    frequencies: torch.Tensor
    """[P] float32, one for each pair; elements of a head beyond 2 P stay."""
    module: Any
    """HF's module that has the frequencies."""
    name: str
    """Of the buffer in it: `inv_freq`, or that of one type of layer."""
    scaling: float = 1.0
    """Factor of cosine and sine."""
    is_interleaved: bool = False
    """Whether neighbours form a pair, rather than elements half a head apart."""
    is_regrouped: bool = False
    """Whether neighbours, once turned, are written half a head apart, as HF's latent attention does."""
    head_dim: int

    def heads(self, x: torch.Tensor) -> torch.Tensor:
        """[R, N*H] to [R, N, H]."""
        heads: torch.Tensor = x.unflatten(-1, (-1, self.head_dim))
        return heads

    def turn(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Rotate rows [R, N*H] for positions [R]."""
        return self.turned(self.heads(x), *self.angles(positions))

    def phases(self, positions: torch.Tensor, frequencies: torch.Tensor | None = None) -> torch.Tensor:
        """[R, P] float64: rounded to float32, as the definition has it."""
        used = self.frequencies if frequencies is None else frequencies
        return (positions[:, None].to(torch.float32) * used.to(torch.float32)).to(torch.float64)

    def angles(
        self, positions: torch.Tensor, frequencies: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosine and sine, [R, 1, P] each."""
        return self.table(self.phases(positions, frequencies))

    def table(self, phases: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosine and sine of phases [R, P], [R, 1, P] each."""
        return phases.cos()[:, None] * self.scaling, phases.sin()[:, None] * self.scaling

    def pairs(self, x_RNH: torch.Tensor, *, is_turned: bool = False) -> torch.Tensor:
        """[R, N, P, 2] contiguous: what is turned together, of an input or of what was turned."""
        turning = x_RNH[..., : 2 * len(self.frequencies)]
        if self.is_interleaved and not (is_turned and self.is_regrouped):
            neighbours: torch.Tensor = turning.unflatten(-1, (-1, 2))
            return neighbours.contiguous()
        return torch.stack(turning.chunk(2, dim=-1), dim=-1).contiguous()

    def turned(self, x_RNH: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """[R, N*H] of heads turned by a cosine and sine [R, 1, P]."""
        num = 2 * cos.shape[-1]
        a, b = (
            (x_RNH[..., :num].unflatten(-1, (-1, 2)).unbind(-1))
            if self.is_interleaved
            else x_RNH[..., :num].chunk(2, -1)
        )
        first, second = a * cos - b * sin, b * cos + a * sin
        if self.is_interleaved and not self.is_regrouped:
            turned = torch.stack((first, second), dim=-1).flatten(-2)
        else:
            turned = torch.cat((first, second), dim=-1)
        return torch.cat((turned, x_RNH[..., num:]), dim=-1).flatten(1)


def rotations(hf: HFModel, head_dim: int) -> Iterator[Rotation]:
    """Yield every rotation of such heads that the model has frequencies for, over halves and over neighbours."""
    for module in hf.model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if not name.endswith("inv_freq") or name.endswith("original_inv_freq"):
                continue
            scaling = getattr(module, name.replace("inv_freq", "attention_scaling"), 1.0)
            every = _of_all_lengths(module, name, buffer)
            for frequencies in (item for item in every if 2 * len(item) <= head_dim):  # else those of larger heads
                for is_interleaved, is_regrouped in ((False, False), (True, False), (True, True)):
                    yield Rotation(
                        frequencies=frequencies.detach().cpu().to(torch.float32),
                        module=module,
                        name=name,
                        scaling=float(scaling),
                        is_interleaved=is_interleaved,
                        is_regrouped=is_regrouped,
                        head_dim=head_dim,
                    )


def _of_all_lengths(module: Any, name: str, current: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the frequencies that a module has now, and those it takes for requests of another length (LongRoPE)."""
    yield current
    for buffer_name in ("original_inv_freq", "long_inv_freq"):
        frequencies = getattr(module, name.replace("inv_freq", buffer_name), None)
        if isinstance(frequencies, torch.Tensor) and not torch.equal(frequencies.to(current.device), current):
            yield frequencies
