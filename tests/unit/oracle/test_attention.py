"""Attention's own definition against independent ones, and its error formulas against errors that were made."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from harness.oracle import attention
from harness.oracle.attention import attention_sensitivity, scaling, visible_keys
from harness.oracle.paired import run_pair
from harness.oracle.watch import AttentionCall

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 6, 2, 16
WINDOW = 5


def relative(actual, expected):
    return float((actual - expected).norm() / expected.norm())


def call_of(*, queries, keys, batch=1, scale=1.0, seed=0, mask=None, dtype=torch.float64, **options):
    """Random inputs whose queries are the last of the keys' positions."""
    generator = torch.Generator().manual_seed(seed)

    def draw(rows, heads):
        x = torch.randn(batch, heads, rows, HEAD_DIM, generator=generator, dtype=torch.float64) * scale
        return x.to(dtype)

    module = nn.Module()
    module.num_key_value_groups, module.training = NUM_HEADS // NUM_KV_HEADS, False
    return AttentionCall(
        path="attention",
        module=module,
        query=draw(queries, NUM_HEADS),
        key=draw(keys, NUM_KV_HEADS),
        value=draw(keys, NUM_KV_HEADS),
        mask=mask,
        options=options,
    )


def causal(queries, keys, window=None):
    """[1, 1, T, S] bool."""
    positions = torch.arange(keys - queries, keys)[:, None]
    seen = torch.arange(keys)[None] <= positions
    if window is not None:
        seen &= torch.arange(keys)[None] > positions - window
    return seen[None, None]


def attention_by_definition(call, scale, seen, *, softcap=None, sinks=None):
    """softmax(q k^T scale) v, row by row and head by head, in einsum."""
    group = call.query.shape[1] // call.key.shape[1]
    requests = []
    for q, k, v in zip(call.query.double(), call.key.double(), call.value.double(), strict=True):
        rows = []
        for row in range(q.shape[1]):
            there = seen[0, 0, row].nonzero()[:, 0]
            heads = []
            for head in range(q.shape[0]):
                scores = torch.einsum("h,sh->s", q[head, row], k[head // group, there]) * scale
                if softcap is not None:
                    scores = softcap * torch.tanh(scores / softcap)
                total = 0.0 if sinks is None else torch.exp(sinks[head] - scores.max())
                weights = torch.exp(scores - scores.max())
                heads.append(torch.einsum("s,sh->h", weights / (weights.sum() + total), v[head // group, there]))
            rows.append(torch.cat(heads))
        requests.append(torch.stack(rows))
    return torch.stack(requests)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(("queries", "keys"), [(9, 9), (1, 9), (4, 9), (1, 1)])
def test_attention_is_its_definition(queries, keys, batch):
    call = call_of(queries=queries, keys=keys, batch=batch)
    actual = attention_sensitivity(call).context
    assert actual.shape == (batch, queries, NUM_HEADS * HEAD_DIM)
    assert relative(actual, attention_by_definition(call, HEAD_DIM**-0.5, causal(queries, keys))) < 1e-14


@pytest.mark.parametrize("as_numbers", [False, True])
def test_attention_behind_a_window_is_its_definition(as_numbers):
    """HF says what is seen by a mask, of booleans or of what is added to the scores."""
    seen = causal(11, 17, WINDOW)
    mask = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min) if as_numbers else seen
    call = call_of(queries=11, keys=17, mask=mask)
    assert torch.equal(visible_keys(call), seen)
    actual = attention_sensitivity(call).context
    assert relative(actual, attention_by_definition(call, HEAD_DIM**-0.5, seen)) < 1e-14
    assert relative(actual, attention_sensitivity(replace(call, mask=None)).context) > 1e-2


def test_a_mask_that_is_longer_than_the_keys():
    """HF's masks of a static cache are as long as the cache may become."""
    seen = causal(4, 9)
    call = call_of(queries=4, keys=9, mask=torch.cat([seen, torch.zeros(1, 1, 4, 3, dtype=torch.bool)], dim=-1))
    assert relative(attention_sensitivity(call).context, attention_by_definition(call, HEAD_DIM**-0.5, seen)) < 1e-14


def test_a_cap_on_the_scores_is_its_definition():
    call = call_of(queries=4, keys=9, scale=2.0, softcap=3.0)
    expected = attention_by_definition(call, HEAD_DIM**-0.5, causal(4, 9), softcap=3.0)
    assert relative(attention_sensitivity(call).context, expected) < 1e-14
    assert relative(attention_sensitivity(replace(call, options={})).context, expected) > 1e-2


def test_sinks_are_their_definition():
    sinks = torch.linspace(-1, 2, NUM_HEADS, dtype=torch.float64)
    call = call_of(queries=4, keys=9, s_aux=sinks)
    expected = attention_by_definition(call, HEAD_DIM**-0.5, causal(4, 9), sinks=sinks)
    assert relative(attention_sensitivity(call).context, expected) < 1e-14
    assert relative(attention_sensitivity(replace(call, options={})).context, expected) > 1e-2


def test_the_scale_of_a_call():
    call = call_of(queries=1, keys=1)
    assert scaling(call) == HEAD_DIM**-0.5
    call.module.scaling = 0.4
    assert scaling(call) == 0.4
    assert scaling(replace(call, options={"scaling": 0.3})) == 0.3
    expected = attention_by_definition(call, 0.4, causal(1, 1))
    assert relative(attention_sensitivity(call).context, expected) < 1e-14


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["gemma2", "gemma3_text", "gpt2", "gpt_neox", "gpt_oss", "llama4_text", "mistral"])
def test_attention_is_that_of_hf(tiny, family, dtype):
    """Caps, sinks, windows, scales and chunks, as each family passes them to its interface."""
    hf, errors = tiny(family, dtype), {}

    class Observer:
        def control(self, _value):
            pass

        def truth(self, value):
            if value.call is not None:
                errors[value.operation.tap] = relative(
                    attention_sensitivity(value.call).context.flatten(0, 1), value.rows.flatten(1)
                )

    assert len(hf.graph.layers) == 2
    ids = torch.tensor([list(range(3, 16)), list(range(23, 36))])
    run_pair(hf, ids, Observer(), truth_dtype=torch.float64)
    assert len(errors) == 2
    assert max(errors.values()) < 1e-12


def test_keys_may_come_in_any_order():
    seen = causal(4, 9)
    call, order = call_of(queries=4, keys=9, mask=seen), torch.tensor([4, 1, 8, 0, 7, 2, 6, 3, 5])
    shuffled = replace(call, key=call.key[:, :, order], value=call.value[:, :, order], mask=seen[..., order])
    flipped = replace(shuffled, query=call.query.flip(2), mask=shuffled.mask.flip(2))
    expected = attention_sensitivity(call)
    for other, dims in ((shuffled, []), (flipped, [1])):
        found = attention_sensitivity(other)
        for name in ("context", "amplification", "score_sensitivity"):
            torch.testing.assert_close(
                getattr(found, name).flip(dims),
                getattr(expected, name),
                rtol=1e-10,
                atol=1e-6 if "score" in name else 0,
            )


def test_attention_in_pieces(monkeypatch):
    """Scores are held a few queries at a time, and nothing depends on how many."""
    call = call_of(queries=9, keys=9)
    whole = attention_sensitivity(call)
    monkeypatch.setattr(attention, "_SCORE_BYTES", 8 * NUM_HEADS * 9 * 2)
    pieces = attention_sensitivity(call)
    torch.testing.assert_close(pieces.context, whole.context, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(pieces.amplification, whole.amplification, rtol=1e-13, atol=1e-13)
    # A root of sums that cancel: exact where it matters, and without any digits where it is zero (row 0 sees one key).
    squares = (x.score_sensitivity.square() for x in (pieces, whole))
    torch.testing.assert_close(*squares, rtol=1e-12, atol=1e-13 * float(whole.score_sensitivity.square().max()))


# The formulas of how far rounding carries, against roundings that were made.

_SAMPLES = 400
_EPS = 1e-6


def rms_relative(changed, expected):
    """[rows]: RMS over samples of the relative error of each row."""
    errors = torch.stack([(x - expected).norm(dim=-1) / expected.norm(dim=-1) for x in changed])
    return errors.square().mean(dim=0).sqrt() / _EPS


def parts(call):
    """Queries, keys and values [heads, rows or keys, head size], and scores before the mask."""
    group = NUM_HEADS // NUM_KV_HEADS
    q = call.query[0]
    k, v = (x[0].repeat_interleave(group, dim=0) for x in (call.key, call.value))
    return q, k, v, torch.einsum("ntd,nsd->nts", q, k) / math.sqrt(HEAD_DIM)


def probabilities(call, scores):
    seen = causal(call.query.shape[2], call.key.shape[2])[0]
    sinks = call.options.get("s_aux")
    scores = scores.masked_fill(~seen, -math.inf)
    if sinks is None:
        return scores.softmax(-1)
    column = sinks[:, None, None].expand(*scores.shape[:2], 1)
    return torch.cat([scores, column], dim=-1).softmax(-1)[..., :-1]


SINKS = torch.linspace(-1, 1, NUM_HEADS, dtype=torch.float64)


@pytest.mark.parametrize("options", [{}, {"s_aux": SINKS}])
@pytest.mark.parametrize("scale", [0.3, 2.0])
def test_amplification_is_the_error_of_rounded_products(scale, options):
    call = call_of(queries=3, keys=12, scale=scale, **options)
    found = attention_sensitivity(call)
    _, _, v, scores = parts(call)
    generator = torch.Generator().manual_seed(9)
    products = probabilities(call, scores)[..., None] * v[:, None]  # [heads, rows, keys, head size]
    changed = (
        (products * (1 + _EPS * torch.randn(products.shape, generator=generator, dtype=torch.float64))).sum(2)
        for _ in range(_SAMPLES)
    )
    measured = rms_relative([x.transpose(0, 1).flatten(1) for x in changed], found.context[0])
    torch.testing.assert_close(found.amplification[0], measured, rtol=0.2, atol=0)


@pytest.mark.parametrize("options", [{}, {"s_aux": SINKS}])
@pytest.mark.parametrize("scale", [0.3, 2.0])
def test_score_sensitivity_is_the_error_of_rounded_scores(scale, options):
    """Every score is off by a relative rounding of its bound |q| |k| scale, as a sum of that size would be."""
    call = call_of(queries=3, keys=12, scale=scale, **options)
    found = attention_sensitivity(call)
    q, k, v, scores = parts(call)
    bound = q.norm(dim=-1)[..., None] * k.norm(dim=-1)[:, None] * HEAD_DIM**-0.5
    generator = torch.Generator().manual_seed(10)
    changed = (
        probabilities(call, scores + _EPS * bound * torch.randn(scores.shape, generator=generator, dtype=torch.float64))
        @ v
        for _ in range(_SAMPLES)
    )
    measured = rms_relative([x.transpose(0, 1).flatten(1) for x in changed], found.context[0])
    torch.testing.assert_close(found.score_sensitivity[0], measured, rtol=0.2, atol=0)


def test_sensitivities_are_of_each_request_of_a_batch():
    call = call_of(queries=5, keys=5, batch=2)
    together = attention_sensitivity(call)
    for at in range(2):
        own = slice(at, at + 1)
        alone = attention_sensitivity(replace(call, query=call.query[own], key=call.key[own], value=call.value[own]))
        torch.testing.assert_close(together.amplification[own], alone.amplification, rtol=1e-12, atol=0)
        torch.testing.assert_close(together.score_sensitivity[own], alone.score_sensitivity, rtol=1e-8, atol=1e-6)
