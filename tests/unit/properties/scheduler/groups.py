"""Schedulers over groups of layers with windows, and with host memory, written for these tests."""

from collections.abc import Sequence

from ..blocks import hybrid
from ..blocks.swapping import SwappingManager
from .two_phase import Job, TwoPhaseScheduler

NUM_HOST_BLOCKS = 4


class HybridScheduler(TwoPhaseScheduler):
    """Two groups of layers, one with a window."""

    windows = hybrid.HybridManager.windows
    pool_sizes = hybrid.HybridManager.pool_sizes
    null_block = hybrid.NULL
    manager = hybrid.HybridManager

    def __init__(self, *, num_blocks: int, block_size: int, **sizes: int) -> None:
        super().__init__(num_blocks=num_blocks, block_size=block_size, **sizes)
        self.blocks = self.manager(num_blocks=num_blocks, block_size=block_size)
        self.num_blocks = num_blocks // len(self.windows)

    def block_table(self, request_id: int, group: int) -> list[int]:  # type: ignore[override]
        return self.blocks.block_table(request_id, group)


class WindowTooShort(HybridScheduler):
    manager = hybrid.WindowTooShort


class GroupsShareKeys(HybridScheduler):
    manager = hybrid.GroupsShareKeys


class GivenUpAndLost(HybridScheduler):
    manager = hybrid.GivenUpAndLost


class SwappingScheduler(TwoPhaseScheduler):
    """A preempted request is moved to host memory where there is room, and goes on where it was."""

    def __init__(self, *, num_blocks: int, block_size: int, **sizes: int) -> None:
        super().__init__(num_blocks=num_blocks, block_size=block_size, **sizes)
        self.blocks = SwappingManager(num_blocks=num_blocks, block_size=block_size, num_host_blocks=NUM_HOST_BLOCKS)
        self.swapped: list[Job] = []
        self.swaps: list[tuple[str, int, int]] = []

    def take_swaps(self) -> list[tuple[str, int, int]]:
        swaps, self.swaps = self.swaps, []
        return swaps

    def schedule(self) -> list[tuple[int, int, int]]:
        while self._has_swapped_next() and len(self.active) < self.max_num_seqs:
            copies = self.blocks.swap_in(self.swapped[0].request_id)
            if copies is None:
                break
            self.swaps += self.swap_in(copies)
            self.active.append(self.swapped.pop(0))
        return super().schedule()

    def swap_in(self, copies: Sequence[tuple[int, int]]) -> list[tuple[str, int, int]]:
        return [("in", source, target) for source, target in copies]

    def abort(self, request_id: int) -> None:
        job = next((job for job in self.swapped if job.request_id == request_id), None)
        if job is not None:
            self.swapped.remove(job)
            self.blocks.free(request_id)
        else:
            super().abort(request_id)

    def _may_start(self, chunks: Sequence[object]) -> bool:
        return not self._has_swapped_next() and super()._may_start(chunks)

    def _has_swapped_next(self) -> bool:
        # Where host memory was full, a request that arrived earlier waits to be computed again.
        return bool(self.swapped and not (self.waiting and self.waiting[0].request_id < self.swapped[0].request_id))

    def _preempt(self, job: Job) -> None:
        copies = self.blocks.swap_out(job.request_id)
        if copies is None:
            super()._preempt(job)
            return
        self.swaps += [("out", source, target) for source, target in copies]
        self.active.remove(job)
        self.swapped.insert(0, job)


class SwappedInTooLate(SwappingScheduler):
    """The copies back are left for the step after the next."""

    def take_swaps(self) -> list[tuple[str, int, int]]:
        now = [swap for swap in self.swaps if swap[0] == "out"]
        self.swaps = [swap for swap in self.swaps if swap[0] == "in"]
        return now


class LastSwapLost(SwappingScheduler):
    def swap_in(self, copies: Sequence[tuple[int, int]]) -> list[tuple[str, int, int]]:
        return super().swap_in(copies)[:-1]
