"""Adapters beside the base model: each request gets its own, and the answer is that of the merged weights."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from reference_engine import EngineConfig, EngineError, LLMEngine, SamplingParams

from ..lora_adapter import FOLDER, write_adapter

PROMPTS = [[1, 64, 155, 143, 3, 64], [1, 20, 31, 7, 9], [1, 5, 6, 200, 201, 202, 3, 5], [1, 99, 98, 97]]


@pytest.fixture(scope="module")
def adapters(tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters")
    return {
        "all": write_adapter(folder / "all", seed=1),
        "attention": write_adapter(folder / "attention", seed=2, rank=2, modules=("q_proj", "v_proj"), use_rslora=True),
    }


def merged_logprobs(adapter: Path | None, ids: list[int]) -> torch.Tensor:
    """Log probabilities of HF with merged weights, in float64."""
    model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float64)
    if adapter is not None:
        settings = json.loads((adapter / "adapter_config.json").read_text())
        rank, alpha = settings["r"], settings["lora_alpha"]
        scaling = alpha / (rank**0.5 if settings.get("use_rslora") else rank)
        tensors = load_file(adapter / "adapter_model.safetensors")
        for key in tensors:
            if key.endswith(".lora_A.weight"):
                module = key.removesuffix(".lora_A.weight")
                a, b = tensors[key].double(), tensors[f"{module}.lora_B.weight"].double()
                model.get_submodule(module.removeprefix("base_model.model.")).weight.data += scaling * b @ a
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0].log_softmax(-1)


def generate(adapters, requests, **config):
    with LLMEngine(FOLDER, EngineConfig(dtype="float32", **config), adapters=adapters) as engine:
        params = [
            SamplingParams(max_new_tokens=6, num_logprobs=0, ignore_eos=True, adapter=adapter)
            for _, adapter in requests
        ]
        return engine.generate([prompt for prompt, _ in requests], params)


def largest_error(output, adapter: Path | None) -> float:
    ids = [*output.prompt_token_ids, *output.token_ids]
    truth = merged_logprobs(adapter, ids)
    first = len(output.prompt_token_ids) - 1
    return max(
        abs(logprobs.logprob - float(truth[first + at, token]))
        for at, (logprobs, token) in enumerate(zip(output.logprobs, output.token_ids, strict=True))
    )


@pytest.mark.parametrize("config", [{}, {"max_num_batched_tokens": 3}, {"attention_backend": "contiguous"}])
def test_a_mixed_batch_gives_each_request_its_own_adapter(adapters, config):
    names = ["all", None, "attention", "all"]
    outputs = generate(adapters, list(zip(PROMPTS, names, strict=True)), **config)
    for output, name in zip(outputs, names, strict=True):
        assert largest_error(output, adapters.get(name)) < 2e-4, name
    assert largest_error(outputs[0], None) > 0.1, "the adapter changes nothing: the test could not fail"
    assert largest_error(outputs[0], adapters["attention"]) > 0.1


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_peft_itself_agrees(adapters):
    peft = pytest.importorskip("peft", reason="peft is not installed")
    base = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)
    (output,) = generate(adapters, [(PROMPTS[0], "attention")])
    model = peft.PeftModel.from_pretrained(base, adapters["attention"])
    ids = [*output.prompt_token_ids, *output.token_ids]
    with torch.no_grad():
        logprobs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    expected_logprobs = [float(logprobs[len(PROMPTS[0]) - 1 + at, token]) for at, token in enumerate(output.token_ids)]
    assert [logprobs.logprob for logprobs in output.logprobs] == pytest.approx(expected_logprobs, abs=2e-4)


def test_cached_prefixes_are_not_shared_between_adapters(adapters):
    prompt = list(range(4, 44))
    names = ["all", None, "attention", "all"]
    with LLMEngine(
        FOLDER, EngineConfig(dtype="float32", enable_prefix_caching=True, block_size=8), adapters=adapters
    ) as engine:
        for name in names:
            params = SamplingParams(max_new_tokens=2, num_logprobs=0, ignore_eos=True, adapter=name)
            (output,) = engine.generate([prompt], params)
            assert largest_error(output, adapters.get(name)) < 2e-4, name


def test_an_unknown_adapter_is_refused(adapters):
    with pytest.raises(EngineError, match=r"no such adapter.*\['all', 'attention'\].*found nobody"):
        generate(adapters, [(PROMPTS[0], "nobody")])


def spoilt(tmp_path, change_config=None, change_tensors=None):
    folder = write_adapter(tmp_path / "adapter", seed=3)
    config = json.loads((folder / "adapter_config.json").read_text())
    tensors = load_file(folder / "adapter_model.safetensors")
    (change_config or dict)(config)
    (change_tensors or dict)(tensors)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file({key: value.contiguous() for key, value in tensors.items()}, folder / "adapter_model.safetensors")
    return folder


KEY = "base_model.model.model.layers.0.self_attn.q_proj"


def swap(tensors):
    a, b = f"{KEY}.lora_A.weight", f"{KEY}.lora_B.weight"
    tensors[a], tensors[b] = tensors[b], tensors[a]


@pytest.mark.parametrize(
    ("config", "tensors", "says"),
    [
        (lambda c: c.update(peft_type="IA3"), None, "no LoRA"),
        (lambda c: c.update(use_dora=True), None, "use_dora is not served"),
        (lambda c: c.update(bias="all"), None, "bias is not served"),
        (lambda c: c.update(r=0), None, "r is impossible"),
        (lambda c: c.update(lora_alpha="8"), None, "lora_alpha is impossible"),
        (lambda c: c.update(r=8), None, "rank is not the one that its config states.*expected 8, found 4"),
        (None, swap, r"do not fit the layer.*A \[rank, 96\], B \[192, rank\]"),
        (None, lambda t: t.pop(f"{KEY}.lora_B.weight"), "one of two tensors"),
        (None, lambda t: t.update({"base_model.model.lm_head.lora_A.weight": torch.ones(4, 96)}), "no linear layer"),
        (lambda c: c.update(layers_to_transform=[0, 1]), None, "module that its config does not target"),
        (lambda c: c["target_modules"].append("mlp"), None, "no weights for, in .*expected model.layers.0.mlp"),
        (lambda c: c.update(lora_alpha=10**400), None, "lora_alpha is impossible"),
        (lambda c: c.update(of_tomorrow=1), None, "of_tomorrow is not served"),
        (None, lambda t: t.update({"other.weight": torch.ones(1)}), "no part of a LoRA"),
        (None, dict.clear, "no weights"),
    ],
)
def test_an_adapter_that_does_not_fit_is_refused(tmp_path, config, tensors, says):
    folder = spoilt(tmp_path, config, tensors)
    with pytest.raises(EngineError, match=says):
        LLMEngine(FOLDER, adapters={"bad": folder})


def test_files_that_are_not_there(tmp_path):
    with pytest.raises(EngineError, match="config cannot be read"):
        LLMEngine(FOLDER, adapters={"bad": tmp_path})
    folder = write_adapter(tmp_path / "adapter", seed=3)
    (folder / "adapter_model.safetensors").write_bytes(b"nothing")
    with pytest.raises(EngineError, match="weights cannot be read"):
        LLMEngine(FOLDER, adapters={"bad": folder})
