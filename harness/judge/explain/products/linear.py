"""A matrix product is wrong: no bias, other weights, weights in another order, a coarser dtype.

`R` rows, `I` inputs, `O` outputs.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from math import prod

import torch

from harness.base.numerics import Numerics
from harness.formats.taps import LOGITS, Kind
from harness.judge.compare.conventions.linear import product, quantised_inputs, rounded_inputs
from harness.judge.explain.core.formats import (
    HALF_DTYPES,
    Change,
    name_of,
    of_inputs,
    of_inputs_alone,
    of_weights,
    rounded,
)
from harness.judge.explain.core.wrong_operation import Hypothesis, WrongOperation
from harness.oracle.declared_inputs import rounded_inputs as rounded_as_declared

INTERLEAVED = "the rows of each head are interleaved, as rotary over neighbouring pairs needs them"
_WAY_OF_INTERLEAVED = (
    "an engine that rotates neighbouring pairs may keep q and k so: leave both out of names=, or give the rows to the "
    "harness in HF's order; attention judges them then"
)
_MAX_MATCHED = 4096
"""Outputs whose order is looked for: beyond it, matching each with each would take too long."""
_MANTISSA_BITS_OF_TF32 = 10
_PIECES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_MAX_PIECES, _MAX_SUMMED = 512, 8192
"""Additions that are replayed, and inputs of a product whose sum is."""
_RANKS = (2, 4, 8)
"""Ranks that the inputs of a product may be divided among."""
_FULL_RANK, _DISTINCT, _SPARE_ROWS = 4, 1e-3, 4
"""Times the rank of an update that those of inputs and outputs must be; share of a direction that counts there; rows
by which there must be more of them than of directions."""
_ALIKE = 0.7
"""Cosine from which fitted weights are a changed version of the right ones."""


def weight_in_another_order(wrong: WrongOperation) -> Iterator[Hypothesis]:
    """The rows of the weight are in another order, and the elements of the bias are not."""
    bias = _bias(wrong, wrong.operation.tap)
    if bias is not None:
        plain = replace(wrong, actual=wrong.actual - bias, expected=wrong.expected - bias)
        for hypothesis in outputs_in_another_order(plain):
            yield replace(
                hypothesis, cause=f"{hypothesis.cause}, and those of its bias are not", output=hypothesis.output + bias
            )


def outputs_in_another_order(wrong: WrongOperation) -> Iterator[Hypothesis]:
    """Each output is matched with the outputs of this module and of those that read the same input.

    Modules that are stacked into one product (q, k and v; gate and up) are split again by rows of the weight.

    Causes: the rows of the stacked weight are in the wrong order: ...; the rows of the weight are in another order; the
    outputs are those of *module*.
    """
    actual = wrong.actual
    width = wrong.expected.shape[1] + sum(prod(operation.shape) for operation in wrong.siblings())
    if max(width, actual.shape[1]) > _MAX_MATCHED or len(actual) < 2:
        return
    pool, names = _pool(wrong)
    if pool.shape[1] > _MAX_MATCHED:  # a shape may not be known
        return
    # One row alone could be matched by chance; over several, only the true source is near in all of them.
    distance = torch.cdist(actual.T.contiguous(), pool.T.contiguous())
    source = distance.argmin(dim=1)
    if torch.equal(source, torch.arange(len(source))):
        return
    if _is_interleaved(source, wrong.head_dim):
        yield Hypothesis(cause=INTERLEAVED, output=pool[:, source], detail=_WAY_OF_INTERLEAVED)
        return
    yield Hypothesis(
        cause=_order(source, names, wrong),
        output=pool[:, source],
        detail=_sources(source, names),
        num_fitted=len(_runs(source, names)),
    )


def _is_interleaved(source: torch.Tensor, head_dim: int) -> bool:
    """Whether both halves of each head are merged, so that the pairs of HF's rotary embedding are neighbours."""
    if head_dim % 2 or len(source) % head_dim:
        return False
    order = torch.arange(len(source)).view(-1, 2, head_dim // 2).transpose(1, 2)
    return torch.equal(source, order.flatten())


def _pool(wrong: WrongOperation) -> tuple[torch.Tensor, list[tuple[str, int]]]:
    """All outputs of this module and its siblings, as they should be, [R, O of all]; each one's module and index."""
    columns, names = [wrong.expected], [(wrong.operation.site, i) for i in range(wrong.expected.shape[1])]
    for operation in wrong.siblings():
        weight = wrong.weight(operation.tap)
        if weight is not None:
            columns.append(product(_x(wrong), weight, _bias(wrong, operation.tap)))
            names += [(operation.site, i) for i in range(len(weight))]
    return torch.cat(columns, dim=1), names


def _order(source: torch.Tensor, names: Sequence[tuple[str, int]], wrong: WrongOperation) -> str:
    modules = {names[at][0] for at in source.tolist()}
    if modules == {wrong.operation.site}:
        return "the rows of the weight are in another order"
    others = sorted(module for module in modules if module != wrong.operation.site)
    if len(modules) == 1:
        return f"the outputs are those of {others[0]}"
    return f"the rows of the stacked weight are in the wrong order: outputs of {', '.join(others)} among its own"


def _runs(source: torch.Tensor, names: Sequence[tuple[str, int]]) -> list[list[int]]:
    """Return first and last of each run of outputs that come from one place."""
    runs: list[list[int]] = []
    for at, origin in enumerate(source.tolist()):
        if runs and origin == source[at - 1] + 1 and names[origin][0] == names[int(source[at - 1])][0]:
            runs[-1][1] = at
        else:
            runs.append([at, at])
    return runs


def _sources(source: torch.Tensor, names: Sequence[tuple[str, int]]) -> str:
    """List the runs of outputs that come from one place: `0-31 from self_attn.k_proj 0-31`."""
    runs = _runs(source, names)
    shown = [
        f"{begin}-{end} from {names[int(source[begin])][0]} {names[int(source[begin])][1]}-{names[int(source[end])][1]}"
        for begin, end in runs[:4]
    ]
    return "outputs " + ", ".join(shown) + (f" and {len(runs) - 4} more runs" if len(runs) > 4 else "")


def part_of_the_inputs(wrong: WrongOperation) -> Iterator[Hypothesis]:
    """A rank's part of the inputs is not summed, is summed twice, or meets the weights of the first part.

    Causes: part *k* of 2, 4 or 8 of the inputs is not summed, as if a rank were left out; is summed twice; is
    multiplied by the weights of part 1.
    """
    weight, x = wrong.weight(wrong.operation.tap), _x(wrong)
    if weight is None or weight.shape[1] != x.shape[1]:
        return
    for count in (rank for rank in _RANKS if not x.shape[1] % rank and rank < x.shape[1]):
        first, *_ = weight.chunk(count, dim=1)
        for at, (x_k, weight_k) in enumerate(zip(x.chunk(count, dim=1), weight.chunk(count, dim=1), strict=True)):
            part, which = product(x_k, weight_k), f"part {at + 1} of {count} of the inputs"
            yield Hypothesis(cause=f"{which} is not summed, as if a rank were left out", output=wrong.expected - part)
            yield Hypothesis(cause=f"{which} is summed twice", output=wrong.expected + part)
            if at:
                output = wrong.expected - part + product(x_k, first)
                yield Hypothesis(cause=f"{which} is multiplied by the weights of part 1", output=output)


def low_rank_update(wrong: WrongOperation) -> Iterator[Hypothesis]:
    """What is added to the product has a low rank: an adapter's update is merged, or was not undone.

    It may be asserted where there are more rows than directions of the inputs: there, what is not linear in them shows.

    Causes: an update of rank *r* is added to the weight: an adapter that is merged, or is still merged (said where
    nothing else fits).
    """
    u, sizes, _ = torch.linalg.svd(_x(wrong), full_matrices=False)
    u = u[:, sizes > _DISTINCT * sizes[0]]  # a few tokens, often, give few directions
    most = min(u.shape[1], wrong.actual.shape[1]) // _FULL_RANK
    if most < 1:
        return
    left, sizes, right = torch.linalg.svd(u.T @ (wrong.actual - wrong.expected), full_matrices=False)
    tiny = torch.finfo(torch.float64).tiny
    rank = 1 + int((sizes[:most] / sizes[1 : most + 1].clamp(min=tiny)).argmax())
    yield Hypothesis(
        cause=f"an update of rank {rank} is added to the weight: an adapter that is merged, or is still merged",
        output=wrong.expected + u @ (left[:, :rank] * sizes[:rank]) @ right[:rank],
        num_fitted=round(rank * (u.shape[1] + wrong.num_elements)),
        is_cause=len(u.unique(dim=0)) >= u.shape[1] + _SPARE_ROWS,
        is_fallback=True,
    )


def one_weight(wrong: WrongOperation) -> Iterator[Hypothesis]:
    """One output is off by a multiple of one input: one element of the weight is another.

    Causes: one element of the weight is another: [*output*, *input*].
    """
    weight, x = wrong.weight(wrong.operation.tap), _x(wrong)
    error = wrong.actual - wrong.expected
    if weight is None or len(x) < 3:
        return
    row = int(error.norm(dim=0).argmax())
    alike = (error[:, row] @ x).abs() / x.norm(dim=0).clamp(min=torch.finfo(torch.float64).tiny)
    column = int(alike.argmax())
    change = float(
        error[:, row] @ x[:, column] / x[:, column].square().sum().clamp(min=torch.finfo(torch.float64).tiny)
    )
    output = wrong.expected.clone()
    output[:, row] += change * x[:, column]
    right = float(weight[row, column])
    yield Hypothesis(
        cause=f"one element of the weight is another: [{row}, {column}]",
        output=output,
        detail=f"it is {right + change:.4g} instead of {right:.4g}",
        num_fitted=3,  # its row, its column and its value
    )


def coarse_product(wrong: WrongOperation) -> Iterator[Hypothesis]:
    """The weight was rounded, cut off or quantised before the product, or weight and input were.

    Causes: the weight is in *dtype*; the weight is cut off to *dtype* instead of rounded; the weight is in int8, int4
    or float8, with one scale for ..., and the input in ...; the product is of inputs in *dtype*; the input of the
    product is rounded to *dtype*, and the weight is not; the input of the product is in int8, with one scale for
    each token, or for *n* inputs.
    """
    weight, bias, x = wrong.weight(wrong.operation.tap), _bias(wrong, wrong.operation.tap), _x(wrong)
    if weight is None or weight.shape[1] != x.shape[1]:
        return
    for name, change in of_weights(weight.shape[1]):
        coarse = change(weight)
        if torch.equal(coarse, weight):
            continue  # it is a weight of that format
        yield Hypothesis(cause=f"the weight is {name}", output=product(x, coarse, bias))
        for what, goes_with, quantised in of_inputs():
            if name.startswith(goes_with):
                cause = f"the weight is {name}, and the input in {what}"
                yield Hypothesis(cause=cause, output=product(quantised(x), coarse, bias))
    roundings: dict[str, Change] = {name_of(dtype): partial(rounded, dtype=dtype) for dtype in HALF_DTYPES}
    if wrong.recording.manifest.device != "cpu":  # which has no TF32, and on these bits float16 is the same
        roundings["TF32"] = _to_tf32
    for name, change in roundings.items():
        both = change(x), change(weight)
        if not torch.equal(both[0], x):
            yield Hypothesis(cause=f"the product is of inputs in {name}", output=product(*both, bias))
            if not torch.equal(both[1], weight):
                cause = f"the input of the product is rounded to {name}, and the weight is not"
                yield Hypothesis(cause=cause, output=product(both[0], weight, bias))
    for name, quantised in of_inputs_alone(x.shape[1]):
        yield Hypothesis(cause=f"the input of the product is in {name}", output=product(quantised(x), weight, bias))


def sums_in_16_bits(wrong: WrongOperation) -> Iterator[Hypothesis]:
    """The sum of the products is kept in *dtype*."""
    weight, bias, x = wrong.weight(wrong.operation.tap), _bias(wrong, wrong.operation.tap), _x(wrong)
    if weight is None or weight.shape[1] != x.shape[1] or weight.shape[1] > _MAX_SUMMED:
        return
    for dtype in HALF_DTYPES:
        for size in _PIECES:
            if size >= x.shape[1] or x.shape[1] / size > _MAX_PIECES:
                continue
            total = torch.zeros_like(wrong.expected)
            for at in range(0, x.shape[1], size):
                total = rounded(total + rounded(x[:, at : at + size] @ weight[:, at : at + size].T, dtype), dtype)
            yield Hypothesis(
                cause=f"the sum of the products is kept in {name_of(dtype)}",
                output=total if bias is None else total + bias,
                detail=f"{size} products at a time are added to it",
            )


def _to_tf32(x: torch.Tensor) -> torch.Tensor:
    mantissa, exponent = torch.frexp(x)
    step = 2.0 ** (_MANTISSA_BITS_OF_TF32 + 1)
    return torch.ldexp((mantissa * step).round() / step, exponent)


def nobodys_weights(wrong: WrongOperation) -> Iterator[Hypothesis]:
    """The outputs are linear in the inputs, under a weight that is nobody's: fitted if there are rows enough.

    Causes: the weights are none of this checkpoint: not loaded, or another checkpoint's; not quite those of this
    checkpoint; the weights of the tied head are not those of the embedding: stale, or not loaded (needs half as many
    again rows as inputs: with fewer, any output would fit).
    """
    x = _x(wrong)
    if len(x) > 1.5 * (x.shape[1] + 1):
        ones = torch.cat((x, torch.ones(len(x), 1, dtype=torch.float64)), dim=1)
        weight = torch.linalg.lstsq(ones, wrong.actual).solution
        yield Hypothesis(
            cause=_whose_weights(wrong, weight[:-1].T),
            output=ones @ weight,
            num_fitted=round(len(weight) * wrong.num_elements),
        )


def _whose_weights(wrong: WrongOperation, fitted: torch.Tensor) -> str:
    """Say what is to be thought of fitted weights [O, I] that are no known module's."""
    right = wrong.weight(wrong.operation.tap)
    is_like_own = right is not None and right.shape == fitted.shape and _cosine(right, fitted) > _ALIKE
    if wrong.operation.tap == LOGITS and getattr(wrong.config, "tie_word_embeddings", False):
        why = "stale" if is_like_own else "not loaded, or another checkpoint's"
        return f"the weights of the tied head are not those of the embedding: {why}"
    if is_like_own:
        return "the weights are not quite those of this checkpoint: changed, or in another format"
    return "the weights are none of this checkpoint: not loaded, or another checkpoint's"


def _cosine(first: torch.Tensor, second: torch.Tensor) -> float:
    return float((first * second).sum() / (first.norm() * second.norm()))


def _x(wrong: WrongOperation) -> torch.Tensor:
    return wrong.inputs[0].flatten(1)


def _bias(wrong: WrongOperation, module: str) -> torch.Tensor | None:
    return wrong.weight(module, "bias")


def declared_failures(wrong: WrongOperation) -> Iterator[WrongOperation]:
    """Yield a product's wrong rows under each order of rounding its inputs that the engine declares.

    An engine that quantises the inputs of its products has, where a weight is wrong, the wrong product of quantised
    inputs. Compared with the recorded inputs, no cause would bring the error down to the rounding floor.
    """
    declared = wrong.recording.manifest.numerics or Numerics()
    is_adapted = wrong.operation.kind is Kind.OTHER and hasattr(wrong.module, "lora_a")
    weight = wrong.weight(wrong.operation.tap) if is_adapted or wrong.operation.kind is Kind.LINEAR else None
    if weight is None:
        return
    bias, x = wrong.weight(wrong.operation.tap, "bias"), wrong.inputs[0].flatten(1)
    for inputs in _declared_inputs(wrong, x, declared):
        if is_adapted:  # the adapter's own products take the inputs as they are
            yield replace(wrong, expected=wrong.expected + (inputs - x) @ weight.T)
            continue
        rerun = wrong.rerun and wrong.rerun.reading(wrong.operation.inputs[0], wrong.rows, inputs)
        yield replace(wrong, inputs=[inputs], expected=product(inputs, weight, bias), rerun=rerun)


def _declared_inputs(wrong: WrongOperation, x: torch.Tensor, declared: Numerics) -> Iterator[torch.Tensor]:
    """Yield [R, I] float64 inputs as the engine's formats, or the quantised checkpoint, say that products see them."""
    if wrong.dtype == torch.float32 and declared.weights:
        yield from rounded_inputs(x, declared.weights)
        yield from quantised_inputs(x, declared.weights)
    yield from rounded_as_declared(wrong.hf, wrong.operation.module, x, wrong.dtype)
