"""Requests whose blocks are moved to host memory and back, in block managers that can do so."""

from harness.properties.blocks.calls import BlockManagerCalls
from harness.properties.blocks.requests import known
from harness.properties.blocks.tables import RequestRecord
from harness.properties.core.findings import Violation
from harness.properties.core.invariants import Invariant
from harness.properties.core.machine import action, one_of


class Swapping(BlockManagerCalls):
    """Moves whole requests: `swap_out` and `swap_in` return which block is copied where."""

    def start(self, num_blocks: int, block_size: int, hash_bits: int | None, num_host_blocks: int) -> None:
        """Make a manager with nothing in host memory."""
        super().start(num_blocks, block_size, hash_bits, num_host_blocks)
        self.swapped: dict[int, RequestRecord] = {}
        self.host_blocks: dict[int, list[int]] = {}
        """By request, the blocks of host memory that hold its content."""

    @action(
        when=lambda self: self.offers["swap_out"] and self.offers["swap_in"],
        request_id=one_of(lambda self: self.caught_up()),
    )
    def swap_out(self, request_id: int) -> None:
        """Move a request to host memory."""
        request = known(self.caught_up(), request_id)
        before = self.free_blocks()
        copies = self.subject.do(Invariant.ROOM, "swap_out", request_id)
        if copies is None:
            self.check_unchanged(before)
            return
        for source, target in copies:
            self.tables.oracle.copy(source, ("host", target))
        self.hits.note_released(request, num_kept=0)
        self.entries.note_released(request)
        del self.tables.live[request_id]
        request.leave()
        self.swapped[request_id] = request
        self.host_blocks[request_id] = [target for _, target in copies]

    @action(request_id=one_of(lambda self: list(self.swapped.values())))
    def swap_in(self, request_id: int) -> None:
        """Move a request back: all that it had computed is there again."""
        request = known(self.swapped.values(), request_id)
        before = self.free_blocks()
        fits = not self.tables.live and self.tables.fits(len(request.token_ids))
        copies = self.subject.do(Invariant.ROOM, "swap_in", request_id)
        self.check_answer(
            copies is not None, None, fits=fits, what=f"room for request {request_id}", question="",
        )  # fmt: skip
        if copies is None:
            self.check_unchanged(before)
            return
        self.hits.note_allocated(target for _, target in copies)
        for source, target in copies:
            self.tables.oracle.copy(("host", source), target)
        self._forget(request_id)
        self.tables.live[request_id] = request
        self.tables.refresh()
        self.tables.check()
        self.hits.note_unfindable(request)

    @action(request_id=one_of(lambda self: list(self.swapped.values())))
    def abort_swapped(self, request_id: int) -> None:
        """Drop a request that is in host memory."""
        request = known(self.swapped.values(), request_id)
        self.subject.do(Invariant.REMOVAL, "abort" if self.offers["abort"] else "free", request_id)
        self._forget(request_id)
        self.finished.append(request)

    def check_host_blocks(self) -> None:
        """Verify that no block of host memory belongs to two requests, and that the free ones are the others.

        Raises:
            Violation: an invariant does not hold.
        """
        used = [block for blocks in self.host_blocks.values() for block in blocks]
        if len(set(used)) < len(used):
            raise Violation(
                Invariant.TABLE_SHARING,
                f"a block of host memory holds two requests: {self.host_blocks}",
                "assert False",
            )
        if self.offers["num_free_host"] and self.num_host_blocks is not None:
            expected = self.num_host_blocks - len(used)
            actual = self.subject.ask(Invariant.POOL_PARTITION, "num_free_host")
            if actual != expected:
                raise Violation(
                    Invariant.POOL_PARTITION,
                    f"{len(used)} of {self.num_host_blocks} blocks of host memory are used, and {actual} are counted "
                    "as free",
                    f"assert {self.subject.name}.num_free_host() == {expected}",
                )

    def drain_swapped(self) -> None:
        """Let the requests in host memory go."""
        for request_id in list(self.swapped):
            self.abort_swapped(request_id)
            self.check()

    def _forget(self, request_id: int) -> None:
        del self.swapped[request_id], self.host_blocks[request_id]
