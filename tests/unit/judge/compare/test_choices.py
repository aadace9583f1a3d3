"""What a router chose: equal, tied within the noise, or wrong, and the experts judged on the engine's own choice."""

import math
import random
from types import SimpleNamespace

import pytest
import torch

from harness.base.metrics import rounding_unit
from harness.engines import hf_batch
from harness.errors import Code
from harness.formats.taps import Kind
from harness.judge.compare.row_judge import choice_errors
from harness.oracle.watch import Seeing
from harness.results.check import Outcome, Verdict

from .conftest import LENGTHS
from .judgements import tap

ROUTER, EXPERTS = "model.layers.1.mlp.gate", "model.layers.1.mlp.experts"
ROW = (2, LENGTHS[2] + 1)
"""A decoded row of the last request."""


def errors(scores, chosen, meant, *, control=None, places=None):
    """Scores [..., n] of all places, choices [..., k] of the judged rows."""
    scores, chosen, meant = (torch.as_tensor(x) for x in (scores, chosen, meant))
    places = torch.arange(len(chosen)) if places is None else torch.tensor(places)
    return choice_errors(
        SimpleNamespace(
            value=SimpleNamespace(scores=scores, rows=meant),
            control_scores=None if control is None else torch.as_tensor(control),
            places=places,
            actual=chosen.flatten(1),
            expected=meant.flatten(1),
        )
    ).tolist()


SCORES = torch.tensor([[5.0, 3.0, 1.0, 0.0], [0.0, 1.0, 3.0, 5.0]], dtype=torch.float64)
NOISY = SCORES + torch.tensor([[0.1, 0, 0, 0], [0, 0, 0, -0.3]])


def test_the_same_experts_in_any_order_are_no_error():
    assert errors(SCORES, [[1, 0], [3, 2]], [[0, 1], [3, 2]], control=NOISY) == [0, 0]


def test_another_expert_is_as_far_as_its_score_lies_below():
    """In units of twice the largest error of HF's own scores: each of two may be off."""
    first, second = errors(SCORES, [[0, 2], [3, 0]], [[0, 1], [3, 2]], control=NOISY)
    assert second == pytest.approx(3.0 / (2 * 0.3))
    assert first == pytest.approx(2.0 / (2 * 0.1))


def test_a_choice_within_the_noise_is_a_tie():
    scores = torch.tensor([[5.0, 3.0, 2.9, 0.0]])
    assert errors(scores, [[0, 2]], [[0, 1]], control=scores + 0.06)[0] < 1
    assert errors(scores, [[0, 2]], [[0, 1]], control=scores + 0.04)[0] > 1


def test_a_row_without_noise_is_given_that_of_the_others():
    """Where HF happened to be exact another engine need not be."""
    scores = torch.tensor([[5.0, 3.0, 2.9, 0.0]]).repeat(3, 1)
    control = scores + torch.tensor([[0.0], [0.2], [0.2]])
    actual = errors(scores, [[0, 2]] * 3, [[0, 1]] * 3, control=control)
    assert actual == pytest.approx([0.25] * 3, rel=1e-5)


def test_without_a_control_nothing_is_a_tie():
    assert errors(SCORES, [[0, 2], [3, 2]], [[0, 1], [3, 2]]) == [torch.inf, 0]


@pytest.mark.parametrize("expert", [4, -1, 2**40])
def test_an_expert_that_does_not_exist_is_never_a_tie(expert):
    assert errors(SCORES, [[0, expert], [3, 2]], [[0, 1], [3, 2]], control=NOISY + 100) == [torch.inf, 0]


def test_one_expert_twice_is_an_error():
    assert errors(SCORES, [[0, 0], [3, 2]], [[0, 1], [3, 2]], control=NOISY)[0] > 1


def test_the_best_expert_left_out_is_as_far_as_the_worst_that_was_taken():
    """Not as the lowest of those chosen: the second best, which both chose, says nothing."""
    scores = torch.tensor([[5.0, 3.0, 2.9, 0.0]])
    assert errors(scores, [[1, 2]], [[0, 1]], control=scores + 0.1) == pytest.approx([2.1 / 0.2])


@pytest.mark.parametrize(
    ("chosen", "is_right"), [([0, 1, 3], True), ([3, 1, 2], False), ([0, 1, 2], True), ([0, 2, 3], False)]
)
def test_which_of_masked_scores_are_chosen_does_not_matter(chosen, is_right):
    scores = torch.tensor([[5.0, 3.0, -torch.inf, -torch.inf]])
    (error,) = errors(scores, [chosen], [[0, 1, 2]], control=scores + 0.1)
    assert error == (0 if is_right else torch.inf)


@pytest.mark.parametrize(("chosen", "is_right"), [([0, 1, 9], True), ([0, -1, 9], False), ([0, 0, 3], False)])
def test_an_expert_that_does_not_exist_in_the_place_of_a_masked_one(chosen, is_right):
    """It does not matter, but where an expert that counts is left out."""
    scores = torch.tensor([[5.0, 3.0, -torch.inf, -torch.inf]])
    assert errors(scores, [chosen], [[0, 1, 2]], control=scores + 0.1) == [0 if is_right else torch.inf]


def test_masked_scores_of_one_row_make_no_noise_for_the_others():
    scores = torch.tensor([[5.0, -torch.inf, -torch.inf], [5.0, 3.0, 0.0]])
    assert errors(scores, [[0, 1], [0, 2]], [[0, 2], [0, 1]], control=scores + 0.1) == pytest.approx([0, 3.0 / 0.2])


def test_the_judged_rows_are_found_among_all():
    scores = SCORES.flip(0).repeat(2, 1)
    assert errors(scores, [[0, 2]], [[0, 1]], control=NOISY[:1], places=[3]) == pytest.approx([2.0 / 0.2])


def test_choices_within_groups_are_each_judged():
    """[rows, groups, experts]: the worst of a row counts."""
    scores = torch.stack([SCORES, SCORES], dim=1)
    meant = [[[0, 1], [0, 1]], [[3, 2], [3, 2]]]
    chosen = [[[0, 1], [0, 2]], [[3, 2], [3, 2]]]
    control = torch.stack([NOISY, NOISY], dim=1)
    assert errors(scores, chosen, meant, control=control) == pytest.approx([2.0 / 0.2, 0])


# In a recording.


class Choosing(Seeing):
    """HF as an engine whose router takes other experts for one request's last tokens."""

    def __init__(self, sink):
        super().__init__(sink)

    def choose(self, source, scores, chosen):
        swapped = chosen
        if source == f"{ROUTER}:topk" and len(chosen) == len(LENGTHS):  # a decode step of the batch
            swapped = chosen.clone()
            worst = scores.argsort(dim=-1)[:, 0]
            swapped[ROW[0], -1] = worst[ROW[0]]
        self._sink(source, swapped)
        return swapped


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def one(bench, request):
    return bench("qwen3_moe", request.param)


def test_sound_choices_are_exact(one, tmp_path):
    run = one.compare(one.recorded().write(tmp_path / "r"))
    assert run.findings == ()
    choices = [item for item in run.taps if item.kind == Kind.CHOICE]
    assert len(choices) == 2
    assert {choice.verdict for choice in choices} <= {Verdict.EXACT, Verdict.NOISE}


def test_a_router_that_chooses_others_is_found_and_its_experts_are_judged_on_what_it_chose(one, tmp_path, monkeypatch):
    monkeypatch.setattr(hf_batch.Recorder, "choose", Choosing.choose)
    run = one.compare(one.recorded(label="others").write(tmp_path / "r"))
    assert run.outcome is Outcome.MISMATCH
    assert [item.name for item in run.taps if item.verdict is Verdict.BUG] == [f"{ROUTER}.topk"]
    first = run.first_divergence
    assert (first.tap, first.code, first.request) == (f"{ROUTER}.topk", Code.LOCAL_ERROR, ROW[0])
    assert first.phase == "decode"
    assert tap(run, EXPERTS).verdict is Verdict.NOISE


def test_a_choice_that_the_experts_did_not_follow_is_found_at_the_experts(one, actual, tmp_path):
    """The router's tap is right, and the experts are those of somebody else."""
    rows = actual.at(EXPERTS, *ROW)
    rows.copy_(actual.at(EXPERTS, ROW[0], ROW[1] - 1))
    run = one.compare(actual.write(tmp_path / "r"))
    assert run.first_divergence.tap == EXPERTS
    assert tap(run, EXPERTS).num_bad_rows == 1


def test_near_scores_may_fall_either_way(one, actual, tmp_path):
    """The engine's expert lies below by less than its own rounding."""
    scores, chosen = actual.at(ROUTER, *ROW), actual.at(f"{ROUTER}.topk", *ROW)
    order = scores.float().argsort(descending=True).tolist()
    scores[order[2]] = scores[order[1]]
    chosen[:] = torch.tensor([order[0], order[2]])
    run = one.compare(actual.write(tmp_path / "r"))
    assert tap(run, f"{ROUTER}.topk").num_bad_rows == 0


@pytest.mark.parametrize("expert", [4, -1])
def test_an_expert_that_does_not_exist_is_a_finding(one, actual, tmp_path, expert):
    actual.at(f"{ROUTER}.topk", *ROW)[1] = expert
    run = one.compare(actual.write(tmp_path / "r"))
    assert tap(run, f"{ROUTER}.topk").num_bad_rows == 1


def test_indices_that_are_no_integers_are_no_choice(one, actual, tmp_path):
    for step in actual.computing():
        step.taps[f"{ROUTER}.topk"] = step.taps[f"{ROUTER}.topk"].float()
    run = one.compare(actual.write(tmp_path / "r"))
    (finding,) = [finding for finding in run.findings if finding.code is Code.TAP_MISMATCH]
    assert "expected indices" in finding.message


def test_indices_of_fewer_bits_are_a_choice(one, actual, tmp_path):
    """Kernels write 32 bits."""
    for step in actual.computing():
        step.taps[f"{ROUTER}.topk"] = step.taps[f"{ROUTER}.topk"].to(torch.int32)
    assert one.compare(actual.write(tmp_path / "r")).findings == ()


def test_an_engine_that_does_not_tell_its_choice(one, actual, tmp_path):
    """Then the experts are judged on HF's choice from the engine's scores."""
    names = [f"model.layers.{layer}.mlp.gate.{part}" for layer in range(2) for part in ("topk", "1")]
    for name in names:
        actual.drop(name)
    wanted = [op.tap for op in one.hf.graph if op.tap not in names]
    run = one.compare(actual.write(tmp_path / "r"), wanted=wanted)
    assert run.findings == ()
    assert set(tap(run, EXPERTS).through) == {f"{ROUTER}.topk", f"{ROUTER}.1"}


# Against a loop over rows.


def by_loop(scores, control, chosen, meant):
    """How far a row's choice is from what its scores ask for, and the noise of its scores."""
    num, distance = len(scores), 0.0
    seen = {at for at in range(num) if scores[at] > -math.inf}
    wanted, taken = set(meant) & seen, {at for at in chosen if 0 <= at < num}
    missed, extra = [scores[at] for at in wanted - taken], [scores[at] for at in taken - wanted]
    is_whole = len(taken) == len(chosen)
    if missed and extra:
        distance = max(0.0, max(missed) - min(extra))
    if (missed and len(taken) < len(wanted)) or (not is_whole and (len(wanted) == len(chosen) or missed)):
        distance = math.inf
    both = [at for at in range(num) if math.isfinite(scores[at]) and math.isfinite(control[at])]
    noise = max((abs(control[at] - scores[at]) for at in both), default=0.0)
    unit = rounding_unit(torch.float32)
    return distance, max(noise, unit * max((abs(scores[at]) for at in both), default=0.0))


@pytest.mark.parametrize("seed", range(30))
def test_choices_are_judged_as_a_loop_judges_them(seed):
    generator = random.Random(seed)
    num, k, rows = generator.randint(2, 6), generator.randint(1, 3), generator.randint(1, 5)
    k = min(k, num)
    scores = [[generator.choice([-math.inf, *map(float, range(6))]) for _ in range(num)] for _ in range(rows)]
    control = [[x + generator.choice([0.0, 0.25, -0.5]) for x in row] for row in scores]
    meant = [sorted(range(num), key=lambda at, row=row: -row[at])[:k] for row in scores]
    chosen = [
        generator.choice([row, generator.sample(range(num), k), [generator.randint(-1, num) for _ in range(k)]])
        for row in meant
    ]
    parts = [by_loop(*item) for item in zip(scores, control, chosen, meant, strict=True)]
    median = sorted(noise for _, noise in parts)[(rows - 1) // 2]
    expected = [0.0 if distance == 0 else distance / (2 * max(noise, median)) for distance, noise in parts]
    actual = errors(torch.tensor(scores), chosen, meant, control=torch.tensor(control, dtype=torch.float32))
    assert actual == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_noise_is_a_rounding_of_the_scores_at_least(dtype):
    scores = torch.tensor([[8.0, 4.0, 3.0]])
    (actual,) = errors(scores, [[2]], [[1]], control=scores.to(dtype))
    assert actual == pytest.approx(1.0 / (2 * 8 * rounding_unit(dtype)))
