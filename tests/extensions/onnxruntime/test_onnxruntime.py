"""ONNX Runtime GenAI under test, where it is installed."""

import subprocess
import sys

import pytest

import harness
from harness.formats.case import RequestSpec
from harness.judge.jobs.check import run_check
from harness.plan import plan_request
from harness.results.check import Outcome

pytest.importorskip("onnxruntime_genai", exc_type=ImportError)

from harness.extensions import onnxruntime as engine

PROMPTS = [[5, 9, 14, 3, 8, 21, 4, 17, 6], [*range(3, 17)]]


@pytest.fixture(scope="session")
def export(checkpoints, tmp_path_factory):
    folder = tmp_path_factory.mktemp("export")
    builder = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-p", "fp32", "-e", "cpu"]
    subprocess.run([*builder, "-i", checkpoints / "qwen3-tiny", "-o", folder], check=True, capture_output=True)
    return folder


def check(checkpoints, schedules=("plain",), **options):
    return harness.check(
        "onnxruntime", model=checkpoints / "qwen3-tiny", prompts=PROMPTS, max_new_tokens=4, schedules=schedules,
        engine_options=options,
    )  # fmt: skip


def test_the_nodes_of_an_export_are_told_by_content(checkpoints, export):
    report = check(checkpoints, export=export)
    (run,) = report.runs
    lost = set(run.coverage.not_offered)
    assert {"q_rope", "k_rope"} <= lost
    assert not lost & {"k_cache", "v_cache"}
    assert len(lost) < 8
    assert run.tokens.equal == run.tokens.compared == 8


def test_a_request_goes_back(checkpoints, export):
    rewound, speculative = check(checkpoints, ["rewound", "speculative"], export=export).runs
    assert [rewound.outcome, speculative.outcome] == [Outcome.PASS, Outcome.PASS], rewound.findings
    assert rewound.tokens.compared > 8  # those that it gives up
    assert speculative.acceptance


class KeepsAToken:
    """A generator that keeps one token more than it should."""

    def __init__(self, generator):
        self._generator = generator

    def __getattr__(self, name):
        return getattr(self._generator, name)

    def rewind_to(self, length):
        self._generator.rewind_to(length + 1)


def test_a_token_too_many_after_going_back_is_found(checkpoints, export, monkeypatch):
    opened = engine.genai.Generator
    monkeypatch.setattr(engine.genai, "Generator", lambda *arguments: KeepsAToken(opened(*arguments)))
    folder = checkpoints / "qwen3-tiny"
    forgetful = engine.open_engine(folder, dtype="float32", device="cpu", options={"export": str(export)})
    (run,) = harness.check(forgetful, model=folder, prompts=PROMPTS, max_new_tokens=4, schedules=["rewound"]).runs
    values = next(finding for finding in run.findings if finding.tap.endswith("v_cache"))
    assert values.explanation.provenance.holds == "the value of request 0, position 8"


def test_an_export_has_to_be_there(checkpoints, tmp_path):
    with pytest.raises(harness.HarnessError, match=r"(?s)which is not there.*models.builder"):
        check(checkpoints, export=tmp_path)


@pytest.fixture(scope="session")
def int4(checkpoints, tmp_path_factory):
    folder = tmp_path_factory.mktemp("int4")
    builder = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-p", "int4", "-e", "cpu"]
    subprocess.run([*builder, "-i", checkpoints / "llama-tiny", "-o", folder], check=True, capture_output=True)
    return folder


def test_an_export_in_few_bits_is_the_model(checkpoints, int4):
    plan = plan_request(
        model=str(int4), hf=str(checkpoints / "llama-tiny"), engine="onnxruntime", dtype="float32", schedules=["plain"],
        requests=[RequestSpec(token_ids=ids) for ids in PROMPTS], max_new_tokens=4,
    )  # fmt: skip
    (run,) = run_check(plan).runs
    assert run.outcome is Outcome.PASS, run.findings
    conventions = {tap.name: tap.convention for tap in run.taps}
    assert conventions["model.layers.1.mlp.down_proj"] == (
        "inputs quantised to int8, one scale for 32 inputs, as the checkpoint says"
    )
