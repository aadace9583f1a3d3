"""Weights and numbers of chosen experts, on a router of four experts whose products are logarithms of round numbers."""

import pytest
import torch
from torch import nn

from harness.formats.taps import Kind, Operation
from harness.judge.explain.experts import router

from ..toys import ToyModel, by_cause, failure_of, random, recorded

GATE, TOPK, WEIGHTS = (f"model.layers.1.mlp.gate{name}" for name in ("", ".topk", ":1"))
SHARES = torch.tensor(
    [[0.5, 0.3, 0.15, 0.05], [0.1, 0.2, 0.3, 0.4], [0.25, 0.05, 0.6, 0.1], [0.02, 0.7, 0.08, 0.2]], dtype=torch.float64
)
"""[R, E]: what a softmax of the products gives."""
LOGITS = SHARES.log()
CHOSEN = torch.tensor([[0, 1], [3, 2], [2, 0], [1, 3]])
PICKED = torch.tensor([[0.5, 0.3], [0.4, 0.3], [0.6, 0.25], [0.7, 0.2]], dtype=torch.float64)


class Gate(nn.Module):
    """Holds what HF's families keep beside a router's weight."""

    def __init__(self, **values):
        super().__init__()
        for name, value in values.items():
            self.register_buffer(name, value) if isinstance(value, torch.Tensor) else setattr(self, name, value)


def of(folder, expected, actual=None, *, kind=Kind.OTHER, logits=LOGITS, chosen=CHOSEN, gate=None, block=None, right=(),
       position=None, **config):  # fmt: skip
    """Return the failure of the weights, or of the numbers; `right` are rows of products after the wrong ones."""
    tap = TOPK if kind is Kind.CHOICE else WEIGHTS
    operation = Operation(tap=tap, kind=kind, inputs=(GATE,), source=f"{GATE}:{'topk' if kind is Kind.CHOICE else 1}")
    choices = () if kind is Kind.CHOICE else (Operation(tap=TOPK, kind=Kind.CHOICE, source=f"{GATE}:topk"),)
    operations = (Operation(tap=GATE, kind=Kind.LINEAR, source=f"{GATE}:linear"), *choices, operation)
    rows = torch.cat((logits, torch.tensor(right, dtype=torch.float64).view(-1, logits.shape[1])))
    numbers = torch.cat((chosen if actual is None or kind is not Kind.CHOICE else actual.long(),
                         rows[len(logits):].topk(chosen.shape[1]).indices))  # fmt: skip
    step = {"request": [0] * len(rows), "position": list(range(len(rows))), "taps": {GATE: rows, TOPK: numbers}}
    recording = recorded(folder, [step], lengths=((len(rows) + 1, 2),))
    model = ToyModel(*operations, modules={GATE: gate or Gate(), "model.layers.1.mlp": block or Gate()}, **config)
    return failure_of(operation, expected if actual is None else actual, expected, logits, model=model,
                      recording=recording, position=position)  # fmt: skip


# The choice.

LOWEST, SECOND, BEST, SAME, HIGH, LOW = (
    "the experts with the lowest scores are chosen", "the best expert is passed over: the choice begins at the second",
    "the best expert is chosen for every place", "every row is sent to the same experts",
    "the numbers of the experts are one too high", "the numbers of the experts are one too low",
)  # fmt: skip


def of_choice(folder, actual, **others):
    return of(folder, CHOSEN.double(), torch.tensor(actual, dtype=torch.float64), kind=Kind.CHOICE, **others)


def holds(explain, failure):
    """The causes that hold for every row, and may be asserted."""
    hypotheses = by_cause(explain, failure)
    for item in hypotheses.values():
        rows = item.output
        same = (rows == failure.actual).all(dim=1)
        assert not bool(((rows == failure.actual).any(dim=1) & ~same).any()), "a row holds as a whole, or not at all"
        assert item.is_cause == (float(same.double().mean()) >= 0.9)
    return {cause for cause, item in hypotheses.items() if item.is_cause and torch.equal(item.output, failure.actual)}


@pytest.mark.parametrize(
    ("actual", "causes"),
    [
        ([[3, 2], [0, 1], [1, 3], [0, 2]], {LOWEST}),
        ([[2, 3], [1, 0], [3, 1], [2, 0]], {LOWEST}),  # in any order
        ([[1, 2], [2, 1], [0, 3], [3, 2]], {SECOND}),
        ([[0, 0], [3, 3], [2, 2], [1, 1]], {BEST}),
        ([[2, 1], [2, 1], [2, 1], [1, 2]], {SAME}),
        ([[1, 2], [4, 3], [3, 1], [2, 4]], {HIGH}),
        ([[-1, 0], [2, 1], [1, -1], [0, 2]], {LOW}),
        ([[3, 2], [0, 1], [1, 3], [0, 1]], set()),
    ],
)
def test_choices(tmp_path, actual, causes):
    assert holds(router.other_choice, of_choice(tmp_path / "r", actual)) == causes


def test_of_two_groups_a_wrong_row_says_nothing_but_the_other_one(tmp_path):
    two, right = LOGITS[:, :2], LOGITS[:, :2].argmax(dim=1, keepdim=True)
    others = (1 - right).double()
    failure = of(tmp_path / "r", right.double(), others, kind=Kind.CHOICE, logits=two, chosen=right)
    assert holds(router.other_choice, failure) == set()


def test_rows_that_are_right_have_other_experts(tmp_path):
    one = [[2, 1]] * 4
    assert holds(router.other_choice, of_choice(tmp_path / "a", one, right=[[0, 2, 3, 1]])) == {SAME}
    causes = by_cause(router.other_choice, of_choice(tmp_path / "b", one, right=[[3, 2, 0, 1]]))
    assert SAME not in causes


def test_a_choice_of_all_experts_has_no_second(tmp_path):
    chosen = LOGITS.argsort(dim=1, descending=True)
    failure = of(tmp_path / "r", chosen.double(), kind=Kind.CHOICE, chosen=chosen)
    assert SECOND not in by_cause(router.other_choice, failure)
    failure = of(tmp_path / "s", chosen[:, :3].double(), kind=Kind.CHOICE, chosen=chosen[:, :3])
    assert SECOND in by_cause(router.other_choice, failure)


@pytest.mark.parametrize(("num_wrong", "is_cause"), [(2, True), (3, False)])
def test_next_to_all_rows_must_hold(tmp_path, num_wrong, is_cause):
    """Of twenty, eighteen are nine in ten."""
    logits = random(20, 6, seed=5)
    chosen = logits.topk(2).indices
    lowest = (-logits).topk(2).indices
    lowest[:num_wrong] = chosen[:num_wrong]
    failure = of(tmp_path / "r", chosen.double(), lowest.double(), kind=Kind.CHOICE, logits=logits, chosen=chosen)
    hypothesis = by_cause(router.other_choice, failure)[LOWEST]
    assert hypothesis.is_cause == is_cause
    assert torch.equal(hypothesis.output[num_wrong:], failure.actual[num_wrong:])
    assert not (hypothesis.output[:num_wrong] == failure.actual[:num_wrong]).any()


@pytest.mark.parametrize(("name", "step"), [("bfloat16", 2**-9), ("float16", 2**-12)])
def test_scores_that_are_equal_in_16_bits(tmp_path, name, step):
    """The first of two equal scores is chosen, where the second is larger by less than the dtype has."""
    logits = torch.tensor([[0.0, 1.0, 1.0 + step, -1.0], [1.0, 1.0 + step, -2.0, -3.0]], dtype=torch.float64)
    chosen, actual = logits.topk(1).indices, torch.tensor([[1.0], [0.0]], dtype=torch.float64)
    failure = of(tmp_path / "r", chosen.double(), actual, kind=Kind.CHOICE, logits=logits, chosen=chosen)
    causes = holds(router.other_choice, failure)
    assert f"the experts are chosen by scores in {name}" in causes


def test_of_many_equal_scores_the_first_are_chosen(tmp_path):
    logits = torch.zeros(3, 256, dtype=torch.float64)
    logits[:, 1::2] += 2.0**-13  # which no 16-bit dtype keeps beside 1
    logits += 1
    chosen, actual = logits.topk(4).indices, torch.arange(4.0, dtype=torch.float64).expand(3, -1)
    failure = of(tmp_path / "r", chosen.double(), actual, kind=Kind.CHOICE, logits=logits, chosen=chosen)
    causes = holds(router.other_choice, failure)
    assert {f"the experts are chosen by scores in {name}" for name in ("bfloat16", "float16")} <= causes


@pytest.mark.parametrize(("shift", "actual"), [(1, [[3, 2], [2, 0], [1, 3]]), (-1, [[0, 1], [3, 2], [2, 0]])])
def test_the_choice_of_a_neighbour(tmp_path, shift, actual):
    rows = [0, 1, 2] if shift > 0 else [1, 2, 3]
    failure = of(tmp_path / "r", CHOSEN.double(), kind=Kind.CHOICE)
    keep = torch.tensor(rows)
    failure = type(failure)(**{
        **vars(failure), "rows": failure.rows.select(keep), "actual": torch.tensor(actual, dtype=torch.float64),
        "expected": failure.expected[keep], "inputs": [LOGITS[keep]],
    })  # fmt: skip
    cause = f"the experts are those of another row, {shift:+d} positions away"
    assert holds(router.other_choice, failure) == {cause}


def test_the_first_row_has_none_before_it(tmp_path):
    """It is compared with itself, and the last has none after it."""
    failure = of(tmp_path / "r", CHOSEN.double(), kind=Kind.CHOICE)
    hypotheses = by_cause(router.other_choice, failure)
    (hypothesis,) = [item for cause, item in hypotheses.items() if "another row" in cause]
    assert hypothesis.cause == "the experts are those of another row, -1 positions away"
    assert torch.equal(hypothesis.output[0], failure.actual[0])
    assert not hypothesis.is_cause
    bare = Operation(tap=TOPK, kind=Kind.CHOICE, source=GATE)
    assert by_cause(router.other_choice, type(failure)(**{**vars(failure), "operation": bare})) == {}


@pytest.mark.parametrize(("kind", "is_explained"), [(Kind.CHOICE, True), (Kind.OTHER, False)])
def test_a_choice_of_too_few(tmp_path, kind, is_explained):
    step = {"request": [0], "position": [0], "taps": {"t": torch.zeros(1, 3, 2, dtype=torch.int64)}}
    recording = recorded(tmp_path / "r", [step])
    found_count = router.explain_count(Operation(tap="t", kind=kind, shape=(2, 4)), recording)
    assert (found_count is not None) == is_explained
    if found_count is not None:
        assert found_count.cause == "wrong top-k: a row has 6 chosen experts, and should have 8"
        assert (found_count.num_rows, found_count.num_explained, found_count.residual_before) == (0, 0, None)
        assert (found_count.residual_after, found_count.scope) == (None, "all rows")
    assert router.explain_count(Operation(tap="other", kind=kind, shape=(2,)), recording) is None
