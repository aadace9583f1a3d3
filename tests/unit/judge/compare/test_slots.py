"""Slots on recordings by hand: conflicts within a step, who wrote each slot, and what block tables lead to."""

import random
from dataclasses import replace

import pytest
import torch

from harness.errors import Code
from harness.judge.compare.sequences import SlotHistory, Write, slot_conflicts

from .in_memory import Step, recording_of


def codes(result):
    return {finding.code for finding in result.findings}


@pytest.mark.parametrize("schedule", ["plain", "batched", "mixed", "prefix-hit", "forked", "preempted"])
def test_a_sound_engine_writes_each_slot_once_in_a_step(bench, tmp_path, schedule):
    """Shared blocks and copies on write included."""
    one = bench()
    recording = one.recorded(schedule, engine="reference").write(tmp_path / "r")
    assert any(step.slot_mapping is not None for step in recording.steps)
    assert codes(one.measure(recording, require=())) <= {Code.ROWS_MISSING}


def merged(first, second):
    """Record two steps as one."""
    num_rows = len(first.request)
    rows_of = {
        name: [*first.rows_of[name], *(num_rows + row for row in second.rows_of[name])]
        for name in first.rows_of.keys() & second.rows_of.keys()
    }
    return replace(
        first,
        request=first.request + second.request,
        position=first.position + second.position,
        sampled=first.sampled + second.sampled,
        taps={name: torch.cat([tensor, second.taps[name]]) for name, tensor in first.taps.items()},
        rows_of=rows_of,
        block_tables=first.block_tables | second.block_tables,
        slot_mapping=first.slot_mapping + second.slot_mapping,
    )


def test_steps_of_one_request_after_the_other_recorded_as_one(one, tmp_path):
    """The second request got the blocks that the first had given back."""
    actual = one.recorded("plain", engine="reference", num_blocks="2")  # one, and the null block
    firsts = [next(step for step in actual.steps if step.request[0] == request) for request in (0, 1)]
    assert firsts[0].slot_mapping[:4] == firsts[1].slot_mapping[:4]
    at = actual.steps.index(firsts[0])
    actual.steps = [step for step in actual.steps if step not in firsts]
    actual.steps.insert(at, merged(*firsts))
    (finding,) = one.measure(actual.write(tmp_path / "r"), require=("batch",)).findings
    assert finding.code is Code.SLOT_WRITTEN_TWICE
    assert (finding.request, finding.position) == (1, 0)
    assert (
        f"slot {firsts[0].slot_mapping[0]} twice: request 0, position 0, and request 1, position 0" in finding.message
    )


def test_a_slot_of_another_request(one, tmp_path):
    actual = one.recorded("batched", engine="reference")
    step = next(step for step in actual.steps if len(set(step.request)) > 1)
    row_of_other = next(row for row, request in enumerate(step.request) if request != step.request[0])
    step.slot_mapping[row_of_other] = step.slot_mapping[0]
    assert codes(one.measure(actual.write(tmp_path / "r"))) == {Code.SLOT_WRITTEN_TWICE}


def test_rows_without_a_slot_are_in_no_one_elses(one, tmp_path):
    actual = one.recorded("batched", engine="reference")
    for step in actual.computing():
        step.slot_mapping = [-1] * len(step.request)
    assert codes(one.measure(actual.write(tmp_path / "r"))) == set()


# On steps by hand.

SAME_TOKENS = {1: (7, 7, 7), 5: (7, 7, 8), 9: (7, 7, 7)}


def conflicts(*steps):
    return slot_conflicts(recording_of(SAME_TOKENS, steps))


@pytest.mark.parametrize(
    ("rows", "slots", "pair"),
    [
        ([(1, 0), (1, 1), (1, 2)], [3, 3, 3], None),
        ([(1, 2), (9, 2)], [3, 3], None),
        ([(1, 1), (5, 1)], [0, 0], None),
        ([(1, 2), (5, 2)], [0, 0], (0, 1)),
        ([(5, 2), (1, 1), (1, 2)], [4, 2, 4], (0, 2)),
        ([(1, 2), (5, 2)], [-1, -1], None),
        ([(1, 2), (5, 2)], [2, 3], None),
        ([(1, 0), (5, 1), (9, 2), (1, 2)], [6, 5, 5, 6], (1, 2)),
        ([(1, 2), (9, 2), (5, 2)], [6, 6, 6], (1, 2)),
    ],
)
def test_rows_of_different_requests_and_tokens_in_one_slot(rows, slots, pair):
    actual = conflicts(Step(rows, slots=slots))
    if pair is None:
        assert actual == []
        return
    (finding,) = actual
    (request, at), (second, there) = (rows[row] for row in pair)
    told = f"request {request}, position {at}, and request {second}, position {there}"
    assert finding.message == f"step 0 writes slot {slots[pair[0]]} twice: {told}"
    assert (finding.code, finding.request, finding.position) == (Code.SLOT_WRITTEN_TWICE, second, there)


def test_the_finding_names_the_first_step_with_a_conflict():
    sound, wrong = Step([(1, 2), (5, 2)], slots=[0, 1]), [(1, 2), (5, 2)]
    (finding,) = conflicts(sound, Step(wrong), Step(wrong, slots=[2, 2], phase="readback"),
                           Step(wrong, slots=[4, 4]), Step(wrong, slots=[8, 8]))  # fmt: skip
    assert finding.message.startswith("step 3 writes slot 4 twice")
    assert conflicts() == []


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


def test_the_last_write_of_a_slot():
    slots = history(*BY_HAND)
    assert [slots.writer(9, step) for step in range(4)] == [write(0, 1, 1, 1)] * 3 + [write(3, 0, 6, 0)]
    assert [slots.writer(3, step) for step in range(4)] == [None] * 3 + [write(3, 1, 1, 3)]
    assert slots.writer(-1, 3) is None, "no slot"
    assert slots.writer(0, 3) is None, "read back and not written"
    assert str(slots.writer(9, 3)) == "request 6, position 0, step 3"


def test_slots_that_were_written_by_the_end_of_a_step():
    slots = history(*BY_HAND)
    assert [sorted(slots.written_slots(step)) for step in (-1, 0, 2, 3)] == [[], [8, 9], [8, 9], [3, 8, 9]]


def test_block_tables_where_they_are_recorded():
    slots = history(*BY_HAND)
    assert slots.table(0, 1) == [2]
    assert slots.table(0, 3) == slots.table(2, 1) == []
    assert slots.table(3, 6) == [2]


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
    slots = history(stored(size, length, [5, 2, 9][: -(-length // size)]))
    assert slots.block_size == size


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
    slots = history(stored(3, 7, [4, 0, 2]))
    assert slots.slots([4, 0, 2], 7) == [12, 13, 14, 0, 1, 2, 6]
    assert slots.slots([4, 0], 7) == [12, 13, 14, 0, 1, 2], "as far as it reaches"
    assert slots.slots([4, 0], 2) == [12, 13]
    assert slots.slots([], 2) == []


def test_rows_that_were_written_elsewhere_than_their_table_says():
    rows = [(1, 0), (6, 4), (1, 5), (1, 1), (1, 6)]
    step = Step(rows, slots=[12, 3, 1, 14, 8], tables={1: [4, 0], 6: [7]})
    slots = history(stored(3, 7, [4, 0, 2]), step)
    assert slots.block_size == 3
    assert slots.misplaced(1) == [(1, 5, 1, 2), (1, 1, 14, 13)], "position 4 of 6 and 6 of 1 lie after their tables"
    assert slots.misplaced(0) == []
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
    actual = history(*steps)
    for index, known in enumerate(expected):
        assert {slot: actual.writer(slot, index) for slot in range(8)} == {slot: known.get(slot) for slot in range(8)}
        assert set(actual.written_slots(index)) == set(known)


# What was written.


def with_taps():
    taps = [torch.arange(12.0).view(2, 2, 3) + 100 * index for index in range(3)]
    return [
        Step([(1, 0), (1, 1)]),
        *(Step([(1, 0), (1, 1)], taps={"k": x.half(), "partial": x}) for x in taps),
    ]


def test_what_was_written_of_a_tap():
    slots = history(*with_taps()).content([write(3, 1, 1, 1), None, write(1, 0, 1, 0), write(3, 0, 1, 0)], "k")
    assert slots.dtype is torch.float64
    rows = [range(206, 212), [0] * 6, range(6), range(200, 206)]
    assert slots.tolist() == [[float(x) for x in row] for row in rows]


def test_what_was_not_recorded_of_every_row_is_not_known():
    assert history(*with_taps()).content([write(1, 0, 1, 0)], "v") is None
    assert history(*with_taps()).content([write(1, 0, 1, 0), write(0, 0, 1, 0)], "k") is None
    steps = with_taps()
    steps[2] = Step([(1, 0), (1, 1)], taps={"k": torch.ones(2, 6)}, rows_of={"k": [0, 1]})
    assert history(*steps).content([write(2, 0, 1, 0)], "k") is None
    assert history(*steps).content([write(1, 0, 1, 0)], "k") is not None
    assert history(*steps).content([None], "k").tolist() == [[0.0] * 6]
