"""All faults and sound variants by id. Some faults are tried in 16 bits as well, where rounding hides much of them."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches

from harness.errors import Code, HarnessError
from harness.extensions.faults.fault import Category, EngineKind, Fault, Variant
from harness.extensions.faults.modules import attention as module_attention
from harness.extensions.faults.modules import (
    caches,
    dumps,
    norms,
    rotary,
    sound_attention,
    sound_modules,
    states,
    steps,
    wiring,
)
from harness.extensions.faults.modules import experts as module_experts
from harness.extensions.faults.modules import weights as module_weights
from harness.extensions.faults.modules.declaring import SOUND
from harness.extensions.faults.reference import (
    attention,
    cache,
    conventions,
    drafts,
    drawn_settings,
    drawn_settings_experts,
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
from harness.extensions.faults.reference import variants as sound_engines
from harness.extensions.faults.servers import served_faults, served_variants

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
    drawn_settings,
    drawn_settings_experts,
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


_OBJECTS = (
    module_attention, rotary, norms, wiring, module_weights, module_experts, states, caches, steps, dumps,
)  # fmt: skip
_REFERENCE = [fault for module in _MODULES for fault in module.FAULTS]
_FAULTS = [
    *_REFERENCE, *in_16_bits(_REFERENCE), *(fault for module in _OBJECTS for fault in module.FAULTS),
    *served_faults(_REFERENCE),
]  # fmt: skip
_QUANTISED = re.compile("(weight|cache)-(int8|fp8|float8)|inputs-q8|int8-weights|cache-clipped|keys-scaled-in-cache")
FAULTS: Mapping[str, Fault] = {
    fault.id: replace(fault, category=Category.QUANTISED) if _QUANTISED.search(fault.id) else fault for fault in _FAULTS
}
_SOUND = (sound_attention, sound_modules, dumps)
"""They add to `SOUND` when they are imported."""
_VARIANTS = [*sound_engines.variants(), *SOUND]
VARIANTS: Mapping[str, Variant] = {variant.id: variant for variant in (*_VARIANTS, *served_variants(_VARIANTS))}


def entry_of(id: str) -> Fault | Variant:
    """Return the fault or sound variant of an id, also of a drawn one.

    Raises:
        HarnessError: BAD_OPTION: there is none.
    """
    if id.startswith("power/"):
        from harness.extensions.faults.power import power_entry

        return power_entry(id)
    if id.startswith("drawn/"):
        from harness.extensions.faults.drawn.draw import drawn

        if (fault := drawn(id)) is not None:
            return fault
    return VARIANTS[id] if id in VARIANTS else choose([id])[0]


def choose(
    ids: list[str] | None = None, categories: list[str] | None = None, kinds: Sequence[EngineKind] = ()
) -> list[Fault]:
    """Return the faults of these ids, categories and kinds of engine, all of them by default.

    Raises:
        HarnessError: BAD_OPTION: there is no such fault or category.
    """
    known = {id: fault for id, fault in FAULTS.items() if not kinds or fault.engine in kinds}
    for unknown in [id for id in ids or [] if id not in known]:
        near = ", ".join(get_close_matches(unknown, known, cutoff=0.3)) or None
        raise HarnessError(Code.BAD_OPTION, f"no fault is called {unknown!r}", where="fault", expected=near)
    for unknown in [name for name in categories or [] if name not in list(Category)]:
        what, expected = f"no category is called {unknown!r}", ", ".join(Category)
        raise HarnessError(Code.BAD_OPTION, what, where="--category", expected=expected)
    return [
        fault
        for fault in known.values()
        if (not ids or fault.id in ids) and (not categories or fault.category in categories)
    ]


def kinds_of(names: Sequence[str] | None) -> list[EngineKind]:
    """Return kinds of engine by their names.

    Raises:
        HarnessError: BAD_OPTION: there is no such kind.
    """
    for unknown in [name for name in names or () if name not in list(EngineKind)]:
        what, known = f"no kind of engine is called {unknown!r}", ", ".join(EngineKind)
        raise HarnessError(Code.BAD_OPTION, what, where="--engine", expected=known)
    return [EngineKind(name) for name in names or ()]
