"""Requests of a scheduler, and the steps that they are computed in."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from harness.properties.blocks.tables import RequestRecord


class Chunk(NamedTuple):
    """The part of one request that one step computes: the positions `start` to `stop - 1`."""

    request_id: int
    start: int
    stop: int


@dataclass(slots=True, kw_only=True, eq=False)
class ScheduledRequest(RequestRecord):
    """A request with its place in the queue.

    `token_ids` has all tokens that are sampled, those of steps in flight among them.
    """

    arrival: int
    """Its number, a fork's that of its parent."""
    num_left: int
    """Tokens that it may still sample."""
    num_total: int = 0
    """Tokens when it ends at the latest."""
    num_reported: int = 0
    """Tokens that the scheduler knows."""
    is_running: bool = False
    was_preempted: bool = False
    is_generating: bool = False
    """Whether it has sampled since it was started or resumed."""
    drafts: list[int] = field(default_factory=list)
    """Tokens that were proposed for its next step."""

    def __post_init__(self) -> None:
        self.num_total = len(self.token_ids) + self.num_left
        self.num_reported = len(self.token_ids)

    def is_single_token(self, chunk: Chunk) -> bool:
        """Whether a chunk computes what the request sampled last, and perhaps drafts after it."""
        return self.is_generating and chunk.start == len(self.token_ids) - 1


@dataclass(slots=True, kw_only=True)
class ScheduledStep:
    """A step that is planned and not yet reported."""

    chunks: Sequence[Chunk]
    sampled: dict[int, list[int]] = field(default_factory=dict)
    """By request that has caught up, the tokens that it samples."""
    ended: set[int] = field(default_factory=set)
    """Requests that end with this step."""
