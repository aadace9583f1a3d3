"""Two runs bit for bit: an operation counts only where it was given the same in both."""

import pytest
import torch

from harness.compare.bits import compare_bits, first_changed
from harness.taps import Kind

PREFIX = "model.layers.1."


@pytest.fixture
def one(bench):
    return bench()


def changed(before, after, graph):
    """Return the rows that changed, as (tap, request, position)."""
    return {
        (rows.operation.tap, rows.request, int(position))
        for rows in compare_bits(before, after, graph)
        for position in rows.position[rows.is_changed]
    }


def compared(before, after, graph, tap):
    """Return the rows of a tap that were compared, as (request, position)."""
    return {
        (rows.request, int(position))
        for rows in compare_bits(before, after, graph)
        if rows.operation.tap == tap
        for position in rows.position
    }


@pytest.fixture
def pair(one, tmp_path):
    """A run, and the same with something changed; under the graph's names."""

    def made(change):
        before = one.recorded().write(tmp_path / f"before-{len(list(tmp_path.iterdir()))}")
        after = one.recorded()
        change(after)
        aliases = one.hf.graph.aliases
        folder = tmp_path / f"after-{len(list(tmp_path.iterdir()))}"
        return before.with_names(aliases), after.write(folder).with_names(aliases), one.hf.graph

    return made


def test_the_same_run_twice_is_the_same_in_every_row(pair):
    before, after, graph = pair(lambda _actual: None)
    assert changed(before, after, graph) == set()
    computed = {operation.tap for operation in graph if operation.kind is not Kind.CACHE}
    assert {rows.operation.tap for rows in compare_bits(before, after, graph)} == computed
    assert first_changed(compare_bits(before, after, graph), graph) is None


def test_a_changed_bit_is_the_operations_that_made_it_and_of_no_other(pair):
    before, after, graph = pair(lambda actual: actual.at(f"{PREFIX}mlp.up_proj", 2, 8).mul_(1 + 2**-23))
    assert changed(before, after, graph) == {(f"{PREFIX}mlp.up_proj", 2, 8)}
    act = compared(before, after, graph, f"{PREFIX}mlp.act")
    assert (2, 8) not in act, "it was given something else"
    assert (2, 7) in act


def test_zero_of_another_sign_is_another_number(pair):
    before, after, graph = pair(lambda actual: actual.at(f"{PREFIX}mlp.up_proj", 2, 8).zero_())
    tap = f"{PREFIX}mlp.up_proj"
    negative = pair(lambda actual: actual.at(tap, 2, 8).zero_().neg_())
    assert (tap, 2, 8) in changed(before, after, graph)
    assert torch.equal(after.steps[0].tap(tap), negative[1].steps[0].tap(tap))
    assert (tap, 2, 8) in changed(after, negative[1], graph)


def test_attention_counts_as_far_as_its_history_is_the_same(pair):
    before, after, graph = pair(lambda actual: actual.at(f"{PREFIX}k_rope", 2, 3).mul_(1.5))
    rows = compared(before, after, graph, f"{PREFIX}attention")
    assert {position for request, position in rows if request == 2} == {0, 1, 2}
    assert {request for request, _ in rows} > {2}


def test_the_first_change_is_the_first_operation_of_the_first_position(pair):
    def change(actual):
        actual.at("model.layers.0.mlp.up_proj", 2, 8).mul_(2)
        actual.at(f"{PREFIX}mlp.up_proj", 2, 5).mul_(2)
        actual.at(f"{PREFIX}mlp.gate_proj", 2, 5).mul_(1.5)

    before, after, graph = pair(change)
    first = first_changed(compare_bits(before, after, graph), graph)
    assert (first.operation.tap, first.request, first.position.tolist()) == (f"{PREFIX}mlp.gate_proj", 2, [5])
    assert float(first.roundings[0]) > 1e6
