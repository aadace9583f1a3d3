"""Conventions of products with a weight.

`R` rows, `I` inputs, `O` outputs.
"""

import math
from collections.abc import Collection, Iterator
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
"""Names of the modules whose inputs tensor-parallel engines share out among their ranks."""
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
    """Return what a LoRA adapter adds, [R, O] float64; None of an operation without one."""
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
    """Add the bias in an operation of its own, as kernels without one are used."""
    if subject.dtype not in HALF or len(subject.inputs) != 1:
        return
    weight, bias = weight_and_bias(subject)
    if bias is not None:
        expected = partial(product_then_bias, subject.inputs[0].flatten(1), weight, bias, subject.dtype)
        yield Rounding(name=ADDED_AFTER, model=MODEL, expected=expected)


def _partial_sums(subject: SuspectRows) -> Iterator[Rounding]:
    """Round what each rank makes of its share of the inputs; then add all up, in float32 or rounded again."""
    is_shared = subject.operation.module.rpartition(".")[2] in _ROW_PARALLEL
    if not is_shared or len(subject.inputs) != 1 or subject.dtype not in HALF:
        return
    x = subject.inputs[0].flatten(1)
    declared = subject.declared.num_ranks
    for count in (declared,) if declared is not None else _NUM_RANKS:
        if count > 1 and x.shape[1] % count == 0:
            expected = partial(_sum_of_parts, subject, count)
            yield Rounding(name=PARTIAL_SUMS.format(count), model=MODEL, expected=expected)
            if declared is not None and count > 2:  # with two there is nothing to round in between
                yield Rounding(
                    name=SUMS_IN_DTYPE.format(dtype_name(subject.dtype), count),
                    model=MODEL,
                    expected=expected,
                    allowance=_allowance_of_sums(_parts(subject, count), subject.dtype),
                )


def _sum_of_parts(subject: SuspectRows, count: int) -> torch.Tensor:
    return torch.stack(_parts(subject, count)).sum(dim=0)


def _parts(subject: SuspectRows, count: int) -> list[torch.Tensor]:
    """Return what each rank gives, rounded: [R, O] float64 each. The first adds the bias."""
    weight, bias = weight_and_bias(subject)
    shares = zip(
        subject.inputs[0].flatten(1).to(torch.float64).chunk(count, dim=1), weight.chunk(count, dim=1), strict=True
    )
    own = [product(x, w, None if at else bias) for at, (x, w) in enumerate(shares)]
    return [part.to(subject.dtype).to(torch.float64) for part in own]


def _allowance_of_sums(parts: list[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """[R] roundings of the sums in between, in any order: each as large as some of the parts add up to."""
    between = torch.stack([part.norm(dim=1).square() for part in parts]).sum(dim=0).sqrt()
    total = torch.stack(parts).sum(dim=0).norm(dim=1)
    allowance: torch.Tensor = math.sqrt(len(parts) - 2) * largest_rounding(dtype) * (between / total).clamp(min=1)
    return allowance.nan_to_num(nan=0.0, posinf=0.0).cpu()


def rounded_products(subject: SuspectRows) -> Iterator[Rounding]:
    """Round the inputs to the dtype of a 16-bit weight; all else is float32, as in llama.cpp."""
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


CONVENTIONS = (
    Convention(
        name="inputs of a product rounded to the weight's dtype", kinds=(Kind.LINEAR,), roundings=rounded_products
    ),
    Convention(name="partial sums of ranks, each rounded", kinds=(Kind.LINEAR,), roundings=_partial_sums),
    Convention(name="a bias added by itself", kinds=(Kind.LINEAR,), roundings=_bias_after),
)
