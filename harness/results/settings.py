"""The settings that a model computes with (eps, theta, windows, ...), as an engine resolved them and as HF did.

No forward shows all of them: a window that no prompt reaches, or a scaling of late positions, changes no number of a
short check.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

_RELATIVE = 1e-4
"""Distance up to which two numbers are one: float32 gives the same frequency to 1e-6, and settings differ by more."""

Frequencies = tuple[float, ...]
"""Of rotary, one for each pair of elements: radians from one position to the next."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSettings:
    """The settings of one side: of each every value that occurs in the model; empty where the side does not show it."""

    num_layers: tuple[int, ...] = ()
    hidden_size: tuple[int, ...] = ()
    num_heads: tuple[int, ...] = ()
    """Of queries; of the whole model, not of one rank."""
    num_kv_heads: tuple[int, ...] = ()
    head_dim: tuple[int, ...] = ()
    norm_eps: tuple[float, ...] = ()
    rope_theta: tuple[float, ...] = ()
    rope_frequencies: tuple[Frequencies, ...] = ()
    """After scaling."""
    softmax_scale: tuple[float, ...] = ()
    """Factor of the scores of attention."""
    attention_cap: tuple[float | None, ...] = ()
    """Soft cap of the scores; None: there is none."""
    logit_cap: tuple[float | None, ...] = ()
    """Soft cap of the logits; None: there is none."""
    sliding_window: tuple[int, ...] = ()
    """Latest tokens that a layer with a window sees."""
    sliding_layers: tuple[tuple[int, ...], ...] = ()
    """One tuple: all layers with a window."""
    tied_head: tuple[bool, ...] = ()
    """Whether the head is the embedding."""
    num_experts: tuple[int, ...] = ()
    """Of a layer that has some, those that a router chooses from."""
    num_chosen_experts: tuple[int, ...] = ()
    """Of one token."""

    def __post_init__(self) -> None:
        for field in fields(self):
            if not isinstance(value := getattr(self, field.name), tuple):
                raise TypeError(f"the setting {field.name} is no tuple of values: {value!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingPair:
    """One setting as both sides have it."""

    setting: str
    """Field of `ModelSettings`."""
    engine: tuple[Any, ...]
    hf: tuple[Any, ...]

    @property
    def differs(self) -> bool:
        """Whether the engine computes with another value than HF.

        A value of one side alone says nothing: an engine may keep a module that it does not use, or not show one of
        two that HF has.
        """
        ours, theirs = self._unmatched()
        return bool(ours and theirs)

    def __str__(self) -> str:
        ours, theirs = self._unmatched()
        if self.setting == "rope_frequencies" and self.differs:
            return _frequencies_differ(ours[0], next(table for table in theirs if len(table) == len(ours[0])))
        name = self.setting.replace("_", " ")
        return f"the engine has {name} {shown_values(ours)}, HF has {shown_values(theirs)}"

    def _unmatched(self) -> tuple[list[Any], list[Any]]:
        """Return the values of the engine that HF does not have, and the reverse."""
        # Some engines count the token itself into a window, and some do not.
        slack = 1 if self.setting == "sliding_window" else 0
        ours = [item for item in self.engine if not any(_is_close(item, setting, slack) for setting in self.hf)]
        theirs = [item for item in self.hf if not any(_is_close(item, setting, slack) for setting in self.engine)]
        if self.setting != "rope_frequencies":
            return ours, theirs
        lengths = {len(table) for table in ours} & {len(table) for table in theirs}  # of others nothing is known
        return [our for our in ours if len(our) in lengths], [their for their in theirs if len(their) in lengths]


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingsResult:
    """The settings of an engine against HF's."""

    engine: str
    model: str
    pairs: tuple[SettingPair, ...]
    """Each setting that a side shows."""

    @property
    def differing(self) -> list[SettingPair]:
        """Settings of which the engine has another value; another theta is not told a second time as frequencies."""
        differing = [pair for pair in self.pairs if pair.differs]
        has_theta = any(pair.setting == "rope_theta" for pair in differing)
        return [pair for pair in differing if not (has_theta and pair.setting == "rope_frequencies")]

    @property
    def num_compared(self) -> int:
        """Settings that both sides show."""
        return sum(bool(pair.engine and pair.hf) for pair in self.pairs)


def setting_pairs(engine: ModelSettings, hf: ModelSettings) -> tuple[SettingPair, ...]:
    """Return each setting that a side shows, in the order of `ModelSettings`."""
    names = [field.name for field in fields(ModelSettings)]
    pairs = [SettingPair(setting=name, engine=getattr(engine, name), hf=getattr(hf, name)) for name in names]
    return tuple(pair for pair in pairs if pair.engine or pair.hf)


def distinct(values: Iterable[Any]) -> tuple[Any, ...]:
    """Return values in their order, each once; numbers that differ by a rounding are one."""
    values_shown: list[Any] = []
    for value in values:
        if not any(_is_close(value, item) for item in values_shown):
            values_shown.append(value)
    return tuple(values_shown)


def shown_values(values: Iterable[Any]) -> str:
    """Return the values of a setting in words; rotary frequencies by the first and the last."""
    return " and ".join(map(_shown, values)) or "-"


def _shown(value: Any) -> str:
    if value is None or value == ():
        return "none"
    if isinstance(value, tuple) and isinstance(value[0], float):
        return f"{len(value)} from {value[0]:.6g} to {value[-1]:.6g}"
    if isinstance(value, tuple):
        return ", ".join(map(str, value))
    return f"{value:.8g}" if isinstance(value, float) else str(value)


def _frequencies_differ(engine: Frequencies, hf: Frequencies) -> str:
    pair = max(range(len(hf)), key=lambda at: abs(engine[at] - hf[at]) / (abs(engine[at]) + abs(hf[at]) or 1.0))
    return (
        f"the engine's rotary frequencies are not HF's: pair {pair} of {len(hf)} turns by {engine[pair]:.6g} radians a "
        f"position, HF's by {hf[pair]:.6g}"
    )


def _is_close(first: Any, second: Any, slack: int = 0) -> bool:
    if isinstance(first, tuple) and isinstance(second, tuple):
        return len(first) == len(second) and all(map(_is_close, first, second))
    if isinstance(first, float) and isinstance(second, int | float):
        return math.isclose(first, second, rel_tol=_RELATIVE)
    if slack and isinstance(first, int) and isinstance(second, int):
        return abs(first - second) <= slack
    return bool(first == second)
