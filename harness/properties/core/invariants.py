"""The invariants of a paged KV cache and of its scheduler, by the numbers that findings, options and docs use."""

from enum import IntEnum

__all__ = ["INVARIANTS", "Severity", "severity_of"]

INVARIANTS = {
    # Ownership
    1: "Free and live blocks partition the pool, without duplicates, and counters equal what is walked",
    2: "The owner count of a block is the number of tables that hold it",
    3: "No block is twice in a table; tables share a block only at the same index, after equal tokens",
    4: "A live table never points at a free block",
    5: "A block with more than one owner, or the null block, is never written",
    6: "When all requests are gone every block is free, and the prefix cache can be reset",
    # Content
    7: "The slot of every computed position holds exactly that prefix",
    8: "A block is found only when it is full and its K and V are computed",
    9: "A block that is not fully computed has no entry in the prefix cache",
    10: "A hit has equal tokens all the way up and the same salt, whatever the hashes say",
    11: "An eviction removes the entry of its own block and no other",
    # Interface
    12: "Asking for room is answered truthfully, never by a crash, and a failed allocation changes nothing",
    13: "Looking a prefix up and pinning it are one step",
    14: "A prefix hit is shorter than the request: at least one token is computed",
    15: "A table has ceil(tokens / block_size) blocks",
    16: "A double free raises; a shared block is copied before it is appended to",
    17: "Resubmitting a request, with no eviction between, finds floor((n - 1) / block_size) blocks",
    18: "The least recently used chain is evicted first, its tail before its head",
    # Scheduler
    19: "Each scheduled request gets at least one and at most its remaining tokens; a step keeps within the budget",
    20: "No more than max_num_seqs requests run",
    21: "An impossible request is refused with the numbers; a possible one is served: no crash and no livelock",
    22: "Every request progresses; a preempted one goes before later arrivals",
    23: "Preempting, aborting and finishing at any point leave all of this true",
    24: "The output does not depend on batching, chunks, block size, prefix caching, preemption or arrival order",
    25: "A block table fits the width that max_model_len gives",
    26: "The pools of tensor-parallel ranks agree",
    # The code itself
    27: "The same calls give the same answers",
}


class Severity(IntEnum):
    """The harm of a broken invariant to the users of an engine, the worst first."""

    WRONG_OUTPUT = 0
    """A request reads what is not its own, or not computed."""
    STOPS_SERVING = 1
    """The engine crashes, hangs, or loses memory until it does."""
    UNRELIABLE = 2
    """Answers and limits do not hold, or change from run to run."""
    SLOW = 3
    """Requests are served, later or at a higher cost than necessary."""


_SEVERITIES = {
    Severity.WRONG_OUTPUT: (3, 4, 5, 7, 8, 9, 10, 24, 26),
    Severity.STOPS_SERVING: (1, 6, 12, 14, 15, 16, 21, 23),
    Severity.UNRELIABLE: (2, 13, 19, 20, 25, 27),
    Severity.SLOW: (11, 17, 18, 22),
}


def severity_of(invariant: int) -> Severity:
    """Return how bad it is that an invariant is broken."""
    return next(severity for severity, numbers in _SEVERITIES.items() if invariant in numbers)
