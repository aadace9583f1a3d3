"""The interface of a scheduler under test, and the abilities that an adapter declares by attributes.

They bound the inputs, the shrinking and the checks: sizes, what its limits limit, steps in flight, drafts.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, Self

from harness.properties.blocks.adapter import PoolCapabilities
from harness.properties.blocks.requests import stretch_of
from harness.properties.core.falsify import NamedAdapter


class SchedulerAdapter(Protocol):
    """The methods that every adapter has. The optional ones are in `OPTIONAL`.

    Any exception that leaves a method is a finding, but for `add`. Tokens are 0 and 1, and 2, which ends a request.
    """

    def __init__(
        self, *, num_blocks: int, block_size: int, max_num_batched_tokens: int, max_num_seqs: int, max_model_len: int
    ) -> None:
        """Make a scheduler over a pool of `num_blocks` blocks that requests can own, a null block not counted.

        With a keyword `hash_bits: int | None` it is also tried with hashes cut to that many bits, so that they collide.
        NotImplementedError says that the scheduler is not made for these sizes.
        """

    def add(self, request_id: int, token_ids: Sequence[int], max_new_tokens: int) -> None:
        """Queue a request, or raise an error with the numbers if it can never be served.

        With a keyword `salt: str`, requests of different salts share nothing.
        """

    def schedule(self) -> Sequence[tuple[int, int, int]]:
        """Choose the next step: request and the positions `start` to `stop - 1` that are computed for it.

        It may be called again before the step is reported, where the adapter declares `max_steps_in_flight`.
        """

    def update(self, sampled: Mapping[int, int]) -> Collection[int] | None:
        """Record that the oldest step in flight is computed, and the token of each request that has caught up.

        Requests that were aborted or have ended meanwhile are among them. With `max_draft_tokens` or
        `max_tokens_per_step` declared, there is a list of tokens for each request: the accepted drafts and one more.
        Return the requests whose tokens are dropped, if any: they were preempted meanwhile and sample them again.
        """

    def finish(self, request_id: int) -> None:
        """Take a request out after the step in which it sampled its last token.

        A scheduler that does so in `update` has no such method.
        """


REQUIRED = ("add", "schedule", "update")

OPTIONAL = {
    "abort": ("abort(request_id): take a request out, running or waiting", (23,)),
    "fork": ("fork(parent_id, child_id): a second request with the same tokens", (5, 16, 23)),
    "running": ("running() -> [request_id]: requests that hold blocks, in any order", (1, 17, 20, 22)),
    "block_table": ("block_table(request_id) -> [block], of a running request", (3, 5, 7, 8, 15, 17, 25)),
    "take_copies": ("take_copies() -> [(source, target)]: blocks to be copied since it was last asked", (5, 16)),
    "num_free": ("num_free() -> int: blocks that no table holds", (1, 6)),
    "free_list": ("free_list() -> [block]: the same blocks, walked", (1, 4)),
    "num_owners": ("num_owners(block) -> int: tables that hold it", (2,)),
    "cached_blocks": ("cached_blocks() -> {block: all tokens up to its end}: what look-ups find", (8, 9)),
    "propose": ("propose(request_id, token_ids): draft tokens for the request's next step", (7, 8, 19)),
    "take_swaps": ('take_swaps() -> [("out", block, host_block) or ("in", host_block, block)], in order', (7,)),
}
"""By method: its signature, and the invariants that are checked, or checked harder if it is offered. With groups of
layers (`windows`), `block_table` takes the number of a group as well."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerCapabilities(PoolCapabilities):
    """An adapter's declaration of its scheduler, by attributes of the same names."""

    budgets: tuple[int, ...] = (1, 2, 3, 5, 50)
    """Values of `max_num_batched_tokens`; for larger blocks as many times larger."""
    max_model_lens: tuple[int, ...] = tuple(range(2, 17))
    """Longest requests; for larger blocks as many times longer."""
    budget_covers: str = field(default="all", metadata={"choices": ("all", "prompts")})
    """`"all"` tokens of a step, or those of `"prompts"`: single tokens of requests that generate are not counted."""
    max_num_seqs_limits: str = field(default="running", metadata={"choices": ("running", "step")})
    """`"running"` requests, or those of one `"step"`."""
    refuses_impossible: bool = True
    """Whether `add` refuses a request that can never be served; if not, none is queued: other code refuses it."""
    reuses_prefixes: bool = False
    """Whether a request that is queued again finds what was computed for it before (17)."""
    shares_within_step: bool = False
    """Whether a request may find blocks in the cache that the same step fills for another request."""
    max_steps_in_flight: int = 1
    """Steps that are planned before the first of them is reported: 2 where the next is planned while one runs."""
    max_draft_tokens: int = 0
    """Draft tokens for one request that a step verifies, by `propose`."""
    max_tokens_per_step: int = 1
    """Tokens that a request samples in one step, without drafts."""

    @property
    def num_lookahead(self) -> int:
        """Slots after a request's tokens that a step may write."""
        return self.max_draft_tokens + self.max_tokens_per_step - 1

    @property
    def reports_lists(self) -> bool:
        """Whether `update` takes a list of tokens for each request."""
        return self.num_lookahead > 0

    @classmethod
    def of(cls, adapter: NamedAdapter) -> Self:
        """Read what an adapter declares.

        Raises:
            HarnessError: BAD_ADAPTER: it is not what it should be.
        """
        declared = super(SchedulerCapabilities, cls).of(
            adapter
        )  # `slots` makes a new class, which plain super() misses
        stretch = max(stretch_of(size) for size in declared.block_sizes)
        undeclared = [name for name in ("budgets", "max_model_lens") if adapter.declares(name) is None]
        stretched: dict[str, Any] = {
            name: tuple(size * stretch for size in getattr(declared, name)) for name in undeclared
        }
        return replace(declared, **stretched)
