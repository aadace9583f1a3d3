"""Changes of a whole model are many: few numbers fit one of them by chance."""

import torch

from harness.extensions.server.check.causes import _recording
from harness.judge.compare.align import Rows
from harness.judge.explain.core.rerun import Budget
from harness.judge.explain.whole_model import ModelTrials, RequestRows, model_held
from harness.oracle.model import load_model


def request_of_one_number(hf, number, generator):
    token_ids = torch.randint(3, 250, (9 + 3 * number,), generator=generator).tolist()
    position = torch.tensor([len(token_ids) - 1])
    expected = hf.run(input_ids=torch.tensor([token_ids])).logits[0, -1:].double().log_softmax(1)
    likeliest = expected.argmax(dim=1, keepdim=True)
    error = 1e-4 * torch.randn(1, 1, generator=generator, dtype=torch.float64)
    return RequestRows(
        token_ids=token_ids,
        rows=Rows(request=torch.full_like(position, number), position=position, step=torch.zeros_like(position)),
        actual=expected.gather(1, likeliest) * (1 + error),
        noise=torch.tensor([2e-6], dtype=torch.float64),
        shown=lambda logits: logits.log_softmax(1).gather(1, likeliest),
    )


def test_two_numbers_name_no_change_with_a_fitted_number(checkpoints):
    hf, generator = load_model(checkpoints / "qwen3-tiny", dtype=torch.float32), torch.Generator().manual_seed(3)
    with torch.no_grad():
        requests = [request_of_one_number(hf, number, generator) for number in range(2)]
    budget = Budget(20)
    budget.begin_explanation()
    with model_held(hf):
        trials = ModelTrials.of(requests, [], hf, _recording(requests, "float32"), torch.float32, budget)
        explanation = trials.explanation("two rows")
    assert not explanation.is_cause, explanation.cause
