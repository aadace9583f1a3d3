"""The history that rows would read, gathered by slots; and whose content one place of it holds."""

from dataclasses import replace

import pytest
import torch

from harness.judge.compare.align import Rows
from harness.judge.explain.cache.contents import contents_of, history, in_order, provenance_of, replayed_reads, row_keys

from ..toy_attention import BLOCK, KEY, OUT, PLACES, RAW, TABLES, VALUE, Toy, graph, step_of


def test_each_request_of_a_step_is_read_once_up_to_its_last_row(toy):
    asked = []

    def slots(step, request, length):
        asked.append((step, request, length))
        return [TABLES[request][at // BLOCK] * BLOCK + at % BLOCK for at in range(length - 1)]

    reads = replayed_reads(toy.failure(), slots)
    assert asked == [(0, 0, 4), (1, 0, 6), (2, 0, 7), (3, 0, 8), (4, 0, 9), (0, 1, 1), (1, 1, 5), (2, 1, 6), (3, 1, 7)]
    for read, (step, request, length) in zip(reads, asked, strict=True):
        assert (read.step, read.request) == (step, request)
        places = [(write.request, write.position) for write in read.writes[:-1]]
        assert places == [(request, at) for at in range(length - 1)]
        assert read.writes[-1] is None
        for at, place in enumerate(places):
            assert torch.equal(read.view.key[at], toy.tensors[KEY][place])
            assert torch.equal(read.view.value[at], toy.tensors[VALUE][place])
        assert not read.view.key[-1].any()
        assert set(read.view.rows.step.tolist()) == {step}


@pytest.mark.parametrize("omitted", [KEY, VALUE])
def test_nothing_is_read_where_keys_or_values_are_not_known(tmp_path, omitted):
    toy = Toy(tmp_path / "r", omitted=(omitted,))
    assert replayed_reads(toy.failure(), lambda step, request, length: [0] * length) is None


def test_what_is_read_goes_where_its_rows_are(toy):
    """Rows of a request and a step need not lie side by side."""
    places = [(0, 8), (0, 4), (0, 7), (0, 5)]
    failure = toy.failure(places=places)
    reads = replayed_reads(failure, lambda step, request, length: [0] * length)
    output = in_order(failure, reads, lambda read: read.view.rows.position[:, None].double().expand(-1, 24))
    assert output[:, 0].tolist() == [8, 4, 7, 5]


def test_every_row_has_a_number_of_its_own():
    most = 1 << 20
    rows = [(r, p, s) for r in (0, 1, most) for p in (0, 1, most) for s in (0, 1, most)]
    request, position, step = torch.tensor(rows).T
    assert len(set(row_keys(Rows(request=request, position=position, step=step)).tolist())) == len(rows)


def test_the_history_of_a_tap(toy, tmp_path):
    failure = toy.failure(places=[(1, 4), (0, 8)])
    right, another = failure.views
    assert torch.equal(history(failure, right, RAW, right.key), torch.stack([toy.tensors[RAW][1, p] for p in range(5)]))
    assert torch.equal(
        history(failure, another, RAW, another.key), torch.stack([toy.tensors[RAW][0, p] for p in range(9)])
    )
    assert history(failure, right, "no such tap", right.key) is None
    assert history(failure, right, OUT, right.key) is None, "it has another width"


def test_a_history_that_was_read_back_in_part_is_none(tmp_path):
    read = {"model.layers.1.k_cache": {place: torch.ones(2, 4) for place in PLACES if place != (1, 2)}}
    failure = Toy(tmp_path / "r", readback=read).failure(places=[(1, 4), (0, 8)])
    right, another = failure.views
    assert history(failure, right, "model.layers.1.k_cache", right.key) is None
    assert history(failure, another, "model.layers.1.k_cache", another.key) is not None


@pytest.mark.parametrize("layer", [0, 2])
def test_the_contents_are_those_of_the_operations_layer(toy, layer):
    operation = next(item for item in graph() if item.tap == f"model.layers.{layer}.attention")
    contents = contents_of(replace(toy.failure(), operation=operation))
    assert contents.layer == layer
    assert contents.taps["key"] == f"model.layers.{layer}.k_rope"


@pytest.mark.parametrize(
    ("place", "changed", "head"),
    [((0, 5), [1], 1), ((0, 5), [0], 0), ((0, 5), [0, 1], None), ((1, 2), [1], 1), ((1, 6), [1], None)],
)
def test_the_head_that_is_off(toy, place, changed, head):
    """Request 1's history goes up to position 4 here: what should stand after it is not known."""
    failure = toy.failure(places=[(0, 8), (1, 4)])
    content = toy.tensors[KEY][place].clone()
    content[changed] += 1
    explanation = provenance_of(failure, 3, *place, content.flatten())
    assert (explanation.head, explanation.holds) == (head, "content that no recorded row has")
    assert (explanation.layer, explanation.request, explanation.position) == (1, *place)
    assert (explanation.writer_request, explanation.writer_step) == (place[0], step_of(place))
