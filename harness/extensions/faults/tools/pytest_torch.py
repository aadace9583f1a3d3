"""pytest-torch: `localize_divergence` of two models, with the tolerances that it has by default."""

from collections.abc import Mapping

import torch

from harness.extensions.faults.answer import ToolAnswer
from harness.extensions.faults.fault import EngineKind
from harness.extensions.faults.subject import ToolSubject
from harness.extensions.faults.tools import driving


class _PytestTorch:
    names = ("pytest-torch",)
    kinds = frozenset({EngineKind.MODULE})
    rules = frozenset[str]()

    @torch.no_grad()
    def check(self, subject: ToolSubject) -> Mapping[str, ToolAnswer]:
        """See `Tool.check`."""
        from pytest_torch import localize_divergence

        for forward in driving.forwards(subject, driving.sound_model(subject)):
            expected, actual = forward.expected, forward.actual
            report = localize_divergence(
                expected.model, actual.model, forward.arguments(expected), inputs_b=forward.arguments(actual),

            )  # fmt: skip
            if report.first is not None:
                return {"pytest-torch": ToolAnswer(is_sound=False, operation=report.first.name)}
        return {"pytest-torch": ToolAnswer(is_sound=True)}


TOOL = _PytestTorch()
