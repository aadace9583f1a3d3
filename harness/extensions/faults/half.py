"""Faults of the catalogue once more in an engine of 16 bits, where rounding hides much of what float32 shows."""

from collections.abc import Iterable
from dataclasses import replace

from harness.extensions.faults.fault import Fault

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
    own = {fault.id: fault for fault in faults}
    return [
        replace(
            own[id],
            id=f"{id}-in-{dtype}",
            summary=f"{own[id].summary} The engine computes in {dtype}.",
            setting=replace(own[id].setting, dtype=dtype),
        )
        for dtype, ids in _AGAIN.items()
        for id in ids
    ]
