"""Rows as sequences: the latest row of the same request at every position, or of whoever has the same tokens."""

import pytest
import torch

from harness.formats.recording import Recording
from harness.judge.compare.batch import PaddedBatch, make_batches
from harness.judge.compare.sequences import NOWHERE, sequences

from ....recording_writer import new_writer, requests_of

TAP, HEAD = "model.layers.0.k_rope", "lm_head"
WIDTH = 3


def number(request, position, step):
    return 100 * request + position + step / 10


UNRELATED = {1: [1] * 20, 5: [5] * 20}


def record(path, steps, *, requests=UNRELATED, partial=None, lacking=None, readback=(), tables=None):
    """Steps are lists of (request, position); every value of a row is its `number`; `tables` are of blocks of 2."""
    with new_writer(path, requests_of(requests), dtype="float64") as writer:
        for index, step in enumerate(steps):
            covered = {tap: rows for (at, tap), rows in (partial or {}).items() if at == index}
            writer.begin_step(
                phase="readback" if index in readback else "prefill",
                request=[request for request, _ in step],
                position=[position for _, position in step],
                partial_rows=covered or None,
                block_tables=None if tables is None else tables[index],
                slot_mapping=None if tables is None else [tables[index][r][at // 2] * 2 + at % 2 for r, at in step],
            )
            values = torch.tensor([number(*row, index) for row in step], dtype=torch.float64)
            for tap in (TAP, HEAD):
                if (index, tap) != lacking:
                    rows = values[covered[tap]] if tap in covered else values
                    writer.tap(tap, rows[:, None].expand(-1, WIDTH).contiguous())
            writer.end_step()
    return Recording.open(path)


def epochs(recording):
    """Return per sequence (request, {own position: number}, {position that is known: number})."""
    actual = []
    for sequence in sequences(recording):
        request = sequence.request.id
        assert sequence.token_ids == sequence.request.token_ids[: len(sequence)]
        values = {}
        for position, (step, row) in enumerate(zip(sequence.step.tolist(), sequence.row.tolist(), strict=True)):
            if step != NOWHERE:
                values[position] = float(recording.steps[step].tap(TAP)[row, 0])
                assert int(recording.steps[step].position[row]) == position
        judged = {position: values[position] for position in sequence.is_own.nonzero()[:, 0].tolist()}
        actual.append((request, judged, values))
    return actual


def expected(request, by_position):
    return {position: number(request, position, step) for position, step in by_position.items()}


def test_chunks_and_decode_steps_are_one_sequence(tmp_path):
    steps = [[(1, 0), (1, 1), (5, 0)], [(5, 1), (1, 2)], [(1, 3)]]
    assert epochs(record(tmp_path / "r", steps)) == [
        (1, expected(1, {0: 0, 1: 0, 2: 1, 3: 2}), expected(1, {0: 0, 1: 0, 2: 1, 3: 2})),
        (5, expected(5, {0: 0, 1: 1}), expected(5, {0: 0, 1: 1})),
    ]


def test_a_request_that_was_preempted_and_computed_anew(tmp_path):
    steps = [[(1, 0), (1, 1)], [(1, 2)], [(1, 0), (1, 1), (1, 2)], [(1, 3)]]
    assert epochs(record(tmp_path / "r", steps)) == [
        (1, expected(1, {0: 0, 1: 0, 2: 1}), expected(1, {0: 0, 1: 0, 2: 1})),
        (1, expected(1, {0: 2, 1: 2, 2: 2, 3: 3}), expected(1, {0: 2, 1: 2, 2: 2, 3: 3})),
    ]


def test_a_request_resumed_behind_what_was_kept(tmp_path):
    """Positions 0 and 1 stayed in the cache; 2 is computed again; what came after it is gone."""
    steps = [[(1, 0), (1, 1), (1, 2), (1, 3)], [(1, 2)], [(1, 3)], [(1, 4)]]
    assert epochs(record(tmp_path / "r", steps))[1:] == [
        (1, expected(1, {2: 1, 3: 2, 4: 3}), expected(1, {0: 0, 1: 0, 2: 1, 3: 2, 4: 3})),
    ]


def test_a_request_that_found_more_than_it_had_computed(tmp_path):
    """It was preempted in its prompt, and meanwhile another computed the same tokens further."""
    twins = {1: [7] * 20, 5: [7] * 20}
    steps = [[(1, 0), (1, 1)], [(5, at) for at in range(4)], [(1, 4), (1, 5)], [(5, 4)]]
    values = expected(1, {0: 0, 1: 0, 4: 2, 5: 2}) | expected(5, {2: 1, 3: 1})
    computed = epochs(record(tmp_path / "r", steps, requests=twins))
    assert computed[0] == (1, expected(1, {0: 0, 1: 0, 4: 2, 5: 2}), values)


def test_a_copy_found_what_its_original_computed(tmp_path):
    """Rows of the same content differ by their rounding: an engine that keeps whole prompts gives back their own."""
    requests = {1: [7] * 3, 5: [7] * 5, 9: [7] * 5}
    steps = [[(1, 0), (1, 1), (1, 2)], [(5, at) for at in range(5)], [(9, 4)]]
    computed = epochs(record(tmp_path / "r", steps, requests=requests))
    assert computed[-1] == (9, expected(9, {4: 2}), expected(5, {0: 1, 1: 1, 2: 1, 3: 1}) | expected(9, {4: 2}))


def test_a_copy_found_what_its_original_had_found(tmp_path):
    requests = {1: [7] * 3, 5: [7] * 5, 9: [7] * 5}
    steps = [[(1, 0), (1, 1), (1, 2)], [(5, 3), (5, 4)], [(9, 4)]]
    computed = epochs(record(tmp_path / "r", steps, requests=requests))
    values = expected(1, {0: 0, 1: 0, 2: 0}) | expected(5, {3: 1}) | expected(9, {4: 2})
    assert computed[-1] == (9, expected(9, {4: 2}), values)


TWINS = {1: [7] * 20, 5: [7] * 20, 9: [8] * 20}


@pytest.mark.parametrize("first", [2, 3, 4], ids=["computed again", "gone on with", "found further"])
def test_a_request_resumed_behind_the_block_of_another(tmp_path, first):
    """Of two rows with the same tokens the history is that which the block table leads to, bit for bit."""
    steps = [[(1, 0), (1, 1), (1, 2)], [(5, at) for at in range(4)], [(1, first), (1, first + 1)]]
    tables = [{1: [0, 1]}, {5: [2, 3]}, {1: [2, 3, 4]}]
    computed = epochs(record(tmp_path / "r", steps, requests=TWINS, tables=tables))
    judged = expected(1, {first: 2, first + 1: 2})
    assert computed[0] == (1, expected(1, {0: 0, 1: 0, 2: 0}), expected(1, {0: 0, 1: 0, 2: 0}))
    assert computed[1] == (1, judged, expected(5, dict.fromkeys(range(first), 1)) | judged)


def test_a_block_table_that_grows_begins_nothing(tmp_path):
    steps = [[(1, 0), (1, 1)], [(1, 2)], [(1, 3)]]
    tables = [{1: [4]}, {1: [4, 0]}, {1: [4, 0]}]
    assert len(epochs(record(tmp_path / "r", steps, requests=TWINS, tables=tables))) == 1


def test_a_table_that_leads_to_other_tokens_is_not_followed(tmp_path):
    """That is for attention to find: its history is what it should be."""
    steps = [[(1, 0), (1, 1)], [(9, 0), (9, 1)], [(1, 2)]]
    tables = [{1: [0]}, {9: [1]}, {1: [1, 2]}]
    computed = epochs(record(tmp_path / "r", steps, requests=TWINS, tables=tables))
    assert computed[0] == (1, expected(1, {0: 0, 1: 0, 2: 2}), expected(1, {0: 0, 1: 0, 2: 2}))


def test_other_tokens_are_not_followed_whichever_request_came_first(tmp_path):
    steps = [[(9, 0), (9, 1)], [(1, 0), (1, 1)], [(9, 2)]]
    tables = [{9: [0]}, {1: [1]}, {9: [1, 2]}]
    computed = epochs(record(tmp_path / "r", steps, requests=TWINS, tables=tables))
    assert computed[-1] == (9, expected(9, {0: 0, 1: 0, 2: 2}), expected(9, {0: 0, 1: 0, 2: 2}))


def test_slots_without_a_write_do_not_hide_later_slots(tmp_path):
    """A table whose first block was never written, and whose second is another's of the same tokens."""
    steps = [[(1, 0), (1, 1), (1, 2), (1, 3)], [(5, 2), (5, 3)], [(1, 4)]]
    tables = [{1: [0, 1]}, {5: [8, 4]}, {1: [9, 4, 7]}]
    computed = epochs(record(tmp_path / "r", steps, requests=TWINS, tables=tables))
    last = {request: values for request, _, values in computed}[1]
    assert last == expected(1, {0: 0, 1: 0}) | expected(5, {2: 1, 3: 1}) | expected(1, {4: 2})


def test_what_others_compute_later_was_not_found(tmp_path):
    twins = {1: [7] * 20, 5: [7] * 20}
    steps = [[(1, 0), (1, 1)], [(1, 4)], [(5, at) for at in range(4)]]
    computed = epochs(record(tmp_path / "r", steps, requests=twins))
    assert computed[0] == (1, expected(1, {0: 0, 1: 0, 4: 1}), expected(1, {0: 0, 1: 0, 4: 1}))


def test_what_lies_behind_the_last_row_is_not_in_the_sequence(tmp_path):
    """Position 3 of the first time is a token of its own, but nothing of the second time reads it."""
    steps = [[(1, 0), (1, 1), (1, 2), (1, 3)], [(1, 1), (1, 2)]]
    assert epochs(record(tmp_path / "r", steps))[1] == (
        1,
        expected(1, {1: 1, 2: 1}),
        expected(1, {0: 0, 1: 1, 2: 1}),
    )


def test_a_third_time_reads_the_latest_of_both(tmp_path):
    steps = [[(1, 0), (1, 1), (1, 2)], [(1, 1), (1, 2)], [(1, 2)]]
    assert epochs(record(tmp_path / "r", steps))[2] == (
        1,
        expected(1, {2: 2}),
        expected(1, {0: 0, 1: 1, 2: 2}),
    )


def test_an_engine_without_a_cache_computes_everything_again_in_every_step(tmp_path):
    steps = [[(1, 0), (1, 1)], [(1, 0), (1, 1), (1, 2)], [(1, 0), (1, 1), (1, 2), (1, 3)]]
    computed = epochs(record(tmp_path / "r", steps))
    assert computed == [(1, expected(1, dict.fromkeys(range(n + 2), n)), expected(1, dict.fromkeys(range(n + 2), n)))
                     for n in range(3)]  # fmt: skip


def test_rows_of_a_step_in_any_order(tmp_path):
    steps = [[(1, 2), (5, 1), (1, 0), (5, 0), (1, 1)]]
    assert epochs(record(tmp_path / "r", steps)) == [
        (1, expected(1, {2: 0, 0: 0, 1: 0}), expected(1, {0: 0, 1: 0, 2: 0})),
        (5, expected(5, {1: 0, 0: 0}), expected(5, {0: 0, 1: 0})),
    ]


def test_what_is_read_back_was_not_computed(tmp_path):
    steps = [[(1, 0), (1, 1)], [(1, 0), (1, 1)]]
    assert len(epochs(record(tmp_path / "r", steps, readback=[1]))) == 1


def test_every_computed_row_is_judged_in_one_sequence(tmp_path):
    steps = [[(1, 0), (5, 0), (1, 1)], [(1, 1), (5, 1)], [(5, 0), (1, 2)], [(5, 1), (5, 2), (1, 0)]]
    recording = record(tmp_path / "r", steps)
    judged = [
        (int(sequence.step[at]), int(sequence.row[at]))
        for sequence in sequences(recording)
        for at in sequence.is_own.nonzero()[:, 0].tolist()
    ]
    assert sorted(judged) == [(index, row) for index, step in enumerate(steps) for row in range(len(step))]


def test_a_request_that_computed_nothing_has_no_sequence(tmp_path):
    assert [request for request, _, _ in epochs(record(tmp_path / "r", [[(5, 0)]]))] == [5]


ALIKE = {1: [1, 2, 3, 4, 5], 5: [1, 2, 3, 9, 9], 7: [1, 2, 3, 4, 5]}


def test_a_cached_prefix_is_that_of_the_request_that_computed_it_first(tmp_path):
    steps = [[(1, 0), (1, 1), (1, 2), (1, 3)], [(5, 2), (5, 3)], [(7, 3), (7, 4)]]
    by_request = {
        request: (judged, values) for request, judged, values in epochs(record(tmp_path / "r", steps, requests=ALIKE))
    }
    assert by_request[5] == (expected(5, {2: 1, 3: 1}), expected(1, {0: 0, 1: 0}) | expected(5, {2: 1, 3: 1}))
    assert by_request[7] == (expected(7, {3: 2, 4: 2}), expected(1, {0: 0, 1: 0, 2: 0}) | expected(7, {3: 2, 4: 2}))


@pytest.mark.parametrize(
    ("steps", "known"),
    [
        ([[(5, 0), (5, 1), (5, 2), (5, 3)], [(1, 4)]], [0, 1, 2, 4]),  # position 3 holds another token
        ([[(1, 2), (1, 3)], [(5, 0), (5, 1), (5, 2)]], [2, 3]),  # computed only afterwards
    ],
)
def test_a_prefix_that_no_request_computed_is_a_hole(tmp_path, steps, known):
    computed = {request: values for request, _, values in epochs(record(tmp_path / "r", steps, requests=ALIKE))}
    assert sorted(computed[1]) == known


# Sequences side by side.


def batch_of(recording):
    return PaddedBatch(recording, sequences(recording))


def test_rows_of_a_tap_stand_where_their_tokens_do(tmp_path):
    steps = [[(1, 0), (5, 0), (1, 1)], [(5, 1), (1, 2)]]
    batch = batch_of(record(tmp_path / "r", steps))
    recorded = batch.recorded(TAP)
    assert batch.token_ids.tolist() == [[1, 1, 1], [5, 5, 0]]
    assert batch.is_own.tolist() == [True] * 5 + [False]
    values = dict(zip(recorded.places.tolist(), recorded.rows[:, 0].tolist(), strict=True))
    assert values == {
        place: number(request, position, step)
        for place, (request, position, step) in enumerate([(1, 0, 0), (1, 1, 0), (1, 2, 1), (5, 0, 0), (5, 1, 1)])
    }
    rows = batch.rows(torch.tensor([2, 4]))
    assert (rows.request.tolist(), rows.position.tolist(), rows.step.tolist()) == ([1, 5], [2, 1], [1, 1])


@pytest.mark.parametrize(
    ("partial", "lacking", "places"),
    [
        ({(0, TAP): [0, 2]}, None, [0, 2, 3]),
        (None, (0, TAP), [3]),
        (None, (1, TAP), [0, 1, 2]),
        ({(0, TAP): [2, 1]}, None, [1, 2, 3]),
    ],
)
def test_rows_that_a_tap_does_not_cover_are_left_out(tmp_path, partial, lacking, places):
    steps = [[(1, 0), (1, 1), (1, 2)], [(1, 3)]]
    batch = batch_of(record(tmp_path / "r", steps, partial=partial, lacking=lacking))
    recorded = batch.recorded(TAP)
    values = dict(zip(recorded.places.tolist(), recorded.rows[:, 0].tolist(), strict=True))
    assert values == {place: number(1, place, place // 3) for place in places}


def test_a_tap_that_was_not_recorded(tmp_path):
    assert batch_of(record(tmp_path / "r", [[(1, 0)]])).recorded("model.norm") is None


def test_rows_found_in_the_cache_are_not_judged_again(tmp_path):
    steps = [[(1, 0), (1, 1), (1, 2), (1, 3)], [(5, 2), (5, 3)]]
    batch = batch_of(record(tmp_path / "r", steps, requests=ALIKE))
    assert batch.is_own.tolist() == [True] * 4 + [False, False, True, True]
    recorded = batch.recorded(TAP)
    values = dict(zip(recorded.places.tolist(), recorded.rows[:, 0].tolist(), strict=True))
    assert values[4] == number(1, 0, 0)
    assert values[6] == number(5, 2, 1)


def test_batches_hold_sequences_of_similar_lengths(tmp_path):
    requests = {id_: [id_] * 9 for id_ in range(5)}
    lengths = (2, 9, 3, 8, 2)
    steps = [[(id_, at) for id_, length in enumerate(lengths) for at in range(length)]]
    recording = record(tmp_path / "r", steps, requests=requests)
    batches = make_batches(recording, sequences(recording), 18)
    assert [[len(sequence) for sequence in batch.sequences] for batch in batches] == [[9, 8], [3, 2, 2]]
    assert all(batch.num_places <= 18 for batch in batches)
    alone = make_batches(recording, sequences(recording), 1)
    assert len(alone) == 5, "one that is too long is run all the same"
