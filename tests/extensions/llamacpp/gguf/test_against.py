"""A GGUF file against the checkpoint that it was made from: a converter's mistakes are found and named."""

import json
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file

from harness.errors import Code, ExitStatus, HarnessError
from harness.extensions.llamacpp.gguf.model import open_gguf, rows_of_gguf, rows_of_hf
from harness.extensions.llamacpp.gguf.writer import write_gguf
from harness.formats import checkpoint

gguf = pytest.importorskip("gguf", reason="the package gguf is not installed (extra test or llamacpp)")
TYPES = ("F32", "F16", "BF16", "Q8_0", "Q5_0", "Q4_0")


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HARNESS_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def message_of(checkpoints, tmp_path):
    """Write llama-tiny with a fault, and return what is found."""

    def message_of(type_name, change=None, **options):
        hf = checkpoints / "llama-tiny"
        path = write_gguf(hf, tmp_path / "model.gguf", type_name, change=change, **options)
        with pytest.raises(HarnessError) as caught:
            checkpoint.resolve(str(path), hf=str(hf))
        assert caught.value.code is Code.GGUF_DIFFERS
        assert caught.value.exit_status is ExitStatus.MISMATCH
        return str(caught.value)

    return message_of


@pytest.fixture
def original(checkpoints, tmp_path):
    """Write a checkpoint of a tiny model with another config."""

    def original(name, **change):
        folder = shutil.copytree(checkpoints / name, tmp_path / "original", dirs_exist_ok=True)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | change))
        return folder

    return original


@pytest.mark.parametrize("name", ["llama-tiny", "qwen2-tiny", "qwen3-tiny"])
@pytest.mark.parametrize("type_name", TYPES)
def test_a_sound_file_passes(name, type_name, checkpoints, tmp_path):
    path = write_gguf(checkpoints / name, tmp_path / "model.gguf", type_name)
    assert checkpoint.resolve(str(path), hf=str(checkpoints / name)).is_dir()


@pytest.mark.parametrize("type_name", TYPES)
def test_rows_of_q_and_k_that_were_not_reordered(type_name, message_of):
    def forget(name, values):
        return rows_of_hf(values, 6 if "q_proj" in name else 2) if "q_proj" in name or "k_proj" in name else values

    message = message_of(type_name, forget)
    assert "were not put in the order of interleaved rotary pairs" in message
    assert "self_attn.k_proj.weight (and 5 more)" in message


def test_rows_that_were_reordered_twice(message_of):
    assert "reordered twice" in message_of(
        "Q8_0", lambda name, x: rows_of_gguf(x, 6) if ".0.self_attn.q_proj" in name else x
    )


@pytest.mark.parametrize("type_name", TYPES)
def test_a_tensor_of_another_layer(type_name, message_of, checkpoints):
    rival = checkpoint.Checkpoint(checkpoints / "llama-tiny").tensors
    assert "model.layers.2.mlp.up_proj.weight" in rival
    tensors = load_file(checkpoints / "llama-tiny" / "model.safetensors")
    wrong = tensors["model.layers.2.mlp.up_proj.weight"]
    message = message_of(type_name, lambda name, x: wrong if name == "model.layers.1.mlp.up_proj.weight" else x)
    assert "it holds the weights of model.layers.2.mlp.up_proj.weight" in message


@pytest.mark.parametrize("type_name", ["Q8_0", "Q5_0", "Q4_0"])
def test_scales_of_a_row_shifted_by_one_block(type_name, checkpoints, tmp_path):
    hf = checkpoints / "llama-tiny"
    path = write_gguf(hf, tmp_path / "model.gguf", type_name)
    model = open_gguf(path)
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


def test_other_weights_in_one_block(message_of):
    def change(name, values):
        if name == "model.layers.1.mlp.up_proj.weight":
            values = values.clone()
            values[3, 32:64] = values[3, 32:64].flip(0)
        return values

    assert "1 of 576 blocks of 32 weights hold other weights, the first block 10" in message_of("Q8_0", change)


def test_a_gain(message_of):
    assert "all weights are scaled by 1.5" in message_of(
        "Q8_0", lambda name, x: 1.5 * x if ".1.mlp.up_proj" in name else x
    )


def test_a_rotary_base(message_of):
    message = message_of("F16", metadata={"rope.freq_base": 20000.0})
    assert "the rotary base differs" in message
    assert "llama.rope.freq_base" in message


HALF = 16
"""Pairs of a head of llama-tiny."""
YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 64}


@pytest.mark.parametrize(
    ("metadata", "says"),
    [
        ({"rope.freq_base": 2e4, "attention.head_count_kv": 3}, "num_key_value_heads differs"),
        ({"block_count": 2}, "num_hidden_layers differs"),
        ({"feed_forward_length": 191}, "intermediate_size differs"),
    ],
)
def test_sizes(message_of, metadata, says):
    assert says in message_of("F16", metadata=metadata)


@pytest.mark.parametrize(
    ("metadata", "extra", "says"),
    [
        (YARN, {"rope_freqs.weight": None}, "'rope_type': 'yarn', .*'factor': 4.0"),
        ({"rope.scaling.factor": 2.0}, {"rope_freqs.weight": None}, "'rope_type': 'linear', .*'factor': 2.0"),
        ({}, {"rope_freqs.weight": None}, "'rope_type': 'default'"),
        ({}, {"rope_freqs.weight": torch.ones(HALF)}, "'rope_type': 'default'"),
        (
            {},
            {"rope_freqs.weight": torch.full((HALF,), 2.0)},
            "factors of the rotary frequencies are not those of Llama 3",
        ),
        (
            {},
            {"rope_freqs.weight": torch.ones(HALF // 2)},
            "factors of the rotary frequencies are not those of Llama 3",
        ),
        ({"rope.scaling.factor": 2.0}, {}, "factors of the rotary frequencies are not those of Llama 3"),
    ],
)
def test_rotary_scaling(message_of, metadata, extra, says):
    message = message_of("F16", metadata=metadata, extra=extra)
    assert re.search(f"  actual:   .*{says}" if "rope_type" in says else says, message), message
    assert re.search("  expected: .*'rope_type': 'llama3'", message)


@pytest.mark.parametrize("scaling", [
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    {"rope_type": "linear", "factor": 2.0},
])  # fmt: skip
def test_a_scaling_that_is_the_originals(scaling, original, tmp_path):
    hf = original("qwen2-tiny", rope_parameters={"rope_theta": 10000.0, **scaling})
    sound = write_gguf(hf, tmp_path / "model.gguf")
    config = checkpoint.Checkpoint(checkpoint.resolve(str(sound))).config["rope_parameters"]
    assert {name: config[name] for name in scaling} == scaling
    assert checkpoint.resolve(str(sound), hf=str(hf)).is_dir()
    for name, value in (("factor", 8.0), ("original_context_length", 128), ("yarn_beta_fast", 16.0)):
        options = scaling["rope_type"] == "yarn" or name == "factor"
        wrong = write_gguf(hf, tmp_path / "wrong.gguf", metadata={f"rope.scaling.{name}": value} if options else None)
        if options:
            with pytest.raises(HarnessError, match=r"H102: .*rope_scaling differs"):
                checkpoint.resolve(str(wrong), hf=str(hf))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            {"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 1},
            "(sliding_window|layer_types) differs",
        ),
        ({"hidden_act": "gelu"}, "hidden_act differs"),
        ({"rope_parameters": {"rope_theta": 10000.0, "rope_type": "dynamic", "factor": 2.0}}, "differs"),
        ({"model_type": "qwen3"}, "the file is of another family"),
        ({"attention_bias": True, "max_position_embeddings": 99}, None),  # Qwen2 reads neither of them
    ],
)
def test_what_only_the_original_says(change, says, original, checkpoints, tmp_path):
    path = write_gguf(checkpoints / "qwen2-tiny", tmp_path / "model.gguf")
    hf = original("qwen2-tiny", **change)
    if says is None:
        assert checkpoint.resolve(str(path), hf=str(hf)).is_dir()
        return
    with pytest.raises(HarnessError, match=f"H102: .*{says}"):
        checkpoint.resolve(str(path), hf=str(hf))


@pytest.mark.parametrize("name", ["llama-tiny", "qwen2-tiny", "qwen3-tiny"])
def test_a_head_of_its_own_is_held_against_the_originals(name, checkpoints, tmp_path):
    """The original's head is its embedding where it is tied, and the file's is where it has no other."""
    hf = checkpoints / name
    tensors = {key: value for shard in hf.glob("*.safetensors") for key, value in load_file(shard).items()}
    is_tied = "lm_head.weight" not in tensors
    embedding = tensors["model.embed_tokens.weight"]
    for head, is_sound in ((embedding, is_tied), (None, is_tied), (embedding.flip(0), False)):
        path = write_gguf(hf, tmp_path / "model.gguf", "Q8_0", extra={"output.weight": head})
        if is_sound:
            made = checkpoint.Checkpoint(checkpoint.resolve(str(path), hf=str(hf)))
            assert made.config["tie_word_embeddings"] is (head is None)
            continue
        with pytest.raises(HarnessError, match=r"H102: (.*\n)*.*lm_head.weight"):
            checkpoint.resolve(str(path), hf=str(hf))


def test_an_eps(message_of):
    assert "rms_norm_eps differs" in message_of("F16", metadata={"attention.layer_norm_rms_epsilon": 1e-4})


def test_a_vocabulary_that_disagrees(checkpoints, tmp_path):
    hf = checkpoints / "qwen2-tiny"
    rival = shutil.copytree(hf, tmp_path / "other")
    tokenizer = json.loads((rival / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    one, two = sorted(vocabulary, key=vocabulary.get)[10:12]
    vocabulary[one], vocabulary[two] = vocabulary[two], vocabulary[one]
    (rival / "tokenizer.json").write_text(json.dumps(tokenizer))
    path = write_gguf(hf, tmp_path / "model.gguf")
    with pytest.raises(HarnessError, match="the vocabularies disagree"):
        checkpoint.resolve(str(path), hf=str(rival))


def test_reordering_and_putting_back():
    values = torch.arange(48.0).reshape(24, 2)
    assert torch.equal(rows_of_hf(rows_of_gguf(values, 3), 3), values)
    assert rows_of_gguf(torch.arange(8), 1).tolist() == [0, 4, 1, 5, 2, 6, 3, 7]
