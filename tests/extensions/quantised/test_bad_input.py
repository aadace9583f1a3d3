"""Quantised checkpoints that are damaged, half described or of an unknown format: refused with the tensor's name."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.errors import Code, HarnessError
from harness.extensions.quantised import checkpoint as quantised_checkpoint
from harness.extensions.quantised.checkpoint import QuantisedCheckpoint
from harness.formats.checkpoint import resolve
from tests.quantised_checkpoints import KINDS, Tensors, write_quantised
from tests.quantised_faults import CHECKPOINTS

Q = "model.layers.0.self_attn.q_proj"


def _set(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.update({name: change(tensors[name])})


def _without(name: str) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        del tensors[name]

    return change


def _first(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        x.view(-1)[0] = value
        return x

    return change


def _state(**fields: Any) -> Callable[[Tensors], None]:
    """Change bitsandbytes' state."""
    name = f"{Q}.weight.quant_state.bitsandbytes__nf4"

    def change(tensors: Tensors) -> None:
        state = {**json.loads(bytes(tensors[name].tolist())), **fields}
        tensors[name] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)

    return change


def _group(kind: str, inputs: dict[str, Any] | None = None, targets: Any = None, **weights: Any) -> dict[str, Any]:
    """Return the one group of a kind, changed."""
    group = KINDS[kind].config["config_groups"]["group_0"]
    changed = {**group, "targets": group["targets"] if targets is None else targets}
    changed["weights"] = {**group["weights"], **weights}
    changed["input_activations"] = {**group["input_activations"], **inputs} if inputs else group["input_activations"]
    return {"config_groups": {"group_0": changed}}


TENSORS: dict[str, tuple[str, Callable[[Tensors], None], Code, str]] = {
    "no scale": ("w8a8", _without(f"{Q}.weight_scale"), Code.QUANTISED_PART_MISSING, f"{Q}.weight_scale"),
    "no codes": ("w4a16", _without(f"{Q}.weight_packed"), Code.QUANTISED_PART_MISSING, f"{Q}.weight_packed"),
    "no g_idx": ("gptq", _without(f"{Q}.g_idx"), Code.QUANTISED_PART_MISSING, f"{Q}.g_idx"),
    "no zero points": ("awq", _without(f"{Q}.qzeros"), Code.QUANTISED_PART_MISSING, f"{Q}.qzeros"),
    "no global scale": (
        "nvfp4", _without(f"{Q}.weight_global_scale"), Code.QUANTISED_PART_MISSING, f"{Q}.weight_global_scale"
    ),
    "no state": (
        "nf4", _without(f"{Q}.weight.quant_state.bitsandbytes__nf4"), Code.QUANTISED_PART_MISSING, "quant_state"
    ),
    "scale of another shape": (
        "w8a8", _set(f"{Q}.weight_scale", lambda x: x[:-1]), Code.QUANTISED_MISFIT, "[192, 1] or [192]"
    ),
    "blocks of another shape": (
        "deepseek", _set(f"{Q}.weight_scale_inv", lambda x: x.T), Code.QUANTISED_MISFIT, "[6, 3]"
    ),
    "scale of another dtype": (
        "w8a8", _set(f"{Q}.weight_scale", lambda x: x.to(torch.int32)), Code.QUANTISED_MISFIT, "F32 or F16 or BF16"
    ),
    "shape that contradicts": (
        "w4a16", _set(f"{Q}.weight_shape", lambda x: x * 2), Code.QUANTISED_MISFIT, f"{Q}.weight_shape"
    ),
    "state that is no JSON": (
        "nf4", _set(f"{Q}.weight.quant_state.bitsandbytes__nf4", torch.zeros_like), Code.QUANTISED_MISFIT, "quant_state"
    ),
    "state without a shape": ("nf4", _state(shape=[]), Code.QUANTISED_MISFIT, "the state of the quantiser"),
    "offset that is no number": ("nf4", _state(nested_offset=10**400), Code.QUANTISED_MISFIT, "too large"),
    "scales without their table": (
        "nf4-doubled", _without(f"{Q}.weight.nested_quant_map"), Code.QUANTISED_MISFIT, "half described"
    ),
    "scales without theirs": ("nf4-doubled", _without(f"{Q}.weight.nested_absmax"), Code.QUANTISED_MISFIT, "absmax"),
    "shape that is one number": (
        "w4a16", _set(f"{Q}.weight_shape", lambda x: x[0]), Code.QUANTISED_MISFIT, f"{Q}.weight_shape"
    ),
    "group where there are none": (
        "w8a8", lambda tensors: tensors.update({f"{Q}.weight_g_idx": torch.full((96,), 50, dtype=torch.int32)}),
        Code.BAD_SCALE, "expected: 0 to 0",
    ),
    "code that is NaN": (
        "fp8-dynamic", _set(f"{Q}.weight", lambda x: (x.float() * float("nan")).to(x.dtype)), Code.BAD_SCALE,
        "18432 of 18432 codes stand for no finite number",
    ),
    "integers that nothing explains": (
        "w4a16", lambda tensors: tensors.update({"model.extra": torch.zeros(3, dtype=torch.int8)}),
        Code.QUANTISED_MISFIT, "model.extra",
    ),
    "scale that is NaN": ("w8a8", _set(f"{Q}.weight_scale", _first(float("nan"))), Code.BAD_SCALE, f"{Q}.weight_scale"),
    "scale that is infinite": ("gptq", _set(f"{Q}.scales", _first(float("inf"))), Code.BAD_SCALE, f"{Q}.scales"),
    "exponent that is NaN": ("mxfp4", _set(f"{Q}.weight_scale", _first(255)), Code.BAD_SCALE, f"{Q}.weight_scale"),
    "scale of zero": ("awq", _set(f"{Q}.scales", _first(0.0)), Code.BAD_SCALE, "weights that are not are lost"),
    "global scale of zero": (
        "nvfp4", _set(f"{Q}.weight_global_scale", torch.zeros_like), Code.BAD_SCALE, f"{Q}.weight_global_scale"
    ),
    "group that there is not": ("gptq", _set(f"{Q}.g_idx", _first(99)), Code.BAD_SCALE, "expected: 0 to 2"),
    "group below zero": ("gptq", _set(f"{Q}.g_idx", _first(-1)), Code.BAD_SCALE, f"{Q}.g_idx"),
    "a row too few": ("gptq", _set(f"{Q}.qweight", lambda x: x[:-4]), Code.QUANTISED_MISFIT, f"{Q}"),
}  # fmt: skip

FIELDS: dict[str, tuple[str, dict[str, Any], Code, str]] = {
    "method": ("gptq", {"quant_method": "hqq"}, Code.UNKNOWN_QUANTISATION, "quant_method"),
    "field": ("gptq", {"rotation": "hadamard"}, Code.UNKNOWN_QUANTISATION, "quantization_config.rotation"),
    "bits": ("gptq", {"bits": 3}, Code.UNKNOWN_QUANTISATION, "expected: 2, 4, 8"),
    "no group size": ("gptq", {"group_size": ...}, Code.UNKNOWN_QUANTISATION, "group_size is missing"),
    "group size that does not divide": ("gptq", {"group_size": 128}, Code.QUANTISED_MISFIT, "a multiple of 128"),
    "dynamic": ("gptq", {"dynamic": {"-:lm_head": {}}}, Code.UNKNOWN_QUANTISATION, "quantization_config.dynamic"),
    "layout": ("awq", {"version": "gemv"}, Code.UNKNOWN_QUANTISATION, "gemm"),
    "block": ("deepseek", {"weight_block_size": [128]}, Code.UNKNOWN_QUANTISATION, "weight_block_size"),
    "other block": ("deepseek", {"weight_block_size": [64, 64]}, Code.QUANTISED_MISFIT, "weight_scale_inv"),
    "packing": ("w4a16", {"format": "marlin-24"}, Code.UNKNOWN_QUANTISATION, "marlin-24"),
    "sparsity": ("w4a16", {"sparsity_config": {"format": "2of4"}}, Code.UNKNOWN_QUANTISATION, "sparsity_config"),
    "status": ("w4a16", {"quantization_status": "calibration"}, Code.UNKNOWN_QUANTISATION, "compressed"),
    "no groups": ("w4a16", {"config_groups": {}}, Code.UNKNOWN_QUANTISATION, "config_groups"),
    "left out": ("w4a16", {"ignore": ["re:.*q_proj"]}, Code.QUANTISED_MISFIT, "said not to be quantised"),
    "what shares a scale": ("w8a8", _group("w8a8", strategy="token"), Code.UNKNOWN_QUANTISATION, "weights.strategy"),
    "packed blocks": (
        "w4a16",
        _group("w4a16", strategy="block", block_structure=[32, 32]),
        Code.UNKNOWN_QUANTISATION,
        "expected: channel, group",
    ),
    "NVFP4 without groups": ("nvfp4", _group("nvfp4", strategy="tensor"), Code.UNKNOWN_QUANTISATION, "tensor_group"),
    "order without groups": ("w8a8", _group("w8a8", actorder="group"), Code.UNKNOWN_QUANTISATION, "expected: group"),
    "floats with zero points": (
        "fp8-dynamic",
        _group("fp8-dynamic", symmetric=False),
        Code.UNKNOWN_QUANTISATION,
        "weights.symmetric",
    ),
    "codes of another type": (
        "w8a8",
        _group("w8a8", type="float"),
        Code.UNKNOWN_QUANTISATION,
        "expected: 8 bits of int\n  actual:   8 bits of float",
    ),
    "inputs in groups of nothing": (
        "w8a8",
        _group("w8a8", {"strategy": "group", "group_size": -1}),
        Code.UNKNOWN_QUANTISATION,
        "input_activations.group_size",
    ),
    "no targets": ("w8a8", _group("w8a8", targets=[]), Code.UNKNOWN_QUANTISATION, "names no modules"),
    "target that is no name": ("w8a8", _group("w8a8", targets=[3]), Code.UNKNOWN_QUANTISATION, "names no modules"),
    "pattern": ("w8a8", {"ignore": ["re:(("]}, Code.UNKNOWN_QUANTISATION, "no regular expression"),
    "neither": ("nf4", {"load_in_4bit": False}, Code.UNKNOWN_QUANTISATION, "4 bits or 8"),
    "type": ("torchao", {"quant_type": "Float8WeightOnlyConfig"}, Code.UNKNOWN_QUANTISATION, "Int8WeightOnlyConfig"),
}


@pytest.mark.parametrize("name", TENSORS)
def test_tensors(name: str, tmp_path: Path):
    kind, change, code, text = TENSORS[name]
    write_quantised(
        CHECKPOINTS / "qwen2-tiny" if kind.startswith("nf4") else CHECKPOINTS / "llama-tiny",
        tmp_path / "m",
        kind,
        changed=change,
    )
    with pytest.raises(HarnessError) as caught:
        _ = list(QuantisedCheckpoint(tmp_path / "m").tensors())
    assert caught.value.code is code
    assert text in str(caught.value)


@pytest.mark.parametrize("name", FIELDS)
def test_fields(name: str, tmp_path: Path):
    kind, fields, code, text = FIELDS[name]
    write_quantised(CHECKPOINTS / "llama-tiny", tmp_path / "m", kind, **fields)
    with pytest.raises(HarnessError) as caught:
        _ = QuantisedCheckpoint(tmp_path / "m")
    assert caught.value.code is code
    assert text in str(caught.value)


def test_the_whole_message(tmp_path: Path):
    write_quantised(CHECKPOINTS / "llama-tiny", tmp_path / "m", "awq", changed=_without(f"{Q}.scales"))
    with pytest.raises(HarnessError) as caught:
        _ = QuantisedCheckpoint(tmp_path / "m")
    assert str(caught.value) == (
        "H222: a tensor of a quantised weight is missing\n"
        f"  where:    {tmp_path / 'm'}: {Q}.scales\n"
        "  expected: AWQ\n"
        "  actual:   no such tensor in any shard\n"
        "  try:      download the checkpoint again: a shard may be of another version"
    )


def test_a_scale_of_zero_over_zero_codes_is_no_error(tmp_path: Path):
    def change(tensors: Tensors) -> None:
        tensors[f"{Q}.weight"][0] = 0
        tensors[f"{Q}.weight_scale"][0] = 0

    write_quantised(CHECKPOINTS / "llama-tiny", tmp_path / "m", "w8a8", changed=change)
    assert not QuantisedCheckpoint(tmp_path / "m").codes(f"{Q}.weight").dequantised()[0].any()


def test_weights_of_another_shape_than_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HARNESS_CACHE", str(tmp_path / "cache"))

    def change(tensors: Tensors) -> None:
        for suffix in (".weight", ".weight_scale"):
            tensors[f"{Q}{suffix}"] = tensors[f"{Q}{suffix}"][:96]

    write_quantised(CHECKPOINTS / "llama-tiny", tmp_path / "m", "w8a8", changed=change)
    with pytest.raises(HarnessError) as caught:
        resolve(str(tmp_path / "m"))
    assert caught.value.code is Code.QUANTISED_MISFIT
    assert f"{Q}.weight" in str(caught.value)
    assert "expected: [192, 96]" in str(caught.value)


def test_a_weight_that_fills_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HARNESS_CACHE", str(tmp_path / "cache"))
    write_quantised(CHECKPOINTS / "llama-tiny", tmp_path / "m", "w8a8")
    monkeypatch.setattr(quantised_checkpoint, "available_bytes", lambda: 1000)
    with pytest.raises(HarnessError, match="does not fit into the memory") as caught:
        resolve(str(tmp_path / "m"))
    assert caught.value.code is Code.TOO_LARGE_TO_DEQUANTISE
    assert not list((tmp_path / "cache" / "dequantised").glob("[!.]*"))


def test_a_disk_that_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HARNESS_CACHE", str(tmp_path / "cache"))
    write_quantised(CHECKPOINTS / "llama-tiny", tmp_path / "m", "w8a8")
    monkeypatch.setattr(quantised_checkpoint.shutil, "disk_usage", lambda _path: type("", (), {"free": 10})())
    with pytest.raises(HarnessError, match="do not fit onto the disk") as caught:
        resolve(str(tmp_path / "m"))
    assert caught.value.code is Code.TOO_LARGE_TO_DEQUANTISE
