import math

import pytest
import torch

from ....tiny_models import WINDOW
from ..conftest import BLOCK_SIZE

TAP = "model.layers.1.attention"
Q, K, V = "model.layers.1.q_rope", "model.layers.1.k_rope", "model.layers.1.self_attn.v_proj"


def attended(
    bench, *, visible=None, scale=None, heads=None, values_of=None, softmax=None, key=None, value=None, merge=None
):
    """Attention of every row in float64; each part can be replaced. `visible` gets own and key's (position, step)."""
    rows, head_dim = bench.rows(), bench.head_dim
    q, k, v = (bench.tap(name).unflatten(1, (-1, head_dim)) for name in (Q, K, V))
    k, v = k if key is None else key.view_as(k), v if value is None else value.view_as(v)
    groups = q.shape[1] // k.shape[1]
    heads = torch.arange(q.shape[1]) // groups if heads is None else heads
    values_of = heads if values_of is None else values_of
    output = torch.empty_like(q)
    for request in rows.request.unique():
        own = (rows.request == request).nonzero()[:, 0]
        own = own[rows.position[own].argsort()]
        position, step = rows.position[own], rows.step[own]
        scores = torch.einsum("tnh,snh->nts", q[own], k[own][:, heads]) * (scale or head_dim**-0.5)
        mask = position[None, :] <= position[:, None]
        if visible is not None:
            mask = visible(position[:, None], step[:, None], position[None, :], step[None, :])
        scores = scores.masked_fill(~mask, -torch.inf)
        if merge is not None:
            output[own] = merge(scores, v[own][:, values_of])
            continue
        p = (softmax or (lambda s: s.softmax(-1)))(scores)
        output[own] = torch.einsum("nts,snh->tnh", p.nan_to_num(0.0), v[own][:, values_of])
    return output.flatten(1)


def test_the_definition_is_no_mistake(bench):
    assert torch.allclose(attended(bench()), bench().tap(TAP), atol=1e-5)


def test_masks(bench):
    bench = bench(schedule="chunked")
    masks = {
        "causal mask off by one: a row does not see itself": lambda p, s, q, t: q < p,
        "causal mask off by one: a row sees the next token": lambda p, s, q, t: (q <= p + 1) & (t <= s),
        "no causal mask: a row sees all tokens of its step": lambda p, s, q, t: t <= s,
        "a row sees only the tokens of its own step: the cache is not read": lambda p, s, q, t: (q <= p) & (t == s),
        "a row does not see the tokens of its own step": lambda p, s, q, t: (q <= p) & (t != s),
        "a row sees only the last 9 tokens": lambda p, s, q, t: (q <= p) & (q > p - 9),
        "the first 2 tokens are not seen": lambda p, s, q, t: (q <= p) & (q >= 2),
    }
    for cause, visible in masks.items():
        found = bench.explain(TAP, attended(bench, visible=visible))
        assert found.cause == cause
        assert found.residual_after < 30


def test_mask_aligned_top_left(bench):
    bench = bench(schedule="chunked")
    rows = bench.rows()
    first = {(r, s): int(rows.position[(rows.request == r) & (rows.step == s)].min())
             for r in (0, 1) for s in rows.step[rows.request == r].unique().tolist()}  # fmt: skip
    right, wrong = bench.tap(TAP), torch.empty_like(bench.tap(TAP))
    for request in (0, 1):

        def visible(p, s, q, t, request=request):
            begin = torch.tensor([first.get((request, step), 0) for step in s[:, 0].tolist()])[:, None]
            return q <= p - begin

        own = rows.request == request
        wrong[own] = attended(bench, visible=visible)[own]
    found = bench.explain(TAP, wrong)
    assert not torch.equal(right, wrong)
    assert found.cause == "causal mask aligned top-left instead of bottom-right"
    assert found.scope == "rows that are not in their request's first step"


def test_scales(bench):
    bench = bench()
    hidden, own = bench.config.hidden_size, bench.head_dim**-0.5
    scales = {
        f"missing: 1 instead of {own:.4g}": 1.0,
        f"taken from the hidden size: {hidden**-0.5:.4g} instead of {own:.4g}": hidden**-0.5,
        f"in base 2 without log2(e): {own * math.log(2):.4g} instead of {own:.4g}": own * math.log(2),
        f"applied twice: {own * own:.4g} instead of {own:.4g}": own * own,
        f"with log2(e) though the base is e: {own / math.log(2):.4g} instead of {own:.4g}": own / math.log(2),
        f"taken from the number of heads: {6**-0.5:.4g} instead of {own:.4g}": 6**-0.5,
    }
    for name, scale in scales.items():
        assert bench.explain(TAP, attended(bench, scale=scale)).cause == f"the softmax scale is {name}"
    for scale in (0.2, own * math.exp(-2.5), own * math.exp(1.5)):
        fitted = bench.explain(TAP, attended(bench, scale=scale))
        assert fitted.cause == f"the softmax scale is {scale:.6g} instead of {own:.6g}"
        assert fitted.num_fitted == 1


def test_kv_heads(bench):
    bench = bench()
    tiled = torch.arange(6) % 2
    found = bench.explain(TAP, attended(bench, heads=tiled))
    assert found.cause == "KV heads are tiled instead of repeated"
    assert found.detail.endswith("[0, 1, 0, 1, 0, 1]")
    other = torch.tensor([1, 1, 1, 0, 0, 0])
    found = bench.explain(TAP, attended(bench, heads=other))
    assert found.cause == "query heads read the wrong KV heads"
    assert found.detail == "KV head of each query head: [1, 1, 1, 0, 0, 0]"


def test_padding(bench):
    bench = bench()
    right, rows = attended(bench), bench.rows()
    q, k = (bench.tap(name).unflatten(1, (-1, bench.head_dim)) for name in (Q, K))
    wrong = right.unflatten(1, (6, -1)).clone()
    decode = ((rows.request == 1) & (rows.position >= 11)).nonzero()[:, 0]
    for at in decode.tolist():
        own = (rows.request == 1) & (rows.position <= rows.position[at])
        keys = k[own].repeat_interleave(3, dim=1)
        total = (torch.einsum("nh,snh->ns", q[at], keys) * bench.head_dim**-0.5).exp().sum(1)
        wrong[at] *= (total / (total + 7))[:, None]
    found = bench.explain(TAP, wrong.flatten(1))
    assert found.cause == "padding is attended to: keys of zeros take part"
    assert found.scope == "decode rows of request 1"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_coarse_softmax(bench, dtype):
    bench = bench()
    wrong = attended(bench, softmax=lambda s: s.softmax(-1).to(dtype).double())
    found = bench.explain(TAP, wrong)
    assert found.cause == f"the softmax is in {str(dtype).removeprefix('torch.')}"


def split(weigh, size=16):
    def merge(scores, v):
        pieces = [scores[..., at : at + size] for at in range(0, scores.shape[-1], size)]
        outputs = torch.stack(
            [
                torch.einsum("nts,snh->nth", piece.softmax(-1).nan_to_num(0.0), v[at * size : (at + 1) * size])
                for at, piece in enumerate(pieces)
            ]
        )
        weights = weigh(torch.stack([p.logsumexp(-1) for p in pieces]), torch.stack([p.amax(-1) for p in pieces]))
        return (weights[..., None] * outputs).sum(0).transpose(0, 1)

    return merge


def test_split_kv(bench):
    bench = bench()
    merges = {
        "split KV: natural log-sum-exp is merged in base 2": lambda s, m: (s * math.log(2)).softmax(0),
        "split KV: the pieces are not rescaled to a common maximum": lambda s, m: (
            (s - m).nan_to_num(-torch.inf).softmax(0)
        ),
        "split KV: the pieces are averaged": lambda s, m: s.isfinite() / s.isfinite().sum(0),
        "split KV: the pieces are summed without weights": lambda s, m: s.isfinite().double(),
    }
    for cause, weigh in merges.items():
        found = bench.explain(TAP, attended(bench, merge=split(weigh)))
        begins = "the first bad row is at position 16 of request 0, where block 2 begins"
        assert (found.cause, found.detail) == (cause, f"pieces of 16 tokens; {begins}")


def test_sliding_window(bench):
    bench, window = bench("mistral"), WINDOW
    wrong = {
        f"sliding window off by one (too wide): {window + 1} instead of {window}": lambda p, s, q, t: (
            (q <= p) & (q > p - window - 1)
        ),
        f"sliding window off by one (too narrow): {window - 1} instead of {window}": lambda p, s, q, t: (
            (q <= p) & (q > p - window + 1)
        ),
        "the sliding window is ignored": lambda p, s, q, t: q <= p,
    }
    right = attended(bench, visible=lambda p, s, q, t: (q <= p) & (q > p - window))
    assert torch.allclose(right, bench.tap(TAP), atol=1e-4)
    for cause, visible in wrong.items():
        found = bench.explain(TAP, attended(bench, visible=visible))
        assert found.cause == cause
        assert found.num_explained == found.num_rows


def test_what_only_later_chunks_get_wrong(bench):
    bench = bench(schedule="chunked")
    rows = bench.rows()
    first = torch.stack([rows.position[(rows.step == step) & (rows.request == request)].min()
                         for step, request in zip(rows.step.tolist(), rows.request.tolist(), strict=True)])  # fmt: skip
    start = {(int(s), int(p)): int(f) for s, p, f in zip(rows.step, rows.position, first, strict=True)}

    def begin(step, position):
        return torch.tensor(
            [start.get(each, 0) for each in zip(step[:, 0].tolist(), position[:, 0].tolist(), strict=True)]
        )

    unseen = attended(bench, visible=lambda p, s, q, t: (q <= p) & (q != begin(s, p)[:, None] - 1))
    assert bench.explain(TAP, unseen).cause == "a row does not see the last token of the step before"


@pytest.mark.parametrize("multiple", [8, 16, 32])
def test_keys_padded_to_a_multiple(bench, multiple):
    bench = bench()
    rows = bench.rows()
    wrong = attended(bench).unflatten(1, (6, -1)).clone()
    q, k = (bench.tap(name).unflatten(1, (-1, bench.head_dim)) for name in (Q, K))
    for at in range(len(rows)):
        own = (rows.request == rows.request[at]) & (rows.position <= rows.position[at])
        context = int(rows.position[(rows.request == rows.request[at]) & (rows.step == rows.step[at])].max()) + 1
        keys = k[own].repeat_interleave(3, dim=1)
        total = (torch.einsum("nh,snh->ns", q[at], keys) * bench.head_dim**-0.5).exp().sum(1)
        wrong[at] *= (total / (total + -context % multiple))[:, None]
    found = bench.explain(TAP, wrong.flatten(1))
    padded = f"padding is attended to: keys are padded with zeros to a multiple of {multiple}"
    if multiple == BLOCK_SIZE:  # what is after a request's end in its block is zeros, too
        assert found.cause == f"reads past the context length, or {padded}"
    else:
        assert found.cause == padded


def test_values_or_keys_of_other_kv_heads(bench):
    bench = bench()
    num_heads, num_kv = bench.config.num_attention_heads, bench.config.num_key_value_heads
    own = torch.arange(num_heads) // (num_heads // num_kv)
    other = (own + 1) % num_kv
    found = bench.explain(TAP, attended(bench, values_of=other))
    assert found.cause == "query heads read the values of the wrong KV heads, and the right keys"
    assert found.detail == f"KV head of each query head: {other.tolist()}"
    found = bench.explain(TAP, attended(bench, heads=other, values_of=own))
    assert found.cause == "query heads read the keys of the wrong KV heads, and the right values"
    assert bench.explain(TAP, attended(bench, heads=other)).cause == "query heads read the wrong KV heads"


def capped(cap):
    return lambda scores: torch.where(scores == -torch.inf, scores, cap * torch.tanh(scores / cap)).softmax(-1)


@pytest.mark.parametrize(("cap", "num_fitted"), [(1.5, 1), (15.0, 0)])
def test_a_soft_cap_that_the_model_does_not_have(bench, cap, num_fitted):
    bench = bench()
    found = bench.explain(TAP, attended(bench, softmax=capped(cap)))
    assert found.cause == f"a soft cap of {cap:g} is applied to the scores, which the model does not have"
    assert found.num_fitted == num_fitted


def test_sinks_that_the_model_does_not_have(bench):
    bench = bench()
    num_heads = bench.config.num_attention_heads
    sinks = torch.linspace(-1, 2, num_heads, dtype=torch.float64)

    def with_sinks(scores):
        column = sinks[:, None, None].expand(*scores.shape[:2], 1)
        return torch.cat((scores, column), dim=-1).softmax(-1)[..., :-1]

    found = bench.explain(TAP, attended(bench, softmax=with_sinks))
    assert found.cause == "attention sinks take part in the softmax, which the model does not have"
    assert found.num_fitted == num_heads


def test_one_more_in_the_sum_of_the_exponentials(bench):
    bench = bench()

    def with_a_one(scores):
        return torch.cat((scores, torch.zeros_like(scores[..., :1])), dim=-1).softmax(-1)[..., :-1]

    found = bench.explain(TAP, attended(bench, softmax=with_a_one))
    assert "one is added to the sum of the exponentials: a key of zeros, or a sink whose logit is 0" in found.cause
    assert found.num_fitted == 0


def test_a_scale_that_is_wrong_for_one_request_alone(bench):
    bench = bench()
    wrong = (bench.rows().request == 0)[:, None]
    output = torch.where(wrong, attended(bench, scale=1.0), attended(bench))
    assert bench.explain(TAP, output).cause == f"the softmax scale is missing: 1 instead of {bench.head_dim**-0.5:.4g}"
