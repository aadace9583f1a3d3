"""Every cause of a mixture of experts against experts that are computed one row and one expert at a time.

`E` experts, `C` chosen ones of a row, `D` elements of a row, `F` inner elements of an expert.
"""

import math
from itertools import permutations

import pytest
import torch
from torch import nn

from harness.formats.taps import Kind, Operation
from harness.judge.explain.core.rerun import replaced
from harness.judge.explain.experts import experts, mixture
from harness.judge.explain.experts.mixture import mixture_of
from harness.oracle.experts import arguments_of, num_experts, run_experts

from ..toys import ToyModel, by_cause, failure_of, random, recorded

E, C, D, F = 4, 2, 8, 3
TAP, FAR_TAP, X_TAP, WEIGHTS, CHOICE = (
    "model.layers.1.mlp.experts", "model.layers.0.mlp.experts", "model.layers.1.norm", "model.layers.1.mlp.gate:1",
    "model.layers.1.mlp.gate.topk",
)  # fmt: skip
ROWS = 12


class Experts(nn.Module):
    """As most of HF's families have them."""

    def __init__(self, seed):
        super().__init__()
        self.gate_up_proj = nn.Parameter(random(E, 2 * F, D, seed=seed))
        self.down_proj = nn.Parameter(random(E, D, F, seed=seed + 1))
        self.act_fn = nn.SiLU()

    def forward(self, x, chosen, weights):
        parts = [
            sum(weight * self.expert(row, expert) for expert, weight in zip(numbers, factors, strict=True))
            for row, numbers, factors in zip(x, chosen.tolist(), weights, strict=True)
        ]
        return torch.stack(parts)

    def expert(self, row, number):
        gate, up = (self.gate_up_proj[number] @ row).chunk(2)
        return self.down_proj[number] @ (self.act_fn(gate) * up)


RIGHT_EXPERTS, FAR = Experts(1), Experts(11)
X = random(ROWS, D, seed=21)
PAIRS = list(permutations(range(E), 2))
CHOSEN = torch.tensor(PAIRS)
ROUTING = random(ROWS, C, seed=22).abs() + 0.2


def expert(number, row, module=RIGHT_EXPERTS):
    """One expert of one row, an element at a time."""
    weight, down = module.gate_up_proj[number].tolist(), module.down_proj[number].tolist()
    products = [sum(w * v for w, v in zip(out, row.tolist(), strict=True)) for out in weight]
    inner = [g / (1 + math.exp(-g)) * u for g, u in zip(products[:F], products[F:], strict=True)]
    return torch.tensor([sum(w * v for w, v in zip(out, inner, strict=True)) for out in down], dtype=torch.float64)


def mixed(weights=ROUTING, *, one=expert, chosen=CHOSEN, x=X, number=None):
    """Rows of experts that `one` computes of number and row; `number` changes which."""
    rows = []
    for row, numbers, factors in zip(x, chosen.tolist(), weights.tolist(), strict=True):
        parts = [f * one(number(n) if number else n, row) for n, f in zip(numbers, factors, strict=True)]
        rows.append(sum(parts))
    return torch.stack(rows).detach()


@pytest.fixture(autouse=True)
def _without_gradients():
    with torch.no_grad():
        yield


OPERATION = Operation(tap=TAP, kind=Kind.OTHER, inputs=(X_TAP, CHOICE, WEIGHTS), source=TAP)


@pytest.fixture
def of(tmp_path):
    """Return what makes a failure of rows of the toy's experts; all rows that are recorded are wrong by default."""

    def make(actual=None, *, chosen=CHOSEN, weights=ROUTING, x=X, module=RIGHT_EXPERTS, others=(), expected=None):
        """`others`: the choices of rows that are right."""
        operations = (
            Operation(tap=X_TAP, kind=Kind.NORM), Operation(tap=CHOICE, kind=Kind.CHOICE),
            Operation(tap=WEIGHTS, kind=Kind.OTHER), OPERATION, Operation(tap=FAR_TAP, kind=Kind.OTHER, source=FAR_TAP),
        )  # fmt: skip
        choices = torch.cat((chosen, torch.tensor(others, dtype=torch.int64).view(-1, chosen.shape[1])))
        count = len(choices)
        step = {"request": [0] * count, "position": list(range(count)), "taps": {CHOICE: choices}}
        recording = recorded(tmp_path / f"r{len(list(tmp_path.iterdir()))}", [step], lengths=((count + 1, count),))
        expected = mixed(weights, chosen=chosen, x=x) if expected is None else expected
        return failure_of(
            OPERATION, expected if actual is None else actual, expected, x, chosen.double(), weights,
            model=ToyModel(*operations, modules={TAP: module, FAR_TAP: FAR}), recording=recording,
        )  # fmt: skip

    return make


def check(failure, expected):
    """Hold some causes, by name, against their rows; return all that is yielded."""
    hypotheses = by_cause(experts.wrong_experts, failure)
    for cause, output in expected.items():
        assert cause in hypotheses, f"{cause} is not among {list(hypotheses)}"
        torch.testing.assert_close(hypotheses[cause].output, output, msg=cause)
    return hypotheses


ALL = "the router's weights are normalised to a sum of one before the experts' outputs are added"


def test_weights_and_choices_that_are_used_otherwise(of):
    one, total = torch.ones_like(ROUTING), ROUTING.sum(dim=1, keepdim=True)
    first = torch.stack((ROUTING[:, 0], torch.zeros(ROWS)), dim=1)
    in_input = torch.stack([
        sum(expert(n, w * row) for n, w in zip(numbers, factors, strict=True))
        for row, numbers, factors in zip(X, CHOSEN.tolist(), ROUTING.tolist(), strict=True)
    ])  # fmt: skip
    expected = {
        "the experts' outputs are added without the router's weights": mixed(one),
        "the experts' outputs are averaged, without the router's weights": mixed(one / 2),
        "the router's weights are applied twice": mixed(ROUTING**2),
        ALL: mixed(ROUTING / total),
        "every expert of a row is given the weight of the first": mixed(ROUTING[:, [0, 0]]),
        "the experts of a row are given each other's weights, in the order [1, 0]": mixed(ROUTING[:, [1, 0]]),
        "the router's weights are applied to the experts' input instead of their output": in_input,
        "only the first of the chosen experts is added": mixed(first),
        "only the first of the chosen experts is added, with weights that are normalised again": mixed(
            torch.stack((torch.ones(ROWS), torch.zeros(ROWS)), dim=1)
        ),
        "each expert's output is written over those before it: only the expert with the highest number is added": mixed(
            torch.where(CHOSEN.max(dim=1, keepdim=True).values == CHOSEN, ROUTING, 0.0)
        ),
        f"the experts are those of {FAR_TAP}": mixed(one=lambda n, row: expert(n, row, FAR)),
    }  # fmt: skip
    hypotheses = check(of(), expected)
    assert set(hypotheses) == set(expected)
    assert {item.num_fitted for item in hypotheses.values()} == {0}


def three(order=(0, 1, 2)):
    chosen = torch.tensor([list(permutation) for permutation in permutations(range(E), 3)][:ROWS])
    weights = random(ROWS, 3, seed=23).abs() + 0.1
    return chosen, weights, weights[:, list(order)]


def test_three_experts_of_a_row(of):
    chosen, weights, _ = three()
    expected = {
        f"the experts of a row are given each other's weights, in the order {list(order)}": mixed(
            weights[:, list(order)], chosen=chosen
        )
        for order in list(permutations(range(3)))[1:]
    }
    kept = weights * torch.tensor([1.0, 1.0, 0.0], dtype=torch.float64)
    expected["only the first 2 of the chosen experts is added"] = mixed(kept, chosen=chosen)
    again = kept / kept.sum(dim=1, keepdim=True)
    name = "only the first 2 of the chosen experts is added, with weights that are normalised again"
    expected[name] = mixed(again, chosen=chosen)
    check(of(chosen=chosen, weights=weights), expected)


@pytest.mark.parametrize(("most", "is_tried"), [(2, True), (1, False)])
def test_many_experts_of_a_row_are_not_tried_in_every_order(of, monkeypatch, most, is_tried):
    monkeypatch.setattr(experts, "_MAX_ORDERED", most)
    assert any("in the order" in cause for cause in by_cause(experts.wrong_experts, of())) == is_tried


@pytest.mark.parametrize(
    ("moved", "cause"),
    [
        ({0: 1, 1: 0}, "experts 0 and 1 are swapped"),
        ({1: 3, 3: 1}, "experts 1 and 3 are swapped"),
        ({2: 0}, "expert 2 is computed with the weights of expert 0"),
        ({0: 1, 1: 2, 2: 3, 3: 0}, "the numbers of the experts are off by +1"),
        ({0: 3, 1: 0, 2: 1, 3: 2}, "the numbers of the experts are off by -1"),
        ({0: 2, 1: 3, 2: 1, 3: 0}, "the experts are in another order: 2 for 0, 3 for 1, 1 for 2, 0 for 3"),
    ],
)
def test_experts_in_the_place_of_others(of, moved, cause):
    rows = [at for at, pair in enumerate(PAIRS) if len(moved) > 1 or set(pair) != {0, 2}]
    parts = {"chosen": CHOSEN[rows], "x": X[rows]}
    actual = mixed(ROUTING[rows], number=lambda n: moved.get(n, n), **parts)
    hypotheses = check(of(actual, weights=ROUTING[rows], **parts), {cause: actual})
    assert hypotheses[cause].num_fitted == len(moved)


def test_an_exchange_is_said_beside_other_moves(of):
    """Experts 0 and 1 are exchanged, and 3 stands for 2, too: the exchange by itself explains its rows."""
    actual = mixed(number=lambda n: {0: 1, 1: 0, 2: 3}.get(n, n))
    exchanged = mixed(number=lambda n: {0: 1, 1: 0}.get(n, n))
    hypotheses = check(of(actual), {
        "the experts are in another order: 1 for 0, 0 for 1, 3 for 2": actual, "experts 0 and 1 are swapped": exchanged,
    })  # fmt: skip
    assert hypotheses["experts 0 and 1 are swapped"].num_fitted == 2


@pytest.mark.parametrize(("factor", "is_own"), [(0.7, True), (0.68, False)])
def test_an_expert_is_its_own_where_its_weights_are_nearly_what_they_should_be(of, factor, is_own):
    """A tenth of the energy: 0.316 of the size."""
    part = torch.stack([
        sum(w * expert(n, row) * (factor if n == 2 else 1) for n, w in zip(numbers, factors, strict=True))
        for row, numbers, factors in zip(X, CHOSEN.tolist(), ROUTING.tolist(), strict=True)
    ]).detach()  # fmt: skip
    # Beside it, expert 3 is used with the weights of expert 2, so that it would be the nearer one.
    used = torch.stack([
        sum(w * expert(3, row) for n, w in zip(numbers, factors, strict=True) if n == 2) + torch.zeros(D)
        for row, numbers, factors in zip(X, CHOSEN.tolist(), ROUTING.tolist(), strict=True)
    ]).detach()  # fmt: skip
    rows = [at for at, pair in enumerate(PAIRS) if 3 not in pair]
    failure = of((part + used)[rows], chosen=CHOSEN[rows], weights=ROUTING[rows], x=X[rows])
    causes = by_cause(experts.wrong_experts, failure)
    assert ("expert 2 is computed with the weights of expert 3" in causes) != is_own


# Outputs that are left out.


def without(numbers, rows=range(ROWS)):
    gone = torch.zeros(ROWS, dtype=torch.bool)
    gone[list(rows)] = True
    weights = ROUTING.clone()
    for number in numbers:
        weights[(number == CHOSEN) & gone[:, None]] = 0
    return weights


LACK = "some rows lack the output of experts that they chose, as under a limited capacity"


@pytest.mark.parametrize(
    ("numbers", "cause"),
    [([2], "the output of expert 2 is not added"), ([0, 3], "the output of experts 0, 3 is not added")],
)
def test_experts_whose_output_is_lost(of, numbers, cause):
    actual = mixed(without(numbers))
    hypotheses = check(of(actual), {cause: actual, LACK: actual})
    assert (hypotheses[cause].num_fitted, hypotheses[cause].is_cause) == (0, True)
    assert (hypotheses[LACK].num_fitted, hypotheses[LACK].is_cause) == (
        sum(n in numbers for pair in PAIRS for n in pair),
        False,
    )


def test_an_expert_that_some_rows_have_is_not_lost(of):
    actual = mixed(without([2], [at for at, pair in enumerate(PAIRS) if 2 in pair][1:]))
    hypotheses = check(of(actual), {LACK: actual})
    assert not any("is not added" in cause and "first" not in cause for cause in hypotheses)
    assert hypotheses[LACK].num_fitted == 5


@pytest.mark.parametrize(("num_right", "is_lost"), [(2, True), (3, False)])
def test_an_expert_that_many_right_rows_chose_is_not_lost(of, num_right, is_lost):
    """Six wrong rows chose it: two of eight are a quarter, three of nine more."""
    hypotheses = by_cause(experts.wrong_experts, of(mixed(without([2])), others=[(2, 0)] * num_right))
    assert ("the output of expert 2 is not added" in hypotheses) == is_lost


@pytest.mark.parametrize(("share", "is_out"), [(0.49, True), (0.51, False)])
def test_less_than_half_of_a_weight_is_a_lost_output(of, share, is_out):
    weights = ROUTING.clone()
    weights[CHOSEN == 2] *= share
    assert ("the output of expert 2 is not added" in by_cause(experts.wrong_experts, of(mixed(weights)))) == is_out


# One expert alone.

HALF = [at for at, pair in enumerate(PAIRS) if 2 in pair]
RIGHT = [(0, 1), (1, 3), (3, 0)] * 8
"""Choices of the right rows: of a fifth of all rows, all that chose expert 2, are wrong."""


def alone(of, one=None, *, weight=1.0, right=RIGHT, rows=HALF, actual=None):
    """Rows that chose expert 2, which alone is wrong."""

    def part(number, row):
        return weight * (one or expert)(number, row) if number == 2 else expert(number, row)

    chosen, weights, x = CHOSEN[rows], ROUTING[rows], X[rows]
    actual = mixed(weights, one=part, chosen=chosen, x=x) if actual is None else actual
    return of(actual, chosen=chosen, weights=weights, x=x, others=right)


FALLBACK = "expert 2 is another than that of the checkpoint: other weights, or not all of them"


def test_one_expert_that_computes_something_else(of):
    def changed(one):
        return alone(of, one).actual

    expected = {
        f"the weights of expert 2 are those of expert 2 of {FAR_TAP}": changed(lambda n, row: expert(n, row, FAR)),
        **{f"expert 2 is computed with the weights of expert {at}": changed(lambda n, row, at=at: expert(at, row))
           for at in (0, 1, 3)},
    }  # fmt: skip
    failure = alone(of, lambda n, row: torch.ones(D, dtype=torch.float64))
    hypotheses = check(failure, expected)
    assert {hypotheses[cause].num_fitted for cause in expected if "is computed with" in cause} == {1}
    assert hypotheses[FALLBACK].is_fallback
    assert hypotheses[FALLBACK].detail == "each of the 6 wrong rows that were looked at chose it"
    torch.testing.assert_close(hypotheses[FALLBACK].output, failure.actual)
    assert not any("router" in cause for cause in hypotheses), "what concerns all rows is not tried"


@pytest.mark.parametrize(
    ("factor", "is_said"), [(0.6, True), (-1.0, True), (0.011, True), (-0.011, True), (0.009, False), (-0.009, False)]
)
def test_one_expert_that_is_scaled(of, factor, is_said):
    failure = alone(of, weight=factor)
    hypotheses = by_cause(experts.wrong_experts, failure)
    cause = f"the output of expert 2 is scaled by {factor:.4g}"
    assert (cause in hypotheses) == is_said
    if is_said:
        torch.testing.assert_close(hypotheses[cause].output, failure.actual)
        assert hypotheses[cause].num_fitted == 1


def is_one(of, **others):
    return FALLBACK in by_cause(experts.wrong_experts, alone(of, weight=3.0, **others))


@pytest.mark.parametrize(("num_right", "is_said"), [(6, True), (7, False)])
def test_at_least_half_of_its_rows_are_wrong(of, num_right, is_said):
    assert is_one(of, right=[(2, 1)] * num_right + RIGHT * 9) == is_said


@pytest.mark.parametrize(("num_right", "is_said"), [(21, False), (22, True)])
def test_it_is_no_chance_that_all_wrong_rows_chose_it(of, num_right, is_said):
    """Six of n rows chose it: (6 / n) ** 6 is 1e-4 at n = 27.8."""
    assert is_one(of, right=[(0, 1)] * num_right) == is_said


def test_two_experts_that_all_wrong_rows_chose_are_not_told_apart(of):
    rows = [at for at, pair in enumerate(PAIRS) if set(pair) == {0, 2}]
    assert not is_one(of, rows=rows, right=[(1, 3)] * 2000)
    one = [at for at, pair in enumerate(PAIRS) if pair in ((0, 2), (2, 1))]
    assert is_one(of, rows=one, right=[(1, 3), (0, 1)] * 1000)


def test_where_not_all_wrong_rows_chose_it_it_is_not_the_one(of):
    rows = [*HALF, PAIRS.index((0, 1))]
    assert not is_one(of, rows=rows, right=[(1, 3)] * 100)


# What holds the experts.


def test_the_mixture_is_what_the_module_gives(of):
    hypotheses = mixture_of(of())
    for number in range(E):
        torch.testing.assert_close(hypotheses.outputs[number], torch.stack([expert(number, row) for row in X]))
    for row, (pair, weights) in enumerate(zip(PAIRS, ROUTING.tolist(), strict=True)):
        assert hypotheses.table[row].tolist() == [dict(zip(pair, weights, strict=True)).get(n, 0.0) for n in range(E)]
    torch.testing.assert_close(hypotheses.weights_used(), hypotheses.table)
    assert hypotheses.rows_of(3).tolist() == [3 in pair for pair in PAIRS]
    assert hypotheses.num_experts == E


def test_inputs_may_come_in_any_order(of):
    failure = of()
    for order in permutations(range(3)):
        names = tuple(OPERATION.inputs[at] for at in order)
        operation = Operation(tap=TAP, kind=Kind.OTHER, inputs=names, source=TAP)
        hypotheses = mixture_of(type(failure)(**{
            **vars(failure), "operation": operation, "inputs": [failure.inputs[at] for at in order],
        }))  # fmt: skip
        assert torch.equal(hypotheses.chosen, CHOSEN)
        assert torch.equal(hypotheses.weights, ROUTING)
        assert torch.equal(hypotheses.x, X)


def test_nothing_is_said_of_what_is_not_that_mixture(of, monkeypatch):
    expected = mixed()
    near, far = expected.clone(), expected.clone()
    near[3] *= 1 + 0.9e-5
    far[3] *= 1 + 1.1e-5
    assert mixture_of(of(expected=near)) is not None
    assert mixture_of(of(expected=far)) is None
    assert mixture_of(of(weights=ROUTING[:, :1], expected=expected)) is None
    assert by_cause(experts.wrong_experts, of(expected=far)) == {}
    for most, is_said in ((E * ROWS * D, True), (E * ROWS * D - 1, False)):
        monkeypatch.setattr(mixture, "_MAX_ELEMENTS", most)
        assert (mixture_of(of()) is not None) == is_said


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_a_mixture_has_three_inputs(of, missing):
    failure = of()
    kept = [at for at in range(3) if at != missing]
    operation = Operation(tap=TAP, kind=Kind.OTHER, inputs=tuple(OPERATION.inputs[at] for at in kept), source=TAP)
    inputs = [failure.inputs[at] for at in kept]
    failure.hf.modules |= {X_TAP: nn.Identity(), WEIGHTS: nn.Identity(), CHOICE: nn.Identity(), "": nn.Identity()}
    assert mixture_of(type(failure)(**{**vars(failure), "operation": operation, "inputs": inputs})) is None
    assert mixture_of(type(failure)(**{**vars(failure), "inputs": inputs})) is None


def test_the_number_of_experts_is_that_of_its_three_dimensional_tensors():
    module = nn.Module()
    assert num_experts(module) is None
    module.bias = nn.Parameter(torch.zeros(9, 2))
    assert num_experts(module) is None
    module.inner = nn.Linear(3, 3)
    module.up, module.down = nn.Parameter(torch.zeros(5, 2, 3)), nn.Parameter(torch.zeros(4, 3, 2))
    assert num_experts(module) == 5


def test_a_model_is_as_it_was_afterwards(of):
    before = {name: tensor.clone() for name, tensor in RIGHT_EXPERTS.named_parameters()}
    list(experts.wrong_experts(of()))
    assert all(torch.equal(tensor, before[name]) for name, tensor in RIGHT_EXPERTS.named_parameters())


@pytest.mark.parametrize(
    ("cause", "change"),
    [
        ("gate and up are swapped", lambda held: replaced(held.gate_up_proj, "data", exchanged(held.gate_up_proj))),
        ("the activation is GELU", lambda held: replaced(held, "act_fn", nn.GELU())),
    ],
)
def test_what_all_experts_compute_is_a_change_of_hfs_code(bench_of, cause, change):
    bench = bench_of("qwen3-moe-tiny")
    operation = bench.hf.graph["model.layers.0.mlp.experts"]
    arguments = arguments_of(bench.hf.graph, operation, [bench.tap(tap) for tap in operation.inputs])
    with bench.hf.exactly(operation.module), change(bench.hf.module(operation.module)):
        rows = run_experts(bench.hf.module(operation.module), *arguments)
    explanation = bench.explain(operation.tap, rows)
    assert cause in explanation.cause
    assert explanation.is_cause


def exchanged(weight_E2FD):
    return weight_E2FD.roll(weight_E2FD.shape[1] // 2, dims=1)
