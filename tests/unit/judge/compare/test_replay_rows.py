"""Forced replay of one batch by hand, against a loop: what is put back, what is judged, and on which inputs."""

import random
from types import SimpleNamespace

import pytest
import torch

from harness.formats.recording import RequestInfo
from harness.formats.taps import Graph, Kind, Operation
from harness.judge.compare.batch import PaddedBatch
from harness.judge.compare.replay import DecidedError, Replay, are_indices, put_back, unrecorded_before
from harness.judge.compare.sequences import RowSequence
from harness.oracle.paired import Value

from .in_memory import Step, recording_of

GRAPH = Graph(
    (
        Operation(tap="embed", kind=Kind.EMBEDDING),
        Operation(tap="q", kind=Kind.LINEAR, inputs=("embed",)),
        Operation(tap="k", kind=Kind.LINEAR, inputs=("embed",)),
        Operation(tap="attention", kind=Kind.ATTENTION, inputs=("q", "k")),
        Operation(tap="k_cache", kind=Kind.CACHE, inputs=("k",)),
        Operation(tap="sum", kind=Kind.ADD, inputs=("attention", "embed")),
        Operation(tap="choice", kind=Kind.CHOICE, inputs=("sum",)),
        Operation(tap="head", kind=Kind.LINEAR, inputs=("sum",), is_head=True),
    )
)
COMPUTED = [op for op in GRAPH if op.kind is not Kind.CACHE]
LENGTHS, TOKENS, WIDTH, EXPERTS = (5, 3), 5, 4, 6
PLACES = [(line, at) for line, length in enumerate(LENGTHS) for at in range(length)]
HEAD_PLACES = [2, 4, 6]
"""Places for which HF was asked for its head: request 0 at 2 and 4, request 1 at 1."""
NUM_PLACES = len(LENGTHS) * TOKENS


def place_of(row):
    return row[0] * TOKENS + row[1]


class Judged:
    """A judge that keeps what it is given."""

    reads_later = True

    def __init__(self, unrecorded_before=None, usable=None):
        self.graph = GRAPH
        self.usable = {op.tap for op in GRAPH} if usable is None else usable
        self.chosen = {}
        self.unrecorded_before, self.rows, self.num_settled, self.is_decided = unrecorded_before or {}, {}, 0, False

    def add(self, rows):
        self.rows[rows.operation.tap] = rows

    def choose(self, operation, chosen, num_scores):
        self.chosen[operation.tap] = chosen, num_scores

    def settle(self):
        self.num_settled += 1


def rows_of(tap, kind, generator, num=NUM_PLACES):
    if kind is Kind.CHOICE:
        return torch.randint(0, EXPERTS, (num, 2), generator=generator)
    return torch.randn(num, 2, 2, generator=generator, dtype=torch.float64)


def recorded_batch(seed, share=0.8, nonsense=False):
    """A batch whose rows were computed in two steps, and what was recorded of each tap, by place."""
    generator, of_torch = random.Random(seed), torch.Generator().manual_seed(seed)
    rows = PLACES.copy()
    generator.shuffle(rows)
    steps, recorded, actual = [], {op.tap: {} for op in GRAPH}, {}
    for index, part in enumerate((rows[:4], rows[4:])):
        taps, covered = {}, {}
        for op in COMPUTED:
            here = [at for at in range(len(part)) if generator.random() < share]
            if not here:
                continue
            taps[op.tap] = rows_of(op.tap, op.kind, of_torch, len(here)).to(
                torch.int32 if op.kind is Kind.CHOICE else torch.bfloat16
            )
            if op.kind is Kind.CHOICE and nonsense:
                taps[op.tap][0, 1] = generator.choice([-1, EXPERTS])
            covered[op.tap] = here
            recorded[op.tap] |= {place_of(part[at]): taps[op.tap][row] for row, at in enumerate(here)}
        steps.append(Step(part, taps=taps, rows_of=covered))
        actual |= {row: (index, at) for at, row in enumerate(part)}
    is_own = {row: generator.random() < 0.8 for row in PLACES}
    sequences = []
    for line, length in enumerate(LENGTHS):
        places = [actual[line, at] for at in range(length)]
        sequences.append(RowSequence(
            request=RequestInfo(id=line, token_ids=[10 * line + at for at in range(length)], prompt_length=1),
            step=torch.tensor([step for step, _ in places]), row=torch.tensor([row for _, row in places]),
            is_own=torch.tensor([is_own[line, at] for at in range(length)]),
        ))  # fmt: skip
    recording = recording_of(dict.fromkeys(range(2), range(6)), steps)
    return PaddedBatch(recording, sequences), recorded, {place_of(row) for row, computed in is_own.items() if computed}


def run(batch, judge, seed=0):
    """Show every value to a replay: what it went on with, in both forwards, and the forwards' own values."""
    generator = torch.Generator().manual_seed(seed + 100)
    replay, control, truth, computed, scores = Replay(judge, batch), {}, {}, {}, {}
    for op in COMPUTED:
        places = torch.tensor(HEAD_PLACES) if op.tap == "head" else None
        num = len(HEAD_PLACES) if op.tap == "head" else len(LENGTHS) * TOKENS
        for forward, results in (("control", control), ("truth", truth)):
            rows = rows_of(op.tap, op.kind, generator, num)
            rows = rows.bfloat16() if forward == "control" and rows.is_floating_point() else rows
            of_choice = torch.randn(num, EXPERTS, generator=generator) if op.kind is Kind.CHOICE else None
            computed[forward, op.tap], scores[forward, op.tap] = rows.clone(), of_choice
            value = Value(operation=op, rows=rows, places=places, scores=of_choice)
            results[op.tap] = getattr(replay, forward)(value)
            assert torch.equal(rows, computed[forward, op.tap]), "the model's own tensors stay as they are"
    return replay, control, truth, computed, scores


def shown(op):
    return HEAD_PLACES if op.tap == "head" else list(range(len(LENGTHS) * TOKENS))


def known_inputs(op, place, recorded):
    """Whether all that a row was computed from was recorded: of attention all of the history too."""
    for index, tap in enumerate(op.inputs):
        first = place - place % TOKENS if op.kind is Kind.ATTENTION and index else place
        if not all(at in recorded[tap] for at in range(first, place + 1)):
            return False
    return True


WAYS = {"sum": ("attention",), "choice": None}


@pytest.mark.parametrize("unrecorded_before", [{}, WAYS])
@pytest.mark.parametrize("seed", range(6))
def test_replay_is_that_of_the_loop(seed, unrecorded_before):
    batch, recorded, owned = recorded_batch(seed)
    judge = Judged(unrecorded_before)
    replay, control, truth, computed, scores = run(batch, judge, seed)
    for op in COMPUTED:
        there = [place for place in shown(op) if place in recorded[op.tap]]
        for forward, results in (("control", control), ("truth", truth)):
            expected = computed[forward, op.tap].clone()
            for place in there:
                expected[shown(op).index(place)] = recorded[op.tap][place].to(expected.dtype)
            assert (results[op.tap] is None) == (not there)
            assert not there or torch.equal(results[op.tap].to(expected.dtype), expected)
        way = unrecorded_before.get(op.tap, ())
        judged = [place for place in there if place in owned and (way or known_inputs(op, place, recorded))]
        if way is None or not judged:
            assert op.tap not in judge.rows
            continue
        rows = judge.rows[op.tap]
        assert rows.unrecorded == way
        assert sorted(rows.places.tolist()) == judged
        assert torch.equal(rows.rows.request, rows.places // TOKENS)
        at = [shown(op).index(place) for place in rows.places.tolist()]
        assert torch.equal(
            rows.actual, torch.stack([recorded[op.tap][place] for place in rows.places.tolist()]).flatten(1)
        )
        assert torch.equal(rows.expected, computed["truth", op.tap][at].flatten(1))
        assert torch.equal(rows.control, computed["control", op.tap][at].flatten(1))
        if op.kind is Kind.CHOICE:
            assert torch.equal(rows.control_scores, scores["control", op.tap][at])
        else:
            assert rows.control_scores is None
        if op.kind is Kind.EMBEDDING:
            assert torch.equal(rows.inputs()[0], batch.token_ids.flatten()[rows.places])
            continue
        for tap, actual, others in zip(op.inputs, rows.inputs(), rows.inputs(torch.tensor([3, 0])), strict=True):
            assert torch.equal(actual, truth_of(tap, truth, computed)[rows.places])
            assert torch.equal(others, truth_of(tap, truth, computed)[[3, 0]])
    assert (replay._values, replay._control, replay._control_scores, replay._recorded_rows) == ({}, {}, {}, {})


def truth_of(tap, truth, computed):
    """What the truth went on with."""
    return computed["truth", tap] if truth[tap] is None else truth[tap]


def test_what_cannot_be_used_is_neither_put_back_nor_judged():
    batch, _, _ = recorded_batch(0, share=1.0)
    judge = Judged(usable={"q", "k"})
    _, control, truth, _, _ = run(batch, judge)
    assert {tap for tap in control if control[tap] is not None} == {"q", "k"}
    assert {tap for tap in truth if truth[tap] is not None} == {"q", "k"}
    assert judge.rows == {}, "whose input was not recorded"


def test_a_choice_of_experts_that_do_not_exist_is_judged_and_not_gone_on_with():
    batch, recorded, _ = recorded_batch(3, share=1.0, nonsense=True)
    judge = Judged()
    _, control, truth, computed, _ = run(batch, judge)
    wrong = [place for place, row in recorded["choice"].items() if not ((row >= 0) & (row < EXPERTS)).all()]
    assert len(wrong) == 2
    for forward, results in (("control", control), ("truth", truth)):
        for place, row in recorded["choice"].items():
            expected = computed[forward, "choice"][place] if place in wrong else row
            assert results["choice"][place].tolist() == expected.tolist()
    rows = judge.rows["choice"]
    assert torch.equal(rows.actual, torch.stack([recorded["choice"][place] for place in rows.places.tolist()]))


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [([[0, 3], [3, 4], [-1, 0]], [True, False, False]), ([[[0], [3]], [[4], [0]]], [True, False])],
)
def test_which_choices_are_indices(chosen, expected):
    assert are_indices(torch.tensor(chosen), 4).tolist() == expected


def test_positions_of_the_head_are_those_at_which_a_judged_row_of_it_was_recorded():
    batch, recorded, _ = recorded_batch(1, share=0.5)
    positions = sorted({place % TOKENS for place in recorded["head"] if batch.is_own[place]})
    assert Replay(Judged(), batch).logit_positions == positions
    assert Replay(Judged(usable=set()), batch).logit_positions == [0]


def test_a_head_recorded_nowhere_that_hf_shows_it_is_not_put_back():
    batch, _, _ = recorded_batch(1)
    replay = Replay(Judged(), batch)
    value = Value(operation=GRAPH["head"], rows=torch.zeros(1, 2, 2), places=torch.tensor([9]))
    assert replay.control(value) is None
    assert replay.truth(value) is None


def test_values_in_some_places_are_unknown_in_all_others():
    for rows, unknown in ((torch.ones(2, 3), torch.nan), (torch.ones(2, 3, dtype=torch.int64), -1)):
        value = Value(operation=GRAPH["sum"], rows=rows, places=torch.tensor([7, 2]))
        actual = value.in_all_places(rows + torch.arange(2)[:, None], num_places=10)
        assert actual.shape == (10, 3)
        expected = torch.full((10, 3), unknown, dtype=rows.dtype)
        expected[7], expected[2] = 1, 2
        torch.testing.assert_close(actual, expected, equal_nan=True)


def test_a_part_is_settled_before_it_is_decided_whether_to_go_on():
    judge = Judged()
    replay = Replay(judge, SimpleNamespace(num_places=1, positions=None))
    replay.part_done()
    judge.is_decided = True
    with pytest.raises(DecidedError):
        replay.part_done()
    assert judge.num_settled == 2


@pytest.mark.parametrize("at", [[0, 1, 2], [1, 0, 2], [2, 0], [1], [0, 1]])
def test_rows_that_are_put_back_keep_the_forwards_shape_and_dtype(at):
    rows, recorded = torch.randn(3, 2, 2), torch.arange(4.0 * len(at)).view(len(at), 4).half()
    before, actual = rows.clone(), put_back(rows, torch.tensor(at), recorded)
    assert actual.dtype is torch.float32
    assert torch.equal(rows, before)
    for row in range(3):
        expected = recorded[at.index(row)].view(2, 2).float() if row in at else before[row]
        assert torch.equal(actual[row], expected)


ATTENTION_GRAPH = Graph((
    Operation(tap="embed", kind=Kind.EMBEDDING), Operation(tap="norm", kind=Kind.NORM, inputs=("embed",)),
    Operation(tap="k", kind=Kind.LINEAR, inputs=("norm",)), Operation(tap="v", kind=Kind.LINEAR, inputs=("norm",)),
    Operation(tap="k_cache", kind=Kind.CACHE, inputs=("k",)),
    Operation(tap="attention", kind=Kind.ATTENTION, inputs=("k", "v")),
    Operation(tap="sum", kind=Kind.ADD, inputs=("attention", "embed")),
))  # fmt: skip


@pytest.mark.parametrize(
    ("recorded", "expected"),
    [
        ({"embed", "norm", "k", "v", "attention", "sum"}, {}),
        ({"embed", "norm", "k", "v", "sum"}, {"sum": ("attention",)}),
        ({"embed", "sum"}, {"sum": ("norm", "k", "v", "attention")}),
        ({"embed", "k", "attention", "sum"}, {"k": ("norm",), "attention": ("norm", "v")}),
        ({"norm", "sum"}, {"norm": None, "sum": None}),
        ({"k", "v", "attention", "sum"}, {"k": None, "v": None, "sum": None}),
        ({"k_cache"}, {}),
        (set(), {}),
    ],
)
def test_ways_from_what_was_recorded(recorded, expected):
    assert unrecorded_before(ATTENTION_GRAPH, recorded) == expected
