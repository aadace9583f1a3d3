"""Experts whose router is run again, and experts that read slots: the other two ways in which HF has mixtures.

`E` experts, `C` chosen ones of a row, `D` elements of a row.
"""

from dataclasses import replace

import pytest
import torch
from torch import nn

from harness.formats.taps import Kind, Operation
from harness.judge.explain.experts import experts
from harness.judge.explain.experts.mixture import changed, experts_of, mixture_of, others_like, recorded_choices
from harness.oracle.experts import one_expert, run_experts

from ..toys import ToyModel, by_cause, failure_of, random, recorded
from .test_experts import Experts, expert

E, D, ROWS = 4, 8, 10
X, SHARED = random(ROWS, D, seed=31), random(ROWS, D, seed=32)
BLOCK, FAR_BLOCK = "model.layers.1.mlp", "model.layers.0.mlp"
NORM, TABLE, GATE = "model.layers.1.norm", "model.layers.1.mlp.gate:1", "model.layers.1.mlp.gate:0"


@pytest.fixture(autouse=True)
def _without_gradients():
    with torch.no_grad():
        yield


# A router that is run again.


class Router(nn.Module):
    """Weights and numbers of the two experts with the highest products, in a tuple with what else a family gives."""

    def __init__(self, weight, extra=()):
        super().__init__()
        self.weight, self.extra = nn.Parameter(weight), extra

    def forward(self, x):
        weights, chosen = (x @ self.weight.T).topk(2)
        return (weights, chosen, *self.extra)


ROUTER = random(E, D, seed=33)


def routed(folder, router, *, more=0, inputs=(NORM, TABLE), source=GATE):
    """Return the failure of two-input experts, in a recording with `more` right rows than wrong ones."""
    all_rows = torch.cat((X, random(more, D, seed=34)))
    chosen = (X @ ROUTER.T).topk(2).indices
    weights = random(ROWS, 2, seed=35).abs()
    operation = Operation(tap=BLOCK, kind=Kind.OTHER, inputs=inputs, source=BLOCK)
    operations = (
        Operation(tap=NORM, kind=Kind.NORM, source=NORM), Operation(tap=TABLE, kind=Kind.OTHER, source=source),
        operation,
    )  # fmt: skip
    step = {"request": [0] * len(all_rows), "position": list(range(len(all_rows))), "taps": {NORM: all_rows}}
    recording = recorded(folder, [step], lengths=((len(all_rows) + 1, 2),))
    module = Experts(1)
    expected = module(X, chosen, weights)
    tensors = {NORM: X, TABLE: weights}
    model = ToyModel(*operations, modules={BLOCK: module, source.partition(":")[0]: router, NORM: nn.Identity()})
    failure = failure_of(
        operation, expected, expected, *(tensors[tap] for tap in inputs), model=model, recording=recording
    )
    return failure, chosen, weights


@pytest.mark.parametrize("inputs", [(NORM, TABLE), (TABLE, NORM)])
def test_the_routers_choice_is_made_again(tmp_path, inputs):
    failure, chosen, weights = routed(tmp_path / "r", Router(ROUTER), inputs=inputs)
    mixture = mixture_of(failure)
    assert torch.equal(mixture.chosen, chosen)
    assert torch.equal(mixture.weights, weights)
    assert torch.equal(mixture.x, X)
    assert mixture.scores is None


def test_the_choices_of_all_rows_are_made_again(tmp_path):
    failure, chosen, _ = routed(tmp_path / "r", Router(ROUTER), more=7)
    choices = recorded_choices(mixture_of(failure))
    assert len(choices) == ROWS + 7
    assert torch.equal(choices[:ROWS], chosen)
    (later,) = failure.recording.steps
    assert torch.equal(choices, (later.tap(NORM) @ ROUTER.T).topk(2).indices)


class Plain(Router):
    def forward(self, x):
        return super().forward(x)[1]


class RowsAndChoice(nn.Module):
    def forward(self, x):
        return (x, torch.zeros(len(x), 2, dtype=torch.int64))


@pytest.mark.parametrize(
    ("router", "source"),
    [
        (Router(ROUTER, extra=(torch.zeros(ROWS, 2, dtype=torch.int64),)), GATE),  # whose of the two?
        (Plain(ROUTER), GATE),
        (RowsAndChoice(), GATE),
        (Router(ROUTER), "model.layers.1.mlp.gate"),  # all that it gives: no part of a tuple
    ],
)
def test_a_router_that_does_not_say_its_choice(tmp_path, router, source):
    assert mixture_of(routed(tmp_path / "r", router, source=source)[0]) is None


# Slots.


class Slots(Experts):
    def forward(self, x):
        slots = x.unflatten(0, (E, -1))
        return torch.stack([self.expert(row, number) for number in range(E) for row in slots[number]])


class Block(nn.Module):
    def __init__(self, seed):
        super().__init__()
        self.shared, self.experts = nn.Linear(D, D), Slots(seed)


CHOSEN = torch.tensor([0, 1, 2, 3, 0, 1, 2, 3, 0, 1])
SCORES = random(ROWS, 1, seed=36).abs() + 0.2


def slots(of_experts=lambda row, score, number: expert(number, score * row), base=1.0, module=expert):
    rows = [
        base * shared + of_experts(row, score, number)
        for row, shared, score, number in zip(X, SHARED, SCORES[:, 0], CHOSEN.tolist(), strict=True)
    ]
    return torch.stack(rows)


def table(count=ROWS, chosen=CHOSEN, scores=SCORES):
    values = torch.zeros(count, E, dtype=torch.float64)
    values[torch.arange(count), chosen] = scores[:, 0]
    return values


INPUTS = (X, SHARED, table())


def slotted(folder, actual=None, *, inputs=INPUTS, expected=None, block=None, recorded_table=None):
    names = ("a", "b", "c")
    operation = Operation(tap=BLOCK, kind=Kind.OTHER, inputs=names[: len(inputs)], source=BLOCK)
    operations = (*(Operation(tap=name, kind=Kind.OTHER, source=name) for name in names), operation,
                  Operation(tap=FAR_BLOCK, kind=Kind.OTHER, source=FAR_BLOCK))  # fmt: skip
    all_rows = table() if recorded_table is None else recorded_table
    step = {"request": [0] * len(all_rows), "position": list(range(len(all_rows))),
            "taps": {names[at]: all_rows for at, item in enumerate(inputs) if item.shape[1] == E}}  # fmt: skip
    recording = recorded(folder, [step], lengths=((len(all_rows) + 1, 2),))
    expected = slots() if expected is None else expected
    model = ToyModel(*operations, modules={
        BLOCK: block or Block(1), FAR_BLOCK: Block(11), **{name: nn.Identity() for name in names},
    })  # fmt: skip
    return failure_of(
        operation, expected if actual is None else actual, expected, *inputs, model=model, recording=recording
    )


@pytest.mark.parametrize("inputs", [(X, SHARED, table()), (table(), SHARED, X), (SHARED, table(), X)])
def test_the_input_of_slots_is_multiplied_by_their_scores(tmp_path, inputs):
    mixture = mixture_of(slotted(tmp_path / "r", inputs=inputs))
    assert torch.equal(mixture.chosen[:, 0], CHOSEN)
    assert torch.equal(mixture.scores, SCORES)
    assert torch.equal(mixture.base, SHARED)
    torch.testing.assert_close(mixture.x, X * SCORES)
    assert mixture.weights.unique().tolist() == [1]
    torch.testing.assert_close(mixture.outputs[2, 5], expert(2, SCORES[5, 0] * X[5]))


def test_scores_that_are_used_otherwise(tmp_path):
    expected = {
        "the experts' outputs are added without the router's weights": slots(lambda row, s, n: expert(n, row)),
        "the router's weights are applied to the experts' output instead of their input": slots(
            lambda row, s, n: s * expert(n, row)
        ),
        "the router's weights are applied to the experts' input and to their output": slots(
            lambda row, s, n: s * expert(n, s * row)
        ),
        "the router's weights are applied twice": slots(lambda row, s, n: expert(n, s * s * row)),
        "the shared expert is not added": slots(base=0.0),
        "the routed experts are not added": SHARED,
        f"the experts are those of {FAR_BLOCK}": slots(lambda row, s, n: expert(n, s * row, Experts(11))),
    }
    hypotheses = by_cause(experts.wrong_experts, slotted(tmp_path / "r"))
    assert set(hypotheses) == set(expected)
    for cause, output in expected.items():
        torch.testing.assert_close(hypotheses[cause].output, output, msg=cause)


def two_of_a_row():
    values = table()
    values[3, 0] = 0.5
    return values


@pytest.mark.parametrize(
    "others",
    [
        {"inputs": (X, SHARED)},
        {"inputs": (X, SHARED, two_of_a_row())},
        {"inputs": (X, table(), table())},
        {"block": nn.Sequential(nn.Linear(D, D))},
        {"block": nn.Sequential(Experts(1))},  # which read more than rows
        {"expected": slots() + 1},
        {"expected": torch.cat((slots()[:1] + 1, slots()[1:]))},
    ],
)
def test_what_is_no_mixture_of_slots(tmp_path, others):
    assert mixture_of(slotted(tmp_path / "r", **others)) is None


@pytest.mark.parametrize(("distance", "is_same"), [(0.9e-5, True), (1.1e-5, False)])
def test_slots_give_what_they_should_up_to_rounding(tmp_path, distance, is_same):
    failure = slotted(tmp_path / "r", expected=slots() * (1 + distance))
    assert (mixture_of(failure) is not None) == is_same


def test_the_choices_of_slots_are_the_places_of_their_scores(tmp_path):
    more = torch.cat((table(), table()[[2, 2, 0]]))
    failure = slotted(tmp_path / "r", recorded_table=more)
    assert recorded_choices(mixture_of(failure)).tolist() == [[n] for n in (*CHOSEN.tolist(), 2, 2, 0)]


def test_the_experts_of_another_layer_are_found_as_its_own(tmp_path):
    failure = slotted(tmp_path / "r")
    (another,) = others_like(failure)
    assert another.tap == FAR_BLOCK
    assert experts_of(failure, another) is failure.hf.modules[FAR_BLOCK].experts
    direct = replace(another, source="direct")
    failure.hf.modules["direct"] = Experts(1)
    assert experts_of(failure, direct) is failure.hf.modules["direct"]


def test_only_operations_of_the_site_and_the_kind_are_others():
    operation = Operation(tap="model.layers.1.mlp", kind=Kind.OTHER)
    operations = [operation] + [
        Operation(tap=tap, kind=kind)
        for tap, kind in (
            ("model.layers.0.mlp", Kind.OTHER), ("model.layers.2.mlp", Kind.OTHER), ("model.layers.3.mlp", Kind.LINEAR),
            ("model.layers.0.a", Kind.OTHER), ("model.layers.0.z", Kind.OTHER),
        )
    ]  # fmt: skip
    failure = failure_of(operation, X, X, model=ToyModel(*operations))
    assert [op.tap for op in others_like(failure)] == ["model.layers.0.mlp", "model.layers.2.mlp"]


def test_parameters_are_changed_for_a_block_and_those_of_inner_modules_are_not():
    module = Block(1).experts
    module.inner = nn.Linear(2, 2)
    before = {name: tensor.clone() for name, tensor in module.named_parameters()}
    with changed(module, lambda name, tensor: tensor + 1):
        assert torch.equal(module.down_proj, before["down_proj"] + 1)
        assert torch.equal(module.inner.weight, before["inner.weight"])
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.named_parameters())


@pytest.mark.parametrize("is_tuple", [True, False])
def test_a_single_expert_is_there_twice_for_families_that_know_no_single_one(is_tuple):
    class Pairs(Experts):
        def forward(self, x, chosen, weights):
            assert chosen.shape == weights.shape == (len(x), 2)
            assert weights[:, 1].tolist() == [0] * len(x)
            output = super().forward(x, chosen, weights)
            return (output, None) if is_tuple else output

    hypotheses = one_expert(Pairs(1), X, 2)
    torch.testing.assert_close(hypotheses, torch.stack([expert(2, row) for row in X]))
    both = run_experts(Pairs(1), X, CHOSEN[:, None], torch.full((ROWS, 1), 0.5, dtype=torch.float64))
    halves = [0.5 * expert(number, row) for number, row in zip(CHOSEN.tolist(), X, strict=True)]
    torch.testing.assert_close(both, torch.stack(halves))
