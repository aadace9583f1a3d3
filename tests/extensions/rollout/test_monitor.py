"""RolloutMonitor: a comparison every few steps of a training run, kept, and stopped at."""

import json

import pytest
import torch

import harness
from harness.errors import Code, HarnessError
from harness.extensions.rollout.monitor import read_history
from harness.extensions.rollout.report import history_text
from harness.oracle.model import load_model
from reference_engine import EngineConfig, LLMEngine, SamplingParams

from .training import sampled_rows

FOLDER = "cases/checkpoints/llama-tiny"
PROMPTS = [[1, 64, 155, 143, 3, 64], [1, 20, 31, 7, 9]]


@pytest.fixture
def module():
    return load_model(FOLDER, dtype=torch.float32, stays=True).model


@pytest.fixture(scope="module")
def rows():
    """Rollouts of an engine with the weights of the folder."""
    with LLMEngine(FOLDER, EngineConfig(dtype="float32", num_blocks=32)) as engine:
        params = SamplingParams(max_new_tokens=8, temperature=1.0, seed=0, num_logprobs=0, ignore_eos=True)
        return sampled_rows(engine, PROMPTS, params)


def test_every_other_step_is_compared_and_kept(module, rows, tmp_path):
    history = tmp_path / "gap.jsonl"
    monitor = harness.RolloutMonitor(every=2, num_rows=1, history=history, dtype="float32")
    reports = [monitor.step(step, rows, model=module) for step in range(4)]
    assert [report is not None for report in reports] == [True, False, True, False]
    assert reports[0].tokens.compared == 8, "one row of eight tokens"
    lines = [json.loads(line) for line in history.read_text().splitlines()]
    assert [(line["step"], line["verdict"]) for line in lines] == [(0, "pass"), (2, "pass")]
    assert all(0 < line["share"] <= 1 and line["seconds"] > 0 for line in lines)


def test_between_comparisons_the_gap_alone_is_read_until_it_grows(module, rows, tmp_path, monkeypatch):
    history = tmp_path / "gap.jsonl"
    monitor = harness.RolloutMonitor(every=50, num_rows=1, history=history, raises=False, dtype="float32")
    compared = []

    def compare(rollouts, **options):
        compared.append([row.row for row in rollouts.rows])
        return harness.rollout(rollouts, **options)

    monkeypatch.setattr("harness.extensions.rollout.monitor.rollout", compare)

    def logged(*gaps):
        return [
            {**row, "trainer_logprobs": [min(0.0, value - gap) for value in row["engine_logprobs"]]}
            for row, gap in zip(rows, gaps, strict=True)
        ]

    sound = [monitor.step(step, logged(1e-6, 1e-6), model=module) for step in (50, 51, 52)]
    assert [report is not None for report in sound] == [True, False, False]
    assert not monitor.step(53, logged(1e-6, 0.3), model=module), "the second row's gap is the larger one"
    assert compared == [[0], [1]]
    assert monitor.step(54, logged(1e-6, 0.3), model=module) is None, "it has not grown since"
    verdicts = [json.loads(line)["verdict"] for line in history.read_text().splitlines()]
    assert verdicts == ["pass", "nothing", "nothing", "mismatch", "nothing"]
    assert read_history(history).steps[1].gap.mean_abs == pytest.approx(1e-6, rel=1e-3)


def test_a_resumed_run_writes_below_half_a_line(module, rows, tmp_path):
    history = tmp_path / "gap.jsonl"
    history.write_text('{"step": 3, "verdict": "pa')
    monitor = harness.RolloutMonitor(num_rows=1, history=history, dtype="float32")
    monitor.step(3, rows, model=module)
    cut, whole = history.read_text().splitlines()
    assert cut == '{"step": 3, "verdict": "pa'
    assert json.loads(whole)["step"] == 3


def test_a_mismatch_that_a_later_line_replaces_is_said(module, rows, tmp_path):
    history = tmp_path / "gap.jsonl"
    harness.RolloutMonitor(num_rows=1, history=history, dtype="float32").step(3, rows, model=module)
    line = history.read_text()
    history.write_text(line.replace('"pass"', '"mismatch"', 1) + line)
    kept = read_history(history)
    assert [step.verdict for step in kept.steps] == ["pass"]
    assert "not shown: 1 mismatch of steps that a later line does again" in history_text(kept, width=100)
    history.write_text(line + line)
    assert "not shown" not in history_text(read_history(history), width=100)


def test_an_engine_with_the_weights_of_before_ends_the_run(module, rows, tmp_path):
    with torch.no_grad():  # a step of training that the engine was not told of
        module.model.layers[1].mlp.down_proj.weight.mul_(1.2)
    monitor = harness.RolloutMonitor(history=tmp_path / "gap.jsonl", dtype="float32", previous=FOLDER)
    with pytest.raises(harness.GapError, match="weights"):
        monitor.step(1, rows, model=module)
    kept = json.loads((tmp_path / "gap.jsonl").read_text())
    assert kept["verdict"] == "mismatch"
    assert "weights" in {term["kind"] for term in kept["terms"]}


@pytest.mark.slow
def test_a_run_may_go_on(module, rows):
    with torch.no_grad():
        module.lm_head.weight.mul_(1.5)
    report = harness.RolloutMonitor(raises=False, dtype="float32").step(1, rows, model=module)
    assert not report


@pytest.mark.parametrize("options", [{"every": 0}, {"num_rows": 0}, {"growth": 0.5}])
def test_numbers_that_make_no_sense(options):
    with pytest.raises(HarnessError) as caught:
        harness.RolloutMonitor(**options)
    assert caught.value.code is Code.BAD_OPTION


def test_a_history_that_cannot_be_written(module, rows, tmp_path):
    monitor = harness.RolloutMonitor(history=tmp_path / "nowhere" / "gap.jsonl", dtype="float32")
    with pytest.raises(HarnessError) as caught:
        monitor.step(0, rows, model=module)
    assert caught.value.code is Code.CANNOT_WRITE
