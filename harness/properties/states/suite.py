"""The state suite: any sequence of calls of a state cache, held against the state of every prefix."""

from collections.abc import Callable
from typing import Any

from hypothesis import settings as Settings  # noqa: N812  # `settings` is what the function here takes

from harness.properties.core.adapter import NamedAdapter
from harness.properties.core.search import SearchReport, not_offered, search_cache
from harness.properties.core.subject import Subject
from harness.properties.states.adapter import OPTIONAL, REQUIRED, StateCapabilities
from harness.properties.states.machine import StateCacheMachine


def search_state_cache(
    factory: Callable[..., Any], settings: Settings, *, is_first_enough: bool = False
) -> SearchReport:
    """Search for calls after which an invariant of a state cache does not hold; return every broken one once.

    `factory` makes an adapter, see `states/adapter.py`. `is_first_enough`: end at the first example that breaks one.

    Raises:
        HarnessError: BAD_ADAPTER: the adapter lacks a method.
    """
    adapter = NamedAdapter.of(factory)
    return search_cache(
        "state cache", lambda hits: StateCacheMachine(adapter, hits), settings, is_first_enough=is_first_enough
    )


def not_checked(factory: Callable[..., Any]) -> list[str]:
    """Name what the adapter does not offer, and the invariants that are therefore not checked, or checked less."""
    adapter = NamedAdapter.of(factory)
    declared = StateCapabilities.of(adapter)
    sizes = {"num_slots": max(declared.pool_sizes), "block_size": declared.block_sizes[-1]}
    subject = Subject(adapter, "cache", required=REQUIRED, **sizes)
    lines = not_offered(subject, "state cache", OPTIONAL, "allocate", 29)
    if declared.snapshots != "blocks":
        lines.append(f"state cache: it declares snapshots = {declared.snapshots!r}: which states must be found (17)")
    return lines
