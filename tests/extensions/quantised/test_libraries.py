"""Readers against the formats' own libraries, bit for bit, where these are installed."""

import io
import json
import warnings
from collections.abc import Iterator
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from harness.engines.hf import load_quantised
from harness.extensions.quantised.checkpoint import QuantisedCheckpoint
from tests.quantised_checkpoints import KINDS, write_quantised
from tests.quantised_faults import CHECKPOINTS

pytestmark = pytest.mark.filterwarnings("ignore")
COMPRESSED = [
    kind for kind in KINDS if KINDS[kind].config["quant_method"] == "compressed-tensors" and kind != "w4a16-ordered"
]
"""compressed-tensors 0.20 reads no checkpoint of sorted inputs any more."""


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings(), redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        yield


def _written(kind: str, folder: Path, model: str = "llama-tiny") -> tuple[QuantisedCheckpoint, dict[str, torch.Tensor]]:
    write_quantised(CHECKPOINTS / model, folder, kind)
    return QuantisedCheckpoint(folder), load_file(folder / "model.safetensors")


@pytest.mark.parametrize("kind", COMPRESSED)
def test_compressed_tensors(kind: str, tmp_path: Path):
    """The library dequantises in the dtype of the scales: ours is rounded to it, once."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    ours, tensors = _written(kind, tmp_path / "m")
    table = json.loads((tmp_path / "m" / "config.json").read_text())["quantization_config"]
    (scheme,) = QuantizationConfig.model_validate(table).config_groups.values()
    compressor: Any = BaseCompressor.get_value_from_registry(table["format"])
    for name, weight in ours.weights.items():
        own_tensors = {
            key.removeprefix(f"{weight.module}."): value for key, value in tensors.items() if weight.module in key
        }
        theirs = compressor.decompress(own_tensors, scheme)["weight"]
        assert torch.equal(ours.codes(name).dequantised().to(theirs.dtype), theirs), name


@pytest.mark.parametrize("kind", ["nf4", "nf4-doubled"])
def test_bitsandbytes_4bit(kind: str, tmp_path: Path):
    """Its own code in torch; rows are whole blocks here, for which its kernel for CPUs says the same."""
    pytest.importorskip("bitsandbytes")
    from bitsandbytes import functional

    ours, tensors = _written(kind, tmp_path / "m", "qwen2-tiny")
    for name in ours.weights:
        state = {key.removeprefix(f"{name}."): value for key, value in tensors.items() if key.startswith(f"{name}.")}
        theirs = functional.dequantize_4bit(tensors[name], functional.QuantState.from_dict(state, torch.device("cpu")))
        assert torch.equal(ours.codes(name).dequantised(), theirs), name


def test_bitsandbytes_4bit_whose_blocks_go_on_in_the_next_row(tmp_path: Path):
    """By the library's code in torch: its kernel for CPUs (0.50.2) is wrong here, also in its own round trip."""
    pytest.importorskip("bitsandbytes")
    operations = pytest.importorskip("bitsandbytes.backends.default.ops")

    ours, tensors = _written("nf4", tmp_path / "m")
    name = "model.layers.0.self_attn.q_proj.weight"
    shape = list(ours.weights[name].shape)
    assert shape[1] % 64
    theirs = operations._dequantize_4bit_compute(
        tensors[name].flatten(), tensors[f"{name}.absmax"], tensors[f"{name}.quant_map"], 64, shape, torch.float32
    )
    assert torch.equal(ours.codes(name).dequantised(), theirs)


def test_bitsandbytes_int8(tmp_path: Path):
    functional = pytest.importorskip("bitsandbytes").functional
    ours, tensors = _written("bnb-int8", tmp_path / "m")
    for name in ours.weights:
        theirs = functional.int8_vectorwise_dequant(tensors[name], tensors[f"{name.removesuffix('weight')}SCB"])
        assert torch.equal(ours.codes(name).dequantised(), theirs), name


def test_torchao(tmp_path: Path):
    """What transformers and torchao write."""
    quantization = pytest.importorskip("torchao.quantization")
    from transformers import TorchAoConfig

    config = TorchAoConfig(quantization.Int8WeightOnlyConfig())
    model = load_quantised(CHECKPOINTS / "llama-tiny", quantization_config=config)
    model.save_pretrained(tmp_path / "m")
    ours = QuantisedCheckpoint(tmp_path / "m")
    modules = dict(model.named_modules())
    assert len(ours.weights) == 21
    for name, weight in ours.weights.items():
        assert torch.equal(ours.codes(name).dequantised(), modules[weight.module].weight.dequantize()), name


@pytest.mark.parametrize("kind", ["gptq", "gptq-v2", "gptq-symmetric", "gptq-ordered"])
def test_gptqmodel(kind: str, tmp_path: Path):
    linear = pytest.importorskip("gptqmodel.nn_modules.qlinear.torch").TorchLinear
    ours, tensors = _written(kind, tmp_path / "m")
    for name, weight in ours.weights.items():
        sizes, module = weight.sizes, weight.module
        theirs = linear(
            bits=4, group_size=32, sym=False, desc_act=True, in_features=sizes["in"], out_features=sizes["out"],
            bias=False, register_buffers=True,
        )  # fmt: skip
        zeros = tensors[f"{module}.qzeros"] + (0x11111111 if weight.scheme.zero_offset else 0)
        theirs.qweight, theirs.qzeros = tensors[f"{module}.qweight"], zeros
        theirs.scales, theirs.g_idx = tensors[f"{module}.scales"].float(), tensors[f"{module}.g_idx"]
        theirs.post_init()
        assert torch.equal(ours.codes(name).dequantised(), theirs.dequantize_weight().T.float()), name


def test_awq(tmp_path: Path):
    packing = pytest.importorskip("gptqmodel.quantization.awq.utils.packing_utils")
    ours, tensors = _written("awq", tmp_path / "m")
    for name, weight in ours.weights.items():
        parts = [tensors[f"{weight.module}.{part}"] for part in ("qweight", "qzeros", "scales")]
        theirs = packing.dequantize_gemm(parts[0], parts[1], parts[2].float(), 4, 32)
        assert torch.equal(ours.codes(name).dequantised(), theirs.T), name


def test_gpt_oss_as_transformers_reads_it():
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    from harness.extensions.quantised.config import Scheme
    from harness.extensions.quantised.formats import FORMATS

    torch.manual_seed(0)
    blocks = torch.randint(0, 256, (3, 64, 4, 16), dtype=torch.uint8)
    scales = torch.randint(110, 140, (3, 64, 4), dtype=torch.uint8)
    format = FORMATS["gpt-oss-mxfp4"]
    codes = format.unpack({"codes": blocks, "scale": scales}, Scheme(format="gpt-oss-mxfp4"), {})
    assert torch.equal(codes.dequantised(), convert_moe_packed_tensors(blocks, scales, dtype=torch.float32))
