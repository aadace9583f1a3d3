"""The interface of a block manager under test, and the abilities that an adapter declares.

Requests have numbers; tokens are small integers. K and V are never written: when the suite says that tokens are
computed, it notes for each slot of the block table which prefix stands there now.
"""

from collections.abc import Iterable, Sequence
from dataclasses import Field, dataclass, fields
from typing import Any, Protocol, Self

from harness.errors import Code, HarnessError
from harness.properties.core.falsify import NamedAdapter


class BlockManagerAdapter(Protocol):
    """The methods that every adapter has. The optional ones are in `OPTIONAL`.

    Any exception that leaves a method is a finding: a manager that raises if there is no room needs an adapter that
    returns None or False there.
    """

    def __init__(self, *, num_blocks: int, block_size: int) -> None:
        """Make a manager of `num_blocks` blocks that requests can own, a null block not counted.

        With a keyword `hash_bits: int | None` it is also tried with hashes cut to that many bits, so that they collide.
        """

    def allocate(self, request_id: int, token_ids: Sequence[int]) -> int | None:
        """Allocate blocks for all tokens of a new request, and return how many leading tokens are already cached.

        None: there is no room, and nothing has changed. With a keyword `salt: str`, requests of different salts share
        nothing.
        """

    def append(self, request_id: int, token_id: int) -> bool:
        """Make room for one more token, or return False and change nothing."""

    def free(self, request_id: int) -> None:
        """Release the blocks of a finished request. For an unknown request it may raise, and must change nothing."""

    def block_table(self, request_id: int) -> Sequence[int]:
        """Return the request's blocks in order."""


REQUIRED = ("allocate", "append", "free", "block_table")

OPTIONAL = {
    "computed": ("computed(request_id, num_tokens): K and V of that many tokens are now written", (8, 9)),
    "fork": ("fork(parent_id, child_id) -> bool: a second request with the same tokens and blocks", (5, 16)),
    "take_copies": ("take_copies() -> [(source, target)]: blocks to be copied since it was last asked", (5, 16)),
    "preempt": ("preempt(request_id): like free, and the request comes back; free is used without it", (23,)),
    "abort": ("abort(request_id): like free, at any time; free is used without it", (23,)),
    "can_allocate": ("can_allocate(token_ids) -> bool: whether allocate would find room", (12,)),
    "can_append": ("can_append(request_id) -> bool: whether append would find room", (12,)),
    "num_free": ("num_free() -> int: blocks that no table holds", (1, 6)),
    "free_list": ("free_list() -> [block]: the same blocks, walked", (1, 4)),
    "num_owners": ("num_owners(block) -> int: tables that hold it", (2,)),
    "lookup": ("lookup(token_ids) -> int: tokens that allocate would find", (13, 14, 17)),
    "cached_blocks": ("cached_blocks() -> {block: all tokens up to its end}: what look-ups find", (8, 9, 11, 18)),
    "return_blocks": ("return_blocks(blocks): the pool's own free; raises where it must not be called", (16,)),
    "evict": ("evict(num_blocks): drop cached content of blocks without an owner", (11, 18)),
    "reset": ("reset(): empty the prefix cache", (6,)),
    "swap_out": ("swap_out(request_id) -> [(block, host_block)] or None for no room: copies to host memory", (3, 7)),
    "swap_in": ("swap_in(request_id) -> [(host_block, block)] or None for no room: copies back", (3, 7)),
    "num_free_host": ("num_free_host() -> int: free blocks of host memory", (1,)),
}
"""By method: its signature, and the invariants that are checked, or checked harder if it is offered."""


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
