"""One place of the history that is another row, zeros, or left out: found by one product, checked key by key."""

import pytest
import torch

from harness.judge.explain.attention import reads
from harness.judge.explain.attention.reads import wrong_place

from ..toy_attention import Toy
from ..toys import by_cause

EACH = "one position of its history, in each row another, would explain each row"
LATE = [(0, 6), (0, 7), (0, 8)]
BOTH = [*LATE, (1, 5), (1, 6)]
ABSENT = "absent"


def reading(toy, replaced, places):
    """Rows that read, in the place of the position that `replaced` gives of a row, what it gives."""

    def row(place):
        position, source = replaced(place)
        seen = [(place[0], p) for p in range(place[1] + 1)]
        seen[position : position + 1] = [] if source == ABSENT else [source]
        return toy.context(place, seen)

    return toy.contexts(places, row)


def test_values_that_are_narrower_than_keys(tmp_path):
    latent = Toy(tmp_path / "r", value_size=3)
    failure = latent.failure(reading(latent, lambda row: (2, (1 - row[0], 3)), LATE), LATE)
    (hypothesis,) = wrong_place(failure)
    assert hypothesis.cause == "reads one position of its history from a slot that another request wrote"
    torch.testing.assert_close(hypothesis.output, failure.actual)
    assert hypothesis.provenance().holds == "the key of request 1, position 3"


@pytest.mark.parametrize("places", [LATE, BOTH], ids=["one request", "both"])
@pytest.mark.parametrize(
    ("replaced", "cause", "text"),
    [
        (
            lambda row: (2, (1 - row[0], 3)),
            "reads one position of its history from a slot that another request wrote",
            "position 2 as request 1, position 3",
        ),
        (
            lambda row: (2, (row[0], 0)),
            "reads one position of its history from a slot that holds another position of the same request",
            "position 2 as request 0, position 0",
        ),
        (
            lambda row: (4, None),
            "reads one position of its history as zeros: not written, or from a slot nobody wrote",
            "position 4 as zeros",
        ),
        (lambda row: (1, ABSENT), "does not see one position of its history", "position 1 as absent"),
    ],
)
def test_one_position_of_the_history(toy, places, replaced, cause, text):
    failure = toy.failure(reading(toy, replaced, places), places)
    (hypothesis,) = wrong_place(failure)
    assert hypothesis.cause == cause
    torch.testing.assert_close(hypothesis.output, failure.actual)
    assert hypothesis.detail == "; ".join(f"request 0, position {p} reads {text}" for _, p in LATE)
    assert (hypothesis.is_cause, hypothesis.num_fitted) == (True, 2 * len({place[0] for place in places}))
    provenance = hypothesis.provenance()
    assert (provenance.request, provenance.position) == (0, replaced(places[0])[0])
    source = replaced(places[0])[1]
    is_place = isinstance(source, tuple)
    assert provenance.holds == (f"the key of request {source[0]}, position {source[1]}" if is_place else "zeros")


@pytest.mark.parametrize(
    ("replaced", "cause"),
    [
        (lambda row: (row[1], (1, row[1] - 3)), "reads the newest token from a slot that another request wrote"),
        (
            lambda row: (row[1], (0, row[1] - 2)),
            "reads the newest token from a slot that holds another position of the same request",
        ),
        (lambda row: (row[1], None), "reads the newest token as zeros: not written, or from a slot nobody wrote"),
        (lambda row: (row[1], ABSENT), "does not see the newest token"),
    ],
)
def test_the_newest_token_of_each_row_is_one_cause(toy, replaced, cause):
    failure = toy.failure(reading(toy, replaced, LATE), LATE)
    (hypothesis,) = wrong_place(failure)
    assert hypothesis.cause == cause
    torch.testing.assert_close(hypothesis.output, failure.actual)
    assert (hypothesis.is_cause, hypothesis.num_fitted) == (True, 2)


@pytest.mark.parametrize(
    "replaced",
    [
        lambda row: (row[1] - 5, (1, 3)),  # another position in each row
        lambda row: (2, (1, row[1] - 3)),  # from another place in each row
        lambda row: (2, (1, 3)) if row[1] != 7 else (2, None),  # of two kinds
    ],
)
def test_another_place_in_each_row_is_no_cause(toy, replaced):
    failure = toy.failure(reading(toy, replaced, LATE), LATE)
    (hypothesis,) = wrong_place(failure)
    assert hypothesis.cause == EACH
    torch.testing.assert_close(hypothesis.output, failure.actual)
    assert (hypothesis.is_cause, hypothesis.num_fitted) == (False, 2 * len(LATE))


def test_only_what_a_row_sees_is_replaced(tmp_path):
    """A row with a window cannot have lost what lies before it."""
    toy = Toy(tmp_path / "r", window=3)
    seen = [(0, 6), (0, 7), (0, 8)]
    actual = toy.context((0, 8), [(0, 6), (1, 2), (0, 8)])[None]
    failure = toy.failure(actual, [(0, 8)], expected=lambda place: toy.context(place, seen))
    (hypothesis,) = wrong_place(failure)
    assert hypothesis.detail == "request 0, position 8 reads position 7 as request 1, position 2"
    torch.testing.assert_close(hypothesis.output, actual)


def test_the_search_ends_where_it_would_take_too_long(toy, monkeypatch):
    failure = toy.failure(places=[(0, 8)])
    num_products = 9 * 16 * 24  # history rows, known rows, elements of a query
    monkeypatch.setattr(reads, "_MAX_PRODUCT", num_products)
    assert by_cause(wrong_place, failure)
    monkeypatch.setattr(reads, "_MAX_PRODUCT", num_products - 1)
    assert by_cause(wrong_place, failure) == {}
