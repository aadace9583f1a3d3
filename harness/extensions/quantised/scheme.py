"""What `quantization_config` says of a module's weight and of the inputs of its products, without torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from harness.errors import Code, HarnessError


@dataclass(frozen=True, slots=True, kw_only=True)
class InputScheme:
    """How the inputs of a product are quantised before it."""

    dtype: str
    """`int8`, `float8_e4m3fn` or `float4_e2m1`."""
    share: str
    """What shares a scale: `token`, `tensor` or `group`."""
    group: int | None = None
    """Inputs of a group."""
    is_static: bool = False
    """Whether the scale is in the checkpoint; else it is that of the values at hand."""

    rounded_to: str | None = None
    """A dtype that the inputs are rounded to before they are quantised."""

    def __str__(self) -> str:
        """Say it as the report does: `int8, one scale for a token`."""
        where = ", read from the checkpoint" if self.is_static else ""
        what = f"{self.group} inputs" if self.share == "group" else f"a {self.share}"
        return f"{self.dtype}, one scale for {what}{where}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """How one module is quantised."""

    format: str
    """A key of `FORMATS`."""
    bits: int = 8
    strategy: str = "channel"
    """What shares a scale: `tensor`, `channel`, `group` or `block`."""
    group: int | None = None
    """Inputs of a group."""
    block: tuple[int, int] | None = None
    """Outputs and inputs of a block."""
    is_symmetric: bool = True
    is_ordered: bool = False
    """Whether inputs were sorted by their activations."""
    zero_offset: int = 0
    """What is added to a stored zero point."""
    inputs: InputScheme | None = None
    """None where inputs stay as they are, or nothing is said of them."""


def refuse(what: str, where: object, **details: Any) -> NoReturn:
    """Raise UNKNOWN_QUANTISATION."""
    hint = "docs/quantised-checkpoints.md lists what is read; or pass the model that this one was quantised from"
    raise HarnessError(Code.UNKNOWN_QUANTISATION, what, where=where, hint=hint, **details)


def misfit(what: str, where: object, **details: Any) -> NoReturn:
    """Raise QUANTISED_MISFIT."""
    hint = "download the checkpoint again, or write it with a current version of its quantiser"
    raise HarnessError(Code.QUANTISED_MISFIT, what, where=where, hint=hint, **details)


def one_of(value: object, allowed: Sequence[object], where: object) -> None:
    """Refuse a value of a field that is not understood."""
    if not any(value == item and isinstance(value, bool) is isinstance(item, bool) for item in allowed):
        refuse("the value is not understood", where, expected=", ".join(map(str, allowed)), actual=value)
