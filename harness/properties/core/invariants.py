"""The invariants of a paged KV cache and of its scheduler, by the numbers that findings, options and docs use."""

from enum import IntEnum


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


class Invariant(IntEnum):
    """What must always hold: a number that is public, the harm if it does not hold, and one sentence."""

    severity: Severity
    text: str

    def __new__(cls, number: int, severity: Severity, text: str) -> "Invariant":
        """Make a member that equals its number."""
        member = int.__new__(cls, number)
        member._value_, member.severity, member.text = number, severity, text
        return member

    # fmt: off
    # Ownership
    POOL_PARTITION = (1, Severity.STOPS_SERVING,
        "Free and live blocks partition the pool, without duplicates, and counters equal what is walked")
    OWNER_COUNTS = 2, Severity.UNRELIABLE, "The owner count of a block is the number of tables that hold it"
    TABLE_SHARING = (3, Severity.WRONG_OUTPUT,
        "No block is twice in a table; tables share a block only at the same index, after equal tokens")
    LIVE_BLOCKS = 4, Severity.WRONG_OUTPUT, "A live table never points at a free block"
    SHARED_WRITES = 5, Severity.WRONG_OUTPUT, "A block with more than one owner, or the null block, is never written"
    ALL_FREED = (6, Severity.STOPS_SERVING,
        "When all requests are gone every block is free, and the prefix cache can be reset")

    # Content
    SLOT_CONTENT = 7, Severity.WRONG_OUTPUT, "The slot of every computed position holds exactly that prefix"
    COMPUTED_HITS = 8, Severity.WRONG_OUTPUT, "A block is found only when it is full and its K and V are computed"
    COMPUTED_ENTRIES = 9, Severity.WRONG_OUTPUT, "A block that is not fully computed has no entry in the prefix cache"
    EQUAL_HITS = (10, Severity.WRONG_OUTPUT,
        "A hit has equal tokens all the way up and the same salt, whatever the hashes say")
    EVICTED_ENTRY = 11, Severity.SLOW, "An eviction removes the entry of its own block and no other"

    # Interface
    ROOM = (12, Severity.STOPS_SERVING,
        "Asking for room is answered truthfully, never by a crash, and a failed allocation changes nothing")
    LOOKUP = 13, Severity.UNRELIABLE, "Looking a prefix up and pinning it are one step"
    ONE_TOKEN_LEFT = (14, Severity.STOPS_SERVING,
        "A prefix hit is shorter than the request: at least one token is computed")
    TABLE_LENGTH = 15, Severity.STOPS_SERVING, "A table has ceil(tokens / block_size) blocks"
    FREE_AND_COPY = (16, Severity.STOPS_SERVING,
        "A double free raises; a shared block is copied before it is appended to")
    EXPECTED_HITS = (17, Severity.SLOW,
        "Resubmitting a request, with no eviction between, finds floor((n - 1) / block_size) blocks")
    EVICTION_ORDER = 18, Severity.SLOW, "The least recently used chain is evicted first, its tail before its head"

    # Scheduler
    STEP_BUDGET = (19, Severity.UNRELIABLE,
        "Each scheduled request gets at least one and at most its remaining tokens; a step keeps within the budget")
    RUNNING_LIMIT = 20, Severity.UNRELIABLE, "No more than max_num_seqs requests run"
    ADMISSION = (21, Severity.STOPS_SERVING,
        "An impossible request is refused with the numbers; a possible one is served: no crash and no livelock")
    PROGRESS = 22, Severity.SLOW, "Every request progresses; a preempted one goes before later arrivals"
    REMOVAL = 23, Severity.STOPS_SERVING, "Preempting, aborting and finishing at any point leave all of this true"
    SAME_OUTPUT = (24, Severity.WRONG_OUTPUT,
        "The output does not depend on batching, chunks, block size, prefix caching, preemption or arrival order")
    TABLE_WIDTH = 25, Severity.UNRELIABLE, "A block table fits the width that max_model_len gives"
    EQUAL_RANKS = 26, Severity.WRONG_OUTPUT, "The pools of tensor-parallel ranks agree"

    # The code itself
    DETERMINISM = 27, Severity.UNRELIABLE, "The same calls give the same answers"

    # States of recurrent and convolutional layers
    HELD_STATE = (28, Severity.WRONG_OUTPUT,
        "The state of a request is that of exactly its computed tokens, whatever other requests do")
    RESTORED_STATE = (29, Severity.WRONG_OUTPUT,
        "A request starts from the state of the matched prefix and salt, and only what was written is matched")
    REWOUND_STATE = (30, Severity.WRONG_OUTPUT,
        "Going back leaves the state of exactly the tokens that are kept; rejected drafts are not in it")
    SNAPSHOT_STATE = (31, Severity.WRONG_OUTPUT,
        "A snapshot holds the state of its own prefix, which was written and accepted")
    TRANSFER = (32, Severity.WRONG_OUTPUT,
        "A transfer is read when it is complete, is reported once, and what failed is computed again")
