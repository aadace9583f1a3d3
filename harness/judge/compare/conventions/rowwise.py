"""Conventions of norms and of activations, which work row by row.

`R` rows, `W` elements of a row, `D` elements that are normalised together: a row, or a head of it.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch.nn.functional import gelu, silu

from harness.base.metrics import rounding_unit
from harness.formats.taps import KINDS, ErrorModel, Kind
from harness.judge.compare.conventions.entry import HALF, Convention, Rounding, SuspectRows

UNROUNDED_SUM = "the sum that is normalised is not rounded before"
SUMMED_IN_ORDER = "the squares are summed one after the other in float32"
_MOST_SIGMAS = 5.0
"""Largest allowed multiple of the standard error of such a sum, which is random from row to row."""
_NORM = KINDS[Kind.NORM].error_model or ErrorModel(roundings=2)


def _unrounded_sum(subject: SuspectRows) -> Iterator[Rounding]:
    """Add the residual and normalise the sum in float32, as fused kernels do; it is rounded only for the stream."""
    graph, (source, *_) = subject.hf.graph, subject.operation.inputs or ("",)
    if subject.dtype not in HALF or source not in graph or graph[source].kind is not Kind.ADD:
        return
    addends = [subject.recorded(tap) for tap in graph[source].inputs]
    known = [addend.flatten(1).to(subject.expected.dtype) for addend in addends if addend is not None]
    if len(known) < len(addends) or not known:
        return
    yield Rounding(name=UNROUNDED_SUM, model=_NORM, expected=lambda: _normalised(subject, torch.stack(known).sum(0)))


def _summed_in_order(subject: SuspectRows) -> Iterator[Rounding]:
    """Sum the squares without blocks, as plain loops do (MLX, ONNX Runtime): each partial sum is rounded."""
    if subject.dtype == torch.float32 and len(subject.inputs) == 1:
        allowance = _MOST_SIGMAS * error_of_sum(subject.inputs[0])
        yield Rounding(
            name=SUMMED_IN_ORDER, model=_NORM, expected=lambda: subject.expected.double(), allowance=allowance
        )


def error_of_sum(x: torch.Tensor) -> torch.Tensor:
    """Return [R] float64: the standard error of a norm of [R, ..., D], in roundings, if squares are summed in order.

    Each partial sum S_k is rounded by itself, to a share S_k / S of the whole; the root halves what they add up to.
    """
    partial = x.to("cpu", torch.float64).square().cumsum(dim=-1)
    shares = partial / partial[..., -1:].clamp_min(torch.finfo(torch.float64).tiny)
    return shares.square().sum(dim=-1).flatten(1).mean(dim=1).sqrt() / 2 if x.dim() > 2 else shares.norm(dim=-1) / 2


def _normalised(subject: SuspectRows, x: torch.Tensor) -> torch.Tensor:
    module = subject.hf.module(subject.operation.module)
    result: torch.Tensor = module.forward(x.view_as(subject.inputs[0]))  # without its hooks: the model is being run
    return result.flatten(1).to(torch.float64)


ABSOLUTE_SIGMOID = "the sigmoid is as exact as one in float32, not as its own value"
ABSOLUTE_NORMAL = "gelu's share of its input is as exact as one in float32, not as its own value"
TABULATED = "gelu read from a table in {}"
_SAME = 1e-6
_TABLE_END = 10
"""Largest magnitude in ggml's table of gelu: beyond it gelu is zero or the argument itself."""
_NEAR_TIE = 2.0**-20
"""Relative error of the values in the table: near a tie of float16 they may be rounded up or down."""
_ACTIVATION = KINDS[Kind.ACTIVATION].error_model or ErrorModel(roundings=2)


_SHARES: tuple[tuple[str, Callable[[torch.Tensor], torch.Tensor], float], ...] = (
    # ONNX Runtime's sigmoid is off by up to 1.1 times as much, and by a third of it on average.
    (ABSOLUTE_SIGMOID, silu, 2.0**-23),
    # torch's is off by up to 0.74 times as much on a CPU with AVX-512, and by 0.2 times where it computes one element.
    (ABSOLUTE_NORMAL, gelu, 2.0**-21),
)
"""Functions of the form x times a share between 0 and 1, and the absolute error of that share in float32."""


def _absolute_share(subject: SuspectRows) -> Iterator[Rounding]:
    """Allow an activation's share of its input the same absolute error everywhere: near 0 the share has no digits.

    ONNX Runtime computes a sigmoid as one half plus a fraction, torch gelu's share as one half plus half of erf.
    """
    if subject.dtype != torch.float32:
        return
    expected = subject.expected.flatten(1).to("cpu", torch.float64)
    norm = expected.norm(dim=1)
    for gate, up in _gates(subject, expected.shape[1]):
        for name, of, error in _SHARES:
            if bool(((of(gate) * up - expected).norm(dim=1) <= _SAME * norm).all()):
                allowance = error * (gate * up).norm(dim=1) / (norm * rounding_unit(torch.float32))
                yield Rounding(
                    name=name,
                    model=_ACTIVATION,
                    expected=lambda: subject.expected.double(),
                    allowance=allowance.nan_to_num(nan=0.0, posinf=0.0),
                )
                return


def _tabulated(subject: SuspectRows) -> Iterator[Rounding]:
    """Round argument and value of gelu's tanh form to the declared dtype: ggml's `ggml_vec_gelu_f32` and `_geglu_`."""
    name = subject.declared.gelu
    if name is None or subject.dtype != torch.float32:
        return
    dtype = getattr(torch, name)
    expected = subject.expected.flatten(1).to("cpu", torch.float64)
    for gate, up in _gates(subject, expected.shape[1]):
        of_all = gelu(gate, approximate="tanh") * up
        if not bool(((of_all - expected).norm(dim=1) <= _SAME * expected.norm(dim=1)).all()):
            continue
        value = gelu(gate.to(dtype).to(torch.float64), approximate="tanh")
        is_beyond = gate.abs() >= _TABLE_END
        read = torch.where(is_beyond, gate.clamp(min=0), value.to(dtype).to(torch.float64))
        slack = _slack_of_ties(value, read, dtype).masked_fill(is_beyond, 0)
        result = read * up
        allowance = (slack * up).norm(dim=1) / (result.norm(dim=1) * rounding_unit(torch.float32))
        yield Rounding(
            name=TABULATED.format(name),
            model=_ACTIVATION,
            expected=partial(torch.clone, result),
            allowance=allowance.nan_to_num(nan=0.0, posinf=0.0),
        )
        return


def _slack_of_ties(value: torch.Tensor, rounded: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the step of the dtype where a value is so near to a tie that it may be rounded up or down; 0 elsewhere."""
    info = torch.finfo(dtype)
    step = info.eps * torch.exp2(value.abs().clamp(min=info.tiny).log2().floor())
    is_tie = ((value - rounded).abs() - step / 2).abs() <= _NEAR_TIE * value.abs()
    return torch.where(is_tie, step, 0.0)


def _gates(subject: SuspectRows, width: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield possible pairs of the input of the activation and its factor, [R, W] each."""
    inputs = [item.flatten(1).to("cpu", torch.float64) for item in subject.inputs]
    if len(inputs) == 1 and inputs[0].shape[1] == width:
        yield inputs[0], torch.ones_like(inputs[0])
    if len(inputs) == 1 and inputs[0].shape[1] == 2 * width:
        inputs = list(inputs[0].chunk(2, dim=1))
    if len(inputs) == 2 and all(item.shape[1] == width for item in inputs):
        yield inputs[0], inputs[1]
        yield inputs[1], inputs[0]


CONVENTIONS = (
    Convention(name="norms of a sum that is kept in float32", kinds=(Kind.NORM,), alternatives=_unrounded_sum),
    Convention(name="squares of a norm summed in order", kinds=(Kind.NORM,), alternatives=_summed_in_order),
    Convention(name="a share with an absolute error", kinds=(Kind.ACTIVATION,), alternatives=_absolute_share),
    Convention(
        name="gelu from a table in a lower dtype",
        kinds=(Kind.ACTIVATION, Kind.OTHER),  # a module may compute it by other operators
        alternatives=_tabulated,
    ),
)
