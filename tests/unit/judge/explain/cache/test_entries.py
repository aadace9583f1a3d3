"""What the cache gives back that is not what was written, on a toy cache of two requests."""

from dataclasses import replace

import pytest
import torch

from harness.base.metrics import rounding_unit
from harness.errors import Code
from harness.formats.taps import Kind
from harness.judge.explain.cache import entries
from harness.judge.explain.causes import EXPLANATIONS

from ..conftest import BLOCK_SIZE
from ..toy_attention import (
    BLOCK,
    K_CACHE,
    KEY,
    PLACES,
    RAW,
    READBACK,
    TABLES,
    V_CACHE,
    VALUE,
    H,
    K,
    Toy,
    graph,
    step_of,
)
from ..toys import ToyModel, assert_outputs, by_cause, failure_of, named, outputs, random, recorded

ZEROS = torch.zeros(K, H, dtype=torch.float64)
NEVER, MAYBE = "never written: zeros come back", "zeros come back: never written, or written over with zeros"
BOUNDARY = ", at a block boundary (slot mapping)"
SOME = [(0, 1), (0, 4), (1, 2)]
READ = {tap: dict.fromkeys(PLACES, ZEROS) for tap in (K_CACHE, V_CACHE)}


def made(folder, **parts):
    return Toy(folder / "r", readback=READ, **parts)


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    return made(tmp_path_factory.mktemp("toy"))


def rows(toy, tap, places=PLACES):
    return torch.stack([toy.tensors[tap][place].flatten() for place in places])


# Nothing.


@pytest.mark.parametrize(
    ("places", "cause"),
    [
        (SOME, MAYBE),
        (PLACES, NEVER),
        ([place for place in PLACES if place[0] == 1], NEVER),  # all of request 1, and nothing else
        ([place for place in PLACES if place[0] == 1][1:], MAYBE),
        ([(0, 3), (1, 3), (0, 6)], NEVER + BOUNDARY),
        ([(0, 0), (0, 3)], MAYBE),
        ([(0, 3), (0, 7)], MAYBE),
    ],
)
def test_zeros(toy, places, cause):
    (hypothesis,) = by_cause(entries.never_written, toy.cache_failure(lambda place: ZEROS, places)).values()
    assert hypothesis.cause == cause
    assert torch.equal(hypothesis.output, torch.zeros(len(places), K * H, dtype=torch.float64))
    provenance = hypothesis.provenance()
    assert (provenance.request, provenance.position, provenance.holds) == (*places[0], "zeros")


def test_rows_that_were_not_read_back_need_not_be_wrong(tmp_path):
    read = {tap: dict.fromkeys([(1, 2), (1, 4), (0, 1)], ZEROS) for tap in (K_CACHE, V_CACHE)}
    toy = Toy(tmp_path / "r", readback=read)
    for places, cause in (([(1, 2), (1, 4)], NEVER), ([(1, 4)], MAYBE)):
        assert list(by_cause(entries.never_written, toy.cache_failure(lambda place: ZEROS, places))) == [cause]


def test_a_step_that_read_back_something_else_does_not_count(tmp_path):
    """K and V are read back by steps of their own, of other rows."""
    steps = [
        {"request": [0] * 3, "position": [0, 1, 2], "taps": {KEY: torch.zeros(3, 8), VALUE: torch.zeros(3, 8)}},
        {"phase": "readback", "request": [0, 0], "position": [0, 2], "taps": {K_CACHE: torch.zeros(2, 8)}},
        {"phase": "readback", "request": [0], "position": [1], "taps": {V_CACHE: torch.zeros(1, 8)}},
    ]
    operation = next(item for item in graph() if item.tap == K_CACHE)
    zeros, written = torch.zeros(2, 8, dtype=torch.float64), random(2, 8)
    failure = failure_of(operation, zeros, written, model=ToyModel(*graph()), recording=recorded(tmp_path / "r", steps),
                         position=[0, 2], step=[1, 1])  # fmt: skip
    assert list(by_cause(entries.never_written, failure)) == [NEVER]


def elsewhere(request, step):
    """The cache is read back through blocks that nobody wrote, but for the first of request 1."""
    return TABLES[request] if step < READBACK else [0, 8, 9] if request == 0 else [2, 8, 9]


@pytest.mark.parametrize(
    ("places", "cause"), [([(0, 1), (0, 4)], NEVER), ([(0, 1), (1, 4)], NEVER), ([(0, 1), (1, 1)], MAYBE)]
)
def test_zeros_of_slots_that_nobody_wrote(tmp_path, places, cause):
    failure = made(tmp_path, tables=elsewhere).cache_failure(lambda place: ZEROS, places)
    assert list(by_cause(entries.never_written, failure)) == [cause]
    assert entries.is_unwritten(failure) == (cause == NEVER)


def test_without_slots_nothing_is_known_of_them(tmp_path):
    failure = made(tmp_path, is_slotted=False).cache_failure(lambda place: ZEROS, [(0, 3), (0, 6)])
    assert list(by_cause(entries.never_written, failure)) == [MAYBE]
    assert not entries.is_unwritten(failure)
    assert by_cause(entries.replayed_reads, failure) == {}
    (hypothesis,) = by_cause(entries.never_written, failure).values()
    assert (hypothesis.provenance().slot, hypothesis.provenance().block) == (None, None)


# Another tensor.


def test_other_tensors_of_keys_and_of_values(toy):
    expected = {
        "K and V are written to each other's cache": rows(toy, VALUE),
        "keys are cached before rotary": rows(toy, RAW),
        "the cache holds what layer 0 wrote": rows(toy, "model.layers.0.k_rope"),
        "the cache holds what layer 2 wrote": rows(toy, "model.layers.2.k_rope"),
    }
    failure = toy.cache_failure(lambda place: ZEROS)
    assert_outputs(entries.other_tensor, failure, expected)
    expected = {
        "K and V are written to each other's cache": rows(toy, KEY),
        "the cache holds what layer 0 wrote": rows(toy, "model.layers.0.self_attn.v_proj"),
        "the cache holds what layer 2 wrote": rows(toy, "model.layers.2.self_attn.v_proj"),
    }
    assert_outputs(entries.other_tensor, toy.cache_failure(lambda place: ZEROS, tap=V_CACHE), expected)
    places = {(h.provenance().request, h.provenance().position) for h in entries.other_tensor(failure)}
    assert places == {(0, 0)}


@pytest.mark.parametrize(
    ("omitted", "cause"),
    [
        (RAW, "keys are cached before rotary"), (VALUE, "K and V are written to each other's cache"),
        ("model.layers.0.k_rope", "the cache holds what layer 0 wrote"),
    ],
)  # fmt: skip
def test_a_tensor_that_was_not_recorded_is_none(tmp_path, toy, omitted, cause):
    causes = set(by_cause(entries.other_tensor, toy.cache_failure(lambda place: ZEROS)))
    without = made(tmp_path, omitted=(omitted,)).cache_failure(lambda place: ZEROS)
    assert set(by_cause(entries.other_tensor, without)) == causes - {cause}


def test_a_tensor_of_another_width_is_none(toy):
    failure = toy.cache_failure(lambda place: ZEROS[:1])
    assert by_cause(entries.other_tensor, failure) == {}


# Another row, by the engine's own record.

MISPLACED = "K and V are written to a wrong slot: the slot mapping does not follow the block table"
SHARED = "the slot holds what another request wrote: shared, freed or given out wrongly"
MIXED = "the slot holds what another request wrote, or another position: shared, freed or given out wrongly"
RECORDED = "the slot holds another position, as the engine recorded it: the row itself was not written there"
AWAY = "the slot holds the token {} positions away: written to a wrong slot"
SLOT = "the slot holds another position: written to a wrong slot, or read from one"


def at_the_end(tables):
    """The cache is read back through other tables than it was written by."""
    return lambda request, step: TABLES[request] if step < READBACK else tables[request]


@pytest.mark.parametrize(
    ("parts", "places", "cause"),
    [
        ({"tables": lambda request, step: [[3, 1, 5], [1, 4, 6]][request]}, [(0, 3), (0, 4)], SHARED),
        ({"tables": at_the_end([[3, 3, 3], TABLES[1]])}, [(0, 3), (0, 4), (0, 7)], RECORDED),
        ({"tables": at_the_end([[2, 2, 5], [3, 2, 6]])}, [(0, 0), (0, 1), (0, 4), (1, 3)], MIXED),
        ({"misplaced": {(0, 8): TABLES[0][2] * BLOCK + 1}}, [(0, 7), (0, 8)], MISPLACED),
        ({"misplaced": {(0, 8): TABLES[0][2] * BLOCK + 1}}, [(0, 7)], RECORDED),
        ({"misplaced": {(0, 7): 30}, "tables": at_the_end([[3, 3, 3], TABLES[1]])}, [(0, 3), (0, 4)], RECORDED),
        ({"misplaced": {(1, 3): 30}, "tables": at_the_end([[3, 3, 3], TABLES[1]])}, [(0, 3), (0, 4)], RECORDED),
    ],
)
def test_slots_that_something_else_was_written_to(tmp_path, parts, places, cause):
    toy = made(tmp_path, **parts)
    held = toy.held(READBACK)

    def read(place):
        table = toy._tables(place[0], READBACK)
        return held.get(table[place[1] // BLOCK] * BLOCK + place[1] % BLOCK)

    actual = random(K, H, seed=3)
    failure = toy.cache_failure(lambda place: actual, places)
    (hypothesis,) = by_cause(entries.replayed_reads, failure).values()
    assert hypothesis.cause == cause
    expected = [actual if read(place) is None else toy.tensors[KEY][read(place)] for place in places]
    assert torch.equal(hypothesis.output, torch.stack([item.flatten() for item in expected]))
    assert hypothesis.unknown is None or hypothesis.unknown.tolist() == [read(place) is None for place in places]
    shown = (f"{place[1]}: request {read(place)[0]}, position {read(place)[1]}, step {step_of(read(place))}"
             if read(place) else f"{place[1]}: nobody" for place in places)  # fmt: skip
    assert hypothesis.detail == "written last, by position: " + "; ".join(shown)
    assert (hypothesis.unknown is None) == all(read(place) is not None for place in places)
    provenance = hypothesis.provenance()
    assert (provenance.request, provenance.position) == places[0]


def test_rows_of_slots_that_nobody_wrote_are_not_known(tmp_path):
    toy = made(tmp_path, tables=elsewhere)
    actual = random(K, H, seed=3)
    failure = toy.cache_failure(lambda place: actual, [(0, 1), (1, 1), (1, 4), (0, 8)])
    (hypothesis,) = by_cause(entries.replayed_reads, failure).values()
    assert hypothesis.unknown.tolist() == [True, False, True, True]
    right = toy.tensors[KEY][1, 1].flatten()
    flat = actual.flatten()
    assert torch.equal(hypothesis.output, torch.stack([flat, right, flat, flat]))
    assert by_cause(entries.replayed_reads, toy.cache_failure(lambda place: actual, [(0, 1), (1, 4)])) == {}
    values = toy.cache_failure(lambda place: actual, [(1, 1), (0, 1)], tap=V_CACHE)
    (hypothesis,) = by_cause(entries.replayed_reads, values).values()
    assert torch.equal(hypothesis.output[0], toy.tensors[VALUE][1, 1].flatten())


def test_a_table_that_is_too_short_leads_nowhere(tmp_path):
    toy = made(tmp_path, tables=at_the_end([[3], TABLES[1]]))
    failure = toy.cache_failure(lambda place: ZEROS, [(0, 2), (0, 3), (0, 8)])
    (hypothesis,) = by_cause(entries.replayed_reads, failure).values()
    assert hypothesis.unknown.tolist() == [False, True, True]


def test_what_was_not_recorded_of_the_writes_says_nothing(tmp_path):
    toy = made(tmp_path, tables=elsewhere, omitted=(KEY,))
    assert by_cause(entries.replayed_reads, toy.cache_failure(lambda place: ZEROS, [(1, 1), (0, 1)])) == {}


@pytest.mark.parametrize(("tap", "cause"), [
    (VALUE, "K and V are written to each other's cache"), (RAW, "keys are cached before rotary"),
    ("model.layers.0.k_rope", "the cache holds what layer 0 wrote"),
])  # fmt: skip
def test_another_tensor_is_named(toy, tap, cause):
    explanation = named(toy.cache_failure(lambda place: toy.tensors[tap][place]))
    assert (explanation.cause, explanation.residual_after) == (cause, 0)


# Another row, by its content.


def of_rows(toy, source, places, *, tap=K_CACHE, noise=0.0):
    right = KEY if tap == K_CACHE else VALUE

    def actual(place):
        written = ZEROS if source(place) is None else toy.tensors[right][source(place)]
        return written * (1 + noise)

    return toy.cache_failure(actual, places, tap=tap)


@pytest.mark.parametrize("tap", [K_CACHE, V_CACHE])
@pytest.mark.parametrize(
    ("source", "places", "cause"),
    [
        (lambda place: (1, place[1] - 1), [(0, 3), (0, 6)], SHARED),
        (lambda place: (0, place[1] + 2), [(0, 1), (0, 4), (0, 6)], AWAY.format("+2")),
        (
            lambda place: (place[0], place[1] - 1), [(0, 3), (1, 3), (0, 6)],
            AWAY.format("-1") + BOUNDARY,
        ),
        (lambda place: (0, 8 - place[1]), [(0, 1), (0, 5)], SLOT),
        (lambda place: (0, 8 - place[1]), [(0, 3), (0, 6)], f"{SLOT}{BOUNDARY}"),
        (lambda place: (0, 5), [(0, 4)], SLOT),  # one row alone has no shift in common with others
        (lambda place: (place[1] % 2, 2), [(0, 3), (0, 4), (0, 5), (0, 6), (0, 7)], MIXED),
    ],
    ids=["other request", "two away", "before", "mirrored", "at blocks", "alone", "both"],
)  # fmt: skip
def test_rows_that_are_those_of_other_places(toy, source, places, cause, tap):
    failure = of_rows(toy, source, places, tap=tap)
    (hypothesis,) = by_cause(entries.other_row, failure).values()
    assert named(failure).cause == hypothesis.cause == cause
    assert torch.equal(hypothesis.output, failure.actual)
    assert hypothesis.num_fitted == len(places)
    shown = (f"{p}: request {r}, position {at}, step {step_of((r, at))}"
             for (_, p), (r, at) in ((place, source(place)) for place in places[:4]))  # fmt: skip
    assert hypothesis.detail.startswith("written last, by position: " + "; ".join(shown))
    provenance = hypothesis.provenance()
    assert (provenance.request, provenance.position) == places[0]


@pytest.mark.parametrize(
    ("num_others", "num_own", "cause"), [(6, 1, SHARED), (5, 1, MIXED), (1, 5, MIXED), (1, 6, SLOT)]
)
def test_most_rows_say_whose_they_are(toy, num_others, num_own, cause):
    """Six of seven are 86 %, five of six 83 %."""
    places = [(0, p) for p in range(8)][: num_others + num_own]
    failure = of_rows(toy, lambda place: (1, 6 - place[1]) if place[1] < num_others else (0, 8), places)
    assert list(by_cause(entries.other_row, failure)) == [cause]


def test_zeros_and_content_that_nobody_has_are_nobodys(toy):
    failure = of_rows(toy, lambda place: None if place[1] == 4 else (1, 2), [(0, 1), (0, 4), (0, 5)])
    strange = 5 * random(K * H, seed=9)
    failure.actual[2] = strange
    (hypothesis,) = by_cause(entries.other_row, failure).values()
    assert hypothesis.detail == "written last, by position: 1: request 1, position 2, step 1; 4: nobody; 5: nobody"
    assert not hypothesis.output[1].any()
    assert hypothesis.cause == SHARED
    assert by_cause(entries.other_row, of_rows(toy, lambda place: None, [(0, 1), (0, 4)])) == {}


def test_a_slot_whose_row_went_to_another_may_hold_anything(toy):
    """Position 5 stands in the slot of position 4, and nothing was written to its own."""
    failure = of_rows(toy, lambda place: (place[0], place[1] + 1), [(0, 1), (0, 2), (0, 4), (0, 5)])
    failure.actual[[1, 3]] = 5 * random(2, K * H, seed=9)
    (hypothesis,) = by_cause(entries.other_row, failure).values()
    assert named(failure).cause == hypothesis.cause == AWAY.format("+1")
    assert hypothesis.unknown.tolist() == [False, True, False, True]
    failure.rows.position[3] += 2  # now its row went nowhere
    assert by_cause(entries.other_row, failure)[AWAY.format("+1")].unknown.tolist() == [False, True, False, False]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("roundings", "is_known"), [(3.9, True), (4.1, False)])
def test_a_row_is_anothers_up_to_four_roundings(toy, dtype, roundings, is_known):
    failure = toy.cache_failure(
        lambda place: toy.tensors[KEY][1, 2] * (1 + roundings * rounding_unit(dtype)), [(0, 1)], dtype=dtype
    )
    assert bool(by_cause(entries.other_row, failure)) == is_known


def test_a_prefix_that_two_requests_share_is_the_same_row(tmp_path):
    """Up to position 3 both have the same tokens: what request 1 wrote there is request 0's own, too."""
    tokens = [[5, 6, 7, 8, 9, 10, 11, 12, 13, 14], [5, 6, 7, 8, 50, 51, 52]]
    toy = made(tmp_path, tokens=tokens)
    near = AWAY.format("+1")
    assert list(by_cause(entries.other_row, of_rows(toy, lambda place: (1, place[1] + 1), [(0, 1), (0, 2)]))) == [near]
    assert list(by_cause(entries.other_row, of_rows(toy, lambda place: (1, place[1] + 1), [(0, 3), (0, 4)]))) == [
        SHARED
    ]
    longer = of_rows(toy, lambda place: (0, place[1] + 3), [(1, 4), (1, 5)])
    assert list(by_cause(entries.other_row, longer)) == [SHARED], "after the end of request 1"


def test_without_recorded_rows_there_is_none_to_match(tmp_path):
    toy = made(tmp_path, omitted=(KEY,))
    assert by_cause(entries.other_row, toy.cache_failure(lambda place: toy.tensors[KEY][1, 2], [(0, 1)])) == {}


@pytest.mark.parametrize("layer", [0, 2])
def test_what_is_matched_is_of_the_caches_own_layer(toy, layer):
    failure = toy.cache_failure(lambda place: ZEROS)
    operation = next(item for item in failure.graph if item.tap == f"model.layers.{layer}.k_cache")
    assert entries.provenance_of(replace(failure, operation=operation)).layer == layer


def test_every_explanation_is_tried(toy):
    failure = toy.cache_failure(lambda place: toy.tensors[KEY][1, 2], [(0, 1), (0, 4)])
    without_rotary = [explain for explain in EXPLANATIONS[Kind.CACHE][:5] if explain is not entries.rotated_once_more]
    assert all(outputs(explain, failure) for explain in without_rotary)


# In recordings of the reference engine.

TAP = "model.layers.1.k_cache"


def explain(bench, tensor, tap=TAP):
    return bench.explain(tap, tensor, code=Code.CACHE_DIFFERS)


def test_the_first_slots_of_blocks(bench):
    rows, wrong = bench.rows(TAP), bench.tap(TAP)
    boundary = (rows.position % BLOCK_SIZE == 0) & (rows.position > 0)
    wrong[boundary] = 0
    explanation = explain(bench, wrong)
    assert explanation.cause == "never written: zeros come back, at a block boundary (slot mapping)"
    assert explanation.scope == "rows at every 8th position from 8 on"
    generator = torch.Generator().manual_seed(0)
    wrong[boundary] = torch.randn(wrong[boundary].shape, generator=generator, dtype=torch.float64)
    explanation = explain(bench, wrong)
    assert explanation.cause == "the slot holds what no recorded row has, at a block boundary (slot mapping)"
    assert not explanation.is_cause  # it was written, by the engine's own record
    assert explanation.provenance.holds == "content that no recorded row has"


def test_memory_that_is_not_finite(bench):
    wrong = bench.tap(TAP)
    wrong[bench.rows(TAP).position == 16] = torch.nan
    explanation = explain(bench, wrong)
    assert explanation.cause == "the slot holds what no recorded row has, at a block boundary (slot mapping)"
    begins = "the first bad row is at position 16 of request 0, where block 2 begins"
    assert explanation.detail == f"NaN throughout, as memory that was never written may; {begins}"
    assert not explanation.is_cause
