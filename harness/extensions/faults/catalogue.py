"""All faults by id, some of them in 16 bits as well, where rounding hides much of what float32 shows."""

from collections.abc import Iterable, Mapping
from dataclasses import replace

from harness.errors import Code, HarnessError
from harness.extensions.faults import (
    attention,
    cache,
    conventions,
    drafts,
    experts,
    formulas,
    latent,
    norm,
    numbers,
    parts,
    paths,
    position,
    sampling,
    weights,
)
from harness.extensions.faults.fault import Category, Fault

_MODULES = (
    position,
    norm,
    weights,
    attention,
    cache,
    drafts,
    sampling,
    formulas,
    latent,
    numbers,
    conventions,
    parts,
    paths,
    experts,
)
_AGAIN = {
    "bfloat16": (
        "rotary-interleaved", "rotary-partial", "position-decode-plus-one", "rope-scaling-ignored", "rope-theta",
        "qk-norm-skipped-in-decode", "norm-weight-skipped", "residual-dropped", "activation-gelu", "qkv-bias-dropped",
        "layer-from-another", "head-tied-wrongly", "one-weight-flipped", "embedding-shifted", "mask-sees-the-next",
        "window-one-more", "kv-heads-tiled", "split-merge-base-two", "wrong-block", "logits-of-the-row-before",
        "norm-unbiased",
    ),
    "float16": (
        "rotary-skipped", "position-chunk-offset", "qk-norm-over-all-heads", "final-norm-skipped", "activation-of-up",
        "gate-and-up-swapped", "window-one-less", "scale-of-hidden-size", "last-token-unread", "norm-variance-bf16",
        "norm-eps-too-large", "norm-eps-outside",
    ),
}  # fmt: skip


def in_16_bits(faults: Iterable[Fault]) -> list[Fault]:
    """Return the faults that are tried in 16 bits as well, in the dtype that they are tried in."""
    by_id = {fault.id: fault for fault in faults}
    return [
        replace(
            by_id[id],
            id=f"{id}-in-{dtype}",
            summary=f"{by_id[id].summary} The engine computes in {dtype}.",
            setting=replace(by_id[id].setting, dtype=dtype),
        )
        for dtype, ids in _AGAIN.items()
        for id in ids
    ]


_FAULTS = [fault for module in _MODULES for fault in module.FAULTS]
FAULTS: Mapping[str, Fault] = {fault.id: fault for fault in [*_FAULTS, *in_16_bits(_FAULTS)]}


def choose(ids: list[str] | None = None, categories: list[str] | None = None) -> list[Fault]:
    """Return the faults of these ids or categories, all of them by default.

    Raises:
        HarnessError: BAD_OPTION: there is no such fault or category.
    """
    for unknown in [id for id in ids or [] if id not in FAULTS]:
        known = ", ".join(FAULTS)
        raise HarnessError(Code.BAD_OPTION, f"no fault is called {unknown!r}", where="fault", expected=known)
    for unknown in [name for name in categories or [] if name not in list(Category)]:
        known = ", ".join(Category)
        raise HarnessError(Code.BAD_OPTION, f"no category is called {unknown!r}", where="--category", expected=known)
    return [
        fault
        for fault in FAULTS.values()
        if (not ids or fault.id in ids) and (not categories or fault.category in categories)
    ]
