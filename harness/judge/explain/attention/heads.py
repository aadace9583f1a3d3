"""Ways in which query heads read other KV heads than their own: keys and values of them, or one of the two.

`N` query heads, `K` KV heads, `R` rows, `H` head size.
"""

from collections.abc import Iterator

import torch

from harness.judge.compare.evidence import AttentionContext
from harness.judge.explain.attention.views import joined
from harness.judge.explain.core.failure import Failure
from harness.judge.explain.core.hypothesis import Hypothesis

_MOST = 64
"""KV heads up to which every one is tried for every query head."""


_READS = {
    "query heads read the wrong KV heads": (True, True),
    "query heads read the values of the wrong KV heads, and the right keys": (False, True),
    "query heads read the keys of the wrong KV heads, and the right values": (True, False),
}
"""Whether keys are read from another head, and whether values are."""


def other_kv_heads(failure: Failure) -> Iterator[Hypothesis]:
    """Each query head reads another KV head: tiled instead of repeated, or any map that fits."""
    view = failure.views[0]
    num_heads, num_kv = view.query.shape[1], view.key.shape[1]
    if not 1 < num_kv <= _MOST:
        return
    own = torch.arange(num_heads) // view.num_groups
    for cause, read in _READS.items():
        heads = _nearest(failure, read, own, num_kv)
        if torch.equal(heads, own):
            continue
        is_tiled = torch.equal(heads, torch.arange(num_heads) % num_kv)
        yield Hypothesis(
            cause="KV heads are tiled instead of repeated" if is_tiled and all(read) else cause,
            output=_attended(failure, read, own, heads),
            detail=f"KV head of each query head: {heads.tolist()}",
            freedom=0 if is_tiled else num_heads,
        )


def _nearest(failure: Failure, read: tuple[bool, bool], own: torch.Tensor, num_kv: int) -> torch.Tensor:
    """Return the KV head [N] under which each query head comes out nearest."""
    num_heads = len(own)
    candidates = torch.stack(
        [_attended(failure, read, own, torch.full((num_heads,), head)) for head in range(num_kv)]
    ).unflatten(2, (num_heads, -1))  # [K, R, N, H]
    actual = failure.actual.unflatten(1, (num_heads, -1))
    distance: torch.Tensor = (candidates - actual).norm(dim=-1).norm(dim=1)  # [K, N]
    return distance.argmin(dim=0)


def _attended(failure: Failure, read: tuple[bool, bool], own: torch.Tensor, heads: torch.Tensor) -> torch.Tensor:
    """Return the context [R, N*H] where each query head reads from `heads` [N] what `read` says."""
    keys, values = (heads if is_read else own for is_read in read)
    return joined(failure, lambda view: view.attend(heads=keys, value_heads=values))


def other_layout(failure: Failure) -> Iterator[Hypothesis]:
    """The heads' elements alternate in a row, or the heads of a step follow one another with all of their rows."""
    num_heads = failure.views[0].query.shape[1]
    output = failure.expected.unflatten(1, (num_heads, -1)).transpose(1, 2).flatten(1)
    yield Hypothesis(cause="the context is laid out by element, then by head", output=output)

    def by_head(view: AttentionContext) -> torch.Tensor:
        output = view.attend()
        for step in view.rows.step.unique():
            own = view.rows.step == step
            output[own] = output[own].unflatten(1, (num_heads, -1)).transpose(0, 1).reshape(int(own.sum()), -1)
        return output

    cause = "the context is reshaped without transposing heads and tokens"
    yield Hypothesis(cause=cause, output=joined(failure, by_head))


EXPLANATIONS = (other_kv_heads, other_layout)
