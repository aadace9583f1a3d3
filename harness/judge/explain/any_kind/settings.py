"""A setting of HF's module is another: a multiplier, a limit, a switch, whatever a module of the model computes with.

No setting is known by its name. Every number and switch that the modules around an operation hold is set to what it
would be if it were left out, turned around, or that of another setting, and the part is run again by HF's own code.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch

from harness.formats.taps import Kind
from harness.judge.explain.core.failure import Failure
from harness.judge.explain.core.hypothesis import Hypothesis
from harness.judge.explain.core.rerun import replaced
from harness.oracle.attention import scaling

_SMALL = 1.01
"""Factor by which a setting is changed to see whether the operation depends on it."""
_FAR = 1e9
"""What stands for a limit or a cap that is left out."""
_ALIKE = 0.25
"""Share of the error's energy that lies in the direction in which a setting moves the rows, for it to be fitted."""
_MAX_STEPS, _NEAR_ENOUGH = 12, 1e-7
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


def other_settings(failure: Failure) -> Iterator[Hypothesis]:
    """Yield what the operation gives with one setting of its part changed."""
    found = ran_again(failure)
    if found is not None:
        for path, name, value in _settings(failure):
            yield from _others(failure, *found, path, name, value)


def ran_again(failure: Failure) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return where the rows stand in the batch, and what the part gives there, run by itself; None where it cannot."""
    rerun = failure.rerun
    if rerun is None or failure.beyond is not None:
        return None
    places = rerun.places(failure.rows)
    if bool((places < 0).any()):
        return None
    own = rerun.run()[places]
    if own.shape != failure.expected.shape or float((own - failure.expected).norm()) > 1e-5 * float(own.norm()):
        return None  # the part, run by itself, is not what the model ran
    return places, own


def _others(
    failure: Failure, places: torch.Tensor, own: torch.Tensor, path: str, name: str, value: Any
) -> Iterator[Hypothesis]:
    label, module = f"{name} of {path}", failure.hf.module(path)

    def given(other: Any) -> torch.Tensor | None:
        with replaced(module, name, other):
            try:
                output = failure.rerun.run()[places]  # type: ignore[union-attr]
            except (ArithmeticError, AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError):
                return None  # the module cannot do without this setting
        return output if output.shape == own.shape and bool(output.isfinite().all()) else None

    if isinstance(value, bool):
        output = given(not value)
        if output is not None and not torch.equal(output, own):
            yield Hypothesis(cause=f"{label} is {not value} instead of {value}", output=output)
        return
    if _nudged(given, value, own) is None:
        return
    tried = {1.0: "left out", _FAR: "left out", value * value: "applied twice", 1 / value: "turned around", -value: ""}
    for other, how in tried.items():
        output = given(other) if not math.isclose(other, value) else None
        if output is not None and not torch.equal(output, own):
            shown = "none" if other == _FAR else f"{other:.6g}"
            cause = f"{label} is {shown} instead of {value:.6g}" + (f": {how}" if how else "")
            yield Hypothesis(cause=cause, output=output)
    fitted = fitted_setting(failure, given, value, own)
    if fitted is not None and not any(math.isclose(fitted, item, rel_tol=NAMED) for item in (value, *tried)):
        output = given(fitted)
        if output is not None:
            yield Hypothesis(cause=f"{label} is {fitted:.4g} instead of {value:.6g}", output=output, freedom=1)


def fitted_setting(
    failure: Failure, given: Callable[[float], torch.Tensor | None], value: float, own: torch.Tensor
) -> float | None:
    """Return the value of a setting under which the rows come out nearest (Gauss-Newton, over its logarithm).

    Args:
        failure: the rows that are wrong.
        given: returns the rows under a value of the setting.
        value: of the setting in HF.
        own: the rows under that value.
    """
    near = _nudged(given, value, own) if value > 0 else None
    if near is None:
        return None
    error, slope = failure.actual - own, (near - own) / math.log(_SMALL)
    if float((error * slope).sum()) ** 2 < _ALIKE * float(error.square().sum() * slope.square().sum()):
        return None
    at = math.log(value)
    for _ in range(_MAX_STEPS):
        step = float((error * slope).sum() / slope.square().sum())
        at += max(-1.0, min(1.0, step))
        here, there = given(math.exp(at)), given(math.exp(at) * _SMALL)
        if here is None or there is None or torch.equal(here, there):
            return None
        error, slope = failure.actual - here, (there - here) / math.log(_SMALL)
        if abs(step) < _NEAR_ENOUGH:
            break
    return math.exp(at)


def _nudged(given: Callable[[float], torch.Tensor | None], value: float, own: torch.Tensor) -> torch.Tensor | None:
    """Return the rows under a value beside a setting's own; None if they do not depend on it."""
    near = given(value * _SMALL)
    if near is not None and torch.equal(near, own) and value < _FAR:
        near = given(value / _SMALL**40)  # a limit that nothing reaches may be one that is too high
    return None if near is None or torch.equal(near, own) else near


def _settings(failure: Failure) -> Iterator[tuple[str, str, Any]]:
    """Yield module, name and value of each setting of the modules around the operation."""
    path, part = failure.operation.module, failure.rerun.scene.call.path  # type: ignore[union-attr]
    paths = {path, *(failure.graph[tap].module for tap in failure.unrecorded)}
    around = {parent for item in paths for parent in _parents(item, part)}
    below = (f"{path}.{name}" for name, _ in failure.hf.module(path).named_modules() if name)
    inside = {item for item in below if not _is_shown(failure, item)}
    scales = {scaling(call) for call in failure.rerun.calls.values()}  # type: ignore[union-attr] # named as such
    for item in sorted(around | inside):
        module = failure.hf.module(item)
        if hasattr(module, "lora_a"):
            continue  # an adapter's scale has causes of its own
        for name, value in list(vars(module).items()):
            if _is_setting(name, value) and not (name.startswith("scal") and value in scales):
                yield item, name, value


def _is_shown(failure: Failure, path: str) -> bool:
    return any(op.module == path and op.kind in (Kind.LINEAR, Kind.NORM) for op in failure.graph)


def _parents(path: str, part: str) -> Iterator[str]:
    while path == part or path.startswith(f"{part}."):
        yield path
        path = path.rpartition(".")[0]


def _is_setting(name: str, value: Any) -> bool:
    if name.startswith("_") or name == "training" or any(size in name for size in _SIZES):
        return False
    return isinstance(value, bool) or (isinstance(value, float) and value != 0 and math.isfinite(value))


EXPLANATIONS = (other_settings,)
"""Tried for every kind of operation that HF's code computes."""
