"""Rules of comparison on what each module returns: those of torch, and the published ones of other tools.

A module's rows are compared in the order in which modules end; the first one that fails is the answer. Of the reference
engine they get the taps that the harness recorded, of a folder the tensors in it, of an engine of steps its logits.
"""

from collections.abc import Callable, Iterator, Mapping

import torch

from harness.extensions.faults.answer import ToolAnswer
from harness.extensions.faults.fault import EngineKind
from harness.extensions.faults.subject import ToolSubject
from harness.extensions.faults.tools import driving
from harness.extensions.faults.tools.collected import Pair, of_folder, of_recording, of_steps, paired
from harness.formats.taps import LOGITS

TORCH = {"float32": (1.3e-6, 1e-5), "bfloat16": (1.6e-2, 1e-5), "float16": (1e-3, 1e-5)}
"""Relative and absolute tolerance of torch.testing.assert_close."""


def _within(rtol: float, atol: float) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    return lambda actual, expected: torch.isclose(actual, expected, rtol=rtol, atol=atol).all(dim=1)


def _cosine(actual: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Rows of zeros have no direction: they are equal."""
    return (torch.cosine_similarity(actual, expected, dim=1) >= 0.99) | (actual == expected).all(dim=1)


def _sglang(actual: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """1 - 2xy / (xx + yy) <= 1e-3."""
    squares = actual.square().sum(dim=1) + expected.square().sum(dim=1)
    return (1 - 2 * (actual * expected).sum(dim=1) / squares <= 1e-3) | (squares == 0)


def _msprobe(actual: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Cosine over 0.99 and largest difference under 0.001."""
    return _cosine(actual, expected) & ((actual - expected).abs().amax(dim=1) < 1e-3)


RULES: Mapping[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "allclose 1e-3": _within(1e-3, 1e-3),
    "allclose 1e-2": _within(1e-2, 1e-2),
    "cosine 0.99": _cosine,
    "SGLang's comparator": _sglang,
    "msprobe's rule": _msprobe,
    "Polygraphy": _within(1e-5, 1e-5),
}
CLOSE, TOKENS = "assert_close", "greedy tokens"


class _Hooks:
    names = (CLOSE, *RULES, TOKENS)
    kinds = frozenset(EngineKind) - {EngineKind.SERVER}
    rules = frozenset({"SGLang's comparator", "msprobe's rule", "Polygraphy"})

    def check(self, subject: ToolSubject) -> Mapping[str, ToolAnswer]:
        """See `Tool.check`."""
        if subject.suite is not None:
            return dict.fromkeys(self.names, ToolAnswer(is_sound=True))
        rules = {CLOSE: _within(*TORCH[subject.dtype]), **RULES}
        answers: dict[str, ToolAnswer] = {}
        for operation, rows, actual, expected in pairs(subject):
            for name in rules.keys() - answers.keys():
                wrong = (~rules[name](actual, expected)).nonzero()[:, 0].tolist()
                failing = [rows[at] for at in wrong]
                if failing:
                    answers[name] = ToolAnswer(is_sound=False, operation=operation, row=min(failing))
            if operation == LOGITS and TOKENS not in answers:
                different = actual.argmax(dim=1) != expected.argmax(dim=1)
                if bool(different.any()):
                    answers[TOKENS] = ToolAnswer(
                        is_sound=False, operation=operation, row=rows[int(different.nonzero()[0])]
                    )
        return {name: answers.get(name, ToolAnswer(is_sound=True)) for name in self.names}


TOOL = _Hooks()


def pairs(subject: ToolSubject) -> Iterator[Pair]:
    """Yield what can be compared, in the order of the run."""
    if subject.plan is not None:
        yield from of_recording(subject)
    elif subject.kind is EngineKind.DUMP:
        yield from of_folder(subject)
    elif subject.kind is EngineKind.STEP:
        yield from of_steps(subject)
    else:
        yield from _of_modules(subject)


def _of_modules(subject: ToolSubject) -> Iterator[Pair]:
    sound = driving.sound_model(subject)
    for forward in driving.forwards(subject, sound):
        expected = driving.captured(sound, lambda: forward.run(forward.expected))
        actual = driving.captured(subject.engine, lambda: forward.run(forward.actual))
        yield from paired(expected, actual, forward.rows)
