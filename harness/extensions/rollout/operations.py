"""A side's operations against the truth: recorded values put back up to an operation, the truth goes on.

The steps from one part of the model to the next add up to what the side's arithmetic does to its log probabilities.
HF in the side's dtype, or the trainer's replica, run on the same values up to a part, gives the floor of the step.
Where a part is outside of its floor, its operations are taken one by one, and their steps add up to the part's.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from harness.extensions.rollout.forward import Arithmetic, Forwards
from harness.extensions.rollout.setting import PutBack
from harness.extensions.rollout.side import Side, is_outside
from harness.oracle.model import HFModel


@dataclass(frozen=True, slots=True, kw_only=True)
class PartTerm:
    """What the operations of one part of the model, or one of them, do to the log probabilities."""

    name: str
    """Path of the part or tap of the operation: `model.layers.3`, `lm_head`, `model.layers.3.mlp.down_proj`."""
    values: torch.Tensor
    """[compared] float64."""
    floor: torch.Tensor
    """[compared] float64: the same of HF in the side's dtype, or of the trainer's replica."""
    sound: torch.Tensor
    """[compared] float64: what HF's own operations, or the replica's, do on the same input."""
    is_head: bool

    @property
    def is_outside(self) -> bool:
        """Whether rounding alone does not give it."""
        return is_outside(self.values, self.floor)


def part_terms(forwards: Forwards, side: Side, values: PutBack) -> list[PartTerm]:
    """Return the terms of a side that computed `values`, in the order of the run.

    A part that is outside of its floor is split into its operations, if one of these is outside by itself.
    """
    hf = forwards.hf
    head = hf.part_of(hf.graph[hf.graph.logits].module)
    steps = _Steps(forwards, side, values)
    parts = _parts(hf, values)
    if len(parts) == 1:  # of a side whose logits alone are seen, they hold all that it does
        return [steps.take("the whole model, of which only logits are seen", next(iter(parts.values())))]
    terms: list[PartTerm] = []
    for part, sources in parts.items():
        begin = steps.begin
        term = steps.take(part, sources, is_head=part == head)
        own = [term]
        if len(sources) > 1 and term.is_outside:
            end, steps.begin = steps.begin, begin
            own = [steps.take(_name(hf, source), [source], is_head=part == head) for source in sources]
            steps.begin = end
        terms += own if any(item.is_outside for item in own) else [term]
    return terms


class _Steps:
    """The truth with the side's values put back up to `begin`, from where the next values are put back."""

    def __init__(self, forwards: Forwards, side: Side, values: PutBack) -> None:
        self._forwards, self._values = forwards, values.values
        self._is_trainer = side.name == "trainer"
        self._least = float(forwards.noise(side.setting()).min())
        self.begin = side.setting()

    def take(self, name: str, sources: Sequence[str], *, is_head: bool = False) -> PartTerm:
        """Put the values of sources back, too, and return what that does."""
        forwards, begin = self._forwards, self.begin
        given = begin.cut.values if begin.cut is not None else {}
        control = forwards.record(begin, is_trainer=self._is_trainer)
        same = {source: control[source] for source in sources if source in control}
        rounded = replace(begin, cut=PutBack({**given, **same}))
        floor = forwards.deviation((rounded, Arithmetic.TRUTH), (begin, Arithmetic.TRUTH), begin)
        self.begin = replace(begin, cut=PutBack({**given, **{source: self._values[source] for source in sources}}))
        before = forwards.truth(begin)
        sound = forwards.truth(rounded) - before
        return PartTerm(
            name=name,
            values=forwards.truth(self.begin) - before,
            sound=sound,
            # what HF itself does there is legitimate: with wrong values before it, an operation may round in long tails
            floor=torch.maximum(floor, sound.abs()).clamp(min=self._least),
            is_head=is_head,
        )


def _name(hf: HFModel, source: str) -> str:
    operation = hf.graph.by_source.get(source)
    return operation.tap if operation is not None else source


def _parts(hf: HFModel, values: PutBack) -> dict[str, list[str]]:
    """Return the parts that have recorded values, in the order of the run, and the sources of these."""
    parts: dict[str, list[str]] = {}
    for operation in hf.graph:
        if operation.source in values.values:
            parts.setdefault(hf.part_of(operation.module), []).append(operation.source)
    return parts
