"""The tokens of a search: long enough, allowed by the model, with beginnings to share and to confuse."""

import pytest

from harness.errors import Code, HarnessError
from harness.extensions.fuzz.result import SentRequest, SentWorkload
from harness.extensions.fuzz.workload import NUM_TOKENS, PATTERNS, SEGMENT, SequencePool, make_pool


def pool(seed=0, *, vocab_size=256, max_positions=512, window=None):
    return make_pool(seed, vocab_size=vocab_size, max_positions=max_positions, window=window)


def test_a_seed_gives_the_same_tokens_again():
    assert pool(3) == pool(3)
    assert pool(3) != pool(4)


def test_tokens_are_of_the_vocabulary():
    for size in (1, 2, 5, 256):
        assert {token for tokens in pool(vocab_size=size).sequences for token in tokens} <= set(range(size))


@pytest.mark.parametrize(
    ("limits", "length"),
    [
        ({}, NUM_TOKENS),
        ({"max_positions": None}, NUM_TOKENS),
        ({"max_positions": 20}, 18),
        ({"window": 16}, NUM_TOKENS),
        ({"window": 100}, 100 + 2 * SEGMENT),
        ({"window": 100, "max_positions": 64}, 62),
        ({"window": 100_000, "max_positions": None}, 512),
    ],
)
def test_sequences_are_as_long_as_the_model_allows_and_its_window_needs(limits, length):
    assert {len(tokens) for tokens in pool(**limits).sequences} == {length}


def test_a_model_without_room_for_a_workload_is_refused():
    with pytest.raises(HarnessError, match="too few positions") as caught:
        pool(max_positions=3)
    assert caught.value.code is Code.PROMPT_TOO_LONG


def test_sequences_share_their_beginnings_to_the_boundary_of_a_segment_or_part_inside_of_one():
    drawn_pool = pool()
    shared = {drawn_pool.shared(0, second) for second in range(1, len(PATTERNS))}
    assert {0, 2 * SEGMENT, 4 * SEGMENT} <= shared
    assert any(length % SEGMENT for length in shared)
    assert drawn_pool.shared(0, 0) == NUM_TOKENS


def test_the_same_segment_stands_at_the_same_place_behind_another_beginning():
    drawn_pool = pool().sequences
    first, second = drawn_pool[PATTERNS.index("ABCDEF")], drawn_pool[PATTERNS.index("KLCDEF")]
    assert first[: 2 * SEGMENT] != second[: 2 * SEGMENT]
    assert first[2 * SEGMENT :] == second[2 * SEGMENT :]


def test_every_token_of_a_golden_chooses():
    for prompt, tokens in zip(pool().prompts(), pool().sequences, strict=True):
        assert (prompt.token_ids, prompt.prompt_length, prompt.max_new_tokens) == (tokens, 1, 1)


def test_the_pool_of_one_workload_is_its_requests():
    workload = SentWorkload(requests=(SentRequest(token_ids=(5, 6), prompt_length=1),))
    assert SequencePool.of(workload).sequences == ((5, 6),)
