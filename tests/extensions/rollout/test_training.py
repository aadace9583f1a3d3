"""Rollouts and weights from Python."""

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

import harness
from harness.oracle.model import load_model

ROWS = [{"prompt_ids": [1, 20, 31, 7, 9], "response_ids": [40, 41, 42], "engine_logprobs": [-4.0, -5.0, -6.0]}]


@pytest.fixture(scope="module")
def trainer():
    return load_model("cases/checkpoints/llama-tiny", dtype=torch.float32, stays=True).model


def column(module, row):
    ids = torch.tensor([[*row["prompt_ids"], *row["response_ids"]]])
    with torch.no_grad():
        logprobs = module(input_ids=ids).logits[0].log_softmax(dim=-1)
    begin = len(row["prompt_ids"])
    return [float(logprobs[at - 1, ids[0, at]]) for at in range(begin, ids.shape[1])]


def test_rows_in_memory_and_a_module(trainer):
    rows = [{**row, "engine_logprobs": column(trainer, row)} for row in ROWS]
    report = harness.rollout(rows, model="llama-tiny", trainer=trainer, dtype="float32")
    assert report
    assert repr(report) == "<RolloutReport pass: rollouts, 3 tokens>"
    assert str(report).startswith("PASS  rollouts")
    assert report.as_dict()["verdict"] == "pass"


class Changed(torch.nn.Module):
    """A trainer that is no model of HF's: a function of the logits of one."""

    def __init__(self, inner, change):
        super().__init__()
        self.inner, self.change = inner, change

    def forward(self, ids):
        return self.change(self.inner(input_ids=ids).logits)


def test_a_module_of_any_kind_is_judged_by_its_logits(trainer):
    rows = [{**row, "engine_logprobs": column(trainer, row)} for row in ROWS]
    report = harness.rollout(rows, model="llama-tiny", trainer=Changed(trainer, lambda x: x), dtype="float32")
    assert report
    assert report.sides[0].source == "Changed"


@pytest.mark.parametrize(
    ("change", "code", "what"),
    [
        (lambda logits: logits * torch.nan, "H233", "logits that are not finite"),
        (lambda logits: torch.cat([logits, logits], dim=-1), "H017", r"shape \[1, 8, 512\], not \[1, 8, 256\]"),
        (lambda logits: logits[0], "H017", r"shape \[1, 256\], not \[1, 8, 256\]"),
    ],
)
def test_a_trainer_whose_logits_cannot_be_used_is_refused(trainer, change, code, what):
    with pytest.raises(harness.HarnessError, match=what) as caught:
        harness.rollout(ROWS, model="llama-tiny", trainer=Changed(trainer, change), dtype="float32")
    assert caught.value.code == code


@pytest.mark.slow
def test_a_fault_of_a_module_of_any_kind_is_not_called_its_heads(trainer):
    rows = [{**row, "engine_logprobs": column(trainer, row)} for row in ROWS]
    wrong = Changed(trainer, lambda logits: logits.roll(1, dims=-1))
    report = harness.rollout(rows, model="llama-tiny", trainer=wrong, dtype="float32")
    (term,) = [term for term in report.terms if not term.is_rounding]
    assert (term.kind, term.detail) == ("operations", "trainer: the whole model, of which only logits are seen")
    assert report.not_judged[0].startswith("operations and weights of the trainer: its tensors are not those of the")


@pytest.mark.parametrize("option", ["previous", "engine_weights"])
def test_weights_of_another_model_are_refused(option):
    with pytest.raises(harness.HarnessError, match="the checkpoint is one of another model") as caught:
        harness.rollout(ROWS, model="llama-tiny", dtype="float32", **{option: "qwen3-tiny"})
    assert (caught.value.code, caught.value.where) == ("H013", f"{option}=")
    assert "q_norm.weight differs" in str(caught.value.actual)


def test_a_model_that_computes_nan_is_refused(tmp_path):
    folder = shutil.copytree("cases/checkpoints/llama-tiny", tmp_path / "nan")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][0] = torch.nan
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(harness.HarnessError, match="HF itself is not finite in high precision") as caught:
        harness.rollout(ROWS, model=folder, dtype="float32")
    assert caught.value.code == "H043"


@pytest.mark.slow
def test_a_gap_can_be_asserted():
    report = harness.rollout(ROWS, model="llama-tiny", dtype="float32")
    assert not report
    with pytest.raises(harness.GapError, match="no known cause fits the rest"):
        report.assert_ok()


def test_a_trainer_that_raises_is_named():
    class Raising(torch.nn.Module):
        def forward(self, ids):
            raise ValueError("no such thing")

    with pytest.raises(harness.HarnessError, match="trainer Raising") as caught:
        harness.rollout(ROWS, model="llama-tiny", trainer=Raising(), dtype="float32")
    assert caught.value.code == "H017"


@pytest.mark.parametrize(
    "arguments",
    [{"layout": "top"}, {"truth": "float8"}, {"num_rows": 0}, {"num_rows": -1}, {"trainer": 5}, {"head": "x"}],
)
def test_bad_arguments_are_named(arguments):
    with pytest.raises(harness.HarnessError) as caught:
        harness.rollout(ROWS, model="llama-tiny", **arguments)
    assert (caught.value.code, caught.value.where) == ("H013", f"{next(iter(arguments))}=")


def test_weights_of_a_module(trainer):
    result = harness.weights("llama-tiny", trainer)
    assert result.outcome == "pass"
    assert result.only_second == ()
