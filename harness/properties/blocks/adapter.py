"""The interface of a block manager under test.

Requests have numbers; tokens are small integers. K and V are never written: when the suite says that tokens are
computed, it notes for each slot of the block table which prefix stands there now.
"""

from collections.abc import Sequence
from typing import Protocol


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
        """Give a new request blocks for all its tokens, and return how many leading tokens are cached already.

        None: there is no room, and nothing has changed. With a keyword `salt: str`, requests of different salts share
        nothing.
        """

    def append(self, request_id: int, token_id: int) -> bool:
        """Make room for one more token, or return False and change nothing."""

    def free(self, request_id: int) -> None:
        """Take a finished request's blocks away. For a request that is not there it may raise, and changes nothing."""

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
