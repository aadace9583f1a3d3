"""`harness.check` on names, engines, HF's models and anybody's: sound ones pass, bugs are found where they are."""

import json
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import AttentionInterface, AutoModelForCausalLM

import harness
from harness.engines import open_engine
from harness.results.check import Outcome, Verdict

from ..lora_adapter import write_adapter
from ..own_model import NAMES, CachedModel, OwnModel, load

PROMPTS = ["hu rin pun | hu", [1, 5, 6, 7, 8, 9, 10, 11, 12]]
SOUND = {Verdict.EXACT, Verdict.NOISE, Verdict.CONVENTION}


def check(engine, **arguments):
    return harness.check(engine, **{"model": "qwen3-tiny", "prompts": PROMPTS, "max_new_tokens": 3} | arguments)


@pytest.fixture
def folder(checkpoints):
    return checkpoints / "qwen3-tiny"


@pytest.fixture
def hf_model(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def assert_wrong_at(report, tap):
    """The first divergence is there, and everything before it is sound."""
    assert report.outcome is Outcome.MISMATCH
    assert report.first_divergence.tap == tap
    taps = list(report.runs[0].taps)
    before = taps[: next(at for at, item in enumerate(taps) if item.name == tap)]
    assert {item.verdict for item in before} <= SOUND


@pytest.mark.parametrize("engine", ["reference", "hf"])
def test_an_installed_engine_by_its_name(engine):
    report = check(engine)
    report.assert_ok()
    assert [run.schedule for run in report.runs] == ["plain", "chunked", "batched"]


@pytest.mark.slow
def test_nothing_but_an_engine_means_the_embedded_default():
    report = harness.check("hf", schedules="plain")
    assert (report.engine, report.num_requests, report.is_ok) == ("hf", 4, True)


def test_options_of_an_engine_have_pythons_types():
    report = check("reference", engine_options={"block_size": 4, "debug_checks": True}, schedules=["plain"])
    assert report.is_ok


def test_rows_are_judged_in_a_sample():
    whole, sampled = (check("reference", schedules=["plain"], rows=rows, rows_seed=3) for rows in (None, 2))
    sampled.assert_ok()
    assert whole.runs[0].coverage.rows_left_out == 0 < sampled.runs[0].coverage.rows_left_out
    assert "--rows 2" in sampled.text()
    with pytest.raises(harness.HarnessError, match="rows must be positive"):
        check("reference", schedules=["plain"], rows=0)


def test_an_engine_object_without_an_entry_point(folder):
    inner = open_engine("reference", folder, dtype="float32", device="cpu")
    engine = SimpleNamespace(name="mine", capabilities=inner.capabilities, run=inner.run)
    report = check(engine, schedules=["batched"])
    report.assert_ok()
    assert report.engine == "mine"


def test_a_bug_of_an_engine_object_is_found(folder):
    inner = open_engine("reference", folder, dtype="float32", device="cpu")

    class Doubling:
        """Between the engine and its recording."""

        def __init__(self, writer):
            self.writer = writer

        def __getattr__(self, name):
            return getattr(self.writer, name)

        def tap(self, name, tensor):
            self.writer.tap(name, 2 * tensor if name == "model.layers.1.mlp.act" else tensor)

    engine = SimpleNamespace(
        name="mine", capabilities=inner.capabilities, run=lambda workload, writer: inner.run(workload, Doubling(writer))
    )
    assert_wrong_at(check(engine, schedules=["plain"]), "model.layers.1.mlp.act")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_of_hfs_is_checked_against_its_own_weights(folder, dtype):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(1.5)  # no checkpoint has these
    report = harness.check(model, prompts=PROMPTS, max_new_tokens=3)
    report.assert_ok()
    assert report.dtype == str(dtype).removeprefix("torch.")
    assert report.model.endswith("qwen3-tiny")


def test_a_model_object_says_what_is_right(folder, hf_model):
    module = load(folder)
    with torch.no_grad():
        hf_model.model.norm.weight.mul_(2)
        module.ln.weight.mul_(2)
    check(module, model=hf_model, names=NAMES).assert_ok()
    check("reference", model=hf_model, schedules=["plain"]).assert_ok()


def test_an_adapter_is_part_of_the_truth(folder, hf_model, tmp_path):
    adapter = write_adapter(tmp_path / "adapter", seed=3, base=folder)
    check("hf", lora=adapter, schedules=["plain"]).assert_ok()
    report = check(hf_model, model=folder, lora=str(adapter), schedules=["plain"])
    assert_wrong_at(report, "model.layers.0.self_attn.q_proj")
    assert "adapter is not applied" in report.first_divergence.explanation.cause
    base, adapted = (harness.golden(folder, prompts=PROMPTS, max_new_tokens=3, lora=item) for item in (None, adapter))
    assert base.recording.path != adapted.recording.path


def test_the_model_that_was_given_is_as_it_was(hf_model):
    config = json.loads(hf_model.config.to_json_string())
    internals = dict(vars(hf_model.config))
    check(hf_model, model=None).assert_ok()
    assert json.loads(hf_model.config.to_json_string()) == config
    assert dict(vars(hf_model.config)) == internals
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in hf_model.modules())


def wrong_eps(model):
    model.model.layers[1].post_attention_layernorm.variance_epsilon = 1e-3
    return "model.layers.1.post_attention_layernorm"


def wrong_scale(model):
    model.model.layers[2].self_attn.scaling *= 1.02
    return "model.layers.2.attention"


def rope_off_by_one(model):
    tables = model.model.rotary_emb.forward
    model.model.rotary_emb.forward = lambda x, position_ids: tables(x, position_ids + 1)
    return "model.layers.0.q_rope"


def swapped_weights(model):
    mlp = model.model.layers[0].mlp
    mlp.gate_proj, mlp.up_proj = mlp.up_proj, mlp.gate_proj
    return "model.layers.0.mlp.gate_proj"


@pytest.mark.slow
@pytest.mark.parametrize("bug", [wrong_eps, wrong_scale, rope_off_by_one, swapped_weights])
def test_a_bug_in_a_model_of_hfs_is_found_where_it_is(hf_model, bug):
    tap = bug(hf_model)
    assert_wrong_at(check(hf_model), tap)


def test_an_attention_kernel_that_is_registered_is_the_one_that_is_checked(hf_model):
    def kernel(module, query, key, value, mask, **options):
        context, weights = AttentionInterface()["sdpa"](module, query, key, value, mask, **options)
        context[:, -1, -1] *= 1.01  # the last head of the last query
        return context, weights

    AttentionInterface.register("my_kernel", kernel)
    try:
        hf_model.set_attn_implementation("my_kernel")
        assert_wrong_at(check(hf_model, schedules=["plain"]), "model.layers.0.attention")
    finally:
        AttentionInterface._global_mapping.pop("my_kernel")


@pytest.mark.parametrize("kind", [OwnModel, CachedModel])
def test_a_module_with_names_of_its_own(folder, kind):
    report = check(load(folder, kind), names=NAMES)
    report.assert_ok()
    assert report.runs[0].coverage.not_offered == ("k_cache", "v_cache")
    assert [run.schedule for run in report.runs] == (["plain", "chunked"] if kind is CachedModel else ["plain"])


def own_eps(model):
    model.blocks[2].ln1.eps = 1e-3
    return "model.layers.2.input_layernorm"


def own_scale(model):
    model.blocks[0].attn.scale *= 1.02
    return "model.layers.0.attention"


def own_rope(model):
    model.blocks[1].attn.rope.offset = 1
    return "model.layers.1.q_rope"


@pytest.mark.sampled(3)
@pytest.mark.parametrize("bug", [own_eps, own_scale, own_rope])
@pytest.mark.parametrize("kind", [OwnModel, CachedModel])
def test_a_bug_in_a_module_of_the_user_is_found_where_it_is(folder, kind, bug):
    model = load(folder, kind)
    tap = bug(model)
    assert_wrong_at(check(model, names=NAMES, schedules=["plain"]), tap)


def test_a_bug_in_a_cache_shows_in_decode_alone(folder):
    class Stale(CachedModel):
        """Forgets the newest key and value of a history."""

        def forward(self, tokens, cache=None):
            if cache is not None:
                cache = [(torch.cat((k[:, :-1], k[:, :1]), dim=1), v) for k, v in cache]
            return super().forward(tokens, cache)

    report = check(load(folder, Stale), names=NAMES, schedules=["plain"])
    assert_wrong_at(report, "model.layers.0.attention")
    assert report.first_divergence.phase == "decode"


def test_a_module_under_hfs_names_needs_no_mapping(folder, hf_model):
    class Logits(nn.Module):
        def __init__(self, model):
            super().__init__()
            self.model, self.lm_head = model.model, model.lm_head

        def forward(self, input_ids):
            return self.lm_head(self.model(input_ids=input_ids, use_cache=False).last_hidden_state)

    report = check(Logits(hf_model))
    report.assert_ok()
    assert "q_rope" in report.runs[0].coverage.not_offered
    hf_model.model.layers[1].mlp.act_fn = nn.GELU()
    assert_wrong_at(check(Logits(hf_model)), "model.layers.1.mlp.act")


def test_a_schedule_that_is_asked_for_is_followed_or_refused(folder):
    with pytest.raises(harness.HarnessError) as caught:
        check(load(folder), names=NAMES, schedules=["batched"])
    assert caught.value.code is harness.Code.ENGINE_CANNOT_SERVE
    assert 'try:      schedules=["plain"]' in str(caught.value)


def test_what_is_kept_is_a_page_and_recordings(folder, tmp_path):
    report = check(load(folder), names=NAMES, out=tmp_path / "kept")
    assert {path.name for path in (tmp_path / "kept").iterdir()} == {"report.html", "plain"}
    assert (tmp_path / "kept" / "report.html").read_text() == report.html()


def test_progress_is_reported(folder):
    said = []
    check(load(folder), names=NAMES, progress=lambda label, done, total: said.append((label, done, total)))
    assert ("OwnModel, plain", 0, 1) in said
    assert said[-1] == ("done", 1, 1)
