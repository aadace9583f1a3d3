"""A side's operations against the truth, part by part: recorded values put back up to a part, the truth goes on.

The steps from one part to the next add up to what the side's arithmetic does to its log probabilities. HF in the side's
dtype, or the trainer's replica, run on the side's own values up to a part, is the floor of the part's step.
"""

from dataclasses import dataclass, replace

import torch

from harness.campaigns.rollout.forward import Arithmetic, Forwards
from harness.campaigns.rollout.setting import Cut
from harness.campaigns.rollout.side import Side
from harness.oracle.model import HFModel


@dataclass(frozen=True, slots=True, kw_only=True)
class PartTerm:
    """What the operations of one part of the model do to the log probabilities."""

    name: str
    """Path of the part: `model.layers.3`, `lm_head`."""
    values: torch.Tensor
    """[compared] float64."""
    floor: torch.Tensor
    """[compared] float64: the same of HF in the side's dtype, or of the trainer's replica."""
    sound: torch.Tensor
    """[compared] float64: what HF's own part, or the replica's, does on the same input."""
    is_head: bool


def part_terms(forwards: Forwards, side: Side, values: Cut) -> list[PartTerm]:
    """Return the terms of a side that computed `values`, in the order of the run."""
    setting = side.setting()
    hf = forwards.hf
    head = hf.part_of(hf.graph[hf.graph.logits].module)
    least = float(forwards.noise(setting).min())
    before, given, terms = forwards.truth(setting), dict[str, torch.Tensor](), list[PartTerm]()
    begin = setting
    parts = _parts(hf, values)
    for part, sources in parts.items():
        control = forwards.record(replace(setting, cut=Cut(dict(given))), is_trainer=side.name == "trainer")
        same = {source: control[source] for source in sources if source in control}
        rounded = replace(setting, cut=Cut({**given, **same}))
        floor = forwards.deviation((rounded, Arithmetic.TRUTH), (begin, Arithmetic.TRUTH), begin)
        given |= {source: values.values[source] for source in sources}
        begin = replace(setting, cut=Cut(dict(given)))
        after = forwards.truth(begin)
        is_alone = len(parts) == 1  # of a side whose logits alone are seen, they hold all that it does
        terms.append(
            PartTerm(
                name="the whole model, of which only logits are seen" if is_alone else part,
                values=after - before,
                sound=forwards.truth(rounded) - before,
                floor=floor.clamp(min=least),
                is_head=part == head and not is_alone,
            )
        )
        before = after
    return terms


def _parts(hf: HFModel, values: Cut) -> dict[str, list[str]]:
    """Return the parts that have recorded values, in the order of the run, and the sources of these."""
    parts: dict[str, list[str]] = {}
    for operation in hf.graph:
        if operation.source in values.values:
            parts.setdefault(hf.part_of(operation.module), []).append(operation.source)
    return parts
