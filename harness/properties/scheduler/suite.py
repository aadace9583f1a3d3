"""The scheduler suite: arrivals, steps, forks, aborts and finishes in any order, held against invariants 19 to 25.

Where the scheduler shows its block tables, the invariants of the blocks are verified too.
"""

from collections.abc import Callable, Collection
from typing import Any

from hypothesis import settings as Settings  # noqa: N812  # `settings` is what the functions here take

from harness.properties.core.adapter import NamedAdapter
from harness.properties.core.invariants import Invariant
from harness.properties.core.search import SearchReport, not_offered, search
from harness.properties.core.subject import Subject
from harness.properties.scheduler.adapter import OPTIONAL, REQUIRED
from harness.properties.scheduler.capabilities import SchedulerCapabilities
from harness.properties.scheduler.machine import SchedulerMachine


def search_scheduler(
    factory: Callable[..., Any], settings: Settings, *, accepted: Collection[int] = (), is_first_enough: bool = False
) -> SearchReport:
    """Search for arrivals and steps after which an invariant does not hold; return every broken one once.

    `factory` makes an adapter, see `SchedulerAdapter`. `is_first_enough`: end at the first example that breaks one.

    Raises:
        HarnessError: BAD_ADAPTER: the adapter lacks a method.
    """
    adapter, refuses = NamedAdapter.of(factory), Invariant.ADMISSION not in accepted  # else none impossible is queued
    return search(lambda: SchedulerMachine(adapter, refuses=refuses), settings, is_first_enough=is_first_enough)


def not_checked(factory: Callable[..., Any]) -> list[str]:
    """Name what the adapter does not offer, and the invariants that are therefore not checked, or checked less."""
    adapter = NamedAdapter.of(factory)
    declared = SchedulerCapabilities.of(adapter)
    subject = Subject(
        adapter, "scheduler", required=REQUIRED, num_blocks=max(declared.pool_sizes),
        block_size=declared.block_sizes[-1], max_num_batched_tokens=max(declared.budgets), max_num_seqs=2,
        max_model_len=max(declared.max_model_lens),
    )  # fmt: skip
    lines = not_offered(subject, "scheduler", OPTIONAL, "add", 10)
    if not declared.refuses_impossible:
        lines.append("scheduler: it declares refuses_impossible = False: requests that can never be served (21)")
    if not declared.reuses_prefixes:
        lines.append("scheduler: it does not declare reuses_prefixes: what a request must find in the cache (17)")
    if declared.max_steps_in_flight == 1:
        lines.append(
            "scheduler: it does not declare max_steps_in_flight = 2: steps planned while one is in flight (23)"
        )
    if not declared.has_groups:
        lines.append("scheduler: it does not declare windows: groups of layers with a sliding window (7)")
    return [*lines, "scheduler: 24 needs an engine's output, 26 more than one rank"]
