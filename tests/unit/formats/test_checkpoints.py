"""The committed tiny checkpoints: HuggingFace layout, features present, and trained well enough to expose bugs."""

import importlib.util
import json
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging

CHECKPOINTS = Path(__file__).parents[3] / "cases" / "checkpoints"
NAMES = (
    "llama-tiny",
    "qwen2-tiny",
    "qwen3-tiny",
    "qwen3-moe-tiny",
    "gemma3-tiny",
    "qwen3-next-tiny",
    "deepseek-v3-tiny",
)
MAX_BYTES = 2_000_000
HEAD_DIM = 32
"""The smallest that attention kernels of other engines take."""
SEED = 20_000
"""Not the seed the checkpoints were trained or evaluated with."""


def import_train() -> ModuleType:
    spec = importlib.util.spec_from_file_location("checkpoints_train", CHECKPOINTS / "train.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up while it runs
    spec.loader.exec_module(module)
    return module


train = import_train()


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


@cache
def load_model(name: str) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(CHECKPOINTS / name, local_files_only=True).eval()


@cache
def load_tokenizer(name: str) -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(CHECKPOINTS / name, local_files_only=True)


def accuracy(name: str, model: PreTrainedModel, bucket: str = "65-128") -> float:
    return float(train.bucket_accuracy(model, load_tokenizer(name), bucket, seed=SEED, num_texts=8))


@pytest.mark.parametrize("name", NAMES)
def test_loading_says_nothing(name: str, caplog: pytest.LogCaptureFixture) -> None:
    transformers_logging.enable_propagation()
    try:
        model = AutoModelForCausalLM.from_pretrained(CHECKPOINTS / name, local_files_only=True)
        load_tokenizer(name)
    finally:
        transformers_logging.disable_propagation()
    assert [record.getMessage() for record in caplog.records if record.levelname != "INFO"] == []
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


@pytest.mark.parametrize("name", NAMES)
def test_folder_is_small_and_complete(name: str) -> None:
    files = {path.name: path.stat().st_size for path in (CHECKPOINTS / name).iterdir()}
    assert sum(files.values()) <= MAX_BYTES
    expected = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "training.json"}
    assert expected <= files.keys()


@pytest.mark.parametrize("name", NAMES)
def test_shared_features(name: str) -> None:
    config = AutoConfig.from_pretrained(CHECKPOINTS / name, local_files_only=True)
    features = {
        "qwen2-tiny": (4, 2, 3),
        "gemma3-tiny": (4, 2, 6),
        "qwen3-next-tiny": (4, 2, 4),
        "deepseek-v3-tiny": (4, 4, 3),
    }
    expected = features.get(name, (6, 2, 3))
    assert (config.num_attention_heads, config.num_key_value_heads, config.num_hidden_layers) == expected
    assert (config.vocab_size, config.max_position_embeddings) == (256, 512)
    assert (config.bos_token_id, config.eos_token_id) == (1, 2)
    assert config.tie_word_embeddings == (name != "qwen2-tiny")


@pytest.mark.parametrize("name", NAMES[:-1])
def test_heads_are_as_wide_as_other_engines_want_them(name: str) -> None:
    assert load_model(name).model.layers[3 if name == "qwen3-next-tiny" else 0].self_attn.head_dim == HEAD_DIM


def test_qwen2_heads_are_as_wide_as_sizes_say() -> None:
    config = load_model("qwen2-tiny").config
    assert config.hidden_size // config.num_attention_heads == HEAD_DIM


def test_most_words_lie_outside_of_gemma_s_window() -> None:
    config = load_model("gemma3-tiny").config
    assert config.layer_types == ["sliding_attention"] * 5 + ["full_attention"]
    assert config.sliding_window * 2 <= train.DISTANCE_BUCKETS["65-128"][0]
    bases = {kind: rope["rope_theta"] for kind, rope in config.rope_parameters.items()}
    assert bases == {"full_attention": 1e6, "sliding_attention": 1e4}


def test_the_number_of_experts_has_the_hub_s_name() -> None:
    assert json.loads((CHECKPOINTS / "qwen3-moe-tiny" / "config.json").read_text())["num_experts"] == 8


def test_tokens_go_to_many_experts() -> None:
    model = load_model("qwen3-moe-tiny")
    chosen: dict[int, set[int]] = {}
    handles = [
        layer.mlp.gate.register_forward_hook(
            lambda m, i, out, n=number: chosen.setdefault(n, set()).update(out[2].flatten().tolist())
        )
        for number, layer in enumerate(model.model.layers)
    ]
    try:
        accuracy("qwen3-moe-tiny", model)
    finally:
        for handle in handles:
            handle.remove()
    assert {number: len(experts) >= 7 for number, experts in chosen.items()} == {0: True, 1: True, 2: True}


def test_llama_scales_its_frequencies() -> None:
    config = AutoConfig.from_pretrained(CHECKPOINTS / "llama-tiny", local_files_only=True)
    assert config.rope_parameters["rope_type"] == "llama3"
    assert config.rope_parameters["original_max_position_embeddings"] < train.MAX_WORDS


def test_qwen2_is_split_over_two_shards() -> None:
    folder = CHECKPOINTS / "qwen2-tiny"
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    shards = set(index["weight_map"].values())
    assert len(shards) == 2
    assert shards == {path.name for path in folder.glob("*.safetensors")}
    assert "lm_head.weight" in index["weight_map"]
    assert "model.layers.0.self_attn.k_proj.bias" in index["weight_map"]


def test_qwen3_heads_are_wider_than_hidden_over_heads() -> None:
    config = load_model("qwen3-tiny").config
    assert config.head_dim == 32
    assert config.head_dim != config.hidden_size // config.num_attention_heads
    assert "model.layers.0.self_attn.q_norm.weight" in load_model("qwen3-tiny").state_dict()


@pytest.mark.parametrize("name", NAMES)
def test_norm_weights_are_spread(name: str) -> None:
    assert train.norm_spread(load_model(name)) > 0.2


@pytest.mark.parametrize("name", NAMES)
def test_text_survives_the_tokenizer(name: str) -> None:
    tokenizer = load_tokenizer(name)
    text = " ".join([*train.WORDS, "|", *train.WORDS[:3]])
    ids = tokenizer.encode(text)
    assert tokenizer.is_fast
    assert len(tokenizer) == 256
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id) == (1, 2, 0)
    assert ids[0] == train.BOS_ID
    assert train.UNK not in tokenizer.convert_ids_to_tokens(ids)
    assert ids.count(train.SEPARATOR_ID) == 1
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


@pytest.mark.parametrize("name", NAMES)
def test_tokenizer_is_the_one_trained_with(name: str) -> None:
    text, _ = train.half_recited(num_words=200, num_recited=200, seed=SEED)
    assert load_tokenizer(name).encode(text) == train.RECIPES[name]().tokenizer.encode(text)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "qwen2-tiny"])
def test_one_word_is_one_token(name: str) -> None:
    text = " ".join(train.WORDS)
    assert len(load_tokenizer(name).encode(text, add_special_tokens=False)) == len(train.WORDS)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bucket", ["65-128", ">128"])
def test_recites_over_a_distance(name: str, bucket: str) -> None:
    assert accuracy(name, load_model(name), bucket) >= 0.95


@pytest.mark.parametrize("name", NAMES)
def test_greedy_generation_completes_half_recited_prompts(name: str) -> None:
    tokenizer, num_right = load_tokenizer(name), 0
    for seed in range(SEED, SEED + 3):
        prompt, expected = train.half_recited(num_words=80, num_recited=40, seed=seed)
        inputs = tokenizer(prompt, return_tensors="pt")
        output = load_model(name).generate(**inputs, max_new_tokens=100)[0, inputs["input_ids"].shape[1] :]
        assert output[-1] == train.EOS_ID
        words = tokenizer.decode(output, skip_special_tokens=True).split()
        num_right += sum(map(str.__eq__, words, expected.split()))
    assert num_right >= 0.95 * 3 * 40


@pytest.mark.parametrize(
    ("name", "ablation"),
    [
        ("llama-tiny", "without_rope_scaling"),
        ("qwen2-tiny", "without_bias"),
        ("qwen3-tiny", "without_qk_norm_weights"),
        ("qwen3-moe-tiny", "without_qk_norm_weights"),
        ("gemma3-tiny", "without_qk_norm_weights"),
        ("qwen3-next-tiny", "without_convolutions"),
        ("deepseek-v3-tiny", "without_rope_scaling"),
        *((name, "without_norm_weights") for name in NAMES),
    ],
)
def test_no_feature_can_be_left_out_unnoticed(name: str, ablation: str) -> None:
    ablated = getattr(train, ablation)(load_model(name))
    assert accuracy(name, ablated) < accuracy(name, load_model(name)) - 0.1


@pytest.mark.parametrize(
    ("name", "ablation"), [("gemma3-tiny", "without_window"), ("qwen3-moe-tiny", "with_the_worst_experts")]
)
def test_some_features_show_far_behind(name: str, ablation: str) -> None:
    model = load_model(name)
    assert accuracy(name, getattr(train, ablation)(model), ">128") < accuracy(name, model, ">128") - 0.05


@pytest.mark.parametrize("name", NAMES)
def test_a_lost_cache_block_flips_its_words(name: str) -> None:
    assert train.lost_block_accuracy(load_model(name), load_tokenizer(name), seed=SEED, num_texts=8) < 0.5


def test_training_repeats_bit_for_bit() -> None:
    weights = []
    for _ in range(2):
        torch.manual_seed(3)
        recipe = train.RECIPES["qwen3-tiny"]()
        model = train.build_model(recipe)
        train.train(model, recipe.tokenizer, steps=2, seed=3)
        weights.append(model.state_dict())
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])
