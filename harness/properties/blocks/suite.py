"""The block suite: any sequence of calls of a block manager, held against a content oracle and invariants 1 to 18."""

from collections.abc import Callable
from typing import Any

from hypothesis import settings as Settings  # noqa: N812  # `settings` is what the functions here take

from harness.properties.blocks.adapter import OPTIONAL, REQUIRED
from harness.properties.blocks.capabilities import PoolCapabilities
from harness.properties.blocks.machine import BlockManagerMachine
from harness.properties.core.adapter import NamedAdapter
from harness.properties.core.search import SearchReport, not_offered, search_cache
from harness.properties.core.subject import Subject


def search_block_manager(
    factory: Callable[..., Any], settings: Settings, *, is_first_enough: bool = False
) -> SearchReport:
    """Search for calls after which an invariant of a block manager does not hold; return every broken one once.

    `factory` makes an adapter, see `BlockManagerAdapter`. `is_first_enough`: end at the first example that breaks one.

    Raises:
        HarnessError: BAD_ADAPTER: the adapter lacks a method.
    """
    adapter = NamedAdapter.of(factory)
    return search_cache(
        "block manager", lambda hits: BlockManagerMachine(adapter, hits), settings, is_first_enough=is_first_enough
    )


def not_checked(factory: Callable[..., Any]) -> list[str]:
    """Name what the adapter does not offer, and the invariants that are therefore not checked, or checked less."""
    adapter = NamedAdapter.of(factory)
    pool = PoolCapabilities.of(adapter)
    subject = Subject(
        adapter, "manager", required=REQUIRED, num_blocks=max(pool.pool_sizes), block_size=pool.block_sizes[-1]
    )
    lines = not_offered(subject, "block manager", OPTIONAL, "allocate", 10)
    if pool.has_groups:
        lines.append("block manager: with several groups of layers, how much a look-up must find (17)")
    else:
        lines.append("block manager: it does not declare windows: groups of layers with a sliding window (7)")
    return lines
