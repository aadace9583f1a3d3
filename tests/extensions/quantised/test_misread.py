"""Quantised weights that a loader misread: the check names the mistake, and sound engines raise no alarm."""

from pathlib import Path

import pytest
import torch

import harness
from harness.engines.hf import HFEngine
from harness.extensions.quantised.config import InputScheme
from harness.extensions.quantised.inputs import InputRounding
from harness.formats.checkpoint import Checkpoint, resolve
from harness.formats.checkpoint.quantised import read_quantised_source
from harness.oracle.model import load_model
from tests.quantised_checkpoints import Tensors, write_quantised
from tests.quantised_faults import CHECKPOINTS, FAULTS, PROMPT, UP, check_fault, score

NAMES = ["w8a8: scales of gate", "deepseek: transposed", "gptq-ordered: order ignored", "w4a16: head quantised"]


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HARNESS_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("name", NAMES)
def test_a_mistake_is_named(name: str, tmp_path: Path):
    result = score(FAULTS[name], check_fault(FAULTS[name], tmp_path))
    assert result.detected
    assert result.localised, result.others
    assert result.named == "yes", result.cause


def test_none_of_the_names_is_given_in_16_bits_where_it_does_not_hold(tmp_path: Path):
    fault = FAULTS["w4a16-asymmetric: zero point + 1"]
    result = score(fault, check_fault(fault, tmp_path, "bfloat16"))
    assert (result.detected, result.localised, result.named) == (True, True, "yes"), result


def _quantise_inputs(module: torch.nn.Module, way: InputRounding) -> None:
    """Let a product see its inputs rounded; a hook would show the rounded ones to whoever records."""
    forward = module.forward
    module.forward = lambda x: forward(way.rounded(x.flatten(0, -2)).reshape(x.shape).to(x.dtype))  # type: ignore[method-assign]


def _quantising_engine(folder: Path, wrong: Path | None = None) -> HFEngine:
    """HF on dequantised weights, its products given inputs that were quantised as the checkpoint says."""
    right = resolve(str(folder))
    hf = load_model(right if wrong is None else resolve(str(wrong)), dtype=torch.float32, stays=True)
    hf.checkpoint = Checkpoint(right)
    source = read_quantised_source(right)
    assert source is not None
    for weight in source.open().weights.values():
        _quantise_inputs(
            hf.module(weight.module), next(source.open().input_roundings(weight, weight.sizes["in"], torch.float32))
        )
    return HFEngine(hf, None)


@pytest.mark.parametrize("kind", ["w8a8", "fp8-static"])
def test_inputs_that_are_quantised_as_declared_are_a_convention(kind: str, tmp_path: Path):
    write_quantised(CHECKPOINTS / "llama-tiny", tmp_path / "m", kind)
    report = harness.check(
        _quantising_engine(tmp_path / "m"),
        model=tmp_path / "m",
        prompts=[PROMPT],
        max_new_tokens=2,
        schedules=["plain"],
    )
    report.assert_ok()
    said = {tap.convention for tap in report.runs[0].taps if tap.convention}
    expected = {
        "w8a8": "inputs quantised to int8, one scale for a token, as the checkpoint says",
        "fp8-static": "inputs quantised to float8_e4m3fn, one scale for a tensor, read from the checkpoint, as the "
        "checkpoint says",
    }
    assert said == {expected[kind]}


def test_a_wrong_weight_is_named_under_quantised_inputs(tmp_path: Path):
    def rolled(tensors: Tensors) -> None:
        tensors[f"{UP}.weight_scale"] = tensors[f"{UP}.weight_scale"].roll(1, 0)

    write_quantised(CHECKPOINTS / "llama-tiny", tmp_path / "m", "w8a8")
    write_quantised(CHECKPOINTS / "llama-tiny", tmp_path / "wrong", "w8a8", changed=rolled)
    engine = _quantising_engine(tmp_path / "m", tmp_path / "wrong")
    report = harness.check(engine, model=tmp_path / "m", prompts=[PROMPT], max_new_tokens=2, schedules=["plain"])
    causes = {finding.tap: finding.explanation.cause for finding in report.runs[0].findings if finding.explanation}
    assert causes[UP] == "each block of outputs has the scale of the one before"


def test_inputs_that_are_quantised_otherwise_are_named(tmp_path: Path):
    """The engine takes each token's own scale where the checkpoint has a static one."""
    write_quantised(CHECKPOINTS / "llama-tiny", tmp_path / "m", "fp8-static")
    hf = load_model(resolve(str(tmp_path / "m")), dtype=torch.float32, stays=True)
    scheme = InputScheme(dtype="float8_e4m3fn", share="token")
    _quantise_inputs(hf.module(UP), InputRounding(scheme=scheme, largest=448.0))
    report = harness.check(
        HFEngine(hf, None), model=tmp_path / "m", prompts=[PROMPT], max_new_tokens=2, schedules=["plain"]
    )
    (finding,) = [item for item in report.runs[0].findings if item.tap == UP]
    assert finding.explanation is not None
    assert (
        "the inputs are quantised to float8_e4m3fn, one scale for a token, and the checkpoint says float8_e4m3fn, one "
        "scale for a tensor, read from the checkpoint"
    ) in finding.explanation.cause
