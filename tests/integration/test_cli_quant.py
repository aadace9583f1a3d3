"""`harness quant` with HuggingFace's own quantised forms: no llama.cpp is needed."""

import importlib.util

import pytest

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
    assert "pip install 'inference-harness[quant]'" in ran.err
