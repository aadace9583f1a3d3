"""`harness quant` without llama.cpp: HuggingFace's own quantised forms and checkpoints, and what a format costs."""

import importlib.util

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from harness.extensions.llamacpp.gguf.writer import write_gguf
from tests.quantised_checkpoints import write_quantised

MISSING = [name for name in ("torchao", "compressed_tensors") if importlib.util.find_spec(name) is None]
needs_quantisers = pytest.mark.skipif(bool(MISSING), reason=f"extra quant is not installed: without {MISSING}")
SIZES = ["--tokens", "12", "--sequences", "1"]


@needs_quantisers
def test_forms_have_the_columns_of_types(harness):
    ran = harness(
        "quant", "--model", "qwen3-tiny", "--types", "torchao-int8, Compressed-W4A16", *SIZES, "--format", "json"
    )
    assert ran.status == 0, ran.err
    fine, coarse = ran.json["types"]
    assert (fine["name"], coarse["name"]) == ("torchao-int8", "compressed-w4a16")
    assert coarse["size_bytes"] < fine["size_bytes"]
    assert coarse["kl_mean_format"] > fine["kl_mean_format"] > fine["kl_mean_arithmetic"]


@needs_quantisers
def test_padding_makes_shapes_fit(harness):
    ran = harness("quant", "--model", "qwen3-tiny", "--pad", "--types", "torchao-int4", *SIZES, "--format", "json")
    assert ran.status == 0, ran.err


@pytest.mark.skipif(not MISSING, reason="torchao and compressed-tensors are installed")
def test_a_missing_package_is_named(harness):
    ran = harness("quant", "--types", "torchao-int8" if "torchao" in MISSING else "compressed-w8a8")
    assert ran.status == 2
    assert "H103" in ran.err
    assert "pip install -e '.[quant]' in the harness's checkout" in ran.err


def test_what_a_format_costs_needs_no_engine(harness, checkpoints, tmp_path):
    pytest.importorskip("gguf", reason="the package gguf is not installed (extra test or llamacpp)")
    path = write_gguf(checkpoints / "qwen3-tiny", tmp_path / "half.gguf", "F16")
    write_quantised(checkpoints / "qwen3-tiny", tmp_path / "awq", "awq")
    files = ["--file", path, "--file", tmp_path / "awq", "--file", checkpoints / "qwen3-tiny"]
    ran = harness("quant", "--model", "qwen3-tiny", *files, *SIZES, "--format", "json")
    assert ran.status == 0, ran.err
    half, packed, plain = ran.json["types"]
    assert 0 < half["kl_mean_format"] < packed["kl_mean_format"]
    assert set(half["tensor_types"]) == {"F16", "F32"}
    assert packed["note"].startswith("AWQ")
    assert (plain["kl_mean_format"], plain["kl_mean"], plain["kl_mean_arithmetic"]) == (0, 0, 0)


def test_each_part_has_its_cost(harness, checkpoints, tmp_path):
    write_quantised(checkpoints / "qwen3-tiny", tmp_path / "awq", "awq")
    asked = ["--file", tmp_path / "awq", "--parts", "layers,kinds", "--out", tmp_path / "out"]
    ran = harness("quant", "--model", "qwen3-tiny", *asked, *SIZES, "--format", "json")
    assert ran.status == 0, ran.err
    parts = ran.json["types"][0]["parts"]
    assert [part["layer"] for part in parts if part["split"] == "layers"] == [0, 1, 2]
    assert {part["name"] for part in parts if part["split"] == "kinds"} >= {"self_attn.q_proj", "mlp.down_proj"}
    assert all(part["kl_mean"] > 0 for part in parts)
    assert "one layer at a time" in (tmp_path / "out" / "quant.html").read_text()


@needs_quantisers
def test_a_quantised_checkpoint_is_run_as_transformers_does(harness, checkpoints, tmp_path):
    write_quantised(checkpoints / "qwen3-tiny", tmp_path / "w8a8", "w8a8")
    ran = harness("quant", "--model", "qwen3-tiny", "--file", tmp_path / "w8a8", *SIZES, "--format", "json")
    assert ran.status == 0, ran.err
    (row,) = ran.json["types"]
    assert row["note"] == "compressed-tensors, int8"
    assert row["kl_mean_arithmetic"] > 0  # it quantises the inputs, which the weights do not show


def test_a_checkpoint_of_another_vocabulary_is_refused(harness, tmp_path):
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    LlamaForCausalLM(LlamaConfig(vocab_size=99, **sizes)).save_pretrained(tmp_path)
    ran = harness("quant", "--model", "qwen3-tiny", "--file", tmp_path, *SIZES)
    assert ran.status == 2
    assert "H013: the checkpoint has another vocabulary than the model" in ran.err


def test_caches_are_rows_of_their_own(harness, checkpoints):
    asked = ["--caches", "int8:head, float8_e5m2,mxfp4", *SIZES]
    ran = harness("quant", "--model", "qwen3-tiny", *asked, "--format", "json")
    assert ran.status == 0, ran.err
    fine, coarse, four_bits = ran.json["types"]
    assert [item["name"] for item in ran.json["types"]] == ["cache int8:head", "cache float8_e5m2", "cache mxfp4"]
    assert 0 < fine["kl_mean_format"] < coarse["kl_mean_format"] < four_bits["kl_mean_format"]
    assert four_bits["kl_mean_arithmetic"] is None
    assert "H013" in harness("quant", "--caches", "int8").err


def test_caches_of_what_keeps_none_are_refused(harness):
    ran = harness("quant", "--model", "deepseek-v3-tiny", "--caches", "nvfp4", *SIZES)
    assert (ran.status, "the model keeps latents" in ran.err) == (2, True)


def test_an_engines_cache_is_a_row_with_its_phases(harness):
    asked = ["--engine", "reference", "--engine-option", "kv_cache_dtype=float8_e4m3fn", "--dtype", "float32"]
    ran = harness("quant", "--model", "qwen3-tiny", *asked, *SIZES)
    assert ran.status == 0, ran.err
    assert "cache float8_e4m3fn of reference: decode, 6 rows: KL mean" in ran.out


def test_a_dtype_is_that_of_an_engine(harness):
    ran = harness("quant", "--dtype", "float16")
    assert ran.status == 2
    assert "the dtype is that of --engine" in ran.err
