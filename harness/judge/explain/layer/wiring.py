"""Operations of a layer are connected wrongly: a sum of other tensors, another residual, another order, another input.

Parallel residuals, sandwich norms and the like are sums and norms of a few tensors that stand near each other: each of
them is tried in the place of each.

`R` rows, `W` elements of a row.
"""

from collections.abc import Iterator, Mapping
from itertools import combinations, permutations

import torch

from harness.base.metrics import rounding_unit
from harness.formats.taps import Kind, Operation
from harness.judge.explain.any_kind.generic import name_near, other_taps
from harness.judge.explain.core.rerun import replay
from harness.judge.explain.core.wrong_operation import Hypothesis, WrongOperation

_MAX_TENSORS = 14
_PROBED_ROWS = 2
_KEPT = 3
"""Inputs that are looked at in every row, of those that come nearest in a few."""
_SAME = 1e-6
_ROUNDINGS = 4.0
"""Roundings by which a sum may be off from the tensor that holds it."""
_MOST_PARTS = 4


def other_input(wrong: WrongOperation) -> Iterator[Hypothesis]:
    """A norm or a product reads *tap* + *tap*, or *norm* of *tap*, instead of *tap*."""
    if wrong.operation.kind not in (Kind.NORM, Kind.LINEAR) or not wrong.can_replay:
        return
    read = wrong.graph[wrong.operation.inputs[0]]
    read_name = name_near(wrong, read)
    tensors = dict(_inputs(wrong, read))
    few = torch.arange(min(_PROBED_ROWS, len(wrong.rows)))
    errors = {}
    for name, x in tensors.items():
        probe = replay(wrong.hf, wrong.operation, [x[few]])
        if probe is not None and probe.shape[1] == wrong.actual.shape[1]:
            errors[name] = float((probe - wrong.actual[few]).norm())
    for name in sorted(errors, key=errors.__getitem__)[:_KEPT]:
        output = replay(wrong.hf, wrong.operation, [tensors[name]])
        if output is not None:
            yield Hypothesis(cause=f"it reads {name} instead of {read_name}", output=output)


def _inputs(wrong: WrongOperation, read: Operation) -> Iterator[tuple[str, torch.Tensor]]:
    read_name, read_rows = name_near(wrong, read), wrong.inputs[0].flatten(1)
    near = {name: x for name, x in _near(wrong).items() if x.shape == read_rows.shape}
    near = dict(list(near.items())[:_MAX_TENSORS]) | {read_name: read_rows}
    sums = {f"{one} + {second}": near[one] + near[second] for one, second in combinations(near, 2)}
    allowance = _ROUNDINGS * rounding_unit(wrong.dtype)
    sums = {name: x for name, x in sums.items() if not _is_one_of(x, near, allowance)}
    yield from sums.items()
    layer = wrong.graph.of_layer(wrong.operation.layer)
    norms = [op for op in layer if op.kind is Kind.NORM and op.tap != wrong.operation.tap]
    for norm in norms:
        for name, x in (near | sums if norm.tap == read.tap else {read_name: read_rows}).items():
            made = replay(wrong.hf, norm, [x])
            if (
                made is not None
                and made.shape == read_rows.shape
                and not _is_one_of(made, {read_name: read_rows}, allowance)
            ):
                yield f"{norm.site} of {name}", made


def _is_one_of(x: torch.Tensor, tensors: Mapping[str, torch.Tensor], allowance: float) -> bool:
    """Whether what is made is a tensor that the layer computes, which has a name that says more."""
    return any(float((x - tensor).norm()) <= allowance * float(tensor.norm()) for tensor in tensors.values())


def _near(wrong: WrongOperation) -> dict[str, torch.Tensor]:
    """Return other tensors of the layer, or of the end of the one before, by name; of equal ones the first."""
    tensors: dict[str, torch.Tensor] = {}
    for width in {wrong.expected.shape, wrong.inputs[0].flatten(1).shape}:
        for name, x in other_taps(wrong, width):
            if not any(x.shape == item.shape and torch.equal(x, item) for item in tensors.values()):
                tensors[name] = x
    return tensors


def other_addition(wrong: WrongOperation) -> Iterator[Hypothesis]:
    """Residual and branch are added with factors, which are fitted.

    Causes: the branch is added with a factor of *value*; the residual with a factor of *value*, and the branch with one
    of *value*.
    """
    sides = dict(zip(wrong.operation.inputs, wrong.inputs, strict=True))
    stream, branch = (sides[tap] for tap in _order(wrong))
    of_branch, of_stream = wrong.factor_of(branch, stream), wrong.factor_of(stream, branch)
    for name, factor, output in (
        ("branch", of_branch, stream + of_branch * branch),
        ("residual", of_stream, of_stream * stream + branch),
    ):
        yield Hypothesis(cause=f"the {name} is added with a factor of {factor:.4g}", output=output, num_fitted=1)
    columns = torch.stack((stream.flatten(), branch.flatten()), dim=1)
    factors = torch.linalg.lstsq(columns, wrong.actual.reshape(-1, 1)).solution[:, 0].tolist()
    if min(abs(factor - 1) for factor in factors) > max(_SAME, rounding_unit(wrong.dtype)):  # else one factor says it
        first, second = (f"{factor:.4g}" for factor in factors)
        cause = f"the residual is added with a factor of {first}, and the branch with one of {second}"
        yield Hypothesis(cause=cause, output=factors[0] * stream + factors[1] * branch, num_fitted=2)


def _order(wrong: WrongOperation) -> tuple[str, str]:
    """Return the taps of both sides, the stream first: it was there before the branch was computed from it."""
    taps = [operation.tap for operation in wrong.graph]
    first, second = sorted(wrong.operation.inputs, key=taps.index)
    return first, second


def other_order(wrong: WrongOperation) -> Iterator[Hypothesis]:
    """The parts are joined as [*tap*, *tap*] instead of [*tap*, *tap*]."""
    sites = [wrong.graph[tap].site for tap in wrong.operation.inputs]
    parts = [x.flatten(1) for x in wrong.inputs]
    if not 1 < len(parts) <= _MOST_PARTS or not wrong.is_expected(torch.cat(parts, dim=1)):
        return
    for order in permutations(range(len(parts))):
        if order != tuple(range(len(parts))):
            names = ", ".join(sites[at] for at in order)
            yield Hypothesis(
                cause=f"the parts are joined as [{names}] instead of [{', '.join(sites)}]",
                output=torch.cat([parts[at] for at in order], dim=1),
            )
