"""Ways to get the sum of routed and shared experts wrong: one of them missing, or its gate or factor."""

from collections.abc import Iterator

import torch

from harness.judge.explain.core.failure import Failure
from harness.judge.explain.core.hypothesis import Hypothesis, hypotheses

_NAMED = 1e-2
"""Distance up to which a fitted factor is one that has a name."""


def other_sum(failure: Failure) -> Iterator[Hypothesis]:
    """The routed experts' output and the gated one of the shared expert, added otherwise."""
    found = _parts(failure)
    if found is None:
        return
    routed, shared, gate = found
    gated = shared * gate.sigmoid()
    tried = {
        "the shared expert is not added": routed,
        "the routed experts are not added": gated,
        "the shared expert is added without its gate": routed + shared,
        "the gate of the shared expert is used without a sigmoid": routed + shared * gate,
        "the gate of the shared expert is applied to the routed experts instead": routed * gate.sigmoid() + shared,
        "the gate of the shared expert is applied to the routed experts, too": (routed + shared) * gate.sigmoid(),
        "the shared expert is added twice": routed + 2 * gated,
        "the shared expert is subtracted": routed - gated,
    }
    yield from hypotheses(tried)
    for what, part in (("shared expert", gated), ("routed experts", routed)):
        factor = 1 + failure.factor_of(part, failure.expected)
        if min(abs(factor - named) for named in (-1, 0, 2)) > _NAMED:
            output = failure.expected + (factor - 1) * part
            yield Hypothesis(cause=f"the output of the {what} is scaled by {factor:.4g}", output=output, freedom=1)


def _parts(failure: Failure) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
    """Return routed and shared experts' outputs [R, D] and the gate [R, 1]; None if something else is summed."""
    width = failure.expected.shape[1]
    flat = [x.flatten(1) for x in failure.inputs if x.dim() > 1]
    wide, gates = [x for x in flat if x.shape[1] == width], [x for x in flat if x.shape[1] == 1]
    if len(wide) != 2 or len(gates) != 1 or width == 1:
        return None
    for routed, shared in (wide, wide[::-1]):
        if failure.is_expected(routed + shared * gates[0].sigmoid()):
            return routed, shared, gates[0]
    return None


EXPLANATIONS = (other_sum,)
