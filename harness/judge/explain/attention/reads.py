"""Attention reads wrong keys or values: other tensors, coarser ones, the KV heads of others.

`T` query rows, `S` history rows, `N` query heads, `K` KV heads, `H` head size.
"""

from collections.abc import Callable, Iterator
from itertools import product

import torch

from harness.formats.taps import prefix_of
from harness.judge.compare.evidence import AttentionContext
from harness.judge.explain.cache.contents import RAW_KEY, contents_of, history
from harness.judge.explain.core.wrong_operation import Hypothesis, WrongOperation

_COARSE_DTYPES = (torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2)
_MOST = 64
"""KV heads up to which every one is tried for every query head."""
_PARTS = {"keys and values": (True, True), "keys": (True, False), "values": (False, True)}
"""Whether keys are of other places, and whether values are."""
_PAGES, _NEVER = (2, 4, 8, 16, 32, 64), 1 << 62
"""Sizes of pages that are tried; a step that never comes."""
_READS = {
    "query heads read the wrong KV heads": (True, True),
    "query heads read the values of the wrong KV heads, and the right keys": (False, True),
    "query heads read the keys of the wrong KV heads, and the right values": (True, False),
}
"""Whether keys are read from another head, and whether values are."""


def other_tensors(wrong: WrongOperation) -> Iterator[Hypothesis]:
    """The cache holds other tensors: keys for values, keys before rotary, those of another layer.

    Causes: K and V are swapped in the cache; keys are cached before rotary; reads the cache of layer *n*.
    """
    for cause, change in _tensor_changes(wrong):
        for name, is_read in (("of every step", _all), ("of earlier steps", _earlier)):
            parts = []
            for view in wrong.views:
                changed = change(view)
                if changed is None or not _fits(view, *changed):
                    break
                parts.append(_with_history(view, *changed, is_read))
            else:
                yield Hypothesis(cause=cause, output=torch.cat(parts), detail=f"for tokens {name}")


def _tensor_changes(
    wrong: WrongOperation,
) -> Iterator[tuple[str, Callable[[AttentionContext], tuple[torch.Tensor, torch.Tensor] | None]]]:
    yield "K and V are swapped in the cache", lambda view: (view.value, view.key)
    yield "values are read from the K cache", lambda view: (view.key, view.key)
    yield "keys are read from the V cache", lambda view: (view.value, view.value)
    raw = contents_of(wrong).taps.get(RAW_KEY, "")

    def unrotated(view: AttentionContext) -> tuple[torch.Tensor, torch.Tensor] | None:
        key = history(wrong, view, raw, view.key)
        return None if key is None else (key, view.value)

    yield "keys are cached before rotary", unrotated

    for layer in wrong.graph.layers:
        attention = wrong.graph.attention_of(layer)
        if attention is not None and layer != wrong.operation.layer:

            def of_layer(
                view: AttentionContext, taps: tuple[str, ...] = attention.inputs[1:]
            ) -> tuple[torch.Tensor, torch.Tensor] | None:
                key, value = (history(wrong, view, *item) for item in zip(taps, (view.key, view.value), strict=True))
                return None if key is None or value is None else (key, value)

            yield f"reads the cache of layer {layer}", of_layer


def read_back(wrong: WrongOperation) -> Iterator[Hypothesis]:
    """Attention is right: what it reads is what the cache gives back at the end, which is not what was written.

    Causes: reads what the cache gives back, which is not what was written: see k_cache and v_cache.
    """
    prefix, parts = prefix_of(wrong.operation.tap), []
    for view in wrong.views:
        key = history(wrong, view, f"{prefix}k_cache", view.key)
        value = history(wrong, view, f"{prefix}v_cache", view.value)
        if key is None or value is None:
            return
        parts.append(view.attend(key=key, value=value))
    yield Hypothesis(
        cause="reads what the cache gives back, which is not what was written: see k_cache and v_cache",
        output=torch.cat(parts),
        is_vague=True,
    )


def coarse_cache(wrong: WrongOperation) -> Iterator[Hypothesis]:
    """Keys and values, or one of them, are stored in a coarser dtype.

    Causes: the KV cache is in a lower dtype: *dtype*.
    """
    for dtype in _COARSE_DTYPES:
        if dtype == wrong.dtype:
            continue
        name = str(dtype).removeprefix("torch.")

        def rounded(x: torch.Tensor, dtype: torch.dtype = dtype) -> torch.Tensor:
            return x.to(dtype).to(torch.float64)

        for is_read in (_all, _earlier):
            for part, is_key, is_value in (
                ("the KV cache is", 1, 1),
                ("the K cache is", 1, 0),
                ("the V cache is", 0, 1),
            ):
                changed = [
                    (view, rounded(view.key) if is_key else view.key, rounded(view.value) if is_value else view.value)
                    for view in wrong.views
                ]
                output = torch.cat([_with_history(view, key, value, is_read) for view, key, value in changed])
                yield Hypothesis(cause=f"{part} in a lower dtype: {name}", output=output)


def _fits(view: AttentionContext, key: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether tensors have the shapes of the keys and values: values of latent attention are narrower than keys."""
    return key.shape == view.key.shape and value.shape == view.value.shape


def _all(view: AttentionContext) -> torch.Tensor:
    return torch.ones(len(view.rows), len(view.key), dtype=torch.bool)


def _earlier(view: AttentionContext) -> torch.Tensor:
    return view.key_step < view.rows.step[:, None]


def _with_history(
    view: AttentionContext, key: torch.Tensor, value: torch.Tensor, is_read: Callable[[AttentionContext], torch.Tensor]
) -> torch.Tensor:
    """[T, N*H]: with other keys and values where `is_read` holds for the row and the position."""
    parts = []
    masks = is_read(view)
    for mask in masks.unique(dim=0):
        here = (masks == mask).all(dim=1).nonzero()[:, 0]
        where = mask[:, None, None]
        parts.append((here, view.select(here).attend(
            key=torch.where(where, key, view.key), value=torch.where(where, value, view.value))))  # fmt: skip
    order = torch.cat([here for here, _ in parts]).argsort()
    return torch.cat([output for _, output in parts])[order]


def cleared_pages(wrong: WrongOperation) -> Iterator[Hypothesis]:
    """A step that begins within a page clears it, or writes it anew: what earlier steps wrote there is lost.

    Causes: a step clears the page that it begins in: every step, or chunks alone; its own rows, or all later ones, read
    zeros there.
    """
    for size, (steps, least), readers in product(_PAGES, (("chunks", 2), ("steps", 1)), ("its own rows", "later rows")):

        def is_lost(view: AttentionContext) -> torch.Tensor:
            at, step = torch.arange(len(view.key)), view.key_step
            after = torch.searchsorted(step, step, right=True)  # where the next step begins
            begin = after.clamp(max=len(step) - 1)
            length = torch.searchsorted(step, step[begin], right=True) - after
            lost = torch.where((after // size == at // size) & (length >= least), step[begin], _NEVER)  # noqa: B023
            reader = view.rows.step[:, None]
            return lost <= reader if readers == "later rows" else lost == reader  # noqa: B023

        output = wrong.over_views(
            lambda view: _with_history(view, torch.zeros_like(view.key), torch.zeros_like(view.value), is_lost)
        )
        detail = f"pages of {size}, {steps}: {readers} read zeros where earlier steps wrote"
        yield Hypothesis(cause="a step clears the page that it begins in", output=output, detail=detail)


def another_order(wrong: WrongOperation) -> Iterator[Hypothesis]:
    """The rows of a history are read in another order: those of each step are rolled, or its pages are reversed.

    Causes: keys, values, or both, of each step are one slot high or low, around the step; reads its pages in the
    reverse order.
    """
    for (which, parts), (how, shift) in product(_PARTS.items(), (("high", 1), ("low", -1))):

        def rolled(view: AttentionContext) -> torch.Tensor:
            begin, end = (torch.searchsorted(view.key_step, view.key_step, right=right) for right in (False, True))
            places = begin + (torch.arange(len(view.key)) - begin - shift) % (end - begin)  # noqa: B023
            return _reading(view, places, parts)  # noqa: B023

        cause = f"{which} of each step are one slot {how}, around the step"
        yield Hypothesis(cause=cause, output=wrong.over_views(rolled))
    if all(view.bias is None for view in wrong.views):
        return  # of keys and values together, attention has no order
    for size, which in product(_PAGES, ("", ", the full ones")):
        outputs = list[torch.Tensor]()
        for row in wrong.single_rows():
            at, num_held = torch.arange(len(row.key)), int(row.is_computed.sum())
            num_pages = num_held // size if which else -(-num_held // size)
            turned = at + (num_pages - 1 - 2 * (at // size)) * size
            outputs.append(_reading(row, turned.where(at < num_pages * size, at), (True, True)))
        cause, detail = "reads its pages in the reverse order", f"pages of {size}{which}"
        yield Hypothesis(cause=cause, output=torch.cat(outputs), detail=detail)


def _reading(view: AttentionContext, places: torch.Tensor, parts: tuple[bool, bool]) -> torch.Tensor:
    """Return the context [T, N*H] where positions read keys, values, or both, of other places [S]; zeros of none."""
    places = places.where((places >= 0) & (places < int(view.is_computed.sum(dim=1).max())), len(view.key))
    moved = (torch.cat((x, torch.zeros_like(x[:1])))[places] for x in (view.key, view.value))
    key, value = (x if is_read else None for x, is_read in zip(moved, parts, strict=True))
    return view.attend(key=key, value=value)


def other_kv_heads(wrong: WrongOperation) -> Iterator[Hypothesis]:
    """Each query head reads another KV head: tiled instead of repeated, or any map that fits.

    Causes: KV heads are tiled instead of repeated; query heads read the wrong KV heads; the values, or the keys, of the
    wrong KV heads.
    """
    view = wrong.views[0]
    num_heads, num_kv = view.query.shape[1], view.key.shape[1]
    if not 1 < num_kv <= _MOST:
        return
    right_heads = torch.arange(num_heads) // view.num_groups
    for cause, read in _READS.items():
        heads = _nearest(wrong, read, right_heads, num_kv)
        if torch.equal(heads, right_heads):
            continue
        is_tiled = torch.equal(heads, torch.arange(num_heads) % num_kv)
        yield Hypothesis(
            cause="KV heads are tiled instead of repeated" if is_tiled and all(read) else cause,
            output=_attended(wrong, read, right_heads, heads),
            detail=f"KV head of each query head: {heads.tolist()}",
            num_fitted=0 if is_tiled else num_heads,
        )


def _nearest(wrong: WrongOperation, read: tuple[bool, bool], right_heads: torch.Tensor, num_kv: int) -> torch.Tensor:
    """Return the KV head [N] under which each query head comes out nearest."""
    num_heads = len(right_heads)
    candidates = torch.stack(
        [_attended(wrong, read, right_heads, torch.full((num_heads,), head)) for head in range(num_kv)]
    ).unflatten(2, (num_heads, -1))  # [K, R, N, H]
    actual = wrong.actual.unflatten(1, (num_heads, -1))
    distance: torch.Tensor = (candidates - actual).norm(dim=-1).norm(dim=1)  # [K, N]
    return distance.argmin(dim=0)


def _attended(
    wrong: WrongOperation, read: tuple[bool, bool], right_heads: torch.Tensor, heads: torch.Tensor
) -> torch.Tensor:
    """Return the context [R, N*H] where each query head reads from `heads` [N] what `read` says."""
    keys, values = (heads if is_read else right_heads for is_read in read)
    return wrong.over_views(lambda view: view.attend(heads=keys, value_heads=values))


def other_layout(wrong: WrongOperation) -> Iterator[Hypothesis]:
    """The heads' elements alternate in a row, or the heads of a step follow one another with all of their rows.

    Causes: the context is laid out by element, then by head; is reshaped without transposing heads and tokens.
    """
    num_heads = wrong.views[0].query.shape[1]
    output = wrong.expected.unflatten(1, (num_heads, -1)).transpose(1, 2).flatten(1)
    yield Hypothesis(cause="the context is laid out by element, then by head", output=output)

    def by_head(view: AttentionContext) -> torch.Tensor:
        output = view.attend()
        for step in view.rows.step.unique():
            of_step = view.rows.step == step
            output[of_step] = (
                output[of_step].unflatten(1, (num_heads, -1)).transpose(0, 1).reshape(int(of_step.sum()), -1)
            )
        return output

    cause = "the context is reshaped without transposing heads and tokens"
    yield Hypothesis(cause=cause, output=wrong.over_views(by_head))
