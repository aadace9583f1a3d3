"""The block suite: any sequence of calls of a block manager, held against a content oracle and invariants 1 to 18."""

from collections.abc import Callable, Collection
from typing import Any

from hypothesis import settings as Settings  # noqa: N812  # `settings` is what the functions here take

from harness.properties.blocks.adapter import OPTIONAL, REQUIRED
from harness.properties.blocks.capabilities import PoolCapabilities
from harness.properties.blocks.machine import BlockManagerMachine
from harness.properties.core.adapter import NamedAdapter
from harness.properties.core.findings import PropertyFinding
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
    adapter, hits = NamedAdapter.of(factory), _Hits()
    report = search(lambda: hits.watched(BlockManagerMachine(adapter)), settings, is_first_enough=is_first_enough)
    miss = hits.miss_of_all()
    if miss is not None and hits.reports_hits:
        report.findings.append(miss)
    elif miss is not None:
        report.not_checked.append(
            f"block manager: no lookup, and no allocation of {report.num_examples} examples found anything: whether a "
            "prefix cache finds what it holds (17)"
        )
    return report


class _Hits:
    """What the examples of a search found in the prefix cache, together."""

    def __init__(self) -> None:
        self._machines: list[BlockManagerMachine] = []
        self._num_hits = 0
        self._miss: PropertyFinding | None = None
        self.reports_hits = False
        """Whether a look-up is offered: without one, a manager that finds nothing may have no prefix cache."""

    def watched(self, machine: BlockManagerMachine) -> BlockManagerMachine:
        """Return the machine of the next example, and take down what the last one found."""
        self._take_down()
        self._machines.append(machine)
        return machine

    def miss_of_all(self) -> PropertyFinding | None:
        """Return a miss if some example had reason to hit and none did."""
        self._take_down()
        return None if self._num_hits else self._miss

    def _take_down(self) -> None:
        for machine in self._machines:
            if hasattr(machine, "offers"):  # it was started
                self._num_hits += machine.num_hits
                misses = filter(None, (self._miss, machine.first_miss))
                self._miss = min(misses, key=lambda miss: len(miss.program), default=None)
                self.reports_hits = machine.offers["lookup"]
        self._machines.clear()


def not_checked(factory: Callable[..., Any]) -> list[str]:
    """Name what the adapter does not offer, and the invariants that are therefore not checked, or checked less."""
    adapter = NamedAdapter.of(factory)
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
