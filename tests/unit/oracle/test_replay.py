"""Replay against itself, against definitions of its own, and its error formulas against errors that were made."""

import math

import pytest
import torch
from torch import nn
from transformers import DynamicCache, MistralConfig, MistralForCausalLM, Qwen2Config, Qwen2ForCausalLM

from harness.oracle.capture import capturing
from harness.oracle.decoder import load_decoder
from harness.oracle.replay import AttentionInputs, Replayer
from harness.oracle.truth import truth_forward
from harness.taps import Kind

from .state import bits, surroundings

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
}
WINDOW = 5


class BoomError(Exception):
    """Raised by the tests."""


def relative(actual, expected):
    return float((actual - expected).norm() / expected.norm())


def truth_of(decoder, token_ids):
    taps = {}
    truth_forward(decoder, token_ids, lambda tap, x: taps.setdefault(tap, x.clone()), logit_rows=range(len(token_ids)))
    return taps


def replay_all(decoder, taps, token_ids):
    """Replay every operation on the recorded inputs: {tap: relative error}."""
    replayer, positions, errors = Replayer(decoder), torch.arange(len(token_ids)), {}
    for operation in decoder.graph:
        if operation.kind is Kind.CACHE:
            continue
        inputs = [taps[name] for name in operation.inputs] or [torch.tensor(token_ids)]
        with replayer.layer(operation.layer):
            if operation.kind is Kind.ATTENTION:
                q, k, v = inputs
                given = AttentionInputs(
                    query=q, key=k, value=v.view_as(k), query_position=positions, key_position=positions
                )
                expected = replayer.attention(operation.layer, given).expected
            else:
                expected = replayer.replay(operation, inputs, positions).expected
        assert expected.dtype == torch.float64
        errors[operation.tap] = relative(expected.view_as(taps[operation.tap]), taps[operation.tap].double())
    return errors


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama-tiny", "qwen2-tiny", "qwen3-tiny"])
def test_the_truth_replays_to_itself(load, token_ids, name, dtype):
    """Graph, capture and replay fit each other: on the truth's own inputs every operation gives the truth."""
    decoder = load(name, dtype)
    errors = replay_all(decoder, truth_of(decoder, token_ids), token_ids)
    assert len(errors) == sum(op.kind is not Kind.CACHE for op in decoder.graph)
    assert {tap: error for tap, error in errors.items() if error > 1e-14} == {}


def windowed(tmp_path, family):
    torch.manual_seed(4)
    if family == "qwen2":
        extra = {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": WINDOW}
        model = Qwen2ForCausalLM(Qwen2Config(**SIZES, **extra))
        assert model.config.layer_types == ["full_attention", "sliding_attention"]
    else:
        model = MistralForCausalLM(MistralConfig(**SIZES, sliding_window=WINDOW))
    model.save_pretrained(tmp_path / family)
    return load_decoder(tmp_path / family, dtype=torch.float32)


@pytest.mark.parametrize("family", ["qwen2", "mistral"])
def test_the_truth_replays_to_itself_behind_a_window(tmp_path, family):
    decoder, token_ids = windowed(tmp_path, family), list(range(3, 23))
    errors = replay_all(decoder, truth_of(decoder, token_ids), token_ids)
    assert {tap: error for tap, error in errors.items() if error > 1e-14} == {}


def test_another_position_another_rotation(load, token_ids):
    """The test above would pass with positions ignored if the truth were at position 0 only."""
    decoder = load("llama-tiny")
    taps = truth_of(decoder, token_ids)
    operation = decoder.graph["model.layers.0.k_rope"]
    replayer = Replayer(decoder)
    with replayer.layer(0):
        shifted = replayer.replay(operation, [taps[operation.inputs[0]]], torch.arange(len(token_ids)) + 1).expected
    assert relative(shifted, taps[operation.tap].view_as(shifted)) > 0.1


@pytest.mark.parametrize("rows", [[3], [22, 0, 7], []])
def test_rows_are_replayed_by_themselves(load, token_ids, rows):
    decoder = load("qwen3-tiny")
    taps, replayer = truth_of(decoder, token_ids), Replayer(decoder)
    for operation in decoder.graph:
        if operation.kind in (Kind.CACHE, Kind.ATTENTION):
            continue
        inputs = [taps[name][rows] for name in operation.inputs] or [torch.tensor(token_ids)[rows]]
        with replayer.layer(operation.layer):
            expected = replayer.replay(operation, inputs, torch.tensor(rows, dtype=torch.int64)).expected
        assert len(expected) == len(rows)
        torch.testing.assert_close(
            expected.view(len(rows), *taps[operation.tap].shape[1:]),
            taps[operation.tap][rows].double(),
            rtol=1e-12,
            atol=1e-12,
        )


def test_recorded_shapes_may_be_flat(load, token_ids):
    """Heads and head size may be recorded as one dimension or two (docs/recording-format.md)."""
    decoder = load("qwen3-tiny")
    taps, replayer = truth_of(decoder, token_ids), Replayer(decoder)
    positions = torch.arange(len(token_ids))
    for site in ("self_attn.q_norm", "q_rope"):
        operation = decoder.graph[f"model.layers.1.{site}"]
        (x,) = (taps[name] for name in operation.inputs)
        heads = x.view(len(x), -1, decoder.head_dim())
        with replayer.layer(1):
            results = [replayer.replay(operation, [each], positions).expected for each in (heads, heads.flatten(1))]
        assert torch.equal(results[0].flatten(1), results[1].flatten(1))


@pytest.mark.parametrize("layer", [None, 0, 2])
def test_layers_are_put_back(load, layer):
    decoder = load("qwen2-tiny", torch.bfloat16)
    before, weights = surroundings(decoder), bits(decoder.model)

    def fail():
        with Replayer(decoder).layer(layer):
            assert bits(decoder.model) != weights
            raise BoomError

    with pytest.raises(BoomError):
        fail()
    assert surroundings(decoder) == before
    assert bits(decoder.model) == weights


# Attention by an independent definition.


def inputs_of(decoder, *, queries, keys, offset=0, dtype=torch.float64, scale=1.0, seed=0):
    """Random inputs whose queries are the last of the keys' positions."""
    generator = torch.Generator().manual_seed(seed)
    config, head_dim = decoder.config, decoder.head_dim()

    def draw(rows, heads):
        return (torch.randn(rows, heads, head_dim, generator=generator, dtype=torch.float64) * scale).to(dtype)

    positions = torch.arange(keys) + offset
    return AttentionInputs(
        query=draw(queries, config.num_attention_heads),
        key=draw(keys, config.num_key_value_heads),
        value=draw(keys, config.num_key_value_heads),
        query_position=positions[keys - queries :],
        key_position=positions,
    )


def attention_by_definition(inputs, scaling, window=None):
    """softmax(q k^T scaling) v, row by row and head by head, in einsum."""
    q, k, v = (x.double() for x in (inputs.query, inputs.key, inputs.value))
    group = q.shape[1] // k.shape[1]
    rows = []
    for query, position in zip(q, inputs.query_position.tolist(), strict=True):
        seen = [
            at
            for at, key_position in enumerate(inputs.key_position.tolist())
            if key_position <= position and (window is None or key_position > position - window)
        ]
        heads = []
        for head, vector in enumerate(query):
            scores = torch.einsum("h,sh->s", vector, k[seen, head // group]) * scaling
            weights = torch.exp(scores - scores.max())
            heads.append(torch.einsum("s,sh->h", weights / weights.sum(), v[seen, head // group]))
        rows.append(torch.cat(heads))
    return torch.stack(rows)


@pytest.mark.parametrize(("queries", "keys", "offset"), [(9, 9, 0), (1, 9, 0), (4, 9, 0), (4, 9, 30), (1, 1, 0)])
def test_attention_is_its_definition(decoder, queries, keys, offset):
    inputs = inputs_of(decoder, queries=queries, keys=keys, offset=offset)
    actual = Replayer(decoder).attention(1, inputs).expected
    assert relative(actual, attention_by_definition(inputs, decoder.head_dim() ** -0.5)) < 1e-14


def test_attention_behind_a_window_is_its_definition(tmp_path):
    decoder = windowed(tmp_path, "qwen2")
    inputs = inputs_of(decoder, queries=11, keys=17, offset=3)
    scaling = decoder.head_dim() ** -0.5
    with torch.no_grad():
        full, sliding = (Replayer(decoder).attention(layer, inputs).expected for layer in (0, 1))
    assert relative(full, attention_by_definition(inputs, scaling)) < 1e-14
    assert relative(sliding, attention_by_definition(inputs, scaling, WINDOW)) < 1e-14
    assert relative(sliding, full) > 1e-2


def test_keys_may_come_in_any_order(decoder):
    inputs = inputs_of(decoder, queries=4, keys=9)
    order = torch.tensor([4, 1, 8, 0, 7, 2, 6, 3, 5])
    shuffled = AttentionInputs(
        query=inputs.query.flip(0),
        key=inputs.key[order],
        value=inputs.value[order],
        query_position=inputs.query_position.flip(0),
        key_position=inputs.key_position[order],
    )
    replayer = Replayer(decoder)
    assert relative(replayer.attention(0, shuffled).expected.flip(0), replayer.attention(0, inputs).expected) < 1e-14


def test_attention_in_pieces(decoder, monkeypatch):
    """Scores are held a few queries at a time."""
    inputs = inputs_of(decoder, queries=9, keys=9)
    whole = Replayer(decoder).attention(0, inputs)
    monkeypatch.setattr("harness.oracle.replay._SCORE_BYTES", 8 * decoder.config.num_attention_heads * 9 * 2)
    pieces = Replayer(decoder).attention(0, inputs)
    for name in ("expected", "amplification", "score_sensitivity"):
        torch.testing.assert_close(getattr(pieces, name), getattr(whole, name), rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["llama-tiny", "qwen3-tiny"])
def test_eager_attention_is_bit_for_bit_that_of_hf(load, token_ids, name, dtype):
    """In prefill, and in a chunk and a decode step behind a cache."""
    decoder = load(name, dtype)
    cache, steps = DynamicCache(config=decoder.config), []
    for piece in (token_ids[:12], token_ids[12:20], token_ids[20:21]):
        taps = {}
        with (
            torch.no_grad(),
            capturing(decoder, lambda tap, x, taps=taps: taps.setdefault(tap, x.clone()), attention="eager"),
        ):
            decoder.model(input_ids=torch.tensor([piece]), past_key_values=cache, use_cache=True)
        steps.append(taps)
    for layer in range(len(decoder.layers)):
        prefix, so_far = f"model.layers.{layer}.", []
        for taps in steps:
            so_far.append(taps)
            keys = torch.cat([each[f"{prefix}k_rope"] for each in so_far])
            values = torch.cat([each[f"{prefix}self_attn.v_proj"] for each in so_far]).view_as(keys)
            inputs = AttentionInputs(
                query=taps[f"{prefix}q_rope"],
                key=keys,
                value=values,
                query_position=torch.arange(len(keys))[-len(taps[f"{prefix}q_rope"]) :],
                key_position=torch.arange(len(keys)),
            )
            with torch.no_grad():
                assert torch.equal(Replayer(decoder).eager_attention(layer, inputs), taps[f"{prefix}attention"])


# The formulas of how far rounding carries, against roundings that were made.

_SAMPLES = 400
_EPS = 1e-6


def rms_relative(changed, expected):
    """[rows]: RMS over samples of the relative error of each row."""
    errors = torch.stack([(x - expected).norm(dim=-1) / expected.norm(dim=-1) for x in changed])
    return errors.square().mean(dim=0).sqrt() / _EPS


@pytest.mark.parametrize("mean", [0.0, 1.0])
def test_amplification_of_a_linear_is_the_error_of_its_rounded_products(load, mean):
    decoder = load("qwen2-tiny")
    operation = decoder.graph["model.layers.1.self_attn.k_proj"]
    module = decoder.module(operation.tap)
    generator = torch.Generator().manual_seed(8)
    x = torch.randn(4, module.in_features, generator=generator, dtype=torch.float64) + mean
    with Replayer(decoder).layer(1):
        replayed = Replayer(decoder).replay(operation, [x], torch.arange(4))
    weight = module.weight.detach().double()
    products = x[:, None, :] * weight  # [rows, out, in]
    noise = (
        (products * (1 + _EPS * torch.randn(products.shape, generator=generator, dtype=torch.float64))).sum(-1)
        for _ in range(_SAMPLES)
    )
    bias = module.bias.detach().double()
    measured = rms_relative([y + bias for y in noise], replayed.expected)
    torch.testing.assert_close(replayed.amplification, measured, rtol=0.2, atol=0)


def test_a_row_whose_products_cancel_is_amplified(load):
    decoder = load("llama-tiny")
    operation = decoder.graph["model.layers.0.mlp.down_proj"]
    weight = decoder.module(operation.tap).weight.detach().double()
    directions = torch.linalg.svd(weight).Vh  # wider than it is high: the last ones are mapped to zero
    x = directions[[-1, 0]]
    with Replayer(decoder).layer(0):
        amplification = Replayer(decoder).replay(operation, [x], torch.arange(2)).amplification
    assert amplification[0] > 1e6
    assert amplification[1] < 3


@pytest.mark.parametrize("scale", [0.3, 2.0])
@pytest.mark.parametrize("name", ["llama-tiny", "qwen3-tiny"])
def test_amplification_of_attention_is_the_error_of_its_rounded_products(load, name, scale):
    decoder = load(name)
    inputs = inputs_of(decoder, queries=3, keys=12, scale=scale)
    replayed = Replayer(decoder).attention(0, inputs)
    p, v, _ = parts(inputs, decoder)
    generator = torch.Generator().manual_seed(9)
    products = p[..., None] * v[:, None]  # [heads, rows, keys, head size]
    changed = (
        (products * (1 + _EPS * torch.randn(products.shape, generator=generator, dtype=torch.float64))).sum(2)
        for _ in range(_SAMPLES)
    )
    measured = rms_relative([x.transpose(0, 1).flatten(1) for x in changed], replayed.expected)
    torch.testing.assert_close(replayed.amplification, measured, rtol=0.2, atol=0)


@pytest.mark.parametrize("scale", [0.3, 2.0])
@pytest.mark.parametrize("name", ["llama-tiny", "qwen3-tiny"])
def test_score_sensitivity_is_the_error_of_its_rounded_scores(load, name, scale):
    """Every score is off by a relative rounding of its bound |q| |k| scale, as a sum of that size would be."""
    decoder = load(name)
    inputs = inputs_of(decoder, queries=3, keys=12, scale=scale)
    replayed = Replayer(decoder).attention(0, inputs)
    _, v, scores = parts(inputs, decoder)
    group = inputs.query.shape[1] // inputs.key.shape[1]
    q_norm = inputs.query.norm(dim=-1).T
    k_norm = inputs.key.norm(dim=-1).T.repeat_interleave(group, dim=0)
    bound = q_norm[..., None] * k_norm[:, None] * decoder.head_dim() ** -0.5
    generator = torch.Generator().manual_seed(10)
    changed = (
        (scores + _EPS * bound * torch.randn(scores.shape, generator=generator, dtype=torch.float64)).softmax(-1) @ v
        for _ in range(_SAMPLES)
    )
    measured = rms_relative([x.transpose(0, 1).flatten(1) for x in changed], replayed.expected)
    torch.testing.assert_close(replayed.score_sensitivity, measured, rtol=0.2, atol=0)


def parts(inputs, decoder):
    """Probabilities [heads, rows, keys], values [heads, keys, head size], and masked scores."""
    group = inputs.query.shape[1] // inputs.key.shape[1]
    q = inputs.query.transpose(0, 1)
    k, v = (x.transpose(0, 1).repeat_interleave(group, dim=0) for x in (inputs.key, inputs.value))
    scores = torch.einsum("ntd,nsd->nts", q, k) / math.sqrt(decoder.head_dim())
    hidden = inputs.key_position[None] > inputs.query_position[:, None]
    scores = scores.masked_fill(hidden, -math.inf)
    return scores.softmax(-1), v, scores


def test_an_operation_that_is_not_replayed_row_by_row_is_refused(load):
    decoder = load("llama-tiny")
    with pytest.raises(ValueError, match="attention is not replayed row by row"):
        Replayer(decoder).replay(decoder.graph["model.layers.0.attention"], [], torch.arange(0))


def test_another_kind_of_linear_is_asked_to_compute(load, token_ids):
    """A head that is more than its weight, as in models with scaled logits."""
    decoder = load("llama-tiny")

    class Doubled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    head = decoder.model.lm_head
    doubled = Doubled(head.in_features, head.out_features, bias=False)
    doubled.weight = head.weight
    x = torch.randn(2, head.in_features, dtype=torch.float64)
    decoder.model.lm_head = doubled
    try:
        with Replayer(decoder).layer(None):
            actual = Replayer(decoder).replay(decoder.graph["lm_head"], [x], torch.arange(2)).expected
    finally:
        decoder.model.lm_head = head
    assert relative(actual, 2 * x @ head.weight.double().T) < 1e-14
