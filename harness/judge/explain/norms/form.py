"""The form of a model's norm, found among the known ones: y = w x / sqrt(mean(x^2) + eps) + b.

`R` rows, `N` heads (1 but for the norms of q and k), `D` elements that are normalised.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any

import torch

from harness.judge.explain.core.failure import Failure
from harness.judge.explain.core.hypothesis import Hypothesis

_EPSILONS = (0.0, 1e-5, 1e-6)
"""Of modules that do not say theirs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NormForm:
    """The rows of a norm in the one form that all explanations know."""

    x: torch.Tensor
    """[R, N, D] float64, the mean subtracted where the norm subtracts it."""
    raw: torch.Tensor
    """[R, N, D] float64, the input as it is."""
    actual: torch.Tensor
    """[R, N, D] float64, what was recorded, less the bias."""
    weight: torch.Tensor
    """[D] float64, what the normalised elements are multiplied by."""
    eps: float
    bias: torch.Tensor | None = None
    is_offset: bool = False
    """Whether the checkpoint holds the weight less one, as Gemma's does."""

    @property
    def parts(self) -> tuple[torch.Tensor, torch.Tensor, float]:
        """Input, weight and eps."""
        return self.x, self.weight, self.eps

    @property
    def is_centred(self) -> bool:
        """Whether the mean is subtracted."""
        return self.x is not self.raw

    def of_weight(self, weight: torch.Tensor) -> torch.Tensor:
        """Return what a weight of the checkpoint multiplies by."""
        return weight + 1 if self.is_offset else weight

    def output(self) -> torch.Tensor:
        """[R, N*D]: what the norm gives."""
        normed = self.x * (self.x.square().mean(dim=-1, keepdim=True) + self.eps).rsqrt() * self.weight
        return (normed if self.bias is None else normed + self.bias).flatten(1)


def form_of(failure: Failure) -> NormForm | None:
    """Return the form under which a norm's inputs give what they should; None if it is none that is known."""
    module: Any = failure.module
    weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
    if not isinstance(weight, torch.Tensor):
        widths = dict.fromkeys((failure.inputs[0].flatten(1).shape[1], failure.hf.head_dim))
        forms = (_form(failure, torch.ones(width, dtype=torch.float64), None) for width in widths)
        return next((form for form in forms if form is not None), None)
    weight = weight.detach().to("cpu", torch.float64)
    return _form(failure, weight, bias.detach().to("cpu", torch.float64) if isinstance(bias, torch.Tensor) else None)


def _form(failure: Failure, weight: torch.Tensor, bias: torch.Tensor | None) -> NormForm | None:
    """Return the form of a norm with this weight [D]; None if it gives something else.

    A norm may read a part of what was recorded: one of several heads, or the steps of a scan beside its B and C.
    """
    x, width = failure.inputs[0].flatten(1), failure.expected.shape[1]
    if weight.dim() != 1 or width % len(weight):
        return None
    parts = (x[:, begin : begin + width] for begin in range(x.shape[1] - width + 1))
    return next((form for part in parts if (form := _form_on(failure, part, weight, bias)) is not None), None)


def _form_on(failure: Failure, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> NormForm | None:
    """Return the form of a norm of rows [R, W]; None if it gives something else."""
    module: Any = failure.module
    given = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    raw, actual = (item.unflatten(-1, (-1, len(weight))) for item in (x, failure.actual))
    own = NormForm(
        x=raw,
        raw=raw,
        actual=actual if bias is None else actual - bias,
        weight=weight,
        eps=0.0,
        bias=bias,
    )
    known = (float(given),) if isinstance(given, int | float) else _EPSILONS
    forms = [form for eps in known for form in _with_eps(replace(own, eps=eps))]
    fits = [form for form in forms if failure.is_expected(form.output())]
    return min(fits, key=lambda form: float((form.output() - failure.expected).norm()), default=None)


def _with_eps(own: NormForm) -> tuple[NormForm, ...]:
    raw, weight = own.raw, own.weight
    return (
        own,
        replace(own, weight=weight + 1, is_offset=True),
        replace(own, x=raw - raw.mean(dim=-1, keepdim=True)),
        replace(own, x=raw - raw.mean(dim=-1, keepdim=True), weight=weight + 1, is_offset=True),
    )


Explanation = Callable[[NormForm, Failure], Iterator[Hypothesis]]


def with_form(explain: Explanation) -> Callable[[Failure], Iterator[Hypothesis]]:
    """Give an explanation the norm's form, and add the bias to what it yields; without a form it yields nothing."""

    @wraps(explain)
    def given(failure: Failure) -> Iterator[Hypothesis]:
        form = form_of(failure)
        if form is None:
            return
        for hypothesis in explain(form, failure):
            if form.bias is None:
                yield hypothesis
            else:
                biased = hypothesis.output.view_as(form.x) + form.bias
                yield replace(hypothesis, output=biased.flatten(1))

    return given
