"""How the error of the hidden state grows, position by position."""

import pytest

from harness.formats.taps import Graph, Kind, Operation
from harness.judge.compare.propagated import MAX_POSITIONS, Propagation, position_errors

from .judgements import propagated_of

GRAPH = Graph((
    Operation(tap="embed", kind=Kind.EMBEDDING), Operation(tap="first", kind=Kind.ADD),
    Operation(tap="last", kind=Kind.ADD), Operation(tap="k_cache", kind=Kind.CACHE),
    Operation(tap="logits", kind=Kind.LINEAR, sampled_only=True),
))  # fmt: skip


def found(rows, ratio, tap="last"):
    errors = {tap: propagated_of(ratio, rows=rows)}
    return [(error.tap, error.position, error.ratio_median, error.ratio_max)
            for error in position_errors(Propagation(errors=errors), GRAPH)]  # fmt: skip


def test_rows_of_one_position_are_summed_up():
    rows = [(0, 2), (1, 0), (3, 2), (4, 2), (5, 0)]
    assert found(rows, [5.0, 1.0, 9.0, 6.0, 3.0]) == [("last", 0, 1.0, 3.0), ("last", 2, 6.0, 9.0)]


def test_the_deepest_tap_that_is_at_every_row():
    each = propagated_of([1.0], rows=[(0, 0)])

    def deepest(*taps):
        return {result.tap for result in position_errors(Propagation(errors=dict.fromkeys(taps, each)), GRAPH)}

    assert deepest("embed", "first", "last", "k_cache", "logits") == {"last"}
    assert deepest("embed", "first", "k_cache", "unknown") == {"first"}
    assert deepest("k_cache", "logits") == deepest() == set()
    assert found([], []) == []


@pytest.mark.parametrize(
    ("last", "width"), [(MAX_POSITIONS - 1, 1), (MAX_POSITIONS, 2), (2 * MAX_POSITIONS - 1, 2), (2 * MAX_POSITIONS, 3)]
)
def test_neighbours_share_an_entry_where_there_are_many(last, width):
    rows = [(0, at) for at in range(last + 1)]
    entries = found(rows, [float(at) for at in range(last + 1)])
    assert [position for _, position, _, _ in entries] == list(range(0, last + 1, width))
    assert entries[0][3] == width - 1
    assert entries[-1][3] == last
    assert len(entries) <= MAX_POSITIONS
