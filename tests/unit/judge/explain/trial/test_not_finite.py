"""Rows that are not finite: what overflows, at both sides of its limit, and what was read that nobody wrote."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from harness.formats.taps import Kind, Operation
from harness.judge.explain.trial.not_finite import not_finite

from ..toy_attention import BLOCK, K_CACHE, KEY, OUT, PLACES, READBACK, STEPS, TABLES, Q, Toy, step_of
from ..toys import ToyModel, failure_of, linear, random

TAP, NORM = "model.layers.0.mlp.up_proj", "model.layers.0.norm"
HALF = torch.finfo(torch.float16).max
NOTHING = "not finite though nothing in it can overflow"
ROWS, WIDTH = 5, 8


def reason(failure, roundings=None):
    with torch.no_grad():
        hypotheses = not_finite(failure if roundings is None else replace(failure, roundings=roundings), "every row")
    assert (hypotheses.scope, hypotheses.residual_after, hypotheses.num_explained) == ("every row", None, 0)
    return hypotheses


def broken(expected, where):
    actual = expected.clone()
    actual[where] = torch.inf
    return actual


def of(expected, where, kind=Kind.LINEAR, *inputs, dtype=torch.float16, weight=None, tap=TAP):
    operation = Operation(tap=tap, kind=kind, inputs=("x",), source=tap)
    modules = {tap: nn.Identity() if weight is None else linear(weight)}
    return failure_of(
        operation, broken(expected, where), expected, *inputs, model=ToyModel(operation, modules=modules), dtype=dtype
    )


BIG = torch.zeros(ROWS, WIDTH, dtype=torch.bool)
BIG[1, 2] = BIG[3, 5] = BIG[3, 6] = True


def test_what_is_told_of_the_rows():
    explanation = reason(of(torch.where(BIG, 1.01 * HALF, 1.0), BIG), torch.tensor([3.0, 7.0, 5.0, 1.0, 9.0]))
    assert (explanation.residual_before, explanation.num_rows, explanation.is_cause) == (5.0, 5, True)


@pytest.mark.parametrize("kind", [Kind.LINEAR, Kind.ADD, Kind.OTHER])
@pytest.mark.parametrize("sign", [1, -1])
def test_what_should_come_out_overflows(kind, sign):
    inputs = [torch.ones(ROWS, WIDTH, dtype=torch.float64)] if kind is Kind.LINEAR else []
    explanation = reason(of(torch.where(BIG, sign * 70_000.0, 1.0), BIG, kind, *inputs))
    assert (explanation.cause, explanation.is_cause) == ("overflow of float16", True)
    assert explanation.detail == "what should come out reaches 7e+04, the limit is 6.55e+04"


def test_the_dtype_of_the_engine_is_tried_first_and_float16_behind_it():
    explanation = reason(of(torch.where(BIG, 70_000.0, 1.0), BIG, Kind.ADD, dtype=torch.bfloat16))
    assert explanation.cause == "overflow of float16"
    explanation = reason(of(1.0 + BIG * torch.tensor(3.5e38, dtype=torch.float64), BIG, Kind.ADD, dtype=torch.bfloat16))
    assert explanation.cause == "overflow of bfloat16"


@pytest.mark.parametrize(("value", "is_overflow"), [(HALF, False), (1.0001 * HALF, True)])
def test_the_limit_itself_is_a_number(value, is_overflow):
    explanation = reason(of(torch.where(BIG, value, 1.0).double(), BIG, Kind.ADD))
    assert (explanation.cause == "overflow of float16") == is_overflow
    if not is_overflow:
        assert (explanation.cause, explanation.is_cause) == (NOTHING, False)
        assert explanation.detail == "its largest element should be 6.55e+04"


def flags(count):
    where = torch.zeros(ROWS * WIDTH, dtype=torch.bool)
    where[:count] = True
    return where.view(ROWS, WIDTH)


@pytest.mark.parametrize(
    ("predicted", "broken_flags", "is_overflow"),
    [(20, 20, True), (18, 20, True), (17, 20, False), (20, 18, True), (20, 17, False)],
)
def test_nine_in_ten_must_be_the_same_elements(predicted, broken_flags, is_overflow):
    expected = torch.where(flags(predicted), 70_000.0, 1.0).double()
    assert (reason(of(expected, flags(broken_flags), Kind.ADD)).cause == "overflow of float16") == is_overflow


# Sums.

SUM = torch.ones(2, 4, dtype=torch.float64)


@pytest.mark.parametrize(("size", "is_overflow"), [(100.0, False), (200.0, True)])
def test_partial_sums_of_a_product_may_overflow(size, is_overflow):
    """Terms of both signs that cancel: what comes out is small."""
    x = torch.tensor([[size, -size, 1.0], [0.5, 0.5, 1.0]], dtype=torch.float64)
    weight = torch.tensor([[200.0, 200.0, 1.0], [1.0, 1.0, 2.0]], dtype=torch.float64)
    failure = of(x @ weight.T, torch.tensor([[True, False], [False, False]]), Kind.LINEAR, x, weight=weight)
    explanation = reason(failure)
    assert (explanation.cause == "overflow of float16") == is_overflow
    if is_overflow:
        assert explanation.detail == "a sum of terms reaches 8e+04, the limit is 6.55e+04"


def test_not_every_sum_that_is_too_large_overflows():
    x = torch.full((2, 3), 300.0, dtype=torch.float64)
    x[:, 1] = -300
    weight = torch.full((4, 3), 200.0, dtype=torch.float64)
    weight[:, 2] = 0
    explanation = reason(of(x @ weight.T, flags(1)[:2, :4], Kind.LINEAR, x, weight=weight))
    assert explanation.cause == "overflow of float16"


def test_a_product_of_another_width_has_no_sum_of_terms():
    x = torch.full((2, 3), 300.0, dtype=torch.float64)
    explanation = reason(
        of(SUM, flags(1)[:2, :4], Kind.LINEAR, x, weight=torch.full((4, 5), 300.0, dtype=torch.float64))
    )
    assert explanation.cause == NOTHING


@pytest.mark.parametrize(("size", "is_overflow"), [(120.0, False), (130.0, True)])
def test_the_squares_of_a_norms_row(size, is_overflow):
    """Four of 130 squared are 67,600: the whole row is lost."""
    x = torch.ones(3, 4, dtype=torch.float64)
    x[1] = size
    where = torch.zeros(3, 4, dtype=torch.bool)
    where[1] = True
    explanation = reason(of(torch.ones(3, 4, dtype=torch.float64), where, Kind.NORM, x, tap=NORM))
    assert (explanation.cause == "overflow of float16") == is_overflow
    if is_overflow:
        assert explanation.detail == "the sum of the squares reaches 6.76e+04, the limit is 6.55e+04"


# Attention.


FINITE = "keys, values and scores of the request are finite"


def ones(place):
    return torch.ones(24, dtype=torch.float64)


def with_scores(folder, factor, **parts):
    """Queries of row (0, 5) are so large that its scores, before they are scaled by 0.4, reach `factor`."""
    toy = Toy(folder, **parts)
    query = toy.tensors[Q][0, 5]
    query[1] = 0
    keys = torch.stack([toy.tensors[KEY][0, p][0] for p in range(6)])
    query[1] = keys[2] * factor / (keys @ keys[2]).abs().max()
    return toy


@pytest.mark.parametrize(
    ("factor", "what"),
    [
        (2.6 * HALF, "a score reaches 6.81e+04"),
        (1.2 * HALF, "a score before it is scaled reaches 7.86e+04"),
        (0.9 * HALF, "the sum of exponentials, whose maximum is not subtracted, reaches inf"),
        (40.0, "the sum of exponentials, whose maximum is not subtracted, reaches 9.07e+06"),
        (20.0, None),
    ],
)  # fmt: skip
def test_scores_of_a_head_that_overflow(tmp_path, factor, what):
    toy = with_scores(tmp_path / "r", factor)
    places = [(0, 4), (0, 5), (1, 4)]
    actual = torch.ones(3, 24, dtype=torch.float64)
    actual[1, 4:8] = torch.nan
    failure = toy.failure(
        actual, places, expected=lambda place: torch.ones(24, dtype=torch.float64), dtype=torch.float16
    )
    explanation = reason(failure)
    assert (explanation.cause == "overflow of float16") == (what is not None)
    assert explanation.detail == (
        f"{what}, the limit is 6.55e+04" if what else "keys, values and scores of the request are finite"
    )


def test_scores_that_a_row_does_not_see_do_not_overflow(tmp_path):
    toy = Toy(tmp_path / "r", window=2)
    toy.tensors[Q][0, 5][1] = 1e5 * toy.tensors[KEY][0, 2][0]
    keys = [float(toy.tensors[Q][0, 5][1] @ toy.tensors[KEY][0, p][0]) for p in (4, 5)]
    toy.tensors[Q][0, 5][1] /= max(abs(key) for key in keys) / 10
    actual = torch.ones(1, 24, dtype=torch.float64)
    actual[0, 4:8] = torch.nan
    failure = toy.failure(
        actual, [(0, 5)], expected=lambda place: torch.ones(24, dtype=torch.float64), dtype=torch.float16
    )
    assert reason(failure).cause.startswith("not finite though all that it should read is")


def lost(toy, places):
    actual = torch.full((len(places), 24), torch.nan, dtype=torch.float64)
    return toy.failure(actual, places, expected=ones)


UNKNOWN = "not finite though all that it should read is: reads past the context length, or sees no key at all"
PAST = "reads past the context length: slots that nobody wrote"
ALONE = [place for place in PLACES if len(STEPS[step_of(place)][place[0]]) == 1]
"""Rows that are their request's only ones in their step, as in decode."""
ROOM = [place for place in ALONE if (place[1] + 1) % BLOCK]
"""Those after which their block has a free slot."""


@pytest.mark.parametrize(
    ("places", "cause"),
    [
        (ROOM, PAST),
        (ROOM[1:], UNKNOWN),
        (ALONE, UNKNOWN),
        ([(0, 4), (0, 5)], UNKNOWN),
    ],
)
def test_rows_whose_next_slot_is_free(toy, places, cause):
    assert set(ALONE) > set(ROOM), "or it would say nothing"
    explanation = reason(lost(toy, places))
    assert (explanation.cause, explanation.is_cause) == (cause, cause == PAST)
    rows = "; the rows whose next slot exists and is not written yet, and no others"
    assert explanation.detail == FINITE + (rows if cause == PAST else "")


def test_rows_of_prompts_whose_next_slot_is_free(toy):
    """Where one of the wrong rows is not alone in its step, rows of prompts count as well."""
    free = []
    for place in PLACES:
        last = max(p for r, p in PLACES if r == place[0] and step_of((r, p)) == step_of(place))
        free += [place] if (last + 1) % BLOCK else []
    assert reason(lost(toy, free)).cause == PAST
    assert reason(lost(toy, free[1:])).cause == UNKNOWN


def test_without_slots_it_is_not_known_which_are_free(tmp_path):
    assert reason(lost(Toy(tmp_path / "r", is_slotted=False), ROOM)).cause == UNKNOWN


def test_a_slot_that_somebody_wrote_is_not_free(tmp_path):
    """Request 0 has its last block from a request that left something there: after each row there is content."""
    toy = Toy(tmp_path / "r", tables=lambda request, step: {0: [3, 1, 2], 1: [2, 4, 6]}[request])
    assert reason(lost(toy, [(0, 6)])).cause != PAST


def test_a_cache_that_holds_something_else_comes_first(tmp_path):
    toy = Toy(tmp_path / "r", tables=lambda request, step: {0: [3, 1, 2], 1: [2, 4, 6]}[request])
    explanation = reason(lost(toy, [(1, 6)]))
    assert explanation.cause.startswith("a block belongs to two requests of different content at once")
    assert explanation.detail.startswith(
        "request 1 in step 3; written last, by position: 0: request 0, position 6, step 2"
    )
    assert (explanation.provenance.request, explanation.provenance.position) == (1, 0)


def test_keys_that_are_not_finite_when_read_back(tmp_path, toy):
    read = {place: toy.tensors[KEY][place] for place in PLACES}
    assert reason(lost(Toy(tmp_path / "a", readback={K_CACHE: read}), [(0, 4)])).cause == UNKNOWN
    read[0, 2] = read[0, 2] * torch.inf
    replayed = Toy(tmp_path / "b", readback={K_CACHE: read})
    cause = "reads slots of its own history that are not finite when read back: see k_cache"
    assert reason(lost(replayed, [(0, 4)])).cause == cause
    assert reason(lost(replayed, [(0, 1)])).cause == UNKNOWN, "after what it reads"
    assert reason(lost(replayed, [(1, 4)])).cause == UNKNOWN, "of another request"
    assert reason(lost(replayed, [(1, 4), (0, 4)])).cause == cause


# The cache.


def elsewhere(request, step):
    return TABLES[request] if step < READBACK else [0, 8, 9]


@pytest.mark.parametrize("is_unwritten", [True, False])
@pytest.mark.parametrize(
    ("places", "where"), [([(0, 1), (0, 4)], ""), ([(0, 3), (0, 6)], ", at a block boundary (slot mapping)")]
)
@pytest.mark.parametrize("is_whole", [True, False])
def test_slots_that_are_not_finite(tmp_path, is_unwritten, places, where, is_whole):
    nan = torch.full((2, 4), torch.nan, dtype=torch.float64)
    toy = Toy(
        tmp_path / "r",
        readback={K_CACHE: dict.fromkeys(PLACES, nan)},
        **({"tables": elsewhere} if is_unwritten else {}),
    )

    def actual(place):
        explanation = nan.clone()
        if place == places[1] and not is_whole:
            explanation[0, 1] = 1
        return explanation

    explanation = reason(toy.cache_failure(actual, places))
    if is_unwritten:
        assert (explanation.cause, explanation.is_cause) == (
            f"never written: no recorded step wrote the slot{where}",
            True,
        )
    else:
        assert (explanation.cause, explanation.is_cause) == (f"the slot holds what no recorded row has{where}", False)
        nothing = "NaN throughout, as memory that was never written may"
        assert explanation.detail == (nothing if is_whole else "some of it is not finite")
    assert (explanation.provenance.request, explanation.provenance.position) == places[0]


@pytest.mark.parametrize(
    ("size", "cause"),
    [(500.0, "overflow of float8_e4m3fn"), (60_000.0, "overflow of float8_e5m2"), (70_000.0, "overflow of float16")],
)
def test_a_cache_in_8_bits_overflows_early(tmp_path, size, cause):
    """Each of them at some places: those that the smaller dtypes hold are finite."""
    largest = {"float8_e4m3fn": 448, "float8_e5m2": 57344, "float16": 65504}[cause.split()[-1]]
    toy = Toy(tmp_path / "r", readback={K_CACHE: dict.fromkeys(PLACES, torch.zeros(2, 4, dtype=torch.float64))})
    for number, place in enumerate(PLACES):
        toy.tensors[KEY][place][:] = 0.99 * largest
        toy.tensors[KEY][place][0, number % 4] = size

    def actual(place):
        written = toy.tensors[KEY][place]
        return torch.where(written.abs() > largest, torch.nan, written)

    explanation = reason(toy.cache_failure(actual))
    assert explanation.cause == cause
    another = Operation(tap=OUT, kind=Kind.ADD)
    expected = random(2, 4)
    expected[0, 0] = size
    if "float8" in cause:
        assert reason(failure_of(another, broken(expected, expected == size), expected)).cause == NOTHING
