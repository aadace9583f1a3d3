"""Attention that reads other slots than the request's, against a cache that is played back slot by slot."""

import pytest
import torch

from harness.judge.explain.attention import slots as read_slots
from harness.judge.explain.core.wrong_operation import WrongOperation

from ..toy_attention import BLOCK, KEY, PLACES, STEPS, TABLES, VALUE, H, K, Toy, step_of
from ..toys import by_cause, named, random

SHARED = "a block belongs to two requests of different content at once: shared, freed or given out wrongly"
STALE = "a block holds what another request left there: stale block taken as a hit, or not written"
MISPLACED = "K and V are written to a wrong slot: the slot mapping does not follow the block table"
SAME_REQUEST = "reads a slot that holds another position of the same request"
NOBODY = "reads a slot that nobody wrote"


def test_values_that_are_narrower_than_keys(tmp_path):
    latent = Toy(tmp_path / "r", tables=of_tables({0: [3, 1, 5], 1: [1, 4, 6]}), value_size=3)
    (hypothesis,) = read_slots.cache_played_back(latent.failure(played(latent)))
    assert hypothesis.cause == SHARED
    torch.testing.assert_close(hypothesis.output, played(latent))


def slots_of(table, count):
    return [block * BLOCK + offset for block in table for offset in range(BLOCK)][:count]


def reading(toy, slots, places=PLACES):
    """Rows that read the slots that `slots` gives of request, step and length; a slot that nobody wrote holds zeros."""

    def row(place):
        request, position = place
        step = step_of(place)
        length = max(p for r, p in places if r == request and step_of((r, p)) == step) + 1
        held = toy.held(step)
        read = [held.get(slot) for slot in slots(request, step, length)]
        return toy.context(place, [*read, *[None] * length][: position + 1])

    return toy.contexts(places, row)


def played(toy, places=PLACES):
    return reading(toy, lambda request, step, length: slots_of(toy.table(request, step), length), places)


def of_tables(tables):
    return lambda request, _step: tables[request]


def moving(request, step):
    """Request 0 has another first block from step 2 on."""
    return [7, 1, 5] if request == 0 and step >= 2 else TABLES[request]


@pytest.mark.parametrize(
    ("parts", "places", "cause", "detail"),
    [
        (
            {"tables": of_tables({0: [3, 1, 5], 1: [1, 4, 6]})}, PLACES, SHARED,
            "request 0 in step 0; written last, by position: 3: request 1, position 0, step 0",
        ),
        (
            {"tables": of_tables({0: [3, 1, 2], 1: [2, 4, 6]}), "misplaced": {(0, 6): 27}}, [(0, 8)], MISPLACED,
            "request 0 in step 4; written last, by position: 6: request 1, position 0, step 0",
        ),
        (
            {"tables": of_tables({0: [3, 1, 3], 1: [2, 4, 6]})}, [(0, 6), (0, 7)], SAME_REQUEST,
            "request 0 in step 2; written last, by position: 0: request 0, position 6, step 2",
        ),
        (
            {"tables": moving}, [(1, 6), (0, 6), (0, 8)], NOBODY,
            "request 0 in step 2; written last, by position: 0: nobody; 1: nobody; 2: nobody",
        ),
        (
            {"tables": lambda request, step: [2, 1, 5] if request == 0 and step == 4 else TABLES[request]}, [(0, 8)],
            STALE,
            "request 0 in step 4; written last, by position: 0: request 1, position 0, step 0; "
            "1: request 1, position 1, step 1; 2: request 1, position 2, step 1",
        ),
        (
            {"tables": lambda request, step: [2, 1, 5] if request == 0 and step == 3 else TABLES[request]}, [(0, 7)],
            SHARED,
            "request 0 in step 3; written last, by position: 0: request 1, position 0, step 0; "
            "1: request 1, position 1, step 1; 2: request 1, position 2, step 1",
        ),
    ],
    ids=["shared", "misplaced", "own", "nobody", "stale", "shared-now"],
)  # fmt: skip
def test_the_cache_played_back(tmp_path, parts, places, cause, detail):
    toy = Toy(tmp_path / "r", **parts)
    failure = toy.failure(played(toy, places), places)
    (hypothesis,) = read_slots.cache_played_back(failure)
    assert (hypothesis.cause, hypothesis.detail) == (cause, detail)
    torch.testing.assert_close(hypothesis.output, failure.actual)
    assert cause in named(failure).cause
    provenance = hypothesis.provenance()
    assert f"request {provenance.request} in step " in detail
    assert f"by position: {provenance.position}: " in detail
    place = toy.held(int(detail[len("request 0 in step ")])).get(provenance.slot)
    writer = (None, None) if place is None else (place[0], step_of(place))
    assert (provenance.writer_request, provenance.writer_step) == writer
    assert provenance.block == provenance.slot // BLOCK
    holds = "zeros" if place is None else f"the key of request {place[0]}, position {place[1]}"
    assert provenance.holds == holds


def test_a_row_that_was_written_to_a_wrong_slot_and_is_read_there(tmp_path):
    """The place that is wrong is not the misplaced row's own: it is where that row went."""
    toy = Toy(tmp_path / "r", misplaced={(1, 3): TABLES[0][0] * BLOCK + 1})
    (hypothesis,) = read_slots.cache_played_back(toy.failure(places=[(0, 4)]))
    assert hypothesis.cause == MISPLACED
    assert hypothesis.detail == "request 0 in step 1; written last, by position: 1: request 1, position 3, step 1"


def test_a_row_that_its_own_step_misplaced(tmp_path):
    toy = Toy(tmp_path / "r", misplaced={(0, 4): 30})
    (hypothesis,) = read_slots.cache_played_back(toy.failure(places=[(0, 5)]))
    assert hypothesis.cause == MISPLACED
    assert hypothesis.detail == "request 0 in step 1; written last, by position: 4: nobody"


def test_what_is_misplaced_later_is_no_cause_yet(tmp_path):
    tables = of_tables({0: [3, 1, 5], 1: [1, 4, 6]})
    toy = Toy(tmp_path / "r", tables=tables, misplaced={(0, 8): 40, (1, 6): 41})
    (hypothesis,) = read_slots.cache_played_back(toy.failure(places=[(0, 5)]))
    assert hypothesis.cause == SHARED
    toy = Toy(tmp_path / "s", tables=tables, misplaced={(1, 4): 41})
    (hypothesis,) = read_slots.cache_played_back(toy.failure(places=[(0, 5)]))
    assert hypothesis.cause == SHARED, "what is misplaced elsewhere is no cause here"


def test_a_cache_that_holds_what_it_should_says_nothing(toy, tmp_path):
    assert by_cause(read_slots.cache_played_back, toy.failure()) == {}
    unknown = Toy(tmp_path / "r", is_slotted=False)
    for explain in (read_slots.cache_played_back, read_slots.other_block_table,
                    read_slots.past_the_context):  # fmt: skip
        assert by_cause(explain, unknown.failure()) == {}


def test_what_the_cache_gives_back_stands_in_places_that_nobody_wrote(tmp_path):
    read = {
        f"model.layers.1.{name}_cache": {place: random(K, H, seed=700 + 50 * at + number)
                                         for number, place in enumerate(PLACES)}
        for at, name in enumerate("kv")
    }  # fmt: skip
    toy = Toy(tmp_path / "r", tables=moving, readback=read)
    (hypothesis,) = read_slots.cache_played_back(toy.failure(places=[(0, 6)]))

    def read_back(tap, name):
        return lambda at: read[f"model.layers.1.{name}_cache"][at] if at[1] < BLOCK else toy.tensors[tap][at]

    output = toy.context((0, 6), key=read_back(KEY, "k"), value=read_back(VALUE, "v"))
    torch.testing.assert_close(hypothesis.output[0], output)
    values = {name: tensors for name, tensors in read.items() if "v_cache" in name}
    alone = Toy(tmp_path / "s", tables=moving, readback=values)
    (hypothesis,) = read_slots.cache_played_back(alone.failure(places=[(0, 6)]))
    torch.testing.assert_close(hypothesis.output, played(alone, [(0, 6)]))


# Another table.


def test_the_table_of_the_other_request(toy):
    failure = toy.failure(expected=None)

    def of_the_other_request(request, step, length):
        tables = [item for item in (1 - request, request) if item in STEPS[step]]
        return slots_of(toy.table(tables[0], step), length)

    cause = "reads the block table of another request"
    hypothesis, before = (item for item in read_slots.other_block_table(failure) if item.cause == cause)
    assert [hypothesis.detail, before.detail] == ["of the next one in the batch", "of the previous one in the batch"]
    torch.testing.assert_close(hypothesis.output, reading(toy, of_the_other_request))
    torch.testing.assert_close(before.output, hypothesis.output)
    # Request 1 has fewer tokens: what request 0 reads after them, nobody wrote. The last step has request 0 alone.
    reach = {step: len([p for p in range(7) if step_of((1, p)) <= step]) for step in range(4)}
    blank = {(0, p) for p in range(9) if step_of((0, p)) in reach and p >= reach[step_of((0, p))]}
    assert {place for place, is_unknown in zip(PLACES, hypothesis.unknown.tolist(), strict=True) if is_unknown} == blank
    provenance = hypothesis.provenance()
    assert (provenance.request, provenance.position) == (0, 0)
    assert provenance.holds == "the key of request 1, position 0"


class Batch:
    """Three requests in one step, by their tables."""

    def __init__(self, order, tables):
        step = type("Step", (), {"request": torch.tensor(order), "block_tables": tables})
        self.recording = type("Recording", (), {"steps": [step]})


@pytest.mark.parametrize(
    ("request_id", "shift", "table"), [(4, 1, [20]), (4, -1, [10]), (2, 1, [10]), (1, -1, [20]), (9, 1, [])]
)
def test_the_neighbour_in_the_batch(request_id, shift, table):
    failure: WrongOperation = Batch([1, 1, 4, 9, 2, 2], {1: [10], 4: [40], 2: [20]})  # request 9 has no table
    assert read_slots._neighbour(failure, 0, request_id, shift) == table


def test_the_table_of_the_step_before(toy):
    def before(request, step, length):
        earlier = [at for at in range(step) if request in STEPS[at]]
        return slots_of(toy.table(request, earlier[-1]), length) if earlier else []

    cause = "reads through the block table of the step before: its own step's new blocks are read as zeros"
    hypothesis = by_cause(read_slots.other_block_table, toy.failure())[cause]
    torch.testing.assert_close(hypothesis.output, reading(toy, before))


def test_the_blocks_in_the_reverse_order(toy):
    def reverse(request, step, length):
        return slots_of(toy.table(request, step)[::-1], length)

    hypothesis = by_cause(read_slots.other_block_table, toy.failure())[
        "reads the blocks of its table in the reverse order"
    ]
    torch.testing.assert_close(hypothesis.output, reading(toy, reverse))


# Past the end.


def past(toy, end, *, reaches):
    """Rows that see, besides what they should, everything from their request's last token up to `end`."""

    def row(place):
        request, position = place
        step = step_of(place)
        length = STEPS[step][request][-1] + 1
        slots = slots_of(toy.table(request, step), 10_000 if reaches else length)
        held = toy.held(step)
        behind = [held.get(slots[at]) if at < len(slots) else None for at in range(length, end(step, length))]
        return toy.context(place, [*((request, p) for p in range(position + 1)), *behind])

    return toy.contexts(PLACES, row)


def test_what_is_read_behind_the_last_token(tmp_path):
    """The slots after it hold what another request left there."""
    toy = Toy(tmp_path / "r", tables=lambda request, step: {0: [3 if step else 4, 1, 2], 1: [2, 4, 6]}[request])

    def longest(step, _length):
        return max(positions[-1] for positions in STEPS[step].values()) + 1

    expected = {
        ("padding is attended to in a ragged batch", "zeros up to the longest of the batch"): past(
            toy, longest, reaches=False
        ),
        ("reads past the context length", "one slot more"): past(toy, lambda _step, n: n + 1, reaches=True),
        ("reads past the context length", "to the end of its block"): past(
            toy, lambda _step, n: -(-n // BLOCK) * BLOCK, reaches=True
        ),
        ("reads past the context length", "to the longest of the batch"): past(toy, longest, reaches=True),
    }
    # Blocks are shared here on purpose; what is read before the end is the recorded history's all the same.
    hypotheses = {(h.cause, h.detail): h for h in read_slots.past_the_context(toy.failure())}
    assert set(hypotheses) == set(expected)
    right = played(toy)
    is_own = (right - toy.contexts(PLACES)).abs().amax(dim=1) < 1e-12
    assert int(is_own.sum()) > 8
    for name, output in expected.items():
        torch.testing.assert_close(hypotheses[name].output[is_own], output[is_own], msg=str(name))


def test_rows_that_end_with_their_block_read_nothing_past_it(toy):
    places = [(0, 5), (0, 8)]  # the last of a block each; the longest of their steps
    details = [h.detail for h in read_slots.past_the_context(toy.failure(places=places))]
    assert details == ["one slot more"]
