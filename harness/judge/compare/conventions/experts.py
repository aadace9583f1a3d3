"""Experts whose inputs are quantised before each of their products, as ggml does.

The inputs of an expert's last product are computed within the operation, so their rounding is not known. The effect of
the engine's dtype on them is measured, and a code on a tie may be either of two.

`R` rows, `C` chosen experts of a row, `W` elements of a row.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from harness.base.metrics import rounding_unit, row_errors
from harness.formats.taps import ErrorModel, Kind
from harness.judge.compare.bounds import CONTROL_FACTOR
from harness.judge.compare.conventions.entry import Convention, Rounding, SuspectRows
from harness.judge.compare.conventions.linear import FORMATS, QUANTISED_INPUTS, TIE, Blocks
from harness.oracle.experts import arguments_of, num_experts, reads_slots, run_experts

Steps = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""Takes inputs of products; returns the inputs in units of their steps, and the steps."""
_MODEL = ErrorModel(roundings=1, accumulation=10)
_ROUNDINGS_OF_PRODUCT = 3.0
"""Error of ggml's products, which are added up in float32: outside of experts it is 1.7 to 2.6 roundings in the median
of the rows, and 5.3 at most (reports/cpu/llamacpp.md)."""
_TIE_ROUNDINGS = 2
"""Roundings to the engine's dtype by which a value may be off before it becomes a code, as gate times up is."""
_TIE_FACTOR = 1.5
"""Largest change by the ties that an engine rounds the other way, as a multiple of the change by all ties."""


def _as_ggml(subject: SuspectRows) -> Iterator[Rounding]:
    is_served = len(subject.inputs) == 3 and subject.dtype == torch.float32 and bool(subject.operation.module)
    module = subject.hf.module(subject.operation.module) if is_served else None
    if module is None or num_experts(module) is None or reads_slots(module):
        return
    for name, weights, size, blocks in FORMATS:
        if weights.intersection(subject.declared.weights):
            steps = partial(_steps_of_blocks, blocks, size)
            yield from experts_with(subject, steps, size, QUANTISED_INPUTS.format(name), _ROUNDINGS_OF_PRODUCT)


def _steps_of_blocks(blocks: Blocks, size: int, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scaled, step = blocks(x.to(torch.float32).unflatten(1, (-1, size)))
    return scaled.flatten(1), step.expand_as(scaled).flatten(1)


def experts_with(
    subject: SuspectRows, steps: Steps, size: int, name: str, of_product: float = 1.0
) -> Iterator[Rounding]:
    """Yield the experts with quantised inputs, with the effect of the engine's dtype on the codes as allowance.

    Args:
        subject: the rows.
        steps: how the inputs are quantised.
        size: inputs that share a step.
        name: of the convention.
        of_product: roundings of a product in the engine's dtype.
    """
    hows = (None, False), (subject.dtype, False), (None, True)
    exact, noisy, tied = (_run(subject, steps, size, *how) for how in hows)
    if exact is None or noisy is None or tied is None:
        return
    unit = rounding_unit(subject.dtype)
    noise, ties = (row_errors(item, exact).nan_to_num(nan=0.0) / unit for item in (noisy, tied))
    allowance = CONTROL_FACTOR * of_product * noise.clamp(min=float(noise.median())) + _TIE_FACTOR * ties
    yield Rounding(name=name, model=_MODEL, expected=partial(torch.clone, exact), allowance=allowance)


def _run(
    subject: SuspectRows, steps: Steps, size: int, dtype: torch.dtype | None, is_tied: bool
) -> torch.Tensor | None:
    """Return the output of HF's experts with quantised inputs, [R, W] float64; None if no product was intercepted.

    Args:
        subject: the rows.
        steps: how the inputs are quantised.
        size: inputs that share a step.
        dtype: to which each product and its inputs are rounded; None: they are not.
        is_tied: whether all values that are next to the middle of two codes are rounded the other way.
    """
    arguments = arguments_of(subject.hf.graph, subject.operation, subject.inputs)
    if arguments is None:
        return None
    x, chosen, weights = arguments
    module = subject.hf.module(subject.operation.module)
    weight_dtype = next(module.parameters()).dtype
    products = QuantisedInputs(
        steps, size, dtype, _TIE_ROUNDINGS * torch.finfo(subject.dtype).eps / 2 if is_tied else None
    )

    def run() -> torch.Tensor:
        with torch.no_grad(), subject.hf.exactly(dtype=weight_dtype), products:
            return run_experts(module, x.to(weight_dtype), chosen, weights.to(weight_dtype))

    # The judge runs within HF's forward, which is watched in its own thread.
    with ThreadPoolExecutor(max_workers=1) as thread:
        output = thread.submit(run).result()
    return output if products.num_seen else None


class QuantisedInputs(TorchFunctionMode):
    """Quantises the inputs of products, in modules that run in this context."""

    def __init__(self, steps: Steps, size: int, dtype: torch.dtype | None = None, tie: float | None = None) -> None:
        """Take the quantisation of the inputs, the dtype of all values, and the distance within which ties flip."""
        super().__init__()
        self._steps, self._size, self._dtype, self._tie = steps, size, dtype, tie
        self.num_seen = 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is not nn.functional.linear:
            return func(*args, **(kwargs or {}))
        x, *others = args
        if x.shape[-1] % self._size or not x.numel():
            return func(*args, **(kwargs or {}))
        self.num_seen += 1
        with torch._C.DisableTorchFunction():  # the modes around this one keep values unrounded
            seen = self._seen(x.flatten(0, -2)).view_as(x).to(x.dtype)
            return self._rounded(func(seen, *others, **(kwargs or {})))

    def _seen(self, x: torch.Tensor) -> torch.Tensor:
        scaled, step = self._steps(self._rounded(x))
        codes = scaled.round()
        if self._tie is not None:
            is_tie = (scaled - codes).abs() > 0.5 - TIE - self._tie * scaled.abs()
            codes = torch.where(is_tie, codes + torch.sign(scaled - codes), codes)
        return codes * step

    def _rounded(self, x: torch.Tensor) -> torch.Tensor:
        return x if self._dtype is None else x.to(self._dtype).to(x.dtype)


CONVENTIONS = (
    Convention(
        name="inputs of experts quantised to 8 bits in blocks, as ggml does",
        kinds=(Kind.OTHER,),
        alternatives=_as_ggml,
    ),
)
