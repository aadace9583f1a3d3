"""Ways in which attention reads other tensors than rotated keys and values, or coarser ones.

`T` query rows, `S` history rows, `M` known rows, `N` query heads, `K` KV heads, `H` head size.
"""

from collections.abc import Callable, Iterator, Mapping

import torch

from harness.formats.taps import prefix_of
from harness.judge.compare.evidence import AttentionContext
from harness.judge.explain.cache.content_index import RAW_KEY
from harness.judge.explain.cache.replay import contents_of, history
from harness.judge.explain.core.failure import Failure
from harness.judge.explain.core.hypothesis import Hypothesis

_MOST_REQUESTS = 4
"""Requests of which it is tried whether others read them."""
_PADDED = ", in the same columns of a padded batch"
_COARSE_DTYPES = (torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2)


def other_tensors(failure: Failure) -> Iterator[Hypothesis]:
    """The cache holds other tensors: keys for values, keys before rotary, those of another layer."""
    for cause, change in _tensor_changes(failure):
        for name, is_read in (("of every step", _all), ("of earlier steps", _earlier)):
            parts = []
            for view in failure.views:
                changed = change(view)
                if changed is None or not _fits(view, *changed):
                    break
                parts.append(_with_history(view, *changed, is_read))
            else:
                yield Hypothesis(cause=cause, output=torch.cat(parts), detail=f"for tokens {name}")


def _tensor_changes(
    failure: Failure,
) -> Iterator[tuple[str, Callable[[AttentionContext], tuple[torch.Tensor, torch.Tensor] | None]]]:
    yield "K and V are swapped in the cache", lambda view: (view.value, view.key)
    yield "values are read from the K cache", lambda view: (view.key, view.key)
    yield "keys are read from the V cache", lambda view: (view.value, view.value)
    raw = contents_of(failure).taps.get(RAW_KEY, "")

    def unrotated(view: AttentionContext) -> tuple[torch.Tensor, torch.Tensor] | None:
        key = history(failure, view, raw, view.key)
        return None if key is None else (key, view.value)

    yield "keys are cached before rotary", unrotated

    for layer in failure.graph.layers:
        other = failure.graph.attention_of(layer)
        if other is not None and layer != failure.operation.layer:

            def of_layer(
                view: AttentionContext, taps: tuple[str, ...] = other.inputs[1:]
            ) -> tuple[torch.Tensor, torch.Tensor] | None:
                key, value = (history(failure, view, *item) for item in zip(taps, (view.key, view.value), strict=True))
                return None if key is None or value is None else (key, value)

            yield f"reads the cache of layer {layer}", of_layer


def other_request(failure: Failure) -> Iterator[Hypothesis]:
    """Another request is read, position by position, or in the same columns of a padded batch."""
    if failure.slot_history.is_known:
        return  # the block table says it
    lengths = {request.id: request.prompt_length for request in failure.recording.manifest.requests}
    for other in list(lengths)[:_MOST_REQUESTS]:
        ways = {"": dict.fromkeys(lengths, 0), _PADDED: {own: lengths[other] - lengths[own] for own in lengths}}
        for how, shifts in ways.items():
            parts = [_of_request(failure, view, other, shifts) for view in failure.views]
            if (how == _PADDED and not any(shifts.values())) or any(part is None for part in parts):
                continue
            cause = f"reads the keys and values of request {other}{how}"
            yield Hypothesis(cause=cause, output=torch.cat([part for part in parts if part is not None]))


def _of_request(failure: Failure, view: AttentionContext, other: int, shifts: Mapping[int, int]) -> torch.Tensor | None:
    """Return what rows give with the keys and values of another request; None where they were not recorded."""
    shift = shifts[int(view.rows.request[0])]
    key, value = (
        history(failure, view, tap, like, request=other, shift=shift)
        for tap, like in zip(failure.operation.inputs[1:3], (view.key, view.value), strict=True)
    )
    return None if key is None or value is None else view.attend(key=key, value=value)


def read_back(failure: Failure) -> Iterator[Hypothesis]:
    """Attention is right: what it reads is what the cache gives back at the end, which is not what was written."""
    prefix, parts = prefix_of(failure.operation.tap), []
    for view in failure.views:
        key = history(failure, view, f"{prefix}k_cache", view.key)
        value = history(failure, view, f"{prefix}v_cache", view.value)
        if key is None or value is None:
            return
        parts.append(view.attend(key=key, value=value))
    yield Hypothesis(
        cause="reads what the cache gives back, which is not what was written: see k_cache and v_cache",
        output=torch.cat(parts),
        is_vague=True,
    )


def coarse_cache(failure: Failure) -> Iterator[Hypothesis]:
    """Keys and values, or one of them, are stored in a coarser dtype."""
    for dtype in _COARSE_DTYPES:
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
                    for view in failure.views
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
