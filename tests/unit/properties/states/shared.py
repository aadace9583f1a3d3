"""A state cache unlike the other: requests share slots until one writes, and what is kept is the end of each chunk."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class Request:
    token_ids: list[int]
    slot: int


class SharedStates:
    slots_per_request = 2
    """The one that is written, and the one that is left for it."""

    def __init__(self, *, num_slots: int, block_size: int) -> None:
        self.memory = [0] * num_slots
        self.num_owners = [0] * num_slots
        self.cached: dict[tuple[int, ...], int] = {}
        self.requests: dict[int, Request] = {}

    def allocate(self, request_id: int, token_ids: Sequence[int]) -> int | None:
        lengths = (length for length in range(len(token_ids) - 1, 0, -1) if tuple(token_ids[:length]) in self.cached)
        num_cached = next(lengths, 0)
        slot = self.cached[tuple(token_ids[:num_cached])] if num_cached else self.take(0)
        if slot is None:
            return None
        self.num_owners[slot] += num_cached > 0
        self.requests[request_id] = Request(list(token_ids[:num_cached]), slot)
        return num_cached

    def write(self, request_id: int, token_ids: Sequence[int], states: Sequence[int]) -> bool:
        request = self.requests[request_id]
        if self.num_owners[request.slot] > 1:
            slot = self.take(0)
            if slot is None:
                return False
            self.give_up(request.slot)
            request.slot = slot
        self.memory[request.slot] = states[-1]
        request.token_ids += token_ids
        if tuple(request.token_ids) not in self.cached:
            self.cached[tuple(request.token_ids)] = request.slot
            self.num_owners[request.slot] += 1
        return True

    def read(self, request_id: int) -> int:
        return self.memory[self.requests[request_id].slot]

    def fork(self, parent_id: int, child_id: int) -> bool:
        parent = self.requests[parent_id]
        self.num_owners[parent.slot] += 1
        self.requests[child_id] = Request(list(parent.token_ids), parent.slot)
        return True

    def free(self, request_id: int) -> None:
        self.give_up(self.requests.pop(request_id).slot)

    def take(self, state: int) -> int | None:
        """Return a slot with one owner and a state, after an eviction if there must be one."""
        if 0 not in self.num_owners:
            idle = next((tokens for tokens, slot in self.cached.items() if self.num_owners[slot] == 1), None)
            if idle is None:
                return None
            self.give_up(self.cached.pop(idle))
        slot = self.num_owners.index(0)
        self.memory[slot], self.num_owners[slot] = state, 1
        return slot

    def give_up(self, slot: int) -> None:
        self.num_owners[slot] -= 1

    def num_free(self) -> int:
        return sum(slot not in {request.slot for request in self.requests.values()} for slot in range(len(self.memory)))


class NothingFound(SharedStates):
    """Keeps states and never finds one."""

    def allocate(self, request_id: int, token_ids: Sequence[int]) -> int | None:
        self.cached = {(-1, *tokens): slot for tokens, slot in self.cached.items()}
        return super().allocate(request_id, token_ids)
