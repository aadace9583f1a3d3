"""The block suite: any sequence of calls of a block manager, held against a content oracle and invariants 1 to 18."""

from collections.abc import Callable, Collection
from typing import Any

from hypothesis import settings as Settings  # noqa: N812  # `settings` is what the functions here take

from harness.properties.blocks.adapter import OPTIONAL, REQUIRED
from harness.properties.blocks.capabilities import PoolCapabilities
from harness.properties.blocks.machine import BlockManagerMachine
from harness.properties.core.adapter import Adapter
from harness.properties.core.search import SearchReport, not_offered, search
from harness.properties.core.subject import Subject

__all__ = ["check_block_manager", "not_checked", "search_block_manager"]


def check_block_manager(factory: Callable[..., Any], settings: Settings, *, accepted: Collection[int] = ()) -> None:
    """Search for calls after which an invariant of a block manager does not hold.

    `factory` makes an adapter, see `BlockManagerAdapter`; findings of `accepted` invariants are not raised.

    Raises:
        PropertyError: it found some; the error holds the shortest program of each.
        HarnessError: BAD_ADAPTER: the adapter lacks a method; NOTHING_CHECKED: it rejected every example.
    """
    search_block_manager(factory, settings).raise_findings(accepted)


def search_block_manager(
    factory: Callable[..., Any], settings: Settings, *, is_first_enough: bool = False
) -> SearchReport:
    """Return every broken invariant once; `is_first_enough`: end at the first example that breaks one.

    Raises:
        HarnessError: BAD_ADAPTER.
    """
    adapter = Adapter.of(factory)
    return search(lambda: BlockManagerMachine(adapter), settings, is_first_enough=is_first_enough)


def not_checked(factory: Callable[..., Any]) -> list[str]:
    """Name what the adapter does not offer, and the invariants that are therefore not checked, or checked less."""
    adapter = Adapter.of(factory)
    pool = PoolCapabilities.of(adapter)
    subject = Subject(
        adapter, "manager", required=REQUIRED, num_blocks=max(pool.pool_sizes), block_size=pool.block_sizes[-1]
    )
    lines = not_offered(subject, "block manager", OPTIONAL)
    if not adapter.takes("hash_bits"):
        lines.append("block manager: no keyword hash_bits: hashes do not collide (10)")
    if not subject.takes("allocate", "salt"):
        lines.append("block manager: allocate has no keyword salt (10)")
    if pool.has_groups:
        lines.append("block manager: with several groups of layers, how much a look-up must find (17)")
    else:
        lines.append("block manager: it does not declare windows: groups of layers with a sliding window (7)")
    return lines
