"""Keys and values in few bits with a scale: of a token, a step, a head, a channel, or stale.

`R` rows, `K` KV heads, `H` head size.
"""

from collections.abc import Iterator

import torch

from harness.formats.taps import Kind
from harness.judge.compare.align import is_readback
from harness.judge.compare.cache_format import GRIDS, on_grid
from harness.judge.explain.core.failure import Failure
from harness.judge.explain.core.hypothesis import Hypothesis


def in_few_bits(failure: Failure) -> Iterator[Hypothesis]:
    """Written values come back in few bits with a scale for each group: of tokens, of steps, heads or channels.

    A scale is that of the group's largest number, or stale: that of the group in the step before, or the first.
    """
    if failure.expected.shape[1] % failure.hf.head_dim or not bool(failure.actual.isfinite().all()):
        return
    is_cache = failure.operation.kind is Kind.CACHE
    lower = "the cache is in a lower dtype" if is_cache else "it is what a cache in a lower dtype gives back"
    heads = failure.expected.unflatten(1, (-1, failure.hf.head_dim))
    request = failure.rows.request
    step = torch.stack([request, _written_in(failure)], dim=1).unique(dim=0, return_inverse=True)[1]
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


def _written_in(failure: Failure) -> torch.Tensor:
    """Return the step that computed each row, [R] int64; 0 for rows that no step did."""
    steps = torch.zeros(len(failure.rows), dtype=torch.int64)
    for index, step in enumerate(step for step in failure.recording.steps if not is_readback(step)):
        for at, (request, position) in enumerate(failure.rows.places()):
            if bool(((step.request == request) & (step.position == position)).any()):
                steps[at] = index
    return steps


EXPLANATIONS = (in_few_bits,)
