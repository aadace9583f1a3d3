"""Properties of rotary position embedding (Su et al. 2021, arXiv:2104.09864).

Angles are position times frequency, which HF and most engines compute in float32: an angle of a radians is then off by
some a 2^-24, and so is what it turns. The bounds give that room, and three roundings: table, products, sum.

Shapes: T tokens, N heads, H head dim.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from hypothesis import settings as Settings  # noqa: N812  # `settings` is what the functions here take
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from harness.base.metrics import largest_rounding, rounding_unit
from harness.properties.core.falsify import calling, falsify
from harness.properties.core.findings import Counterexample, Rejections, raise_all
from harness.properties.ops.adapter import OpsUnderTest, RandomRows, closeness_lines, worst_row


@dataclass(frozen=True, slots=True, kw_only=True)
class RotaryCase:
    """Heads and their positions."""

    rows: RandomRows
    """[T, N, H]."""
    positions: tuple[int, ...]
    shift: int
    """Added to all positions, where the property is about that."""
    theta: float


Claim = Callable[["RotaryScheme"], None]


def check_rotary(named: Any, settings: Settings) -> Rejections:
    """Check that `rotary` and `rotary_interleaved` rotate by position; nothing without them.

    Raises:
        PropertyError: one does not hold.
    """
    target = OpsUnderTest(named)

    def check(method: str, sentence: str, claim: Claim) -> Rejections:
        return falsify(sentence, lambda case: claim(RotaryScheme(target, method, case)), _cases(target), settings)

    methods = filter(target.offers, ("rotary", "rotary_interleaved"))
    return raise_all(partial(check, method, *claim) for method in methods for claim in _CLAIMS.items())


class RotaryScheme:
    """One way to rotate, on one case."""

    def __init__(self, target: OpsUnderTest, method: str, case: RotaryCase) -> None:
        self.target, self.method, self.case = target, method, case
        self.x_TNH = case.rows.tensor()
        self.positions_T = torch.tensor(case.positions)

    def rotate(self, x_TNH: torch.Tensor, positions_T: torch.Tensor) -> torch.Tensor:
        """Call the method."""
        with calling(self.method, lambda: self.program([self.line("out", "x", "positions")])):
            rotated = getattr(self.target.adapter, self.method)(x_TNH.clone(), positions_T, self.case.theta)
        return torch.as_tensor(rotated).detach()

    def line(self, name: str, x: str, positions: str) -> str:
        """Return a program's line with that call."""
        return f"{name} = {self.target.name}.{self.method}({x}, {positions}, {self.case.theta!r})"

    def program(self, lines: list[str]) -> str:
        """Return a program of these lines, after those that make `x` and `positions`."""
        made = ["", self.case.rows.line("x"), f"positions = torch.tensor({list(self.case.positions)})"]
        return "\n".join(["import torch", *self.target.opening(), *made, *lines]) + "\n"

    def pairs(self, x_TNH: torch.Tensor) -> torch.Tensor:
        """Return the pairs of elements that are rotated together, [T, N, H/2, 2]."""
        half = x_TNH.shape[-1] // 2
        if self.method == "rotary":
            return torch.unflatten(x_TNH, -1, (2, half)).transpose(-1, -2)
        return torch.unflatten(x_TNH, -1, (half, 2))

    def expect(self, actual: torch.Tensor, expected: torch.Tensor, farthest_T: torch.Tensor, lines: list[str]) -> None:
        """Compare rows, of which the farthest angle is `farthest_T` radians."""
        fine = rounding_unit(torch.float32) / rounding_unit(actual.dtype)
        bound_T = 3 * largest_rounding(actual.dtype) * 2 + (8 + 6 * farthest_T.double()) * fine
        worst = worst_row(actual, expected.double(), bound_T)
        if worst is not None:
            row, error, bound = worst
            what = f"{self.method}, row {row}: {error:.3g} roundings, against a bound of {bound:.3g}"
            raise Counterexample(what, self.program([*lines, *closeness_lines(row, bound, actual.dtype)]))


def _definition(rotation: RotaryScheme) -> None:
    x_TNH, case = rotation.x_TNH, rotation.case
    pairs_TNP2 = rotation.pairs(x_TNH.double())
    num_pairs = x_TNH.shape[-1] // 2
    angle_T1P = rotation.positions_T[:, None, None] * case.theta ** (-torch.arange(num_pairs).double() / num_pairs)
    a, b = pairs_TNP2.unbind(-1)
    turned = (a * angle_T1P.cos() - b * angle_T1P.sin(), b * angle_T1P.cos() + a * angle_T1P.sin())
    is_half = rotation.method == "rotary"
    expected = torch.cat(turned, dim=-1) if is_half else torch.stack(turned, dim=-1).flatten(-2)
    joined = "torch.cat((a2, b2), dim=-1)" if is_half else "torch.stack((a2, b2), dim=-1).flatten(-2)"
    cut = "x.double().chunk(2, dim=-1)" if is_half else "x.double()[..., ::2], x.double()[..., 1::2]"
    lines = [
        rotation.line("out", "x", "positions"),
        f"angle = positions[:, None, None] * {case.theta!r} ** (-torch.arange({num_pairs}).double() / {num_pairs})",
        f"a, b = {cut}",
        "a2, b2 = a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()",
        f"expected = {joined}",
    ]
    rotation.expect(rotation.rotate(x_TNH, rotation.positions_T), expected, rotation.positions_T, lines)


def _position_zero(rotation: RotaryScheme) -> None:
    zeros = torch.zeros_like(rotation.positions_T)
    if not torch.equal(rotation.rotate(rotation.x_TNH, zeros), rotation.x_TNH):
        lines = [rotation.line("out", "x", "torch.zeros_like(positions)"), "assert torch.equal(out, x)"]
        raise Counterexample(f"{rotation.method} changes what stands at position 0", rotation.program(lines))


def _composition(rotation: RotaryScheme) -> None:
    positions_T, shift = rotation.positions_T, rotation.case.shift
    there = rotation.rotate(rotation.x_TNH, positions_T)
    twice = rotation.rotate(there, torch.full_like(positions_T, shift))
    at_once = rotation.rotate(rotation.x_TNH, positions_T + shift)
    lines = [
        rotation.line("there", "x", "positions"),
        rotation.line("out", "there", f"torch.full_like(positions, {shift})"),
        rotation.line("expected", "x", f"positions + {shift}"),
    ]
    rotation.expect(twice, at_once, 2 * (positions_T + shift), lines)


def _norm(rotation: RotaryScheme) -> None:
    rotated = rotation.pairs(rotation.rotate(rotation.x_TNH, rotation.positions_T)).double().norm(dim=-1)
    expected = rotation.pairs(rotation.x_TNH.double()).norm(dim=-1)
    half = rotation.x_TNH.shape[-1] // 2
    paired = (
        f"unflatten(-1, (2, {half})).norm(dim=-2)"
        if rotation.method == "rotary"
        else "unflatten(-1, (-1, 2)).norm(dim=-1)"
    )
    lines = [
        rotation.line("rotated", "x", "positions"),
        f"out, expected = (y.double().{paired} for y in (rotated, x))  # length of each pair",
    ]
    dtype = rotation.x_TNH.dtype
    fine = rounding_unit(torch.float32) / rounding_unit(dtype)
    unit_ratio = rounding_unit(dtype) / rounding_unit(torch.float64)
    bound_T = torch.full((len(expected),), (3 * largest_rounding(dtype) * 2 + 8 * fine) * unit_ratio).double()
    worst = worst_row(rotated, expected, bound_T)
    if worst is not None:
        row, error, bound = worst
        what = f"{rotation.method}, row {row}: the length of a pair is off by {error / unit_ratio:.3g} roundings"
        ending = closeness_lines(row, bound / unit_ratio, dtype)
        raise Counterexample(what, rotation.program([*lines, *ending]))


def _relative(rotation: RotaryScheme) -> None:
    shift, positions_T = rotation.case.shift, rotation.positions_T
    q, k = rotation.x_TNH, rotation.x_TNH.flip(0)
    k_positions_T = positions_T.flip(0)
    near = _products(rotation.rotate(q, positions_T), rotation.rotate(k, k_positions_T))
    far = _products(rotation.rotate(q, positions_T + shift), rotation.rotate(k, k_positions_T + shift))
    size = (q.double().norm(dim=-1) * k.double().norm(dim=-1)).clamp(min=torch.finfo(torch.float64).tiny)
    error_TN = (far - near).abs() / size / rounding_unit(q.dtype)
    fine = rounding_unit(torch.float32) / rounding_unit(q.dtype)
    bound = 6 * largest_rounding(q.dtype) * 2 + (16 + 24 * float((positions_T + shift).max())) * fine
    if not bool((error_TN <= bound).all()):
        row, head = (int(i) for i in (~(error_TN <= bound)).nonzero()[0])
        lines = [
            "q, k, k_positions = x, x.flip(0), positions.flip(0)",
            rotation.line("q_near", "q", "positions"),
            rotation.line("k_near", "k", "k_positions"),
            rotation.line("q_far", "q", f"positions + {shift}"),
            rotation.line("k_far", "k", f"k_positions + {shift}"),
            f"near = q_near[{row}, {head}].double() @ k_near[{row}, {head}].double()",
            f"far = q_far[{row}, {head}].double() @ k_far[{row}, {head}].double()",
            f"size = q[{row}, {head}].double().norm() * k[{row}, {head}].double().norm()",
            f"roundings = (far - near).abs() / size / {rounding_unit(q.dtype):.4g}",
            f"assert roundings <= {bound:.3g}",
        ]
        error = float(error_TN[row, head])
        what = f"{rotation.method}, row {row}: {error:.3g} roundings between the products at two equal distances"
        raise Counterexample(what, rotation.program(lines))


def _products(q_TNH: torch.Tensor, k_TNH: torch.Tensor) -> torch.Tensor:
    return (q_TNH.double() * k_TNH.double()).sum(dim=-1)


def _permutation(rotation: RotaryScheme) -> None:
    """Compare the two ways with each other if there are two."""
    if rotation.method != "rotary" or not rotation.target.offers("rotary_interleaved"):
        return
    half = rotation.x_TNH.shape[-1] // 2
    interleaved = [i // 2 + half * (i % 2) for i in range(2 * half)]
    interleaved_rotation = RotaryScheme(rotation.target, "rotary_interleaved", rotation.case)
    by_halves = rotation.rotate(rotation.x_TNH, rotation.positions_T)[..., interleaved]
    by_neighbours = interleaved_rotation.rotate(rotation.x_TNH[..., interleaved], rotation.positions_T)
    lines = [
        f"order = {interleaved}",
        f"expected = {rotation.target.name}.rotary(x, positions, {rotation.case.theta!r})[..., order]",
        interleaved_rotation.line("out", "x[..., order]", "positions"),
    ]
    rotation.expect(by_neighbours, by_halves, rotation.positions_T, lines)


_CLAIMS: dict[str, Claim] = {
    "position 0 is not rotated": _position_zero,
    "a rotation keeps the length of every pair": _norm,
    "rotating by m, then by n, is rotating by m + n": _composition,
    "products of queries and keys depend on their distance alone": _relative,
    "half-split is interleaved with the elements in another order": _permutation,
    "a rotation turns pair i by position * theta^(-2i/H)": _definition,
}


def _cases(target: OpsUnderTest) -> SearchStrategy[RotaryCase]:
    return _rotary_cases(target.dtypes)


@st.composite
def _rotary_cases(draw: DrawFn, dtypes: tuple[str, ...]) -> RotaryCase:
    positions = draw(st.lists(st.integers(0, 40) | st.integers(0, 4000), min_size=1, max_size=6))
    return RotaryCase(
        rows=RandomRows(
            shape=(len(positions), draw(st.integers(1, 3)), draw(st.sampled_from((8, 2, 4, 6, 16, 64, 80, 96, 128)))),
            dtype=draw(st.sampled_from(dtypes)),
            level=2.0 ** draw(st.just(0) | st.integers(-10, 10)),
            seed=draw(st.integers(0, 99)),
        ),
        positions=tuple(positions),
        shift=draw(st.integers(0, 40) | st.integers(0, 2000)),
        theta=draw(st.sampled_from((10000.0, 100.0, 500000.0, 1000000.0, 10000000.0))),
    )
