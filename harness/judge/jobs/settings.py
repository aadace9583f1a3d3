"""Compare the settings that an engine shows with those of HF's loaded model, before anything runs."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from harness.engines import Engine, shown_settings
from harness.engines.module_settings import settings_of_modules
from harness.engines.record import IsolatedEngine
from harness.errors import Code
from harness.formats.taps import Kind
from harness.judge.jobs.opened import open_planned, planned_model
from harness.oracle.model import HFModel
from harness.oracle.untraced import frequencies_follow_length
from harness.plan import Plan
from harness.results.check import Finding, Outcome, RunResult
from harness.results.settings import ModelSettings, SettingsResult, distinct, setting_pairs

_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_NUM_CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk")


def run_settings(plan: Plan) -> SettingsResult:
    """Open the plan's engine and HF's model, and return the settings of both; nothing is run.

    Raises:
        HarnessError: one of them cannot be opened.
    """
    with open_planned(plan) as engine:
        return compare_settings(plan, engine, planned_model(plan))


def compare_settings(plan: Plan, engine: Engine | IsolatedEngine, hf: HFModel) -> SettingsResult:
    """Return the settings of an engine that is open, and HF's."""
    pairs = setting_pairs(shown_settings(plan.case.engine, engine), hf_settings(hf))
    return SettingsResult(engine=plan.case.engine, model=plan.case.model, pairs=pairs)


def with_settings(run: RunResult, settings: SettingsResult) -> RunResult:
    """Return a run with a finding for each setting that differs before its own findings: it is then a mismatch."""
    findings = [Finding(code=Code.SETTING_DIFFERS, message=str(pair)) for pair in settings.differing]
    return replace(run, outcome=Outcome.MISMATCH, findings=(*findings, *run.findings)) if findings else run


def hf_settings(hf: HFModel) -> ModelSettings:
    """Return the settings of HF's model: from its config with HF's defaults, its modules, and its traced attention.

    A field is left out where HF's config does not state it in a known way.
    """
    config, modules = hf.config, settings_of_modules(dict(hf.model.named_modules()))
    settings = ModelSettings(
        num_layers=_first(config, "num_hidden_layers"),
        hidden_size=_first(config, "hidden_size"),
        num_heads=_first(config, "num_attention_heads"),
        num_kv_heads=_first(config, "num_key_value_heads"),
        head_dim=() if _first(config, "kv_lora_rank") else modules.head_dim,  # latent heads have several sizes
        norm_eps=modules.norm_eps,
        softmax_scale=modules.softmax_scale,
        attention_cap=_cap(config, "attn_logit_softcapping"),
        logit_cap=_cap(config, "final_logit_softcapping"),
        tied_head=_first(hf.model.config, "tie_word_embeddings", kind=bool),
        num_experts=_first(config, *_NUM_EXPERTS),
        num_chosen_experts=_first(config, *_NUM_CHOSEN),
    )
    return replace(settings, **_windows(hf), **_rope(config, modules))


def _first(config: Any, *names: str, kind: type = int) -> tuple[Any, ...]:
    values = (getattr(config, name, None) for name in names)
    return next(((value,) for value in values if type(value) is kind), ())


def _cap(config: Any, name: str) -> tuple[float | None, ...]:
    """Return a soft cap; nothing for a family whose config has no such field."""
    return (getattr(config, name) or None,) if hasattr(config, name) else ()


def _windows(hf: HFModel) -> dict[str, tuple[Any, ...]]:
    """Return the windows of the layers whose attention HF's own run shows."""
    attentions = [op for op in hf.graph if op.kind is Kind.ATTENTION and op.layer is not None]
    if len({op.layer for op in attentions}) < len(attentions):
        return {}  # layers that run more than once
    windows = {op.layer: op.window for op in attentions if op.window is not None}
    return {"sliding_window": distinct(windows.values()), "sliding_layers": (tuple(windows),) if attentions else ()}


def _rope(config: Any, modules: ModelSettings) -> dict[str, tuple[Any, ...]]:
    """Return theta and frequencies of a rotary embedding with fixed frequencies; nothing for another."""
    if frequencies_follow_length(config):
        return {}
    parameters = getattr(config, "rope_parameters", None) or {}
    parts: Sequence[Any] = [item for item in parameters.values() if isinstance(item, Mapping)] or [parameters]
    thetas = [float(part["rope_theta"]) for part in parts if part.get("rope_theta")]
    return {
        "rope_theta": distinct([*thetas, *modules.rope_theta]),
        "rope_frequencies": modules.rope_frequencies,
    }
