"""Faults of attention: its scale, soft cap, window, sinks, heads and rotation."""

import inspect
import math
from typing import Any

import torch
from torch import nn

from harness.extensions.faults.placed.plan import PlacedPlan, number_in, places, set_number, set_parameter

SCALES = ("scaling", "softmax_scale", "scale_attn", "inv_norm_factor", "norm_factor")
SOFTCAPS = ("attn_logit_softcapping",)
NO_CAP = 1e4


def scale(model: nn.Module) -> list[PlacedPlan]:
    """The scale of the scores is multiplied by 1.05."""

    def inject(module: nn.Module) -> None:
        name = number_in(module, SCALES)
        set_number(module, name, getattr(module, name) * 1.05)

    return places(model, lambda module: "Attention" in type(module).__name__ and number_in(module, SCALES), inject)


def softcap(model: nn.Module) -> list[PlacedPlan]:
    """The soft cap of the scores is left out."""
    return places(
        model, lambda module: number_in(module, SOFTCAPS), lambda module: set_number(module, *SOFTCAPS, NO_CAP)
    )


def sinks(model: nn.Module) -> list[PlacedPlan]:
    """The logits of the attention sinks are 1 too large."""

    def has_sinks(module: nn.Module) -> bool:
        return isinstance(getattr(module, "sinks", None), nn.Parameter)

    return places(model, has_sinks, lambda module: set_parameter(module, "sinks", module.sinks + 1))


def heads(model: nn.Module) -> list[PlacedPlan]:
    """The first and the last head of the query are exchanged."""

    def inject(module: nn.Module) -> None:
        count = num_heads(module)
        order = [count - 1, *range(1, count - 1), 0]
        for name, parameter in list(module.q_proj.named_parameters()):  # [heads * head_dim, ...]
            set_parameter(module.q_proj, name, parameter.unflatten(0, (count, -1))[order].flatten(0, 1))

    return places(model, lambda module: num_heads(module) > 1, inject, sites=lambda module: ("q_proj",))


def num_heads(attention: nn.Module) -> int:
    """Return the number of heads of a query that has a projection of its own, or 0."""
    projection, head_dim = getattr(attention, "q_proj", None), getattr(attention, "head_dim", None)
    if not isinstance(projection, nn.Linear) or not isinstance(head_dim, int) or projection.out_features % head_dim:
        return 0
    return projection.out_features // head_dim


def window(model: nn.Module) -> list[PlacedPlan]:
    """One layer sees one token less than its window."""
    return places(model, has_window, shorten_window)


def has_window(module: nn.Module) -> bool:
    width = getattr(module, "sliding_window", None)
    return isinstance(width, int) and width > 0 and "attention_mask" in inspect.signature(module.forward).parameters


def shorten_window(module: nn.Module) -> None:
    """Hide the oldest key from each row of the mask that sees a whole window.

    A mask of None stays as it is: in decode, HF gives none to a cache that holds no more than the window.
    """
    forward = module.forward
    signature = inspect.signature(forward)

    def faulty(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        mask = bound.arguments.get("attention_mask")
        if isinstance(mask, torch.Tensor):
            bound.arguments["attention_mask"] = without_oldest(mask, module.sliding_window)
        return forward(*bound.args, **bound.kwargs)

    module.forward = faulty


def without_oldest(mask: torch.Tensor, width: int) -> torch.Tensor:
    """Hide the oldest visible key of each row that sees `width` keys, in a mask [B, H, Q, K] of bool or of addends."""
    visible = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
    oldest = visible & (visible.cumsum(-1) == 1) & (visible.sum(-1, keepdim=True) == width)
    if mask.dtype == torch.bool:
        return mask & ~oldest
    return mask.masked_fill(oldest, torch.finfo(mask.dtype).min)


def rope_theta(model: nn.Module) -> list[PlacedPlan]:
    """The frequencies of the rotation come from another base: 20,000 where it is 10,000."""

    def inject(module: nn.Module) -> None:
        for name in frequencies(module):
            setattr(module, name, getattr(module, name) ** (math.log(20_000) / math.log(10_000)))

    return places(model, frequencies, inject, blames_user=True)


def frequencies(module: nn.Module) -> list[str]:
    """Return the names of the buffers with the frequencies of a rotation."""
    names = [name for name, _ in module.named_buffers(recurse=False)]
    return [name for name in names if name.endswith("inv_freq") and "original" not in name]
