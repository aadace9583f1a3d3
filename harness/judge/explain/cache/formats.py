"""The cache stores numbers in a wrong format: a declared one with wrong scales, or few bits that nobody declared.

`R` rows, `K` KV heads, `H` head size, `S` history rows.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch

from harness.base.numerics import Numerics
from harness.formats.taps import Kind, prefix_of
from harness.judge.compare.align import is_readback
from harness.judge.compare.cache_format import (
    BLOCKS,
    GRIDS,
    CacheFormat,
    blocks_of,
    clipped,
    four_bits_cut_off,
    on_grid,
)
from harness.judge.explain.core.formats import FLOAT8_DTYPES, HALF_DTYPES, cut_off, name_of
from harness.judge.explain.core.wrong_operation import Hypothesis, WrongOperation

Change = Callable[[torch.Tensor], torch.Tensor]
"""From keys or values [R, K, H], float64, to what attention reads of them."""
_PARTS = {"k": "keys", "v": "values"}
_EITHER = "each other"
_POWERS = {
    "are multiplied by their scale when they are read, and not divided when they are stored": None,
    "are divided by their scale when they are stored, and not multiplied when they are read": 0,
    "are multiplied by their scale twice when they are read": 2,
}


def declared_format(wrong: WrongOperation) -> Iterator[Hypothesis]:
    """What comes back, or what attention reads, is not what the declared format makes of keys and values.

    Causes: of a cache whose format is declared: keys, values, or both: are cut off to *dtype*, the dtype of the cache,
    or to its format, instead of rounded; have a scale of 1: theirs is not delivered; have the scale of another layer,
    of the values (of the keys), of the next head, the largest of all heads; have a scale that follows their largest
    number, one for each token or head of a token; are multiplied by their scale when they are read, and not divided
    when they are stored, or the reverse; are multiplied by it twice.
    """
    numerics = wrong.recording.manifest.numerics
    if numerics is None or numerics.cache is None:
        return
    layer = prefix_of(wrong.operation.tap)
    formats = {part: CacheFormat.declared(numerics, part, layer) for part in ("k", "v")}
    if wrong.operation.kind is Kind.CACHE:
        yield from _of_cache(wrong, numerics, formats)
    else:
        yield from _of_attention(wrong, numerics, formats)


def _of_cache(
    wrong: WrongOperation, numerics: Numerics, formats: dict[str, CacheFormat | None]
) -> Iterator[Hypothesis]:
    part = wrong.operation.site[0]
    heads = wrong.expected.unflatten(1, (-1, wrong.head_dim))
    for name, change in _changes(part, formats, numerics, prefix_of(wrong.operation.tap)):
        yield Hypothesis(cause=f"{_PARTS[part]} {name}", output=change(heads).flatten(1))


def _of_attention(
    wrong: WrongOperation, numerics: Numerics, formats: dict[str, CacheFormat | None]
) -> Iterator[Hypothesis]:
    """Try each mistake with the keys, with the values, and with both."""
    if formats["k"] is None or formats["v"] is None:
        return
    right = {part: _as_declared(form) for part, form in formats.items() if form is not None}
    of_parts = {part: _changes(part, formats, numerics, prefix_of(wrong.operation.tap)) for part in _PARTS}
    changes = {part: {_of_either(name, part): change for name, change in of_parts[part]} for part in _PARTS}
    for name in dict.fromkeys([*changes["k"], *changes["v"]]):
        for parts in (("k", "v"), ("k",), ("v",)):
            if all(name in changes[part] for part in parts):
                key, value = (changes[part][name] if part in parts else right[part] for part in _PARTS)
                rows = [view.attend(key=key(view.key), value=value(view.value)) for view in wrong.views]
                who = " and ".join(_PARTS[part] for part in parts)
                said = name if len(parts) == 2 else name.replace(_EITHER, _other_side(parts[0]))
                yield Hypothesis(cause=f"{who} {said}", output=torch.cat(rows))


def _other_side(part: str) -> str:
    """Return what a part has for its scale if it has that of the other."""
    return "the values" if part == "k" else "the keys"


def _of_either(name: str, part: str) -> str:
    """Return a mistake's name so that keys and values with each other's scales have the same."""
    return name.replace(_other_side(part), _EITHER)


def _changes(
    part: str, formats: dict[str, CacheFormat | None], numerics: Numerics, layer: str
) -> Iterator[tuple[str, Change]]:
    """Yield mistakes with keys or values, as what is said of them, and what they make of them."""
    declared = formats[part]
    if declared is None:
        return
    if declared.dtype in (*HALF_DTYPES, *FLOAT8_DTYPES):
        yield (
            f"are cut off to {name_of(declared.dtype)}, the dtype of the cache, instead of rounded",
            partial(cut_off, dtype=declared.dtype),
        )
    if not declared.has_scale or not declared.is_known:
        return
    yield "are cut off to the cache's format instead of rounded", partial(_cut_off, form=declared)
    if declared.name in BLOCKS:
        yield from _of_blocks(declared)
    else:
        yield "have a scale of 1: theirs is not delivered", _as_declared(replace(declared, scales=(1.0,), scale_of=""))
    for name, power in _POWERS.items():
        yield name, partial(_one_sided, form=declared, power=power)
    for scale_of, what in (("token", "one for each token"), ("head", "one for each head of a token")):
        if scale_of != declared.scale_of and declared.name not in BLOCKS:
            yield (
                f"have a scale that follows their largest number, {what}",
                _as_declared(replace(declared, scales=(), scale_of=scale_of)),
            )
    if not declared.scales:
        return
    sibling = formats["v" if part == "k" else "k"]
    if sibling is not None and sibling.scales != declared.scales:
        yield from _with_scales_of(_other_side(part), declared, sibling.scales or (1.0,))
    if len(declared.scales) > 1:
        yield (
            "have the scale of the next head",
            _as_declared(replace(declared, scales=(*declared.scales[1:], declared.scales[0]))),
        )
        yield "have the largest scale of all heads", _as_declared(replace(declared, scales=(max(declared.scales),)))
    for tap, scales in numerics.cache_scales.items():
        if tap.endswith(f".{part}_cache") and not tap.startswith(layer) and scales != declared.scales:
            yield from _with_scales_of(prefix_of(tap).removesuffix("."), declared, scales)


def _with_scales_of(whose: str, declared: CacheFormat, scales: tuple[float, ...]) -> Iterator[tuple[str, Change]]:
    """Yield what scales of others do, where they are stored and read with them, and where only one of the two."""
    theirs = replace(declared, scales=scales)
    yield f"have the scale of {whose}", _as_declared(theirs)
    yield (
        f"are stored with the scale of {whose}, and read with their own",
        lambda x: theirs.stored(x).values / theirs.still(x) * declared.still(x),
    )
    yield (
        f"are read with the scale of {whose}, and stored with their own",
        lambda x: declared.stored(x).values / declared.still(x) * theirs.still(x),
    )


def _as_declared(form: CacheFormat) -> Change:
    def stored(x: torch.Tensor) -> torch.Tensor:
        return form.unturned(form.stored(x).values)

    return stored


def _of_blocks(form: CacheFormat) -> Iterator[tuple[str, Change]]:
    """Mistakes with the scales of blocks, and with the one that all blocks share."""
    yield (
        "have in each block the scale of the next",
        partial(_scaled, form=form, change=lambda scale: blocks_of(scale).roll(-1, dims=-2).flatten(-2)),
    )
    if form.name == "mxfp4":
        yield "have exponents that are rounded down", partial(_scaled, form=form, change=lambda scale: scale / 2)
    yield "have a scale of 1: theirs is not delivered", partial(_scaled, form=form, change=torch.ones_like)
    if form.scales:
        yield "have a scale of all blocks of 1: theirs is not delivered", _as_declared(replace(form, scales=(1.0,)))
        yield (
            "are not multiplied by the scale of all blocks when they are read",
            lambda x: form.stored(x).values / form.still(x),
        )
        yield (
            "are multiplied twice by the scale of all blocks when they are read",
            lambda x: form.stored(x).values * form.still(x),
        )


def _scaled(x: torch.Tensor, form: CacheFormat, change: Change) -> torch.Tensor:
    return on_grid(x, form.name, change(form.scale(x))).values


def _cut_off(x: torch.Tensor, form: CacheFormat) -> torch.Tensor:
    """Drop what the format has no room for, towards zero."""
    scale = form.scale(x)
    scaled = clipped(x / scale, form.name)
    if form.name in BLOCKS:
        return four_bits_cut_off(scaled) * scale
    dtype = getattr(torch, form.name)
    return (cut_off(scaled, dtype) if dtype in FLOAT8_DTYPES else scaled.trunc()) * scale


def _one_sided(x: torch.Tensor, form: CacheFormat, power: int | None) -> torch.Tensor:
    """Divide by the scale, and multiply by some power of it; None: multiply by it alone."""
    scale = form.scale(x)
    if power is None:
        return on_grid(x, form.name, torch.ones(1, dtype=torch.float64)).values * scale
    return on_grid(x, form.name, scale).values * scale ** (power - 1)


def in_few_bits(wrong: WrongOperation) -> Iterator[Hypothesis]:
    """Written values come back in few bits with a scale for each group: of tokens, of steps, heads or channels.

    A scale is that of the group's largest number, or stale: that of the group in the step before, or the first.

    Causes: the cache is in a lower dtype: int8, int4 or float8, with a scale for each token, head of a token, step,
    head or channel in a step, head, channel, or for all of it; with a stale scale: that of the request's first step, or
    of the step before. Of a rotated key: it is what a cache in a lower dtype gives back.
    """
    if wrong.expected.shape[1] % wrong.head_dim or not bool(wrong.actual.isfinite().all()):
        return
    is_cache = wrong.operation.kind is Kind.CACHE
    lower = "the cache is in a lower dtype" if is_cache else "it is what a cache in a lower dtype gives back"
    heads = wrong.expected.unflatten(1, (-1, wrong.head_dim))
    request = wrong.rows.request
    step = torch.stack([request, _written_in(wrong)], dim=1).unique(dim=0, return_inverse=True)[1]
    for detail, (group, dims) in _groups(step).items():
        largest = _largest(heads, group, dims)
        stale_sources = _sources_of_stale_scales(step, request) if group is step else {}
        for stale, source in {"": group, **stale_sources}.items():
            for name, (top, _) in GRIDS.items():
                scale = largest[source].clamp(min=torch.finfo(torch.float64).tiny) / top
                output = on_grid(heads, name, scale).values.flatten(1)
                yield Hypothesis(
                    cause=f"{lower}: {name}" + (f", with a stale scale: {stale}" if stale else ""),
                    output=output,
                    detail=detail,
                )


def _groups(step: torch.Tensor) -> dict[str, tuple[torch.Tensor, tuple[int, ...]]]:
    """Return what may share a scale: the number of each row's group, [R], and the dimensions that share it too."""
    token, alike = torch.arange(len(step)), torch.zeros_like(step)
    return {
        "one scale for each token": (token, (1, 2)),
        "one scale for each head of a token": (token, (2,)),
        "one scale for each step": (step, (1, 2)),
        "one scale for each head in a step": (step, (2,)),
        "one scale for each channel in a step": (step, ()),
        "one scale for all of it": (alike, (1, 2)),
        "one scale for each head": (alike, (2,)),
        "one scale for each channel": (alike, ()),
    }


def _sources_of_stale_scales(step: torch.Tensor, request: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the steps, [R] each, whose scale a row may have been given in place of its own step's."""
    first = torch.stack([step[request == item].min() for item in request.tolist()])
    return {
        "that of the request's first step": first,
        "that of the step before": (step - 1).maximum(first),
    }


def _largest(heads: torch.Tensor, group: torch.Tensor, dims: tuple[int, ...]) -> torch.Tensor:
    """Return the largest magnitude of each group, over some dimensions of its rows too: [groups, K or 1, H or 1]."""
    sizes = heads.abs().amax(dim=dims, keepdim=True) if dims else heads.abs()
    table = sizes.new_zeros(int(group.max()) + 1, *sizes.shape[1:])
    return table.scatter_reduce(0, group[:, None, None].expand_as(sizes), sizes, "amax")


def _written_in(wrong: WrongOperation) -> torch.Tensor:
    """Return the step that computed each row, [R] int64; 0 for rows that no step did."""
    steps = torch.zeros(len(wrong.rows), dtype=torch.int64)
    for index, step in enumerate(step for step in wrong.recording.steps if not is_readback(step)):
        for at, (request, position) in enumerate(wrong.rows.places()):
            if bool(((step.request == request) & (step.position == position)).any()):
                steps[at] = index
    return steps
