"""A GGUF file against the checkpoint that it was made from: a converter's mistakes are found and named."""

import json
import shutil

import pytest
import torch

from harness.errors import Code, ExitStatus, HarnessError
from harness.formats import checkpoint
from harness.formats.checkpoint.gguf.weights import rows_of_gguf, rows_of_hf
from harness.formats.checkpoint.gguf.writer import write_gguf

gguf = pytest.importorskip("gguf", reason="the package gguf is not installed (extra test or llamacpp)")
TYPES = ("F32", "F16", "BF16", "Q8_0", "Q5_0", "Q4_0")


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HARNESS_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def found(checkpoints, tmp_path):
    """Write llama-tiny with a fault, and return what is found."""

    def found(type_name, change=None, **given):
        hf = checkpoints / "llama-tiny"
        path = write_gguf(hf, tmp_path / "model.gguf", type_name, change=change, **given)
        with pytest.raises(HarnessError) as caught:
            checkpoint.resolve(str(path), hf=str(hf))
        assert caught.value.code is Code.GGUF_DIFFERS
        assert caught.value.exit_status is ExitStatus.MISMATCH
        return str(caught.value)

    return found


@pytest.mark.parametrize("name", ["llama-tiny", "qwen2-tiny", "qwen3-tiny"])
@pytest.mark.parametrize("type_name", TYPES)
def test_a_sound_file_passes(name, type_name, checkpoints, tmp_path):
    path = write_gguf(checkpoints / name, tmp_path / "model.gguf", type_name)
    assert checkpoint.resolve(str(path), hf=str(checkpoints / name)).is_dir()


@pytest.mark.parametrize("type_name", TYPES)
def test_rows_of_q_and_k_that_were_not_reordered(type_name, found):
    def forget(name, values):
        return rows_of_hf(values, 6 if "q_proj" in name else 2) if "q_proj" in name or "k_proj" in name else values

    message = found(type_name, forget)
    assert "were not put in the order of interleaved rotary pairs" in message
    assert "self_attn.k_proj.weight (and 5 more)" in message


def test_rows_that_were_reordered_twice(found):
    assert "reordered twice" in found(
        "Q8_0", lambda name, x: rows_of_gguf(x, 6) if ".0.self_attn.q_proj" in name else x
    )


@pytest.mark.parametrize("type_name", TYPES)
def test_a_tensor_of_another_layer(type_name, found, checkpoints):
    other = checkpoint.Checkpoint(checkpoints / "llama-tiny").tensors
    assert "model.layers.2.mlp.up_proj.weight" in other
    from safetensors.torch import load_file

    tensors = load_file(checkpoints / "llama-tiny" / "model.safetensors")
    wrong = tensors["model.layers.2.mlp.up_proj.weight"]
    message = found(type_name, lambda name, x: wrong if name == "model.layers.1.mlp.up_proj.weight" else x)
    assert "it holds the weights of model.layers.2.mlp.up_proj.weight" in message


@pytest.mark.parametrize("type_name", ["Q8_0", "Q5_0", "Q4_0"])
def test_scales_of_a_row_shifted_by_one_block(type_name, checkpoints, tmp_path):
    hf = checkpoints / "llama-tiny"
    path = write_gguf(hf, tmp_path / "model.gguf", type_name)
    model = checkpoint.gguf.open_gguf(path)
    tensor = model.tensors["blk.1.ffn_down.weight"][0]
    content = bytearray(path.read_bytes())
    size = tensor.type.block_bytes
    first = tensor.begin
    scales = [content[first + size * at : first + size * at + 2] for at in range(7)]
    for at in range(6):  # the first row's six blocks
        content[first + size * at : first + size * at + 2] = scales[at + 1]
    path.write_bytes(content)
    with pytest.raises(HarnessError, match="have the scale of the next one") as caught:
        checkpoint.resolve(str(path), hf=str(hf))
    assert "model.layers.1.mlp.down_proj.weight" in str(caught.value)


def test_other_weights_in_one_block(found):
    def change(name, values):
        if name == "model.layers.1.mlp.up_proj.weight":
            values = values.clone()
            values[3, 32:64] = values[3, 32:64].flip(0)
        return values

    assert "1 of 576 blocks of 32 weights hold other weights, the first block 10" in found("Q8_0", change)


def test_a_gain(found):
    assert "all weights are scaled by 1.5" in found("Q8_0", lambda name, x: 1.5 * x if ".1.mlp.up_proj" in name else x)


def test_a_rotary_base(found):
    message = found("F16", metadata={"rope.freq_base": 20000.0})
    assert "the rotary base differs" in message
    assert "llama.rope.freq_base" in message


def test_an_eps(found):
    assert "rms_norm_eps differs" in found("F16", metadata={"attention.layer_norm_rms_epsilon": 1e-4})


def test_a_vocabulary_that_disagrees(checkpoints, tmp_path):
    hf = checkpoints / "qwen2-tiny"
    other = shutil.copytree(hf, tmp_path / "other")
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    one, two = sorted(vocabulary, key=vocabulary.get)[10:12]
    vocabulary[one], vocabulary[two] = vocabulary[two], vocabulary[one]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    path = write_gguf(hf, tmp_path / "model.gguf")
    with pytest.raises(HarnessError, match="the vocabularies disagree"):
        checkpoint.resolve(str(path), hf=str(other))


def test_reordering_and_putting_back():
    values = torch.arange(48.0).reshape(24, 2)
    assert torch.equal(rows_of_hf(rows_of_gguf(values, 3), 3), values)
    assert rows_of_gguf(torch.arange(8), 1).tolist() == [0, 4, 1, 5, 2, 6, 3, 7]
