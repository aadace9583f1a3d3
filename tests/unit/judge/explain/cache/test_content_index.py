"""Whose content a place of the cache holds: matched against all that was recorded of the layer."""

import pytest
import torch

from harness.base.metrics import rounding_unit
from harness.judge.compare.sequences import SlotHistory, Write
from harness.judge.explain.cache.contents import RAW_KEY, ContentIndex, describe_writes
from harness.judge.explain.core.wrong_operation import KEY, VALUE

LAYER = 1
TAPS = {
    KEY: "model.layers.1.k_rope",
    RAW_KEY: "model.layers.1.self_attn.k_norm",
    VALUE: "model.layers.1.self_attn.v_proj",
}


@pytest.fixture(scope="module")
def held(bench):
    return bench, ContentIndex(bench.recording, bench.hf.graph, LAYER, torch.float32)


def test_every_kind_has_the_rows_that_were_computed(held):
    bench, contents = held
    assert contents.taps == TAPS
    for kind, tap in TAPS.items():
        assert torch.equal(contents.tensors[kind], bench.tap(tap))
        assert torch.equal(contents.rows[kind].position, bench.rows(tap).position)


@pytest.mark.parametrize("kind", TAPS)
def test_a_row_is_told_by_kind_request_and_position(held, kind):
    bench, contents = held
    at = 20
    rows = bench.rows(TAPS[kind])
    match = contents.whose(bench.tap(TAPS[kind])[at])
    assert str(match) == f"the {kind} of request {int(rows.request[at])}, position {int(rows.position[at])}"


def test_what_is_nobodys_is_not_given_to_anybody(held):
    bench, contents = held
    key = bench.tap(TAPS[KEY])[3]
    tolerance = 4 * rounding_unit(torch.float32)
    assert contents.whose(key * (1 + 0.9 * tolerance)).position == int(bench.rows(TAPS[KEY]).position[3])
    assert contents.whose(key * (1 + 40 * tolerance)) is None
    assert str(contents.whose(torch.zeros_like(key))) == "zeros"
    assert contents.whose(key[:7]) is None, "rows of another width"


def test_a_place_is_traced_to_block_slot_and_writer(held):
    bench, contents = held
    memory, step = SlotHistory(bench.recording), len([s for s in bench.recording.steps if s.phase != "readback"]) - 1
    request, position = 0, 9
    right = next(
        item
        for item in bench.recording.steps
        if request in item.request.tolist() and position in item.position.tolist()
    )
    row = ((right.request == request) & (right.position == position)).nonzero()[0, 0]
    meant = bench.tap(TAPS[KEY])[
        int(((bench.rows(TAPS[KEY]).request == 0) & (bench.rows(TAPS[KEY]).position == 9)).nonzero()[0, 0])
    ]
    wrong = meant.clone()
    wrong[-1] += 1
    explanation = contents.provenance(
        memory, step=step, request=request, position=position, content=wrong, meant=meant, head_dim=bench.head_dim
    )
    slot = int(right.slot_mapping[row])
    assert (explanation.layer, explanation.request, explanation.position, explanation.slot) == (LAYER, 0, 9, slot)
    assert explanation.block == slot // memory.block_size
    assert (explanation.writer_request, explanation.writer_step) == (0, right.index)
    assert explanation.head == len(meant) // bench.head_dim - 1
    assert explanation.holds == "content that no recorded row has"
    read = contents.provenance(memory, step=step, request=0, position=9, content=None, head_dim=bench.head_dim)
    assert read.holds == "the key of request 0, position 9"
    assert read.head is None


def test_heads_that_are_off_alike_are_not_named(held):
    bench, contents = held
    meant = bench.tap(TAPS[KEY])[5]
    for factor, head in (
        (torch.tensor([1.0, 1.5]), None),
        (torch.tensor([1.0, 3.0]), 1),
        (torch.tensor([3.0, 1.0]), 0),
    ):
        off = torch.ones(2, bench.head_dim, dtype=torch.float64) * factor[:, None]
        explanation = contents.provenance(
            SlotHistory(bench.recording), step=0, request=0, position=0, content=meant + off.flatten(), meant=meant,
            head_dim=bench.head_dim,
        )  # fmt: skip
        assert explanation.head == head


def test_writers_are_listed_by_position_and_the_rest_counted():
    writes = [(position, Write(request=1, position=position, step=2, row=0)) for position in range(5)]
    assert describe_writes([(7, None)]) == "written last, by position: 7: nobody"
    assert describe_writes(writes[:4]).count(";") == 3
    assert describe_writes(writes).endswith("; and 1 more")
