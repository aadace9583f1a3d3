"""Attention under its conventions, against its definition row by row and head by head."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from harness.base.metrics import rounding_unit
from harness.base.numerics import Numerics
from harness.formats.taps import Kind, Operation
from harness.judge.compare.conventions.attention import (
    CACHE,
    CACHE_FLASH,
    CACHE_PRODUCTS,
    CONVENTIONS,
    EAGER,
    MODEL,
    SCALED_FIRST,
    SCALED_FIRST_BY_ROUNDED,
)
from harness.judge.compare.conventions.entry import SuspectRows
from harness.oracle import attention
from harness.oracle.attention import probabilities, scaling
from harness.oracle.watch import AttentionCall

BATCH, HEADS, KV_HEADS, QUERIES, KEYS, SIZE = 2, 4, 2, 3, 5, 8
ROWS = torch.tensor([5, 0, 3])
"""Of the batch's six: request 1 at 2, 0 at 0, 1 at 0."""
EAGER_CODE, COARSE_CACHE = (convention.alternatives for convention in CONVENTIONS[:2])
OPERATION = Operation(tap="attention", kind=Kind.ATTENTION, inputs=("q", "k", "v"), source="attention")


def call_of(mask=None, **options):
    """Queries of the last positions of the keys."""
    generator = torch.Generator().manual_seed(0)

    def draw(rows, heads):
        return torch.randn(BATCH, heads, rows, SIZE, generator=generator, dtype=torch.float64) * 2

    return AttentionCall(
        path="attention", module=nn.Module(), query=draw(QUERIES, HEADS), key=draw(KEYS, KV_HEADS),
        value=draw(KEYS, KV_HEADS), mask=mask, options=options,
    )  # fmt: skip


def subject_of(call, *, dtype=torch.float32, hf=None, **declared):
    unknown = torch.full((3, HEADS * SIZE), torch.nan)
    return SuspectRows(
        hf=hf, operation=OPERATION, dtype=dtype, actual=unknown, expected=unknown, rows=ROWS,
        positions=torch.tensor([4, 2, 2]), call=call, declared=Numerics(**declared),
    )  # fmt: skip


def seen_of(window=None):
    """[T, S] bool."""
    at, keys = torch.arange(KEYS - QUERIES, KEYS)[:, None], torch.arange(KEYS)[None]
    return (keys <= at) & (keys > at - (window or KEYS))


def by_definition(call, seen, stored, used, *, softcap=None, sinks=None):
    """Context [rows, N * H], and how its products' rounding is amplified, [rows]."""
    contexts, amplification = [], []
    for place in ROWS.tolist():
        request, at = divmod(place, QUERIES)
        heads, products = [], 0.0
        for head in range(HEADS):
            kv_head = head // (HEADS // KV_HEADS)
            q, k, v = call.query[request, head, at], call.key[request, kv_head], call.value[request, kv_head]
            scores = stored(k)[seen[at]] @ used(q) * SIZE**-0.5
            scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
            weights = scores.exp()
            p = weights / (weights.sum() + (0 if sinks is None else sinks[head].exp()))
            heads.append(used(p) @ stored(v)[seen[at]])
            products += float((p * v[seen[at]].norm(dim=-1)).square().sum())
        contexts.append(torch.cat(heads))
        amplification.append(products**0.5 / float(contexts[-1].norm()))
    return torch.stack(contexts), torch.tensor(amplification, dtype=torch.float64)


def as_it_is(x):
    return x


SINKS = torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=torch.float64)
ADDITIVE = torch.zeros(1, 1, QUERIES, KEYS).masked_fill(~seen_of(3), torch.finfo(torch.float32).min)


@pytest.mark.parametrize(
    ("mask", "options", "window"),
    [
        (None, {}, None),
        (seen_of(2)[None, None], {}, 2),
        (None, {"softcap": 1.5}, None),
        (None, {"s_aux": SINKS}, None),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_coarse_cache_and_what_its_products_round(dtype, mask, options, window):
    def rounded(x):
        return x.to(dtype).double()

    call, seen, name = call_of(mask, **options), seen_of(window), str(dtype).removeprefix("torch.")
    alternatives = list(COARSE_CACHE(subject_of(call, cache=name)))
    assert [item.name for item in alternatives] == [text.format(name) for text in (CACHE, CACHE_PRODUCTS, CACHE_FLASH)]
    assert {item.model for item in alternatives} == {MODEL}
    parts = {"softcap": options.get("softcap"), "sinks": options.get("s_aux")}
    alone, _ = by_definition(call, seen, rounded, as_it_is, **parts)
    products, _ = by_definition(call, seen, rounded, rounded, **parts)
    for item, expected in zip(alternatives, (alone, products, products), strict=True):
        # A probability on a tie may be rounded either way by sums in another order.
        torch.testing.assert_close(item.expected(), expected, rtol=1e-9, atol=1e-9)
    assert not torch.allclose(alone, products)
    _, amplification = by_definition(call, seen, as_it_is, as_it_is, **parts)
    unit = 2 * rounding_unit(dtype) / rounding_unit(torch.float32)
    assert alternatives[0].allowance is None
    torch.testing.assert_close(alternatives[1].allowance, unit * amplification, rtol=1e-5, atol=0)
    num_seen = torch.tensor([5.0, 3.0, 3.0], dtype=torch.float64)
    torch.testing.assert_close(alternatives[2].allowance, unit * (amplification + num_seen.sqrt()), rtol=1e-5, atol=0)


def test_a_cache_of_eight_bits_has_no_products_in_its_dtype():
    def rounded(x):
        return x.to(torch.float8_e4m3fn).double()

    call = call_of()
    (alternative,) = COARSE_CACHE(subject_of(call, cache="float8_e4m3fn"))
    assert alternative.name == CACHE.format("float8_e4m3fn")
    torch.testing.assert_close(alternative.expected(), by_definition(call, seen_of(), rounded, as_it_is)[0])


@pytest.mark.parametrize(
    ("dtype", "declared", "num"),
    [
        (torch.float32, {"cache": "float16", "cache_values": "float16"}, 3),
        (torch.float32, {"cache": "float16", "cache_values": "bfloat16"}, 0),
        (torch.float32, {}, 0),
        (torch.float32, {"cache": "Q8_0"}, 0),
        (torch.float32, {"cache": "Tensor"}, 0),
        (torch.float32, {"cache": "float32"}, 0),
        (torch.float32, {"attention_inputs": "float16"}, 3),
        (torch.float32, {"cache": "float32", "cache_values": "float16", "attention_inputs": "float16"}, 3),
        (torch.float32, {"cache": "bfloat16", "cache_values": "float32", "attention_inputs": "float16"}, 0),
        (torch.bfloat16, {"attention_inputs": "float16"}, 0),
        (torch.float32, {"cache": "float64"}, 0),
        (torch.bfloat16, {"cache": "float16"}, 0),
        (torch.bfloat16, {"cache": "float8_e4m3fn"}, 1),
    ],
)
def test_where_a_coarse_cache_applies(dtype, declared, num):
    assert len(list(COARSE_CACHE(subject_of(call_of(), dtype=dtype, **declared)))) == num
    assert list(COARSE_CACHE(subject_of(None, dtype=dtype, **declared))) == []


@pytest.mark.parametrize(("num_bytes", "at_a_time"), [(0, 1), (1, 1), (2, 2), (3, 3), (9, 3)])
def test_queries_are_taken_as_many_at_a_time_as_there_is_room_for_their_scores(monkeypatch, num_bytes, at_a_time):
    call, one_query = call_of(), 8 * BATCH * HEADS * KEYS
    (whole,) = probabilities(call, call.query, call.key, call.value)
    for more, num in ((0, at_a_time), (-1, max(1, at_a_time - (num_bytes <= QUERIES)))):
        monkeypatch.setattr(attention, "_SCORE_BYTES", num_bytes * one_query + more)
        parts = list(probabilities(call, call.query, call.key, call.value))
        assert parts[0][0].shape[:3] == (BATCH, HEADS, num)
        padded = [nn.functional.pad(p, (0, KEYS - p.shape[3])) for p, _ in parts]
        torch.testing.assert_close(torch.cat(padded, dim=2), whole[0], rtol=1e-12, atol=1e-14)
        assert all(p.any(dim=2)[..., -1].all() for p, _ in parts), "no key that none of the queries sees"
        assert all(torch.equal(v, whole[1][:, :, : p.shape[3]]) for p, v in parts)
    assert whole[1].shape == (BATCH, HEADS, KEYS, SIZE)
    assert torch.equal(whole[1][:, 1], call.value[:, 0])
    assert torch.equal(whole[1][:, 2], call.value[:, 1])


@pytest.mark.parametrize("num_bytes", [1, 1 << 30])
def test_more_queries_than_a_head_has_elements(monkeypatch, num_bytes):
    """One at a time and all at once: the context of each is at its place."""
    monkeypatch.setattr(attention, "_SCORE_BYTES", num_bytes)
    x = torch.randn(1, 1, 3 * SIZE, SIZE, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    call = AttentionCall(path="", module=nn.Module(), query=x, key=x, value=x, mask=None, options={})
    rows = torch.tensor([3 * SIZE - 1, 4, SIZE])
    (alternative,) = COARSE_CACHE(replace(subject_of(call, cache="float8_e4m3fn"), rows=rows, positions=rows))
    kept = x[0, 0].to(torch.float8_e4m3fn).double()
    for at, place in enumerate(rows.tolist()):
        weights = (kept[: place + 1] @ x[0, 0, place] * SIZE**-0.5).softmax(0)
        torch.testing.assert_close(alternative.expected()[at], weights @ kept[: place + 1])
    shapes = [p.shape for p, _ in probabilities(call, x, x, x)]
    one_by_one = [(1, 1, 1, num_keys) for num_keys in range(1, 3 * SIZE + 1)]
    assert shapes == (one_by_one if num_bytes == 1 else [(1, 1, 3 * SIZE, 3 * SIZE)])


def test_an_additive_mask_hides_what_it_makes_small():
    call = call_of(ADDITIVE)
    hidden = torch.cat([p for p, _ in probabilities(call, call.query, call.key, call.value)], dim=2) == 0
    assert torch.equal(hidden, ~seen_of(3).expand(BATCH, HEADS, -1, -1))


# HF's eager code.


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_eager_code_is_given_everything_in_the_dtype(dtype):
    arguments = {}

    def eager(module, query, key, value, mask, **options):
        arguments.update(query=query, key=key, value=value, mask=mask)
        return torch.arange(BATCH * QUERIES * HEADS * SIZE).view(BATCH, QUERIES, HEADS, SIZE).to(dtype), None

    call = call_of()
    alternative, *_ = EAGER_CODE(
        subject_of(call, dtype=dtype, hf=SimpleNamespace(eager_attention=lambda _module: eager))
    )
    assert (alternative.name, alternative.allowance) == (EAGER, None)
    assert (alternative.model.roundings, alternative.model.accumulation, alternative.model.products) == (1, 25, 8)
    rows = torch.arange(BATCH * QUERIES * HEADS * SIZE).view(BATCH * QUERIES, HEADS * SIZE).to(dtype)
    assert torch.equal(alternative.expected(), rows[ROWS].double())
    for part in ("query", "key", "value"):
        assert torch.equal(arguments[part], getattr(call, part).to(dtype))
    mask = torch.zeros(1, 1, QUERIES, KEYS, dtype=dtype).masked_fill(~seen_of(), torch.finfo(dtype).min)
    assert torch.equal(arguments["mask"], mask)


def test_the_eager_code_is_given_as_many_queries_as_memory_is_meant_for(monkeypatch):
    num_queries = []

    def eager(module, query, key, value, mask, **options):
        num_queries.append(query.shape[2])
        key, value = (x.repeat_interleave(HEADS // KV_HEADS, dim=1) for x in (key, value))
        return ((query @ key.transpose(2, 3) + mask).softmax(dim=-1) @ value).transpose(1, 2), None

    hf = SimpleNamespace(eager_attention=lambda _module: eager)
    (convention,) = EAGER_CODE(subject_of(call_of(), hf=hf))
    whole = convention.expected()
    monkeypatch.setattr(attention, "_SCORE_BYTES", 2 * 4 * BATCH * HEADS * KEYS)
    torch.testing.assert_close(convention.expected(), whole, rtol=1e-6, atol=1e-7)
    assert num_queries == [QUERIES, 2, 1]


@pytest.mark.parametrize(("name", "scale_dtype"), [(SCALED_FIRST, torch.float64), (SCALED_FIRST_BY_ROUNDED, None)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_queries_may_be_scaled_before_the_product(dtype, name, scale_dtype):
    arguments = {}

    def eager(module, query, key, value, mask, **options):
        arguments.update(query=query, scaling=options["scaling"])
        return torch.zeros(BATCH, QUERIES, HEADS, SIZE, dtype=dtype), None

    call = call_of()
    subject = subject_of(call, dtype=dtype, hf=SimpleNamespace(eager_attention=lambda _module: eager))
    next(item for item in EAGER_CODE(subject) if item.name == name).expected()
    scale = torch.tensor(scaling(call), dtype=scale_dtype or dtype)
    assert torch.equal(arguments["query"], (call.query.to(dtype).double() * scale.double()).to(dtype))
    assert arguments["scaling"] == 1


def test_in_float32_queries_are_scaled_no_other_way():
    hf = SimpleNamespace(eager_attention=lambda _module: print)
    assert [item.name for item in EAGER_CODE(subject_of(call_of(), dtype=torch.float32, hf=hf))] == [EAGER]


def test_without_eager_code_there_is_no_such_convention():
    hf = SimpleNamespace(eager_attention=lambda _module: None)
    assert list(EAGER_CODE(subject_of(call_of(), hf=hf))) == []
    hf = SimpleNamespace(eager_attention=lambda _module: print)
    assert list(EAGER_CODE(replace(subject_of(None, hf=hf), call=None))) == []
