"""What an explanation asks a failure for, on a few rows of two requests, some of which were computed twice."""

import pytest
import torch
from torch import nn

from harness.formats.recording import Recording
from harness.formats.taps import Kind, Operation
from harness.judge.compare.align import Locator, Rows
from harness.judge.explain.core import wrong_operation
from harness.judge.explain.core.wrong_operation import gathered, row_in_step, row_inputs, token_ids

from .....recording_writer import new_writer, requests_of
from ..toy_attention import PLACES, Toy
from ..toys import ToyModel, failure_of, linear, random, recorded

TAP, NORM = "model.layers.0.up", "model.layers.0.norm"
PRODUCT = Operation(tap=TAP, kind=Kind.LINEAR, inputs=("x",), source=TAP)
EXPECTED, X, WEIGHT = random(3, 4, seed=1), random(3, 5, seed=2), random(4, 5, seed=3)


def wrong(error, expected=EXPECTED):
    return failure_of(PRODUCT, expected + error, expected)


@pytest.mark.parametrize(
    ("error", "count"),
    [
        ([[1.0, 0, 0, 0]] * 3, 1.0),
        ([[1.0, 1, 0, 0]] * 3, 2.0),
        ([[1.0, 1, 1, 1]] * 3, 4.0),
        ([[9.0, 0, 0, 0], [0, 1.0, 0, 0], [0, 0, 0.1, 0]], 3.0),  # each row by itself
        ([[3.0, 0, 0, 0], [3.0, 0, 0, 0], [0, 0, 0, 7.0]], 9 / 5),
        ([[0.0, 0, 0, 0]] * 3, 1.0),
        ([[5.0, 5, 0, 0], [0.0] * 4, [0.0] * 4], 2.0),
    ],
)
def test_the_elements_that_carry_the_error(error, count):
    assert wrong(torch.tensor(error, dtype=torch.float64)).num_elements == pytest.approx(count)


def test_a_factor_is_fitted_to_all_rows():
    part, rest = random(3, 4, seed=5), random(3, 4, seed=6)
    failure = failure_of(PRODUCT, rest - 1.75 * part, EXPECTED)
    assert failure.factor_of(part, rest) == pytest.approx(-1.75)
    across = random(3, 4, seed=7)
    across -= (across * part).sum() / part.square().sum() * part
    failure = failure_of(PRODUCT, 2 * part + across, EXPECTED)
    assert failure.factor_of(part) == pytest.approx(2)


def test_rows_are_selected_with_all_that_belongs_to_them(tmp_path):
    failure = Toy(tmp_path / "r").failure()
    keep = torch.tensor([place in ((0, 2), (0, 5), (1, 6)) for place in PLACES])
    hypotheses = failure.select(keep)
    assert hypotheses.rows.position.tolist() == [2, 5, 6]
    assert torch.equal(hypotheses.actual, failure.actual[keep])
    assert torch.equal(hypotheses.expected, failure.expected[keep])
    assert [view.rows.position.tolist() for view in hypotheses.views] == [[2, 5], [6]]
    one = failure.select(torch.tensor([place == (1, 0) for place in PLACES]))
    assert [view.rows.request.tolist() for view in one.views] == [[1]]
    inputs = failure_of(PRODUCT, EXPECTED, EXPECTED, X).select(torch.tensor([False, True, True])).inputs
    assert torch.equal(inputs[0], X[1:])


# Computed again.


def of_product(expected, kind=Kind.LINEAR, inputs=X):
    operation = Operation(tap=TAP, kind=kind, inputs=("x",), source=TAP)
    model = ToyModel(operation, modules={TAP: linear(WEIGHT)})
    return failure_of(operation, expected, expected, inputs, model=model)


def test_an_operation_is_computed_again_where_that_gives_what_it_should():
    right = X @ WEIGHT.T
    another = random(2, 5, seed=8)
    with torch.no_grad():
        torch.testing.assert_close(of_product(right).replay([another], torch.arange(2)), another @ WEIGHT.T)
        for distance, is_same in ((0.9e-5, True), (1.1e-5, False)):
            far = right.clone()
            far[1] *= 1 + distance
            failure = of_product(far)
            assert failure.can_replay == is_same
            assert (failure.replay([another], torch.arange(2)) is not None) == is_same
        assert not of_product(right[:, :3]).can_replay
        assert not of_product(right, Kind.OTHER).can_replay
        zeros = of_product(torch.zeros(3, 4, dtype=torch.float64), inputs=torch.zeros(3, 5, dtype=torch.float64))
        assert zeros.can_replay, "a row of zeros is what it should be"


class Table(nn.Module):
    def __init__(self, count):
        super().__init__()
        self.register_buffer("inv_freq", torch.tensor([1.0, 0.1, 0.01])[:count])


def of_rotary(width, *, input_width=None, kind=Kind.ROTARY, head_dim=4):
    operation = Operation(tap="q", kind=kind, inputs=("x",), source="q")
    model = ToyModel(operation, modules={"q": nn.Identity()}, head_dim=head_dim)
    model.model.narrow_rotary, model.model.rotary = Table(1), Table(2)
    x, positions = random(3, input_width or width, seed=9), torch.arange(3)
    angles = positions[:, None] * torch.tensor([1.0, 0.1])
    heads = x[:, :width].unflatten(1, (-1, 4)) if width % 4 == 0 else x[:, : width // 4 * 4].unflatten(1, (-1, 4))
    a, b = heads.chunk(2, dim=-1)
    cos, sin = angles.cos()[:, None].double(), angles.sin()[:, None].double()
    turned = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(1)
    expected = torch.cat((turned, x[:, turned.shape[1] : width]), dim=1)
    return failure_of(operation, expected, expected, x, model=model)


def test_the_rotation_that_takes_the_input_to_what_it_should_be():
    failure = of_rotary(8)
    assert len(failure.rotation.frequencies) == 2
    torch.testing.assert_close(failure.replay(failure.inputs, failure.positions), failure.expected)
    ahead = failure.replay(failure.inputs, failure.positions + 1)
    torch.testing.assert_close(ahead, failure.rotation.turn(failure.inputs[0], failure.positions + 1))
    for another in (of_rotary(8, kind=Kind.NORM), of_rotary(8, input_width=12), of_rotary(10)):
        assert another.rotation is None
    assert not of_rotary(8, input_width=12).can_replay


# Weights.


def test_weights_are_copies_as_out_and_in(monkeypatch):
    class Conv1D(nn.Module):  # as HF calls it
        def __init__(self):
            super().__init__()
            self.weight, self.bias = nn.Parameter(WEIGHT.T.clone()), nn.Parameter(random(4).float())

    another = Operation(tap=NORM, kind=Kind.NORM, source=NORM)
    model = ToyModel(PRODUCT, another, modules={TAP: linear(WEIGHT.float()), NORM: Conv1D()})
    failure = failure_of(PRODUCT, EXPECTED, EXPECTED, model=model)
    hypotheses = failure.weight(TAP)
    assert hypotheses.dtype == torch.float64
    hypotheses[:] = 0
    torch.testing.assert_close(failure.weight(TAP), WEIGHT.float().double())
    torch.testing.assert_close(failure.weight(NORM), WEIGHT)
    torch.testing.assert_close(failure.weight(NORM, "bias"), random(4).float().double())
    assert failure.weight(TAP, "bias") is None
    assert failure.weight("no such tap") is None
    for most, is_held in ((20, True), (19, False)):
        monkeypatch.setattr(wrong_operation, "_MAX_WEIGHT_ELEMENTS", most)
        assert (failure.weight(TAP) is not None) == is_held


def test_siblings_read_the_same_and_are_of_the_same_kind():
    operations = [PRODUCT] + [
        Operation(tap=tap, kind=kind, inputs=inputs)
        for tap, kind, inputs in (
            ("a", Kind.LINEAR, ("x",)), ("z", Kind.LINEAR, ("x",)), ("n", Kind.NORM, ("x",)),
            ("y", Kind.LINEAR, ("b",)),
        )
    ]  # fmt: skip
    failure = failure_of(PRODUCT, EXPECTED, EXPECTED, model=ToyModel(*operations))
    assert [op.tap for op in failure.siblings()] == ["a", "z"]


# Rows of a recording.


@pytest.fixture(scope="module")
def recording(tmp_path_factory):
    """Request 0 is computed twice from position 1 on; a tap covers some rows only."""
    steps = [
        {"request": [0, 0, 0], "position": [0, 1, 2], "taps": {"x": torch.tensor([[1.0], [2.0], [3.0]])}},
        {
            "request": [1, 0, 0], "position": [0, 1, 2],
            "taps": {"x": torch.tensor([[4.0], [5.0], [6.0]]), "y": torch.tensor([[7.0], [8.0]])},
            "partial_rows": {"y": [0, 2]},
        },
    ]  # fmt: skip
    return recorded(
        tmp_path_factory.mktemp("failure") / "r", steps, lengths=((4, 2), (2, 1)), tokens=([5, 6, 7, 8], [9, 10])
    )


def rows(*places):
    return Rows(
        **{
            name: torch.tensor([place[at] for place in places])
            for at, name in enumerate(("request", "position", "step"))
        }
    )


@pytest.mark.parametrize(
    ("tap", "places", "values"),
    [
        ("x", [(0, 0, 0), (1, 0, 1)], [1, 4]),
        ("x", [(0, 1, 0), (0, 1, 1), (0, 2, 0)], [2, 5, 3]),
        ("x", [(1, 0, 1), (0, 2, 1), (0, 2, 0)], [4, 6, 3]),
        ("y", [(0, 2, 1), (1, 0, 1)], [8, 7]),
        ("y", [(0, 2, 0)], None),  # the step that computed it has no such tap
        ("y", [(0, 1, 1)], None),
        ("x", [(0, 3, 0)], None),
        ("x", [(0, 0, 0), (0, 3, 0)], None),
        ("z", [(0, 0, 0)], None),
        ("x", [], None),
    ],
)
def test_rows_of_a_tap(recording, tap, places, values):
    hypotheses = gathered(Locator(recording), tap, rows(*places))
    assert (hypotheses if hypotheses is None else hypotheses[:, 0].tolist()) == values
    if hypotheses is not None:
        assert hypotheses.dtype == torch.float64


def test_where_a_row_lies_in_a_step(recording):
    step = recording.steps[1]
    assert [row_in_step(step, "x", 0, position) for position in (0, 1, 2)] == [None, 1, 2]
    assert [row_in_step(step, "y", *place) for place in ((1, 0), (0, 1), (0, 2))] == [0, None, 1]
    assert row_in_step(step, "z", 1, 0) is None
    twice = type("Step", (), {"request": torch.tensor([0, 0]), "position": torch.tensor([3, 3]), "index": 0,
                              "has": lambda *_: True, "rows_of": lambda *_: None})()  # fmt: skip
    assert row_in_step(twice, "x", 0, 3) == 1, "the last one"


def test_inputs_of_an_operation(recording):
    locator, places = Locator(recording), rows((0, 2, 1), (1, 0, 1))
    both = Operation(tap="t", kind=Kind.ADD, inputs=("x", "y"))
    assert [x[:, 0].tolist() for x in row_inputs(locator, both, places)] == [[6, 4], [8, 7]]
    assert row_inputs(locator, both, rows((0, 1, 1))) is None
    tokens = Operation(tap="t", kind=Kind.EMBEDDING, inputs=("x",))
    assert row_inputs(locator, tokens, places)[0].tolist() == [7, 9]
    assert row_inputs(locator, Operation(tap="t", kind=Kind.OTHER), places)[0].tolist() == [7, 9]
    assert token_ids(recording, rows((1, 1, 0), (0, 3, 0))).tolist() == [10, 8]


def test_another_tap_at_the_same_rows(recording):
    failure = failure_of(
        PRODUCT, EXPECTED[:2], EXPECTED[:2], recording=recording, request=[0, 1], position=[2, 0], step=[1, 1]
    )
    assert failure.tap("x")[:, 0].tolist() == [6, 4]
    assert failure.tap("z") is None
    assert failure.positions.tolist() == [2, 0]


# Rows of a recording.


def computed_again(path):
    """A request of two tokens that is computed twice, by steps 0 and 1."""
    with new_writer(path, requests_of({0: [5, 6]}, prompt_length=2)) as writer:
        for value in (1.0, 2.0):
            writer.begin_step(phase="prefill", request=[0, 0], position=[0, 1])
            writer.tap("x", torch.tensor([[value], [10 * value]]))
            writer.end_step()
    return path


def test_a_row_that_was_computed_twice_is_taken_from_its_own_step(tmp_path):
    with Recording.open(computed_again(tmp_path / "r")) as recording:
        position, request = torch.tensor([0, 1, 0]), torch.tensor([0, 0, 0])
        rows = Rows(request=request, position=position, step=torch.tensor([0, 1, 1]))
        assert gathered(Locator(recording), "x", rows).tolist() == [[1.0], [20.0], [2.0]]


def test_a_tap_that_was_not_recorded_has_no_rows(tmp_path):
    with Recording.open(computed_again(tmp_path / "r")) as recording:
        rows = Rows(request=torch.tensor([0]), position=torch.tensor([0]), step=torch.tensor([0]))
        assert gathered(Locator(recording), "y", rows) is None
