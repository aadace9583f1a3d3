"""Properties of RMSNorm (Zhang and Sennrich 2019) and LayerNorm (Ba et al. 2016).

Shapes: T rows, X channels.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from hypothesis import settings as Settings  # noqa: N812  # `settings` is what the functions here take
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from harness.base.metrics import largest_rounding, rounding_unit
from harness.properties.core.falsify import calling, falsify
from harness.properties.core.findings import Counterexample, Rejections, raise_all
from harness.properties.ops.adapter import OpsUnderTest, RandomRows, closeness_lines, worst_row

_LEVELS = {"float32": 40, "bfloat16": 40, "float16": 13}
"""Powers of two up to which channels go: in float16 their squares are beyond 65504."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NormCase:
    """Rows to be normalised."""

    x: RandomRows
    eps: float
    factor: float
    """By which the rows are scaled, where the property is about that; a power of two."""

    @property
    def weight(self) -> RandomRows:
        """[X]: half to one and a half, for the most part."""
        return replace(self.x, shape=self.x.shape[-1:], level=0.25, offset=1.0, seed=self.x.seed + 1)

    @property
    def bias(self) -> RandomRows:
        """[X]."""
        return replace(self.x, shape=self.x.shape[-1:], level=0.5, offset=0.0, seed=self.x.seed + 2)


Claim = Callable[["Norm"], None]


def check_norms(named: Any, settings: Settings) -> Rejections:
    """Compare `rms_norm` and `layer_norm` with their definition, also under scaling; nothing without them.

    Raises:
        PropertyError: one property does not hold.
    """
    target = OpsUnderTest(named)

    def check(method: str, sentence: str, claim: Claim) -> Rejections:
        cases = _cases(target.dtypes, is_centred=method == "layer_norm")
        return falsify(f"{method}: {sentence}", lambda case: claim(Norm(target, method, case)), cases, settings)

    methods = filter(target.offers, ("rms_norm", "layer_norm"))
    return raise_all(partial(check, method, *claim) for method in methods for claim in _CLAIMS.items())


class Norm:
    """One norm, on one case."""

    def __init__(self, target: OpsUnderTest, method: str, case: NormCase) -> None:
        self.target, self.method, self.case = target, method, case
        self.is_centred = method == "layer_norm"
        self.x, self.weight, self.bias = case.x.tensor(), case.weight.tensor(), case.bias.tensor()

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
        """Call the method."""
        parameters = (weight, bias) if self.is_centred else (weight,)
        with calling(self.method, lambda: self.program([self.line("out", "x")])):
            out = getattr(self.target.adapter, self.method)(x, *parameters, eps)
        return torch.as_tensor(out).detach()

    def line(self, name: str, x: str, weight: str = "weight", bias: str = "bias", eps: str | None = None) -> str:
        """Return a program's line with that call."""
        parameters = f"{weight}, {bias}" if self.is_centred else weight
        eps = repr(self.case.eps) if eps is None else eps
        return f"{name} = {self.target.name}.{self.method}({x}, {parameters}, {eps})"

    def program(self, lines: list[str]) -> str:
        """Return a program of these lines, after those that make the tensors."""
        case = self.case
        made = [
            "",
            case.x.line("x"),
            case.weight.line("weight"),
            *([case.bias.line("bias")] if self.is_centred else []),
        ]
        return "\n".join(["import torch", *self.target.opening(), *made, *lines]) + "\n"

    def expected(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the norm in float64, and the bound [T] in roundings."""
        x, weight, bias = self.x.double(), self.weight.double(), self.bias.double()
        centred = x - x.mean(-1, keepdim=True) if self.is_centred else x
        scale_T1 = torch.rsqrt(centred.square().mean(-1, keepdim=True) + self.case.eps)
        normed = centred * scale_T1 * weight
        out = normed + bias if self.is_centred else normed
        dtype = self.x.dtype
        fine = rounding_unit(torch.float32) / rounding_unit(dtype)
        norm_T = out.norm(dim=-1)
        # What the mean takes away, and what the bias takes away again, leaves its rounding behind.
        centred_T, size_T = centred.norm(dim=-1), normed.norm(dim=-1) / norm_T
        most_T = scale_T1[:, 0] * weight.abs().max()  # of a row of equal elements, of which nothing is left
        gain_T = torch.where(centred_T > 0, normed.norm(dim=-1) / centred_T, most_T)
        lost_T = x.norm(dim=-1) * gain_T / norm_T
        smallest = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
        underflow_T = x.shape[-1] ** 0.5 * smallest / (norm_T * rounding_unit(dtype))
        roundings_T = largest_rounding(dtype) * (2 * size_T + (1 if self.is_centred else 0))
        return out, roundings_T + 8 * fine * (size_T + lost_T) + 2 * underflow_T


def _definition(norm: Norm) -> None:
    expected, bound_T = norm.expected()
    out = norm(norm.x.clone(), norm.weight, norm.bias, norm.case.eps)
    worst = worst_row(out, expected, bound_T)
    if worst is not None:
        row, error, bound = worst
        centred = ["y = x.double()"] + ["y = y - y.mean(-1, keepdim=True)"] * norm.is_centred
        scaled = f"y * torch.rsqrt(y.square().mean(-1, keepdim=True) + {norm.case.eps!r}) * weight.double()"
        lines = [
            norm.line("out", "x.clone()"), *centred,
            f"expected = {scaled}{' + bias.double()' if norm.is_centred else ''}",
        ]  # fmt: skip
        what = f"{norm.method}, row {row}: {error:.3g} roundings, against a bound of {bound:.3g}"
        raise Counterexample(what, norm.program([*lines, *closeness_lines(row, bound, norm.x.dtype)]))


def _scale(norm: Norm) -> None:
    factor, eps = norm.case.factor, norm.case.eps
    once = norm(norm.x.clone(), norm.weight, norm.bias, eps)
    scaled = norm(norm.x * factor, norm.weight, norm.bias, eps * factor**2)
    _, bound_T = norm.expected()
    worst = worst_row(scaled, once.double(), 2 * bound_T)
    if worst is not None:
        row, error, bound = worst
        lines = [
            norm.line("expected", "x.clone()"),
            norm.line("out", f"x * {factor!r}", eps=f"{eps!r} * {factor!r} ** 2"),
        ]
        what = f"{norm.method}, row {row}: {error:.3g} roundings from the row before it was scaled, bound {bound:.3g}"
        raise Counterexample(what, norm.program([*lines, *closeness_lines(row, bound, norm.x.dtype)]))


def _sign(norm: Norm) -> None:
    if torch.equal(
        norm(-norm.x, norm.weight, -norm.bias, norm.case.eps),
        -norm(norm.x.clone(), norm.weight, norm.bias, norm.case.eps),
    ):
        return
    lines = [
        norm.line("out", "x.clone()"),
        norm.line("negated", "-x", bias="-bias"),
        "assert torch.equal(negated, -out)",
    ]
    raise Counterexample(f"{norm.method}: the negated row has other bits", norm.program(lines))


def _input(norm: Norm) -> None:
    x = norm.x.clone()
    norm(x, norm.weight, norm.bias, norm.case.eps)
    if not torch.equal(x, norm.x):
        lines = ["before = x.clone()", norm.line("out", "x"), "assert torch.equal(x, before)"]
        raise Counterexample(f"{norm.method} changes its input, which the residual still needs", norm.program(lines))


_CLAIMS: dict[str, Claim] = {
    "the input is left as it is": _input,
    "negating a row negates the result": _sign,
    "scaling a row, and eps by the square, changes nothing": _scale,
    "each row is what the definition gives": _definition,
}
_NUM_ROWS = st.integers(1, 4) | st.sampled_from((65, 130))
_SIZES = st.sampled_from((8, 2, 3, 16, 64, 1000)) | st.sampled_from((128, 256, 512, 768, 896)) | st.integers(1, 1000)


@st.composite
def _cases(draw: DrawFn, dtypes: tuple[str, ...], *, is_centred: bool) -> NormCase:
    dtype = draw(st.sampled_from(dtypes))
    largest = _LEVELS[dtype]
    exponent = draw(st.just(0) | st.integers(-6, largest - 2))
    level = 2.0**exponent
    # With a mean far above the spread, rounding leaves nothing of the row to judge.
    offset = draw(st.sampled_from((0.0, 1.0, -3.0))) * level if is_centred else 0.0
    return NormCase(
        x=RandomRows(
            shape=(draw(_NUM_ROWS), draw(_SIZES)),
            dtype=dtype,
            level=level,
            seed=draw(st.integers(0, 99)),
            offset=offset,
        ),
        eps=draw(st.sampled_from((1e-6, 1e-5, 1e-12, 0.1))),
        factor=2.0 ** draw(st.integers(-4, 0)) if exponent > 0 else 2.0 ** draw(st.integers(0, 6)),
    )
