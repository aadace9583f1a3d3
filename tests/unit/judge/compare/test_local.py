"""How the rows of an operation are summed up over batches, and what is kept of the wrong ones; their errors by hand."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from harness.base.metrics import rounding_unit
from harness.base.numerics import Numerics
from harness.base.threads import Workers
from harness.formats.recording import RequestInfo
from harness.formats.taps import Graph, Kind, Operation
from harness.judge.compare import local
from harness.judge.compare.evidence import MAX_LAYERS, MAX_ROWS
from harness.judge.compare.local import LocalJudge, replay_dtype
from harness.judge.compare.row_judge import LocalErrors
from harness.judge.compare.sequences import RowSequence
from harness.judge.compare.systematic import MIN_CHANNELS, MIN_ROWS
from harness.oracle.watch import AttentionCall

from .in_memory import tap_rows

BF16, F32 = torch.bfloat16, torch.float32
UNIT = rounding_unit(BF16)
WIDTH = MIN_CHANNELS


def op(tap, kind=Kind.LINEAR, inputs=("x",)):
    return Operation(tap=tap, kind=kind, inputs=inputs)


FIRST, SECOND = op("layers.0.first"), op("layers.0.second")
CHOICE = op("layers.0.choice", Kind.CHOICE)
GRAPH = Graph((op("x", Kind.EMBEDDING, ()), FIRST, SECOND, CHOICE, *(op(f"layers.{at}.third") for at in range(5))))


def floats(values):
    return torch.tensor(values, dtype=torch.float64)


class Rows:
    """In the place of `RowJudge`: gives back the errors that each test has prepared, in order."""

    def __init__(self, hf, dtype, usable, declared, *, is_final):
        self.made_for = hf, dtype, usable, declared
        self.asked, self.prepared, self.convention, self.failures = [], [], None, {}

    def judge(self, rows, *, dtype):
        self.asked.append(dtype)
        return replace(self.prepared.pop(0), rows=rows.rows)

    def bound_if_wrong(self, rows, errors, bound):
        return bound

    def under_best_convention(self, rows, errors):
        return self.convention and replace(self.convention, rows=rows.rows)


@pytest.fixture
def judge(monkeypatch):
    monkeypatch.setattr(local, "RowJudge", Rows)

    def make(*, is_alone=True, **options):
        hf = SimpleNamespace(graph=GRAPH)
        return LocalJudge(hf, BF16, {op.tap for op in GRAPH}, is_alone=is_alone, **options)

    return make


def errors_of(expected, roundings, bound=2.0, **more):
    """Errors whose rows are those that the judge is asked for."""
    limit = torch.full((len(roundings),), bound, dtype=torch.float64)
    fields = {"rows": None, "dtype": BF16, "bound": limit} | more
    return LocalErrors(roundings=floats(roundings), expected=expected, **fields)


def draw(num_rows, seed=0, width=WIDTH):
    return torch.randn(num_rows, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def add(judge, operation, roundings, *, places=None, unrecorded=(), seed=0, gain=0.0, low=None, **more):
    """Have the judge measure rows of these errors; those that it sees, and the control's, are off by a gain."""
    expected = draw(len(roundings), seed)
    rows = tap_rows(
        operation, expected * (1 + gain * UNIT), expected, places=places, inputs={"x": draw(200, 50)},
        unrecorded=unrecorded, control=None if low is None else expected * (1 + low * UNIT),
    )  # fmt: skip
    judge._rows.prepared.append(errors_of(expected, roundings, **more))
    judge.add(rows)
    judge.settle()
    return expected


def test_what_rows_are_judged_by(judge):
    made = judge(declared=Numerics(num_ranks=2))
    hf, dtype, usable, declared = made._rows.made_for
    assert (hf.graph, dtype, usable, declared) == (GRAPH, BF16, {op.tap for op in GRAPH}, Numerics(num_ranks=2))
    assert judge()._rows.made_for[3] == Numerics()
    assert made.graph is GRAPH


def test_batches_of_an_operation_are_summed_up(judge):
    made = judge(is_alone=False)
    add(made, SECOND, [0.5, math.nan], places=[100, 3], convention="some", allowance=3.0, is_bounded_by_control=True)
    add(made, FIRST, [0.0, 0.0], places=[0, 1])
    add(made, SECOND, [1.5, 0.1], places=[0, 101], seed=1, bound=1.6, allowance=1.0)
    assert made._rows.asked == [None, None, BF16], "in the dtype of the first rows"
    judgement = made.judgement()
    assert list(judgement.errors) == [FIRST.tap, SECOND.tap], "in the order of the run"
    errors = judgement.errors[SECOND.tap]
    assert errors.rows.request.tolist() == [1, 0, 0, 1]
    assert errors.rows.position.tolist() == [0, 3, 0, 1]
    assert errors.roundings.nan_to_num(-1).tolist() == [0.5, -1, 1.5, 0.1]
    assert errors.bound.tolist() == [2, 2, 1.6, 1.6]
    assert (errors.convention, errors.is_bounded_by_control, errors.dtype) == ("some", True, BF16)
    assert not errors.bad.any()
    assert (errors.is_exact, judgement.errors[FIRST.tap].is_exact) == (False, True)
    assert (errors.control, judgement.evidence, judgement.is_partial) == (None, {}, False)
    assert not judgement.errors[FIRST.tap].is_bounded_by_control


def test_a_control_is_kept_where_every_batch_has_one(judge):
    made = judge(is_alone=False)
    for more in ({"control": floats([0.1, 0.2])}, {"control": floats([0.3])}):
        size = len(more["control"])
        expected = draw(size)
        made._rows.prepared.append(errors_of(expected, [0.5] * size, **more))
        made.add(tap_rows(FIRST, expected, expected, inputs={"x": draw(200)}))
        made.settle()
        assert made.judgement().errors[FIRST.tap].control is not None
    assert made.judgement().errors[FIRST.tap].control.tolist() == [0.1, 0.2, 0.3]
    add(made, FIRST, [0.5])
    assert made.judgement().errors[FIRST.tap].control is None


def test_a_row_at_its_bound_is_within_it(judge):
    made = judge()
    add(made, FIRST, [2.0, 2.001, math.inf, math.nan])
    assert made.judgement().errors[FIRST.tap].bad.tolist() == [False, True, True, False]


def test_the_unrecorded_taps_are_listed(judge):
    made = judge()
    made.unrecorded_before = {SECOND.tap: ("model.layers.0.between", FIRST.tap), FIRST.tap: None}
    add(made, SECOND, [9.0], unrecorded=("model.layers.0.between",))
    add(made, FIRST, [0.1])
    judgement = made.judgement()
    assert judgement.errors[SECOND.tap].unrecorded == ("model.layers.0.between", FIRST.tap)
    assert judgement.errors[FIRST.tap].unrecorded == ()
    assert judgement.evidence == {}, "in which of them the error is, is not known"
    assert not made.is_decided


@pytest.mark.parametrize("stops_early", [True, False])
def test_a_bad_row_ends_a_replay_that_stops_early(judge, stops_early):
    made = judge(stops_early=stops_early)
    add(made, FIRST, [1.0])
    assert not made.is_decided
    add(made, SECOND, [9.0], seed=1)
    assert made.is_decided == made.judgement().is_partial == stops_early


# Evidence.


def test_evidence_of_bad_rows(judge):
    made = judge()
    expected = add(made, FIRST, [9.0, 1.0, math.inf, 0.0], places=[101, 5, 2, 0], bound=3.0)
    evidence = made.judgement().evidence[FIRST.tap]
    assert (evidence.operation, evidence.dtype, evidence.views) == (FIRST, BF16, ())
    order = [2, 0]  # by request and position
    assert evidence.rows.request.tolist() == [0, 1]
    assert evidence.rows.position.tolist() == [2, 1]
    assert torch.equal(evidence.expected, expected[order])
    assert torch.equal(evidence.inputs[0], draw(200, 50)[[2, 101]])
    assert evidence.roundings.tolist() == [math.inf, 9.0]
    assert evidence.bound.tolist() == [3, 3]
    assert not made.judgement().is_partial


def test_evidence_of_attention_that_hfs_interface_does_not_show_is_of_its_inputs(judge):
    made = judge()
    add(made, op("layers.0.first", Kind.ATTENTION), [9.0], places=[7])
    assert torch.equal(made.judgement().evidence[FIRST.tap].inputs[0], draw(200, 50)[[7]])


def test_evidence_is_of_rows_that_are_spread_over_all(judge):
    made = judge()
    add(made, FIRST, [9.0] * (MAX_ROWS + 7), places=list(range(MAX_ROWS + 7)) if MAX_ROWS < 190 else None)
    assert len(made.judgement().evidence[FIRST.tap].rows) == MAX_ROWS


def test_evidence_of_a_site_is_that_of_its_first_layers(judge):
    made = judge(is_alone=False)
    for seed, layer in enumerate((0, 1, 0, 2, 3, 1, 4)):
        add(made, GRAPH[f"layers.{layer}.third"], [9.0], places=[seed], seed=seed)
    add(made, FIRST, [9.0])
    evidence = made.judgement().evidence
    assert list(evidence) == [FIRST.tap, *(f"layers.{layer}.third" for layer in range(MAX_LAYERS))]
    assert [len(evidence[f"layers.{layer}.third"].rows) for layer in range(MAX_LAYERS)] == [2, 2, 1]


def test_evidence_of_attention_is_the_history_of_its_rows(judge):
    """By requests and positions, whatever the order in which they were judged."""
    made, attention = judge(), Operation(tap="layers.0.first", kind=Kind.ATTENTION, inputs=("q", "k", "v"))
    x = draw(2 * 4 * 100, width=2).view(2, 4, 100, 2)
    call = AttentionCall(path="", module=nn.Module(), query=x, key=x, value=x, mask=None, options={})
    expected, places = draw(3), [101, 5, 2]
    rows = tap_rows(attention, expected, expected, places=places, call=call)
    request = RequestInfo(id=0, token_ids=[1] * 10, prompt_length=1)
    step = torch.zeros(10, dtype=torch.int64)
    rows.batch.sequences = [RowSequence(request=request, step=step, row=step, is_own=step == 0)] * 2
    made._rows.prepared.append(errors_of(expected, [9.0, 1.0, 7.0]))
    made.add(rows)
    made.settle()
    evidence = made.judgement().evidence[attention.tap]
    assert evidence.rows.request.tolist() == [0, 1]
    assert evidence.rows.position.tolist() == [2, 1]
    assert evidence.roundings.tolist() == [7, 9]
    assert torch.equal(evidence.expected, expected[[2, 0]])
    assert evidence.inputs == []
    assert [view.rows.position.tolist() for view in evidence.views] == [[2], [1]]


def test_inputs_that_are_indices_stay_indices(judge):
    made = judge()
    expected = draw(1)
    embedding = op("x", Kind.EMBEDDING, ())
    made._rows.prepared.append(errors_of(expected, [9.0]))
    made.add(tap_rows(embedding, expected, expected, places=[33]))
    made.settle()
    (tokens,) = made.judgement().evidence["x"].inputs
    assert (tokens.tolist(), tokens.dtype) == ([33], torch.int64)


# Choices of a router.

SCORES = torch.tensor([[5.0, 4.0, 1.0, 0.0]] * 4, dtype=torch.float64)


def choose(made, chosen, *, places=(101, 3, 2, 0)):
    scores = torch.zeros(200, 4, dtype=torch.float64)
    scores[list(places)] = SCORES
    meant = torch.tensor([[0, 1]] * 4)
    rows = tap_rows(CHOICE, torch.tensor(chosen), meant, places=places, scores=scores)
    object.__setattr__(rows, "control_scores", SCORES[: len(places)].bfloat16())
    made.add(rows)
    made.settle()


def test_choices_are_judged_by_their_scores(judge):
    made = judge()
    choose(made, [[1, 0], [0, 2], [0, 1], [3, 3]])
    judgement = made.judgement()
    errors = judgement.errors[CHOICE.tap]
    assert errors.bad.tolist() == [False, True, False, True]
    assert errors.bound.tolist() == [1.0] * 4
    assert errors.roundings[0] == errors.roundings[2] == 0
    assert errors.roundings[3] == math.inf
    assert (errors.dtype, errors.effect) == (None, None)
    evidence = judgement.evidence[CHOICE.tap]
    assert evidence.rows.position.tolist() == [0, 3]
    assert evidence.roundings.tolist() == [math.inf, float(errors.roundings[1])]
    assert evidence.bound.tolist() == [1, 1]
    assert evidence.dtype is F32
    assert torch.equal(evidence.expected, floats([[0, 1], [0, 1]]))
    assert torch.equal(evidence.inputs[0], SCORES[:2])


def test_choices_that_are_right_leave_no_evidence(judge):
    made = judge(stops_early=True)
    choose(made, [[1, 0], [0, 1], [0, 1], [1, 0]])
    assert made.judgement().evidence == {}
    assert made.judgement().errors[CHOICE.tap].is_exact
    assert not made.is_decided


def test_a_choice_that_rounding_explains_is_right(judge, monkeypatch):
    monkeypatch.setattr(local, "choice_errors", lambda _rows: floats([1.5, 1.0, 0.0, 1.001]))
    made = judge()
    choose(made, [[0, 1]] * 4)
    judgement = made.judgement()
    assert judgement.errors[CHOICE.tap].bad.tolist() == [True, False, False, True]
    assert judgement.evidence[CHOICE.tap].roundings.tolist() == [1.001, 1.5]


# Directions that the errors have.

NUM = MIN_ROWS + 10


def test_a_direction_that_no_row_shows_leaves_evidence(judge):
    made = judge()
    add(made, FIRST, [0.9] * (NUM - 1) + [math.nan], gain=0.9)
    judgement = made.judgement()
    assert judgement.errors[FIRST.tap].effect.kind == "gain"
    assert judgement.errors[FIRST.tap].effect.num_rows == NUM - 1
    assert judgement.errors[FIRST.tap].effect.roundings == pytest.approx(0.9, rel=1e-3)
    evidence = judgement.evidence[FIRST.tap]
    assert len(evidence.rows) == NUM - 1
    assert evidence.roundings.isfinite().all()
    assert not made.is_decided


def test_rounding_has_no_direction_and_leaves_none(judge):
    made = judge()
    add(made, FIRST, [0.9] * NUM, gain=0.0)
    assert made.judgement().errors[FIRST.tap].effect is None
    assert made.judgement().evidence == {}


@pytest.mark.parametrize(("gain", "is_one"), [(0.9, False), (0.0, True), (-0.9, True)])
@pytest.mark.parametrize("is_alone", [True, False])
def test_a_direction_that_the_control_has_too_is_none(judge, gain, is_one, is_alone):
    """Where the errors of the control are known, too: in the engine's dtype."""
    for errors in (floats([abs(gain)] * NUM), None):
        made = judge(is_alone=is_alone)
        for batch in range(1 if is_alone else 2):
            places = list(range(90, 90 + NUM))
            add(made, FIRST, [0.9] * NUM, gain=0.9, low=gain, seed=batch + 1, places=places, control=errors)
        assert (made.judgement().errors[FIRST.tap].effect is not None) == (is_one or errors is None)


def test_batches_are_compared_with_the_control_together(judge):
    made = judge(is_alone=False)
    for batch in range(2):
        size = MIN_ROWS - 10
        add(made, FIRST, [0.9] * size, gain=0.9, low=0.9, seed=batch + 1, control=floats([0.9] * size))
    (gain, *_) = made._totals[FIRST.tap].effects.significant()
    assert gain.num_rows == 2 * (MIN_ROWS - 10)
    assert made.judgement().errors[FIRST.tap].effect is None


def test_a_control_is_not_measured_where_it_is_not_needed(judge):
    for gain, is_measured in ((0.0, False), (0.9, True)):
        made = judge()
        add(made, FIRST, [0.9] * NUM, gain=gain, low=0.9, control=floats([0.9] * NUM))
        assert bool(made._totals[FIRST.tap].control_effects.positions) == is_measured


def test_the_room_of_a_convention_is_no_direction(judge):
    for allowance, is_one in ((0.8, True), (1.0, False)):
        made = judge()
        add(made, FIRST, [0.9] * NUM, gain=0.9, convention="some", allowance=allowance)
        assert (made.judgement().errors[FIRST.tap].effect is not None) == is_one
        assert bool(made.judgement().evidence) == is_one


def under(expected, typical, gain, **more):
    """What a convention gives: the rows that it expects, which the engine's are off by a gain."""
    return errors_of(expected * (1 + (0.9 - gain) * UNIT), [typical] * NUM, convention="some", **more)


@pytest.mark.parametrize(
    ("typical", "gain", "bound", "is_taken"),
    [
        (0.1, 0.0, 2.0, True),
        (0.9, 0.0, 2.0, False),
        (0.89, 0.0, 2.0, True),
        (0.1, 0.9, 2.0, False),
        (0.1, 0.0, 0.05, False),
    ],
    ids=["nearer", "no nearer", "a little nearer", "with the direction", "with bad rows"],
)
@pytest.mark.parametrize("is_alone", [True, False])
def test_a_direction_may_come_of_a_convention(judge, typical, gain, bound, is_taken, is_alone):
    made = judge(is_alone=is_alone)
    made._rows.convention = under(draw(NUM), typical, gain, bound=bound)
    add(made, FIRST, [0.9] * NUM, gain=0.9)
    judgement = made.judgement()
    assert judgement.errors[FIRST.tap].convention == ("some" if is_taken else None)
    assert (judgement.errors[FIRST.tap].effect is None) == is_taken
    assert (judgement.evidence == {}) == is_taken
    assert judgement.errors[FIRST.tap].roundings[0] == (typical if is_taken else 0.9)


def test_conventions_are_not_asked_where_taps_between_were_not_recorded(judge):
    made = judge()
    made._rows.convention = under(draw(NUM), 0.1, 0.0)
    add(made, FIRST, [0.9] * NUM, gain=0.9, unrecorded=("between",))
    assert made.judgement().errors[FIRST.tap].convention is None


def test_what_earlier_batches_added_is_kept_under_a_convention(judge):
    made = judge(is_alone=False)
    add(made, FIRST, [0.1] * (MIN_ROWS - 1), gain=0.0, seed=7)
    made._rows.convention = under(draw(NUM), 0.1, 0.0)
    add(made, FIRST, [0.9] * NUM, gain=0.9)
    assert made.judgement().errors[FIRST.tap].convention == "some"
    (gain, *_) = made._totals[FIRST.tap].effects.all()
    assert gain.num_rows == MIN_ROWS - 1 + NUM
    assert gain.roundings == pytest.approx(0.0, abs=1e-3)


@pytest.mark.parametrize(("shape", "num_heads"), [((3, 2 * WIDTH), 1), ((3, 2, WIDTH), 2), ((3, 1, 2, WIDTH), 1)])
def test_heads_are_those_of_the_tensor(judge, shape, num_heads):
    rows = SimpleNamespace(operation=FIRST, value=SimpleNamespace(rows=torch.zeros(shape)))
    actual = judge(may_truncate=True)._new_effects(rows, errors_of(None, [], dtype=F32))
    assert (actual.num_heads, actual.kind, actual.dtype) == (num_heads, Kind.LINEAR, F32)
    assert actual.may_truncate


def test_positions_are_those_within_a_request(judge):
    made = judge()
    add(made, FIRST, [0.9] * NUM, gain=0.9, places=list(range(90, 90 + NUM)))
    positions = torch.cat(made._totals[FIRST.tap].effects.positions)
    assert positions.tolist() == [at % 100 for at in range(90, 90 + NUM)]


def test_work_is_done_by_the_workers_that_are_given(judge):
    with Workers(1) as workers:
        made = judge(workers=workers)
        add(made, FIRST, [9.0])
        assert made.judgement().errors[FIRST.tap].bad.tolist() == [True]


F64 = torch.float64


@pytest.mark.parametrize(
    ("choice", "taps", "dtype", "expected"),
    [
        ("auto", {"a": "BF16"}, torch.bfloat16, F32),
        ("auto", {"a": "BF16", "b": "F32"}, torch.bfloat16, F64),
        ("auto", {"a": "BF16", "lm_head": "F32", "head": "F32"}, torch.bfloat16, F32),
        ("auto", {"a": "F16"}, torch.float16, F32),
        ("auto", {"a": "F32"}, F32, F64),
        ("auto", {}, F32, F64),
        ("float32", {"a": "F32"}, torch.bfloat16, F32),
        ("float64", {"a": "BF16"}, torch.bfloat16, F64),
    ],
)
def test_the_precision_of_the_truth(choice, taps, dtype, expected):
    recording = SimpleNamespace(taps=[SimpleNamespace(name=name, dtype=kind) for name, kind in taps.items()])
    hf = SimpleNamespace(dtype=dtype, graph=SimpleNamespace(logits="lm_head", head=["head"]))
    assert replay_dtype(choice, recording, hf) is expected
