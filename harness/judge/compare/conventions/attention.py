"""Conventions of attention: over HF's own order of rounding, a coarser cache, or a quantised one.

`B` requests, `T` queries, `S` keys, `N` query heads, `K` KV heads, `H` head size, `R` rows.

Over a quantised cache, heads are in the order and the basis of the cache (`CacheFormat.turned`), in which scores are
the same. There, and with keys and values in two formats, ggml rounds the queries, too: see its
`ggml_compute_forward_flash_attn_ext`.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch

from harness.base.metrics import rounding_unit
from harness.formats.taps import KINDS, ErrorModel, Kind, prefix_of
from harness.judge.compare.cache_format import FORMATS, CacheFormat, Stored, quantised, rounded_sums
from harness.judge.compare.conventions.entry import HALF, Convention, Rounding, SuspectRows, dtype_name
from harness.oracle.attention import attention_sensitivity, in_pieces, probabilities, scaling, visible_keys
from harness.oracle.paired import has_rowless_options
from harness.oracle.watch import AttentionCall, run_attention

EAGER = "scores rounded to the engine's dtype"
SCALED_FIRST = "queries scaled in the engine's dtype, and scores rounded to it"
SCALED_FIRST_BY_ROUNDED = "queries scaled in the engine's dtype by a scale of that dtype, and scores rounded to it"
CACHE = "keys and values read in {}"
CACHE_PRODUCTS = "keys and values read in {}, queries and probabilities rounded to it"
CACHE_FLASH = "keys and values read in {}, the sum of the values too (flash attention)"
_EAGER_MODEL = ErrorModel(roundings=1, accumulation=25, products=8)
"""Attention against HF's eager code in the engine's dtype: a product of another shape lets a few scores round the other
way, each by a whole rounding."""
MODEL = KINDS[Kind.ATTENTION].error_model or _EAGER_MODEL
Round = Callable[[torch.Tensor], torch.Tensor]


def _eager(subject: SuspectRows) -> Iterator[Rounding]:
    """Round scores and probabilities to the dtype, as HF's eager code does; or the queries first, as MLX does."""
    call = subject.call
    eager = None if call is None else subject.hf.eager_attention(call.module)
    if call is None or eager is None:
        return
    scales: dict[str, torch.dtype | None] = {EAGER: None}
    if subject.dtype in HALF:
        scales |= {SCALED_FIRST: torch.float64, SCALED_FIRST_BY_ROUNDED: subject.dtype}
    for name, scale_dtype in scales.items():
        yield Rounding(
            name=name,
            model=_EAGER_MODEL,
            expected=partial(_run_eager, call, eager, subject, scale_dtype),
        )


def _scaled_first(call: AttentionCall, dtype: torch.dtype, scale_dtype: torch.dtype) -> AttentionCall:
    """Return the call with the queries multiplied by the scale, which is rounded to `scale_dtype`."""
    scale = torch.tensor(scaling(call), dtype=scale_dtype).to(torch.float64)
    query = (call.query.to(dtype).to(torch.float64) * scale).to(dtype)
    return replace(call, query=query, options={**call.options, "scaling": 1.0})


def _run_eager(
    call: AttentionCall, function: Callable[..., object], subject: SuspectRows, scale_dtype: torch.dtype | None
) -> torch.Tensor:
    """Compute attention as HF's eager code does in the engine's dtype, scores rounded: [R, N*H] float64.

    Args:
        call: what attention read.
        function: HF's code.
        subject: the rows, and the dtype.
        scale_dtype: of the scale, if queries are scaled before the product; None if scores are.
    """
    dtype = subject.dtype
    if scale_dtype is not None:
        call = _scaled_first(call, dtype, scale_dtype)
    query, key, value = (x.to(dtype) for x in (call.query, call.key, call.value))
    low = replace(call, query=query, key=key, value=value)
    pieces = in_pieces(low) if has_rowless_options(low) else [low]
    context = torch.cat([run_attention(_with_added_mask(piece), function)[0] for piece in pieces], dim=1)
    return context.flatten(2).flatten(0, 1)[subject.rows].to(torch.float64)


def _with_added_mask(call: AttentionCall) -> AttentionCall:
    """Return the call with a mask of numbers that are added to the scores: none where a key is seen."""
    visible = visible_keys(call)
    mask = torch.zeros(visible.shape, dtype=call.query.dtype, device=visible.device)
    return replace(call, mask=mask.masked_fill_(~visible, torch.finfo(mask.dtype).min))


def _coarse_cache(subject: SuspectRows) -> Iterator[Rounding]:
    """Read keys and values in the declared dtype, with products in that dtype or in the engine's."""
    call, (keys, values) = subject.call, formats_read(subject)
    if call is None or keys is None or keys.dtype is None or values is None or keys.dtype != values.dtype:
        return
    dtype = keys.dtype
    if dtype.itemsize >= subject.dtype.itemsize:
        return
    sensitivity = attention_sensitivity(call)
    amplification = sensitivity.amplification.flatten()[subject.rows].to("cpu", torch.float64)
    coarse = rounding_unit(dtype) / rounding_unit(subject.dtype)
    name = dtype_name(dtype)

    def read(used: torch.dtype | None) -> torch.Tensor:
        """Return [R, N*H]; with `used`, queries and probabilities are rounded to it, too."""
        query, key, value = (
            call.query if used is None else call.query.to(used),
            call.key.to(dtype),
            call.value.to(dtype),
        )
        return at_rows(subject, attend(call, query, key, value, used))

    yield Rounding(name=CACHE.format(name), model=MODEL, expected=lambda: read(None))
    if dtype not in HALF:
        return
    # Another order of a score may round its probability the other way.
    yield Rounding(
        name=CACHE_PRODUCTS.format(name),
        model=MODEL,
        expected=lambda: read(dtype),
        allowance=2 * coarse * amplification,
    )
    num_seen = (subject.positions + 1).to(torch.float64)
    yield Rounding(
        name=CACHE_FLASH.format(name),
        model=MODEL,
        expected=lambda: read(dtype),
        allowance=2 * coarse * (amplification + num_seen.sqrt()),
    )


def formats_read(subject: SuspectRows) -> tuple[CacheFormat | None, CacheFormat | None]:
    """Return the declared formats in which the rows read keys and values: the cache's, or that to which it is rounded.

    None for both where none is declared.
    """
    layer, read = prefix_of(subject.operation.tap), subject.declared.attention_inputs
    declared = CacheFormat.declared(subject.declared, "k", layer), CacheFormat.declared(subject.declared, "v", layer)
    if read is None:
        return declared
    rounded = CacheFormat(name=read)
    keys, values = (rounded if item is None or _is_finer(item, rounded) else item for item in declared)
    return keys, values


def _is_finer(form: CacheFormat, coarser: CacheFormat) -> bool:
    return form.dtype is not None and coarser.dtype is not None and form.dtype.itemsize > coarser.dtype.itemsize


def attend(
    call: AttentionCall, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, used: torch.dtype | None
) -> torch.Tensor:
    """Compute attention in float64, [B, N, T, H], with probabilities rounded to `used` unless that is None.

    Queries [B, N, T, H], keys and values [B, K, S, H] replace those of the call.
    """
    parts = probabilities(call, *(x.to(torch.float64) for x in (query, key, value)))
    return torch.cat([(p if used is None else p.to(used).to(torch.float64)) @ v for p, v in parts], dim=2)


def at_rows(subject: SuspectRows, context: torch.Tensor) -> torch.Tensor:
    """Return [R, N*H] of [B, N, T, H]."""
    return context.transpose(1, 2).flatten(2).flatten(0, 1)[subject.rows]


SCALED = "keys kept in {}, values in {}"
KEPT = "keys read in {}, values in {}, queries rounded as a product with the keys asks for"
ROUNDED_PROBABILITIES = KEPT + ", probabilities to the dtype of the values"
ROUNDED_SUMS = KEPT + ", the sum of the values in their dtype (flash attention)"
_DTYPES = {torch.float32, torch.float16, torch.bfloat16}
"""Dtypes of a cache of ggml's that is not quantised."""


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
    """Read keys or values from blocks of integers, or from two dtypes."""
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
    if values.dtype is None or values.dtype not in HALF:
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
    """Read keys or values from numbers in few bits with scales; queries and probabilities are not rounded."""
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
    """Round queries to the format of a product with such keys: Q8_0 or Q8_1 for blocks, otherwise their dtype."""
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
    """Append exact elements to those of heads."""
    return Stored(torch.cat((stored.values, more), dim=-1), torch.cat((stored.slack, torch.zeros_like(more)), dim=-1))


def _attend(
    subject: SuspectRows, call: AttentionCall, operands: _Operands, values: CacheFormat, used: torch.dtype | None
) -> torch.Tensor:
    """Compute attention in float64, [R, N*H], with probabilities rounded to `used` unless that is None."""
    parts = (operands.query.values, operands.key.values, operands.value.values)
    return at_rows(subject, values.unturned(attend(call, *parts, used)))


def _allowance_of_ties(subject: SuspectRows, call: AttentionCall, operands: _Operands) -> torch.Tensor:
    """[R]: the error, in roundings, if every element on a rounding tie were rounded the other way; 0 without ties."""
    query, key, value = operands.query, operands.key, operands.value
    groups = query.values.shape[1] // key.values.shape[1]
    wide = [x.repeat_interleave(groups, dim=1) for x in (key.values, key.slack, value.values, value.slack)]
    at, moved, norms = 0, [], []
    for p, v in probabilities(call, query.values, key.values, value.values):
        queries = slice(at, at + p.shape[2])
        at = queries.stop
        keys, key_slack, values, value_slack = (x[:, :, : p.shape[3]] for x in wide)
        q, slack = query.values[:, :, queries], query.slack[:, :, queries]
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
    Convention(name="scores rounded to the dtype", kinds=(Kind.ATTENTION,), alternatives=_eager),
    Convention(
        name="a cache in a lower dtype than the arithmetic", kinds=(Kind.ATTENTION,), alternatives=_coarse_cache
    ),
    Convention(
        name="a quantised cache, whose products take quantised queries; or keys and values in two formats",
        kinds=(Kind.ATTENTION,),
        alternatives=_quantised_cache,
    ),
    Convention(name="a cache in few bits with scales", kinds=(Kind.ATTENTION,), alternatives=_scaled_cache),
)
