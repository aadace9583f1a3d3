"""Rows of one operation and their bounds: which dtype, which bound, which convention, on rows by hand."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from harness.base.metrics import largest_rounding, rounding_unit
from harness.base.numerics import Numerics
from harness.formats.taps import KINDS, ErrorModel, Graph, Kind, Operation
from harness.judge.compare import projected, row_judge
from harness.judge.compare.batch import RecordedRows
from harness.judge.compare.bounds import CONTROL_FACTOR, UNRECORDED_FACTOR, Sensitivity, control_bound, derived_bound
from harness.judge.compare.conventions import Convention, Rounding
from harness.judge.compare.row_judge import RowJudge
from harness.oracle.attention import attention_sensitivity
from harness.oracle.watch import AttentionCall

from .in_memory import tap_rows
from .judgements import draw

F32, BF16 = torch.float32, torch.bfloat16
WIDTH = 8


def operation(kind=Kind.ADD, inputs=()):
    return Operation(tap="layers.0.tap", kind=kind, inputs=inputs, source="layers.0.tap")


def judge_of(dtype=BF16, *, hf=None, usable=(), **declared):
    return RowJudge(hf or SimpleNamespace(graph=Graph(())), dtype, set(usable), Numerics(**declared))


def off(expected, roundings, dtype=BF16, seed=9):
    """Rows that are so many roundings away, each in a direction of its own; float64."""
    direction = draw(*expected.shape, seed=seed)
    direction *= expected.norm(dim=1, keepdim=True) / direction.norm(dim=1, keepdim=True)
    sizes = torch.tensor(roundings, dtype=torch.float64) * rounding_unit(dtype)
    return expected + direction * sizes[:, None]


EXPECTED = draw(4, WIDTH)


@pytest.fixture(autouse=True)
def tried(monkeypatch):
    """Subjects that conventions were asked for; there are none but those that a test adds."""
    tried = SimpleNamespace(subjects=[], alternatives=[])

    def alternatives(subject):
        tried.subjects.append(subject)
        yield from tried.alternatives

    convention = Convention(name="the test's", kinds=(), alternatives=alternatives)
    monkeypatch.setattr(row_judge, "conventions", lambda kind: [convention])
    return tried


# Errors in roundings.


def test_errors_are_in_roundings_of_the_dtype():
    for dtype in (BF16, F32):
        errors = judge_of(dtype).judge(tap_rows(operation(), off(EXPECTED, [0, 1, 2.5, 0.1], dtype), EXPECTED))
        assert errors.roundings.tolist() == pytest.approx([0, 1, 2.5, 0.1], rel=1e-6)
        assert errors.dtype is dtype
        assert torch.equal(errors.expected, EXPECTED)


def test_rows_that_are_not_finite():
    """Infinite where only the engine's is not; not to be judged where what it should be is not."""
    actual, expected = off(EXPECTED, [1, 1, 1, 1]), EXPECTED.clone()
    actual[1, 3], expected[2, 0], actual[3, 0], expected[3, 5] = torch.nan, torch.inf, torch.inf, torch.nan
    errors = judge_of().judge(tap_rows(operation(), actual, expected))
    assert errors.roundings[0].isfinite()
    assert errors.roundings[1] == math.inf
    assert errors.roundings[2:].isnan().all()
    assert errors.bad.tolist() == [False, True, False, False]
    assert errors.num_bad == 1
    assert errors.typical == pytest.approx(1, rel=1e-6)


def test_an_engines_infinite_row_is_bad_where_its_error_has_no_size():
    actual = EXPECTED.clone()
    actual[0] = torch.inf
    errors = judge_of().judge(tap_rows(operation(), actual.float(), EXPECTED))
    assert errors.roundings.tolist() == [math.inf, *errors.roundings[1:].tolist()]
    nothing = judge_of().judge(tap_rows(operation(), EXPECTED * torch.nan, EXPECTED * torch.nan))
    assert nothing.typical == 0


# In which dtype.


def finer(
    *,
    dtype=BF16,
    actual_dtype=F32,
    expected=EXPECTED,
    kind=Kind.ADD,
    unrecorded=(),
    first_dtype=None,
    roundings=(0.1,) * 4,
):
    """The dtype in which rows are judged that are so many roundings of float32 away."""
    actual = off(expected, roundings, F32).to(actual_dtype)
    return (
        judge_of(dtype)
        .judge(tap_rows(operation(kind), actual, expected, unrecorded=unrecorded), dtype=first_dtype)
        .dtype
    )


def test_finer_tensors_than_the_engines_dtype_are_judged_in_theirs():
    assert finer() is F32
    assert finer(dtype=torch.float16) is F32
    assert finer(dtype=F32) is F32
    assert finer(dtype=torch.float64) is torch.float64


@pytest.mark.parametrize(
    "changed",
    [
        {"actual_dtype": BF16},
        {"actual_dtype": torch.float64},
        {"expected": EXPECTED.float()},
        {"expected": EXPECTED.bfloat16().double(), "roundings": (0.0,) * 4},
        {"kind": Kind.OTHER},
        {"unrecorded": ("between",)},
        {"first_dtype": BF16},
    ],
)
def test_what_is_judged_in_the_engines_dtype_all_the_same(changed):
    assert finer(**changed) is BF16


@pytest.mark.parametrize(("num_bad", "dtype"), [(1, F32), (2, F32), (3, BF16), (4, BF16)])
def test_half_of_the_rows_decide_the_dtype(num_bad, dtype):
    assert finer(roundings=[1000.0] * num_bad + [0.1] * (4 - num_bad)) is dtype
    assert finer(first_dtype=F32, roundings=[1000.0] * num_bad + [0.1] * (4 - num_bad)) is F32


# Bounds.

CONTROL = [0.5, 1.5, 0.0, 6.0]
ADD = KINDS[Kind.ADD].error_model


def judged(kind=Kind.ADD, unrecorded=(), *, control=None, dtype=BF16, first_dtype=None):
    low = None if control is None else off(EXPECTED, control)
    rows = tap_rows(operation(kind), off(EXPECTED, [0.5] * 4), EXPECTED, control=low, unrecorded=unrecorded)
    return judge_of(dtype).judge(rows, dtype=first_dtype)


@pytest.mark.parametrize(
    ("kind", "unrecorded", "factor", "model"),
    [
        (Kind.OTHER, (), CONTROL_FACTOR, None),
        (Kind.OTHER, ("between",), UNRECORDED_FACTOR, None),
        (Kind.ADD, ("between",), UNRECORDED_FACTOR, ADD),
    ],
)
def test_bounds_by_the_control(kind, unrecorded, factor, model):
    errors = judged(kind, unrecorded, control=CONTROL)
    assert errors.control.tolist() == pytest.approx(CONTROL, rel=1e-6)
    torch.testing.assert_close(errors.bound, control_bound(errors.control, BF16, EXPECTED, factor=factor, model=model))
    assert errors.is_bounded_by_control
    without = judged(kind, unrecorded)
    torch.testing.assert_close(
        without.bound, control_bound(torch.zeros(4, dtype=torch.float64), BF16, EXPECTED, factor=factor, model=model)
    )
    assert without.is_bounded_by_control
    assert without.control is None


def test_a_bound_by_the_control_lies_between_sound_engines_and_mistakes():
    """A sound engine's error may be three times its control's; ten times is a mistake (reports/cpu/families.md)."""
    bound = judged(Kind.OTHER, control=[6.0] * 4).bound
    assert bool((bound > 3 * 6.0).all())
    assert bool((bound < 10 * 6.0).all())


def test_a_derived_bound_stands_where_the_control_keeps_to_it():
    derived = derived_bound(ADD, BF16, Sensitivity(), EXPECTED)
    for control in (None, [0.5, 0.1, 0.0, 0.9 * float(derived[0])]):
        errors = judged(control=control)
        assert torch.equal(errors.bound, derived)
        assert not errors.is_bounded_by_control


def test_a_control_beyond_the_derived_bound_widens_it():
    bound = judged(control=CONTROL)
    by_control = control_bound(bound.control, BF16, EXPECTED, factor=CONTROL_FACTOR, model=ADD)
    torch.testing.assert_close(
        bound.bound, torch.maximum(derived_bound(ADD, BF16, Sensitivity(), EXPECTED), by_control)
    )
    assert bound.is_bounded_by_control


def test_one_more_rounding_where_the_engine_rounded_and_the_control_did_not():
    """Zamba 2 computes its gated norm in float32 in a prompt and in float16 in decode: 2.50 roundings were seen."""
    rounded = EXPECTED.to(BF16).to(EXPECTED.dtype)
    actual = torch.cat((EXPECTED[:2] * (1 + 1e-6), rounded[2:]))
    finer = judge_of().judge(tap_rows(operation(Kind.OTHER), actual, EXPECTED, control=EXPECTED))
    assert finer.control.max() == 0
    torch.testing.assert_close(
        finer.bound, largest_rounding(BF16) * torch.tensor([1.0, 1, 2, 2]).double(), atol=1e-3, rtol=0
    )
    alike = judge_of().judge(tap_rows(operation(Kind.OTHER), rounded, EXPECTED, control=rounded))
    expected = largest_rounding(BF16) + CONTROL_FACTOR * alike.control.clamp(min=alike.control.median())
    torch.testing.assert_close(alike.bound, expected, atol=1e-3, rtol=0)


def test_a_control_says_nothing_of_another_dtype_than_its_own():
    errors = judged(control=CONTROL, first_dtype=F32)
    assert errors.control is None
    assert not errors.is_bounded_by_control


# Sensitivities.


def linear(weight, inputs, expected, actual):
    hf = SimpleNamespace(
        module=lambda _path: weight if isinstance(weight, nn.Module) else SimpleNamespace(weight=weight),
        graph=Graph(()),
    )
    judge = judge_of(F32, hf=hf)
    rows = tap_rows(operation(Kind.LINEAR, ("x",)), actual, expected, inputs={"x": inputs})
    return judge, rows


@pytest.mark.parametrize("block", [1, 7, 40, 1 << 18])
@pytest.mark.parametrize("weight_dtype", [torch.float64, F32, BF16])
@pytest.mark.parametrize("is_conv1d", [False, True])
def test_amplification_of_a_product_by_a_loop(monkeypatch, block, weight_dtype, is_conv1d):
    monkeypatch.setattr(projected, "_BLOCK_ELEMENTS", block)
    weight, x = draw(5, WIDTH).to(weight_dtype), draw(3, WIDTH, seed=1)
    expected = x @ weight.double().T
    judge, rows = linear(weight.T if is_conv1d else weight, x.unflatten(1, (2, -1)), expected, expected)
    for _ in range(2):  # the norms of the weight are kept
        sensitivity = judge._sensitivity(rows)
        by_loop = [
            math.sqrt(sum(float(w) ** 2 * float(v) ** 2 for out in weight for w, v in zip(out, row, strict=True)))
            for row in x
        ]
        assert sensitivity.score_sensitivity is None
        assert sensitivity.amplification.tolist() == pytest.approx(
            [size / float(y.norm()) for size, y in zip(by_loop, expected, strict=True)], rel=1e-5
        )


def test_a_product_whose_weight_is_not_seen_is_amplified_by_nothing():
    x, expected = draw(3, WIDTH), draw(3, 5)
    for weight in (None, "packed", draw(5, WIDTH + 1)):
        judge, rows = linear(weight, x, expected, expected)
        assert judge._sensitivity(rows) == Sensitivity()
    assert judge_of()._sensitivity(tap_rows(operation(Kind.NORM), expected, expected)) == Sensitivity()
    assert judge_of()._sensitivity(tap_rows(operation(Kind.ATTENTION), expected, expected)) == Sensitivity()


def test_amplification_is_looked_at_where_it_may_decide():
    x = draw(3, WIDTH)
    weight = draw(5, WIDTH)
    expected, plain = x @ weight.T, derived_bound(KINDS[Kind.LINEAR].error_model, F32, Sensitivity(), torch.ones(3, 5))
    for share, is_asked in ((0.9, False), (1.1, True)):
        judge, rows = linear(weight, x, expected, off(expected, [0.1, share * float(plain[0]), 0.1], F32))
        bound, model = judge.judge(rows), KINDS[Kind.LINEAR].error_model
        bounds = [derived_bound(model, F32, item, expected) for item in (Sensitivity(), judge._sensitivity(rows))]
        torch.testing.assert_close(bound.bound, torch.where(torch.tensor([False, is_asked, False]), *reversed(bounds)))
        assert bool(bounds[1][1] > bounds[0][1])


def test_amplification_is_looked_at_where_the_control_is_out_of_the_plain_bound():
    """Else a module that HF itself computes less exactly would be held to its control, for no reason."""
    x, weight = draw(3, WIDTH), draw(5, WIDTH)
    weight[:, 0], x[:, 0] = 100.0, 0.0
    expected = x @ weight.T
    judge, rows = linear(weight, x, expected, expected.float())
    model = KINDS[Kind.LINEAR].error_model
    plain, whole = (derived_bound(model, F32, item, expected) for item in (Sensitivity(), judge._sensitivity(rows)))
    control = off(expected, ((plain + whole) / 2).tolist(), F32)
    errors = judge.judge(replace(rows, control=control))
    torch.testing.assert_close(errors.bound, whole)
    assert not errors.is_bounded_by_control


def test_the_sensitivity_of_attention_is_that_of_the_rows_places():
    call = AttentionCall(
        path="", module=nn.Module(), query=draw(2, 2, 3, 4), key=draw(2, 1, 3, 4, seed=1),
        value=draw(2, 1, 3, 4, seed=2), mask=None, options={},
    )  # fmt: skip
    whole = attention_sensitivity(call)
    rows = tap_rows(operation(Kind.ATTENTION), EXPECTED[:3], EXPECTED[:3], call=call, places=[5, 0, 4])
    sensitivity = judge_of()._sensitivity(rows)
    for part in ("amplification", "score_sensitivity"):
        assert torch.equal(getattr(sensitivity, part), getattr(whole, part).flatten()[[5, 0, 4]].double())


# Conventions.


def rounding(name, expected, *, allowance=None, model=ADD):
    return Rounding(name=name, model=model, expected=lambda: expected, allowance=allowance)


BAD = (30.0, 0.5, 40.0, 0.5)


def under(tried, *alternatives, roundings=BAD, unrecorded=()):
    tried.alternatives = list(alternatives)
    return judge_of().judge(tap_rows(operation(), off(EXPECTED, roundings), EXPECTED, unrecorded=unrecorded))


def test_conventions_are_tried_only_where_a_row_is_bad(tried):
    under(tried, roundings=[0.5] * 4)
    under(tried, unrecorded=("between",))
    assert tried.subjects == []
    assert under(tried).convention is None
    assert len(tried.subjects) == 1


def test_the_convention_with_the_fewest_bad_rows_is_the_engines_and_of_these_the_nearest(tried):
    def with_bad(*roundings):
        return off(off(EXPECTED, BAD), roundings, seed=4)

    none, one = with_bad(1, 1, 1, 1), with_bad(1, 50, 0, 0)
    nearest, two = with_bad(1, 0.5, 0, 1), with_bad(50, 50, 0, 0)
    assert under(tried, rounding("two", two)).convention is None, "no fewer than before"
    assert under(tried, rounding("one", one), rounding("two", two)).convention == "one"
    assert under(tried, rounding("one", one), rounding("none", none)).convention == "none"
    errors = under(tried, rounding("none", none), rounding("nearest", nearest), rounding("one", one))
    assert errors.convention == "nearest"
    assert torch.equal(errors.expected, nearest)
    # In roundings of what the convention expects, which is not as long as what the truth does.
    assert errors.roundings.tolist() == pytest.approx([1, 0.5, 0, 1], rel=0.2)
    assert errors.num_bad == 0


def test_the_allowance_of_a_convention_is_added_to_its_bound(tried):
    expected, allowance = off(EXPECTED, BAD), torch.tensor([1.0, 7.0, 0.0, 3.0], dtype=torch.float64)
    coarse = ErrorModel(roundings=3, accumulation=2)
    bound = under(tried, rounding("some", expected, allowance=allowance, model=coarse))
    torch.testing.assert_close(bound.bound, derived_bound(coarse, BF16, Sensitivity(), expected) + allowance)
    assert bound.allowance == 7
    without = under(tried, rounding("some", expected, model=coarse))
    torch.testing.assert_close(without.bound, bound.bound - allowance)
    assert without.allowance == 0
    empty = row_judge._under(
        rounding("none", EXPECTED[:0], allowance=allowance[:0]), tap_rows(operation(), EXPECTED[:0], EXPECTED[:0]),
        judge_of()._judge_in(tap_rows(operation(), EXPECTED[:0], EXPECTED[:0]), BF16), Sensitivity(),
    )  # fmt: skip
    assert empty.allowance == 0


def test_a_row_that_cannot_be_judged_cannot_be_under_a_convention_either(tried):
    expected, actual = EXPECTED.clone(), off(EXPECTED, BAD)
    expected[1, 0] = torch.nan
    actual[1, 0] = torch.nan
    tried.alternatives = [rounding("some", off(EXPECTED, BAD))]
    control = off(EXPECTED, CONTROL)
    errors = judge_of().judge(tap_rows(operation(), actual, expected, control=control))
    assert errors.convention == "some"
    assert errors.roundings.isnan().tolist() == [False, True, False, False]
    assert errors.control is not None
    assert errors.is_bounded_by_control


def test_what_conventions_are_given(tried):
    x, values = draw(200, WIDTH, seed=3), draw(3, 2, seed=4)
    recorded = {
        "other": RecordedRows(places=torch.tensor([0, 7, 30]), rows=values),
        "unusable": RecordedRows(places=torch.tensor([7, 30, 0]), rows=values),
        "partly": RecordedRows(places=torch.tensor([7]), rows=values[:1]),
    }
    rows = tap_rows(
        operation(Kind.ADD, ("x",)), off(EXPECTED, BAD)[:3].float(), EXPECTED[:3], inputs={"x": x},
        places=[30, 0, 7], recorded=recorded, num_tokens=25,
    )  # fmt: skip
    judge = judge_of(usable=["other", "partly", "nowhere"], num_ranks=2)
    judge.judge(rows, dtype=BF16)
    (subject,) = tried.subjects
    assert (subject.operation, subject.dtype, subject.declared) == (rows.operation, BF16, Numerics(num_ranks=2))
    assert torch.equal(subject.actual, rows.actual)
    assert torch.equal(subject.expected, rows.expected)
    assert subject.rows.tolist() == [30, 0, 7]
    assert subject.positions.tolist() == [5, 0, 7]
    assert torch.equal(subject.inputs[0], x[[30, 0, 7]])
    assert torch.equal(subject.recorded("other"), values[[2, 0, 1]])
    assert [subject.recorded(tap) for tap in ("unusable", "partly", "nowhere")] == [None] * 3
    attention = tap_rows(operation(Kind.ATTENTION, ("q", "k")), off(EXPECTED, BAD), EXPECTED)
    judge.judge(attention, dtype=BF16)
    assert tried.subjects[1].inputs == []
