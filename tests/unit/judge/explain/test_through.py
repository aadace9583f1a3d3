"""Causes through what an engine did not record: HF as the engine, with a fault in its copy, and some taps left out."""

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM, GraniteConfig, MistralConfig

from harness.engines.hf import HFEngine
from harness.formats.case import RequestSpec
from harness.formats.recording import Recording
from harness.judge.compare import compare_run
from harness.judge.explain import explain_run
from harness.judge.jobs.opened import record_run
from harness.oracle.make_golden import make_golden
from harness.oracle.model import load_model
from harness.plan import plan_request

SIZES = {
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
}
ROTATED = (":query", ":key", ":value")
CONTEXT = (*ROTATED, ":context")


class Engine:
    """A tiny checkpoint with its golden, and HF as the engine on it."""

    def __init__(self, config, folder):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for parameter in model.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.3)
        model.save_pretrained(folder / "model")
        generator = torch.Generator().manual_seed(1)
        prompts = [torch.randint(3, 250, (count,), generator=generator).tolist() for count in (28, 9)]
        self.plan = plan_request(
            model=str(folder / "model"),
            engine="hf",
            dtype="float32",
            device="cpu",
            requests=[RequestSpec(token_ids=prompt) for prompt in prompts],
            max_new_tokens=3,
            schedules=["plain", "rewound"],
            local_files_only=True,
        )
        self.folder, self.oracle = folder, self._loaded()
        self.golden = make_golden(self.oracle, self.plan.prompts, folder / "golden")

    def _loaded(self):
        return load_model(self.plan.folder, dtype=torch.float32, stays=True)

    def explained(self, path, inject, left_out, monkeypatch, schedule="plain"):
        """Return the tap that is found first, and its explanation."""
        engine = HFEngine(self._loaded(), None)
        engine.match_taps(self.oracle.graph)
        engine.__dict__["sources"] = {at: tap for at, tap in engine.sources.items() if not at.endswith(left_out)}
        monkeypatch.setattr("harness.engines.hf_batch.HFBatch._read_back", lambda *_: None)
        inject(engine._hf.model)
        (right,) = (item for item in self.plan.schedules if item.name == schedule)
        record_run(self.plan, engine, right, self.golden.requests, path)
        with Recording.open(path, verify=False) as actual:
            comparison = compare_run(actual, self.golden, hf=self.oracle)
            first = explain_run(comparison, actual, self.golden, self.oracle).first_divergence
        return first.tap, first.explanation


@pytest.fixture(scope="module")
def mistral(tmp_path_factory):
    return Engine(MistralConfig(**SIZES, sliding_window=8), tmp_path_factory.mktemp("mistral"))


@pytest.fixture(scope="module")
def granite(tmp_path_factory):
    config = GraniteConfig(**SIZES, residual_multiplier=0.6, embedding_multiplier=1.5, logits_scaling=1.25)
    return Engine(config, tmp_path_factory.mktemp("granite"))


def theta(value):
    def inject(model):
        config = copy.deepcopy(model.config)
        config.rope_parameters = {**config.rope_parameters, "rope_theta": value}
        model.model.rotary_emb = type(model.model.rotary_emb)(config)

    return inject


def window(value):
    def inject(model):
        model.config.sliding_window = value

    return inject


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("left_out", "tap"), [(ROTATED, "attention"), (CONTEXT, "self_attn.o_proj")])
@pytest.mark.parametrize(("inject", "cause"), [
    (theta(1e6), "wrong rope theta: 1e+06 instead of 10000"),
    (theta(37000.0), "wrong rope theta: 37000 instead of 10000"),
    (window(200), "the sliding window is ignored"),
    (window(7), "sliding window off by one (too narrow): 7 instead of 8"),
])  # fmt: skip
def test_a_cause_is_found_through_rotary_and_attention(mistral, tmp_path, monkeypatch, left_out, tap, inject, cause):
    first, explanation = mistral.explained(tmp_path / "run", inject, left_out, monkeypatch)
    assert first == f"model.layers.0.{tap}"
    assert (explanation.is_cause, explanation.cause) == (True, cause)


def test_a_cause_is_found_through_rotary_where_the_history_is_of_a_row_that_was_given_up(
    mistral, tmp_path, monkeypatch
):
    first, explanation = mistral.explained(tmp_path / "run", theta(1e6), ROTATED, monkeypatch, schedule="rewound")
    assert first == "model.layers.0.attention"
    assert explanation.cause == "wrong rope theta: 1e+06 instead of 10000"
    assert "could not be tried" not in explanation.detail


def test_the_edge_of_the_window_is_said_where_rows_begin_to_be_wrong(mistral, tmp_path, monkeypatch):
    _, explanation = mistral.explained(tmp_path / "run", window(200), ROTATED, monkeypatch)
    assert explanation.detail == (
        "the first bad row is at position 8 of request 0, where what is beyond the sliding window of 8 begins"
    )


def test_a_setting_of_a_module_is_found_in_the_code(granite, tmp_path, monkeypatch):
    def inject(model):
        model.model.layers[0].residual_multiplier = 1.0

    _, explanation = granite.explained(tmp_path / "run", inject, ("no such source",), monkeypatch)
    assert explanation.is_cause
    assert explanation.cause.startswith("the multiplier of the branch is left out: in GraniteDecoderLayer")


def test_a_multiplier_of_the_whole_model_is_found_in_the_config(granite, tmp_path, monkeypatch):
    def inject(model):
        model.model.embedding_multiplier = 1.0

    _, explanation = granite.explained(tmp_path / "run", inject, ("no such source",), monkeypatch)
    assert explanation.is_cause
    assert explanation.cause == "embedding_multiplier (1.5) is left out: a constant gain of 0.666667"


def test_a_factor_of_the_logits_is_found_where_the_head_was_not_recorded(granite, tmp_path, monkeypatch):
    def inject(model):
        model.config.logits_scaling = 1.0

    first, explanation = granite.explained(tmp_path / "run", inject, ("lm_head",), monkeypatch)
    assert first == "logits"
    assert explanation.is_cause
    assert explanation.cause == "logits_scaling (1.25) is left out: a constant gain of 1.25"


def test_two_names_of_one_number_are_one_cause(mistral, tmp_path, monkeypatch):
    def inject(model):
        model.model.layers[0].self_attn.scaling = 1.0

    _, explanation = mistral.explained(tmp_path / "run", inject, ("no such source",), monkeypatch)
    assert explanation.cause == "the softmax scale is missing: 1 instead of 0.25"


def test_the_sum_before_a_layer_is_left_out(tmp_path, monkeypatch):
    def inject(model):
        layer, branch = model.model.layers[0], []
        layer.mlp.register_forward_hook(lambda _module, _args, output: branch.append(output))
        layer.register_forward_hook(lambda _module, _args, _output: branch.pop())

    engine = Engine(MistralConfig(**{**SIZES, "num_hidden_layers": 2}, sliding_window=8), tmp_path)
    tap, explanation = engine.explained(tmp_path / "r", inject, ("layers.0",), monkeypatch)
    assert tap == "model.layers.1.input_layernorm"
    assert explanation.cause == "it reads model.layers.0.mlp.down_proj instead of model.layers.0.output"
    assert explanation.is_cause
