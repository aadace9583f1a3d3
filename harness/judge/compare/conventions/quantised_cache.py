"""Attention over a quantised cache, or keys and values in two formats, as ggml computes it: queries are rounded, too.

`B` requests, `T` queries, `S` keys, `N` query heads, `K` KV heads, `H` head size, `R` rows. Heads are in the order and
the basis of the cache (`CacheFormat.turned`), in which scores are the same. See ggml's
`ggml_compute_forward_flash_attn_ext`.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from harness.base.metrics import rounding_unit
from harness.formats.taps import Kind
from harness.judge.compare.cache_blocks import FORMATS, Stored, quantised, rounded_sums
from harness.judge.compare.cache_format import CacheFormat
from harness.judge.compare.conventions.attention import MODEL, at_rows, attend, formats_read
from harness.judge.compare.conventions.entry import Convention, Rounding, SuspectRows, dtype_name
from harness.oracle.attention import attention_sensitivity, probabilities, scaling
from harness.oracle.watch import AttentionCall

SCALED = "keys kept in {}, values in {}"
KEPT = "keys read in {}, values in {}, queries rounded as a product with the keys asks for"
ROUNDED_PROBABILITIES = KEPT + ", probabilities to the dtype of the values"
ROUNDED_SUMS = KEPT + ", the sum of the values in their dtype (flash attention)"
_DTYPES = {torch.float32, torch.float16, torch.bfloat16}
"""Of a cache of ggml's that is not quantised."""


@dataclass(frozen=True, slots=True)
class _Operands:
    """The operands of the products, and the most that each element may differ on a rounding tie."""

    query: Stored
    """[B, N, T, H], or H and one more for each block of keys with minima."""
    key: Stored
    """[B, K, S, H], or as many as queries have."""
    value: Stored
    """[B, K, S, H]"""


def _quantised_cache(subject: SuspectRows) -> Iterator[Rounding]:
    """Keys or values, or both, are in blocks of integers; or they are in two dtypes."""
    call, (keys, values) = subject.call, formats_read(subject)
    if call is None or keys is None or values is None or subject.dtype != torch.float32:
        return
    if not (keys.is_known and values.is_known):
        return
    are_two_dtypes = keys.dtype != values.dtype and {keys.dtype, values.dtype} <= _DTYPES
    if not ({keys.name, values.name} & set(FORMATS) or are_two_dtypes):
        return
    operands = _Operands(*_query_and_key(call, keys), values.stored(call.value))
    ties = _allowance_of_ties(subject, call, operands)
    names = keys.name, values.name

    def expected(used: torch.dtype | None) -> torch.Tensor:
        return _attend(subject, call, operands, values, used)

    yield Rounding(name=KEPT.format(*names), model=MODEL, expected=lambda: expected(None), allowance=ties)
    if values.dtype not in (torch.float16, torch.bfloat16):
        return
    coarse = rounding_unit(values.dtype) / rounding_unit(subject.dtype)
    amplification = attention_sensitivity(call).amplification.flatten()[subject.rows].to("cpu", torch.float64)
    num_seen = (subject.positions + 1).to(torch.float64).sqrt()
    name = dtype_name(values.dtype)
    names = keys.name, name
    yield Rounding(
        name=ROUNDED_PROBABILITIES.format(*names),
        model=MODEL,
        expected=lambda: expected(values.dtype),
        allowance=ties + 2 * coarse * amplification,
    )
    yield Rounding(
        name=ROUNDED_SUMS.format(*names),
        model=MODEL,
        expected=lambda: expected(values.dtype),
        allowance=ties + 2 * coarse * (amplification + num_seen),
    )


def _scaled_cache(subject: SuspectRows) -> Iterator[Rounding]:
    """Keys or values, or both, are numbers in few bits with scales; queries and probabilities are not rounded."""
    call, (keys, values) = subject.call, formats_read(subject)
    if call is None or keys is None or values is None or not (keys.has_scale or values.has_scale):
        return
    if not (keys.is_known and values.is_known):
        return
    query = call.query.to(torch.float64)
    key, value = keys.stored(call.key), values.stored(call.value)
    operands = _Operands(Stored(query, torch.zeros_like(query)), key, value)
    ties = _allowance_of_ties(subject, call, operands)
    name = SCALED.format(keys.title, values.title)
    yield Rounding(
        name=name, model=MODEL, expected=lambda: _attend(subject, call, operands, values, None), allowance=ties
    )
    if subject.dtype.itemsize < torch.float32.itemsize:
        read = [Stored(item.values.to(subject.dtype).to(torch.float64), item.slack) for item in (key, value)]
        rounded = replace(operands, key=read[0], value=read[1])
        yield Rounding(
            name=f"{name}, rounded to {dtype_name(subject.dtype)} when they are read",
            model=MODEL,
            expected=lambda: _attend(subject, call, rounded, values, None),
            allowance=ties,
        )


def _query_and_key(call: AttentionCall, keys: CacheFormat) -> tuple[Stored, Stored]:
    """Round queries to what a product with such keys takes: Q8_0 or Q8_1 for blocks, the dtype else."""
    key = keys.stored(call.key)
    if keys.dtype is not None:
        return keys.stored(call.query), key
    turned = keys.turned(call.query)
    query = quantised(turned, "Q8_0", is_exact=not keys.rotation)
    if key.minima is None:
        return query, key
    # Q8_1 keeps each block's sum in float16; minima of keys are multiplied by it: another term of the product.
    return _with_more(query, rounded_sums(turned, is_exact=not keys.rotation)), _with_more(key, key.minima)


def _with_more(stored: Stored, more: torch.Tensor) -> Stored:
    """Put exact elements after those of heads."""
    return Stored(torch.cat((stored.values, more), dim=-1), torch.cat((stored.slack, torch.zeros_like(more)), dim=-1))


def _attend(
    subject: SuspectRows, call: AttentionCall, operands: _Operands, values: CacheFormat, used: torch.dtype | None
) -> torch.Tensor:
    """Compute attention in float64: [R, N*H]. Probabilities are rounded to `used` if it is given."""
    parts = (operands.query.values, operands.key.values, operands.value.values)
    return at_rows(subject, values.unturned(attend(call, *parts, used)))


def _allowance_of_ties(subject: SuspectRows, call: AttentionCall, operands: _Operands) -> torch.Tensor:
    """[R] roundings that elements on a rounding tie may make, were each rounded the other way; 0 without any."""
    query, key, value = operands.query, operands.key, operands.value
    groups = query.values.shape[1] // key.values.shape[1]
    wide = [x.repeat_interleave(groups, dim=1) for x in (key.values, key.slack, value.values, value.slack)]
    keys, key_slack, values, value_slack = wide
    at, moved, norms = 0, [], []
    for p, v in probabilities(call, query.values, key.values, value.values):
        own = slice(at, at + p.shape[2])
        at = own.stop
        q, slack = query.values[:, :, own], query.slack[:, :, own]
        scores = (q.abs() @ key_slack.transpose(2, 3) + slack @ keys.abs().transpose(2, 3)) * scaling(call)
        context = p @ v
        # d o = sum_j p_j ds_j (v_j - o), and what the values themselves move
        spread = (values.norm(dim=-1)[:, :, None] + context.norm(dim=-1)[..., None]) * scores
        moved.append((p * spread).sum(dim=-1) + (p @ value_slack).norm(dim=-1))
        norms.append(context.norm(dim=-1))
    total, norm = (torch.cat(parts, dim=2).square().sum(dim=1).sqrt().flatten() for parts in (moved, norms))
    allowance = (total / norm).nan_to_num(nan=0.0, posinf=0.0) / rounding_unit(subject.dtype)
    return allowance[subject.rows].cpu()


CONVENTIONS = (
    Convention(
        name="a quantised cache, whose products take quantised queries; or keys and values in two formats",
        kinds=(Kind.ATTENTION,),
        roundings=_quantised_cache,
    ),
    Convention(name="a cache in few bits with scales", kinds=(Kind.ATTENTION,), roundings=_scaled_cache),
)
