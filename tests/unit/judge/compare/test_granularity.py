"""Which taps lie between those that were recorded, on a small graph."""

import pytest

from harness.formats.taps import Graph, Kind, Operation
from harness.judge.compare.replay import unrecorded_before

GRAPH = Graph((
    Operation(tap="embed", kind=Kind.EMBEDDING), Operation(tap="norm", kind=Kind.NORM, inputs=("embed",)),
    Operation(tap="k", kind=Kind.LINEAR, inputs=("norm",)), Operation(tap="v", kind=Kind.LINEAR, inputs=("norm",)),
    Operation(tap="k_cache", kind=Kind.CACHE, inputs=("k",)),
    Operation(tap="attention", kind=Kind.ATTENTION, inputs=("k", "v")),
    Operation(tap="sum", kind=Kind.ADD, inputs=("attention", "embed")),
))  # fmt: skip


@pytest.mark.parametrize(
    ("recorded", "expected"),
    [
        ({"embed", "norm", "k", "v", "attention", "sum"}, {}),
        ({"embed", "norm", "k", "v", "sum"}, {"sum": ("attention",)}),
        ({"embed", "sum"}, {"sum": ("norm", "k", "v", "attention")}),
        ({"embed", "k", "attention", "sum"}, {"k": ("norm",), "attention": ("norm", "v")}),
        ({"norm", "sum"}, {"norm": None, "sum": None}),
        ({"k", "v", "attention", "sum"}, {"k": None, "v": None, "sum": None}),
        ({"k_cache"}, {}),
        (set(), {}),
    ],
)
def test_ways_from_what_was_recorded(recorded, expected):
    assert unrecorded_before(GRAPH, recorded) == expected
