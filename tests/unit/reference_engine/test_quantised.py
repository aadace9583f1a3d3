"""Quantised weights: how they are read and multiplied, and what is refused before anything is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from reference_engine import EngineConfig, EngineError, LLMEngine, SamplingParams
from reference_engine.checkpoint.load import load_weights
from reference_engine.checkpoint.model_config import ModelConfig
from reference_engine.checkpoint.quantisation import Quantisation
from reference_engine.errors import ConfigError
from reference_engine.families.quantised import MAX_ELEMENTS, Float8Product, Int8Product, dequantised, in_int8
from tests.quantised_checkpoints import write_quantised

FORMATS = ("w8a8", "fp8-dynamic", "fp8-static", "deepseek", "fp8-blocks")
ORIGINAL = Path(__file__).parents[3] / "cases" / "checkpoints" / "qwen3-tiny"
LAYER = "model.layers.1."


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("quantised")
    for name in FORMATS:
        write_quantised(ORIGINAL, folder / name, name)
    return {name: folder / name for name in FORMATS}


def loaded(folder: Path) -> dict[str, torch.Tensor]:
    return load_weights(folder, ModelConfig.from_folder(folder), torch.bfloat16, torch.device("cpu"))


@pytest.mark.parametrize("name", FORMATS)
def test_weights_times_their_scales_are_near_the_original_s(folders: dict[str, Path], name: str) -> None:
    quantised, exact = loaded(folders[name]), loaded(ORIGINAL)
    block = ModelConfig.from_folder(folders[name]).quantisation.block  # type: ignore[union-attr]
    for parameter in ("self_attn.qkv_proj.weight", "self_attn.o_proj.weight", "mlp.gate_up_proj.weight"):
        weight, scale = quantised[LAYER + parameter], quantised[f"{LAYER}{parameter}_scale"]
        original = exact[LAYER + parameter].float()
        assert weight.dtype == (torch.int8 if name == "w8a8" else torch.float8_e4m3fn)
        assert (len(scale), scale.dtype) == (len(weight), torch.float32)
        width = weight.shape[1] if block is None else block[1]
        error = (dequantised(weight, scale, width, torch.float32) - original).norm() / original.norm()
        assert error < (0.02 if name == "w8a8" else 0.05)
    assert quantised["model.embed_tokens.weight"].dtype == torch.bfloat16


def test_a_last_block_may_be_narrower() -> None:
    weight, scale = torch.ones(2, 5).to(torch.float8_e4m3fn), torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    assert dequantised(weight, scale, 2, torch.float32).tolist() == [[1, 1, 2, 2, 3], [4, 4, 5, 5, 6]]


def test_large_weights_are_dequantised_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, scale = torch.randn(70, 40).to(torch.float8_e4m3fn), 0.5 + torch.rand(70, 2)
    x, bias, product = torch.randn(3, 40), torch.randn(70), Float8Product(scale, 20)
    assert weight.numel() < MAX_ELEMENTS
    whole = product(x, weight, bias)
    monkeypatch.setattr("reference_engine.families.quantised.MAX_ELEMENTS", 400)
    torch.testing.assert_close(product(x, weight, bias), whole)
    expected = x @ dequantised(weight, scale, 20, torch.float32).T + bias
    torch.testing.assert_close(whole, expected)


def test_integers_are_added_up_exactly() -> None:
    x, weight, scale = torch.randn(4, 96), torch.randint(-127, 128, (9, 96), dtype=torch.int8), torch.rand(9, 1)
    x[2] = 0
    integers, steps = in_int8(x)
    assert integers.abs().amax(dim=1).tolist() == [127, 127, 0, 127]
    assert ((integers * steps - x).abs() <= steps / 2 + 1e-6).all()
    sums = integers.long() @ weight.long().T
    assert torch.equal(Int8Product(scale)(x, weight, None), sums.float() * steps * scale[:, 0])


def test_a_nan_makes_its_row_nan() -> None:
    x, weight = torch.randn(3, 96), torch.randint(-127, 128, (9, 96), dtype=torch.int8)
    x[1, 5] = torch.nan
    assert Int8Product(torch.rand(9, 1))(x, weight, None).isnan().all(dim=1).tolist() == [False, True, False]


@pytest.mark.parametrize("name", FORMATS)
def test_every_schedule_makes_the_same_tokens(folders: dict[str, Path], name: str) -> None:
    prompts, params = [list(range(4, 21)), [5, 6, 7]], SamplingParams(max_new_tokens=5, ignore_eos=True)

    def tokens(**options: Any) -> list[tuple[int, ...]]:
        with LLMEngine(folders[name], EngineConfig(dtype="float32", max_model_len=64, **options)) as engine:
            return [item.token_ids for item in engine.generate(prompts, params)]

    expected = tokens()
    assert tokens(max_num_seqs=1) == tokens(max_num_batched_tokens=5) == expected
    assert tokens(attention_backend="contiguous") == expected


def changed(config: dict[str, Any], **values: object) -> dict[str, Any]:
    return {"quantization_config": {**config, **values}}


SERVED: dict[str, Any] = {
    "quant_method": "compressed-tensors", "format": "float-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": {
        "num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False,
    }}},
}  # fmt: skip


SERVED_GROUP = SERVED["config_groups"]["group_0"]


def with_group(**values: object) -> dict[str, Any]:
    """Float8 as it is served, but for what is said of the group."""
    return changed(SERVED, config_groups={"0": {**SERVED_GROUP, **values}})


def with_inputs(**values: object) -> dict[str, Any]:
    """W8A8 as it is served, but for its inputs."""
    inputs = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True, **values}
    group = {
        "targets": ["Linear"], "weights": {**SERVED_GROUP["weights"], "type": "int"}, "input_activations": inputs,
    }  # fmt: skip
    return changed(SERVED, format="int-quantized", config_groups={"0": group})


def test_what_is_served() -> None:
    assert Quantisation.of(with_inputs(), "config.json") == Quantisation(dtype="I8", scale="weight_scale")
    assert Quantisation.of({}, "config.json") is None
    assert Quantisation.of(changed(SERVED), "config.json") == Quantisation(dtype="F8_E4M3", scale="weight_scale")


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (changed(SERVED, quant_method="gptq"), "quant_method"),
        (changed(SERVED, format="pack-quantized"), "format"),
        (changed(SERVED, config_groups={}), "config_groups"),
        (changed(SERVED, config_groups={"0": {"targets": ["Linear"], "weights": {"num_bits": 4}}}), "config_groups"),
        (changed(SERVED, config_groups={"0": {"targets": ["Conv"], "weights": {"num_bits": 8}}}), "config_groups"),
        ({"quantization_config": {"quant_method": "fp8", "weight_block_size": [128]}}, "weight_block_size"),
        ({"quantization_config": "fp8"}, "quantization_config"),
        ({"quantization_config": {"quant_method": "fp8", "fmt": "e5m2", "weight_block_size": [2, 2]}}, "fmt"),
        (changed(SERVED, transform_config={"hadamard": True}), "transform_config"),
        (changed(SERVED, config_groups={"0": "all"}), "weights"),
        (with_group(output_activations={"num_bits": 8}), "output_activations"),
        (with_group(format="pack-quantized"), "format"),
        (with_inputs(symmetric=False), "input_activations"),
        (with_inputs(strategy="tensor"), "input_activations"),
        (with_inputs(group_size=32), "group_size"),
        (changed(SERVED, config_groups={"0": {"targets": ["Linear"], "weights": {"actorder": "group"}}}), "actorder"),
    ],
)  # fmt: skip
def test_what_is_not_served_is_named(values: dict[str, Any], said: str) -> None:
    with pytest.raises(EngineError, match=rf"not served \({said}\)"):
        Quantisation.of(values, "config.json")


def rewritten(folder: Path, target: Path, change: Any) -> Path:
    target.mkdir()
    for file in folder.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    tensors = load_file(target / "model.safetensors")
    change(tensors)
    save_file(tensors, target / "model.safetensors")
    return target


NAME = f"{LAYER}self_attn.k_proj."


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda tensors: tensors.pop(f"{NAME}weight_scale"),
            "without scales stands beside quantised ones|expected .*dtype",
        ),
        (
            lambda tensors: tensors.update({f"{NAME}weight_scale": torch.zeros(64, 1)}),
            "do not fit it: .*k_proj.weight_scale",
        ),
        (
            lambda tensors: tensors.update({f"{NAME}weight_scale": torch.ones(3, 1)}),
            "do not fit it: .*k_proj.weight_scale",
        ),
        (lambda tensors: tensors.update({f"{NAME}weight_scale": torch.full((64, 1), torch.nan)}), "do not fit it"),
        (
            lambda tensors: tensors.update({f"{NAME}weight": torch.zeros(64, 96)}),
            "contradicts config.json: .*k_proj.weight",
        ),
        (lambda tensors: tensors.update({f"{NAME}weight_extra": torch.zeros(1)}), "unexpected: .*k_proj.weight_extra"),
    ],
)
def test_scales_that_do_not_fit_are_named(folders: dict[str, Path], tmp_path: Path, change: Any, said: str) -> None:
    folder = rewritten(folders["w8a8"], tmp_path / "changed", change)
    with pytest.raises(EngineError, match=said):
        loaded(folder)


def with_quantised(name: str, like: str, dtype: torch.dtype) -> Any:
    """Give the tensor `name` a form with scales, made of the floats of `like`."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        floats = tensors[like].float()
        scale = floats.abs().amax(dim=1, keepdim=True) / (127 if dtype == torch.int8 else 448)
        steps = floats / scale
        tensors[name] = (steps.round() if dtype == torch.int8 else steps).to(dtype)
        tensors[f"{name}_scale"] = scale

    return change


@pytest.mark.parametrize(("name", "dtype"), [("w8a8", torch.int8), ("fp8-dynamic", torch.float8_e4m3fn)])
def test_a_head_with_scales_is_multiplied_with_them(
    folders: dict[str, Path], tmp_path: Path, name: str, dtype: torch.dtype
) -> None:
    """The embedding that it was made of is another tensor: the head is no longer tied."""
    change = with_quantised("lm_head.weight", "model.embed_tokens.weight", dtype)
    params = SamplingParams(max_new_tokens=1, ignore_eos=True, num_logprobs=3)

    def logits_of(folder: Path) -> dict[int, float]:
        with LLMEngine(folder, EngineConfig(dtype="float32", max_model_len=64)) as engine:
            (output,) = engine.generate([list(range(4, 21))], params)
        return dict(output.logprobs[0].top)

    expected, actual = logits_of(folders[name]), logits_of(rewritten(folders[name], tmp_path / "head", change))
    assert actual != expected
    assert actual == pytest.approx(expected, abs=0.1)


def test_an_embedding_with_scales_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    change = with_quantised("model.embed_tokens.weight", "model.embed_tokens.weight", torch.int8)
    with pytest.raises(EngineError, match="quantised embedding is not served"):
        loaded(rewritten(folders["w8a8"], tmp_path / "changed", change))


def test_ranks_do_not_share_quantised_weights(folders: dict[str, Path]) -> None:
    config = ModelConfig.from_folder(folders["w8a8"])
    with pytest.raises(ConfigError, match="not shared among ranks"):
        load_weights(folders["w8a8"], config, torch.bfloat16, torch.device("cpu"), rank=0, num_ranks=2)


def test_an_unknown_form_is_refused_before_weights_are_read(folders: dict[str, Path], tmp_path: Path) -> None:
    config = json.loads((folders["w8a8"] / "config.json").read_text())
    config["quantization_config"]["quant_method"] = "awq"
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(EngineError, match="quant_method"):
        LLMEngine(tmp_path)
