"""A setting of HF's module differs: a multiplier, a limit, a switch, or the bias that attention adds to its scores.

No setting is known by its name. Every number and switch that the modules around an operation hold is set to what it
would be if it were left out, turned around, or that of another setting, and the part is run again by HF's own code. A
bias on the scores (ALiBi's) is neither a setting nor a tap: it is changed on its way into the module.

`B` requests, `N` heads, `T` rows, `S` positions.
"""

import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from harness.formats.taps import Kind
from harness.judge.explain.core.fit import fit_factor
from harness.judge.explain.core.rerun import replaced
from harness.judge.explain.core.wrong_operation import Hypothesis, WrongOperation
from harness.oracle.attention import scaling

_SMALL = 1.01
"""Factor by which a setting is changed to see whether the operation depends on it."""
_FAR = 1e9
"""What stands for a limit or a cap that is left out."""
_ALIKE = 0.25
"""Share of the error's energy that lies in the direction in which a setting moves the rows, for it to be fitted."""
NAMED = 2e-3
"""Relative distance up to which a fitted number is one that has been tried."""
_SIZES = (
    "size",
    "dim",
    "num_",
    "channels",
    "features",
    "idx",
    "eps",
    "epsilon",
    "dropout",
    "vocab",
    "padding",
    "norm_type",
)
"""Parts of the names of what is no setting of a computation, or has causes of its own."""
_MASK = "attention_mask"
_NAMES = ("alibi", "position_bias", _MASK)
"""Of arguments that may hold a bias: [B * N, 1, S], or [B, N, T, S] where it is part of the mask."""
_HIDDEN = -1e4
"""What is below stands for a position that is not seen."""
Change = Callable[[torch.Tensor], torch.Tensor]


def other_settings(wrong: WrongOperation) -> Iterator[Hypothesis]:
    """Yield what the operation gives with one setting of its part changed.

    Causes: *name* of *module* is *value* instead of *value*: left out, applied twice, turned around, turned off or on,
    or fitted.
    """
    reran = ran_again(wrong)
    if reran is not None:
        for path, name, value in _settings(wrong):
            yield from _others(wrong, *reran, path, name, value)


def ran_again(wrong: WrongOperation) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return where the rows stand in the batch, and what the part gives there, run by itself; None where it cannot."""
    rerun = wrong.rerun
    if rerun is None or wrong.downstream is not None:
        return None
    places = rerun.places(wrong.rows)
    if bool((places < 0).any()):
        return None
    rerun_rows = rerun.run()[places]
    if rerun_rows.shape != wrong.expected.shape or float((rerun_rows - wrong.expected).norm()) > 1e-5 * float(
        rerun_rows.norm()
    ):
        return None  # the part, run by itself, is not what the model ran
    return places, rerun_rows


def _others(
    wrong: WrongOperation, places: torch.Tensor, rerun_rows: torch.Tensor, path: str, name: str, value: Any
) -> Iterator[Hypothesis]:
    label, module = f"{name} of {path}", wrong.hf.module(path)

    def under(changed: Any) -> torch.Tensor | None:
        with replaced(module, name, changed):
            try:
                output = wrong.rerun.run()[places]  # type: ignore[union-attr]
            except (ArithmeticError, AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError):
                return None  # the module cannot do without this setting
        return output if output.shape == rerun_rows.shape and bool(output.isfinite().all()) else None

    if isinstance(value, bool):
        output = under(not value)
        if output is not None and not torch.equal(output, rerun_rows):
            yield Hypothesis(cause=f"{label} is {not value} instead of {value}", output=output)
        return
    if _nudged(under, value, rerun_rows) is None:
        return
    tried = {1.0: "left out", _FAR: "left out", value * value: "applied twice", 1 / value: "turned around", -value: ""}
    for changed, how in tried.items():
        output = under(changed) if not math.isclose(changed, value) else None
        if output is not None and not torch.equal(output, rerun_rows):
            shown = "none" if changed == _FAR else f"{changed:.6g}"
            cause = f"{label} is {shown} instead of {value:.6g}" + (f": {how}" if how else "")
            yield Hypothesis(cause=cause, output=output)
    fitted = fitted_setting(wrong, under, value, rerun_rows)
    if fitted is not None and not any(math.isclose(fitted, item, rel_tol=NAMED) for item in (value, *tried)):
        output = under(fitted)
        if output is not None:
            yield Hypothesis(cause=f"{label} is {fitted:.4g} instead of {value:.6g}", output=output, num_fitted=1)


def fitted_setting(
    wrong: WrongOperation, under: Callable[[float], torch.Tensor | None], value: float, rerun_rows: torch.Tensor
) -> float | None:
    """Return the value of a setting under which the rows come out nearest; None if the error is another.

    Args:
        wrong: the rows that are wrong.
        under: returns the rows under a value of the setting.
        value: of the setting in HF.
        rerun_rows: the rows under that value.
    """
    near = _nudged(under, value, rerun_rows) if value > 0 else None
    if near is None:
        return None
    error, slope = wrong.actual - rerun_rows, (near - rerun_rows) / math.log(_SMALL)
    if float((error * slope).sum()) ** 2 < _ALIKE * float(error.square().sum() * slope.square().sum()):
        return None
    return fit_factor(wrong.actual, under, value)


def _nudged(
    under: Callable[[float], torch.Tensor | None], value: float, rerun_rows: torch.Tensor
) -> torch.Tensor | None:
    """Return the rows under a value beside a setting's own; None if they do not depend on it."""
    near = under(value * _SMALL)
    if near is not None and torch.equal(near, rerun_rows) and value < _FAR:
        near = under(value / _SMALL**40)  # a limit that nothing reaches may be one that is too high
    return None if near is None or torch.equal(near, rerun_rows) else near


def _settings(wrong: WrongOperation) -> Iterator[tuple[str, str, Any]]:
    """Yield module, name and value of each setting of the modules around the operation."""
    path, part = wrong.operation.module, wrong.rerun.part_inputs.call.path  # type: ignore[union-attr]
    paths = {path, *(wrong.graph[tap].module for tap in wrong.unrecorded)}
    around = {parent for item in paths for parent in _parents(item, part)}
    below = (f"{path}.{name}" for name, _ in wrong.hf.module(path).named_modules() if name)
    inside = {item for item in below if not _is_shown(wrong, item)}
    scales = {scaling(call) for call in wrong.rerun.calls.values()}  # type: ignore[union-attr] # named as such
    for item in sorted(around | inside):
        module = wrong.hf.module(item)
        if hasattr(module, "lora_a"):
            continue  # an adapter's scale has causes of its own
        for name, value in list(vars(module).items()):
            if _is_setting(name, value) and not (name.startswith("scal") and value in scales):
                yield item, name, value


def _is_shown(wrong: WrongOperation, path: str) -> bool:
    return any(op.module == path and op.kind in (Kind.LINEAR, Kind.NORM) for op in wrong.graph)


def _parents(path: str, part: str) -> Iterator[str]:
    while path == part or path.startswith(f"{part}."):
        yield path
        path = path.rpartition(".")[0]


def _is_setting(name: str, value: Any) -> bool:
    if name.startswith("_") or name == "training" or any(size in name for size in _SIZES):
        return False
    return isinstance(value, bool) or (isinstance(value, float) and value != 0 and math.isfinite(value))


def other_biases(wrong: WrongOperation) -> Iterator[Hypothesis]:
    """Yield what the operation gives with the bias left out, turned around, scaled, or of another head.

    Causes: ALiBi, or another bias that HF hands to its attention: left out, of the opposite sign, of the heads in
    reverse order, of the head before or after, *value* times what it should be (added after the scores are scaled, or
    before; its exponents begin at 0 or 2).
    """
    num_heads, reran = getattr(wrong.config, "num_attention_heads", None), ran_again(wrong)
    if num_heads is None or reran is None:
        return
    places, rerun_rows = reran
    for bias in (_Bias(wrong, places, num_heads, *item) for item in _handed(wrong)):
        if torch.equal(bias.under(torch.zeros_like), rerun_rows):
            continue  # nothing is computed with it
        for how, change in _ways(num_heads).items():
            yield Hypothesis(cause=f"{bias.label} {how}", output=bias.under(change))
        factor = fitted_setting(wrong, bias.times, 1.0, rerun_rows)
        if factor is not None and factor > NAMED and abs(factor - 1) > NAMED:
            cause = f"{bias.label} is {factor:.4g} times what it should be{_why(wrong, factor)}"
            yield Hypothesis(cause=cause, output=bias.times(factor), num_fitted=1)


@dataclass(frozen=True, slots=True)
class _Bias:
    """A bias that a module is handed."""

    wrong: WrongOperation
    places: torch.Tensor
    """Where the rows stand in the batch, [R] int64."""
    num_heads: int
    path: str
    """Of the module."""
    name: str
    """Of the argument."""

    @property
    def label(self) -> str:
        return f"{self.name} of {self.path}" if self.name != _MASK else f"the bias in {_MASK} of {self.path}"

    def under(self, change: Change) -> torch.Tensor:
        """Return the rows with the bias changed, [R, W] float64."""
        assert self.wrong.rerun is not None
        with self._changed(change):
            return self.wrong.rerun.run()[self.places]

    def times(self, factor: float) -> torch.Tensor:
        return self.under(lambda bias: bias * factor)

    def _changed(self, change: Change) -> RemovableHandle:
        def replace(_: nn.Module, arguments: Any, named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            bias = named.get(self.name)
            if not isinstance(bias, torch.Tensor) or not self._is_of_heads(bias):
                return arguments, named
            is_seen = bias > _HIDDEN
            return arguments, named | {self.name: torch.where(is_seen, change(bias.where(is_seen, 0)), bias)}

        return self.wrong.hf.module(self.path).register_forward_pre_hook(replace, with_kwargs=True)

    def _is_of_heads(self, bias: torch.Tensor) -> bool:
        return bias.is_floating_point() and bias.dim() > 2 and bias.shape[-3] % self.num_heads == 0


def _ways(num_heads: int) -> Mapping[str, Change]:
    def of_heads(order: Change) -> Change:
        return lambda bias: order(bias.reshape(-1, num_heads, *bias.shape[-2:])).reshape(bias.shape)

    return {
        "is left out": torch.zeros_like,
        "has the opposite sign": torch.neg,
        "has the slopes of the heads in reverse order": of_heads(lambda bias: bias.flip(1)),
        "has for each head the slope of the one before": of_heads(lambda bias: bias.roll(1, 1)),
        "has for each head the slope of the next one": of_heads(lambda bias: bias.roll(-1, 1)),
    }


def _why(wrong: WrongOperation, factor: float) -> str:
    """Say what the factor is, where it is one of ALiBi's own numbers."""
    config = wrong.config
    scale, slope = math.sqrt(config.hidden_size / config.num_attention_heads), 2 ** (8 / config.num_attention_heads)
    reasons = {
        "it is added after the scores are scaled, and not before": scale,
        "it is added before the scores are scaled, and not after": 1 / scale,
        "the exponents of the slopes begin at 0 instead of 1": slope,
        "the exponents of the slopes begin at 2 instead of 1": 1 / slope,
    }
    fitting = [why for why, number in reasons.items() if math.isclose(factor, number, rel_tol=NAMED)]
    return f": {', or '.join(fitting)}" if fitting else ""


def _handed(wrong: WrongOperation) -> Iterator[tuple[str, str]]:
    """Yield path and argument of each innermost module of the part that may be handed a bias."""
    part = wrong.rerun.part_inputs.call.path  # type: ignore[union-attr]
    takers = [
        (f"{part}.{path}", name)
        for path, module in wrong.hf.module(part).named_modules()
        for name in _NAMES
        if path and name in inspect.signature(module.forward).parameters
    ]
    for path, name in takers:
        if not any(item.startswith(f"{path}.") for item, _ in takers):
            yield path, name
