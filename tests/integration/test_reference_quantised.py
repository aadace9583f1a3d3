"""The reference engine with a cache in float8 and weights in few bits: sound, with mistakes of its own, and refused."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from harness.engines import open_engine
from harness.formats.case import RequestSpec
from harness.formats.checkpoint import resolve
from harness.judge.jobs.check import run_check
from harness.plan import plan_request
from harness.results.check import Outcome
from reference_engine.families.experts import Expert
from reference_engine.families.quantised import Int8Product, in_int8
from reference_engine.kv_cache import KVCache
from tests.quantised_checkpoints import write_quantised

LAYERS = 3
ASKED = (
    "--token-ids",
    "1,5,9,33,77,120,4,8,9,3,200",
    "--max-new-tokens",
    "3",
    "--dtype",
    "bfloat16",
    "--format",
    "json",
)


@pytest.fixture(scope="module")
def folder(checkpoints, tmp_path_factory):
    """qwen3-tiny in W8A8 with scales of K and V, as a calibration leaves them."""
    folder = tmp_path_factory.mktemp("scaled") / "w8a8"
    write_quantised(checkpoints / "qwen3-tiny", folder, "w8a8")
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for layer in range(LAYERS):
        tensors[f"model.layers.{layer}.self_attn.k_scale"] = torch.tensor(0.011 + 0.004 * layer)
        tensors[f"model.layers.{layer}.self_attn.v_scale"] = torch.tensor(0.021 + 0.006 * layer)
    save_file(tensors, file, metadata={"format": "pt"})
    return folder


def checked(harness, folder, *more):
    ran = harness("check", "--model", folder, "--engine-option", "kv_cache_dtype=float8_e4m3fn", *ASKED, *more)
    assert ran.status in (0, 1), ran.err
    return ran.json


@pytest.mark.parametrize("backend", ["paged", "contiguous"])
def test_it_passes_as_declared(harness, folder, backend):
    result = checked(harness, folder, "--engine-option", f"attention_backend={backend}")
    assert result["verdict"] == "pass"
    kept = {tap["name"]: tap["convention"] for tap in result["runs"][0]["taps"]}["model.layers.1.k_cache"]
    assert kept.startswith("kept in float8_e4m3fn with a scale of 0.015, as declared")


def unscaled(self, layer, part, stored):
    return stored.view(self._stored_dtype).to(self._dtype)


def twice(self, layer, part, stored):
    return (stored.view(self._stored_dtype).float() * self.scales[layer][part] ** 2).to(self._dtype)


def exchanged(self, layer, part, x):
    return (x.float() / self.scales[layer][1 - part]).to(self._stored_dtype).view(torch.uint8)


def of_the_next_layer(self, layer, part, stored):
    scale = self.scales[(layer + 1) % LAYERS][part]
    return (stored.view(self._stored_dtype).float() * scale).to(self._dtype)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("name", "mistake", "said"),
    [
        ("_as_read", unscaled, "not multiplied when they are read"),
        ("_as_read", twice, "multiplied by their scale twice"),
        ("_as_stored", exchanged, "stored with the scale of the values, and read with their own"),
        ("_as_read", of_the_next_layer, "read with the scale of model.layers.1, and stored with their own"),
    ],
)
def test_a_mistake_with_scales_is_found_where_it_is(harness, folder, monkeypatch, name, mistake, said):
    monkeypatch.setattr(KVCache, name, mistake)
    result = checked(harness, folder)
    first = result["runs"][0]["first_divergence"]
    assert (result["verdict"], first["tap"]) == ("mismatch", "model.layers.0.k_cache")
    assert said in first["explanation"]["cause"]


def test_quantised_weights_that_are_not_served(harness, checkpoints, tmp_path):
    write_quantised(checkpoints / "deepseek-v3-tiny", tmp_path / "w8a8", "w8a8")
    ran = harness("check", "--model", tmp_path / "w8a8", "--engine-option", "weights=checkpoint", *ASKED)
    assert (ran.status, "latent attention is not served with quantised weights" in ran.err) == (2, True), ran.err


@pytest.fixture(scope="module")
def experts(checkpoints, tmp_path_factory):
    folder = tmp_path_factory.mktemp("experts") / "w8a8"
    write_quantised(checkpoints / "qwen3-moe-tiny", folder, "w8a8")
    return folder


def of_experts(harness, folder, dtype):
    asked = [dtype if item == "bfloat16" else item for item in ASKED]
    ran = harness("check", "--model", folder, "--engine-option", "weights=checkpoint", *asked)
    assert ran.status in (0, 1), ran.err
    return ran.json


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_experts_with_quantised_inputs_pass(harness, experts, dtype):
    result = of_experts(harness, experts, dtype)
    assert result["verdict"] == "pass"
    taps = {tap["name"]: tap["convention"] for tap in result["runs"][0]["taps"]}
    assert taps["model.layers.1.mlp.experts"] == (
        "inputs quantised to int8, one scale for a token, as the checkpoint says"
    )


def with_a_scale_for_all_tokens(self, x, weight, bias):
    scale = x.float().abs().max() / 127
    integers = (x.float() / scale).round().to(torch.int8)
    return (torch._int_mm(integers, weight.T).float() * scale * self.scale_O1[:, 0]).to(x.dtype)


def with_the_scales_of_the_next_output(self, x, weight, bias):
    integers, scale = in_int8(x)
    return (torch._int_mm(integers, weight.T).float() * scale * self.scale_O1[:, 0].roll(1)).to(x.dtype)


def with_the_scales_twice(self, x, weight, bias):
    integers, scale = in_int8(x)
    return (torch._int_mm(integers, weight.T).float() * scale * self.scale_O1[:, 0] ** 2).to(x.dtype)


def of_the_next_output_in_down(self, x, weight, bias):
    return (with_the_scales_of_the_next_output if len(weight) == 96 else RIGHT_PRODUCT)(self, x, weight, bias)


RIGHT_PRODUCT = Int8Product.__call__


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("dtype", "mistake", "said"),
    [
        # In 16 bits so few rows may have it by their rounding.
        ("float32", with_a_scale_for_all_tokens, "no known way to get it wrong fits"),
        ("float32", with_the_scales_twice, "in the experts, the scales are applied twice"),
        ("bfloat16", with_the_scales_twice, "in the experts, the scales are applied twice"),
        ("float32", of_the_next_output_in_down, "in down_proj of the experts, each block of outputs has the scale of"),
        ("bfloat16", of_the_next_output_in_down, "in down_proj of the experts, each block of outputs has the scale of"),
    ],
)
def test_experts_that_use_other_scales_are_found(harness, experts, monkeypatch, dtype, mistake, said):
    apply, is_expert = Expert.__call__, []

    def in_expert(self, x, activation):
        is_expert.append(True)
        try:
            return apply(self, x, activation)
        finally:
            is_expert.pop()

    monkeypatch.setattr(Expert, "__call__", in_expert)
    monkeypatch.setattr(Int8Product, "__call__", lambda *args: (mistake if is_expert else RIGHT_PRODUCT)(*args))
    result = of_experts(harness, experts, dtype)
    first = result["runs"][0]["first_divergence"]
    assert (result["verdict"], first["tap"]) == ("mismatch", "model.layers.0.mlp.experts")
    assert first["explanation"]["cause"].startswith(said)


@pytest.mark.parametrize("kind", ["w8a8", "fp8-dynamic", "deepseek"])
def test_quantised_weights_pass_by_the_engine_s_own_products(harness, checkpoints, tmp_path, kind):
    write_quantised(checkpoints / "qwen2-tiny", tmp_path / kind, kind)
    ran = harness("check", "--model", tmp_path / kind, "--engine-option", "weights=checkpoint", *ASKED)
    assert ran.json["verdict"] == "pass"
    taps = {tap["name"]: tap["convention"] for tap in ran.json["runs"][0]["taps"]}
    assert (taps["model.layers.1.mlp.down_proj"] is not None) == (kind == "w8a8")


def test_weights_of_another_name_are_refused(harness, folder):
    ran = harness("check", "--model", folder, "--engine-option", "weights=packed", *ASKED)
    assert (ran.status, "dequantised or checkpoint" in ran.err) == (2, True)


class WithoutRotary:
    """Shows neither queries nor keys after rotary, as an engine that computes them within attention."""

    name = "reference"

    def __init__(self, engine):
        self._engine = engine
        self.capabilities = replace(engine.capabilities, unsupported_taps=("q_rope", "k_rope"))

    def run(self, workload, writer):
        tap = writer.tap
        writer.tap = lambda name, *args, **named: None if name.endswith("_rope") else tap(name, *args, **named)
        self._engine.run(workload, writer)


@pytest.mark.parametrize(("kind", "is_judged"), [("w8a8", False), ("fp8-dynamic", True)])
def test_a_cache_that_only_the_golden_tells_is_not_judged_where_inputs_are_quantised(
    checkpoints, tmp_path, monkeypatch, kind, is_judged
):
    """The golden's inputs are not: its keys are others, and the verdict says what was left out."""
    monkeypatch.setenv("HARNESS_CACHE", str(tmp_path / "cache"))
    write_quantised(checkpoints / "qwen3-tiny", tmp_path / kind, kind)
    folder = resolve(str(tmp_path / kind))
    engine = open_engine(
        "reference", folder, dtype="float32", device="cpu", options={"weights": "checkpoint", "kv_cache_dtype": "auto"}
    )
    plan = plan_request(
        model=str(tmp_path / kind), subject=WithoutRotary(engine), dtype="float32", schedules=["plain"],
        requests=[RequestSpec(token_ids=[1, 5, 9, 33, 77, 120, 4, 8])], max_new_tokens=3,
    )  # fmt: skip
    (run,) = run_check(plan).runs
    assert run.outcome is Outcome.PASS, run.findings
    assert ("k_cache" in run.coverage.not_judged) is not is_judged
    assert "v_cache" not in run.coverage.not_judged
