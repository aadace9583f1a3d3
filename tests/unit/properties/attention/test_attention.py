"""The attention suite passes what is right, and tells what is wrong as a program that shows it."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import settings

from harness.errors import HarnessError
from harness.properties.attention.cache import check_read_back, check_store
from harness.properties.attention.case import FOCUSES, AttentionCase, Served, sizes_of
from harness.properties.attention.definition import expected_output
from harness.properties.attention.subject import AttentionUnderTest, not_checked
from harness.properties.attention.suite import (
    check_batching,
    check_definition,
    check_merge,
    check_padded,
    check_placement,
)
from harness.properties.core.findings import PropertyError
from harness.properties.core.search import PROFILES
from harness.properties.reference.attention import PagedSubject

from . import full_attention
from .backends import ContiguousSubject, RecomputeSubject
from .full_attention import FullAttention

FEW = settings(PROFILES["dev"].settings(), max_examples=15)
MANY = PROFILES["dev"].settings()
OTHERS = (check_placement, check_batching, check_store, check_read_back, check_merge, check_padded)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("backend", [PagedSubject, ContiguousSubject, RecomputeSubject])
def test_the_reference_backends_pass(backend: Any) -> None:
    served = AttentionUnderTest(backend).served
    for focus in FOCUSES:
        if served.refusal(focus) is None:
            check_definition(backend, FEW, focus)
    for check in OTHERS:
        check(backend, FEW)


@pytest.mark.slow
@pytest.mark.parametrize("backend", [PagedSubject, ContiguousSubject, RecomputeSubject])
@pytest.mark.parametrize("focus", FOCUSES)
def test_the_reference_backends_pass_in_many_examples(backend: Any, focus: str) -> None:
    if AttentionUnderTest(backend).served.refusal(focus) is None:
        check_definition(backend, PROFILES["ci"].settings(), focus)


@pytest.mark.slow
def test_an_adapter_that_offers_everything_passes_everything() -> None:
    (sizes,) = not_checked(FullAttention, size_seed=1)
    assert sizes.startswith("attention: sizes other than heads of 2, 3, 8, 16, 32, 64, 80, 128, blocks of 1, 2, 3,")
    for focus in FOCUSES:
        check_definition(FullAttention, settings(FEW, max_examples=10), focus)
    for check in OTHERS:
        check(FullAttention, settings(FEW, max_examples=10))


def forgets_a_key(q, k_cache, v_cache, *, block_tables, query_lens, context_lens):  # type: ignore[no-untyped-def]
    """Leave out position 100 of contexts that no batch of the usual sizes has."""
    k, v = k_cache.clone(), v_cache.clone()
    for table, length in zip(block_tables, context_lens, strict=True):
        if length > 300:
            v[table[100 // v.shape[1]], 100 % v.shape[1]] = 0
    return plain_function(q, k, v, block_tables=block_tables, query_lens=query_lens, context_lens=context_lens)


def test_sizes_change_from_day_to_day() -> None:
    days = [sizes_of(Served(), seed) for seed in range(20261101, 20261131)]
    assert {day.most_requests for day in days} == {2, 3, 8, 20, 40}
    assert len({day.head_dims for day in days}) > 10
    assert all(90 < day.longest_context * day.most_requests <= 4_000 for day in days)
    check_definition(forgets_a_key, FEW)
    with pytest.raises(PropertyError, match="row"):
        check_definition(forgets_a_key, FEW, size_seed=20261125)


def definition(focus: str) -> Any:
    return lambda named, settings: check_definition(named, settings, focus)


@pytest.mark.sampled(7)
@pytest.mark.parametrize(
    ("name", "check", "what"),
    [
        ("WindowTooLong", definition("window"), "roundings to float32"),
        ("HeadsTiled", definition("grouped-query"), "query head"),
        ("ScaleIgnored", definition("scale"), "roundings"),
        ("CapIgnored", definition("soft cap"), "roundings"),
        ("MergeInBaseTwo", definition("split"), "roundings"),
        ("MergeInBaseTwo", check_merge, "roundings"),
        ("RescaleDropped", check_merge, "roundings"),
        ("EmptyPartCounts", check_merge, "roundings"),
        ("OverflowingMerge", check_merge, "roundings"),
        ("MaskedRowsNaN", definition("masked rows"), "sees no key, and is not 0"),
        ("PaddingAttended", check_padded, "roundings"),
        ("PadSlotWritten", check_store, "is not what it held before"),
        ("Contagious", check_batching, "has other bits alone"),
        ("Placed", check_placement, "has other bits elsewhere"),
        ("Raises", definition("slots"), "attend raised IndexError: block size 1"),
        ("WrongShape", definition("any"), "actual torch.float32 [1, 8]"),
        ("CacheZeroed", definition("any"), "it writes to k_cache"),
        ("QueriesScaled", definition("any"), "it writes to q"),
    ],
)
def test_a_bug_is_reported_as_a_program_that_shows_it(name: str, check: Any, what: str) -> None:
    bug = getattr(full_attention, name)
    with pytest.raises(PropertyError, match="H092") as caught:
        check(bug, MANY)
    assert what in caught.value.what
    program = caught.value.program
    assert "hypothesis" not in program
    assert "harness" not in program
    with pytest.raises((AssertionError, IndexError)):
        run(program)


def test_the_program_of_a_bug_passes_without_it() -> None:
    with pytest.raises(PropertyError) as caught:
        check_definition(full_attention.WindowTooLong, MANY, "window")
    run(caught.value.program.replace("WindowTooLong", "FullAttention"))


def run(program: str) -> None:
    exec(compile(program, "program", "exec"), {})


def test_a_plain_function_will_do() -> None:
    check_definition(plain_function, settings(FEW, max_examples=5), "decode")
    with pytest.raises(PropertyError) as caught:
        check_definition(wrong_function, FEW)
    assert "attention = wrong_function\n" in caught.value.program
    with pytest.raises(AssertionError):
        run(caught.value.program)


def plain_function(q: Any, k_cache: Any, v_cache: Any, *, block_tables: Any, query_lens: Any, context_lens: Any) -> Any:
    lens = {"block_tables": block_tables, "query_lens": query_lens, "context_lens": context_lens}
    return FullAttention().attend(q, k_cache, v_cache, **lens)


def wrong_function(q: Any, k_cache: Any, v_cache: Any, *, block_tables: Any, query_lens: Any, context_lens: Any) -> Any:
    return q


def test_what_is_no_attention_is_refused() -> None:
    class Nothing:
        pass

    with pytest.raises(HarnessError, match="H091: the adapter lacks attend"):
        check_definition(Nothing, FEW)


def test_what_is_declared_limits_what_is_drawn() -> None:
    class Narrow(FullAttention):
        dtypes = ("bfloat16",)
        head_dims = (16,)
        block_sizes = (4,)
        group_sizes = (1,)

        def attend(self, q, k_cache, v_cache, *, block_tables, query_lens, context_lens):  # type: ignore[no-untyped-def]
            assert q.dtype == torch.bfloat16
            assert k_cache.shape[1:] == (4, q.shape[1], 16)
            return plain_function(
                q, k_cache, v_cache, block_tables=block_tables, query_lens=query_lens, context_lens=context_lens
            )

    check_definition(Narrow, FEW)
    assert "attention: blocks of one token: it does not serve block size 1" in not_checked(Narrow, size_seed=1)
    several = "attention: several query heads on each of several KV heads: it serves group sizes 1"
    assert several in not_checked(Narrow, size_seed=1)
    day = sizes_of(AttentionUnderTest(Narrow).served, 1)
    assert (day.head_dims, day.block_sizes, day.group_sizes) == ((16,), (4,), (1,))


@pytest.mark.slow
def test_rounded_scores_are_a_convention_that_must_be_declared() -> None:
    class Rounded(FullAttention):
        dtypes = ("bfloat16",)

        def part(self, q_NH, k_CKH, v_CKH, scale, softcap):  # type: ignore[no-untyped-def]
            score = torch.einsum("nh,cnh->nc", q_NH, self.repeated(k_CKH, len(q_NH))) * q_NH.shape[-1] ** -0.5
            p = torch.softmax(score.bfloat16().float(), dim=-1)
            return torch.einsum("nc,cnh->nh", p, self.repeated(v_CKH, len(q_NH))), torch.zeros(len(q_NH))

        def attend(self, q, k_cache, v_cache, *, block_tables, query_lens, context_lens):  # type: ignore[no-untyped-def]
            return FullAttention.attend(
                self, q, k_cache, v_cache, block_tables=block_tables, query_lens=query_lens, context_lens=context_lens
            )

    with pytest.raises(PropertyError):
        check_definition(Rounded, MANY)
    Rounded.rounds_scores = True
    check_definition(Rounded, settings(MANY, max_examples=40))
    assert "attention: scores beyond 8: it declares rounds_scores" in not_checked(Rounded, size_seed=1)


def test_the_definition_is_torch_s() -> None:
    case = AttentionCase(
        dtype="float32", num_kv_heads=2, group_size=3, head_dim=8, block_size=4, query_lens=(7,), context_lens=(7,),
        placement=3,
    )  # fmt: skip
    tensors = case.tensors()
    table = case.block_tables[0]
    k, v = (x[table].flatten(0, 1)[:7].transpose(0, 1).double() for x in (tensors.k_cache_BSKH, tensors.v_cache_BSKH))
    q = tensors.q_TNH.transpose(0, 1).double()
    theirs = torch.nn.functional.scaled_dot_product_attention(
        q[None], k[None], v[None], is_causal=True, enable_gqa=True
    )
    torch.testing.assert_close(expected_output(case, tensors).out_TNH.transpose(0, 1), theirs[0])


def test_another_placement_moves_the_same_content() -> None:
    case = AttentionCase(
        dtype="float16", num_kv_heads=1, group_size=1, head_dim=8, block_size=3, query_lens=(1, 2), context_lens=(8, 9),
        num_shared_blocks=2,
    )  # fmt: skip
    moved = replace(case, placement=5)
    assert case.block_tables != moved.block_tables
    assert moved.block_tables[0][:2] == moved.block_tables[1][:2], "the shared blocks"
    for a, b in zip(_contents(case), _contents(moved), strict=True):
        assert torch.equal(a, b)


def _contents(case: AttentionCase) -> list[torch.Tensor]:
    cache = case.tensors().k_cache_BSKH
    return [
        cache[table].flatten(0, 1)[:length] for table, length in zip(case.block_tables, case.context_lens, strict=True)
    ]
