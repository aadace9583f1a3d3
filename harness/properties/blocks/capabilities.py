"""The abilities of a pool of blocks: an adapter declares them, and they bound the inputs and their shrinking."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from harness.errors import Code, HarnessError
from harness.properties.core.adapter import NamedAdapter

__all__ = ["PoolCapabilities", "declared_choice", "declared_pool", "declared_sizes"]


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
    def of(cls, adapter: NamedAdapter) -> "PoolCapabilities":
        """Read what an adapter declares.

        Raises:
            HarnessError: BAD_ADAPTER: it is not what it should be.
        """
        return cls(**declared_pool(adapter))


def declared_pool(adapter: NamedAdapter) -> dict[str, Any]:
    """Return the fields of `PoolCapabilities` that an adapter declares; raises as `PoolCapabilities.of`."""
    declared: dict[str, Any] = {
        name: declared_sizes(adapter, name)
        for name in ("block_sizes", "pool_sizes")
        if adapter.declares(name) is not None
    }
    if adapter.declares("windows") is not None:
        windows = tuple(adapter.declares("windows"))
        declared["windows"] = tuple(None if window is None else int(window) for window in windows)
    declared["chunks_prompts"] = declared_choice(adapter, "chunks_prompts", (True, False))
    declared["may_lose_duplicates"] = declared_choice(adapter, "may_lose_duplicates", (False, True))
    return declared


def declared_sizes(adapter: NamedAdapter, name: str) -> tuple[int, ...]:
    """Return an attribute that lists positive integers.

    Raises:
        HarnessError: BAD_ADAPTER: it lists anything else, or nothing.
    """
    listed = adapter.declares(name)
    sizes = tuple(listed) if isinstance(listed, Iterable) and not isinstance(listed, str) else ()
    if not sizes or not all(isinstance(size, int) and size > 0 for size in sizes):
        raise HarnessError(
            Code.BAD_ADAPTER, f"{name} declares no sizes", where=adapter.expression,
            expected="a list of positive integers", actual=repr(listed), hint=f"for instance {name} = (16, 32)",
        )  # fmt: skip
    return sizes


def declared_choice(adapter: NamedAdapter, name: str, choices: tuple[Any, ...]) -> Any:
    """Return an attribute that is one of some values, the first of them if it is absent.

    Raises:
        HarnessError: BAD_ADAPTER: it is another.
    """
    value = adapter.declares(name, choices[0])
    if value not in choices:
        raise HarnessError(
            Code.BAD_ADAPTER, f"{name} has an unknown value", where=adapter.expression,
            expected=" or ".join(map(repr, choices)), actual=repr(value),
        )  # fmt: skip
    return value
