"""TorchLens: every operation of a forward by its label; two traces are compared by torch.testing's tolerances."""

from collections.abc import Mapping
from typing import Any

import torch

from harness.extensions.faults.answer import ToolAnswer
from harness.extensions.faults.fault import EngineKind
from harness.extensions.faults.subject import ToolSubject
from harness.extensions.faults.tools import driving


class _TorchLens:
    names = ("TorchLens",)
    kinds = frozenset({EngineKind.MODULE})
    rules = frozenset[str]()

    def check(self, subject: ToolSubject) -> Mapping[str, ToolAnswer]:
        """See `Tool.check`."""
        import torchlens

        for forward in driving.forwards(subject, driving.sound_model(subject)):
            expected, actual = (
                torchlens.trace(fed.model, input_kwargs=forward.arguments(fed))
                for fed in (forward.expected, forward.actual)
            )
            wrong = first_different(expected, actual)
            if wrong is not None:
                return {"TorchLens": ToolAnswer(is_sound=False, operation=wrong)}
        return {"TorchLens": ToolAnswer(is_sound=True)}


TOOL = _TorchLens()


def first_different(expected: Any, actual: Any) -> str | None:
    """Return the module of the first operation whose output is another one, or that the other trace does not have."""
    known = {op.label: op.out for op in actual.ops}
    for op in expected.ops:
        said = known.get(op.label)
        try:
            torch.testing.assert_close(said, op.out)
        except AssertionError:
            return str(op.module or "").partition(":")[0]
    return None
