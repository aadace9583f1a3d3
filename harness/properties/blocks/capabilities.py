"""The abilities of a pool of blocks: an adapter declares them, and they bound the inputs and their shrinking."""

from collections.abc import Iterable
from dataclasses import Field, dataclass, fields
from typing import Any, Self

from harness.errors import Code, HarnessError
from harness.properties.core.adapter import NamedAdapter


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolCapabilities:
    """An adapter's declaration of its blocks, by attributes of the same names."""

    block_sizes: tuple[int, ...] = (1, 2, 3, 4)
    """Tokens in a block."""
    pool_sizes: tuple[int, ...] = tuple(range(1, 11))
    """Numbers of blocks that requests can own."""
    chunks_prompts: bool = True
    """Whether a prompt may take several steps. If not, it is computed right after its blocks are allocated, and no
    scheduler has a budget that is smaller than `max_model_len`."""
    may_lose_duplicates: bool = False
    """If two requests have computed the same block, the cache may forget the one that is in use."""
    windows: tuple[int | None, ...] = (None,)
    """By group of layers with tables of their own: the tokens that a position attends to, None for all of them."""

    @property
    def num_groups(self) -> int:
        """Groups of layers with block tables of their own."""
        return len(self.windows)

    @property
    def has_groups(self) -> bool:
        """Whether `block_table` is asked for one group at a time."""
        return self.windows != (None,)

    @classmethod
    def of(cls, adapter: NamedAdapter) -> Self:
        """Read what an adapter declares, the fields of a subclass too.

        Raises:
            HarnessError: BAD_ADAPTER: it is not what it should be.
        """
        return cls(**{entry.name: _declared(adapter, entry) for entry in fields(cls)})


def _declared(adapter: NamedAdapter, entry: "Field[Any]") -> Any:
    """Return what an adapter declares for a field, in the way that the field's default says."""
    value = adapter.declares(entry.name, entry.default)
    if entry.name == "windows":
        return tuple(None if window is None else int(window) for window in value)
    if isinstance(entry.default, tuple):
        return _sizes(adapter, entry.name, value)
    if isinstance(entry.default, int) and not isinstance(entry.default, bool):
        return int(value)
    choices = entry.metadata.get("choices", (False, True))
    if value not in choices:
        raise HarnessError(
            Code.BAD_ADAPTER, f"{entry.name} declares an unknown value", where=adapter.expression,
            expected=" or ".join(map(repr, choices)), actual=repr(value),
        )  # fmt: skip
    return value


def _sizes(adapter: NamedAdapter, name: str, listed: Any) -> tuple[int, ...]:
    sizes = tuple(listed) if isinstance(listed, Iterable) and not isinstance(listed, str) else ()
    if not sizes or not all(isinstance(size, int) and size > 0 for size in sizes):
        raise HarnessError(
            Code.BAD_ADAPTER, f"{name} declares no sizes", where=adapter.expression,
            expected="a list of positive integers", actual=repr(listed), hint=f"for instance {name} = (16, 32)",
        )  # fmt: skip
    return sizes
