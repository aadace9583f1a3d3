"""OpenVINO under test, where it is installed; exports are made by `optimum-cli`, which may have another environment."""

import shutil
import subprocess

import pytest
import torch

import harness

pytest.importorskip("openvino", exc_type=ImportError)

from harness.extensions import openvino

PROMPTS = [[5, 9, 14, 3, 8, 21, 4, 17, 6], [*range(3, 17)]]


@pytest.fixture(scope="session")
def export(checkpoints, tmp_path_factory):
    program = shutil.which("optimum-cli")
    if program is None:
        pytest.skip("optimum-cli (optimum-intel) is not installed")
    folder = tmp_path_factory.mktemp("export")
    options = ["--task", "text-generation-with-past", "--weight-format", "fp32", "--disable-convert-tokenizer"]
    command = [program, "export", "openvino", "--model", checkpoints / "qwen3-tiny", *options, folder]
    subprocess.run(command, check=True, capture_output=True)
    return folder


def check(checkpoints, export, **options):
    arguments = {"prompts": PROMPTS, "max_new_tokens": 4, "engine_options": {"export": export}} | options
    return harness.check("openvino", model=checkpoints / "qwen3-tiny", **arguments)


def test_every_operation_and_the_cache_pass(checkpoints, export):
    report = check(checkpoints, export, schedules=["plain", "chunked:3"])
    assert report, report.text()
    assert sum(report.seen.num_taps.values()) == 54
    assert any("KV_CACHE_PRECISION=f32" in note for note in report.notes)
    assert all(run.coverage.not_offered == () for run in report.runs)


def test_batches_and_drafts_pass(checkpoints, export):
    """Three prompts of other lengths: a batch is padded on the left."""
    schedules = ["batched", "rewound", "speculative", "speculative:1"]
    report = check(checkpoints, export, schedules=schedules, prompts=[*PROMPTS, [7, 8]])
    assert report, report.text()
    assert [run.coverage.missing for run in report.runs] == [0, 0, 0, 0]


def test_a_request_goes_on_when_those_beside_it_have_ended(export):
    """With its padding, forwards and back; those that have ended leave their cache."""
    together, alone = (openvino.OpenVINOStepper(export / "openvino_model.xml") for _ in range(2))
    steps = [([7], 9), ([8], 10), ([5], 10), ([6], 11)]
    alone.step([(0, PROMPTS[0], 0)])
    another = openvino.OpenVINOStepper(export / "openvino_model.xml")
    another.step([(1, PROMPTS[1], 0)])
    together.step([(0, PROMPTS[0], 0), (1, PROMPTS[1], 0)])
    for tokens, first in steps:
        expected, actual = (item.step([(0, tokens, first)]) for item in (alone, together))
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    for number, single in ((0, alone), (1, another)):
        for ours, theirs in zip(together.cached(number).values(), single.cached(number).values(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def in_process(checkpoints, export, schedule):
    """Check an engine that the test has changed."""
    options = {"export": str(export)}
    engine = openvino.open_engine(checkpoints / "qwen3-tiny", dtype="float32", device="cpu", options=options)
    arguments = {"prompts": PROMPTS, "max_new_tokens": 4, "dtype": "float32", "schedules": [schedule]}
    (run,) = harness.check(engine, model=checkpoints / "qwen3-tiny", **arguments).runs
    return run


def test_a_cache_that_is_cut_off_too_late_is_named(checkpoints, export, monkeypatch):
    cut_off = openvino._cut_off
    monkeypatch.setattr(openvino, "_cut_off", lambda batch, num: cut_off(batch, num + 1))
    divergence = in_process(checkpoints, export, "rewound").first_divergence
    assert divergence.tap == "model.layers.0.q_rope"
    assert divergence.explanation.cause == "rotary at a position off by one (+1)"
    assert divergence.position == len(PROMPTS[0]) - 1  # the first that is computed again


def test_padding_that_is_attended_to_is_found(checkpoints, export, monkeypatch):
    """The mask of the whole batch is one of ones."""
    running = openvino.OpenVINOStepper._batch_of

    def unmasked(stepper, requests):
        batch = running(stepper, requests)
        infer = batch.running.infer
        if len(requests) > 1 and not isinstance(batch.running, Unmasked):
            batch.running = Unmasked(batch.running, infer)
        return batch

    monkeypatch.setattr(openvino.OpenVINOStepper, "_batch_of", unmasked)
    divergence = in_process(checkpoints, export, "batched").first_divergence
    assert (divergence.tap, divergence.request) == ("model.layers.0.attention", 0)


class Unmasked:
    """A request for inference that is given a mask without padding."""

    def __init__(self, running, infer):
        self.running, self.own_infer = running, infer

    def __getattr__(self, name):
        return getattr(self.running, name)

    def infer(self, inputs):
        return self.own_infer(inputs | {"attention_mask": inputs["attention_mask"] * 0 + 1})


def test_an_export_has_to_be_there(checkpoints, tmp_path):
    with pytest.raises(harness.HarnessError, match=r"(?s)which is not there.*optimum-cli export openvino"):
        check(checkpoints, tmp_path)


@pytest.mark.parametrize(("option", "value"), [("device", "cuda"), ("dtype", "bfloat16")])
def test_what_it_cannot_do_is_refused(checkpoints, tmp_path, option, value):
    from harness.extensions.openvino import open_engine

    (tmp_path / "openvino_model.xml").touch()
    arguments = {"dtype": "float32", "device": "cpu", option: value}
    with pytest.raises(harness.HarnessError, match="on the CPU here, in float32"):
        open_engine(checkpoints / "qwen3-tiny", options={"export": str(tmp_path)}, **arguments)
