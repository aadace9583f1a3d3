"""Ways to connect operations wrongly: another sum of a layer's tensors, or another tensor that is read.

Parallel residuals, sandwich norms and the like are sums and norms of a few tensors that stand near each other. Each is
tried in the place of each.

`R` rows, `W` elements of a row.
"""

from collections.abc import Iterator, Mapping
from itertools import combinations

import torch

from harness.base.metrics import rounding_unit
from harness.formats.taps import Kind, Operation
from harness.judge.explain.any_kind.generic import other_taps
from harness.judge.explain.core.failure import Failure
from harness.judge.explain.core.hypothesis import Hypothesis
from harness.judge.explain.core.operations import replay

_MAX_TENSORS = 14
_PROBED_ROWS = 2
_KEPT = 3
"""Inputs that are looked at in every row, of those that come nearest in a few."""
_SAME = 1e-6
_ROUNDINGS = 4.0
"""Roundings by which a sum may be off from the tensor that holds it."""


def other_sum(failure: Failure) -> Iterator[Hypothesis]:
    """One term of a sum is left out, comes twice, with another sign or factor; or another tensor is added."""
    operation = failure.operation
    terms = {failure.graph[tap].site: x.flatten(1) for tap, x in zip(operation.inputs, failure.inputs, strict=True)}
    if len(terms) < 2 or any(x.shape != failure.expected.shape for x in terms.values()):
        return
    factors = _factors(failure.expected, terms)
    if factors is None:
        return
    for name, x in terms.items():
        part = factors[name] * x
        for how, times in (("not added", -1), ("added twice", 1), ("subtracted", -2)):
            yield Hypothesis(cause=f"{name} is {how}", output=failure.expected + times * part)
        factor = 1 + failure.factor_of(part, failure.expected)
        cause = f"{name} is added with a factor of {factor * factors[name]:.4g} instead of {factors[name]:.4g}"
        yield Hypothesis(cause=cause, output=failure.expected + (factor - 1) * part, freedom=1)
        for other, tensor in _near(failure).items():
            if other not in terms:
                cause = f"{other} is added in the place of {name}"
                yield Hypothesis(cause=cause, output=failure.expected + factors[name] * (tensor - x), is_vague=True)


def _factors(expected: torch.Tensor, terms: Mapping[str, torch.Tensor]) -> dict[str, float] | None:
    """Return the factors of the terms in a sum; None if it is no sum of them."""
    columns = torch.stack([x.flatten() for x in terms.values()], dim=1)
    solution = torch.linalg.lstsq(columns, expected.reshape(-1, 1)).solution
    left = float((columns @ solution - expected.reshape(-1, 1)).norm())
    if left > _SAME * float(expected.norm()):
        return None
    return dict(zip(terms, solution[:, 0].tolist(), strict=True))


def other_input(failure: Failure) -> Iterator[Hypothesis]:
    """A norm or a product reads the sum of two tensors, or what a norm makes of another one."""
    if failure.operation.kind not in (Kind.NORM, Kind.LINEAR) or not failure.can_replay:
        return
    read = failure.graph[failure.operation.inputs[0]]
    found = dict(_inputs(failure, read))
    few = torch.arange(min(_PROBED_ROWS, len(failure.rows)))
    errors = {}
    for name, x in found.items():
        given = replay(failure.hf, failure.operation, [x[few]])
        if given is not None and given.shape[1] == failure.actual.shape[1]:
            errors[name] = float((given - failure.actual[few]).norm())
    for name in sorted(errors, key=errors.__getitem__)[:_KEPT]:
        output = replay(failure.hf, failure.operation, [found[name]])
        if output is not None:
            yield Hypothesis(cause=f"it reads {name} instead of {read.site}", output=output)


def _inputs(failure: Failure, read: Operation) -> Iterator[tuple[str, torch.Tensor]]:
    own = failure.inputs[0].flatten(1)
    near = {name: x for name, x in _near(failure).items() if x.shape == own.shape}
    near = dict(list(near.items())[:_MAX_TENSORS]) | {read.site: own}
    sums = {f"{one} + {other}": near[one] + near[other] for one, other in combinations(near, 2)}
    sums = {name: x for name, x in sums.items() if not _is_one_of(x, near, _ROUNDINGS * rounding_unit(failure.dtype))}
    yield from sums.items()
    layer = failure.graph.of_layer(failure.operation.layer)
    norms = [op for op in layer if op.kind is Kind.NORM and op.tap != failure.operation.tap]
    for norm in norms:
        for name, x in (near | sums if norm.tap == read.tap else {read.site: own}).items():
            made = replay(failure.hf, norm, [x])
            if made is not None and made.shape == own.shape:
                yield f"{norm.site} of {name}", made


def _is_one_of(x: torch.Tensor, tensors: Mapping[str, torch.Tensor], allowance: float) -> bool:
    """Whether a sum is a tensor that the layer computes, which has a name that says more."""
    return any(float((x - tensor).norm()) <= allowance * float(tensor.norm()) for tensor in tensors.values())


def _near(failure: Failure) -> dict[str, torch.Tensor]:
    """Return other tensors of the layer, or of the end of the one before, by name; of equal ones the first."""
    found: dict[str, torch.Tensor] = {}
    for width in {failure.expected.shape, failure.inputs[0].flatten(1).shape}:
        for name, x in other_taps(failure, width):
            if not any(x.shape == item.shape and torch.equal(x, item) for item in found.values()):
                found[name] = x
    return found


EXPLANATIONS = (other_sum, other_input)
