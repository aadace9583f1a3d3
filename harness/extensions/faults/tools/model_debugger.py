"""The model debugger of transformers: JSON of what each module of a forward returns; the files of two are compared."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from harness.base.files import scratch_folder
from harness.extensions.faults.answer import ToolAnswer
from harness.extensions.faults.fault import EngineKind
from harness.extensions.faults.subject import ToolSubject
from harness.extensions.faults.tools import driving


class _ModelDebugger:
    names = ("model debugger",)
    kinds = frozenset({EngineKind.MODULE})
    rules = frozenset[str]()

    def check(self, subject: ToolSubject) -> Mapping[str, ToolAnswer]:
        """See `Tool.check`."""
        for forward in driving.forwards(subject, driving.sound_model(subject)):
            expected, actual = (_trace(forward, fed) for fed in (forward.expected, forward.actual))
            for path, said in expected.items():
                if actual.get(path) != said:
                    return {"model debugger": ToolAnswer(is_sound=False, operation=path.partition(".")[2])}
        return {"model debugger": ToolAnswer(is_sound=True)}


TOOL = _ModelDebugger()


def _trace(forward: driving.DrivenForward, fed: driving.Fed) -> dict[str, Any]:
    """Return the text of what each module without children returned, by its path."""
    from transformers.model_debugging_utils import model_addition_debugger_context

    with scratch_folder("harness-") as folder:
        with model_addition_debugger_context(fed.model, debug_path=str(folder), do_prune_layers=False):
            forward.run(fed)
        (path,) = Path(folder).glob("*_FULL_TENSORS.json")
        return dict(_leaves(json.loads(path.read_text(encoding="utf-8"))))


def _leaves(node: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for child in node.get("children", ()):
        yield from _leaves(child)
    if node.get("outputs") is not None:
        yield node.get("module_path", ""), node["outputs"]
