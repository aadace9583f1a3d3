"""The state suite passes sound caches that are unlike each other, and finds a cache that never finds anything."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import settings

from harness.errors import Code, HarnessError
from harness.properties.core.search import PROFILES
from harness.properties.states.adapter import OPTIONAL, REQUIRED
from harness.properties.states.suite import not_checked, search_state_cache

from ..programs import assert_fails_in_its_last_line
from .checkpointed import CheckpointedStates
from .shared import NothingFound, SharedStates

DEV = PROFILES["dev"].settings()
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
    search_state_cache(cache, PROFILES["ci"].settings()).raise_findings()


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
