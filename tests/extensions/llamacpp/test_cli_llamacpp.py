"""`harness check --engine llamacpp`: every tap of llama.cpp under every schedule that it follows."""

import importlib.util
import json
from collections import Counter

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Gemma3ForCausalLM, LlamaConfig, LlamaForCausalLM, MambaConfig, MambaForCausalLM

from harness.engines import open_engine
from harness.engines.stepping import open_session, open_token_session
from harness.errors import Code
from harness.extensions.llamacpp.gguf import open_gguf
from harness.extensions.llamacpp.gguf.header import PLAIN
from harness.extensions.llamacpp.gguf.model import rows_of_hf
from harness.extensions.llamacpp.gguf.writer import write_adapter_file, write_gguf
from harness.extensions.quant.files import pad_checkpoint
from harness.profiling.counters import count
from harness.profiling.formulas import operation_costs
from harness.profiling.load import CaptureSchedule, ProfileRequests, dry_run, window

from ...faulty_gguf import OTHERS, OTHERS_FROM, write_faulty, write_typed
from ...llamacpp_files import write_gemma3, write_glm4_moe, write_mamba
from ...unit.lora_adapter import write_adapter

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("llama_cpp") is None or importlib.util.find_spec("gguf") is None,
    reason="llama-cpp-python is not installed (extra llamacpp; built from source, about ten minutes)",
)
PROMPTS = ["--token-ids", "1,20,21,22,23,24,25,26,27,28", "--token-ids", "1,30,31,9", "--token-ids", "5"]
PLAIN_CACHE = ["--engine-option", "cache_type=F32", "--engine-option", "flash_attention=off"]


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    """Keep goldens and checkpoints in a folder of the test's own."""
    monkeypatch.setenv("HARNESS_CACHE", str(tmp_path / "cache"))
    return tmp_path


@pytest.fixture
def check(harness, own_cache):

    def check(model, *options):
        workload = [*PROMPTS, "--max-new-tokens", 6]
        # In this process: a second one would take seconds to import torch.
        return harness("check", "--engine", "llamacpp", "--engine-timeout", "0", "--model", model, *workload, *options)

    return check


@pytest.fixture
def runs(check):
    """Check, and return the runs of the report, after having compared the exit status."""

    def runs(model, *options, passes=True):
        ran = check(model, *options, "--format", "json")
        assert ran.status == (0 if passes else 1), ran.out
        return ran.json["runs"]

    return runs


def conventions(runs):
    """Return the convention under which each tap was judged, by its site."""
    return {tap["site"]: tap["convention"] for run in runs for tap in run["taps"]}


def assert_all_recorded(runs):
    for run in runs:
        assert run["coverage"]["missing"] == 0
        assert run["coverage"]["not_offered"] == []


@pytest.mark.parametrize("name", ["llama-tiny", "qwen2-tiny", "qwen3-tiny"])
def test_float32_passes_every_tap_under_every_schedule(runs, name, checkpoints, tmp_path):
    path = write_gguf(checkpoints / name, tmp_path / "model.gguf")
    schedules = "plain,chunked:3,batched,mixed:4,prefix-hit,forked"
    found_runs = runs(path, *PLAIN_CACHE, "--schedule", schedules)
    assert_all_recorded(found_runs)
    for run in found_runs:
        judged = {tap["site"] for tap in run["taps"] if tap["judged_by"] == "local"}
        assert {"self_attn.q_proj", "q_rope", "attention", "mlp.act", "output", "model.norm", "lm_head"} <= judged
        assert {"k_cache", "v_cache"} <= {tap["site"] for tap in run["taps"]}


def test_small_batches_of_its_own(check, checkpoints, tmp_path):
    path = write_gguf(checkpoints / "llama-tiny", tmp_path / "model.gguf")
    sizes = ["--engine-option", "batch_size=8", "--engine-option", "ubatch_size=3"]
    assert check(path, *PLAIN_CACHE, *sizes, "--schedule", "batched").status == 0


def test_a_checkpoint_that_is_no_gguf_is_converted(check):
    assert check("llama-tiny", *PLAIN_CACHE, "--schedule", "plain").status == 0


def test_a_rotary_base_of_the_engines_own_is_found_and_named(check, checkpoints, tmp_path):
    path = write_gguf(checkpoints / "qwen2-tiny", tmp_path / "model.gguf")
    ran = check(path, *PLAIN_CACHE, "--engine-option", "rope_freq_base=500000", "--schedule", "plain")
    assert ran.status == 1
    assert "First divergence: model.layers.0.q_rope" in ran.out
    assert "theta" in ran.out.partition("Cause:")[2]


def test_another_dtype_is_refused(check):
    ran = check("llama-tiny", "--dtype", "bfloat16")
    assert ran.status == 2
    assert ran.err.startswith(f"{Code.ENGINE_CANNOT_SERVE}: llama.cpp computes in float32")


def test_a_schedule_that_it_cannot_follow_is_refused(check):
    assert check("llama-tiny", "--schedule", "preempted").status == 2


NO_REPACK = ["--engine-option", "repack=off"]


@pytest.mark.parametrize("type_name", ["F32", "F16", "BF16", "Q8_0", "Q4_0"])
def test_types_pass_with_the_cache_that_llamacpp_has_by_default(runs, type_name, checkpoints, tmp_path):
    path = write_gguf(checkpoints / "llama-tiny", tmp_path / "model.gguf", type_name)
    seen = conventions(runs(path, *NO_REPACK, "--schedule", "plain,batched"))
    assert "float16" in seen["attention"]
    wanted = {"F16": "rounded to float16", "BF16": "rounded to bfloat16", "Q8_0": "to Q8_0", "Q4_0": "to Q8_0"}
    assert type_name == "F32" or wanted[type_name] in seen["self_attn.q_proj"]


CACHES = [("Q8_0", "Q8_0"), ("Q4_0", "Q4_0"), ("Q8_0", "F16"), ("F16", "Q4_0"), ("Q4_1", "Q5_1"), ("IQ4_NL", "IQ4_NL")]


@pytest.mark.parametrize(("keys", "values"), CACHES)
@pytest.mark.parametrize("head_dim", [32, 64, 128])
def test_quantised_caches_pass(runs, keys, values, head_dim, small_llama):
    cache = ["--engine-option", f"cache_type_k={keys}", "--engine-option", f"cache_type_v={values}"]
    flash = ["--engine-option", "flash_attention=on", "--schedule", "plain,batched", *LONGER]
    seen = conventions(runs(small_llama(head_dim), *cache, *flash))
    names = {"F16": "float16"}
    assert seen["k_cache"] == f"kept in {names.get(keys, keys)}, as declared"
    assert seen["v_cache"] == f"kept in {names.get(values, values)}, as declared"
    assert f"keys read in {names.get(keys, keys)}, values in {names.get(values, values)}" in seen["attention"]


MIXED = [
    ("F32", "F32"), ("F32", "F16"), ("F16", "F32"), ("BF16", "F32"), ("F32", "BF16"), ("Q8_0", "F32"), ("F32", "Q8_0"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("keys", "values", "flash"),
    [*((*item, "on") for item in MIXED), *((*item, "off") for item in MIXED[:-1])],  # flash attention reads such values
)
def test_caches_in_two_formats_pass(runs, keys, values, flash, small_llama):
    """Flash attention casts what is kept in float32 to float16."""
    cache = ["--engine-option", f"cache_type_k={keys}", "--engine-option", f"cache_type_v={values}"]
    found_runs = runs(small_llama(32), *cache, "--engine-option", f"flash_attention={flash}", *LONGER)
    (seen,) = {tap["convention"] for run in found_runs for tap in run["taps"] if tap["site"] == "attention"}
    names = {"F32": "float16" if flash == "on" else "float32", "F16": "float16", "BF16": "bfloat16"}
    keys, values = names.get(keys, keys), names.get(values, values)
    if keys == values == "float32":
        assert not seen
    else:
        assert seen.startswith(
            f"keys and values read in {keys}" if keys == values else f"keys read in {keys}, values in {values}"
        )


@pytest.fixture
def small_llama(tmp_path):
    """Write a Llama of random weights with heads of a size; those of 64 turn before they are quantised."""

    def small_llama(head_dim):
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=head_dim, max_position_embeddings=128, initializer_range=0.2,
        )  # fmt: skip
        LlamaForCausalLM(config).save_pretrained(tmp_path / "llama")
        return tmp_path / "llama"

    return small_llama


@pytest.fixture
def mamba(tmp_path):
    """Write a tiny Mamba, and what llama.cpp's converter makes of it; `change` plants a fault in a tensor."""

    def mamba(change=lambda _name, tensor: tensor):
        torch.manual_seed(0)
        config = MambaConfig(vocab_size=256, hidden_size=32, state_size=8, num_hidden_layers=2, time_step_rank=2)
        model = MambaForCausalLM(config)
        for name, value in model.named_parameters():
            if name.endswith("dt_proj.bias"):
                value.data += 4  # llama.cpp's softplus loses digits of small steps
            elif "norm" in name:
                value.data += 0.2 * torch.randn(value.shape)
        model.save_pretrained(tmp_path / "mamba")
        write_mamba(model, tmp_path / "mamba.gguf", change)
        return tmp_path / "mamba", f"gguf={tmp_path / 'mamba.gguf'}"

    return mamba


def test_an_architecture_without_a_table_is_found_by_content(runs, mamba):
    folder, file = mamba()
    found_runs = runs(folder, "--engine-option", file, "--schedule", "plain,chunked:3")
    assert_all_recorded(found_runs)
    for run in found_runs:
        assert {"conv_state", "recurrent_state", "mixer.x_proj", "mixer.out_proj"} <= {
            tap["site"] for tap in run["taps"]
        }


@pytest.mark.parametrize(
    ("name", "change", "site"),
    [
        ("layers.1.mixer.conv1d.bias", lambda b: b + 0.5, "mixer.x_proj.input"),
        ("layers.1.mixer.A_log", lambda a: a * 1.5, "mixer.out_proj.input"),
        ("layers.0.norm.weight", lambda w: w + 1, "norm"),
    ],
)
def test_a_fault_of_a_recurrent_model_is_found_at_its_operation(runs, mamba, name, change, site):
    folder, file = mamba(lambda tensor_name, value: change(value) if tensor_name.endswith(name) else value)
    first = runs(folder, "--engine-option", file, "--schedule", "plain", passes=False)[0]["first_divergence"]
    assert first["tap"] == f"backbone.layers.{name.split('.')[1]}.{site}"


@pytest.fixture
def gemma(tmp_path, checkpoints):
    """Write a quantised file of Gemma 3, whose graph has no table; return options that name it and its origin."""

    def gemma(kind="Q8_0", change=lambda _name, tensor: tensor, name="gemma"):
        file, origin = tmp_path / f"{name}-{kind}.gguf", checkpoints / "gemma3-tiny"
        write_gemma3(Gemma3ForCausalLM.from_pretrained(origin), file, kind, change)
        return file

    return gemma


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q5_0"])
def test_a_quantised_file_of_an_architecture_without_a_table_passes(runs, gemma, checkpoints, kind):
    """transformers dequantises it; the tensors are told by a copy in float32."""
    schedules = "plain,chunked:3,batched,mixed:4,rewound,speculative"
    for run in runs(gemma(kind), "--hf", checkpoints / "gemma3-tiny", "--schedule", schedules):
        assert run["coverage"]["missing"] == 0
        assert set(run["coverage"]["not_offered"]) == {"k_cache", "v_cache"}
        judged = {tap["site"]: tap["convention"] for tap in run["taps"]}
        assert judged["mlp.down_proj"] == "inputs quantised to Q8_0"


def test_a_fault_of_a_quantised_file_is_found_at_its_operation(runs, gemma, checkpoints):
    def change(name, tensor):
        return tensor.roll(1, dims=0) if name == "model.layers.3.mlp.down_proj.weight" else tensor

    wrong = gemma(change=change, name="wrong")
    options = ["--hf", checkpoints / "gemma3-tiny", "--engine-option", f"gguf={wrong}", "--schedule", "plain"]
    (run,) = runs(gemma(), *options, passes=False)
    assert run["first_divergence"]["tap"] == "model.layers.3.mlp.down_proj"


def test_a_file_that_is_another_model_is_refused(check, gemma, checkpoints):
    another = gemma(change=lambda name, tensor: tensor.flip(0) if "layers.2.mlp.up_proj" in name else tensor)
    ran = check(another, "--hf", checkpoints / "gemma3-tiny", "--schedule", "plain")
    assert ran.status == 1
    assert "model.layers.2.mlp.up_proj.weight is not the checkpoint's" in ran.err


def test_types_whose_products_are_not_replayed_are_refused(check, gemma, checkpoints):
    ran = check(gemma("Q5_1"), "--hf", checkpoints / "gemma3-tiny", "--schedule", "plain")
    assert ran.status == 2
    assert "products with weights of this type are not replayed" in ran.err


def test_a_file_of_another_architecture_needs_its_origin(check, gemma):
    ran = check(gemma(), "--schedule", "plain")
    assert ran.status == 2
    assert "--hf CHECKPOINT" in ran.err


@pytest.fixture
def glm(tmp_path, monkeypatch):
    """Write a tiny GLM-4-MoE with an MTP layer, and its file; HF looks for that layer behind 46 layers alone."""
    from transformers import Glm4MoeForCausalLM

    from ... import mtp

    def glm(change=lambda _name, tensor: tensor):
        monkeypatch.setattr(Glm4MoeForCausalLM, "_keys_to_ignore_on_load_unexpected", [r"model\.layers\.2\."])
        mtp.save("glm4_moe", tmp_path / "glm", num_layers=2)
        write_glm4_moe(tmp_path / "glm", tmp_path / "glm.gguf", change)
        return tmp_path / "glm", f"gguf={tmp_path / 'glm.gguf'}"

    return glm


OF_MTP = ["--mtp", "--engine-option", "mtp=true", "--schedule"]
LAST = "model.layers.2."


def test_layers_that_predict_further_tokens_pass(runs, glm):
    folder, file = glm()
    for run in runs(folder, "--engine-option", file, *OF_MTP, "plain,chunked:3,batched,mixed:4"):
        judged = {tap["name"]: tap for tap in run["taps"]}
        assert judged[f"{LAST}post_norm"]["num_rows"] == judged[f"{LAST}eh_proj"]["num_rows"] > 20


@pytest.mark.parametrize(
    ("name", "change", "site"),
    [
        ("eh_proj.weight", lambda w: w.roll(64, dims=1), "eh_proj"),
        ("hnorm.weight", lambda w: w + 0.5, "hnorm"),
        ("mlp.shared_experts.down_proj.weight", lambda w: w * 1.1, "mtp_block.mlp.shared_experts.down_proj"),
    ],
)
def test_a_fault_of_such_a_layer_is_found_at_its_operation(runs, glm, name, change, site):
    folder, file = glm(lambda tensor_name, value: change(value) if tensor_name == LAST + name else value)
    (run,) = runs(folder, "--engine-option", file, *OF_MTP, "plain", passes=False)
    assert run["first_divergence"]["tap"] == LAST + site


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--engine-option", "mtp=true"], "the file has no layers that predict further tokens"),
        (["--schedule", "rewound"], "llama_memory_seq_rm refuses it"),
        (["--engine-option", "cache_type=Q8_0"], "architectures alone whose graph is known"),
    ],
)
def test_what_a_recurrent_model_cannot_do_is_refused(check, mamba, options, said):
    folder, file = mamba()
    ran = check(folder, "--engine-option", file, "--schedule", "plain", *options)
    assert ran.status == 2
    assert said in ran.err


def test_a_file_is_found_by_content_as_by_its_table(check, checkpoints, tmp_path, monkeypatch):
    """Any file is found by content where its architecture has no table: here Qwen2's is taken away."""
    monkeypatch.setattr("harness.extensions.llamacpp.engine.engine.FAMILIES", {})
    path = write_gguf(checkpoints / "qwen2-tiny", tmp_path / "model.gguf")
    ran = check(
        "qwen2-tiny",
        "--engine-option",
        f"gguf={path}",
        "--schedule",
        "plain,chunked:3,batched,mixed:4,rewound,speculative",
        "--format",
        "json",
    )
    assert ran.status == 0, ran.out
    assert any("54 taps" in str(note) or "48 taps" in str(note) for note in ran.json["notes"])


SOUND_TYPES = ["F32", "F16", "BF16", "Q8_0", "Q6_K", "Q5_K", "Q4_K", "Q4_0"]
NAMED = {
    "another layer's tensor": (OTHERS, f"the weights are those of {OTHERS_FROM}"),
    "rows not reordered": ("model.layers.0.self_attn.q_proj", "the rows of the weight are in another order"),
    "rotary base doubled": ("model.layers.0.q_rope", "wrong rope theta: 20000 instead of 10000"),
    "scales shifted by a block": (
        "model.layers.1.mlp.down_proj",
        "the scales of blocks in row 0 of the quantised weight are others",
    ),
}
"""First divergence and cause of each fault."""
LONGER = ["--token-ids", ",".join(str(3 + at * 37 % 240) for at in range(40))]


@pytest.fixture(scope="module")
def padded(checkpoints, tmp_path_factory):
    """llama-tiny with rows of 256, which K-quants need."""
    return pad_checkpoint(checkpoints / "llama-tiny", tmp_path_factory.mktemp("padded") / "llama-tiny")


@pytest.mark.parametrize(
    ("type_name", "fault"),
    [(item, fault) for item in SOUND_TYPES for fault in NAMED if item not in PLAIN or "scales" not in fault],
)
def test_a_fault_of_the_engines_file_is_found_and_named(runs, fault, type_name, padded, tmp_path):
    tap, cause = NAMED[fault]
    sound = write_typed(padded, tmp_path / "sound.gguf", type_name)
    faulty = write_faulty(padded, tmp_path / "faulty.gguf", type_name, fault)
    options = [*NO_REPACK, "--engine-option", f"gguf={faulty}", "--schedule", "plain", *LONGER]
    first = runs(sound, *options, passes=False)[0]["first_divergence"]
    assert first["tap"] == tap
    assert first["explanation"]["cause"] == cause
    if "scales" in fault and type_name in ("Q8_0", "Q4_0"):
        assert "have the scale of the next" in first["explanation"]["detail"]


@pytest.mark.parametrize(
    ("name", "type_name"), [("llama-tiny", "F32"), ("llama-tiny", "F16"), ("qwen2-tiny", "F32"), ("qwen3-tiny", "Q8_0")]
)
def test_an_adapter_passes(runs, name, type_name, checkpoints, tmp_path):
    adapter = write_adapter(tmp_path / "adapter", seed=1, base=checkpoints / name)
    path = write_gguf(checkpoints / name, tmp_path / "model.gguf", type_name)
    found_runs = runs(path, *NO_REPACK, "--lora", adapter, "--schedule", "plain,batched")
    assert all(run["coverage"]["missing"] == 0 for run in found_runs)


def not_applied(folder, update):
    update.update({key: x * 0 for key, x in update.items() if key.endswith("lora_B.weight")})


def scaled(folder, update):
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | {"lora_alpha": 4.0}))


def not_reordered(folder, update):
    for key, x in update.items():
        if "lora_B" in key and ("q_proj" in key or "k_proj" in key):
            update[key] = rows_of_hf(x, 6 if "q_proj" in key else 2).contiguous()


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        (not_applied, "the adapter is not applied"),
        (scaled, "the adapter's scale is 0.5 times what it should be"),
        (not_reordered, "the rows of the adapter's B are in another order"),
    ],
)
@pytest.mark.parametrize("type_name", ["F32", "Q8_0"])
def test_a_fault_of_the_engines_adapter_is_named(runs, fault, cause, type_name, checkpoints, tmp_path):
    base = checkpoints / "llama-tiny"
    sound, wrong = (write_adapter(tmp_path / name, seed=1, base=base) for name in ("sound", "wrong"))
    tensors = load_file(wrong / "adapter_model.safetensors")
    fault(wrong, tensors)
    save_file(tensors, wrong / "adapter_model.safetensors")
    path = write_gguf(base, tmp_path / "model.gguf", type_name)
    file = write_adapter_file(wrong, open_gguf(path).metadata, tmp_path / "adapter.gguf")
    options = ["--lora", sound, "--engine-option", f"lora_gguf={file}", "--schedule", "plain", *LONGER]
    first = runs(path, *NO_REPACK, *options, passes=False)[0]["first_divergence"]
    assert first["tap"] == "model.layers.0.self_attn.q_proj"
    assert first["explanation"]["cause"] == cause


def test_an_adapter_of_another_model_is_refused(check, checkpoints, tmp_path):
    adapter = write_adapter(tmp_path / "adapter", seed=1, base=checkpoints / "qwen2-tiny")
    path = write_gguf(checkpoints / "qwen2-tiny", tmp_path / "model.gguf")
    file = write_adapter_file(adapter, open_gguf(path).metadata, tmp_path / "adapter.gguf")
    ran = check("llama-tiny", "--engine-option", f"lora_gguf={file}", "--schedule", "plain")
    assert ran.status == 2
    assert "llama.cpp does not load the adapter" in ran.err


def test_quant_splits_what_format_and_arithmetic_cost(harness, own_cache):
    sizes = ["--tokens", "24", "--sequences", "2", *NO_REPACK]
    out = own_cache / "out"
    ran = harness("quant", "--types", "F32,Q8_0,Q4_0", *sizes, "--out", out, "--format", "json")
    assert ran.status == 0, ran.err
    rows = {row["name"]: row for row in ran.json["types"]}
    assert set(rows["Q8_0"]) == {
        "name", "size_bytes", "bits_per_weight", "tensor_types", "note", "perplexity", "kl_mean", "kl_median", "kl_p99",
        "kl_max", "same_top", "kl_mean_format", "kl_mean_arithmetic", "parts", "phases",
    }  # fmt: skip
    assert rows["F32"]["kl_mean_format"] == 0
    assert rows["F32"]["kl_mean_format"] < rows["Q8_0"]["kl_mean_format"] < rows["Q4_0"]["kl_mean_format"]
    assert all(row["kl_mean_arithmetic"] > 0 for row in rows.values())
    assert rows["Q4_0"]["size_bytes"] < rows["Q8_0"]["size_bytes"] < rows["F32"]["size_bytes"]
    assert "Q4_0" in (out / "quant.html").read_text()
    assert "| Q4_0 " in (out / "quant.md").read_text()


def test_quant_makes_k_quants_of_a_model_that_is_filled_up(harness, own_cache):
    sizes = ["--tokens", "12", "--sequences", "1", *NO_REPACK]
    ran = harness("quant", "--pad", "--types", "Q6_K,Q4_K_M", *sizes, "--format", "json")
    assert ran.status == 0, ran.err
    fine, coarse = ran.json["types"]
    assert 6.5 < fine["bits_per_weight"] < 7
    assert fine["kl_mean_format"] < coarse["kl_mean_format"]
    assert (fine["note"], coarse["note"]) == ("", "")
    assert fine["tensor_types"]["Q6_K"] > 0.9


def test_quant_says_where_rows_do_not_fit_the_type(harness, own_cache):
    ran = harness("quant", "--types", "Q4_K_M", "--tokens", "12", "--sequences", "1", *NO_REPACK, "--format", "json")
    (row,) = ran.json["types"]
    assert "Q4_K" not in row["tensor_types"]
    assert row["note"] == "22 of 22 matrices are not Q4_K: their rows are no multiple of 256 weights"


@pytest.mark.slow
def test_quant_makes_types_that_need_an_importance_matrix(harness, own_cache):
    types = ["IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ2_M", "IQ3_XXS", "IQ3_XS", "IQ3_S", "IQ3_M", "Q2_K_S"]
    names = [*types, "TQ1_0", "TQ2_0"]
    sizes = ["--tokens", "12", "--sequences", "1", *NO_REPACK]
    ran = harness("quant", "--pad", "--types", ",".join(names), *sizes, "--format", "json")
    assert ran.status == 0, ran.err
    rows = {row["name"]: row for row in ran.json["types"]}
    assert list(rows) == names
    assert rows["IQ1_S"]["bits_per_weight"] < rows["IQ2_XS"]["bits_per_weight"] < rows["IQ3_M"]["bits_per_weight"]
    assert rows["IQ1_S"]["kl_mean_format"] > rows["IQ3_M"]["kl_mean_format"] > 0


def test_quant_refuses_a_checkpoint_that_is_nowhere(harness):
    ran = harness("quant", "--model", "nobody/nothing", "--local-files-only")
    assert ran.status == 2
    assert "H001" in ran.err


def test_a_profile_of_llamacpp_says_what_it_can_and_what_it_cannot(harness, tmp_path):
    requests = tmp_path / "requests.jsonl"
    requests.write_text('{"prompt_tokens": 9, "max_tokens": 3}\n{"prompt_tokens": 20, "max_tokens": 6}\n')
    options = ["--requests", requests, "--runs", 1, "--wait", 0, "--warmup", 0, "--engine-option", "cache_type=Q8_0"]
    ran = harness("profile", "--engine", "llamacpp", *options, "--out", tmp_path / "own", "--format", "json")
    assert ran.status == 0, ran.err
    _, decode, mixed = ran.json["phases"]
    assert [len(step["query_lens"]) for step in decode["steps"]] == [2, 2, 1, 1, 1]
    assert mixed["steps"][0]["query_lens"] == [1, 1, 9]
    for phase in ran.json["phases"]:
        assert phase["kv_bytes_measured"] == phase["kv_bytes_formula"] > 0
        assert phase["snapshot"] is phase["peak_bytes"] is phase["num_allocations"] is None
        assert {"model.layers.0-2", "lm_head"} <= {row["name"] for row in phase["layers"]}
        assert {"self_attn.q_proj", "attention", "mlp.act"} <= {row["name"] for row in phase["operations"]}
        assert (tmp_path / "own" / phase["trace"]).is_file()
    notes = " ".join(ran.json["notes"])
    assert "there is no memory snapshot" in notes
    assert "llama.cpp's own counters" in notes
    gate = [tmp_path / "own", tmp_path / "baseline.json"]
    assert harness("gate", *gate, "--accept").status == 0
    again = harness("gate", *gate)
    assert again.status == 0
    assert "not measured, of this engine: num_allocations, num_kept, bytes_allocated, peak_bytes" in again.out


def test_the_counts_of_products_are_those_of_the_formulas_but_for_rows_that_llamacpp_drops(checkpoints):
    session = open_session(open_llamacpp(checkpoints / "qwen2-tiny"), max_num_tokens=64, max_num_seqs=2)
    load = ProfileRequests(prompts=(tuple(range(10, 34)),), max_new_tokens=(4,))
    decode = window("decode", load, dry_run(session, load), CaptureSchedule())
    seen = count(session, decode)
    formulas = operation_costs(session.model, decode.shapes)
    flops = Counter()
    for item in seen.counts:
        flops[item.operation] += item.flops
    assert {name: flops[name] for name in formulas if name != "attention"} == {
        name: cost.flops for name, cost in formulas.items() if name != "attention"
    }
    assert flops["attention"] == formulas["attention"].flops * 256 * len(decode.steps) / sum(
        step.shape.context_lens[0] for step in decode.steps
    )


def test_requests_wait_for_a_sequence_and_end_with_their_last_token(checkpoints):
    prompts = [(tuple(range(10, 10 + length)), num_new) for length, num_new in ((9, 4), (3, 1), (20, 6), (5, 2))]
    expected = [greedy(open_engine("reference", checkpoints / "llama-tiny", dtype="float32", device="cpu", options={}),
                       [prompt]) for prompt in prompts]  # fmt: skip
    seen = greedy(open_llamacpp(checkpoints / "llama-tiny", cache_type="F32"), prompts)
    assert seen == [tokens for (tokens,) in expected]


def open_llamacpp(folder, **options):
    return open_engine("llamacpp", folder, dtype="float32", device="cpu", options=options)


def greedy(engine, prompts):
    """Return the tokens of each prompt; two of them run at once, and every step has a token."""
    session = open_token_session(engine, max_num_tokens=64, max_num_seqs=2)
    requests = {session.add(*prompt): [] for prompt in prompts}
    while len(requests) and sum(map(len, requests.values())) < sum(num_new for _, num_new in prompts):
        for request, token in session.step().items():
            requests[request].append(token)
    session.stop()
    return list(requests.values())
