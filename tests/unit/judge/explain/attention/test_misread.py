"""Attention that reads other rows, zeros or nothing where a run of its history should be."""

import re

import pytest
import torch

import harness
from harness.judge.explain.attention import misread
from harness.judge.explain.attention.misread import other_rows

from ..toy_attention import BLOCK, Toy
from ..toys import named

LATE = [(0, 6), (0, 7), (0, 8)]
BOTH = [*LATE, (1, 5), (1, 6)]
ABSENT = "absent"


def reading_place(toy, replaced, places):
    """Rows that read, in the place of the position that `replaced` gives of a row, what it gives."""

    def row(place):
        position, source = replaced(place)
        seen = [(place[0], p) for p in range(place[1] + 1)]
        seen[position : position + 1] = [] if source == ABSENT else [source]
        return toy.context(place, seen)

    return toy.contexts(places, row)


def test_one_position_of_values_that_are_narrower_than_keys(tmp_path):
    latent = Toy(tmp_path / "r", value_size=3)
    failure = latent.failure(reading_place(latent, lambda row: (2, (1 - row[0], 3)), LATE), LATE)
    (hypothesis,) = other_rows(failure)
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
    failure = toy.failure(reading_place(toy, replaced, places), places)
    (hypothesis,) = other_rows(failure)
    assert named(failure).cause == hypothesis.cause == cause
    torch.testing.assert_close(hypothesis.output, failure.actual)
    assert re.match(rf"request 0, position \d reads {text}", hypothesis.detail)
    assert (hypothesis.is_cause, hypothesis.num_fitted) == (True, 3 * len({place[0] for place in places}))
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
    failure = toy.failure(reading_place(toy, replaced, LATE), LATE)
    (hypothesis,) = other_rows(failure)
    assert hypothesis.cause == cause
    torch.testing.assert_close(hypothesis.output, failure.actual)
    assert (hypothesis.is_cause, hypothesis.num_fitted) == (True, 3)


@pytest.mark.parametrize(
    "replaced",
    [
        lambda row: (row[1] - 5, (1, 3)),  # another position in each row
        lambda row: (2, (1, row[1] - 3)),  # from another place in each row
        lambda row: (2, (1, 3)) if row[1] != 7 else (2, None),  # of two kinds
    ],
)
def test_another_place_in_each_row_is_not_named(toy, replaced):
    assert not named(toy.failure(reading_place(toy, replaced, LATE), LATE)).is_cause


@pytest.mark.parametrize(("sources", "is_cause"), [((1, 0), True), ((None, 0), False)])
def test_each_request_has_a_run_of_its_own_of_one_kind(toy, sources, is_cause):
    """Request 0 reads request 1 and the reverse; or zeros, and the reverse."""
    read = {request: None if source is None else (source, 3) for request, source in enumerate(sources)}
    (hypothesis,) = other_rows(toy.failure(reading_place(toy, lambda row: (2 - row[0], read[row[0]]), BOTH), BOTH))
    assert hypothesis.is_cause == is_cause


def test_only_what_a_row_sees_is_replaced(tmp_path):
    """A row with a window cannot have lost what lies before it."""
    toy = Toy(tmp_path / "r", window=3)
    seen = [(0, 6), (0, 7), (0, 8)]
    actual = toy.context((0, 8), [(0, 6), (1, 2), (0, 8)])[None]
    failure = toy.failure(actual, [(0, 8)], expected=lambda place: toy.context(place, seen))
    (hypothesis,) = other_rows(failure)
    assert hypothesis.detail == "request 0, position 8 reads position 7 as request 1, position 2"
    assert hypothesis.cause == "reads one position of its history from a slot that another request wrote"
    torch.testing.assert_close(hypothesis.output, actual)


def reading_run(toy, seen, places=LATE):
    """Rows that read what `seen` gives of their own positions: a list of places, None for zeros."""

    def row(place):
        return toy.context(place, seen([(place[0], p) for p in range(place[1] + 1)]))

    return toy.contexts(places, row)


BLOCKS = {
    "its own": (lambda read: read[:3] + read[:3] + read[6:], "block 1 of the table is read from its own block 0"),
    "another request's": (
        lambda read: [*read[:3], (1, 0), (1, 1), (1, 2), *read[6:]],
        "block 1 of the table is read from request 1's block 0",
    ),
}


@pytest.mark.parametrize("whose", BLOCKS)
@pytest.mark.parametrize("is_slotted", [True, False])
def test_one_block_is_named_with_and_without_its_slots(tmp_path, whose, is_slotted):
    toy = Toy(tmp_path / "r", is_slotted=is_slotted)
    seen, detail = BLOCKS[whose]
    failure = toy.failure(reading_run(toy, seen), LATE)
    (hypothesis,) = other_rows(failure)
    assert named(failure).cause == hypothesis.cause == "reads one block of its history from a wrong place"
    torch.testing.assert_close(hypothesis.output, failure.actual)
    assert (hypothesis.detail == detail) == is_slotted
    place = hypothesis.provenance()
    assert (place.request, place.position) == (0, BLOCK)


RUNS = {
    "a page that was cleared": (
        lambda read: [None, None, *read[2:]],
        "reads the beginning of its history as zeros: not written, or from slots nobody wrote",
    ),
    "the first half": (lambda read: read[3:], "the first 3 tokens are not seen"),
    "a page of the middle": (lambda read: read[:2] + read[4:], "does not see a part of its history"),
    "one slot of a page": (
        lambda read: [None if place[1] % 3 == 1 else place for place in read],
        "reads one slot of every 3 of its history as zeros: not written, or from slots nobody wrote",
    ),
    "a prefix that is longer than the shared one": (
        lambda read: [(1, p) for p in range(5)] + read[5:],
        "reads the beginning of its history from slots that another request wrote",
    ),
}


@pytest.mark.parametrize("name", RUNS)
def test_a_run_of_any_length(toy, name):
    seen, cause = RUNS[name]
    failure = toy.failure(reading_run(toy, seen), LATE)
    assert named(failure).cause == cause
    (hypothesis,) = other_rows(failure)
    torch.testing.assert_close(hypothesis.output, failure.actual)


@pytest.mark.parametrize(("dim", "text"), [(0, "in KV heads [1] alone"), (1, "in elements [2] of each head alone")])
def test_a_part_of_the_row(toy, dim, text):
    """Of values, one KV head, or one element of each, is of the position before."""
    last = {place: toy.tensors["model.layers.1.self_attn.v_proj"][place[0], max(place[1] - 1, 0)] for place in LATE}
    tensors = toy.tensors["model.layers.1.self_attn.v_proj"]

    def value(place, newest):
        content = tensors[place].clone()
        where = (1,) if dim == 0 else (slice(None), 2)
        content[where] = last[newest][where] if place == newest else content[where]
        return content

    failure = toy.failure(lambda place: toy.context(place, value=lambda at: value(at, place)), LATE)
    (hypothesis,) = other_rows(failure)
    assert hypothesis.cause == (
        "reads the values of the newest token from a slot that holds another position of the same request"
    )
    assert hypothesis.detail.endswith(text)
    torch.testing.assert_close(hypothesis.output, failure.actual)


def test_long_histories_are_searched_in_strides():
    assert [misread._stride(length, length) for length in (100, 1000, 8000)] == [1, 8, 64]


def of_decode(engine, change):
    attention = engine.model.layers[1].attn
    attend = attention.forward

    def forward(q, k, v, batch):
        pairs = zip(batch["rows"], batch["tables"], strict=True)
        tables = [change(table) if len(rows) == 1 and len(table) > 12 else table for rows, table in pairs]
        return attend(q, k, v, {**batch, "tables": tables})

    attention.forward = forward


def block_read_twice(engine):
    of_decode(engine, lambda table: table[:4] * 2 + table[8:])


def last_page_first(engine):
    def swapped(table):
        last = len(table) - len(table) % 4 if len(table) % 4 else len(table) - 4
        return [*range(table[last], table[last] + 4), *table[4:last], *table[:4]][: len(table)]

    of_decode(engine, swapped)


def key_one_slot_low(engine):
    attention = engine.model.layers[1].attn
    store = attention.store

    def one_low(part, rows, slots):
        if part == 0 and len(rows) == 1:
            tables = [table for table in engine.slots.values() if int(slots) in table and len(table) > 12]
            slots = torch.tensor([table[table.index(int(slots)) - 1] for table in tables]) if tables else slots
        store(part, rows, slots)

    attention.store = one_low


PLANTED = {
    block_read_twice: "reads one block of its history from a wrong place",
    last_page_first: "reads its pages in another order: one that is not full comes before the last, pages of 4",
    key_one_slot_low: "keys are written 1 slot low",
}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("plant", PLANTED)
def test_pages_of_an_engine_that_shows_no_slots(fused, checkpoints, plant, dtype):
    engine = fused.FusedEngine(checkpoints / "qwen2-tiny", dtype)
    plant(engine)
    ids = torch.randint(5, 250, (22,), generator=torch.Generator().manual_seed(1)).tolist()
    report = harness.check(
        engine, model=checkpoints / "qwen2-tiny", prompts=[ids], max_new_tokens=6, schedules=["plain"],
        dtype=str(dtype).removeprefix("torch."),
    )  # fmt: skip
    first = report.first_divergence
    assert (first.tap, first.position) == ("model.layers.1.attention", len(ids))
    assert (first.explanation.cause, first.explanation.is_cause) == (PLANTED[plant], True)
