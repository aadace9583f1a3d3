"""Attention whose mask, scale or softmax is at another place, against sums that are written out key by key."""

import math

import pytest
import torch

from harness.judge.explain.attention import masks, softmax
from harness.judge.explain.attention.softmax import fitted_factor

from ..toy_attention import KEY, PLACES, VALUE, N, Q, Toy, step_of
from ..toys import assert_outputs, by_cause

SCALE = 0.4
HEADS = (0, 0, 0, 1, 1, 1)


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    return Toy(tmp_path_factory.mktemp("toy") / "r", scale=SCALE)


def computed(place):
    """Return the places that exist in the step of one."""
    request = place[0]
    return [another for another in PLACES if another[0] == request and step_of(another) <= step_of(place)]


def weighted(toy, weight):
    """Return rows whose heads weigh the values by `weight` of the place, the head and what it reads."""

    def row(place):
        heads = []
        for head in range(N):
            values = [
                weight(place, head, another) * toy.tensors[VALUE][another][HEADS[head]] for another in computed(place)
            ]
            heads.append(torch.stack(values).sum(dim=0))
        return torch.cat(heads)

    return toy.contexts(PLACES, row)


def score(toy, place, head, key_place, scale=SCALE):
    return scale * float(toy.tensors[Q][place][head] @ toy.tensors[KEY][key_place][HEADS[head]])


def softmax_of(toy, change):
    """Return weights whose scores `change` makes of the score and of whether the key is masked."""

    def weight(place, head, another):
        shares = {item: math.exp(change(score(toy, place, head, item), item[1] > place[1])) for item in computed(place)}
        return shares[another] / sum(shares.values())

    return weight


def test_masked_scores_that_take_part(toy):
    whole = softmax_of(toy, lambda score, _is_masked: score)
    expected = {
        "the mask is applied after the softmax": weighted(
            toy, lambda place, head, another: whole(place, head, another) * (another[1] <= place[1])
        ),
        "masked scores are set to 0 instead of left out": weighted(
            toy, softmax_of(toy, lambda score, is_masked: 0.0 if is_masked else score)
        ),
    }
    for bias in (1, 10, 100):
        lowered = softmax_of(toy, lambda score, is_masked, bias=bias: score - bias * is_masked)
        expected[f"masked scores are lowered by {bias} instead of left out"] = weighted(toy, lowered)
    assert_outputs(masks.mask_otherwise, toy.failure(), expected)


def test_rows_that_see_all_there_is_say_nothing_of_the_mask(toy):
    last = [place for place in PLACES if place == max(computed(place))]
    assert list(masks.mask_otherwise(toy.failure(places=last))) == []


def test_a_scale_of_the_probabilities(toy):
    expected = toy.contexts(PLACES, lambda place: toy.context(place, scale=1.0) * SCALE)
    cause = "the softmax scale is applied after the softmax"
    assert_outputs(softmax.scaled_after, toy.failure(), {cause: expected})


def test_a_softmax_over_the_heads(toy):
    def weight(place, head, another):
        if another[1] > place[1]:
            return 0.0
        shares = [math.exp(score(toy, place, item, another)) for item in range(N)]
        return shares[head] / sum(shares)

    def of_the_queries(place, head, another):
        if another[1] > place[1]:
            return 0.0
        queries = [item for item in computed(place) if step_of(item) == step_of(place) and another[1] <= item[1]]
        return math.exp(score(toy, place, head, another)) / sum(math.exp(score(toy, q, head, another)) for q in queries)

    heads = "the softmax runs over the heads instead of the keys"
    queries = "the softmax runs over the queries of a step instead of the keys"
    expected = {heads: weighted(toy, weight), queries: weighted(toy, of_the_queries)}
    assert_outputs(softmax.over_the_heads, toy.failure(), expected)


SINKS = torch.tensor([0.5, -1.0, 2.0, 0.0, 1.0, -0.25], dtype=torch.float64)
ADDED = "attention sinks take part in the softmax, which the model does not have"
OTHERS = "the attention sinks are others than the model's"
ONE = "one is added to the sum of the exponentials: a key of zeros, or a sink whose logit is 0"


def made(tmp_path_factory, **parts):
    return Toy(tmp_path_factory.mktemp("toy") / "r", **parts)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return made(tmp_path_factory)


@pytest.fixture(scope="module")
def capped(tmp_path_factory):
    return made(tmp_path_factory, softcap=20.0)


@pytest.fixture(scope="module")
def sunk(tmp_path_factory):
    return made(tmp_path_factory, sinks=SINKS)


def with_cap(toy, cap):
    return lambda place: toy.context(place, cap=cap)


def with_sinks(toy, logits):
    return lambda place: toy.context(place, extra=[math.exp(x) for x in logits])


def test_what_the_model_has_and_is_left_out(plain, capped, sunk):
    assert by_cause(softmax.left_out, plain.failure()) == {}
    without = plain.contexts(PLACES)
    assert_outputs(softmax.left_out, capped.failure(), {"the soft cap of the scores is left out": without})
    assert_outputs(softmax.left_out, sunk.failure(), {"the attention sinks are left out": without})


@pytest.mark.parametrize("cap", [0.3, 1.5, 7.25])
def test_a_cap_that_the_model_does_not_have(plain, cap):
    hypotheses = by_cause(softmax.other_cap, plain.failure(with_cap(plain, cap)))
    expected = dict.fromkeys((15.0, 20.0, 30.0, 50.0, 100.0), 0) | {cap: 1}
    names = {
        item: f"a soft cap of {item:g} is applied to the scores, which the model does not have" for item in expected
    }
    assert set(hypotheses) == set(names.values())
    for key, num_fitted in expected.items():
        assert hypotheses[names[key]].num_fitted == num_fitted
        torch.testing.assert_close(hypotheses[names[key]].output, plain.contexts(PLACES, with_cap(plain, key)))


def test_a_cap_that_models_have_is_not_fitted_again(plain):
    hypotheses = by_cause(softmax.other_cap, plain.failure(with_cap(plain, 15.0)))
    assert len(hypotheses) == 5
    assert {item.num_fitted for item in hypotheses.values()} == {0}


def test_another_cap_than_the_models(capped):
    failure = capped.failure(with_cap(capped, 0.8), expected=with_cap(capped, 20.0))
    hypotheses = by_cause(softmax.other_cap, failure)
    assert set(hypotheses) == {f"the soft cap of the scores is {cap} instead of 20" for cap in (15, 30, 50, 100, 0.8)}
    torch.testing.assert_close(hypotheses["the soft cap of the scores is 0.8 instead of 20"].output, failure.actual)


def test_a_cap_is_fitted_to_the_four_rows_that_see_most(plain):
    places = [(1, p) for p in range(7)] + [(0, p) for p in range(9)]
    most = {(0, p) for p in (5, 6, 7, 8)}
    actual = plain.contexts(places, lambda place: plain.context(place, cap=0.7 if place in most else 3.0))
    hypotheses = by_cause(softmax.other_cap, plain.failure(actual, places))
    assert "a soft cap of 0.7 is applied to the scores, which the model does not have" in hypotheses


def test_sinks_that_the_model_does_not_have(plain):
    logits = [0.3, -2.0, 1.0, 0.125, 2.0, -0.5]
    failure = plain.failure(with_sinks(plain, logits))
    hypothesis = by_cause(softmax.other_sinks, failure)[ADDED]
    torch.testing.assert_close(hypothesis.output, failure.actual)
    assert hypothesis.num_fitted == N
    assert hypothesis.detail == "their logits, head by head: 0.3, -2, 1, 0.125, 2, -0.5"


def test_one_more_in_the_sum(plain):
    failure = plain.failure(with_sinks(plain, [0.0] * N))
    hypotheses = by_cause(softmax.other_sinks, failure)
    assert set(hypotheses) == {ONE, ADDED}
    torch.testing.assert_close(hypotheses[ONE].output, failure.actual)
    assert hypotheses[ONE].num_fitted == 0


@pytest.mark.parametrize(
    ("places", "is_said"), [([(0, 0), (0, 3)], True), ([(0, 1), (0, 3)], False), ([(0, 2), (1, 0)], True)]
)
def test_one_more_is_off_from_the_first_row_on(plain, places, is_said):
    failure = plain.failure(with_sinks(plain, [0.0] * N), places)
    assert (ONE in by_cause(softmax.other_sinks, failure)) == is_said


@pytest.mark.parametrize(("position", "is_said"), [(2, True), (3, False)])
def test_the_first_row_may_come_behind_a_prefix_that_was_there(plain, position, is_said):
    """Positions 0 and 1 were in the cache before."""
    failure = plain.failure(with_sinks(plain, [0.0] * N), [(0, position), (0, 6)])
    (view,) = failure.views
    view.key_step[:2] = -1
    assert (ONE in by_cause(softmax.other_sinks, failure)) == is_said


@pytest.mark.parametrize("shift", [0.7, -1.25])
def test_sinks_that_are_all_off_by_one_number(sunk, shift):
    failure = sunk.failure(with_sinks(sunk, (SINKS + shift).tolist()), expected=with_sinks(sunk, SINKS.tolist()))
    hypotheses = by_cause(softmax.other_sinks, failure)
    cause = f"the logits of the attention sinks are off by {shift:+.3g}"
    assert set(hypotheses) == {cause, OTHERS}
    torch.testing.assert_close(hypotheses[cause].output, failure.actual, rtol=1e-6, atol=1e-7)
    assert (hypotheses[cause].num_fitted, hypotheses[OTHERS].num_fitted) == (1, N)


@pytest.mark.parametrize(("spread", "is_one"), [(0.018, True), (0.022, False)])
def test_shifts_are_one_up_to_a_small_spread(sunk, spread, is_one):
    shifts = torch.tensor([0.5, 0.5, 0.5, 0.5, 0.5 + spread, 0.5], dtype=torch.float64)
    failure = sunk.failure(with_sinks(sunk, (SINKS + shifts).tolist()), expected=with_sinks(sunk, SINKS.tolist()))
    assert any("are off by" in cause for cause in by_cause(softmax.other_sinks, failure)) == is_one


def test_other_sinks_head_by_head(sunk):
    shifts = torch.tensor([1.0, -0.5, 0.25, 2.0, -1.0, 0.5], dtype=torch.float64)
    failure = sunk.failure(with_sinks(sunk, (SINKS + shifts).tolist()), expected=with_sinks(sunk, SINKS.tolist()))
    ((cause, hypothesis),) = by_cause(softmax.other_sinks, failure).items()
    assert (cause, hypothesis.num_fitted) == (OTHERS, N)
    assert hypothesis.detail == "their logits are off, head by head, by 1, -0.5, 0.25, 2, -1, 0.5"
    torch.testing.assert_close(hypothesis.output, failure.actual)


def test_one_row_that_is_off_otherwise_does_not_decide(sunk):
    """The median over the rows is taken."""
    shifted = sunk.contexts(PLACES, with_sinks(sunk, (SINKS + 1).tolist()))
    shifted[2] *= 0.3
    hypotheses = by_cause(softmax.other_sinks, sunk.failure(shifted, expected=with_sinks(sunk, SINKS.tolist())))
    assert "the logits of the attention sinks are off by +1" in hypotheses


def test_no_sink_turns_a_row_around_or_takes_more_than_all(plain, sunk):
    actual = plain.contexts(PLACES)
    actual[4, :4] *= -1
    assert ADDED not in by_cause(softmax.other_sinks, plain.failure(actual))
    grown = 2.5 * sunk.contexts(PLACES)  # by more than no sinks at all would give
    assert by_cause(softmax.other_sinks, sunk.failure(grown, expected=with_sinks(sunk, SINKS.tolist()))) == {}
    assert ADDED not in by_cause(softmax.other_sinks, plain.failure(1.1 * plain.contexts(PLACES)))


@pytest.mark.parametrize("start", [0.01, 8.0])
@pytest.mark.parametrize("logarithm", [-4.0, -1.23456789, 0.0, 0.06, 3.99])
def test_a_number_is_found_within_fifty_times_more_or_less(start, logarithm):
    meant = start * math.exp(logarithm)
    actual = fitted_factor(start, lambda number: abs(number - meant))
    assert math.isclose(actual, meant, rel_tol=1e-8)


def test_the_deeper_of_two_valleys_is_found():
    def error(number):
        return min(0.1 + abs(math.log(number)), abs(math.log(number) - 2.5))

    assert math.isclose(fitted_factor(1.0, error), math.exp(2.5), rel_tol=1e-8)


def test_the_rows_of_each_view(tmp_path):
    failure = Toy(tmp_path / "r").failure(torch.arange(len(PLACES) * 24.0, dtype=torch.float64).view(-1, 24))
    first, second = (failure.actual[failure.rows_of(view)] for view in failure.views)
    assert len(first) == len(failure.views[0].rows)
    assert torch.equal(torch.cat((first, second)), failure.actual)
    assert torch.equal(failure.over_views(lambda view: view.query.flatten(1)),
                       torch.cat([view.query.flatten(1) for view in failure.views]))  # fmt: skip
    with pytest.raises(ValueError, match="not of this operation"):
        failure.rows_of(failure.views[0].select(torch.arange(2)))
