"""The catalogue: complete, and each fault is put in, reached, and taken out again."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

import reference_engine.attention.paged
import reference_engine.checkpoint.model_config
import reference_engine.engine
import reference_engine.model
import reference_engine.model_runner
import reference_engine.sampler
from harness.errors import Code, HarnessError
from harness.extensions.faults import worker
from harness.extensions.faults.catalogue import FAULTS as KNOWN
from harness.extensions.faults.catalogue import VARIANTS, choose, entry_of
from harness.extensions.faults.fault import Category, EngineKind, Fault, FaultConfig
from harness.extensions.faults.reference.injection import replacing
from harness.extensions.faults.reference.variants import variants
from harness.extensions.faults.score import grade
from harness.extensions.faults.subject import opened
from harness.extensions.faults.tools import open_tool
from harness.formats.checkpoint import embedded_cases
from reference_engine import LLMEngine
from reference_engine.block_manager import BlockManager
from reference_engine.block_pool import BlockPool
from reference_engine.families.experts import Expert, Experts
from reference_engine.families.latent_attention import LatentAttention
from reference_engine.kv_cache import KVCache
from reference_engine.layers import MLP, Embedding, Linear, RMSNorm
from reference_engine.model import Attention, Decoder, DecoderLayer
from reference_engine.model_runner import ModelRunner
from reference_engine.prefix_cache import Prefix, PrefixCache
from reference_engine.rotary import RotaryEmbedding
from tests.fault_trial import try_entry

FAULTS = {fault.id: fault for fault in choose(kinds=[EngineKind.REFERENCE])}
OWNERS = (
    reference_engine.attention.paged, reference_engine.attention.paged.PagedAttention,
    reference_engine.checkpoint.model_config, reference_engine.engine, reference_engine.model,
    reference_engine.families.build, reference_engine.loader, reference_engine.model_runner, reference_engine.sampler,
    reference_engine.speculation, Attention, BlockManager, BlockPool,
    Decoder, DecoderLayer, Embedding, Experts, KVCache, LLMEngine, LatentAttention, Linear, MLP, ModelRunner, Prefix,
    PrefixCache, RMSNorm, RotaryEmbedding, Expert,
)  # fmt: skip
ONE_OF_EACH = (
    "position-decode-plus-one", "norm-eps-too-large", "qkv-k-and-v-swapped", "window-one-more", "hash-without-parent",
    "copy-on-write-forgotten", "preempted-keeps-its-table", "second-best-token", "logits-bf16", "hit-of-everything",
    "norm-overflow-fp16", "one-weight-flipped", "tied-head-not-loaded", "inputs-q8-undeclared",
    "inputs-bf16-of-fp32-weights", "rope-frequencies-off-by-1e-6", "cache-bf16-declared-fp16",
    "router-lowest", "router-one-expert", "router-not-normalised", "experts-swapped", "experts-rank-missing",
    "experts-weighted-input", "expert-stale", "stream-scaled", "values-of-the-next-head-in-bfloat16",
    "soft-cap-added", "slow-pairs-not-turned", "head-negated", "logits-capped", "latent-not-normed",
)  # fmt: skip


def everything():
    return {(owner.__name__, name): value for owner in OWNERS for name, value in vars(owner).items()}


def test_a_replacement_is_called_as_the_original_is():
    """Planting asks for it; else a fault would raise instead of being wrong, once the engine's own code has changed."""

    class Owner:
        def method(self, first, second=None, *, named):
            return first, second, named

    for made in (
        lambda original, self, first, second=None, *, named: 0,
        lambda *args, **named: 0,
        lambda original, self, x, *, named: 0,
    ):
        with replacing((Owner, "method", made))():
            pass
    for made in (
        lambda original, self, *, named: 0,
        lambda original, self, first: 0,
        lambda original, self, first, second, *, named: 0,
    ):
        with pytest.raises(TypeError, match="what replaces method cannot be called as that is"):
            replacing((Owner, "method", made))().__enter__()
    assert Owner().method(1, named=2) == (1, None, 2), "and nothing was replaced"


def test_every_fault_and_variant_can_be_planted():
    for fault in (*FAULTS.values(), *variants()):
        if fault.inject is not None:
            with fault.inject():
                pass


def test_there_are_faults_of_every_kind():
    assert len(KNOWN) >= 400
    assert len(VARIANTS) >= 250
    assert {fault.category for fault in KNOWN.values()} == set(Category)
    for entries in (KNOWN, VARIANTS):
        assert {entry.engine for entry in entries.values()} == set(EngineKind)
    assert len({fault.setting.model for fault in KNOWN.values() if fault.engine is EngineKind.MODULE}) >= 45
    assert not KNOWN.keys() & VARIANTS.keys()
    assert entry_of("wrong-block").id == "wrong-block"


def test_the_pages_say_how_many_there_are():
    root = Path(__file__).parents[3]
    page = (root / "docs/faults.md").read_text()
    counted = [fault for fault in KNOWN.values() if not fault.equivalent]
    for kind in EngineKind:
        faults, sound = (sum(entry.engine is kind for entry in entries) for entries in (counted, VARIANTS.values()))
        assert f"| {kind} | {faults} | {sound} |" in page
    assert f"{len(counted)} faults and {len(VARIANTS)} sound variants" in page
    assert re.search(rf"{len(counted)} engines.*\s.*{len(VARIANTS)} sound", (root / "README.md").read_text())


def test_the_reference_engine_has_every_checkpoint_also_behind_a_server():
    for entry in (*KNOWN.values(), *VARIANTS.values()):
        if entry.engine in (EngineKind.REFERENCE, EngineKind.SERVER):
            assert (embedded_cases() / "checkpoints" / entry.setting.model).is_dir(), entry.id


@pytest.mark.parametrize("name", FAULTS)
def test_what_is_put_in_is_taken_out(name):
    before = everything()
    with FAULTS[name].inject():
        assert everything() != before
    assert everything() == before


@pytest.mark.parametrize("name", KNOWN)
def test_the_truth_is_complete(name):
    fault = KNOWN[name]
    assert fault.summary.endswith(".")
    assert re.compile(fault.cause)
    assert fault.cause
    assert (fault.tap is None) == (fault.row is None)


@pytest.mark.slow
@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_a_fault_is_found_where_it_is_and_named(name):
    score = grade(FAULTS[name], try_entry(FAULTS[name]).answer)
    assert (score.detected, score.row, score.named) == (True, True, True), score


def test_a_fault_that_is_never_reached_is_no_score():
    unreached = Fault(
        id="unreached", category=Category.CACHE, summary="Never runs.", tap="lm_head", row=(0, 0), cause="x",
        inject=replacing((BlockPool, "reset_prefix_cache", lambda original, self: original(self))),
        setting=FaultConfig(),
    )  # fmt: skip
    with opened(unreached) as (subject, planted):
        asked = worker.asked(open_tool("harness"), subject, unreached, planted)
    assert (asked["answers"], asked["problem"]) == ({}, worker.UNREACHED)


def test_a_fault_that_nothing_shows_is_not_detected():
    harmless = Fault(
        id="harmless", category=Category.NORM, summary="Changes nothing.", tap="model.norm", row=(0, 0), cause="norm",
        inject=replacing((RMSNorm, "__call__", lambda original, self, x: original(self, x))),
    )  # fmt: skip
    score = grade(harmless, try_entry(harmless).answer)
    assert (score.detected, score.row, score.named) == (False, False, False)


def test_planted_code_that_fails_is_no_detection():
    def fails(original, *_arguments):
        raise TypeError("the fault's own mistake")

    broken = Fault(
        id="broken", category=Category.NORM, summary="Raises.", tap="model.norm", row=(0, 0), cause="mistake",
        inject=replacing((RMSNorm, "__call__", fails)),
    )  # fmt: skip
    score = grade(broken, try_entry(broken).answer)
    assert (score.detected, score.row, score.named) == (False, False, False)
    assert "the fault's own mistake" in score.answer.error


def test_the_wrong_place_and_the_wrong_cause_do_not_count():
    fault = FAULTS["norm-weight-skipped"]
    answer = try_entry(fault).answer
    elsewhere = Fault(**{name: getattr(fault, name) for name in fault.__slots__} | {"row": (1, 0), "cause": "theta"})
    score = grade(elsewhere, answer)
    assert (score.detected, score.row, score.named) == (True, False, False)
    assert score.named_wrongly


def test_what_asserts_no_cause_is_not_named_wrongly():
    fault = FAULTS["norm-weight-skipped"]
    trial = try_entry(fault)
    (run,) = trial.result.runs
    seen = replace(run.first_divergence, explanation=replace(run.first_divergence.explanation, is_cause=False))
    unsure = replace(trial, result=replace(trial.result, runs=(replace(run, first_divergence=seen),)))
    score = grade(fault, unsure.answer)
    assert (score.detected, score.named, score.named_wrongly) == (True, False, False)


def test_which_rows_are_wrong_is_no_cause():
    """A pattern that matches the scope alone, `request 1` for one, does not count as a name."""
    fault = FAULTS["norm-weight-skipped"]
    trial = try_entry(fault)
    scope = trial.result.runs[0].first_divergence.explanation.scope
    score = grade(replace(fault, cause=f"^{scope}|; {scope}"), trial.answer)
    assert (score.named, score.named_wrongly) == (False, True)


BENIGN = ("blocks-permuted", "norm-weight-before-cast", "projections-unfused", "split-kv", "short-prompts", "preempted")


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "name", ["inputs-q8", "cache-float16-products", "cache-float16-flash", "cache-q8", "rotary-one-from-another"]
)
def test_an_engine_of_another_convention_does_not_alarm(name):
    (variant,) = [item for item in variants() if item.id == f"{name}/qwen3-tiny/float32"]
    trial = try_entry(variant)
    assert not trial.is_alarm, trial.result and trial.result.runs[0].findings
    assert any(tap.convention for tap in trial.result.runs[0].taps)


@pytest.mark.slow
@pytest.mark.parametrize("name", BENIGN)
def test_a_benign_variant_does_not_alarm(name):
    (variant,) = [item for item in variants() if item.id == f"{name}/qwen2-tiny/bfloat16"]
    trial = try_entry(variant)
    assert not trial.is_alarm, trial.result and trial.result.runs[0].findings


def test_variants_are_of_every_model_and_dtype():
    names = [variant.id for variant in variants()]
    assert len(names) == len(set(names)) >= 9 * 18


@pytest.mark.parametrize(("ids", "categories"), [(["nope"], None), (None, ["nope"])])
def test_what_is_not_there_is_refused(ids, categories):
    with pytest.raises(HarnessError) as caught:
        choose(ids, categories)
    assert caught.value.code is Code.BAD_OPTION


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_every_fault_is_detected(name):
    score = grade(FAULTS[name], try_entry(FAULTS[name]).answer)
    assert score.detected
    assert not score.named_wrongly
    assert score.row
