"""Rows that are rotated for other positions, of two requests in chunks whose rows follow one another in a step."""

import pytest
import torch

from harness.judge.explain.rotary import positions as rotary_positions

from ..toys import by_cause, named, random, recorded
from .test_frequencies import H, N, by, frequencies, of

STEPS = (
    [(0, p) for p in range(4)] + [(1, p) for p in range(3)],
    [(0, 4), (0, 5), (1, 3), (1, 4)],
    [(0, 6), (1, 5)],
    [(1, 6), (0, 7)],
)
PROMPTS = (6, 4)
PLACES = [(*place, step) for step, places in enumerate(STEPS) for place in places]
INPUT = random(len(PLACES), N * H, seed=4)


@pytest.fixture(scope="module")
def recording(tmp_path_factory):
    steps = [{"request": [r for r, _ in places], "position": [p for _, p in places],
              "taps": {"x": torch.zeros(len(places), 1)}} for places in STEPS]  # fmt: skip
    steps.append({"phase": "readback", "request": [0, 1], "position": [0, 0], "taps": {"x": torch.zeros(2, 1)}})
    lengths = tuple(zip((9, 8), PROMPTS, strict=True))
    return recorded(tmp_path_factory.mktemp("rotary") / "r", steps, lengths=lengths)


def at(recording, position, places=PLACES):
    """Rows that are rotated for the position that `position` gives of request, position and step."""
    numbers = [PLACES.index(place) for place in places]
    used = [position(*place) for place in places]
    x = INPUT[numbers]
    return of(
        by(frequencies(), used, x=x), x=x, positions=[place[1] for place in places], recording=recording,
        request=[place[0] for place in places], step=[place[2] for place in places],
    ), used  # fmt: skip


def index(request, position, step):
    return STEPS[step].index((request, position))


def within(request, position, step):
    """Rows of the request before the row in its step."""
    return sum(r == request for r, _ in STEPS[step][: index(request, position, step)])


@pytest.mark.parametrize(
    ("position", "cause"),
    [
        (lambda r, p, s: p + 1, "rotary at a position off by one (+1)"),
        (lambda r, p, s: p - 1, "rotary at a position off by one (-1)"),
        (within, "positions restart at 0 in every step: the chunk's offset is forgotten"),
        (lambda *place: within(*place) + 1, "positions restart at 1 in every step: the chunk's offset is forgotten"),
        (index, "positions run on through the batch instead of restarting for each request"),
        (lambda r, p, s: p - PROMPTS[r], "positions restart at 0 after the prompt"),
        (
            lambda r, p, s: p + index(r, p, s) - within(r, p, s),
            "the rows of other requests before it in the step are added to the position",
        ),
        (lambda r, p, s: STEPS[s][index(r, p, s) - 1][1], "rotary at the position of the row before it in the batch"),
        (lambda r, p, s: p + 3, "rotary at a position off by +3"),
        (lambda r, p, s: p - 2, "rotary at a position off by -2"),
        (lambda r, p, s: p + (4, -2)[r], "rotary at positions off by a number that each request has for itself: "
         "+4 in request 0, -2 in request 1"),
    ],
)  # fmt: skip
def test_positions_that_have_something_in_common(recording, position, cause):
    failure, used = at(recording, position)
    (hypothesis,) = by_cause(rotary_positions.other_positions, failure).values()
    assert named(failure).cause == hypothesis.cause == cause
    assert (hypothesis.num_fitted, hypothesis.is_cause, hypothesis.is_vague) == (0, True, False)
    torch.testing.assert_close(hypothesis.output, failure.actual, rtol=1e-5, atol=1e-6)
    pairs = sorted({(place[1], fitted) for place, fitted in zip(PLACES, used, strict=True)})
    assert hypothesis.detail == "positions: " + ", ".join(f"{right} as {fitted}" for right, fitted in pairs[:6])


def test_position_0_for_every_row_is_no_rotation(recording):
    failure, _ = at(recording, lambda r, p, s: 0)
    (hypothesis,) = by_cause(rotary_positions.other_positions, failure).values()
    assert (hypothesis.cause, hypothesis.is_vague) == ("rotary at position 0 for every row", True)


def test_positions_that_have_nothing_in_common(recording):
    failure, _ = at(recording, lambda r, p, s: (p * p + 3 * r) % 11)
    (hypothesis,) = by_cause(rotary_positions.other_positions, failure).values()
    assert (hypothesis.cause, hypothesis.is_cause) == ("rotary at wrong positions", False)
    assert hypothesis.num_fitted == len(PLACES)
    torch.testing.assert_close(hypothesis.output, failure.actual, rtol=1e-5, atol=1e-6)


BEHIND = [place for place in PLACES if place[1] >= 4]


@pytest.mark.parametrize(
    ("position", "places", "cause"),
    [
        (lambda r, p, s: 3, BEHIND, "positions stop at 3: rows after it are all rotated for it"),
        (lambda r, p, s: p % 4, BEHIND, "positions begin at 0 again after 3: they are taken modulo 4"),
        (lambda r, p, s: 2, BEHIND, None),  # it would have stopped before
        (lambda r, p, s: p % 5, BEHIND, None),
        (lambda r, p, s: 0, [place for place in PLACES if place[1] >= 1], "rotary at position 0 for every row"),
    ],
)
def test_positions_that_stop_or_begin_again(recording, position, places, cause):
    failure, _ = at(recording, position, places)
    (hypothesis,) = by_cause(rotary_positions.other_positions, failure).values()
    assert hypothesis.cause == (cause or "rotary at wrong positions")
    assert hypothesis.is_cause == (cause is not None)


@pytest.mark.parametrize(("places", "is_named"), [([(0, 4, 1), (0, 5, 1), (1, 3, 1), (1, 4, 1)], True),
                                                  ([(0, 4, 1), (0, 5, 1), (1, 3, 1)], False)])  # fmt: skip
def test_a_number_of_each_request_shows_in_two_rows_of_it(recording, places, is_named):
    failure, _ = at(recording, lambda r, p, s: p + (4, -2)[r], places)
    (hypothesis,) = by_cause(rotary_positions.other_positions, failure).values()
    assert ("each request has for itself" in hypothesis.cause) == is_named


def test_positions_are_looked_for_as_far_as_the_largest_step_reaches(recording, monkeypatch):
    """Seven rows in the largest step, and one too far: up to 7 + 8 from the highest position, 7."""
    failure, _ = at(recording, lambda r, p, s: p + 8)
    (hypothesis,) = by_cause(rotary_positions.other_positions, failure).values()
    assert hypothesis.cause == "rotary at a position off by +8"
    failure, _ = at(recording, lambda r, p, s: p + 9)
    (hypothesis,) = by_cause(rotary_positions.other_positions, failure).values()
    assert hypothesis.cause != "rotary at a position off by +9"
    for most, is_tried in ((16, True), (15, False)):
        monkeypatch.setattr(rotary_positions, "_MAX_POSITIONS", most)
        assert bool(by_cause(rotary_positions.other_positions, failure)) == is_tried


def test_a_row_of_another_step_than_its_own_has_no_row_before(recording):
    failure, _ = at(recording, lambda r, p, s: p, [(0, 1, 0), (1, 1, 0)])
    failure.rows.step[:] = len(STEPS)
    assert rotary_positions.places_in_step(failure)["before"].tolist() == [1, 1]


def test_a_position_off_by_one_in_a_recording(bench):
    rows, tap = bench.rows(), "model.layers.1.k_rope"
    prompts = torch.tensor([request.prompt_length for request in bench.golden.requests])[rows.request]
    used = rows.position + (rows.position >= prompts)
    angles = (used[:, None].float() * bench.hf.model.model.rotary_emb.inv_freq)[:, None].double()
    a, b = bench.tap("model.layers.1.self_attn.k_norm").unflatten(1, (-1, bench.head_dim)).chunk(2, dim=-1)
    wrong = torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), dim=-1).flatten(1)
    explanation = bench.explain(tap, wrong)
    assert (explanation.cause, explanation.scope) == ("rotary at a position off by one (+1)", "decode rows")
    assert explanation.residual_before > 1e5
    assert explanation.residual_after < 3
    assert explanation.num_explained == explanation.num_rows
