"""Products whose inputs are quantised first, because the weight is: what ggml does on a CPU.

`R` rows, `I` inputs, `O` outputs, `B` blocks, `S` inputs of a block. Formulas: ggml's `quantize_row_q8_0` and
`quantize_row_q8_K`.
"""

from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from functools import partial

import torch

from harness.formats.taps import Kind
from harness.judge.compare.conventions.entry import Convention, Rounding, SuspectRows
from harness.judge.compare.conventions.linear import MODEL, adapter_update, product, rounded_products, weight_and_bias

INPUT_TYPES = {
    "Q8_0": frozenset({"Q8_0", "Q4_0", "Q5_0", "IQ4_NL"}),
    "Q8_K": frozenset({
        "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS", "IQ3_S", "IQ3_XXS", "IQ2_S", "IQ2_XS", "IQ2_XXS",
    }),
}  # fmt: skip
"""What ggml quantises the inputs of a product to on a CPU, with the types of weights for which it does so; of others it
is not known here. Source: `type_traits_cpu` in ggml-cpu.c."""
QUANTISED_INPUTS = "inputs quantised to {}"
_WITH_MINIMA = frozenset({"Q2_K", "Q4_K", "Q5_K"})
"""Types whose weights are a scale times an integer less a minimum, of which each block has its own."""
_BLOCK_OF_MINIMA = 32
"""Of Q4_K and Q5_K. Of Q2_K it is 16, for which twice as many say a little more."""
_TIE = 2e-4
"""Distance of a scaled value from the middle of two integers within which float32 may round it either way."""
_MAX_TIES = 1 << 14
Blocks = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""Takes [R, I/S, S] float32; returns the scaled values [R, I/S, S] and what an integer stands for [R, I/S, 1], both
float64."""


def _q8_0(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One scale for 32 values, their largest magnitude over 127; it is kept in float16."""
    scale = x.abs().amax(dim=-1, keepdim=True) / 127
    scaled = torch.where(scale > 0, x.to(torch.float64) / scale.to(torch.float64), 0.0)
    return scaled, scale.to(torch.float16).to(torch.float64)


def _q8_k(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One scale for 256 values: the one of the largest magnitude becomes -127. The scale is kept in float32."""
    largest = x.gather(-1, x.abs().argmax(dim=-1, keepdim=True))
    inverse = torch.where(largest != 0, -127.0 / largest, 0.0)
    scale = torch.where(inverse != 0, 1.0 / inverse, 0.0)
    return x.to(torch.float64) * inverse.to(torch.float64), scale.to(torch.float64)


FORMATS: tuple[tuple[str, frozenset[str], int, Blocks], ...] = (
    ("Q8_0", INPUT_TYPES["Q8_0"], 32, _q8_0),
    ("Q8_K", INPUT_TYPES["Q8_K"], 256, _q8_k),
)
"""What inputs are quantised to, with which weights, in blocks of how many, and how."""


def _quantised_inputs(subject: SuspectRows) -> Iterator[Rounding]:
    """Round the inputs to 8 bits in blocks, as the declared format of the weights asks for."""
    if subject.dtype != torch.float32 or len(subject.inputs) != 1:
        return
    x = subject.inputs[0].flatten(1)
    for name, weights, size, blocks in FORMATS:
        if weights.intersection(subject.declared.weights) and x.shape[1] % size == 0:
            expected = partial(_expected, subject, size, blocks)
            has_minima = bool(_WITH_MINIMA.intersection(weights, subject.declared.weights))
            allowance = _of_minima(subject, x) if has_minima else None
            yield Rounding(name=QUANTISED_INPUTS.format(name), model=MODEL, expected=expected, allowance=allowance)


def _of_minima(subject: SuspectRows, x: torch.Tensor) -> torch.Tensor:
    """[R] roundings that a row loses because ggml adds up integers and minima by themselves, and subtracts them.

    Where inputs have one sign, as after an activation, both sums are many times as large as what is left.
    """
    weight, _ = weight_and_bias(subject)
    minima_OB = (-weight.unflatten(1, (-1, _BLOCK_OF_MINIMA)).amin(dim=-1)).clamp(min=0)
    sums_RB = x.to(weight).unflatten(1, (-1, _BLOCK_OF_MINIMA)).sum(dim=-1)
    terms = (sums_RB @ minima_OB.T).norm(dim=1) * 2**0.5  # of both sums
    size = subject.expected.to(weight).norm(dim=1)
    return torch.where(size > 0, terms / size, 0.0)


def _expected(subject: SuspectRows, size: int, blocks: Blocks) -> torch.Tensor:
    """[R, O] float64. A value on a tie is rounded the way that fits the engine's row: that excuses no other value."""
    weight, bias = weight_and_bias(subject)
    scaled, scale = blocks(subject.inputs[0].flatten(1).to(torch.float32).unflatten(1, (-1, size)))
    return product_of_integers(subject, scaled.flatten(1), scale.expand_as(scaled).flatten(1), weight, bias)


def product_of_integers(
    subject: SuspectRows,
    scaled: torch.Tensor,
    step: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """Return the product of inputs that were rounded to integers, [R, O] float64; ties as they fit the engine's rows.

    Args:
        subject: the rows.
        scaled: [R, I] float64, the inputs in units of their steps.
        step: [R, I] float64, what an integer stands for.
        weight: [O, I] float64.
        bias: [O] float64.
        dtype: that the inputs are rounded to once more, as integers times steps.
    """
    integers = scaled.round()
    is_tie = (scaled - integers).abs() > 0.5 - _TIE
    inputs = (integers * step).to(dtype).to(torch.float64)
    expected = product(inputs, weight, bias)
    # The other way to round, as what it changes of the input.
    other = ((integers + torch.sign(scaled - integers)) * step).to(dtype).to(torch.float64)
    return _ties_resolved(expected, subject.actual.to(torch.float64), other - inputs, is_tie, weight)


def _ties_resolved(
    expected: torch.Tensor, actual: torch.Tensor, change: torch.Tensor, is_tie: torch.Tensor, weight: torch.Tensor
) -> torch.Tensor:
    """Round each value on a tie the other way where the row is nearer to that.

    A row may have many: what a quantised embedding gives is on a grid, some of whose steps are ties. So all values of a
    row are told at once, by least squares, and each is then one of its two integers.
    """
    if int(is_tie.sum()) > _MAX_TIES:
        return expected
    for row in is_tie.any(dim=1).nonzero()[:, 0].tolist():
        ties = is_tie[row].nonzero()[:, 0]
        steps = weight[:, ties] * change[row, ties]
        residual = actual[row] - expected[row]
        if 2 * len(ties) <= len(weight):
            share = torch.linalg.lstsq(steps, residual[:, None]).solution[:, 0]
            expected[row] += steps[:, share > 0.5].sum(dim=1)
            continue
        for step in steps.T:  # too many to be told at once
            if float((actual[row] - expected[row]) @ step) > 0.5 * float(step @ step):
                expected[row] += step
    return expected


def quantised_inputs(x: torch.Tensor, formats: Collection[str]) -> Iterator[torch.Tensor]:
    """Yield [R, I] float64 inputs as products with weights of the declared formats see them."""
    for _, weights, size, blocks in FORMATS:
        if weights.intersection(formats) and x.shape[1] % size == 0:
            scaled, scale = blocks(x.to(torch.float32).unflatten(1, (-1, size)))
            yield (scaled.round() * scale).flatten(1)


def _adapted(subject: SuspectRows) -> Iterator[Rounding]:
    """Hold a product with an adapter beside it to the conventions of products; the adapter's part is float32."""
    update = adapter_update(subject)
    if update is None or subject.dtype != torch.float32:
        return
    alone = replace(subject, actual=subject.actual - update, expected=subject.expected - update)
    for rounding in (*rounded_products(alone), *_quantised_inputs(alone)):
        yield replace(rounding, expected=partial(_sum, rounding.expected, update))


def _sum(product: Callable[[], torch.Tensor], update: torch.Tensor) -> torch.Tensor:
    return product() + update


CONVENTIONS = (
    Convention(name="a quantised product with an adapter beside it", kinds=(Kind.OTHER,), roundings=_adapted),
    Convention(
        name="activations quantised before a quantised product", kinds=(Kind.LINEAR,), roundings=_quantised_inputs
    ),
)
