"""Conventions of products with a weight: the order of the sum, and the rounding or quantisation of inputs.

`R` rows, `I` inputs, `O` outputs, `B` blocks, `S` inputs of a block. On a CPU, ggml quantises the inputs of a product
because its weight is quantised: `quantize_row_q8_0` and `quantize_row_q8_K`.
"""

import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from functools import partial

import torch

from harness.base.metrics import largest_rounding
from harness.formats.taps import KINDS, ErrorModel, Kind
from harness.judge.compare.conventions.entry import HALF, Convention, Rounding, SuspectRows, dtype_name

PARTIAL_SUMS = "added up from {} parts, each rounded"
SUMS_IN_DTYPE = "added up in {} from {} parts, each rounded"
ADDED_AFTER = "the bias added to the rounded product"
ROUNDED_INPUTS = "inputs rounded to {}, the weight's dtype"
_NUM_RANKS = (2, 4, 8)
_ROW_PARALLEL = ("o_proj", "down_proj", "c_proj", "out_proj", "dense", "dense_4h_to_h", "fc2", "wo")
"""Names of modules whose inputs are split among tensor-parallel ranks."""
_GGUF_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16}
MODEL = KINDS[Kind.LINEAR].error_model or ErrorModel(roundings=1)


def weight_and_bias(subject: SuspectRows) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return [O, I] and [O] in float64 of an operation with a weight and one input."""
    module = subject.hf.module(subject.operation.module)
    weight: torch.Tensor = module.weight  # type: ignore[assignment]
    bias: torch.Tensor | None = getattr(module, "bias", None)
    if weight.shape[1] != subject.inputs[0].flatten(1).shape[1]:  # HF's Conv1D keeps its weight as [in, out]
        weight = weight.T
    return weight.to(torch.float64), None if bias is None else bias.to(torch.float64)


def adapter_update(subject: SuspectRows) -> torch.Tensor | None:
    """Return the output of the LoRA adapter, [R, O] float64; None without an adapter."""
    try:
        module = subject.hf.module(subject.operation.module)
    except AttributeError:  # an operation that no module shows: logits that are scaled or capped
        return None
    a, b = getattr(module, "lora_a", None), getattr(module, "lora_b", None)
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor) or len(subject.inputs) != 1:
        return None
    x = subject.inputs[0].flatten(1).to(torch.float64)
    update: torch.Tensor = x @ a.to(torch.float64).T @ b.to(torch.float64).T * float(module.scaling)  # type: ignore[arg-type]
    return update


def product(x_RI: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None = None) -> torch.Tensor:
    """Return [R, O] float64."""
    y = x_RI.to(torch.float64) @ weight_OI.T
    return y if bias_O is None else y + bias_O


def product_then_bias(
    x_RI: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Return [R, O] float64: the product rounded to a dtype, and the bias added to that."""
    return product(x_RI, weight_OI).to(dtype).to(torch.float64) + bias_O


def _bias_after(subject: SuspectRows) -> Iterator[Rounding]:
    """Add the bias in a second operation, as engines with kernels without bias do."""
    if subject.dtype not in HALF or len(subject.inputs) != 1:
        return
    weight, bias = weight_and_bias(subject)
    if bias is not None:
        expected = partial(product_then_bias, subject.inputs[0].flatten(1), weight, bias, subject.dtype)
        yield Rounding(name=ADDED_AFTER, model=MODEL, expected=expected)


def _partial_sums(subject: SuspectRows) -> Iterator[Rounding]:
    """Round the product of each rank's share of the inputs; then add them in float32, or round each sum again."""
    is_shared = subject.operation.module.rpartition(".")[2] in _ROW_PARALLEL
    if not is_shared or len(subject.inputs) != 1 or subject.dtype not in HALF:
        return
    x = subject.inputs[0].flatten(1)
    declared = subject.declared.num_ranks
    for count in (declared,) if declared is not None else _NUM_RANKS:
        if count > 1 and x.shape[1] % count == 0:
            expected = partial(_sum_of_parts, subject, count)
            yield Rounding(name=PARTIAL_SUMS.format(count), model=MODEL, expected=expected)
            if declared is not None and count > 2:  # with two ranks there is no sum in between
                yield Rounding(
                    name=SUMS_IN_DTYPE.format(dtype_name(subject.dtype), count),
                    model=MODEL,
                    expected=expected,
                    allowance=_allowance_of_sums(_parts(subject, count), subject.dtype),
                )


def _sum_of_parts(subject: SuspectRows, count: int) -> torch.Tensor:
    return torch.stack(_parts(subject, count)).sum(dim=0)


def _parts(subject: SuspectRows, count: int) -> list[torch.Tensor]:
    """Return the rounded product of each rank, [R, O] float64 each. The first rank adds the bias."""
    weight, bias = weight_and_bias(subject)
    shares = zip(
        subject.inputs[0].flatten(1).to(torch.float64).chunk(count, dim=1), weight.chunk(count, dim=1), strict=True
    )
    sums = [product(x, w, None if at else bias) for at, (x, w) in enumerate(shares)]
    return [part.to(subject.dtype).to(torch.float64) for part in sums]


def _allowance_of_sums(parts: list[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """[R]: the error, in roundings, of rounding the sums in between, in any order of the parts."""
    between = torch.stack([part.norm(dim=1).square() for part in parts]).sum(dim=0).sqrt()
    total = torch.stack(parts).sum(dim=0).norm(dim=1)
    allowance: torch.Tensor = math.sqrt(len(parts) - 2) * largest_rounding(dtype) * (between / total).clamp(min=1)
    return allowance.nan_to_num(nan=0.0, posinf=0.0).cpu()


def rounded_products(subject: SuspectRows) -> Iterator[Rounding]:
    """Round the inputs to the dtype of a 16-bit weight; the rest is float32, as in llama.cpp."""
    if subject.dtype != torch.float32 or len(subject.inputs) != 1:
        return
    weight, bias = weight_and_bias(subject)
    declared = [_GGUF_DTYPES[name] for name in subject.declared.weights if name in _GGUF_DTYPES]
    for dtype in declared if subject.declared.weights else HALF:
        if torch.equal(weight.to(dtype).to(torch.float64), weight):
            x = subject.inputs[0].flatten(1).to(torch.float32).to(dtype)
            expected = partial(product, x, weight, bias)
            yield Rounding(name=ROUNDED_INPUTS.format(dtype_name(dtype)), model=MODEL, expected=expected)


def rounded_inputs(x: torch.Tensor, formats: Collection[str]) -> Iterator[torch.Tensor]:
    """Yield [R, I] float64 inputs as products with weights of the declared 16-bit formats see them."""
    for name in formats:
        if name in _GGUF_DTYPES:
            yield x.to(torch.float32).to(_GGUF_DTYPES[name]).to(torch.float64)


INPUT_TYPES = {
    "Q8_0": frozenset({"Q8_0", "Q4_0", "Q5_0", "IQ4_NL"}),
    "Q8_K": frozenset({
        "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS", "IQ3_S", "IQ3_XXS", "IQ2_S", "IQ2_XS", "IQ2_XXS",
    }),
}  # fmt: skip
"""Formats to which ggml quantises the inputs of a product on a CPU, with the types of weights for which it does so.
Other types are unknown here. Source: `type_traits_cpu` in ggml-cpu.c."""
QUANTISED_INPUTS = "inputs quantised to {}"
_WITH_MINIMA = frozenset({"Q2_K", "Q4_K", "Q5_K"})
"""Types whose weights are a scale times an integer less a minimum; each block has its own minimum."""
_BLOCK_OF_MINIMA = 32
"""Weights that share a minimum in Q4_K and Q5_K. In Q2_K 16 do; with 32 the bound is a little larger."""
TIE = 2e-4
"""Distance of a scaled value from the middle of two integers within which float32 may round it up or down."""
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
"""Formats of quantised inputs: name, types of weights, size of a block, and function."""


def _quantised_inputs(subject: SuspectRows) -> Iterator[Rounding]:
    """Round the inputs to 8 bits in blocks, as ggml does for the declared format of the weights."""
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
    """[R]: the error, in roundings, because ggml adds up integers and minima separately, and then subtracts them.

    Where inputs have one sign, as after an activation, both sums are many times as large as their difference.
    """
    weight, _ = weight_and_bias(subject)
    minima_OB = (-weight.unflatten(1, (-1, _BLOCK_OF_MINIMA)).amin(dim=-1)).clamp(min=0)
    sums_RB = x.to(weight).unflatten(1, (-1, _BLOCK_OF_MINIMA)).sum(dim=-1)
    terms = (sums_RB @ minima_OB.T).norm(dim=1) * 2**0.5  # of both sums
    size = subject.expected.to(weight).norm(dim=1)
    return torch.where(size > 0, terms / size, 0.0)


def _expected(subject: SuspectRows, size: int, blocks: Blocks) -> torch.Tensor:
    """[R, O] float64. A value on a tie is rounded as it fits the engine's row, which excuses no other value."""
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
    """Return the product of inputs that were rounded to integers, [R, O] float64; ties fit the engine's rows.

    Args:
        subject: the rows.
        scaled: [R, I] float64, the inputs in units of their steps.
        step: [R, I] float64, the value of one step.
        weight: [O, I] float64.
        bias: [O] float64.
        dtype: to which the inputs, integers times steps, are rounded once more.
    """
    integers = scaled.round()
    is_tie = (scaled - integers).abs() > 0.5 - TIE
    inputs = (integers * step).to(dtype).to(torch.float64)
    expected = product(inputs, weight, bias)
    # The change of the input if it is rounded the other way.
    flipped = ((integers + torch.sign(scaled - integers)) * step).to(dtype).to(torch.float64)
    return _ties_resolved(expected, subject.actual.to(torch.float64), flipped - inputs, is_tie, weight)


def _ties_resolved(
    expected: torch.Tensor, actual: torch.Tensor, change: torch.Tensor, is_tie: torch.Tensor, weight: torch.Tensor
) -> torch.Tensor:
    """Round each value on a tie the other way where that brings the row nearer.

    A row may have many ties: a quantised embedding returns values on a grid, some of which are ties. So all ties of a
    row are decided at once, by least squares, and each value is then one of its two integers.
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
        for step in steps.T:  # too many to be decided at once
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
    """Apply the conventions of products to a product with an adapter; the adapter's part is computed in float32."""
    update = adapter_update(subject)
    if update is None or subject.dtype != torch.float32:
        return
    alone = replace(subject, actual=subject.actual - update, expected=subject.expected - update)
    for rounding in (*rounded_products(alone), *_quantised_inputs(alone)):
        yield replace(rounding, expected=partial(_sum, rounding.expected, update))


def _sum(product: Callable[[], torch.Tensor], update: torch.Tensor) -> torch.Tensor:
    return product() + update


CONVENTIONS = (
    Convention(
        name="inputs of a product rounded to the weight's dtype", kinds=(Kind.LINEAR,), alternatives=rounded_products
    ),
    Convention(name="partial sums of ranks, each rounded", kinds=(Kind.LINEAR,), alternatives=_partial_sums),
    Convention(name="a bias added by itself", kinds=(Kind.LINEAR,), alternatives=_bias_after),
    Convention(name="a quantised product with an adapter beside it", kinds=(Kind.OTHER,), alternatives=_adapted),
    Convention(
        name="activations quantised before a quantised product", kinds=(Kind.LINEAR,), alternatives=_quantised_inputs
    ),
)
