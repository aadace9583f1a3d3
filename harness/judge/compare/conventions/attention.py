"""Conventions of attention.

`B` requests, `T` queries, `S` keys, `N` query heads, `K` KV heads, `H` head size, `R` rows.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch

from harness.base.metrics import rounding_unit
from harness.formats.taps import KINDS, ErrorModel, Kind, prefix_of
from harness.judge.compare.cache_format import CacheFormat
from harness.judge.compare.conventions.entry import HALF, Convention, Rounding, SuspectRows, dtype_name
from harness.oracle.attention import attention_sensitivity, probabilities, scaling, visible_keys
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
    """Scores and probabilities rounded to the dtype, as HF's eager code does it; and queries before, as MLX does it."""
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
    """Return the call with the scale, in a dtype of its own, in the queries."""
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
    visible = visible_keys(call)
    mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    mask = mask.masked_fill(~visible, torch.finfo(dtype).min)
    low = replace(call, query=call.query.to(dtype), key=call.key.to(dtype), value=call.value.to(dtype), mask=mask)
    context = run_attention(low, function)[0]
    result: torch.Tensor = context.flatten(2).flatten(0, 1)[subject.rows].to(torch.float64)
    return result


def _coarse_cache(subject: SuspectRows) -> Iterator[Rounding]:
    """Keys and values are read in the declared dtype; products with them are done in that dtype or not."""
    call, (keys, values) = subject.call, formats_read(subject)
    if call is None or keys is None or keys.dtype is None or values is None or keys.dtype != values.dtype:
        return
    dtype = keys.dtype
    if dtype.itemsize >= subject.dtype.itemsize:
        return
    found = attention_sensitivity(call)
    amplification = found.amplification.flatten()[subject.rows].to("cpu", torch.float64)
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
    if dtype not in (torch.float16, torch.bfloat16):
        return
    # A score that is computed in another order lets its probability round the other way.
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
    """Return the declared formats in which the rows read keys and values: those of the cache, or what it is rounded to.

    None for both where nothing is declared.
    """
    layer, read = prefix_of(subject.operation.tap), subject.declared.attention_inputs
    declared = CacheFormat.declared(subject.declared, "k", layer), CacheFormat.declared(subject.declared, "v", layer)
    if read is None:
        return declared
    rounded = CacheFormat(name=read)
    keys, values = (rounded if item is None or _is_finer(item, rounded) else item for item in declared)
    return keys, values


def _is_finer(form: CacheFormat, other: CacheFormat) -> bool:
    return form.dtype is not None and other.dtype is not None and form.dtype.itemsize > other.dtype.itemsize


def attend(
    call: AttentionCall, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, used: torch.dtype | None
) -> torch.Tensor:
    """Compute attention in float64, [B, N, T, H], its probabilities rounded to `used` if it is given.

    Queries [B, N, T, H], keys and values [B, K, S, H] stand in the place of the call's.
    """
    parts = probabilities(call, *(x.to(torch.float64) for x in (query, key, value)))
    return torch.cat([(p if used is None else p.to(used).to(torch.float64)) @ v for p, v in parts], dim=2)


def at_rows(subject: SuspectRows, context: torch.Tensor) -> torch.Tensor:
    """Return [R, N*H] of [B, N, T, H]."""
    return context.transpose(1, 2).flatten(2).flatten(0, 1)[subject.rows]


CONVENTIONS = (
    Convention(name="scores rounded to the dtype", kinds=(Kind.ATTENTION,), roundings=_eager),
    Convention(name="a cache in a lower dtype than the arithmetic", kinds=(Kind.ATTENTION,), roundings=_coarse_cache),
)
