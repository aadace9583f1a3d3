"""Tensors side by side in another order."""

import pytest
import torch

from harness.formats.taps import Graph, Kind, Operation
from harness.judge.explain.layer import wiring

from ..toys import ToyModel, by_cause, failure_of, random

TAPS = [f"l.0.{name}" for name in ("one", "two", "three")]
PARTS = [random(5, width, seed=width) for width in (4, 6, 2)]


def failure(order, num_parts=3, meant=None):
    operation = Operation(tap="l.0.join.input", kind=Kind.COPY, inputs=tuple(TAPS[:num_parts]), source="x")
    graph = Graph((*(Operation(tap=tap, kind=Kind.NORM) for tap in TAPS), operation))
    model = ToyModel(operation)
    model.graph = graph
    right = torch.cat(PARTS[:num_parts] if meant is None else meant, dim=1)
    actual = torch.cat([PARTS[at] for at in order], dim=1)
    return failure_of(operation, actual, right, *PARTS[:num_parts], model=model)


@pytest.mark.parametrize("order", [(1, 0, 2), (2, 0, 1), (2, 1, 0)])
def test_the_order_is_named(order):
    names = ", ".join(TAPS[at].removeprefix("l.0.") for at in order)
    hypotheses = by_cause(wiring.other_order, failure(order))
    output = hypotheses[f"the parts are joined as [{names}] instead of [one, two, three]"].output
    assert torch.equal(output, torch.cat([PARTS[at] for at in order], dim=1))
    assert len(hypotheses) == 5


def test_what_is_no_row_of_its_inputs_has_no_order():
    assert by_cause(wiring.other_order, failure((1, 0), 2, meant=[PARTS[0] * 2, PARTS[1]])) == {}
    assert by_cause(wiring.other_order, failure((0,), 1)) == {}
