"""What explanations of scores and softmax fit, and where they say nothing; axes, dtypes and pieces of the softmax."""

import math
from types import SimpleNamespace

import pytest
import torch

from harness.judge.explain.attention import masks, softmax
from harness.judge.explain.attention.softmax import fitted_factor

from ..toy_attention import BLOCK, PLACES, N, Toy, step_of
from ..toys import assert_outputs, by_cause, named
from .test_scores import (
    ADDED,
    FOREIGN_CAP,
    ONE,
    OTHERS,
    PADDING,
    SCALE,
    SINKS,
    SPANS,
    attended,
    begin_of,
    capped,
    failure_of,
    masked,
    plus,
    scores_of,
)

LATE = [place for place in PLACES if place[0] == 0][-2:]


@pytest.fixture(scope="module")
def toys(tmp_path_factory, toy):
    parts = {"windowed": {"window": 3}, "capped": {"softcap": 20.0}, "sunk": {"sinks": SINKS}}
    return {"plain": toy, **{name: Toy(tmp_path_factory.mktemp("toy") / "r", **part) for name, part in parts.items()}}


def test_the_definition(toy):
    failure = toy.failure()
    torch.testing.assert_close(torch.cat([view.attend() for view in failure.views]), failure.expected)
    torch.testing.assert_close(attended(toy), failure.expected)


def test_spans_are_vague_beside_a_window_and_need_two_tokens(toy, toys):
    fitted = [item for item in masks.wrong_window(toys["windowed"].failure()) if item.num_fitted]
    assert [item.is_vague for item in fitted] == [True] * len(SPANS)
    assert by_cause(masks.wrong_window, toy.failure(places=[(0, 0)])) == {}


@pytest.mark.parametrize("number", [1, 8])
@pytest.mark.parametrize("cause", SPANS)
def test_the_shortest_and_the_longest_span(toy, cause, number):
    failure = toy.failure(attended(toy, sees=SPANS[cause](number)))
    hypotheses = by_cause(masks.wrong_window, failure)
    assert len(hypotheses) == len(SPANS)
    torch.testing.assert_close(hypotheses[cause.format(number)].output, failure.actual)


def test_a_fitted_cause_with_the_numbers_of_an_unfitted_one_is_dropped(toy):
    """A row that sees its last token alone sees the last piece of any."""
    explanation = named(toy.failure(attended(toy, sees=SPANS["a row sees only the last {} tokens"](1))))
    assert (explanation.cause, explanation.num_fitted) == ("split KV: only the last piece counts", 0)


def test_masked_scores_that_are_lowered_by_so_much_that_no_row_shows_it(toy):
    hypotheses = by_cause(masks.mask_otherwise, toy.failure())
    lowered = attended(toy, **masked(lambda scores: scores - 100))
    torch.testing.assert_close(hypotheses["masked scores are lowered by 100 instead of left out"].output, lowered)


def test_rows_that_see_all_there_is_say_nothing_of_the_mask(toy):
    last = [(r, p) for r, p in PLACES if (r, p + 1) not in PLACES or step_of((r, p + 1)) > step_of((r, p))]
    assert list(masks.mask_otherwise(toy.failure(places=last))) == []


# Keys of zeros.


@pytest.mark.parametrize(
    ("places", "number", "num_fitted", "is_cause"),
    [
        (PLACES, lambda row: 3, 1, True),
        (PLACES, lambda row: row.place[1] % 3, len(PLACES), False),
        (LATE, lambda row: 3, 1, True),
        (LATE[:1], lambda row: 3, 1, False),  # one row has no number in common with others
    ],
)
def test_a_number_of_keys_of_zeros(toy, places, number, num_fitted, is_cause):
    failure = toy.failure(attended(toy, places=places, **plus(number)), places)
    (hypothesis,) = masks.padding_attended(failure)
    assert hypothesis.cause == f"{PADDING}: keys of zeros take part"
    assert (hypothesis.num_fitted, hypothesis.is_cause) == (num_fitted, is_cause)
    torch.testing.assert_close(hypothesis.output, failure.actual)
    shown = ", ".join(str(number(SimpleNamespace(place=place))) for place in places[:6])
    assert hypothesis.detail == f"number of them, row by row: {shown}"


def test_rows_that_grew_or_point_the_other_way_have_no_keys_of_zeros(toy):
    right = toy.contexts(PLACES)
    (hypothesis,) = masks.padding_attended(toy.failure(1.5 * right))
    assert hypothesis.detail == "number of them, row by row: 0, 0, 0, 0, 0, 0"
    right[5] *= -1
    assert by_cause(masks.padding_attended, toy.failure(right)) == {}


# Scales.


def test_the_models_sizes_are_no_reason_where_another_layer_is_right(toy):
    causes = by_cause(softmax.wrong_scale, toy.failure(sound=frozenset({"model.layers.0.attention"})))
    assert "the softmax scale is missing: 1 instead of 0.4" in causes
    assert not any(word in cause for cause in causes for word in ("taken from", "padded"))


def test_a_scale_that_has_two_names_has_one_of_them(tmp_path):
    usual = Toy(tmp_path / "r", scale=0.5)  # the root of 1/4: twice is 1/4
    causes = by_cause(softmax.wrong_scale, usual.failure())
    assert "the softmax scale is applied twice: 0.25 instead of 0.5" in causes
    assert not any("without its root" in cause for cause in causes)


def test_a_scale_is_fitted_to_the_first_four_rows(toy):
    places = [(0, p) for p in range(1, 9)]
    actual = toy.contexts(places, lambda place: toy.context(place, scale=0.9 if place[1] <= 4 else 0.1))
    (hypothesis,) = (h for h in by_cause(softmax.wrong_scale, toy.failure(actual, places)).values() if h.num_fitted)
    assert hypothesis.cause == "the softmax scale is 0.9 instead of 0.4"


@pytest.mark.parametrize("start", [0.01, 8.0])
@pytest.mark.parametrize("logarithm", [-4.0, -1.23456789, 0.0, 0.06, 3.99])
def test_a_number_is_found_within_fifty_times_more_or_less(start, logarithm):
    meant = start * math.exp(logarithm)
    assert math.isclose(fitted_factor(start, lambda number: abs(number - meant)), meant, rel_tol=1e-8)


def test_the_deeper_of_two_valleys_is_found():
    def error(number):
        return min(0.1 + abs(math.log(number)), abs(math.log(number) - 2.5))

    assert math.isclose(fitted_factor(1.0, error), math.exp(2.5), rel_tol=1e-8)


# The softmax.


def test_a_softmax_over_the_heads_or_the_queries(toy):
    def over_heads(scores, row):
        return scores.exp() / sum((SCALE * scores_of(toy, row.place, head, row.keys)).exp() for head in range(N))

    def over_queries(scores, row):
        step = [place for place in PLACES if place[0] == row.place[0] and step_of(place) == step_of(row.place)]
        total = torch.zeros(len(row.keys), dtype=torch.float64)
        for place in step:
            is_seen = torch.tensor([key[1] <= place[1] for key in row.keys])
            total += (SCALE * scores_of(toy, place, row.head, row.keys)).exp() * is_seen
        return scores.exp() / total

    heads, queries = (
        f"the softmax runs over {what} instead of the keys" for what in ("the heads", "the queries of a step")
    )
    expected = {heads: attended(toy, weigh=over_heads), queries: attended(toy, weigh=over_queries)}
    assert_outputs(softmax.over_the_heads, toy.failure(), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_softmax_in_16_bits(toy, dtype):
    def low(x):
        return x.to(dtype).double()

    places, exact = [(0, 3), (0, 8), (1, 6)], toy.contexts([(0, 3), (0, 8), (1, 6)])
    parts = {
        "its result": lambda s, _: low(s.softmax(0)),
        "its input": lambda s, _: low(s).softmax(0),
        "input and result": lambda s, _: low(low(s).softmax(0)),
        "all of it": lambda s, _: s.to(dtype).softmax(0).double(),
    }
    cause = f"the softmax is in {str(dtype).removeprefix('torch.')}"
    hypotheses = {h.detail: h.output for h in softmax.coarse_softmax(toy.failure(places=places)) if h.cause == cause}
    assert list(hypotheses) == list(parts)
    for part, weigh in parts.items():
        output = attended(toy, weigh=weigh, places=places)
        # A number at the limit between two may go to either: all but a few of the elements are the same.
        same = (hypotheses[part] - output).abs() <= 1e-3 * (exact - output).abs().max()
        assert same.double().mean() > 0.6, part


# Split KV.

MERGES = {
    "split KV: natural log-sum-exp is merged in base 2": lambda lse, top: 2**lse / (2**lse).sum(),
    "split KV: log-sum-exp in base 2 is merged in base e": lambda lse, top: (lse / math.log(2)).softmax(0),
    "split KV: the pieces are not rescaled to a common maximum": lambda lse, top: (lse - top).softmax(0),
    "split KV: the pieces are averaged": lambda lse, top: torch.ones_like(lse) / len(lse),
    "split KV: the pieces are summed without weights": lambda lse, top: torch.ones_like(lse),
    "split KV: only the last piece counts": lambda lse, top: torch.arange(len(lse)) == len(lse) - 1,
}
STEP_SPLIT = "keys of earlier steps, and those of the step itself"


def in_sizes(size):
    return lambda count, _: [min(size, count - at) for at in range(0, count, size)]


def in_pieces(number):
    return lambda count, _: in_sizes(-(-count // number))(count, _)


CUTS = {
    **{f"pieces of {size} tokens": in_sizes(size) for size in (2, 3, 4, 6, 8, 9)},
    **{f"{number} pieces": in_pieces(number) for number in range(2, 9)},
    STEP_SPLIT: lambda count, begin: [begin, count - begin] if 0 < begin < count else [1, count - 1],
}


def merged(weigh, cut):
    """Return the parts under which a row's history is cut into pieces, which are put together by weights."""

    def weights(scores, row):
        pieces = [piece for piece in scores.split(cut(len(scores), begin_of(row.place))) if len(piece)]
        shares = weigh(torch.stack([piece.logsumexp(0) for piece in pieces]), torch.stack([p.max() for p in pieces]))
        return torch.cat([share * piece.softmax(0) for share, piece in zip(shares, pieces, strict=True)])

    return {"weigh": weights}


def test_pieces_that_are_merged_wrongly(toy):
    places = [(0, 0), (0, 3), (0, 5), (0, 8), (1, 4), (1, 6)]
    hypotheses = {(h.cause, h.detail): h.output for h in softmax.splits_merged_wrongly(toy.failure(places=places))}
    wanted = {(cause, cut) for cause in MERGES for cut in CUTS} - {("split KV: only the last piece counts", STEP_SPLIT)}
    assert set(hypotheses) == wanted
    for cause, cut in wanted:
        output = attended(toy, places=places, **merged(MERGES[cause], CUTS[cut]))
        torch.testing.assert_close(hypotheses[cause, cut], output, msg=f"{cause}, {cut}")


def test_pieces_shorter_than_the_longest_history_are_tried(toy):
    assert softmax._split_sizes(toy.failure()) == [2, BLOCK, 4, 2 * BLOCK, 8]
    assert softmax._split_sizes(toy.failure(places=[(1, 6)])) == [2, BLOCK, 4, 2 * BLOCK]


@pytest.mark.parametrize(("block_size", "multiple"), [(12, 12), (None, 16)])
def test_splits_are_tried_at_powers_of_two_and_at_multiples_of_the_block_size(block_size, multiple):
    failure = SimpleNamespace(
        views=[SimpleNamespace(key=torch.zeros(100, 1))], slot_history=SimpleNamespace(block_size=block_size)
    )
    sizes = {2, 4, 8, 16, 32, 64} | {multiple * number for number in range(1, 9)}
    assert softmax._split_sizes(failure) == sorted(size for size in sizes if size < 100)


# Caps and sinks.


def test_caps_that_are_tried(toy, toys):
    assert by_cause(softmax.left_out, toy.failure()) == {}
    usual = [FOREIGN_CAP.format(cap) for cap in (15, 20, 30, 50, 100)]
    assert list(by_cause(softmax.other_cap, failure_of(toys, "plain", **capped(15.0)))) == usual
    hypotheses = by_cause(softmax.other_cap, failure_of(toys, "capped", **capped(0.8)))
    assert set(hypotheses) == {
        "the soft cap of the scores is applied before the scale",
        *(f"the soft cap of the scores is {cap} instead of 20" for cap in (15, 30, 50, 100, 0.8)),
    }


def test_a_cap_is_fitted_to_the_four_rows_that_see_most(toy):
    places = [(1, p) for p in range(7)] + [(0, p) for p in range(9)]
    most = {(0, p) for p in (5, 6, 7, 8)}
    actual = toy.contexts(places, lambda place: toy.context(place, cap=0.7 if place in most else 3.0))
    assert FOREIGN_CAP.format(0.7) in by_cause(softmax.other_cap, toy.failure(actual, places))


def test_sinks_that_are_left_out_are_no_other_mistake(toys):
    """What leaves them out besides something else has their rows where the rest changes nothing."""
    failure = failure_of(toys, "sunk")
    assert set(by_cause(softmax.left_out, failure)) == {"the attention sinks are left out"}
    assert by_cause(masks.mask_otherwise, failure) == by_cause(softmax.splits_merged_wrongly, failure) == {}


def test_the_logits_of_sinks_are_said(toys):
    hypotheses = by_cause(
        softmax.other_sinks, failure_of(toys, "plain", **plus(lambda row: (SINKS[row.head] + 0.5).exp()))
    )
    assert hypotheses[ADDED].detail == "their logits, head by head: 1, -0.5, 2.5, 0.5, 1.5, 0.25"
    hypotheses = by_cause(
        softmax.other_sinks, failure_of(toys, "sunk", **plus(lambda row: (2 * SINKS[row.head]).exp()))
    )
    assert set(hypotheses) == {OTHERS}
    assert hypotheses[OTHERS].detail == "their logits are off, head by head, by 0.5, -1, 2, 0, 1, -0.25"


@pytest.mark.parametrize(
    ("places", "is_said"), [([(0, 0), (0, 3)], True), ([(0, 1), (0, 3)], False), ([(0, 2), (1, 0)], True)]
)
def test_one_more_is_off_from_the_first_row_on(toy, places, is_said):
    failure = toy.failure(attended(toy, places=places, **plus(lambda row: 1)), places)
    assert (ONE in by_cause(softmax.other_sinks, failure)) == is_said


@pytest.mark.parametrize(("position", "is_said"), [(2, True), (3, False)])
def test_the_first_row_may_come_behind_a_prefix_that_was_there(toy, position, is_said):
    """Positions 0 and 1 were in the cache before."""
    places = [(0, position), (0, 6)]
    failure = toy.failure(attended(toy, places=places, **plus(lambda row: 1)), places)
    (view,) = failure.views
    view.key_step[:2] = -1
    assert (ONE in by_cause(softmax.other_sinks, failure)) == is_said


@pytest.mark.parametrize(("spread", "is_one"), [(0.018, True), (0.022, False)])
def test_shifts_are_one_up_to_a_small_spread(toys, spread, is_one):
    failure = failure_of(toys, "sunk", **plus(lambda row: (SINKS[row.head] + 0.5 + spread * (row.head == 4)).exp()))
    assert any("are off by" in cause for cause in by_cause(softmax.other_sinks, failure)) == is_one


def test_rows_that_no_sink_can_give(toys):
    """One row does not decide; no sink turns a row around, or makes it larger than it is without."""
    shifted = failure_of(toys, "sunk", **plus(lambda row: (SINKS[row.head] + 1).exp()))
    shifted.actual[2] *= 0.3
    assert "the logits of the attention sinks are off by +1" in by_cause(softmax.other_sinks, shifted)
    grown = failure_of(toys, "sunk")
    grown.actual[:] = 2.5 * grown.expected
    assert by_cause(softmax.other_sinks, grown) == {}
    turned = failure_of(toys, "plain")
    turned.actual[4, :4] *= -1
    assert ADDED not in by_cause(softmax.other_sinks, turned)
    larger = failure_of(toys, "plain")
    larger.actual[:] *= 1.1
    assert ADDED not in by_cause(softmax.other_sinks, larger)


def test_the_rows_of_each_view(toy):
    failure = toy.failure(torch.arange(len(PLACES) * 24.0, dtype=torch.float64).view(-1, 24))
    first, second = (failure.actual[failure.rows_of(view)] for view in failure.views)
    assert len(first) == len(failure.views[0].rows)
    assert torch.equal(torch.cat((first, second)), failure.actual)
    queries = torch.cat([view.query.flatten(1) for view in failure.views])
    assert torch.equal(failure.over_views(lambda view: view.query.flatten(1)), queries)
    with pytest.raises(ValueError, match="not of this operation"):
        failure.rows_of(failure.views[0].select(torch.arange(2)))
