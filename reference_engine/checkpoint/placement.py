"""Places of a checkpoint's tensors in the engine's parameters, in which several tensors may be stacked."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["Placement", "stacked"]


@dataclass(frozen=True, slots=True)
class Placement:
    """The place of one checkpoint tensor."""

    parameter: str
    """The engine's parameter, in which several tensors may be stacked."""
    shape: tuple[int, ...]
    """The checkpoint tensor's own shape."""
    row: int = 0
    """First row in the parameter."""
    stays_float32: bool = False
    """Whether the parameter is float32 in an engine of any dtype, as in transformers."""


def stacked(
    prefix: str, target: str, num_rows: dict[str, int], num_inputs: int, has_bias: bool = False
) -> Iterator[tuple[str, Placement]]:
    """Stack linear layers, given with their numbers of rows, into `target`."""
    row = 0
    for name, num_outputs in num_rows.items():
        yield f"{prefix}{name}.weight", Placement(f"{prefix}{target}.weight", (num_outputs, num_inputs), row)
        if has_bias:
            yield f"{prefix}{name}.bias", Placement(f"{prefix}{target}.bias", (num_outputs,), row)
        row += num_outputs
