"""The state suite passes sound caches, the reference engine's among them, and finds the mistakes of others."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import settings

from harness.errors import Code, HarnessError
from harness.properties.core.search import PROFILES
from harness.properties.reference.states import StateCacheSubject
from harness.properties.states.adapter import OPTIONAL, REQUIRED
from harness.properties.states.suite import not_checked, search_state_cache
from reference_engine import control
from reference_engine.block_pool import NULL_BLOCK
from reference_engine.families.state_cache import StateCache
from reference_engine.requests.sequence import Sequence as EngineSequence

from ..programs import assert_fails_in_its_last_line
from .checkpointed import CheckpointedStates
from .shared import NothingFound, SharedStates

DEV = PROFILES["dev"].settings()
CI = PROFILES["ci"].settings()
FEW = settings(DEV, max_examples=20)
OFFERED = tuple(method for method in OPTIONAL if callable(getattr(CheckpointedStates, method, None)))


class Recorded(CheckpointedStates):
    """Notes the lengths of its prompts, and how many tokens are computed at the end of each call."""

    block_sizes = (16,)
    prompts: set[int] = set()  # noqa: RUF012
    ends: set[int] = set()  # noqa: RUF012

    def allocate(self, request_id: int, token_ids: Sequence[int], salt: str = "") -> int | None:
        self.prompts.add(len(token_ids))
        return super().allocate(request_id, token_ids, salt)

    def write(self, request_id: int, token_ids: Sequence[int], states: Sequence[int]) -> None:
        super().write(request_id, token_ids, states)
        if len(token_ids) > 1:
            self.ends.add(len(self.requests[request_id].token_ids))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("cache", [CheckpointedStates, SharedStates])
def test_a_sound_state_cache_passes(cache: type) -> None:
    search_state_cache(cache, FEW).raise_findings()


@pytest.mark.slow
@pytest.mark.parametrize("cache", [CheckpointedStates, SharedStates])
def test_a_sound_state_cache_passes_a_thousand_examples(cache: type) -> None:
    search_state_cache(cache, CI).raise_findings()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("missing", [*((method,) for method in OFFERED), OFFERED], ids="-".join)
def test_a_sound_state_cache_passes_without_any_optional_part(missing: tuple[str, ...]) -> None:
    lesser = type("Lesser", (CheckpointedStates,), dict.fromkeys(missing))
    search_state_cache(lesser, FEW).raise_findings()
    assert {line.split()[3] for line in not_checked(lesser) if line.startswith("state cache: no ")} >= set(missing)


def test_a_cache_that_finds_nothing_in_all_examples_is_a_finding_unless_it_says_so() -> None:
    (finding,) = search_state_cache(NothingFound, FEW).findings
    assert finding.invariant == 17
    assert_fails_in_its_last_line(finding.program, NothingFound, most_lines=60)
    search_state_cache(type("Plain", (NothingFound,), {"snapshots": "none"}), FEW).raise_findings()


@pytest.mark.slow
def test_prompts_and_chunks_end_at_boundaries_of_large_blocks_and_next_to_them() -> None:
    search_state_cache(Recorded, DEV).raise_findings()
    for lengths in (Recorded.prompts, Recorded.ends):
        assert {15, 0, 1} <= {length % 16 for length in lengths}
        assert {31, 32, 33} & lengths


@pytest.mark.parametrize("method", REQUIRED)
def test_a_cache_without_a_required_method_is_named(method: str) -> None:
    lesser: Any = type("Lesser", (SharedStates,), {method: None})
    with pytest.raises(HarnessError, match=f"the adapter lacks {method}") as caught:
        search_state_cache(lesser, FEW)
    assert caught.value.code is Code.BAD_ADAPTER


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


def amid_a_block(sequence: EngineSequence, num_tokens: int, block_size: int, keeps_states: bool = False) -> None:
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
