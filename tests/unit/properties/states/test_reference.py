"""The reference engine's states by block pass the state suite, and small changes of them do not."""

from collections.abc import Callable
from typing import Any

import pytest

from harness.properties.core.search import PROFILES
from harness.properties.reference.states import StateCacheSubject
from harness.properties.states.suite import search_state_cache
from reference_engine import control
from reference_engine.block_pool import NULL_BLOCK
from reference_engine.families.state_cache import StateCache
from reference_engine.requests.sequence import Sequence

DEV, CI = PROFILES["dev"].settings(), PROFILES["ci"].settings()
plan, accept, copy, rewind = StateCache.plan, StateCache.accept, StateCache.copy, control.rewind_tokens


def test_states_by_block_pass() -> None:
    assert search_state_cache(StateCacheSubject, DEV).findings == []


def without_pieces(self: StateCache, chunks: Any) -> Any:
    """One piece for each chunk: the states at the ends of blocks inside of it are never written."""
    pieces = plan(self, chunks)
    return pieces[-1:] if pieces[-1].target < self.num_blocks else pieces


def all_guesses(self: StateCache, slots: Any) -> None:
    accept(self, list(self._guesses) or slots)


def no_guess(self: StateCache, slots: Any) -> None:
    for slot in slots:
        if slot in self._guesses:
            self.num_tokens[slot // self.block_size] = self.num_tokens[self._guesses[slot]]


def without_its_convolution(self: StateCache, source: int, target: int) -> None:
    kept = self.conv_LBCW[:, target].clone()
    copy(self, source, target)
    self.conv_LBCW[:, target] = kept


def to_the_null_block(self: StateCache, source: int, target: int) -> None:
    copy(self, source, target)
    copy(self, source, NULL_BLOCK)


def amid_a_block(sequence: Sequence, num_tokens: int, block_size: int, keeps_states: bool = False) -> None:
    rewind(sequence, num_tokens, block_size)


MUTANTS: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "ends of blocks are not kept": (StateCache, "plan", without_pieces),
    "rejected guesses stay": (StateCache, "accept", all_guesses),
    "accepted guesses are lost": (StateCache, "accept", no_guess),
    "a copied block has no state": (StateCache, "copy", lambda self, source, target: None),
    "a copied block has the other's convolution": (StateCache, "copy", without_its_convolution),
    "a copy is written over zero": (StateCache, "copy", to_the_null_block),
    "going back ends amid a block": (control, "rewind_tokens", amid_a_block),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_of_states_by_block_is_killed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*MUTANTS[name])
    assert search_state_cache(StateCacheSubject, CI, is_first_enough=True).findings
