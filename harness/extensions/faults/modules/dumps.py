"""Faults and sound variants of modules, as the folder of tensors that the module leaves in one prefill."""

from dataclasses import replace

from harness.extensions.faults.fault import ANY_ROW, FIRST, SECOND, EngineKind, Fault
from harness.extensions.faults.modules import (
    attention,
    experts,
    norms,
    rotary,
    sound_attention,
    sound_modules,
    weights,
    wiring,
)
from harness.extensions.faults.modules.declaring import PROMPT, SOUND

_LISTS = (attention, rotary, norms, wiring, weights, experts)
_SOUND = (sound_attention, sound_modules)
"""They add to `SOUND` when they are imported."""


def _is_in_prefill(fault: Fault) -> bool:
    """Tell what one whole prefill of request 0 shows."""
    request, position = fault.row or ANY_ROW
    return fault.setting.schedule == "plain" and request == 0 and position is not None and position < PROMPT


def _as_dump(fault: Fault) -> Fault:
    """Return a fault as a folder shows it: the first row sees one key, and its context depends on no score."""
    row = SECOND if fault.row == FIRST and (fault.tap or "").rstrip(")").endswith("_rope") else fault.row
    return replace(fault, id=f"dump/{fault.id}", engine=EngineKind.DUMP, row=row)


_SHOWN = [fault for table in _LISTS for fault in table.FAULTS if _is_in_prefill(fault)]
FAULTS = [_as_dump(fault) for fault in _SHOWN[::4]]
SOUND += [
    replace(variant, id=f"dump/{variant.id}", engine=EngineKind.DUMP)
    for variant in [item for item in SOUND if item.setting.schedule == "plain" and item.engine is EngineKind.MODULE][
        ::6
    ]
]
