"""A wrong part is split into its operations: what is wrong in a trainer or an engine is named by its tap.

Figures stand in reports/cpu/rollouts.md. `ROLLOUT_FAULTS=200` takes that many of the catalogue's faults.
"""

import logging
import os
from pathlib import Path

import pytest
import torch

import harness
from harness.extensions.faults.catalogue import FAULTS
from harness.extensions.faults.fault import EngineKind
from harness.formats.checkpoint import resolve
from harness.oracle.model import load_model

from .training import prompts, rollout

pytestmark = pytest.mark.slow
_log = logging.getLogger(__name__)
NUM_FAULTS = int(os.environ.get("ROLLOUT_FAULTS", "6"))
ANOTHER_SCHEDULE = "what is recorded, less what it computes now"
"""Of a fault that shows in a batch alone: a comparison runs a row by itself."""
SEEN_BY = {
    "k_cache": ("attention", "keys and values in fp8 (e4m3)"),
    "v_cache": ("attention",),
    "c_cache": ("attention",),
    "topk": ("experts: as the engine chose", "experts"),
}
"""What a wrong tap that is no operation of HF's shows in."""
NOT_HERE = ("wrong-block", "wrong-block-in-bfloat16", "last-token-unread-in-float16")
"""They need a second block, or compute NaN, which is refused."""
MODULES = ("embed_tokens", "layers.0.self_attn.q_proj", "layers.1.input_layernorm", "layers.1.mlp.up_proj", "norm")


def eligible():
    """Return the catalogue's faults that show where prompts are prefilled and responses decoded."""
    several = [
        fault
        for fault in FAULTS.values()
        if fault.tap is not None
        and fault.engine is EngineKind.REFERENCE
        and fault.id not in NOT_HERE
        and fault.suite is None
        and fault.setting.schedule == "batched"
        and not (fault.setting.prompts or fault.setting.config or fault.setting.scaled or fault.setting.weights_in)
        and not fault.setting.options
    ]
    step = max(1, len(several) // NUM_FAULTS)
    return several[::step][:NUM_FAULTS]


def named(report, side):
    """Return the operations of a side that are outside of their floor."""
    words = [term.detail for term in report.terms if term.side == side and not term.is_rounding]
    return [word.removeprefix(f"{side}: ") for word in words]


@pytest.mark.parametrize("path", MODULES)
def test_an_operation_of_a_trainer(rows, path):
    trainer = load_model(Path(resolve("llama-tiny")), dtype=torch.bfloat16, stays=True).model
    module = trainer.get_submodule(f"model.{path}")
    module.register_forward_hook(lambda _module, _inputs, output: output * torch.tensor(1.5))
    report = harness.rollout(rows[:4], model="llama-tiny", trainer=trainer, dtype="bfloat16", layout="alone")
    assert named(report, "trainer") == [f"model.{path}"]


def test_routers_that_choose_groups_first():
    rows = rollout("deepseek-v3-tiny", prompts()[:3])
    trainer = load_model(Path(resolve("deepseek-v3-tiny")), dtype=torch.bfloat16, stays=True).model
    report = harness.rollout(rows, model="deepseek-v3-tiny", engine="reference", trainer=trainer, dtype="bfloat16")
    assert [term.detail for term in report.terms if not term.is_rounding] == []
    assert "routing" in [term.kind for term in report.terms]


@pytest.mark.parametrize("fault", eligible(), ids=lambda fault: fault.id)
def test_an_operation_of_an_engine(fault):
    setting = fault.setting
    with fault.inject():
        rows = rollout(setting.model, prompts()[:4], dtype=setting.dtype)
        report = harness.rollout(rows, model=setting.model, engine="reference", dtype=setting.dtype)
    by_name = named(report, "engine")
    _log.info("%s: %s, named %s", fault.id, fault.tap, by_name)
    site = fault.tap.rpartition(".")[2]
    expected = {site, *SEEN_BY.get(site, ())}
    assert by_name in ([], [ANOTHER_SCHEDULE]) or expected & {name.rpartition(".")[2] for name in by_name}
