"""A norm is wrong: its weight, its eps, its statistic, the elements that it runs over.

The known form is y = w x / sqrt(mean(x^2) + eps) + b, found for each model among the ways to write it.

`R` rows, `N` heads (1 except in the norms of q and k), `D` elements that are normalised, `W` elements of a row.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any

import torch

from harness.judge.explain.core.formats import HALF_DTYPES, name_of, rounded
from harness.judge.explain.core.wrong_operation import Hypothesis, WrongOperation

_USUAL_EPSILONS = (0.0, 1e-5, 1e-6)
"""Of modules that do not say theirs."""
_EPSILONS = (1e-6, 1e-5, 1e-8, 1e-7, 1e-12, 0.0, 1e-4, 1e-3, 1e-2)
_PADDINGS = (8, 16, 32, 64, 128, 256)
"""Numbers to whose multiples rows are padded in memory."""
_CHANGED = 0.1
"""Of the largest effect of a changed weight, what another must have to be changed as well."""
_SAME_WEIGHT, _CLEARLY = 0.02, 0.25
"""Share of the largest weight up to which an order gives the weights, and of what is left without it."""
_NEARLY = 0.001
"""Distance of all weights, relative, below which they are those of the checkpoint, changed."""


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

    @property
    def parts(self) -> tuple[torch.Tensor, torch.Tensor, float]:
        """Input, weight and eps."""
        return self.x, self.weight, self.eps

    @property
    def is_centred(self) -> bool:
        """Whether the mean is subtracted."""
        return self.x is not self.raw

    def output(self) -> torch.Tensor:
        """[R, N*D]: what the norm gives."""
        normed = self.x * (self.x.square().mean(dim=-1, keepdim=True) + self.eps).rsqrt() * self.weight
        return (normed if self.bias is None else normed + self.bias).flatten(1)


def form_of(wrong: WrongOperation) -> NormForm | None:
    """Return the form under which a norm's inputs give what they should; None if it is none that is known.

    A norm may read a part of what was recorded: one of several heads, or the steps of a scan beside its B and C.
    """
    x, width = wrong.inputs[0].flatten(1), wrong.expected.shape[1]
    weight, bias = (getattr(wrong.module, name, None) for name in ("weight", "bias"))
    if isinstance(weight, torch.Tensor):
        weights = [weight.detach().to("cpu", torch.float64)]
        bias = bias.detach().to("cpu", torch.float64) if isinstance(bias, torch.Tensor) else None
    else:
        sizes, bias = dict.fromkeys((x.shape[1], wrong.head_dim)), None
        weights = [torch.ones(size, dtype=torch.float64) for size in sizes]
    parts = [x[:, begin : begin + width] for begin in range(x.shape[1] - width + 1)]
    fitting = [weight for weight in weights if weight.dim() == 1 and width % len(weight) == 0]
    forms = (_form_on(wrong, part, weight, bias) for weight in fitting for part in parts)
    return next((form for form in forms if form is not None), None)


def _form_on(
    wrong: WrongOperation, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> NormForm | None:
    """Return the form of a norm of rows [R, W] with this weight [D]; None if it gives something else."""
    module: Any = wrong.module
    declared_eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    known = (float(declared_eps),) if isinstance(declared_eps, int | float) else _USUAL_EPSILONS
    raw, actual = (item.unflatten(-1, (-1, len(weight))) for item in (x, wrong.actual))
    actual = actual if bias is None else actual - bias
    forms = [
        NormForm(x=read, raw=raw, actual=actual, weight=factor, eps=eps, bias=bias)
        for eps in known
        for read in (raw, raw - raw.mean(dim=-1, keepdim=True))
        for factor in (weight, weight + 1)
    ]
    fits = [form for form in forms if wrong.is_expected(form.output())]
    return min(fits, key=lambda form: float((form.output() - wrong.expected).norm()), default=None)


Explanation = Callable[[NormForm, WrongOperation], Iterator[Hypothesis]]


def with_form(explain: Explanation) -> Callable[[WrongOperation], Iterator[Hypothesis]]:
    """Give an explanation the norm's form, and add the bias to what it yields; without a form it yields nothing."""

    @wraps(explain)
    def explain_with_form(wrong: WrongOperation) -> Iterator[Hypothesis]:
        form = form_of(wrong)
        if form is None:
            return
        for hypothesis in explain(form, wrong):
            if form.bias is None:
                yield hypothesis
            else:
                biased = hypothesis.output.view_as(form.x) + form.bias
                yield replace(hypothesis, output=biased.flatten(1))

    return explain_with_form


@with_form
def wrong_eps(norm: NormForm, wrong: WrongOperation) -> Iterator[Hypothesis]:
    """Another eps: one that models use, or the one that fits; or it is added elsewhere.

    Causes: wrong eps: *value* instead of *value*; eps *value* is added outside of the root; eps *value* is added to the
    sum of the squares instead of to their mean.
    """
    x, weight, right = norm.parts
    inside, outside = _fitted_eps(norm)
    for eps in dict.fromkeys((*_EPSILONS, *inside)):
        num_fitted = 0 if eps in _EPSILONS else 1
        if eps != right:
            cause = f"wrong eps: {eps:g} instead of {right:g}"
            yield Hypothesis(cause=cause, output=_normed(x, eps, weight), num_fitted=num_fitted)
    in_sum = f"eps {right:g} is added to the sum of the squares instead of to their mean"
    yield Hypothesis(cause=in_sum, output=_normed(x, right / x.shape[-1], weight))
    root = x.square().mean(dim=-1, keepdim=True).sqrt()
    for eps in dict.fromkeys((right, *_EPSILONS, *outside)):
        cause = f"eps {eps:g} is added outside of the root"
        num_fitted = 0 if eps == right else 1
        yield Hypothesis(cause=cause, output=(x / (root + eps) * weight).flatten(1), num_fitted=num_fitted)


@with_form
def wrong_divisor(norm: NormForm, wrong: WrongOperation) -> Iterator[Hypothesis]:
    """The sum of the squares is divided by *number* instead of *number*; the sum of the squares is not divided."""
    x, weight, eps = norm.parts
    dim = x.shape[-1]
    total = x.square().sum(dim=-1, keepdim=True)
    fitted = float((total / (_statistics(norm)[1] - eps)).median())
    known = {1.0, dim - 1.0, dim + 1.0, *(float(-(-dim // size) * size) for size in _PADDINGS)} - {float(dim)}
    for divisor in dict.fromkeys((*sorted(known), *([round(fitted)] if 1 < fitted < 1e6 else []))):
        if divisor == dim:
            continue
        how = "not divided" if divisor == 1 else f"divided by {divisor:g} instead of {dim}"
        yield Hypothesis(
            cause=f"the sum of the squares is {how}",
            output=(x * (total / divisor + eps).rsqrt() * weight).flatten(1),
            num_fitted=0 if divisor in known else 1,
        )


def _fitted_eps(norm: NormForm) -> tuple[list[float], list[float]]:
    """Return the eps that fits the rows together, where one does, to two digits: in the root, and outside of it."""
    mean, implied = _statistics(norm)
    inside, outside = implied - mean, implied.clamp(min=0).sqrt() - mean.sqrt()
    fitted = (float(item.median()) for item in (inside, outside))
    first, second = ([float(f"{eps:.2g}")] if 0 < eps < 10 else [] for eps in fitted)
    return first, second


@with_form
def over_other_elements(norm: NormForm, wrong: WrongOperation) -> Iterator[Hypothesis]:
    """A layer norm, or the reverse; or the heads are normalised together instead of each by itself, or the reverse.

    Causes: a layer norm: the mean is subtracted; the mean is not subtracted; the norm runs over all heads instead of
    each head; over each head instead of all heads together.
    """
    x, weight, eps = norm.parts
    if norm.is_centred:
        yield Hypothesis(cause="the mean is not subtracted", output=_normed(norm.raw, eps, weight))
    else:
        centred = x - x.mean(dim=-1, keepdim=True)
        yield Hypothesis(cause="a layer norm: the mean is subtracted", output=_normed(centred, eps, weight))
    size = wrong.head_dim
    if x.shape[1] > 1:
        scale = (x.square().mean(dim=(1, 2), keepdim=True) + eps).rsqrt()
        cause = "the norm runs over all heads instead of each head"
        yield Hypothesis(cause=cause, output=(x * scale * weight).flatten(1))
    elif x.shape[2] > size and not x.shape[2] % size:
        heads = x[:, 0].unflatten(1, (-1, size))
        cause = "the norm runs over each head instead of all heads together"
        yield Hypothesis(cause=cause, output=_normed(heads, eps) * weight)


@with_form
def statistic_overflows(norm: NormForm, wrong: WrongOperation) -> Iterator[Hypothesis]:
    """The squares are infinite in the dtype that they are taken in, and the row comes out as zeros.

    Causes: the squares overflow *dtype*; the sum of the squares overflows *dtype*.
    """
    x, weight, eps = norm.parts
    is_first = True
    for dtype in (torch.float32, torch.float16):
        name = name_of(dtype)
        squares = x.to(dtype).square()
        for what, mean in (
            ("squares overflow", squares.mean(dim=-1, keepdim=True).to(torch.float64)),
            ("sum of the squares overflows", squares.sum(dim=-1, keepdim=True).to(torch.float64) / x.shape[-1]),
        ):
            if not bool(mean.isfinite().all()):
                output = (x * (mean + eps).rsqrt() * weight).flatten(1)
                # Zeros come out whichever of them it is: the one that needs least is said.
                yield Hypothesis(cause=f"the {what} {name}", output=output, is_vague=not is_first)
                is_first = False


@with_form
def coarse_statistic(norm: NormForm, wrong: WrongOperation) -> Iterator[Hypothesis]:
    """The norm's variance is computed in *dtype*; the norm is computed in *dtype*."""
    x, weight, eps = norm.parts
    for dtype in HALF_DTYPES:
        name = name_of(dtype)
        squares = x.to(dtype).square()
        if not bool(squares.isfinite().all()):
            continue  # an overflow, which has a name of its own
        for variance in (squares.mean(dim=-1, keepdim=True), x.square().mean(dim=-1, keepdim=True).to(dtype)):
            fine, low = variance.to(torch.float64) + eps, (variance + eps).to(torch.float64)
            once, twice = rounded(low.rsqrt(), dtype), rounded(1 / rounded(low.sqrt(), dtype), dtype)
            outputs = [x * scale * weight for scale in (fine.rsqrt(), once, twice)]
            # On a CPU, torch rounds the root of a tensor's last elements, and not that of the others.
            left = [(norm.actual - output).norm(dim=-1, keepdim=True) for output in outputs]
            outputs.append(torch.where(left[1] <= left[2], outputs[1], outputs[2]))
            for num_fitted, output in zip((0, 0, 0, 1), outputs, strict=True):
                cause = f"the norm's variance is computed in {name}"
                yield Hypothesis(cause=cause, output=output.flatten(1), num_fitted=num_fitted)
        low = rounded(x, dtype)
        normed = rounded(low * (low.square().mean(dim=-1, keepdim=True) + eps).rsqrt(), dtype)
        yield Hypothesis(cause=f"the norm is computed in {name}", output=(normed * weight).flatten(1))


@with_form
def changed_weights(norm: NormForm, wrong: WrongOperation) -> Iterator[Hypothesis]:
    """Some of the weights are others: each is fitted to all rows.

    Causes: one weight of the norm is another: [*index*]; *n* weights of the norm are others; the weights of the norm
    are in another order; the norm's weights are none of this checkpoint's, or not quite those of it.
    """
    if not wrong.can_be_fitted:
        return
    x, weight, eps = norm.parts
    normed = x * (x.square().mean(dim=-1, keepdim=True) + eps).rsqrt()
    energy = normed.square().sum(dim=(0, 1)).clamp(min=torch.finfo(torch.float64).tiny)
    fitted = (norm.actual * normed).sum(dim=(0, 1)) / energy
    change = (fitted - weight).abs() * energy.sqrt()
    is_changed = change > _CHANGED * change.max()
    if 2 * int(is_changed.sum()) > len(weight):
        is_changed[:] = True
    yield Hypothesis(
        cause=_cause_of_weights(weight, fitted, is_changed),
        output=(normed * torch.where(is_changed, fitted, weight)).flatten(1),
        detail=_changes(weight, fitted, is_changed),
        num_fitted=min(2 * int(is_changed.sum()), len(weight)),
    )


def _cause_of_weights(right: torch.Tensor, fitted: torch.Tensor, is_changed: torch.Tensor) -> str:
    count = int(is_changed.sum())
    if count == 1:
        return f"one weight of the norm is another: [{int(is_changed.nonzero())}]"
    if not bool(is_changed.all()):
        return f"{count} weights of the norm are others"
    allowance = _SAME_WEIGHT * float(right.abs().max())
    for shift in range(1, len(right)):
        if float((right.roll(shift) - fitted).abs().max()) < allowance:
            return f"the weights of the norm are in another order: shifted by {min(shift, shift - len(right), key=abs)}"
    in_order = float((right.sort().values - fitted.sort().values).abs().max())
    if in_order < min(allowance, _CLEARLY * float((right - fitted).abs().max())):  # else each is rounded where it is
        return "the weights of the norm are in another order"
    if float((fitted - right).norm()) < _NEARLY * float(right.norm()):
        return "the norm's weights are not quite those of this checkpoint: changed, or in another format"
    return "the norm's weights are none of this checkpoint's: not loaded, or changed"


def _changes(right: torch.Tensor, fitted: torch.Tensor, is_changed: torch.Tensor) -> str:
    """List the first weights that are others: `[17] is 1.5 instead of 1`."""
    places = is_changed.nonzero()[:, 0].tolist()[:4]
    digits = 4 if float((fitted - right).abs().max()) > _NEARLY * float(right.abs().max()) else 7
    return ", ".join(
        f"[{at}] is {float(fitted[at]):.{digits}g} instead of {float(right[at]):.{digits}g}" for at in places
    )


def _normed(x: torch.Tensor, eps: float, weight: torch.Tensor | None = None) -> torch.Tensor:
    """[R, N*D]."""
    normed = x * (x.square().mean(dim=-1, keepdim=True) + eps).rsqrt()
    return (normed if weight is None else normed * weight).flatten(1)


def _statistics(norm: NormForm) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean of the squares, and what the rows were divided by, squared: [R, N, 1] each."""
    x, weight, _ = norm.parts
    scaled, actual = x * weight, norm.actual
    gain = (actual * scaled).sum(-1, keepdim=True) / scaled.square().sum(-1, keepdim=True)
    return x.square().mean(dim=-1, keepdim=True), gain.sign() * gain.square().reciprocal()
