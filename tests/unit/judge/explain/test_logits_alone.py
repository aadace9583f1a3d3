"""Engines that show their logits alone: every schedule is judged, and HF's model is run whole to name a mistake."""

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, Qwen3DecoderLayer, Qwen3MLP, Qwen3RMSNorm

import harness
from harness.errors import Code, HarnessError
from harness.judge.explain import whole_model

PROMPTS = [[5, 9, 14, 3, 8], list(range(20, 44)), [7, 7, 7, 3, 5, 200, 31]]
NUM_LAYERS, HEAD_SIZE = 3, 32


class NumpyEngine:
    """Qwen 3 in numpy: it computes all tokens of a request each time, and shows no tensor."""

    recomputes = True

    def __init__(self, folder, eps=1e-6, theta=1e6, *, norms_queries=True, of_product=None, kept=None):
        self.weights, self.tokens = load_file(folder / "model.safetensors"), {}
        self.eps, self.theta, self.norms_queries = eps, theta, norms_queries
        self.of_product, self.kept = of_product or (lambda x: x), kept or (lambda x: x)

    def step(self, work):
        rows = []
        for request, ids, first in work:
            self.tokens[request] = self.tokens.get(request, [])[:first] + list(ids)
            rows.append(torch.from_numpy(self.logits(self.tokens[request])))
        return torch.stack(rows)

    def finish(self, request):
        self.tokens.pop(request, None)

    def logits(self, ids):
        """Return the logits of the last token, [V]."""
        x = self.weights["model.embed_tokens.weight"][ids]
        for path in (f"model.layers.{layer}" for layer in range(NUM_LAYERS)):
            x = x + self.attention(f"{path}.self_attn", self.norm(x, f"{path}.input_layernorm"))
            h = self.norm(x, f"{path}.post_attention_layernorm")
            gate, up = (self.product(h, f"{path}.mlp.{name}_proj") for name in ("gate", "up"))
            x = x + self.product(gate / (1 + np.exp(-gate)) * up, f"{path}.mlp.down_proj")
        last = self.norm(x[-1:], "model.norm")[0]
        return self.product(last, "lm_head" if "lm_head.weight" in self.weights else "model.embed_tokens")

    def attention(self, path, h):
        q, k, v = (self.product(h, f"{path}.{name}_proj").reshape(len(h), -1, HEAD_SIZE) for name in "qkv")
        q = self.norm(q, f"{path}.q_norm") if self.norms_queries else q
        q, k = self.rotated(q), self.rotated(self.norm(k, f"{path}.k_norm"))
        k, v = (self.kept(item) for item in (k, v))
        k, v = (np.repeat(item, q.shape[1] // k.shape[1], axis=1) for item in (k, v))
        scores = np.einsum("qhd,khd->hqk", q, k) / np.float32(HEAD_SIZE**0.5)
        scores = np.where(np.tri(len(h), dtype=bool), scores, -np.inf)
        scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
        context = np.einsum("hqk,khd->qhd", scores / scores.sum(axis=-1, keepdims=True), v)
        return self.product(context.reshape(len(h), -1), f"{path}.o_proj")

    def rotated(self, x):
        frequencies = self.theta ** -(np.arange(0, HEAD_SIZE, 2, dtype=np.float64) / HEAD_SIZE)
        angles = np.outer(np.arange(len(x)), frequencies)[:, None]
        cos, sin = np.cos(angles).astype(x.dtype), np.sin(angles).astype(x.dtype)
        first, second = np.split(x, 2, axis=-1)
        return np.concatenate((first * cos - second * sin, second * cos + first * sin), axis=-1)

    def norm(self, x, path):
        return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + np.float32(self.eps)) * self.weights[f"{path}.weight"]

    def product(self, x, path):
        return self.of_product(x) @ self.of_product(self.weights[f"{path}.weight"]).T


def in_int8(x):
    """Round rows to int8, each with a scale."""
    scale = np.abs(x).max(axis=-1, keepdims=True) / np.float32(127)
    return np.round(x / scale) * scale


def in_float16(x):
    return x.astype(np.float16).astype(np.float32)


def exchange_gate_and_up(weights):
    gate, up = (f"model.layers.1.mlp.{name}_proj.weight" for name in ("gate", "up"))
    weights[gate], weights[up] = weights[up], weights[gate]


def scale_final_norm(weights):
    weights["model.norm.weight"] = weights["model.norm.weight"] * np.float32(1.02)


def forget_values(weights):
    weights["model.layers.2.self_attn.v_proj.weight"] = 0 * weights["model.layers.2.self_attn.v_proj.weight"]


def shuffle_weight(weights):
    weight = weights["model.layers.0.mlp.down_proj.weight"]
    weights["model.layers.0.mlp.down_proj.weight"] = np.random.default_rng(0).permuted(weight, axis=None)


MISTAKES = {
    "eps": ({"eps": 1e-5}, None, "eps of all norms is 1e-05"),
    "theta": ({"theta": 1e4}, None, "rotary theta is 10000 instead"),
    "exchanged": ({}, exchange_gate_and_up, "mlp.gate_proj and mlp.up_proj of model.layers.1 are exchanged"),
    "norm left out": ({"norms_queries": False}, None, "q_norm"),
    "scaled": ({}, scale_final_norm, "the logits are scaled by 1.02: a temperature, or the weight of the final norm"),
    "keys": ({"kept": in_float16}, None, "keys and values are kept in float16"),
    "int8": (
        {"of_product": in_int8},
        None,
        "kept in int8, with one scale for each output, and inputs of products are quantised to int8",
    ),
    "zero": ({}, forget_values, "weight of model.layers.2.self_attn.v_proj is zero"),
}
QUICK = ("eps", "keys")


@pytest.fixture
def open_engine(checkpoints):
    return lambda **settings: NumpyEngine(checkpoints / "qwen3-tiny", **settings)


RETURNED = {
    "zero": (lambda _, logits: torch.zeros_like(logits), "all logits are zero"),
    "log-softmax": (lambda _, logits: logits.log_softmax(-1), "log-softmax is returned in place of the logits"),
    "exchanged": (lambda _, logits: logits.flip(0), "the logits of another request of the step are returned"),
    "of the first": (lambda _, logits: logits[:1].expand_as(logits), "another request of the step are returned"),
}


def check(engine, checkpoints, **options):
    return harness.check(engine, model=checkpoints / "qwen3-tiny", prompts=PROMPTS, max_new_tokens=4, **options)


def said(report):
    return " ".join(report.text().split())


def test_a_sound_engine_passes_under_all_schedules_and_the_report_says_what_was_judged(open_engine, checkpoints):
    report = check(open_engine(), checkpoints)
    assert report, report.text()
    assert [run.schedule for run in report.runs] == ["plain", "chunked", "batched"]
    assert sum(report.seen.num_taps.values()) == 1
    assert "note only the logits were judged" in said(report)
    assert "so that the logits are judged alone" in said(report)


@pytest.mark.parametrize(
    "mistake", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in MISTAKES]
)
def test_a_mistake_is_named(open_engine, checkpoints, mistake):
    settings, plant, cause = MISTAKES[mistake]
    engine = open_engine(**settings)
    if plant is not None:
        plant(engine.weights)
    report = check(engine, checkpoints, schedules=["plain"], explain_seconds=60)
    explanation = report.runs[0].first_divergence.explanation
    assert explanation.is_cause
    assert cause in explanation.cause
    assert "which begins here or in an operation before it" in said(report)


@pytest.mark.parametrize("mistake", RETURNED)
def test_right_logits_that_are_returned_wrongly_are_named(open_engine, checkpoints, mistake):
    returned, cause = RETURNED[mistake]
    engine = open_engine()
    step = engine.step
    engine.step = lambda work: returned(work, step(work))
    report = check(engine, checkpoints, schedules=["batched"], explain_seconds=0.5)
    explanation = report.runs[0].first_divergence.explanation
    assert explanation.is_cause
    assert cause in explanation.cause


OF_ONE_ROW = {
    "zero": (0.0, "the logits of these rows alone are zero: they were not computed, or not returned"),
    "scaled": (0.5, "the logits are scaled by 0.5: a temperature of these rows alone"),
}


@pytest.mark.parametrize("mistake", OF_ONE_ROW)
def test_no_weight_is_named_where_other_rows_are_right(open_engine, checkpoints, mistake):
    factor, cause = OF_ONE_ROW[mistake]
    engine = open_engine()
    step = engine.step
    engine.step = lambda work: step(work) * torch.tensor([factor if at == 1 else 1 for at in range(len(work))])[:, None]
    report = check(engine, checkpoints, schedules=["batched"], explain_seconds=0.5)
    explanation = report.runs[0].first_divergence.explanation
    assert explanation.is_cause
    assert (explanation.cause, explanation.scope) == (cause, "request 1")


def test_no_change_is_named_that_would_make_right_rows_wrong(open_engine, checkpoints, monkeypatch):
    """A cache that loses the first token makes decode rows wrong, and the prompt's rows are right."""
    mask = "attention_mask` is `position_ids"
    changes_of_model = whole_model.changes_of_model

    def masks(*args):
        return [(rank, change) for rank, change in changes_of_model(*args) if mask in change.tell(1.0).cause]

    monkeypatch.setattr(whole_model, "changes_of_model", masks)
    causes = []
    for is_everywhere in (True, False):
        engine = open_engine()
        logits = engine.logits
        engine.step = lose_first_token(engine, logits, is_everywhere=is_everywhere)
        report = check(engine, checkpoints, schedules=["plain"], explain_seconds=20)
        explanation = report.runs[0].first_divergence.explanation
        causes.append((explanation.is_cause, mask in explanation.cause))
    assert causes == [(True, True), (False, False)]


def lose_first_token(engine, logits, *, is_everywhere):
    step = engine.step

    def stepped(work):
        rows = step(work)
        for at, (request, _, first) in enumerate(work):
            if first or is_everywhere:
                rows[at] = torch.from_numpy(logits(engine.tokens[request][1:] or engine.tokens[request]))
        return rows

    return stepped


def test_rotary_over_other_pairs_is_named(open_engine, checkpoints):
    engine = open_engine()
    rotated, order = engine.rotated, np.arange(HEAD_SIZE).reshape(-1, 2).T.flatten()
    engine.rotated = lambda x: rotated(x[..., order])
    report = check(engine, checkpoints, schedules=["plain"], explain_seconds=20)
    cause = report.runs[0].first_divergence.explanation.cause
    assert cause == "rotary over neighbouring pairs (interleaved) instead of half-split pairs"


def test_logits_of_the_token_before_are_named(open_engine, checkpoints):
    engine = open_engine()
    logits = engine.logits
    engine.logits = lambda ids: logits(ids[:-1] or ids)
    report = check(engine, checkpoints, schedules=["plain"], explain_seconds=0.5)
    assert report.runs[0].first_divergence.explanation.cause == "the logits of the token before are returned"


def test_weights_that_are_not_held_are_not_changed_and_this_is_said(open_engine, checkpoints, monkeypatch):
    """A change of what is read anew for each run would change nothing."""
    monkeypatch.setattr("harness.oracle.model._RESIDENT_BYTES", 0)
    monkeypatch.setattr("harness.oracle.untraced.keeps_parts", lambda _hf: False)
    engine = open_engine()
    forget_values(engine.weights)
    explanation = (
        check(engine, checkpoints, schedules=["plain"], explain_seconds=1).runs[0].first_divergence.explanation
    )
    assert not explanation.is_cause
    assert "no change of a weight was tried" in explanation.detail
    report = check(open_engine(eps=1e-5), checkpoints, schedules=["plain"], explain_seconds=30)
    assert "eps of all norms is 1e-05" in report.runs[0].first_divergence.explanation.cause


def test_weights_for_which_there_is_no_room_twice_are_not_changed(open_engine, checkpoints, monkeypatch):
    monkeypatch.setattr("harness.judge.explain.edits.everywhere.available_bytes", lambda: 1000)
    engine = open_engine(of_product=in_int8)
    report = check(engine, checkpoints, schedules=["plain"], explain_seconds=1)
    assert "not enough memory to hold the weights twice" in report.runs[0].first_divergence.explanation.detail


def test_logits_of_fewer_tokens_than_the_vocabulary_are_refused(open_engine, checkpoints):
    engine = open_engine()
    step = engine.step
    engine.step = lambda work: torch.from_numpy(step(work).numpy()[:, :-1].copy())
    with pytest.raises(HarnessError, match="a logit for each token of the vocabulary") as caught:
        check(engine, checkpoints)
    assert caught.value.code is Code.ENGINE_CANNOT_SERVE
    assert (caught.value.expected, caught.value.actual) == ("256 columns", "255 columns")


@pytest.mark.parametrize(("padding", "passes"), [(-1e4, True), (1e4, False)])
def test_logits_beyond_the_vocabulary_are_told(open_engine, checkpoints, padding, passes):
    engine = open_engine()
    step = engine.step
    engine.step = lambda work: torch.nn.functional.pad(step(work), (0, 64), value=padding)
    report = check(engine, checkpoints, schedules=["plain"])
    assert bool(report) is passes
    told = "the step returns 320 logits for 256 tokens: of the others it was judged only that none is the largest"
    assert told in report.notes


def test_what_an_engine_raises_for_several_requests_is_told_in_one_line(open_engine, checkpoints):
    engine = open_engine()
    step = engine.step
    engine.step = lambda work: step(work)[:1]
    report = check(engine, checkpoints)
    note = next(note for note in report.notes if "one of two raised" in note)
    assert note.endswith("raised HarnessError: the engine's step returns no row of logits for each request")


def test_no_change_of_hfs_code_is_left(open_engine, checkpoints):
    kinds = (Qwen3Attention, Qwen3DecoderLayer, Qwen3MLP, Qwen3RMSNorm)
    before = [dict(vars(kind)) for kind in kinds]
    engine = open_engine()
    shuffle_weight(engine.weights)
    report = check(engine, checkpoints, schedules=["plain"], explain_seconds=1)
    explanation = report.runs[0].first_divergence.explanation
    assert not explanation.is_cause
    assert "changes of the model were tried in the time for them" in explanation.detail
    assert [dict(vars(kind)) for kind in kinds] == before


def test_a_size_of_errors_that_hf_makes_in_another_dtype_is_told(checkpoints):
    class Half(NumpyEngine):
        def product(self, x, path):
            return in_float16(in_float16(x) @ in_float16(self.weights[f"{path}.weight"]).T)

        def norm(self, x, path):
            return in_float16(super().norm(x, path))

    report = check(Half(checkpoints / "qwen3-tiny"), checkpoints, schedules=["plain"], explain_seconds=0.5)
    explanation = report.runs[0].first_divergence.explanation
    assert not explanation.is_cause
    assert "times the error that HF makes with products in float16" in explanation.detail
    assert "bfloat16" not in explanation.detail


def test_logits_in_a_coarser_dtype_are_told_with_what_to_do(open_engine, checkpoints):
    engine = open_engine()
    step = engine.step
    engine.step = lambda work: step(work).bfloat16()
    report = check(engine, checkpoints, dtype="float32", schedules=["plain"])
    assert (
        "dtype of lm_head is BF16, coarser than the engine's float32: if it computes so, check it with --dtype bfloat16"
        in said(report)
    )
    assert "no tap was recorded" not in said(report)


def test_garbage_is_a_mismatch(checkpoints):
    class Garbage:
        def step(self, work):
            return torch.randn(len(work), 256)

    report = check(Garbage(), checkpoints, schedules=["plain"], explain_seconds=0.2)
    assert report.runs[0].outcome.value == "mismatch"
    assert not report.runs[0].first_divergence.explanation.is_cause
