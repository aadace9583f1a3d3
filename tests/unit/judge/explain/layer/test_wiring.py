"""Tensors side by side in another order."""

import pytest
import torch
from torch import nn

from harness.formats.taps import Graph, Kind, Operation
from harness.judge.explain.layer import wiring

from ..toys import ToyModel, by_cause, failure_of, named, random, recorded

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


# An addition: stream s and branch b, and what else a layer has.

STREAM_BEFORE, NORM, BRANCH_TAP, SUM = (
    "model.layers.0.output", "model.layers.1.input_layernorm", "model.layers.1.self_attn.o_proj",
    "model.layers.1.attn_residual",
)  # fmt: skip
EARLIER, FAR, LATER = "model.layers.0.mlp.down_proj", "model.layers.2.mlp", "model.norm"
S, B = random(4, 6, seed=1), random(4, 6, seed=2)


def of(actual=None, *, inputs=(STREAM_BEFORE, BRANCH_TAP), taps=None, folder=None, dtype=torch.float32):
    norm = nn.RMSNorm(6, eps=1e-6, dtype=torch.float64)
    norm.weight.data = torch.linspace(0.5, 2, 6, dtype=torch.float64)
    operation = Operation(tap=SUM, kind=Kind.ADD, inputs=inputs, source="model.layers.1.sum")
    operations = (
        Operation(tap=EARLIER, kind=Kind.LINEAR),
        Operation(tap=STREAM_BEFORE, kind=Kind.ADD, source="model.layers.0"),
        Operation(tap=NORM, kind=Kind.NORM, inputs=(STREAM_BEFORE,), source=NORM),
        Operation(tap="model.layers.1.other_norm", kind=Kind.NORM, inputs=(BRANCH_TAP,), source=NORM),
        Operation(tap="model.layers.1.first_norm", kind=Kind.NORM, inputs=(EARLIER,), source=NORM),
        Operation(tap="model.layers.1.gate", kind=Kind.LINEAR, inputs=(STREAM_BEFORE,), source=NORM),
        Operation(tap=BRANCH_TAP, kind=Kind.LINEAR, source=BRANCH_TAP),
        operation,
        Operation(tap=FAR, kind=Kind.OTHER),
        Operation(tap=LATER, kind=Kind.NORM, inputs=(SUM,)),
    )
    sides = {STREAM_BEFORE: S, BRANCH_TAP: B}
    recording = recorded(folder, [{"request": [0] * 4, "position": list(range(4)), "taps": taps or {"x": S}}])
    return failure_of(
        operation, S + B if actual is None else actual, S + B, *(sides[tap] for tap in inputs),
        model=ToyModel(*operations, modules={NORM: norm}), recording=recording, dtype=dtype,
    )  # fmt: skip


@pytest.mark.parametrize("inputs", [(STREAM_BEFORE, BRANCH_TAP), (BRANCH_TAP, STREAM_BEFORE)])
@pytest.mark.parametrize(("stream", "branch"), [(1, 0.25), (0.6, 1), (0.5, -2)])
def test_the_factors_of_both_sides_are_fitted(tmp_path, inputs, stream, branch):
    """A fit of both says nothing more where one of them is 1; the stream is the side that was there first."""
    failure = of(stream * S + branch * B, inputs=inputs, folder=tmp_path / "r")
    alone, one, *both = wiring.other_addition(failure)
    assert (alone.num_fitted, one.num_fitted, len(both)) == (1, 1, int(1 not in (stream, branch)))
    for item in both:
        assert item.num_fitted == 2
        assert item.cause == f"the residual is added with a factor of {stream:g}, and the branch with one of {branch:g}"
        torch.testing.assert_close(item.output, stream * S + branch * B)
    if stream == 1:
        assert alone.cause == f"the branch is added with a factor of {branch:g}"
        torch.testing.assert_close(alone.output, S + branch * B)
    if branch == 1:
        assert one.cause == f"the residual is added with a factor of {stream:g}"
        torch.testing.assert_close(one.output, stream * S + B)


MISTAKES = {
    "the branch is added with a factor of 0.22": S + 0.22 * B,
    "the residual is added with a factor of 0.7": 0.7 * S + B,
    "the residual is added with a factor of 0.7, and the branch with one of 1.2": 0.7 * S + 1.2 * B,
    "values outside of -0.5 to 0.75 are cut off": (S + B).clamp(-0.5, 0.75),
}


@pytest.mark.parametrize("cause", MISTAKES)
def test_a_mistake_is_named(tmp_path, cause):
    explanation = named(of(MISTAKES[cause], folder=tmp_path / "r"))
    assert explanation.is_cause
    assert explanation.cause.startswith(cause)
    assert explanation.num_explained == explanation.num_rows
