"""DebugMode of torch: hashes of each operator's output in two runs, and the first that differ."""

from collections.abc import Mapping
from typing import Any

import torch

from harness.extensions.faults.answer import ToolAnswer
from harness.extensions.faults.fault import EngineKind
from harness.extensions.faults.subject import ToolSubject
from harness.extensions.faults.tools import driving


class _DebugMode:
    names = ("DebugMode",)
    kinds = frozenset({EngineKind.MODULE})
    rules = frozenset[str]()

    def check(self, subject: ToolSubject) -> Mapping[str, ToolAnswer]:
        """See `Tool.check`."""
        from torch.utils._debug_mode import DebugMode

        for forward in driving.forwards(subject, driving.sound_model(subject)):
            expected, actual = (_logged(forward, fed) for fed in (forward.expected, forward.actual))
            try:
                wrong = DebugMode.check_hash_mismatches(expected, actual)
            except ValueError:  # other operators: it compares no values then
                return {"DebugMode": ToolAnswer(is_sound=False)}
            if wrong:
                return {"DebugMode": ToolAnswer(is_sound=False, operation=_module_of(expected, wrong[0]))}
        return {"DebugMode": ToolAnswer(is_sound=True)}


TOOL = _DebugMode()


def _logged(forward: driving.DrivenForward, fed: driving.Fed) -> list[Any]:
    from torch.utils._debug_mode import DebugMode

    with DebugMode(record_nn_module=True) as mode, DebugMode.log_tensor_hashes():
        forward.run(fed)
    return list(mode.logs)


def _module_of(logs: list[Any], wrong: Mapping[str, Any]) -> str | None:
    """Return the innermost module of the first operator with that hash."""
    stack: list[str] = []
    for call in logs:
        header, depth = getattr(call, "header", None), call.call_depth
        if header is not None:
            stack = [*stack[:depth], getattr(call, "tag", "")]
        log = call.log or {}
        if wrong["hash1"] in torch.utils._pytree.tree_leaves(log.get("hash")):
            return stack[-1].partition(".")[2] if stack else None
    return None
