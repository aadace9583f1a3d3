"""Snapshots that a state cache keeps: what they must hold, which must be there, and which may go."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from harness.properties.blocks.tables import RequestRecord
from harness.properties.core.findings import Violation
from harness.properties.core.invariants import Invariant

if TYPE_CHECKING:
    from harness.properties.states.calls import StateCacheCalls

Entry = tuple[tuple[int, ...], int]
"""All tokens up to a snapshot, and the state that it holds."""


class Snapshots:
    """The states that were written, and those that the cache says it keeps.

    Attributes:
        written: the prefixes, by number, whose states the cache may hold.
        offered: the states that it was given, drafts among them.
    """

    def __init__(self, machine: "StateCacheCalls") -> None:
        self._machine = machine
        self.written: set[int] = set()
        self.offered: set[int] = set()
        self._num_written = 0
        """States that the present action has written, or accepted."""
        self._due: set[int] = set()
        """Prefixes of full blocks that were computed and not given up."""
        self._ever_due: set[int] = set()
        self._most_held = 0
        self._entries: set[Entry] = set()
        self._num_evicted = 0
        """Slots that the present action asks to be emptied."""
        self._may_go: set[int] = set()
        """Prefixes whose snapshots the present action may drop without need."""

    def note_written(self, request: RequestRecord, start: int) -> None:
        """Note that the tokens from `start` on are computed, and accepted."""
        size, prefixes = self._machine.block_size, request.prefixes[: request.num_computed]
        self.written.update(prefixes[start:])
        self._num_written += len(prefixes) - start
        self._due.update(prefixes[size - 1 :: size][start // size :])
        self._ever_due |= self._due

    def note_given_up(self, request: RequestRecord, num_kept: int) -> None:
        """Note that the cache may forget what a request has computed beyond `num_kept` tokens."""
        self._due.difference_update(request.prefixes[num_kept:])
        self._may_go.update(request.prefixes)

    def note_eviction(self, num_slots: int) -> None:
        """Note that snapshots in so many slots are given up."""
        self._due.clear()
        self._num_evicted += num_slots

    def note_reset(self) -> None:
        """Note that nothing may be found that was written before, but for what requests hold."""
        self.note_eviction(self._machine.num_slots)
        self.written = {prefix for entry in self._machine.live() for prefix in entry.prefixes[: entry.num_computed]}

    def expected(self, prefixes: Sequence[int]) -> tuple[int, bool]:
        """Count the tokens of a prompt that must be found, and tell whether a miss is a finding by itself.

        By the snapshots that the cache shows, or by full blocks as long as there is room for all states.
        """
        machine, size, num_due = self._machine, self._machine.block_size, 0
        lengths = {prefix + 1: length for length, prefix in enumerate(prefixes[:-1], start=1)}
        num_shown = 0 if machine.collides else max((lengths.get(state, 0) for _, state in self._shown()), default=0)
        most_held = max(self._most_held, machine.most_held) + machine.declared.slots_per_request
        if len(self._ever_due) + most_held <= machine.num_slots and not machine.collides:
            while num_due + size < len(prefixes) and prefixes[num_due + size - 1] in self._due:
                num_due += size
        is_exact = machine.declared.snapshots == "blocks"
        return max(num_shown, num_due) if is_exact else num_shown or num_due, is_exact or num_shown > 0

    def check(self) -> None:
        """Verify what each snapshot holds, and that no more are gone than had to make room."""
        machine, entries = self._machine, self._shown()
        for tokens, state in sorted(entries):
            self._check_entry(tokens, state)
        self._most_held = max(self._most_held, machine.most_held)
        num_new = max(len(entries - self._entries), self._num_written)
        num_over = max(0, len(self._entries) + num_new + machine.most_held - machine.num_slots) + self._num_evicted
        lost = sorted(entry for entry in self._entries - entries if entry[1] - 1 not in self._may_go)
        if len(lost) > num_over:
            what = f"snapshots of {[list(tokens) for tokens, _ in lost]} are gone, and {num_over} had to make room"
            machine.note(Invariant.EVICTED_ENTRY, what, f"assert {lost[0]} in {self._source()}")
        self._entries, self._num_written, self._num_evicted = entries, 0, 0
        self._may_go.clear()

    def describe(self, state: Any) -> str:
        """Spell out the tokens of a state."""
        if state not in self.offered:
            return f"nothing that was written ({state!r})" if state else "no tokens"
        return self._machine.oracle.describe((0, state - 1))

    def _check_entry(self, tokens: tuple[int, ...], state: int) -> None:
        is_own = state in self.offered and self._machine.oracle.spell(state - 1)[1] == tokens
        if not is_own or state - 1 not in self.written:
            what = f"the snapshot of {list(tokens)} holds the state of {self.describe(state)}"
            what += ", which was rejected or given up" if is_own else ""
            ending = f"assert {(tokens, state)} not in {self._source()}"
            raise Violation(Invariant.SNAPSHOT_STATE, what, ending)

    def _shown(self) -> set[Entry]:
        shown = self._machine.ask_optional(Invariant.SNAPSHOT_STATE, "cached_states") or ()
        return {(tuple(tokens), state) for tokens, state in shown}

    def _source(self) -> str:
        return f"[(tuple(tokens), state) for tokens, state in {self._machine.subject.name}.cached_states()]"
