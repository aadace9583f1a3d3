"""The abilities of a scheduler: an adapter declares them, and they bound the inputs, their shrinking and the checks."""

from dataclasses import dataclass, field, replace
from typing import Any, Self

from harness.properties.blocks.capabilities import PoolCapabilities
from harness.properties.blocks.tokens import stretch_of
from harness.properties.core.adapter import NamedAdapter


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
        found = super(SchedulerCapabilities, cls).of(adapter)  # `slots` makes a new class, which plain super() misses
        stretch = max(stretch_of(size) for size in found.block_sizes)
        undeclared = [name for name in ("budgets", "max_model_lens") if adapter.declares(name) is None]
        stretched: dict[str, Any] = {
            name: tuple(size * stretch for size in getattr(found, name)) for name in undeclared
        }
        return replace(found, **stretched)
