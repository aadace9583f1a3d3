"""A block manager that moves requests to host memory and back, written for these tests; the subclasses have bugs."""

from .chained import ChainedManager, Held


class SwappingManager(ChainedManager):
    def __init__(self, *, num_blocks: int, block_size: int, num_host_blocks: int) -> None:
        super().__init__(num_blocks=num_blocks, block_size=block_size)
        self.free_host_blocks = list(range(num_host_blocks))
        self.swapped: dict[int, tuple[Held, list[int]]] = {}

    def swap_out(self, request_id: int) -> list[tuple[int, int]] | None:
        table = self.block_table(request_id)
        if len(table) > len(self.free_host_blocks):
            return None
        host_blocks = [self.free_host_blocks.pop() for _ in table]
        held = self.held[request_id]
        super().free(request_id)
        self.swapped[request_id] = held, host_blocks
        return list(zip(table, host_blocks, strict=True))

    def swap_in(self, request_id: int) -> list[tuple[int, int]] | None:
        held, host_blocks = self.swapped[request_id]
        if len(host_blocks) > len(self.free_blocks):
            return None
        del self.swapped[request_id]
        held.blocks = [self._take() for _ in host_blocks]
        self.held[request_id] = held
        self.free_host(host_blocks)
        return [(host, block.number) for host, block in zip(host_blocks, held.blocks, strict=True)]

    def free(self, request_id: int) -> None:
        if request_id in self.swapped:
            self.free_host(self.swapped.pop(request_id)[1])
        else:
            super().free(request_id)

    def num_free_host(self) -> int:
        return len(self.free_host_blocks)

    def free_host(self, host_blocks: list[int]) -> None:
        self.free_host_blocks += host_blocks


class LastBlockStays(SwappingManager):
    """The last block, which is not full, is not copied back."""

    def swap_in(self, request_id: int) -> list[tuple[int, int]] | None:
        copies = super().swap_in(request_id)
        return None if copies is None else copies[:-1]


class CopiedCrosswise(SwappingManager):
    """Blocks come back in the order in which host memory gave them out."""

    def swap_in(self, request_id: int) -> list[tuple[int, int]] | None:
        copies = super().swap_in(request_id)
        if copies is None:
            return None
        return list(zip(sorted(host for host, _ in copies), (block for _, block in copies), strict=True))


class HostBlocksLeaked(SwappingManager):
    """Host memory of a request that is dropped is never free again."""

    def free(self, request_id: int) -> None:
        if request_id in self.swapped:
            del self.swapped[request_id]
        else:
            super().free(request_id)


class HostBlocksFreeAtOnce(SwappingManager):
    """Host memory counts as free while a request lies in it."""

    def swap_out(self, request_id: int) -> list[tuple[int, int]] | None:
        copies = super().swap_out(request_id)
        if copies is not None:
            self.free_host([host for _, host in copies])
        return copies

    def swap_in(self, request_id: int) -> list[tuple[int, int]] | None:
        copies = super().swap_in(request_id)
        if copies is not None:
            self.free_host_blocks = list(dict.fromkeys(self.free_host_blocks))
        return copies

    def free(self, request_id: int) -> None:
        self.swapped.pop(request_id) if request_id in self.swapped else super().free(request_id)


class HalfSwapped(SwappingManager):
    """Where host memory is full, the blocks are gone all the same."""

    def swap_out(self, request_id: int) -> list[tuple[int, int]] | None:
        copies = super().swap_out(request_id)
        if copies is None:
            self.free_blocks.extend(self.held[request_id].blocks[:1])
        return copies
