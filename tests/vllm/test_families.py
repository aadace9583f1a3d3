"""Families with other values than a Llama's: they pass, gaps are said, and bugs in them are found.

`python -m tests.benchmarks.vllm_families` runs every family that vLLM serves.
"""

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

from vllm.model_executor.models.granite import GraniteAttention, GraniteDecoderLayer
from vllm.model_executor.models.opt import OPTAttention
from vllm.model_executor.models.qwen2_moe import Qwen2MoeMLP

from harness.errors import Code, HarnessError
from harness.results.check import Outcome
from tests.benchmarks.vllm_families import write_checkpoint

from .test_check import check

pytestmark = pytest.mark.slow

NOT_SHOWN = {
    "granite": set(),
    "opt": {"self_attn.query"},
    "qwen2_moe": set(),
    "exaone_moe": {"mlp.gate.topk", "mlp.gate.topk@2", "mlp.gate.topk@3"},
    "mamba2": {"conv_state", "recurrent_state"},
    "gpt2": set(),
}
"""What no tensor of vLLM's holds."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = {}

    def folder_of(family):
        if family not in made:
            made[family] = tmp_path_factory.mktemp(family)
            write_checkpoint(family, made[family])
        return made[family]

    return folder_of


@pytest.mark.parametrize("family", NOT_SHOWN)
def test_a_family_passes_and_its_gaps_are_said(folder, family):
    (run,) = check(folder(family), schedules=["batched"], max_new_tokens=3).runs
    assert (run.outcome, run.findings, run.coverage.missing) == (Outcome.PASS, (), 0)
    assert set(run.coverage.not_offered) == NOT_SHOWN[family]


def changed(monkeypatch, owner, **attributes):
    """Let a class's objects be made with other attributes."""
    before = owner.__init__

    def build(self, *args, **named):
        before(self, *args, **named)
        for path, value in attributes.items():
            part, _, name = path.rpartition("__")
            target = self
            for word in filter(None, part.split("__")):
                target = getattr(target, word)
            setattr(target, name, value)

    monkeypatch.setattr(owner, "__init__", build)


BUGS = {
    "granite-scale": ("granite", GraniteAttention, {"attn__impl__scale": 0.33}, "model.layers.0.attention"),
    "granite-residual": (
        "granite", GraniteDecoderLayer, {"residual_multiplier": 1.0}, "model.layers.0.post_attention_layernorm.input",
    ),
    "opt-scale": ("opt", OPTAttention, {"attn__impl__scale": 1.0}, "model.decoder.layers.0.attention"),
    "qwen2-moe-gate": ("qwen2_moe", Qwen2MoeMLP, {"expert_gate": None}, "model.layers.0.mlp"),
}  # fmt: skip


@pytest.mark.parametrize("bug", BUGS)
def test_a_bug_beside_a_gap_is_found(folder, monkeypatch, bug):
    family, owner, attributes, tap = BUGS[bug]
    changed(monkeypatch, owner, **attributes)
    (run,) = check(folder(family), max_new_tokens=3).runs
    assert run.outcome is Outcome.MISMATCH
    assert run.first_divergence.tap == tap


def test_lora_that_is_enabled_and_not_used_changes_nothing(folder):
    (run,) = check(folder("llama"), max_new_tokens=3, engine_options={"enable_lora": "true"}).runs
    assert (run.outcome, run.findings, run.coverage.not_offered) == (Outcome.PASS, (), ())


def test_a_cache_in_float8_is_declared_and_its_numbers_are_cut_off(folder):
    """3.9575 becomes 3.75 on a CPU, and not 4: vLLM 0.32 drops bits."""
    (run,) = check(folder("llama"), max_new_tokens=3, engine_options={"kv_cache_dtype": "fp8"}).runs
    assert run.first_divergence.tap == "model.layers.0.attention"
    assert set(run.coverage.not_offered) == {"k_cache", "v_cache"}


def test_a_format_of_the_cache_that_the_harness_cannot_compute(folder):
    with pytest.raises(HarnessError) as caught:
        check(folder("llama"), engine_options={"kv_cache_dtype": "int8_per_token_head"})
    assert caught.value.code is Code.ENGINE_CANNOT_SERVE


def test_a_model_keeps_its_own_length_and_the_report_says_what_is_set(folder):
    result = check(folder("llama"), max_new_tokens=3)
    (note,) = (note for note in result.notes if note.startswith("vLLM was opened with"))
    assert "max_model_len=-1" in note
    assert "block_size=32" in note
