"""Weights in few bits of exports of OpenVINO: against what OpenVINO itself makes of them."""

import numpy as np
import pytest
import torch

from harness.errors import Code, HarnessError
from harness.extensions.exports.checkpoint import exported_folder
from harness.formats.checkpoint import resolve
from harness.formats.checkpoint.quantised import served_folder
from harness.oracle.model import load_model

openvino = pytest.importorskip("openvino", reason="the package openvino is not installed (extra openvino)")
UP, SHAPE = "model.layers.1.mlp.up_proj", (192, 4, 32)


def export(folder, kind, *, has_zeros, module=UP, zero_kind=None):
    """Write a graph with one weight in blocks of 32 inputs, and return what OpenVINO computes of it: [O, I]."""
    from openvino import opset13 as ops

    generator, bits = np.random.default_rng(3), int(kind[1])
    low = -(1 << (bits - 1)) if kind[0] == "i" else 0

    def constant(shape, kind):
        values = generator.integers(low, low + (1 << bits), size=shape)
        return ops.constant(values.astype(np.int8 if kind[0] == "i" else np.uint8), getattr(openvino.Type, kind))

    codes = constant(SHAPE, kind)
    codes.set_friendly_name(f"self.{module}.weight")
    node = ops.convert(codes, "f16")
    if has_zeros:
        node = ops.subtract(node, ops.convert(constant((*SHAPE[:2], 1), zero_kind or kind), "f16"))
    scale = ops.constant(generator.uniform(0.01, 0.02, (*SHAPE[:2], 1)).astype(np.float16))
    weight = ops.convert(ops.reshape(ops.multiply(node, scale), [SHAPE[0], -1], False), "f32")
    x = ops.parameter([-1, SHAPE[1] * SHAPE[2]], np.float32)
    product = ops.matmul(x, weight, False, True)
    folder.mkdir()
    model = openvino.Model([product], [x])
    openvino.save_model(model, folder / "openvino_model.xml", compress_to_fp16=False)
    precise = {"INFERENCE_PRECISION_HINT": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0"}
    compiled = openvino.Core().compile_model(model, "CPU", precise)
    return torch.from_numpy(compiled(np.eye(SHAPE[1] * SHAPE[2], dtype=np.float32))[0].T.copy())


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HARNESS_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize(
    ("kind", "has_zeros"), [("u4", True), ("u4", False), ("i4", False), ("i8", False), ("u8", True), ("u8", False)]
)
def test_weights_are_those_of_openvino(checkpoints, tmp_path, kind, has_zeros):
    computed = export(tmp_path / "export", kind, has_zeros=has_zeros)
    folder = resolve(str(tmp_path / "export"), hf=str(checkpoints / "qwen2-tiny"))
    dequantised = load_model(folder, dtype=torch.float32, stays=True).module(UP).weight
    assert torch.allclose(dequantised, computed, rtol=2**-10, atol=1e-7)  # it may round them to the dtype of the scales
    assert exported_folder(served_folder(folder)) == tmp_path / "export"


def test_what_is_not_read_is_refused(checkpoints, tmp_path):
    export(tmp_path / "other", "u4", has_zeros=True, zero_kind="u8")
    export(tmp_path / "stray", "u4", has_zeros=True, module="model.layers.9.mlp.up_proj")
    for name, code in (("other", Code.UNKNOWN_QUANTISATION), ("stray", Code.QUANTISED_MISFIT)):
        with pytest.raises(HarnessError) as caught:
            resolve(str(tmp_path / name), hf=str(checkpoints / "qwen2-tiny"))
        assert caught.value.code is code


@pytest.mark.parametrize("damage", ["", "<net>", None])
def test_a_damaged_export_is_refused(checkpoints, tmp_path, damage):
    export(tmp_path / "export", "u4", has_zeros=True)
    path = tmp_path / "export" / "openvino_model.xml"
    text = path.read_text()
    path.write_text(text[: len(text) // 2] if damage is None else damage)
    with pytest.raises(HarnessError) as caught:
        resolve(str(tmp_path / "export"), hf=str(checkpoints / "qwen2-tiny"))
    assert caught.value.code is Code.UNKNOWN_QUANTISATION
