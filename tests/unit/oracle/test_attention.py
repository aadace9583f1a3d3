"""How sensitive attention is to rounding: against its definition in float64, and against errors that were made."""

import math
from dataclasses import dataclass, replace

import pytest
import torch
from torch import nn
from transformers.models.gemma2.modeling_gemma2 import Gemma2PreTrainedModel

from harness.oracle import attention
from harness.oracle.attention import attention_sensitivity, scaling, visible_keys
from harness.oracle.model import load_model
from harness.oracle.paired import run_pair
from harness.oracle.watch import AttentionCall

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 6, 2, 16
WINDOW = 5
SCALE = HEAD_DIM**-0.5
SINKS = torch.linspace(-1, 2, NUM_HEADS, dtype=torch.float64)


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


@dataclass(frozen=True, kw_only=True)
class Definition:
    """Attention and its sensitivities by their definition, in float64."""

    context: torch.Tensor
    """[B, T, N, H]."""
    amplification: torch.Tensor
    """[B, T]."""
    score_sensitivity: torch.Tensor
    """[B, T]."""
    without_cancelling: torch.Tensor
    """[B, T]: the score sensitivity, had ||v - o|| been ||v|| + ||o||: what its rounding is relative to."""


def by_definition(call, scale, seen, *, softcap=None, sinks=None):
    """Sum up row by row, head by head."""
    batch, num_heads, num_queries, _ = call.query.shape
    group = num_heads // call.key.shape[1]
    query, key, value = (x.double() for x in (call.query, call.key, call.value))
    context = torch.zeros(batch, num_queries, num_heads, value.shape[-1], dtype=torch.float64)
    products, scores, largest = torch.zeros(3, batch, num_queries, dtype=torch.float64)
    for b, t, n in torch.cartesian_prod(*(torch.arange(size) for size in (batch, num_queries, num_heads))).tolist():
        there = seen.expand(batch, -1, -1, -1)[b, 0, t]
        q, k, v = query[b, n, t], key[b, n // group, there], value[b, n // group, there]
        terms = torch.einsum("h,sh->sh", q, k) * scale
        score = terms.sum(dim=1)
        bound = (len(q) * (terms.square().sum(dim=1) + score.square() / 3)).sqrt()
        if softcap is not None:
            score = softcap * torch.tanh(score / softcap)
        weights = torch.exp(score - score.max())
        p = weights / (weights.sum() + (0.0 if sinks is None else torch.exp(sinks[n].double() - score.max())))
        o = torch.einsum("s,sh->h", p, v)
        context[b, t, n] = o
        products[b, t] += (p * v.norm(dim=-1)).square().sum()
        scores[b, t] += (p * bound * (v - o).norm(dim=-1)).square().sum()
        largest[b, t] += (p * bound * (v.norm(dim=-1) + o.norm())).square().sum()
    norm = context.flatten(2).norm(dim=-1)
    products, scores, largest = (x.sqrt() / norm for x in (products, scores, largest))
    return Definition(context=context, amplification=products, score_sensitivity=scores, without_cancelling=largest)


def assert_same(actual, expected):
    """In float32: they are factors of a bound.

    The second is the root of a difference of squares. So its square is as exact as the squares are large, and it has no
    digit where it is zero (a row that sees one key).
    """
    assert actual.amplification.dtype == actual.score_sensitivity.dtype == torch.float32
    torch.testing.assert_close(actual.amplification.double(), expected.amplification, rtol=1e-5, atol=0)
    errors = actual.score_sensitivity.double().square() - expected.score_sensitivity.square()
    assert bool((errors.abs() <= 1e-6 * expected.without_cancelling.square()).all())


def assert_differs(actual, expected):
    for name in ("amplification", "score_sensitivity"):
        assert relative(getattr(actual, name).double(), getattr(expected, name)) > 1e-3


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(("queries", "keys"), [(9, 9), (1, 9), (4, 9), (1, 1)])
def test_sensitivities_are_their_definition(queries, keys, batch, dtype):
    call = call_of(queries=queries, keys=keys, batch=batch, dtype=dtype)
    assert torch.equal(visible_keys(call), causal(queries, keys))
    sensitivity = attention_sensitivity(call)
    assert sensitivity.amplification.shape == sensitivity.score_sensitivity.shape == (batch, queries)
    assert_same(sensitivity, by_definition(call, SCALE, causal(queries, keys)))


@pytest.mark.parametrize("as_numbers", [torch.float64, torch.float32, torch.bfloat16, torch.float16, None])
def test_a_window_is_what_the_mask_says(as_numbers):
    """HF says what is seen by a mask, of booleans or of what is added to the scores."""
    seen = causal(11, 17, WINDOW)
    mask = seen
    if as_numbers is not None:
        mask = torch.zeros(seen.shape, dtype=as_numbers).masked_fill(~seen, torch.finfo(as_numbers).min)
    call = call_of(queries=11, keys=17, mask=mask)
    assert torch.equal(visible_keys(call), seen)
    some = torch.tensor([7, 0, 10])
    assert torch.equal(visible_keys(call, some), seen[:, :, some])
    assert torch.equal(visible_keys(replace(call, mask=None), some), causal(11, 17)[:, :, some])
    assert_same(attention_sensitivity(call), by_definition(call, SCALE, seen))
    assert_differs(attention_sensitivity(replace(call, mask=None)), by_definition(call, SCALE, seen))


def test_a_mask_of_each_request():
    """Padded requests have masks of their own."""
    seen = torch.cat([causal(4, 9), causal(4, 9, WINDOW)])
    call = call_of(queries=4, keys=9, batch=2, mask=seen)
    assert torch.equal(visible_keys(call), seen)
    assert_same(attention_sensitivity(call), by_definition(call, SCALE, seen))


def test_a_mask_that_is_longer_than_the_keys():
    """HF's masks of a static cache are as long as the cache may become."""
    seen = causal(4, 9)
    call = call_of(queries=4, keys=9, mask=torch.cat([seen, torch.ones(1, 1, 4, 3, dtype=torch.bool)], dim=-1))
    assert torch.equal(visible_keys(call), seen)
    assert_same(attention_sensitivity(call), by_definition(call, SCALE, seen))


def test_a_cap_on_the_scores():
    call = call_of(queries=4, keys=9, scale=2.0, softcap=3.0)
    expected = by_definition(call, SCALE, causal(4, 9), softcap=3.0)
    assert_same(attention_sensitivity(call), expected)
    assert_differs(attention_sensitivity(replace(call, options={})), expected)


def test_sinks():
    call = call_of(queries=4, keys=9, s_aux=SINKS)
    expected = by_definition(call, SCALE, causal(4, 9), sinks=SINKS)
    assert_same(attention_sensitivity(call), expected)
    assert_differs(attention_sensitivity(replace(call, options={})), expected)


def test_the_scale_of_a_call():
    """What is passed, else what the module has, else that of the head's size."""
    call = call_of(queries=4, keys=9)
    assert scaling(call) == SCALE
    call.module.scaling = 0.4
    assert scaling(call) == 0.4
    assert scaling(replace(call, options={"scaling": None})) == 0.4
    passed = replace(call, options={"scaling": 0.7})
    assert scaling(passed) == 0.7
    for item, scale in ((call, 0.4), (passed, 0.7)):
        assert_same(attention_sensitivity(item), by_definition(item, scale, causal(4, 9)))


def test_values_of_another_size_than_the_keys():
    """As in latent attention."""
    call = call_of(queries=4, keys=9)
    call = replace(call, value=call.value[..., :5])
    assert_same(attention_sensitivity(call), by_definition(call, SCALE, causal(4, 9)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "family", ["axk2", "gemma2", "gemma3_text", "gpt2", "gpt_neox", "gpt_oss", "llama4_text", "mistral"]
)
def test_attention_of_a_family_is_read_as_hf_reads_it(tiny, family, dtype):
    """Caps, sinks, windows, scales and chunks, as each family passes them: the context by definition is HF's own."""
    hf, calls = tiny(family, dtype), {}

    class Observer:
        def control(self, _value):
            pass

        def truth(self, value):
            if value.call is not None:
                calls[value.operation.tap] = value.call, value.rows.clone()

        def part_begins(self, call):
            pass

        def part_done(self):
            pass

    assert len(hf.graph.layers) == 2
    ids = torch.tensor([list(range(3, 16)), list(range(23, 36))])
    run_pair(hf, ids, Observer(), truth_dtype=torch.float64)
    assert len(calls) == 2
    for call, rows in calls.values():
        expected = by_definition(
            call,
            scaling(call),
            visible_keys(call),
            softcap=call.options.get("softcap"),
            sinks=call.options.get("s_aux"),
        )
        assert relative(expected.context.flatten(0, 1), rows) < 1e-12
        assert_same(attention_sensitivity(call), expected)


def test_a_cap_on_the_scores_is_not_left_to_sdpa(tiny_folder, streamed, monkeypatch):
    """Transformers 5.17 says that Gemma 2 may run with SDPA, which has no cap."""
    monkeypatch.setattr(Gemma2PreTrainedModel, "_supports_sdpa", True)
    folder = tiny_folder("gemma2")
    for hf in (load_model(folder, dtype=torch.float32), streamed(folder)):
        assert hf.config.attn_logit_softcapping is not None
        assert hf.config._attn_implementation == "eager"


def test_keys_may_come_in_any_order():
    seen = causal(4, 9)
    call, order = call_of(queries=4, keys=9, mask=seen), torch.tensor([4, 1, 8, 0, 7, 2, 6, 3, 5])
    shuffled = replace(call, key=call.key[:, :, order], value=call.value[:, :, order], mask=seen[..., order])
    flipped = replace(shuffled, query=call.query.flip(2), mask=shuffled.mask.flip(2))
    expected = by_definition(call, SCALE, seen)
    assert_same(attention_sensitivity(shuffled), expected)
    in_reverse = Definition(**{name: x.flip(1) for name, x in vars(expected).items()})
    assert_same(attention_sensitivity(flipped), in_reverse)


@pytest.mark.parametrize("num_queries_at_a_time", [1, 2, 9])
def test_attention_in_pieces(monkeypatch, num_queries_at_a_time):
    """Scores are held a few queries at a time, and nothing depends on how many."""
    call, sizes = call_of(queries=9, keys=9, mask=causal(9, 9, WINDOW)), []
    some = attention._sensitivities
    monkeypatch.setattr(attention, "_SCORE_BYTES", 4 * NUM_HEADS * 9 * num_queries_at_a_time)
    monkeypatch.setattr(attention, "_sensitivities", lambda *args: sizes.append(args[1].shape[2]) or some(*args))
    assert_same(attention_sensitivity(call), by_definition(call, SCALE, causal(9, 9, WINDOW)))
    assert max(sizes) == num_queries_at_a_time
    assert sum(sizes) == 9


def test_each_request_of_a_batch_is_by_itself():
    call = call_of(queries=5, keys=5, batch=2)
    together = attention_sensitivity(call)
    for at in range(2):
        request = slice(at, at + 1)
        alone = replace(call, query=call.query[request], key=call.key[request], value=call.value[request])
        single = replace(
            together,
            amplification=together.amplification[request],
            score_sensitivity=together.score_sensitivity[request],
        )
        assert_same(single, by_definition(alone, SCALE, causal(5, 5)))


# The formulas of how far rounding carries, against roundings that were made.

_SAMPLES = 400
_EPS = 1e-6


def rms_relative(changed, expected):
    """[rows] in float32: RMS over samples of the relative error of each row; all are [heads, rows, head size]."""
    changed, expected = (x.transpose(-3, -2).flatten(-2) for x in (torch.stack(list(changed)), expected))
    errors = (changed - expected).norm(dim=-1) / expected.norm(dim=-1)
    return (errors.square().mean(dim=0).sqrt() / _EPS).float()


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


@pytest.mark.parametrize("options", [{}, {"s_aux": SINKS}])
@pytest.mark.parametrize("scale", [0.3, 2.0])
def test_amplification_is_the_error_of_rounded_products(scale, options):
    call = call_of(queries=3, keys=12, scale=scale, **options)
    sensitivity = attention_sensitivity(call)
    _, _, v, scores = parts(call)
    generator = torch.Generator().manual_seed(9)
    products = probabilities(call, scores)[..., None] * v[:, None]  # [heads, rows, keys, head size]
    changed = (
        (products * (1 + _EPS * torch.randn(products.shape, generator=generator, dtype=torch.float64))).sum(2)
        for _ in range(_SAMPLES)
    )
    measured = rms_relative(changed, probabilities(call, scores) @ v)
    torch.testing.assert_close(sensitivity.amplification[0], measured, rtol=0.2, atol=0)


@pytest.mark.parametrize("options", [{}, {"s_aux": SINKS}])
@pytest.mark.parametrize("scale", [0.3, 2.0])
def test_score_sensitivity_is_the_error_of_rounded_scores(scale, options):
    """Every score is off by a relative rounding of what its sum over the channels may be rounded by."""
    call = call_of(queries=3, keys=12, scale=scale, **options)
    sensitivity = attention_sensitivity(call)
    q, k, v, scores = parts(call)
    squares = torch.einsum("ntd,nsd->nts", q.square(), k.square()) / HEAD_DIM
    bound = (HEAD_DIM * (squares + scores.square() / 3)).sqrt()
    generator = torch.Generator().manual_seed(10)
    changed = (
        probabilities(call, scores + _EPS * bound * torch.randn(scores.shape, generator=generator, dtype=torch.float64))
        @ v
        for _ in range(_SAMPLES)
    )
    measured = rms_relative(changed, probabilities(call, scores) @ v)
    torch.testing.assert_close(sensitivity.score_sensitivity[0], measured, rtol=0.2, atol=0)


@pytest.mark.parametrize("dominant", [1.0, 8.0])
def test_a_score_is_rounded_at_every_channel(dominant):
    """In any order of the channels: one that makes most of a score makes all sums after it as large."""
    call = call_of(queries=3, keys=12)
    factor = torch.ones(HEAD_DIM, dtype=torch.float64)
    factor[3] = dominant
    call = replace(call, query=call.query * factor, key=call.key * factor)
    q, k, v, scores = parts(call)
    terms = q[:, :, None] * k[:, None] / math.sqrt(HEAD_DIM)  # [heads, rows, keys, head size]
    generator = torch.Generator().manual_seed(11)

    def rounded():
        sums = terms[..., torch.randperm(HEAD_DIM, generator=generator)].cumsum(dim=-1)
        return (sums * torch.randn(sums.shape, generator=generator, dtype=torch.float64)).sum(dim=-1)

    changed = (probabilities(call, scores + _EPS * rounded()) @ v for _ in range(_SAMPLES))
    measured = rms_relative(changed, probabilities(call, scores) @ v)
    share = measured / attention_sensitivity(call).score_sensitivity[0]
    assert bool((share < 1).all())
    assert bool((share > 0.4).all())
