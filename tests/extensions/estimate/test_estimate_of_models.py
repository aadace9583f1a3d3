"""Estimates against formulas of their own, against published sizes, and against engines."""

import shutil

import pytest
import transformers

from harness.engines import open_engine
from harness.errors import Code, HarnessError
from harness.extensions.estimate.meta_model import MetaModel, read_config
from harness.extensions.estimate.report import estimate_text
from harness.extensions.estimate.run import estimate
from harness.profiling.formulas import operation_costs
from harness.profiling.gpus import GPUS
from harness.results.profile import StepShape

CONTEXT = 50
"""Longer than the window of gemma3-tiny."""


def shape(phase, num_rows, context):
    return StepShape(phase=phase, query_lens=(num_rows,), context_lens=(context,), num_sampled=1)


def sizes(model, **options):
    arguments = {"dtype": "bfloat16", "gpus": [], "num_requests": 1, "context": CONTEXT, **options}
    return estimate(str(model), **arguments)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["llama-tiny", "qwen2-tiny", "qwen3-tiny", "qwen3-moe-tiny", "gemma3-tiny"])
def test_what_is_counted_is_what_the_formulas_say(checkpoints, name):
    """Products and attention, masked and windowed; the formulas know sizes alone, and nothing of HF's code."""
    engine = open_engine("reference", checkpoints / name, dtype="bfloat16", device="cpu", options={})
    model, size = engine.open_session(max_num_tokens=64, max_num_seqs=1).model, sizes(checkpoints / name).size

    def flops(step):
        return sum(cost.flops for cost in operation_costs(model, [step]).values())

    assert size.decode_flops == flops(shape("decode", 1, CONTEXT))
    assert size.prefill_flops == flops(shape("prefill", CONTEXT, CONTEXT))


@pytest.mark.parametrize("name", ["qwen2-tiny", "gemma3-tiny", "qwen3-moe-tiny"])
def test_operations_are_listed_where_their_formulas_add_up(checkpoints, tmp_path, name):
    """Of a config in a file of any name; an engine says the sizes by another way. Routers are in no formula of HF's."""
    file = shutil.copy(checkpoints / name / "config.json", tmp_path / "mine.json")
    size = sizes(file).size
    engine = open_engine("reference", checkpoints / name, dtype="bfloat16", device="cpu", options={})
    model = engine.open_session(max_num_tokens=64, max_num_seqs=1).model
    costs = operation_costs(model, [shape("decode", 1, CONTEXT)])
    expected = {site: (cost.flops + cost.elementwise_flops, cost.bytes_moved) for site, cost in costs.items()}
    listed = {item.name: (item.decode_flops, item.decode_bytes) for item in size.operations}
    assert listed == ({} if name == "qwen3-moe-tiny" else expected)
    text = estimate_text(sizes(file))
    assert ("No table by operation" in text) == (not listed)
    assert ("4 P N H" in text) == bool(listed)


def config(tmp_path, kind, **fields):
    getattr(transformers, kind)(**fields).save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.slow
def test_the_sizes_of_llama_3_8b(tmp_path):
    folder = config(
        tmp_path, "LlamaConfig", hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
        num_attention_heads=32, num_key_value_heads=8, vocab_size=128256,
    )  # fmt: skip
    result = sizes(folder, gpus=["h100"], num_requests=4, context=8192)
    size, (gpu,) = result.size, result.gpus
    assert size.num_parameters == 8_030_261_248  # meta-llama/Meta-Llama-3-8B
    assert size.cache_bytes_per_token == 2 * 32 * 8 * 128 * 2
    assert size.cache_bytes == 8192 * size.cache_bytes_per_token
    assert gpu.needed_bytes == size.weights_bytes + 4 * size.cache_bytes
    assert gpu.most_requests == (80 * 10**9 - size.weights_bytes) // size.cache_bytes
    read = size.weights_bytes - 128256 * 4096 * 2 + 4 * size.cache_bytes
    assert gpu.decode_bound == "memory"
    assert gpu.decode_step_s == pytest.approx(read / 3.35e12)
    assert gpu.prefill_bound == "compute"
    assert gpu.prefill_s == pytest.approx(size.prefill_flops / 989e12)


def test_latents_are_cached_as_latents_and_their_keys_are_made_once(tmp_path):
    folder = config(
        tmp_path, "DeepseekV3Config", num_hidden_layers=2, first_k_dense_replace=1, n_routed_experts=8, n_group=2,
        topk_group=1, hidden_size=256, intermediate_size=128, moe_intermediate_size=64, num_attention_heads=4,
        num_key_value_heads=4, vocab_size=64, num_experts_per_tok=2,
    )  # fmt: skip
    size = sizes(folder, context=100).size
    assert size.cache_bytes_per_token == 2 * (512 + 64) * 2
    longer = MetaModel(read_config(str(folder)), "x").decode_flops(101)
    assert longer - size.decode_flops == 2 * 2 * 4 * (128 + 64 + 128)  # layers, a multiply-add, heads, key and value
    assert (size.num_experts, size.num_chosen) == (8, 2)
    routed = next(part.num_parameters for part in size.parts if part.name == "experts")
    assert routed == 8 * 3 * 256 * 64
    assert size.num_active == size.num_parameters - routed * 6 // 8 - 64 * 256


def test_states_do_not_grow(tmp_path):
    folder = config(
        tmp_path, "Mamba2Config", hidden_size=64, num_heads=8, head_dim=16, num_hidden_layers=2, state_size=16,
        vocab_size=64, n_groups=1,
    )  # fmt: skip
    size = sizes(folder).size
    assert size.cache_bytes_per_token == 0
    assert size.cache_bytes > 0


def test_a_cache_of_another_dtype(checkpoints):
    whole, half = (sizes(checkpoints / "qwen3-tiny", cache_dtype=dtype).size for dtype in ("bfloat16", "float8"))
    assert whole.cache_bytes == 2 * half.cache_bytes
    assert sizes(checkpoints / "qwen3-tiny", dtype="float8").size.cache_dtype == "bfloat16"


@pytest.mark.slow
def test_experts_that_are_read_grow_with_the_requests(checkpoints):
    gpu = {count: sizes(checkpoints / "qwen3-moe-tiny", gpus=["H200"], num_requests=count).gpus[0] for count in (1, 64)}
    size = sizes(checkpoints / "qwen3-moe-tiny").size
    assert gpu[1].decode_step_s * 4.8e12 == pytest.approx(2 * size.num_active + size.cache_bytes, rel=1e-6)
    assert gpu[64].decode_step_s * 4.8e12 == pytest.approx(size.weights_bytes + 64 * size.cache_bytes, rel=1e-3)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("model", "code", "words"),
    [("{", Code.MODEL_NOT_SIZED, "cannot be read"), ('{"model_type": "t5"}', Code.MODEL_NOT_SIZED, "builds no model"),
     ('{"model_type": "unheard"}', Code.MODEL_NOT_SIZED, "cannot be read"),
     ('{"model_type": "llama", "hidden_size": "a"}', Code.MODEL_NOT_SIZED, "cannot be read|builds no model")],
)  # fmt: skip
def test_what_cannot_be_sized_is_refused(tmp_path, model, code, words):
    (tmp_path / "config.json").write_text(model)
    with pytest.raises(HarnessError, match=words) as caught:
        sizes(tmp_path)
    assert caught.value.code is code


@pytest.mark.parametrize(
    ("options", "words"), [({"gpus": ["X1"]}, "X1"), ({"gpus": ["A100"], "dtype": "float8"}, "A100")]
)
def test_a_gpu_without_figures_is_refused(checkpoints, options, words):
    with pytest.raises(HarnessError, match=words) as caught:
        sizes(checkpoints / "qwen3-tiny", **options)
    assert caught.value.code is Code.BAD_OPTION


def test_every_gpu_says_where_its_figures_are_from():
    assert all(gpu.source.endswith("data sheet") for gpu in GPUS.values())
