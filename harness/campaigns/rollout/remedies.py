"""What the remedies of a gap bring: the rows are replayed without the causes that they mend, the gap is read again."""

from collections.abc import Collection

import torch

from harness.campaigns.rollout.causes import Cause
from harness.campaigns.rollout.forward import Forwards
from harness.campaigns.rollout.setting import Kind
from harness.campaigns.rollout.side import Side


def mended(kinds: Collection[Kind], trainer: Side | None, engine: Side, forwards: Forwards) -> torch.Tensor:
    """Return what goes of the gap if the remedies of these kinds are applied and all else is as it was, [compared]."""
    gone = torch.zeros_like(engine.column)
    for side, sign in ((trainer, 1.0), (engine, -1.0)):
        if side is not None:
            left = _causes_left(side, kinds, trainer, engine)
            gone = gone + sign * (side.predicted(forwards, side.causes) - side.predicted(forwards, left))
    return gone


def _causes_left(side: Side, kinds: Collection[Kind], trainer: Side | None, engine: Side) -> list[Cause]:
    """Return a side's causes after remedies. Of two sides that route by themselves, the trainer takes the engine's."""
    if Kind.ROUTING in kinds and trainer is not None:
        if side is engine:
            kinds = set(kinds) - {Kind.ROUTING}
        else:
            replayed = [cause for cause in engine.causes if cause.kind is Kind.ROUTING]
            return [*(cause for cause in side.causes if cause.kind not in kinds), *replayed]
    return [cause for cause in side.causes if cause.kind not in kinds]
