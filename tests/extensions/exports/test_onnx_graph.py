"""Weights in few bits of exports of ONNX Runtime GenAI: against the operator's own formula."""

import json

import pytest
import torch

from harness.errors import Code, HarnessError
from harness.extensions.exports.checkpoint import exported_folder
from harness.formats.checkpoint import resolve
from harness.formats.checkpoint.quantised import read_quantised_source, served_folder
from harness.oracle.model import load_model

onnx = pytest.importorskip("onnx", reason="the package onnx is not installed (extra onnxruntime)")
BLOCK = 32
UP, QKV, HEAD = "model.layers.1.mlp.up_proj", "model.layers.0.self_attn.qkv_proj", "lm_head"


class Export:
    """A graph with nodes of `MatMulNBits`, and what each of them multiplies with."""

    def __init__(self, folder, bits, *, has_zeros=False, level=4):
        self.folder, self.bits, self.has_zeros, self.level = folder, bits, has_zeros, level
        self.nodes, self.tensors, self.weights = [], [], {}
        self.generator = torch.Generator().manual_seed(bits)

    def add(self, module, num_outputs, num_inputs, **attributes):
        groups, top = num_inputs // BLOCK, 1 << self.bits
        codes = torch.randint(top, (num_outputs, num_inputs), generator=self.generator)
        scale = torch.rand(num_outputs, groups, generator=self.generator) + 0.5
        zero = torch.full((num_outputs, groups), top // 2)
        if self.has_zeros:
            zero = torch.randint(top, (num_outputs, groups), generator=self.generator)
        spread = [item.repeat_interleave(BLOCK, dim=1) for item in (scale, zero)]
        self.weights[module] = (codes - spread[1]) * spread[0]
        name = "/" + module.replace("self_attn", "attn").replace(".", "/").replace("layers/", "layers.") + "/MatMul"
        values_by_name = {
            f"{name}.codes": self._packed(codes).reshape(num_outputs, groups, -1),
            f"{name}.scales": scale.flatten(),
        }
        if self.has_zeros:
            values_by_name[f"{name}.zeros"] = self._packed(zero).flatten()
        self.tensors += [onnx.numpy_helper.from_array(item.numpy(), key) for key, item in values_by_name.items()]
        fixed = {
            "K": num_inputs,
            "N": num_outputs,
            "bits": self.bits,
            "block_size": BLOCK,
            "accuracy_level": self.level,
        }
        node = onnx.helper.make_node(
            "MatMulNBits", ["x", *values_by_name], [f"{name}.y"], name=name, **fixed, **attributes
        )
        self.nodes.append(node)

    def _packed(self, codes):
        if self.bits == 8:
            return codes.to(torch.uint8)
        padded = torch.nn.functional.pad(codes, (0, codes.shape[1] % 2)).unflatten(1, (-1, 2))
        return (padded[..., 0] + 16 * padded[..., 1]).to(torch.uint8)

    def write(self):
        self.folder.mkdir()
        (self.folder / "genai_config.json").write_text(json.dumps({}))
        graph = onnx.helper.make_graph(self.nodes, "graph", [], [], initializer=self.tensors)
        onnx.save(onnx.helper.make_model(graph), self.folder / "model.onnx")
        return self.folder


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HARNESS_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("has_zeros", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
def test_weights_are_those_of_the_operator(checkpoints, tmp_path, bits, has_zeros):
    export = Export(tmp_path / "export", bits, has_zeros=has_zeros)
    original = load_model(checkpoints / "qwen2-tiny", dtype=torch.float32, stays=True)
    export.add(UP, *original.module(UP).weight.shape)
    parts = [original.module(QKV.replace("qkv", part)).weight for part in "qkv"]
    export.add(QKV, sum(map(len, parts)), parts[0].shape[1])
    export.add(HEAD, *original.module(HEAD).weight.shape)
    folder = resolve(str(export.write()), hf=str(checkpoints / "qwen2-tiny"))
    made = load_model(folder, dtype=torch.float32, stays=True)
    assert torch.allclose(made.module(UP).weight, export.weights[UP], rtol=1e-6)
    dequantised = torch.cat([made.module(QKV.replace("qkv", part)).weight for part in "qkv"])
    assert torch.allclose(dequantised, export.weights[QKV], rtol=1e-6)
    assert torch.allclose(made.module(HEAD).weight, export.weights[HEAD], rtol=1e-6)
    for module in ("model.layers.0.mlp.up_proj", "model.embed_tokens", "model.norm"):
        assert torch.equal(made.module(module).weight, original.module(module).weight)
    assert exported_folder(served_folder(folder)) == export.folder
    schemes = {weight.scheme.inputs for weight in read_quantised_source(folder).open().weights.values()}
    assert [str(scheme) for scheme in schemes] == ["int8, one scale for 32 inputs"]


def test_inputs_are_quantised_at_level_4_alone(checkpoints, tmp_path):
    export = Export(tmp_path / "export", 4, level=1)
    export.add(UP, 192, 128)
    folder = resolve(str(export.write()), hf=str(checkpoints / "qwen2-tiny"))
    assert {weight.scheme.inputs for weight in read_quantised_source(folder).open().weights.values()} == {None}


def refused(export, checkpoints, code):
    with pytest.raises(HarnessError) as caught:
        resolve(str(export.write()), hf=str(checkpoints / "qwen2-tiny"))
    assert caught.value.code is code
    return str(caught.value)


def test_what_is_not_read_is_refused(checkpoints, tmp_path):
    packed = Export(tmp_path / "packed", 4)
    packed.add(UP, 192, 128, weight_prepacked=1)
    assert "weight_prepacked" in refused(packed, checkpoints, Code.UNKNOWN_QUANTISATION)
    stray = Export(tmp_path / "stray", 4)
    stray.add("model.layers.9.mlp.up_proj", 192, 128)
    assert "model.layers.9.mlp.up_proj" in refused(stray, checkpoints, Code.QUANTISED_MISFIT)
    another = Export(tmp_path / "other", 4)
    another.add(UP, 192, 128)
    another.nodes.append(onnx.helper.make_node("QMoE", ["x", another.tensors[0].name], ["y"]))
    assert "QMoE" in refused(another, checkpoints, Code.UNKNOWN_QUANTISATION)
    assert "no weight of the export is in few bits" in refused(
        Export(tmp_path / "floats", 4), checkpoints, Code.UNKNOWN_QUANTISATION
    )


@pytest.mark.parametrize("damage", [b"", b"no graph", None])
def test_a_damaged_export_is_refused(checkpoints, tmp_path, damage):
    export = Export(tmp_path / "export", 4)
    export.add(UP, 192, 128)
    path = export.write() / "model.onnx"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2] if damage is None else damage)
    with pytest.raises(HarnessError) as caught:
        resolve(str(export.folder), hf=str(checkpoints / "qwen2-tiny"))
    assert caught.value.code is Code.UNKNOWN_QUANTISATION


def test_an_export_needs_what_it_was_made_from(tmp_path):
    with pytest.raises(HarnessError, match="name that one as --hf") as caught:
        resolve(str(Export(tmp_path / "export", 4).write()))
    assert caught.value.code is Code.BAD_OPTION
