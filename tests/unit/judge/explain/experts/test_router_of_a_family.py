"""The router of GLM-4 chooses by other scores than it should: a change of HF's code, or of a buffer, says why."""

import pytest
import torch

import harness
from harness.extensions.faults.zoo.models import build
from harness.judge.explain.experts.router import are_chosen_alike

PROMPTS = [list(range(5, 27)), list(range(60, 74))]
BIAS = "e_score_correction_bias of model.layers.1.mlp.gate"


def biased(change):
    def break_it(router):
        router.e_score_correction_bias.data = change(router.e_score_correction_bias.data)

    return break_it


def without_groups(router):
    router.topk_group = 2


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("break_it", "cause"),
    [
        (biased(torch.zeros_like), f"{BIAS} is zero: left out, or not loaded"),
        (biased(torch.neg), f"{BIAS} has the wrong sign"),
        (without_groups, "the groups of the experts are left out: in Glm4MoeTopkRouter"),
    ],
)
def test_a_choice_by_other_scores(tmp_path, break_it, cause):
    model = build("glm4_moe", seed=7)
    router = model.model.layers[1].mlp.gate
    router.e_score_correction_bias.data = 0.3 * torch.randn(8, generator=torch.Generator().manual_seed(1))
    model.save_pretrained(tmp_path)
    break_it(router)
    report = harness.check(model, model=tmp_path, prompts=PROMPTS, max_new_tokens=4, schedules=["plain"])
    first = report.first_divergence
    assert first.tap.startswith("model.layers.1.mlp.gate.topk")
    assert (first.explanation.is_cause, first.explanation.num_fitted) == (True, 0)
    assert first.explanation.cause.startswith(cause)


def test_a_choice_has_no_order():
    chosen, by_score = torch.tensor([[0, 3], [1, 2]]), torch.tensor([[3, 0], [1, 1]])
    assert are_chosen_alike(chosen, by_score).tolist() == [True, False]
