"""Slips that are no edits of source: fields of a configuration, rows of a cache, weights."""

from collections.abc import Callable
from random import Random
from typing import Any

import torch
from torch import nn

from harness.extensions.faults.drawn.edits import Edit
from harness.extensions.faults.modules.changes import cache, weight
from harness.extensions.faults.placed import FAULTS, IN_DECODE, TRUTHS

_ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh", "relu", "quick_gelu", "sigmoid")
_FIXED = (
    "vocab_size",
    "pad_token_id",
    "bos_token_id",
    "eos_token_id",
    "max_position_embeddings",
    "chunk_size_feed_forward",
)


def config_field(model: nn.Module, random: Random) -> Edit | None:
    """Return another value of one field of the configuration; the weights stay."""
    config: Any = model.config
    fields = {
        name: value
        for name, value in sorted(config.to_dict().items())
        if isinstance(value, bool | int | float | str | dict) and value and name not in _FIXED
    }
    name = random.choice([name for name, value in fields.items() if _others(value)] or ["model_type"])
    if not _others(fields.get(name)):
        return None
    value = random.choice(_others(fields[name]))

    def plant(target: Any) -> None:
        changed = type(target.config).from_dict({**target.config.to_dict(), name: value})
        changed._attn_implementation = target.config._attn_implementation
        built = type(target)(changed).eval()
        built.load_state_dict(target.state_dict(), assign=True)  # keeps their dtypes, and refuses other shapes
        dtypes = {path: buffer.dtype for path, buffer in target.named_buffers()}
        for path, buffer in built.named_buffers():
            buffer.data = buffer.data.to(dtypes.get(path, buffer.dtype))
        for child, module in built.named_children():
            setattr(target, child, module)
        target.config = changed

    return f"config.{name}: {fields[name]!r} becomes {value!r}", plant, None


def _others(value: Any) -> list[Any]:
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, float):
        return [value * 0.5, value * 1.1, value * 10]
    if isinstance(value, int):
        return [value - 1, value + 1, value * 2]
    if isinstance(value, str):
        return [name for name in _ACTIVATIONS if name != value] if value in _ACTIVATIONS else []
    if isinstance(value, dict):
        return [{**value, key: changed} for key, held in sorted(value.items()) for changed in _numbers(held)]
    return []


def _numbers(value: Any) -> list[Any]:
    return _others(value) if isinstance(value, int | float) else []


def cache_rows(model: nn.Module, random: Random) -> Edit | None:
    """Return a slip where keys and values [B, heads, T, size] are written."""
    which, decode_only = random.choice(("keys", "values", "both")), random.random() < 0.4
    words, change = random.choice(_SLIPS)
    place = random.randrange(1, 24)

    def slipped(x: torch.Tensor) -> torch.Tensor:
        return x if decode_only and x.shape[2] > 1 else change(x, place)

    def update(inner: Callable[..., Any], k: torch.Tensor, v: torch.Tensor, *rest: Any, **named: Any) -> Any:
        k = slipped(k) if which in ("keys", "both") else k
        return inner(k, slipped(v) if which in ("values", "both") else v, *rest, **named)

    when = "in decode" if decode_only else "always"
    return f"cache: {which}, {words} (place {place}), {when}", cache(update=update), None


def _replaced(x: torch.Tensor, place: int, rows: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Put other values into one place of the new rows; in decode that is the one new row."""
    at = min(place, x.shape[2] - 1)
    x = x.clone()
    x[:, :, at] = rows(x)
    return x


_SLIPS: list[tuple[str, Callable[[torch.Tensor, int], torch.Tensor]]] = [
    ("a row is lost", lambda x, at: _replaced(x, at, lambda y: torch.zeros_like(y[:, :, 0]))),
    ("a row is that of the first new position", lambda x, at: _replaced(x, at, lambda y: y[:, :, 0].clone())),
    ("a row is that of the last new position", lambda x, at: _replaced(x, at, lambda y: y[:, :, -1].clone())),
    ("rows are one place off", lambda x, at: x.roll(1, dims=2)),
    ("heads are one off", lambda x, at: x.roll(1, dims=1)),
    ("one head is lost", lambda x, at: torch.cat([0 * x[:, :1], x[:, 1:]], dim=1)),
    ("elements are one off", lambda x, at: x.roll(1, dims=3)),
    ("scaled by 1.05", lambda x, at: x * 1.05),
    ("in float8", lambda x, at: x.to(torch.float8_e4m3fn).to(x.dtype)),
]  # fmt: skip


def one_weight(model: nn.Module, random: Random) -> Edit | None:
    """Return a change of one parameter."""
    names = [name for name, value in model.named_parameters() if value.numel() > 4]
    name = random.choice(names)
    held = dict(model.named_parameters())[name]
    words, change = random.choice(_WEIGHTS)
    row = random.randrange(held.shape[0])
    twin = random.choice([twin for twin, value in model.named_parameters() if value.shape == held.shape])
    if words == "those of":
        if twin == name:
            return None
        values = dict(model.named_parameters())[twin].detach().clone()
        return f"{name}: the weights of {twin}", weight(name, lambda x: values.to(x)), None
    return f"{name}: {words} (row {row})", weight(name, lambda x: change(x, row)), None


def _row(x: torch.Tensor, row: int, factor: float) -> torch.Tensor:
    x = x.clone()
    x[row] *= factor
    return x


_WEIGHTS: list[tuple[str, Callable[[torch.Tensor, int], torch.Tensor]]] = [
    ("rows are one off", lambda x, row: x.roll(1, 0)),
    ("a row is lost", lambda x, row: _row(x, row, 0.0)),
    ("a row has the other sign", lambda x, row: _row(x, row, -1.0)),
    ("a row is scaled by 1.5", lambda x, row: _row(x, row, 1.5)),
    ("scaled by 1.02", lambda x, row: 1.02 * x),
    ("the other sign", lambda x, row: -x),
    ("the halves are exchanged", lambda x, row: torch.cat(x.chunk(2)[::-1])),
    ("rounded to float8", lambda x, row: x.to(torch.float8_e4m3fn).to(x.dtype)),
    ("those of", lambda x, row: x),
]


def known_mistake(model: nn.Module, random: Random) -> Edit | None:
    """Return a mistake that engine writers make, at a drawn place of those where it can be made."""
    kinds = {**FAULTS, **IN_DECODE}
    name = random.choice(sorted(kinds))
    plans = kinds[name](model)
    if not plans:
        return None
    at = random.randrange(len(plans))
    return f"{name}, place {at}", lambda target: kinds[name](target)[at].inject(), TRUTHS[name]
