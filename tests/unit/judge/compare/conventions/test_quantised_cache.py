"""Attention over a quantised cache, row by row and head by head over what `cache_blocks` makes of keys and values."""

import math

import pytest
import torch
from torch import nn

from harness.base.metrics import rounding_unit
from harness.base.numerics import Numerics
from harness.formats.taps import Kind, Operation
from harness.judge.compare.cache_format import CacheFormat, Stored, quantised, rounded_sums
from harness.judge.compare.conventions import attention
from harness.judge.compare.conventions.attention import CONVENTIONS, KEPT, MODEL, ROUNDED_PROBABILITIES, ROUNDED_SUMS
from harness.judge.compare.conventions.entry import SuspectRows
from harness.oracle.watch import AttentionCall

from ..judgements import draw

QUANTISED_CACHE = CONVENTIONS[2].alternatives
BATCH, HEADS, KV_HEADS, TOKENS, SIZE = 2, 4, 2, 5, 64
ROWS = torch.tensor([9, 0, 6])
UNIT = rounding_unit(torch.float32)


def call_of(seed=0):
    query = draw(BATCH, HEADS, TOKENS, SIZE, seed=seed)
    key, value = (draw(BATCH, KV_HEADS, TOKENS, SIZE, seed=seed + more) + 0.5 for more in (1, 2))
    return AttentionCall(path="", module=nn.Module(), query=query, key=key, value=value, mask=None, options={})


def subject_of(call, *, dtype=torch.float32, **declared):
    unknown = torch.full((3, 4), torch.nan)
    return SuspectRows(
        hf=None, operation=Operation(tap="a", kind=Kind.ATTENTION, inputs=("q", "k", "v"), source="a"), dtype=dtype,
        actual=unknown, expected=unknown, rows=ROWS, positions=ROWS % TOKENS, call=call, declared=Numerics(**declared),
    )  # fmt: skip


def attend(query, key, value, used=lambda p: p):
    """[rows, N, H] and the probabilities by row and head."""
    contexts, weights = [], {}
    for place in ROWS.tolist():
        request, at = divmod(place, TOKENS)
        heads = []
        for head in range(HEADS):
            kv_head = head // (HEADS // KV_HEADS)
            scores = key[request, kv_head, : at + 1] @ query[request, head, at] * SIZE**-0.5
            weights[place, head] = scores.softmax(0)
            heads.append(used(weights[place, head]) @ value[request, kv_head, : at + 1])
        contexts.append(torch.stack(heads))
    return torch.stack(contexts), weights


FORMATS_OF = [
    ("Q8_0", None, (0, 0), 0),
    ("Q4_0", "Q5_1", (0, 0), 0),
    ("Q4_1", "Q8_0", (0, 0), 0),
    ("Q8_0", "float16", (0, 0), 0),
    ("Q5_1", "bfloat16", (64, 0), 64),
    ("float16", "Q8_0", (0, 64), 64),
    ("float16", "bfloat16", (0, 0), 0),
    ("float32", "float16", (0, 0), 0),
    ("float16", "IQ4_NL", (0, 0), 0),
    ("Q5_0", "Q4_0", (64, 32), 0),
]


@pytest.mark.parametrize(("keys", "values", "rotations", "interleaved"), FORMATS_OF)
def test_attention_over_what_the_cache_holds(keys, values, rotations, interleaved):
    """A score adds up blocks: of queries in 8 bits with those of the keys, and sums of queries with minima of keys."""
    call, held = call_of(), values or keys
    declared = {"cache": keys, "cache_values": values, "cache_rotations": rotations, "interleaved_heads": interleaved}
    alternatives = list(QUANTISED_CACHE(subject_of(call, **declared)))
    of_keys = CacheFormat(name=keys, interleaved_heads=interleaved, rotation=rotations[0])
    of_values = CacheFormat(name=held, rotation=rotations[1])
    query, key = of_keys.turned(call.query), of_keys.stored(call.key)
    if keys.startswith("float"):
        query, k = query.to(getattr(torch, keys)).double(), key.values
    else:
        is_exact = not rotations[0]
        sums, query = rounded_sums(query, is_exact=is_exact), quantised(query, "Q8_0", is_exact=is_exact).values
        k = key.values
        if keys.endswith("1"):
            query, k = torch.cat((query, sums), dim=-1), torch.cat((k, key.minima), dim=-1)
    names = {"values": str(held), "keys": keys}
    expected_names = [KEPT.format(names["keys"], names["values"])]
    if held in ("float16", "bfloat16"):
        expected_names += [text.format(keys, held) for text in (ROUNDED_PROBABILITIES, ROUNDED_SUMS)]
    assert [item.name for item in alternatives] == expected_names
    for at, item in enumerate(alternatives):

        def used(p, at=at):
            return p if at == 0 else p.to(of_values.dtype).double()

        context, _ = attend(query, k, of_values.stored(call.value).values, used)
        torch.testing.assert_close(item.expected(), of_values.unturned(context).flatten(1), rtol=1e-9, atol=1e-9)
        assert item.model == MODEL
    if len(alternatives) > 1:
        context, weights = attend(call.query, call.key, call.value)
        coarse = 2 * rounding_unit(of_values.dtype) / UNIT
        for row, place in enumerate(ROWS.tolist()):
            norms = call.value[place // TOKENS].norm(dim=-1)
            products = sum(
                float((weights[place, head] * norms[head // 2, : place % TOKENS + 1]).square().sum())
                for head in range(HEADS)
            )
            amplification = math.sqrt(products) / float(context[row].norm())
            more = [float(alternatives[at].allowance[row] - alternatives[0].allowance[row]) for at in (1, 2)]
            assert more[0] == pytest.approx(coarse * amplification, rel=1e-4)
            assert more[1] == pytest.approx(coarse * (amplification + math.sqrt(place % TOKENS + 1)), rel=1e-4)


@pytest.mark.parametrize(
    "changed",
    [
        {"cache": None},
        {"cache": "float16"},
        {"cache": "float16", "cache_values": "float16"},
        {"cache": "float8_e4m3fn", "cache_values": "float16"},
        {"cache": "float16", "attention_inputs": "float16"},
        {"cache_values": "Q3_K"},
        {"cache": "Q3_K", "cache_values": "Q8_0"},
        {"dtype": torch.float16},
        {"dtype": torch.float64},
    ],
)
def test_where_a_quantised_cache_applies(changed):
    assert len(list(QUANTISED_CACHE(subject_of(call_of(), cache="Q8_0")))) == 1
    assert list(QUANTISED_CACHE(subject_of(call_of(), **{"cache": "Q8_0"} | changed))) == []
    assert list(QUANTISED_CACHE(subject_of(None, cache="Q8_0"))) == []


@pytest.mark.parametrize(
    ("declared", "read"),
    [
        ({"cache": "Q8_0", "cache_values": "float32"}, ("Q8_0", "float16")),
        ({"cache": "float32", "cache_values": "Q4_0"}, ("float16", "Q4_0")),
        ({"cache": "bfloat16", "cache_values": "float32"}, ("bfloat16", "float16")),
    ],
)
def test_what_attention_rounds_before_it_is_read(declared, read):
    """As where the cache itself holds what attention reads."""
    call = call_of()
    rounded = list(QUANTISED_CACHE(subject_of(call, **declared, attention_inputs="float16")))
    kept = list(QUANTISED_CACHE(subject_of(call, cache=read[0], cache_values=read[1])))
    assert [item.name for item in rounded] == [item.name for item in kept]
    for of_rounded, of_kept in zip(rounded, kept, strict=True):
        assert torch.equal(of_rounded.expected(), of_kept.expected())


# Room of ties.


def operands(*, slack):
    """Queries, keys and values of which some elements may differ."""
    generator = torch.Generator().manual_seed(5)

    def of(heads, share):
        values = torch.randn(BATCH, heads, TOKENS, SIZE, generator=generator, dtype=torch.float64)
        there = torch.rand(values.shape, generator=generator) < share
        return Stored(values, there * torch.rand(values.shape, generator=generator, dtype=torch.float64) * 1e-3)

    return [of(heads, share * slack) for heads, share in ((HEADS, 0.2), (KV_HEADS, 0.1), (KV_HEADS, 0.05))]


def room_of(query, key, value):
    return attention._allowance_of_ties(subject_of(call_of()), call_of(), attention._Operands(query, key, value))


def by_loop(query, key, value):
    """Each score moves by what its query's and key's elements may; each context by what its scores and values may."""
    contexts, weights = attend(query.values, key.values, value.values)
    rooms = []
    for row, place in enumerate(ROWS.tolist()):
        request, at = divmod(place, TOKENS)
        moved = 0.0
        for head in range(HEADS):
            kv_head, total = head // 2, torch.zeros(SIZE, dtype=torch.float64)
            context, by_scores = contexts[row, head], 0.0
            for j in range(at + 1):
                p, v = weights[place, head][j], value.values[request, kv_head, j]
                q, q_slack = (x[request, head, at] for x in (query.values, query.slack))
                k, k_slack = (x[request, kv_head, j] for x in (key.values, key.slack))
                score = float(q.abs() @ k_slack + q_slack @ k.abs()) * SIZE**-0.5
                by_scores += float(p * (v.norm() + context.norm()) * score)
                total += p * value.slack[request, kv_head, j]
            moved += (by_scores + float(total.norm())) ** 2
        rooms.append(math.sqrt(moved) / float(contexts[row].norm()) / UNIT)
    return rooms


@pytest.mark.parametrize("only", [None, 0, 1, 2])
def test_allowance_of_ties_is_that_of_the_loop(only):
    parts = operands(slack=1)
    if only is not None:
        parts = [x if at == only else Stored(x.values, torch.zeros_like(x.slack)) for at, x in enumerate(parts)]
    actual = room_of(*parts)
    assert (actual > 0).any()
    assert actual.tolist() == pytest.approx(by_loop(*parts), rel=1e-9)


def test_queries_at_a_time_make_no_difference(monkeypatch):
    parts = operands(slack=1)
    whole = room_of(*parts)
    monkeypatch.setattr("harness.oracle.attention._SCORE_BYTES", 2 * 8 * BATCH * HEADS * TOKENS)
    torch.testing.assert_close(room_of(*parts), whole, rtol=1e-12, atol=0)


def test_without_ties_there_is_no_room_not_even_of_a_context_of_zero():
    assert not room_of(*operands(slack=0)).any()
    query, key, value = operands(slack=1)
    nothing = Stored(torch.zeros_like(value.values), torch.zeros_like(value.slack))
    assert room_of(query, key, nothing).tolist() == [0, 0, 0]
    assert room_of(query, key, Stored(nothing.values, value.slack + 1e-3)).tolist() == [0, 0, 0]
