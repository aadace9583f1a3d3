"""Settings of torch modules, read from attributes with standard names and from buffers.

Ambiguous values are not read: a number that may mean something else, a value of one rank, a rounded table. A setting
that is not read is not compared.
"""

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

import torch
from torch import nn

from harness.results.settings import Frequencies, ModelSettings, distinct

_BASES = ("base", "theta", "rope_theta")
_EPS = ("eps", "variance_epsilon", "epsilon")
_TABLES = (("cos", "sin"), ("cos_cached", "sin_cached"), ("cos_cache", "sin_cache"))
"""Names of tables with cosine and sine of every position: [T, P], or [T, 2 P] with each angle twice."""
_BOTH = "cos_sin_cache"
"""Name of one table [T, 2 P], with the cosines first."""
_EXACT = (torch.float32, torch.float64)
_ROUNDINGS = 1e-5
_LEAST_SIZE = 8
"""Smallest integer n for which a softmax scale of 1 / sqrt(n) is read: engines fold other scales into weights, or into
the base of the exponential."""


def settings_of_modules(modules: Mapping[str, nn.Module]) -> ModelSettings:
    """Return the settings that modules show."""
    all_modules = list(modules.values())
    attentions, norms = _named(all_modules, "attention"), _named(all_modules, "norm")
    frequencies = distinct(table for module in all_modules for table in _frequencies(module))
    bases = map(float, _numbers(_named(all_modules, "rope", "rotary"), _BASES, int, float))
    return ModelSettings(
        head_dim=distinct(_numbers(attentions, ("head_dim",), int)),
        norm_eps=distinct(_numbers(norms, _EPS, float)),
        rope_theta=distinct([*bases, *(theta for table in frequencies if (theta := _theta(table)) is not None)]),
        rope_frequencies=frequencies,
        softmax_scale=distinct(filter(_is_root, _numbers(attentions, ("scaling",), float))),
        sliding_window=distinct(_numbers(attentions, ("sliding_window",), int)),
    )


def _named(modules: Iterable[nn.Module], *words: str) -> list[nn.Module]:
    """Return the modules whose class has a word in its name."""
    return [module for module in modules if any(word in type(module).__name__.lower() for word in words)]


def _numbers(modules: Iterable[nn.Module], names: Iterable[str], *kinds: type) -> Iterator[Any]:
    """Yield positive attributes of modules, by name and type."""
    for module in modules:
        for name in names:
            value: Any = getattr(module, name, None)
            if type(value) in kinds and value > 0:
                yield value


def _is_root(scale: float) -> bool:
    size = scale**-2
    return size >= _LEAST_SIZE - 0.5 and abs(size - round(size)) < _ROUNDINGS * size


def _frequencies(module: nn.Module) -> Iterator[Frequencies]:
    """Yield the rotary frequencies of a module: of `inv_freq`, or the angles of position 1 in its tables."""
    held = {name: tensor for name, tensor in _tensors(module) if tensor.dtype in _EXACT and not tensor.is_meta}
    names = [name for name in held if name.endswith("inv_freq") and not name.endswith("original_inv_freq")]
    tables = [held[name] for name in names if held[name].dim() == 1 and len(held[name]) > 1]
    pairs = [(held[cos], held[sin]) for cos, sin in _TABLES if cos in held and sin in held]
    if _BOTH in held and held[_BOTH].dim() == 2:
        cos, sin = held[_BOTH].tensor_split(2, dim=1)
        pairs.append((cos, sin))
    tables += [table for cos, sin in pairs if (table := _first_angles(cos, sin)) is not None]
    yield from (tuple(table.tolist()) for table in tables if bool((table > 0).all()))  # zero: not filled yet


def _tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield buffers and tensor attributes of the module itself, without parameters."""
    plain = ((name, value) for name, value in vars(module).items() if isinstance(value, torch.Tensor))
    yield from (*module.named_buffers(recurse=False), *plain)


def _first_angles(cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor | None:
    """Return the angles [P] of position 1; None if these are not tables of cosine and sine of positions."""
    if cos.dim() != 2 or cos.shape != sin.shape or min(cos.shape) < 3:
        return None
    angles = torch.atan2(sin[:3].double(), cos[:3].double())
    for first, second in (angles.tensor_split(2, dim=1), (angles[:, ::2], angles[:, 1::2])):
        if torch.equal(first, second):  # each angle twice, for both elements of a pair
            angles = first
            break
    turned = torch.atan2((2 * angles[1]).sin(), (2 * angles[1]).cos())
    is_table = bool((angles[0] == 0).all()) and torch.allclose(angles[2], turned, rtol=_ROUNDINGS, atol=1e-6)
    return angles[1] if is_table else None


def _theta(table: Frequencies) -> float | None:
    """Return the base theta of the frequencies theta^(-i / P), from the first ones: scalings keep short wavelengths.

    Returns None if the first frequencies are no such sequence.
    """
    first, second, third = (*islice(table, 3), 0.0, 0.0)[:3]
    if abs(first - 1) > _ROUNDINGS or not 0 < second < 1 or abs(third - second * second) > _ROUNDINGS * third:
        return None
    return float(f"{second ** -len(table):.5g}")  # the precision of float32
