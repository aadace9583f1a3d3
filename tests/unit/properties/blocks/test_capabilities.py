"""What a block manager declares bounds what it is tried with, and the program of a finding."""

import re
from collections.abc import Sequence
from typing import Any

import pytest

from harness.errors import Code, HarnessError
from harness.properties.blocks.suite import search_block_manager
from harness.properties.core.search import PROFILES

from .chained import ChainedManager, Held

DEV = PROFILES["dev"].settings()


class Recorded(ChainedManager):
    """Notes its sizes and the lengths of its prompts."""

    block_sizes = (16, 64)
    pool_sizes = (4, 8)
    seen: set[tuple[str, int]] = set()  # noqa: RUF012

    def __init__(self, *, num_blocks: int, block_size: int) -> None:
        super().__init__(num_blocks=num_blocks, block_size=block_size)
        self.seen |= {("num_blocks", num_blocks), ("block_size", block_size)}

    def allocate(self, request_id: int, token_ids: Sequence[int]) -> int | None:
        self.seen.add((f"tokens of {self.block_size}", len(token_ids)))
        return super().allocate(request_id, token_ids)


class BlockSizeIgnored(Recorded):
    """Never asks for another block."""

    def _needs_block(self, held: Held) -> bool:
        return False


def sizes(name: str) -> set[int]:
    return {number for key, number in Recorded.seen if key == name}


@pytest.mark.slow
def test_only_declared_sizes_are_tried() -> None:
    search_block_manager(Recorded, DEV).raise_findings()
    assert sizes("num_blocks") == {4, 8}
    assert sizes("block_size") == {16, 64}


def test_prompts_reach_over_several_large_blocks_and_end_around_boundaries() -> None:
    search_block_manager(Recorded, DEV).raise_findings()
    lengths = sizes("tokens of 64")
    assert max(lengths) > 3 * 64
    assert {0, 63} <= {length % 64 for length in lengths}
    assert {1, 2, 3} & {length % 64 for length in lengths}


@pytest.mark.slow
def test_a_program_keeps_to_the_declared_sizes_and_stays_short() -> None:
    (finding,) = search_block_manager(BlockSizeIgnored, DEV).findings
    assert finding.invariant == 15
    made = re.search(r"BlockSizeIgnored\(num_blocks=(\d+), block_size=(\d+)\)", finding.program)
    assert made is not None
    assert (int(made[1]), int(made[2])) == (4, 16)
    assert re.search(r"\[0\] \* \d+", finding.program), "all tokens are the same"
    assert len(finding.program.splitlines()) <= 9


@pytest.mark.parametrize(
    "declared", [{"block_sizes": ()}, {"pool_sizes": (0,)}, {"block_sizes": "16"}, {"pool_sizes": 4}]
)
def test_what_declares_no_sizes_is_refused(declared: dict[str, Any]) -> None:
    with pytest.raises(HarnessError, match="declares no sizes") as caught:
        search_block_manager(type("Bad", (ChainedManager,), declared), DEV).raise_findings()
    assert caught.value.code is Code.BAD_ADAPTER


class LatestEntry(ChainedManager):
    """Where two requests compute the same block, the cache points at the later one."""

    def _publish(self, held: Held, first: int, stop: int) -> None:
        for block, (key, end) in list(zip(held.blocks, self._keys(held.token_ids, stop), strict=False))[first:]:
            block.key, block.prefix = key, tuple(held.token_ids[:end])
            self.block_of_key[key] = block


@pytest.mark.slow
def test_a_cache_that_keeps_the_later_of_two_equal_blocks_says_so() -> None:
    assert [finding.invariant for finding in search_block_manager(LatestEntry, DEV).findings] == [11]
    search_block_manager(type("Declared", (LatestEntry,), {"may_lose_duplicates": True}), DEV).raise_findings()


class ComputesWithAllocation(ChainedManager):
    """Gives blocks for what the same step computes: a prompt in two steps would be cut wrong."""

    def computed(self, request_id: int, num_tokens: int) -> None:
        if num_tokens != len(self.held[request_id].token_ids):
            raise ValueError(f"{num_tokens} of {len(self.held[request_id].token_ids)} tokens")
        super().computed(request_id, num_tokens)


@pytest.mark.slow
def test_prompts_are_computed_whole_where_the_adapter_says_so() -> None:
    search_block_manager(type("Declared", (ComputesWithAllocation,), {"chunks_prompts": False}), DEV).raise_findings()
    (finding, *_) = search_block_manager(ComputesWithAllocation, DEV, is_first_enough=True).findings
    assert finding.what.startswith("computed raised ValueError")
