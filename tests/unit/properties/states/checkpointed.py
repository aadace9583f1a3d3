"""A state cache with a snapshot after each full block, written for these tests; the mutants change its methods.

A slot holds one state. A request computes in a slot of its own, and a snapshot is a copy in another one. Snapshots go
when room is needed, the least recently used first. A connector copies them to a second pool, on the host, and back.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

Key = tuple[str, int]
"""A salt, and the hash of all tokens up to a snapshot."""
NEVER_WRITTEN = -1
"""In memory that was not set."""


@dataclass(slots=True, kw_only=True, eq=False)
class Snapshot:
    key: Key
    token_ids: tuple[int, ...]
    slot: int
    num_readers: int = 0
    """Transfers that read it: it is not evicted."""


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    salt: str
    slot: int
    token_ids: list[int] = field(default_factory=list)
    """Those that are computed."""
    drafts: list[tuple[int, int]] = field(default_factory=list)
    """Tokens, and the states after them."""


@dataclass(slots=True, kw_only=True, eq=False)
class Transfer:
    snapshot: Snapshot
    """What is copied."""
    target: int
    """A slot of the host, or of a request that waits."""
    is_load: bool
    request: Request | None = None
    request_id: int | None = None
    """None after the request was dropped."""


class Pool:
    """Slots, and the snapshots in some of them."""

    def __init__(self, num_slots: int, num_hashes: int | None) -> None:
        self.memory = [NEVER_WRITTEN] * num_slots
        self.unused = list(range(num_slots))
        self.snapshots: OrderedDict[Key, Snapshot] = OrderedDict()
        self.num_hashes = num_hashes

    def take(self) -> int | None:
        if not self.unused:
            self.evict()
        return self.unused.pop() if self.unused else None

    def evict(self) -> None:
        oldest = next((entry for entry in self.snapshots.values() if not entry.num_readers), None)
        if oldest is not None:
            del self.snapshots[oldest.key]
            self.unused.append(oldest.slot)

    def free_list(self) -> list[int]:
        return [*self.unused, *(entry.slot for entry in self.snapshots.values() if not entry.num_readers)]

    def keep(self, token_ids: Sequence[int], salt: str, slot: int) -> bool:
        """Take a written slot for a snapshot, unless there is one."""
        key = self.key(token_ids, salt)
        if key in self.snapshots:
            return False
        self.snapshots[key] = Snapshot(key=key, token_ids=tuple(token_ids), slot=slot)
        return True

    def find(self, token_ids: Sequence[int], salt: str) -> Snapshot | None:
        """Return the longest snapshot of a prefix that leaves a token to compute."""
        for length in range(len(token_ids) - 1, 0, -1):
            snapshot = self.snapshots.get(self.key(token_ids[:length], salt))
            if snapshot is not None and snapshot.token_ids == tuple(token_ids[:length]):
                self.snapshots.move_to_end(snapshot.key)
                return snapshot
        return None

    def key(self, token_ids: Sequence[int], salt: str) -> Key:
        number = hash(tuple(token_ids))
        return salt, number if self.num_hashes is None else number % self.num_hashes


class CheckpointedStates:
    snapshots = "blocks"

    def __init__(
        self, *, num_slots: int, block_size: int, hash_bits: int | None = None, num_host_slots: int = 0
    ) -> None:
        self.block_size = block_size
        num_hashes = None if hash_bits is None else 1 << hash_bits
        self.pool, self.host = Pool(num_slots, num_hashes), Pool(num_host_slots, num_hashes)
        self.requests: dict[int, Request] = {}
        self.transfers: dict[int, Transfer] = {}
        self.ended: dict[int, int] = {}
        self.num_transfers = 0

    def allocate(self, request_id: int, token_ids: Sequence[int], salt: str = "") -> int | None:
        snapshot = self.pool.find(token_ids, salt)
        state = 0 if snapshot is None else self.pool.memory[snapshot.slot]  # its slot may be the one that is taken
        slot = self.pool.take()
        if slot is None:
            return None
        self.pool.memory[slot] = state
        request = self.requests[request_id] = Request(salt=salt, slot=slot)
        request.token_ids = [] if snapshot is None else list(snapshot.token_ids)
        return len(request.token_ids)

    def lookup(self, token_ids: Sequence[int], salt: str = "") -> int:
        snapshot = self.pool.find(token_ids, salt)
        return 0 if snapshot is None else len(snapshot.token_ids)

    def write(self, request_id: int, token_ids: Sequence[int], states: Sequence[int]) -> None:
        request = self.requests[request_id]
        for token_id, state in zip(token_ids, states, strict=True):
            request.token_ids.append(token_id)
            self.pool.memory[request.slot] = state
            if len(request.token_ids) % self.block_size == 0:
                self.keep(request)

    def keep(self, request: Request) -> None:
        if self.pool.key(request.token_ids, request.salt) in self.pool.snapshots:
            return
        slot = self.pool.take()
        if slot is not None:
            self.pool.memory[slot] = self.pool.memory[request.slot]
            self.pool.keep(request.token_ids, request.salt, slot)

    def read(self, request_id: int) -> int:
        return self.pool.memory[self.requests[request_id].slot]

    def fork(self, parent_id: int, child_id: int) -> bool:
        parent, slot = self.requests[parent_id], self.pool.take()
        if slot is None:
            return False
        self.pool.memory[slot] = self.pool.memory[parent.slot]
        self.requests[child_id] = Request(salt=parent.salt, slot=slot, token_ids=list(parent.token_ids))
        return True

    def rewind(self, request_id: int, num_tokens: int) -> int:
        request = self.requests[request_id]
        snapshot = self.pool.find(request.token_ids[: num_tokens + 1], request.salt)
        request.token_ids = [] if snapshot is None else list(snapshot.token_ids)
        self.pool.memory[request.slot] = 0 if snapshot is None else self.pool.memory[snapshot.slot]
        return len(request.token_ids)

    def draft(self, request_id: int, token_ids: Sequence[int], states: Sequence[int]) -> None:
        self.requests[request_id].drafts = list(zip(token_ids, states, strict=True))

    def accept(self, request_id: int, num_tokens: int) -> None:
        accepted = self.requests[request_id].drafts[:num_tokens]
        self.write(request_id, [token_id for token_id, _ in accepted], [state for _, state in accepted])

    def free(self, request_id: int) -> None:
        request = self.requests.pop(request_id, None)
        if request is not None:
            self.pool.unused.append(request.slot)
        for transfer in self.transfers.values():
            if transfer.request_id == request_id:  # the slot is not free before the transport has ended
                transfer.request_id = None

    def evict(self, num_slots: int) -> None:
        for _ in range(num_slots):
            self.pool.evict()

    def reset(self) -> None:
        for pool in (self.pool, self.host):
            for _ in list(pool.snapshots):
                pool.evict()

    def cached_states(self) -> list[tuple[tuple[int, ...], int]]:
        return [(entry.token_ids, self.pool.memory[entry.slot]) for entry in self.pool.snapshots.values()]

    def free_list(self) -> list[int]:
        return self.pool.free_list()

    def num_free(self) -> int:
        num_read = sum(entry.num_readers > 0 for entry in self.pool.snapshots.values())
        return len(self.pool.unused) + len(self.pool.snapshots) - num_read

    def slots(self, request_id: int) -> list[int]:
        return [self.requests[request_id].slot]

    # The connector

    def offload(self, token_ids: Sequence[int], salt: str = "") -> int | None:
        snapshot = self.pool.find(token_ids, salt)
        target = None if snapshot is None or snapshot.key in self.host.snapshots else self.host.take()
        if snapshot is None or target is None:
            return None
        return self.begin(Transfer(snapshot=snapshot, target=target, is_load=False))

    def load(self, request_id: int, token_ids: Sequence[int], salt: str = "") -> int | None:
        snapshot = self.host.find(token_ids, salt)
        target = None if snapshot is None else self.pool.take()
        if snapshot is None or target is None:
            return None
        request = Request(salt=salt, slot=target)
        return self.begin(
            Transfer(snapshot=snapshot, target=target, is_load=True, request=request, request_id=request_id)
        )

    def begin(self, transfer: Transfer) -> int:
        transfer.snapshot.num_readers += 1
        self.transfers[self.num_transfers] = transfer
        self.num_transfers += 1
        return self.num_transfers - 1

    def complete(self, number: int) -> None:
        transfer = self.transfers.pop(number)
        source, target = (self.host, self.pool) if transfer.is_load else (self.pool, self.host)
        target.memory[transfer.target] = source.memory[transfer.snapshot.slot]
        transfer.snapshot.num_readers -= 1
        if transfer.is_load:
            self.end_load(number, transfer, list(transfer.snapshot.token_ids))
        else:
            self.ended[number] = 0
            if not self.host.keep(transfer.snapshot.token_ids, transfer.snapshot.key[0], transfer.target):
                self.host.unused.append(transfer.target)

    def fail(self, number: int) -> None:
        transfer = self.transfers.pop(number)
        transfer.snapshot.num_readers -= 1
        if transfer.is_load:
            self.pool.memory[transfer.target] = 0
            self.end_load(number, transfer, [])
        else:
            self.ended[number] = 0
            self.host.unused.append(transfer.target)

    def end_load(self, number: int, transfer: Transfer, token_ids: list[int]) -> None:
        self.ended[number] = len(token_ids)
        if transfer.request is None or transfer.request_id is None:
            self.pool.unused.append(transfer.target)
            return
        transfer.request.token_ids = token_ids
        self.requests[transfer.request_id] = transfer.request

    def poll(self) -> dict[int, int]:
        ended, self.ended = self.ended, {}
        return ended

    def num_free_host(self) -> int:
        return len(self.host.free_list())
