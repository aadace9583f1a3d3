"""Two rows of one step cannot be in one slot: a wrong block table, or steps recorded as one that were several."""

from dataclasses import replace

import pytest
import torch

from harness.errors import Code
from harness.judge.compare.sequences import slot_conflicts

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
    other = next(row for row, request in enumerate(step.request) if request != step.request[0])
    step.slot_mapping[other] = step.slot_mapping[0]
    assert codes(one.measure(actual.write(tmp_path / "r"))) == {Code.SLOT_WRITTEN_TWICE}


def test_rows_without_a_slot_are_in_no_one_elses(one, tmp_path):
    actual = one.recorded("batched", engine="reference")
    for step in actual.computing():
        step.slot_mapping = [-1] * len(step.request)
    assert codes(one.measure(actual.write(tmp_path / "r"))) == set()


# On steps by hand.

TOKENS = {1: (7, 7, 7), 5: (7, 7, 8), 9: (7, 7, 7)}


def conflicts(*steps):
    return slot_conflicts(recording_of(TOKENS, steps))


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
    found = conflicts(Step(rows, slots=slots))
    if pair is None:
        assert found == []
        return
    (finding,) = found
    (one, at), (other, there) = (rows[row] for row in pair)
    told = f"request {one}, position {at}, and request {other}, position {there}"
    assert finding.message == f"step 0 writes slot {slots[pair[0]]} twice: {told}"
    assert (finding.code, finding.request, finding.position) == (Code.SLOT_WRITTEN_TWICE, other, there)


def test_the_first_step_with_a_conflict_is_told():
    sound, wrong = Step([(1, 2), (5, 2)], slots=[0, 1]), [(1, 2), (5, 2)]
    (finding,) = conflicts(sound, Step(wrong), Step(wrong, slots=[2, 2], phase="readback"),
                           Step(wrong, slots=[4, 4]), Step(wrong, slots=[8, 8]))  # fmt: skip
    assert finding.message.startswith("step 3 writes slot 4 twice")
    assert conflicts() == []
