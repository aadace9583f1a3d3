"""Draws within a JSON schema: the distribution inside of the mask is the model's own, renormalised."""

import json
from contextlib import contextmanager

import pytest
import torch
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

pytest.importorskip("httpx", reason="the extra `serve` is not installed")
pytest.importorskip("fastapi", reason="the extra `serve` is not installed")
pytest.importorskip("llguidance", reason="the extra `test` is not installed")

from harness.extensions.server.chat.automaton import Automaton
from harness.extensions.server.sampler.requests import chosen_settings
from harness.extensions.server.sampler.run import check_sampler
from harness.oracle.sampling import Chain, SamplingSettings
from harness.plan import plan_engine
from harness.results.check import Outcome
from reference_engine import model_runner, sampler

from ..chat.structured.conftest import write_json_tokenizer
from ..served import serve

ORIGINAL = sampler.sample, sampler.allowed_tokens


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    """A random model of bytes."""
    folder = tmp_path_factory.mktemp("bytes")
    write_json_tokenizer(folder)
    torch.manual_seed(4)
    config = Qwen3Config(
        vocab_size=273, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=256, initializer_range=0.2,
        eos_token_id=271, bos_token_id=270,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config)
    of_numbers = AutoTokenizer.from_pretrained(folder).convert_tokens_to_ids([*"0123456789,-"])
    model.lm_head.weight.data[of_numbers] *= 2  # they are likely now and then, so that the order of steps matters
    model.save_pretrained(folder)
    return plan_engine(model=str(folder), dtype="float32")


class Masking:
    """A server around that of the reference engine, which takes `response_format`: a mask before its sampler."""

    def __init__(self, app, hf, spacing):
        self._app, self._spacing = app, spacing
        self._automaton, self.schemas = Automaton(hf), {}

    async def __call__(self, scope, receive, send):
        if scope["type"] != "http" or scope["path"] != "/v1/completions":
            return await self._app(scope, receive, send)
        message = await receive()
        body = json.loads(message["body"])
        if "response_format" in body:
            self.schemas[body["seed"]] = body.pop("response_format")["json_schema"]["schema"]
        message["body"] = json.dumps(body).encode()
        headers = [(name, value) for name, value in scope["headers"] if name != b"content-length"]
        headers.append((b"content-length", str(len(message["body"])).encode()))
        first = [message]

        async def again():
            return first.pop() if first else await receive()

        return await self._app(scope | {"headers": headers}, again, send)

    def mask(self, logits, sequences):
        """[R, V] bool, true for requests without a schema."""
        allowed = torch.ones_like(logits, dtype=torch.bool)
        for row, sequence in enumerate(sequences):
            schema = self.schemas.get(sequence.params.seed)
            if schema is not None:
                answer = sequence.token_ids[sequence.num_prompt_tokens :]
                by_schema = torch.from_numpy(self._automaton.allowed(schema, self._spacing, answer))
                allowed[row] = torch.nn.functional.pad(by_schema, (0, logits.shape[1] - len(by_schema)))
        return allowed


@contextmanager
def masking(plan, monkeypatch, plant, spacing="any whitespace"):
    """Serve with a mask; `plant(server)` returns what samples."""

    def wrap(app):
        masking_app = Masking(app, plan.checkpoint.tokenizer.hf, spacing)
        for place in (sampler, model_runner):
            monkeypatch.setattr(place, "sample", plant(masking_app))
        return masking_app

    with serve(plan.checkpoint.folder, wrap=wrap, max_num_seqs=64) as server:
        yield server.address(concurrency=32)


def masked_first(server):
    return lambda logits, sequences: ORIGINAL[0](logits.masked_fill(~server.mask(logits, sequences), -1e9), sequences)


def unmasked(server):
    return ORIGINAL[0]


def uniform_inside(server):
    def sample(logits, sequences):
        is_bound = torch.tensor([sequence.params.seed in server.schemas for sequence in sequences])[:, None]
        return masked_first(server)(logits.masked_fill(is_bound, 0.0), sequences)

    return sample


def masked_last(server):
    """Top-k of all tokens, and of these the ones that the schema allows."""

    def sample(logits, sequences):
        is_allowed = server.mask(logits, sequences)
        in_top_k = (logits[:, None] > logits[..., None]).sum(dim=-1) < 20
        both = is_allowed & in_top_k
        return ORIGINAL[0](logits.masked_fill(~torch.where(both.any(-1, True), both, is_allowed), -1e9), sequences)

    return sample


def judged(plan, address):
    result = check_sampler(plan, address, num_draws=300, only=("json_schema",))
    (setting,) = result.settings
    return result, setting


@pytest.mark.sampled(1)
@pytest.mark.parametrize("spacing", ["any whitespace", "no whitespace"])
def test_a_sound_mask_passes(plan, monkeypatch, spacing):
    with masking(plan, monkeypatch, masked_first, spacing) as address:
        result, setting = judged(plan, address)
    assert (result.outcome, setting.num_outside) == (Outcome.PASS, 0), (setting, result.findings)
    assert setting.num_draws == 300
    assert "grammar ignored" in result.would_find


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("plant", "says"),
    [(unmasked, "grammar ignored"), (masked_last, "top_k before grammar"), (uniform_inside, "no known chain")],
)
def test_a_fault_is_found_and_named(plan, monkeypatch, plant, says):
    with masking(plan, monkeypatch, plant) as address:
        result, setting = judged(plan, address)
    assert result.outcome is Outcome.MISMATCH
    assert says in "; ".join(finding.message for finding in (*setting.findings, *result.findings))


def test_it_is_judged_only_where_it_is_named(plan):
    assert "json_schema" not in {setting.name for setting in chosen_settings([])}
    with serve(plan.checkpoint.folder) as server:
        result = check_sampler(plan, server.address(), num_draws=10, only=("json_schema", "hot"))
    assert "response_format" in result.not_judged["json_schema"]


def test_a_grammar_comes_before_other_steps_or_after_them():
    logits, settings = torch.tensor([3.0, 2.0, 1.0, 0.0]), SamplingSettings(grammar=(1, 3), top_k=2)
    first, last = Chain(), Chain(steps=("temperature", "top_k", "grammar"))
    assert first.probabilities(logits, settings).tolist() == pytest.approx([0, 0.8808, 0, 0.1192], abs=1e-4)
    assert last.probabilities(logits, settings).tolist() == [0, 1, 0, 0]
    none_left = SamplingSettings(grammar=(2, 3), top_k=2)
    assert last.probabilities(logits, none_left).tolist() == pytest.approx([0, 0, 0.7311, 0.2689], abs=1e-4)
