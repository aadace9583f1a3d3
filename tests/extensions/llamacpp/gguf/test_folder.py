"""GGUF files as checkpoints: the same weights in HuggingFace's order, its configuration, its vocabulary."""

import json
import shutil
import sys

import pytest
import torch
from safetensors.torch import load_file
from tokenizers.processors import ByteLevel
from transformers import AutoTokenizer

from harness.errors import Code, HarnessError
from harness.extensions.llamacpp.gguf import read_source
from harness.extensions.llamacpp.gguf.architecture import hf_name
from harness.extensions.llamacpp.gguf.folder import begin_as_the_file_says, write_tokenizer
from harness.extensions.llamacpp.gguf.model import open_gguf
from harness.extensions.llamacpp.gguf.writer import write_gguf
from harness.formats import checkpoint
from harness.formats.checkpoint import Checkpoint
from harness.formats.checkpoint.quantised import read_quantised_source
from harness.formats.inspect import inspect_path
from harness.plan import tokenize

from .bytes_of import gguf_bytes

pytest.importorskip("gguf", reason="the package gguf is not installed (extra test or llamacpp)")
NAMES = ("llama-tiny", "qwen2-tiny", "qwen3-tiny")
SIZES = {
    "embedding_length": 32, "block_count": 1, "feed_forward_length": 32, "attention.head_count": 2,
    "context_length": 64, "attention.layer_norm_rms_epsilon": 1e-5,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HARNESS_CACHE", str(tmp_path / "cache"))


def weights(folder):
    shards = Checkpoint(folder).shards
    return {name: values.float() for shard in shards for name, values in load_file(shard).items()}


@pytest.mark.parametrize("name", NAMES)
def test_float32_comes_back_bit_for_bit(name, checkpoints, tmp_path):
    made = checkpoint.resolve(str(write_gguf(checkpoints / name, tmp_path / "model.gguf")))
    ours, theirs = weights(made), weights(checkpoints / name)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[their], theirs[their]) for their in theirs)
    assert inspect_path(made)["against_config"]["missing"] == []


@pytest.mark.parametrize("name", NAMES)
def test_the_configuration_is_the_models_own(name, checkpoints, tmp_path):
    made = checkpoint.resolve(str(write_gguf(checkpoints / name, tmp_path / "model.gguf")))
    ours, theirs = Checkpoint(made).config, Checkpoint(checkpoints / name).config
    for key in ("architectures", "hidden_size", "num_key_value_heads", "rope_parameters", "tie_word_embeddings"):
        assert ours[key] == theirs[key], key


@pytest.mark.parametrize(("type_name", "largest"), [("F16", 3e-4), ("BF16", 2e-3), ("Q8_0", 0.01), ("Q4_0", 0.12)])
def test_other_types_are_dequantised(type_name, largest, checkpoints, tmp_path):
    made = checkpoint.resolve(str(write_gguf(checkpoints / "llama-tiny", tmp_path / "model.gguf", type_name)))
    ours, theirs = weights(made), weights(checkpoints / "llama-tiny")
    errors = {name: float((ours[name] - theirs[name]).norm() / theirs[name].norm()) for name in theirs}
    assert 0 < max(errors.values()) < largest
    source = read_source(made)
    assert source.path == tmp_path / "model.gguf"
    assert source.types["model.layers.0.mlp.up_proj.weight"] == type_name
    assert source.types["model.norm.weight"] == "F32"


def test_shards_are_one_model(checkpoints, tmp_path):
    first = write_gguf(checkpoints / "qwen3-tiny", tmp_path / "model.gguf", num_shards=3)
    assert len(list(tmp_path.glob("*.gguf"))) == 3
    ours, theirs = weights(checkpoint.resolve(str(first))), weights(checkpoints / "qwen3-tiny")
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_the_files_of_the_tokenizer_are_the_originals_and_no_others(checkpoints, tmp_path):
    origin = tmp_path / "origin"
    shutil.copytree(checkpoints / "llama-tiny", origin)
    for name in ("chat_template.jinja", "merges.txt", "made_from.json", "model.safetensors.index.json"):
        (origin / name).write_text("{}")
    path = write_gguf(origin, tmp_path / "model.gguf")
    made = checkpoint.resolve(str(path), hf=str(origin))
    expected = {"tokenizer.json", "chat_template.jinja", "merges.txt", "generation_config.json"}
    assert expected <= {item.name for item in made.iterdir()}
    assert read_quantised_source(made) is None
    assert json.loads((made / "model.safetensors.index.json").read_text())["weight_map"]
    assert read_source(made).path == path


def test_it_is_made_once_and_again_when_the_file_changes(checkpoints, tmp_path):
    path = write_gguf(checkpoints / "llama-tiny", tmp_path / "model.gguf")
    first = checkpoint.resolve(str(path))
    assert checkpoint.resolve(str(path)) == first
    write_gguf(checkpoints / "llama-tiny", path, "F16")
    assert checkpoint.resolve(str(path)) != first


def test_a_byte_level_vocabulary(checkpoints, tmp_path):
    made = checkpoint.resolve(str(write_gguf(checkpoints / "qwen2-tiny", tmp_path / "model.gguf")))
    text = "hu rin pun | hu"
    assert tokenize(text, Checkpoint(made), where="-") == tokenize(
        text, Checkpoint(checkpoints / "qwen2-tiny"), where="-"
    )


@pytest.mark.parametrize("adds", [True, False])
def test_a_text_begins_as_the_file_says(checkpoints, tmp_path, adds):
    """Transformers 5.17 reads a byte-level vocabulary without the token that begins a text."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoints / "qwen2-tiny")
    expected = tokenizer.encode("hu rin")
    tokenizer.backend_tokenizer.post_processor, tokenizer.bos_token = ByteLevel(), None
    metadata = open_gguf(write_gguf(checkpoints / "qwen2-tiny", tmp_path / "model.gguf")).headers[0].metadata
    begin_as_the_file_says(tokenizer, {**metadata, "tokenizer.ggml.add_bos_token": adds})
    tokenizer.save_pretrained(tmp_path / "made")
    made = AutoTokenizer.from_pretrained(tmp_path / "made")
    assert made.encode("hu rin") == (expected if adds else expected[1:])


def test_without_a_vocabulary_texts_are_refused(checkpoints, tmp_path):
    made = checkpoint.resolve(str(write_gguf(checkpoints / "llama-tiny", tmp_path / "model.gguf")))
    with pytest.raises(HarnessError) as caught:
        tokenize("hu", Checkpoint(made), where="-")
    assert caught.value.code is Code.NO_TOKENIZER


def test_a_vocabulary_that_is_larger_than_the_model_is_refused(tmp_path):
    metadata = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": ["a", "b", "c", "d", "e"]}
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf_bytes(metadata, [("token_embd.weight", [4, 32], 0, 0)], bytes(512)))
    with pytest.raises(
        HarnessError, match="H100: the vocabulary has more tokens than the model has embeddings"
    ) as caught:
        write_tokenizer(open_gguf(path), tmp_path)
    assert (caught.value.expected, caught.value.actual) == ("at most 4", 5)


def test_with_hf_its_tokenizer_is_taken(checkpoints, tmp_path):
    path = str(write_gguf(checkpoints / "llama-tiny", tmp_path / "model.gguf"))
    made = checkpoint.resolve(path, hf=str(checkpoints / "llama-tiny"))
    assert tokenize("hu rin", Checkpoint(made), where="-") == tokenize(
        "hu rin", Checkpoint(checkpoints / "llama-tiny"), where="-"
    )


def test_hf_without_a_gguf_file_is_refused(checkpoints):
    with pytest.raises(HarnessError, match="--hf names what a GGUF file, or an export"):
        checkpoint.resolve("qwen3-tiny", hf=str(checkpoints / "qwen3-tiny"))


@pytest.mark.parametrize(
    ("metadata", "tensors", "code", "said"),
    [
        ({}, [], Code.DAMAGED_GGUF, "general.architecture"),
        ({"general.architecture": "nobody"}, [], Code.UNSUPPORTED_ARCHITECTURE, "'nobody' are not read"),
        ({"general.architecture": "llama"}, [], Code.DAMAGED_GGUF, "the file has no embedding"),
        ({"general.architecture": "llama"}, ["token_embd.weight"], Code.DAMAGED_GGUF, "embedding_length"),
        ({"general.architecture": "llama", **{f"llama.{k}": v for k, v in SIZES.items()},
          "llama.rope.scaling.type": "longrope"}, ["token_embd.weight"], Code.UNSUPPORTED_GGUF,
         "llama.rope.scaling.type"),
        ({"general.architecture": "llama", **{f"llama.{k}": v for k, v in SIZES.items()},
          "llama.rope.scaling.type": "yarn"}, ["token_embd.weight"], Code.DAMAGED_GGUF, "llama.rope.scaling.factor"),
        ({"general.architecture": "llama", **{f"llama.{k}": v for k, v in SIZES.items()}},
         ["token_embd.weight", "blk.0.odd.weight"], Code.UNSUPPORTED_GGUF, "no place in HuggingFace's model"),
        ({"general.architecture": "llama", **{f"llama.{k}": v for k, v in SIZES.items()}, "llama.block_count": 0.5},
         ["token_embd.weight"], Code.DAMAGED_GGUF, "llama.block_count"),
    ],
)  # fmt: skip
def test_what_metadata_does_not_tell_is_refused(metadata, tensors, code, said, tmp_path):
    entries = [(name, [4, 32], 0, 512 * at) for at, name in enumerate(tensors)]
    (tmp_path / "model.gguf").write_bytes(gguf_bytes(metadata, entries, bytes(512 * len(tensors))))
    with pytest.raises(HarnessError) as caught:
        checkpoint.resolve(str(tmp_path / "model.gguf"))
    assert caught.value.code is code
    assert said in str(caught.value)


def test_without_the_package(checkpoints, tmp_path, monkeypatch):
    path = write_gguf(checkpoints / "llama-tiny", tmp_path / "model.gguf", "Q8_0")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(HarnessError, match="the package gguf is not installed"):
        checkpoint.resolve(str(path))


def test_inspect(checkpoints, tmp_path):
    info = inspect_path(write_gguf(checkpoints / "llama-tiny", tmp_path / "model.gguf", "Q8_0"))
    assert info["kind"] == "gguf"
    assert info["against_config"]["missing"] == info["against_config"]["unexpected"] == []
    assert 8.5 < info["totals"]["bits_per_weight"] < 9
    (file,) = info["files"]
    assert file["version"] == 3
    up = next(tensor for tensor in file["tensors"] if tensor["name"] == "blk.1.ffn_up.weight")
    assert (up["dtype"], up["bits_per_weight"], up["shape"]) == ("Q8_0", 8.5, [192, 96])
    json.dumps(info)


def test_inspect_says_what_is_missing(checkpoints, tmp_path):
    path = write_gguf(checkpoints / "llama-tiny", tmp_path / "model.gguf")
    path.write_bytes(path.read_bytes().replace(b"blk.1.ffn_up.weight", b"blk.1.ffn_xx.weight"))
    against = inspect_path(path)["against_config"]
    assert against["missing"] == ["model.layers.1.mlp.up_proj.weight"]
    assert against["unexpected"] == ["blk.1.ffn_xx.weight"]


def test_no_code_beside_the_file_is_run(checkpoints, tmp_path, monkeypatch):
    asked = {}
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda *_, **options: asked.update(options))
    path = write_gguf(checkpoints / "qwen2-tiny", tmp_path / "model.gguf")
    write_tokenizer(open_gguf(path), tmp_path)
    assert asked["trust_remote_code"] is False


@pytest.mark.parametrize(
    "name", ["blk.00.attn_q.weight", "blk.01.attn_q.weight", "blk.0.attn_q.scale", "blk.-1.attn_q"]
)
def test_a_second_name_of_a_tensor_is_none(name):
    assert hf_name(name) is None
    assert hf_name("blk.10.attn_q.weight") == "model.layers.10.self_attn.q_proj.weight"
