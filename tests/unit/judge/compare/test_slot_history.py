"""Who wrote each slot, and what block tables lead to, on recordings by hand."""

import random

import pytest
import torch

from harness.judge.compare.sequences import SlotHistory, Write

from .in_memory import Step, recording_of

TOKENS = {1: range(20), 6: range(20), 3: range(20)}


def history(*steps):
    return SlotHistory(recording_of(TOKENS, steps))


def write(step, row, request, position):
    return Write(step=step, row=row, request=request, position=position)


BY_HAND = (
    Step([(1, 0), (1, 1), (6, 0)], slots=[8, 9, -1], tables={1: [2], 6: [0]}),
    Step([(6, 0), (6, 1)], slots=[0, 1], phase="readback"),
    Step([(1, 2)]),
    Step([(6, 0), (1, 3)], slots=[9, 3], tables={6: [2], 1: [2]}),
)


def test_who_wrote_a_slot_last():
    found = history(*BY_HAND)
    assert [found.writer(9, step) for step in range(4)] == [write(0, 1, 1, 1)] * 3 + [write(3, 0, 6, 0)]
    assert [found.writer(3, step) for step in range(4)] == [None] * 3 + [write(3, 1, 1, 3)]
    assert found.writer(-1, 3) is None, "no slot"
    assert found.writer(0, 3) is None, "read back and not written"
    assert str(found.writer(9, 3)) == "request 6, position 0, step 3"


def test_slots_that_were_written_by_the_end_of_a_step():
    found = history(*BY_HAND)
    assert [sorted(found.written_slots(step)) for step in (-1, 0, 2, 3)] == [[], [8, 9], [8, 9], [3, 8, 9]]


def test_block_tables_as_far_as_they_are_told():
    found = history(*BY_HAND)
    assert found.table(0, 1) == [2]
    assert found.table(0, 3) == found.table(2, 1) == []
    assert found.table(3, 6) == [2]


def test_what_an_engine_does_not_say_is_not_known():
    assert not history().is_known
    assert not history(Step([(1, 0)], tables={1: [0]})).is_known
    assert not history(Step([(1, 0)], slots=[0])).is_known
    assert not history(Step([(1, 0)], slots=[0], tables={1: [0]}, phase="readback")).is_known
    assert history(Step([(1, 0)], slots=[0], tables={1: [0]})).is_known
    assert history(Step([(1, 0)], slots=[0])).block_size is None


def stored(size, length, table, *, request=1, wrong=()):
    """A step that stores so many rows where a block table says, but for some that go elsewhere."""
    slots = [table[at // size] * size + at % size + (5000 if at in wrong else 0) for at in range(length)]
    return Step([(request, at) for at in range(length)], slots=slots, tables={request: table})


@pytest.mark.parametrize("size", [1, 2, 3, 7, 255, 256, 512, 4096])
def test_the_size_of_a_block_is_found(size):
    length = 2 * size + 1
    found = history(stored(size, length, [5, 2, 9][: -(-length // size)]))
    assert found.block_size == size


def test_a_size_that_no_engine_has_is_not_looked_for():
    assert history(stored(300, 601, [1, 5, 2])).block_size != 300
    assert history(stored(8192, 8193, [1, 3])).block_size in (None, *(2**power for power in range(13)))


def test_most_rows_decide_the_size_of_a_block():
    assert history(stored(4, 12, [5, 2, 9], wrong=range(3))).block_size == 4
    assert history(stored(4, 12, [5, 2, 9]), stored(3, 5, [7, 4], request=6)).block_size == 4
    assert history(stored(3, 5, [7, 4], request=6), stored(4, 12, [5, 2, 9])).block_size == 4


@pytest.mark.parametrize(("num_rows", "size"), [(4095, 8), (4096, 4)])
def test_steps_are_looked_at_until_they_have_enough_rows(num_rows, size):
    early = stored(4, num_rows, list(range(3000, 4024)))
    assert history(early, stored(8, 5000, list(range(3000, 3625)), request=6)).block_size == size


def test_the_slots_of_a_table():
    found = history(stored(3, 7, [4, 0, 2]))
    assert found.slots([4, 0, 2], 7) == [12, 13, 14, 0, 1, 2, 6]
    assert found.slots([4, 0], 7) == [12, 13, 14, 0, 1, 2], "as far as it reaches"
    assert found.slots([4, 0], 2) == [12, 13]
    assert found.slots([], 2) == []


def test_rows_that_were_written_elsewhere_than_their_table_says():
    rows = [(1, 0), (6, 4), (1, 5), (1, 1), (1, 6)]
    step = Step(rows, slots=[12, 3, 1, 14, 8], tables={1: [4, 0], 6: [7]})
    found = history(stored(3, 7, [4, 0, 2]), step)
    assert found.block_size == 3
    assert found.misplaced(1) == [(1, 5, 1, 2), (1, 1, 14, 13)], "position 4 of 6 and 6 of 1 lie after their tables"
    assert found.misplaced(0) == []
    assert history(stored(3, 7, [4, 0, 2]), Step([(1, 0)])).misplaced(1) == []


@pytest.mark.parametrize("seed", range(4))
def test_writers_are_those_of_a_loop(seed):
    generator = random.Random(seed)
    steps, latest, expected = [], {}, []
    for index in range(6):
        rows = [(generator.choice([1, 6, 3]), at) for at in range(5)]
        slots = generator.sample(range(-2, 8), 5)
        is_written = index != 2
        steps.append(Step(rows, slots=slots, phase="prefill" if is_written else "readback"))
        for row, ((request, position), slot) in enumerate(zip(rows, slots, strict=True)):
            if slot >= 0 and is_written:
                latest[slot] = write(index, row, request, position)
        expected.append(dict(latest))
    found = history(*steps)
    for index, known in enumerate(expected):
        assert {slot: found.writer(slot, index) for slot in range(8)} == {slot: known.get(slot) for slot in range(8)}
        assert set(found.written_slots(index)) == set(known)


# What was written.


def with_taps():
    taps = [torch.arange(12.0).view(2, 2, 3) + 100 * index for index in range(3)]
    return [
        Step([(1, 0), (1, 1)]),
        *(Step([(1, 0), (1, 1)], taps={"k": x.half(), "partial": x}) for x in taps),
    ]


def test_what_was_written_of_a_tap():
    found = history(*with_taps()).content([write(3, 1, 1, 1), None, write(1, 0, 1, 0), write(3, 0, 1, 0)], "k")
    assert found.dtype is torch.float64
    rows = [range(206, 212), [0] * 6, range(6), range(200, 206)]
    assert found.tolist() == [[float(x) for x in row] for row in rows]


def test_what_was_not_recorded_of_every_row_is_not_known():
    assert history(*with_taps()).content([write(1, 0, 1, 0)], "v") is None
    assert history(*with_taps()).content([write(1, 0, 1, 0), write(0, 0, 1, 0)], "k") is None
    steps = with_taps()
    steps[2] = Step([(1, 0), (1, 1)], taps={"k": torch.ones(2, 6)}, rows_of={"k": [0, 1]})
    assert history(*steps).content([write(2, 0, 1, 0)], "k") is None
    assert history(*steps).content([write(1, 0, 1, 0)], "k") is not None
    assert history(*steps).content([None], "k").tolist() == [[0.0] * 6]
