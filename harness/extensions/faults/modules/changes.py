"""Ways to change one model object: a weight, an attribute, what a module takes or returns, its kernel, its cache.

Each returns a function of a model of transformers. Only the object changes; the library and the checkpoint stay.
"""

import inspect
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask

Plant = Callable[[nn.Module], None]


def all_of(*plants: Plant) -> Plant:
    def plant(model: nn.Module) -> None:
        for plant in plants:
            plant(model)

    return plant


@torch.no_grad()
def _write(parameter: torch.Tensor, values: torch.Tensor) -> None:
    parameter.copy_(values)


def weight(path: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Plant:
    """Put `change` of a parameter or buffer in its place."""

    def plant(model: nn.Module) -> None:
        owner, _, name = path.rpartition(".")
        held = getattr(model.get_submodule(owner), name)
        _write(held, change(held.detach().clone()))

    return plant


def weight_of(path: str, source: str) -> Plant:
    """Put the values of another parameter in the place of one."""

    def plant(model: nn.Module) -> None:
        owner, _, name = source.rpartition(".")
        weight(path, lambda _: getattr(model.get_submodule(owner), name).detach().clone())(model)

    return plant


def exchanged(first: str, second: str) -> Plant:
    def plant(model: nn.Module) -> None:
        held = [
            getattr(model.get_submodule(path.rpartition(".")[0]), path.rpartition(".")[2]) for path in (first, second)
        ]
        values = [tensor.detach().clone() for tensor in held]
        _write(held[0], values[1])
        _write(held[1], values[0])

    return plant


def attribute(path: str, name: str, value: Any) -> Plant:
    return lambda model: setattr(model.get_submodule(path), name, value)


def setting(name: str, value: Any) -> Plant:
    """Change the configuration that the object's own modules read."""
    return lambda model: setattr(model.config, name, value)


def output(path: str, change: Callable[..., Any]) -> Plant:
    """`change(output, *arguments)` is what the module returns."""

    def plant(model: nn.Module) -> None:
        module = model.get_submodule(path)
        inner = module.forward
        module.forward = lambda *args, **named: change(inner(*args, **named), *args)

    return plant


def inputs(path: str, change: Callable[[torch.Tensor], torch.Tensor], name: str = "hidden_states") -> Plant:
    """`change` of its first tensor is what the module computes from."""

    def plant(model: nn.Module) -> None:
        module = model.get_submodule(path)
        inner = module.forward

        def forward(*args: Any, **named: Any) -> Any:
            if args:
                return inner(change(args[0]), *args[1:], **named)
            return inner(**{**named, name: change(named[name])})

        module.forward = forward

    return plant


def arguments(path: str, name: str, change: Callable[[Any], Any]) -> Plant:
    """`change` of one named argument is what the module is given."""

    def plant(model: nn.Module) -> None:
        module = model.get_submodule(path)
        inner = module.forward
        module.forward = lambda *args, **named: inner(*args, **{**named, name: change(named[name])})

    return plant


def forward(path: str, function: Callable[..., Any]) -> Plant:
    """Compute a module by `function(module, ...)`."""

    def plant(model: nn.Module) -> None:
        module = model.get_submodule(path)
        module.forward = types.MethodType(function, module)

    return plant


def names(path: str, **globals_: Any) -> Plant:
    """Let the module's own forward find other functions under some of its global names."""

    def plant(model: nn.Module) -> None:
        module = model.get_submodule(path)
        function = inspect.unwrap(type(module).forward)
        made = types.FunctionType(
            function.__code__,
            {**function.__globals__, **globals_},
            function.__name__,
            function.__defaults__,
            function.__closure__,
        )
        made.__kwdefaults__ = function.__kwdefaults__
        module.forward = types.MethodType(made, module)

    return plant


class Scores:
    """What a kernel of attention computes from; a fault replaces one of its steps."""

    def __init__(
        self, module: nn.Module, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any, **named: Any
    ) -> None:
        self.layer = getattr(module, "layer_idx", None)
        self.module, self.q, self.k, self.v, self.mask = module, q, k, v, mask
        self.scale = named.get("scaling") or q.shape[-1] ** -0.5
        self.cap, self.sinks, self.is_cap_first = named.get("softcap"), named.get("s_aux"), False
        self.extra = None
        self.window = named.get("sliding_window")
        self.is_decode = q.shape[2] == 1 and k.shape[2] > 1

    def repeated(self, x: torch.Tensor) -> torch.Tensor:
        return x.repeat_interleave(self.q.shape[1] // x.shape[1], dim=1)

    def positions(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return those of queries [T, 1] and of keys [K], counted from the first key at hand."""
        keys = torch.arange(self.k.shape[2])
        return keys[-self.q.shape[2] :, None], keys

    def allow(self, visible: torch.Tensor) -> None:
        """Let exactly [T, K] be seen, and what padding leaves."""
        hidden = torch.finfo(self.q.dtype).min
        self.mask = torch.where(visible, 0.0, hidden)[None, None].to(self.q.dtype)

    def hide(self, hidden: torch.Tensor) -> None:
        least = torch.finfo(self.q.dtype).min
        base = (
            torch.zeros(1, 1, self.q.shape[2], self.k.shape[2], dtype=self.q.dtype) if self.mask is None else self.mask
        )
        self.mask = base.masked_fill(hidden[None, None], least)

    def context(self) -> torch.Tensor:
        """Return [B, T, heads, D]."""
        k, v = self.repeated(self.k), self.repeated(self.v)
        scores = self.q @ k.transpose(2, 3)
        if self.cap is not None and self.is_cap_first:
            scores = torch.tanh(scores / self.cap) * self.cap * self.scale
        elif self.cap is not None:
            scores = torch.tanh(scores * self.scale / self.cap) * self.cap
        else:
            scores = scores * self.scale
        if self.extra is not None:
            scores = scores + self.extra
        if self.mask is not None:
            scores = scores + self.mask[..., : k.shape[2]]
        if self.sinks is not None:
            sinks = self.sinks.reshape(1, -1, 1, 1).expand(len(scores), -1, scores.shape[2], 1)
            scores = torch.cat([scores, sinks.to(scores.dtype)], dim=-1)
        weights = functional.softmax(scores, dim=-1, dtype=torch.float32).to(self.q.dtype)
        return (weights[..., : k.shape[2]] @ v).transpose(1, 2).contiguous()


def kernel(change: Callable[[Scores], Any] | None = None, *, layer: int | None = None) -> Plant:
    """Choose a kernel of attention of our own; `change` may edit its scores, or return the context."""

    def attend(module: nn.Module, q: Any, k: Any, v: Any, mask: Any, **named: Any) -> tuple[torch.Tensor, None]:
        scores = Scores(module, q, k, v, mask, **named)
        done = change(scores) if change is not None and layer in (None, scores.layer) else None
        return (scores.context() if done is None else done), None

    def plant(model: nn.Module) -> None:
        name = f"attention_{id(attend)}"
        AttentionInterface.register(name, attend)
        AttentionMaskInterface.register(name, eager_mask)
        model.set_attn_implementation(name)
        model._attend = attend  # its id stays taken

    return plant


CACHES = ("cache", "past_key_values", "layer_past", "cache_params")


def cache(**methods: Callable[..., Any]) -> Plant:
    """Replace methods of the cache: `update=lambda inner, k, v, layer: inner(k * 2, v, layer)`."""

    def patched(held: Any) -> None:
        if held is None or getattr(held, "_is_patched", False):
            return
        held._is_patched = True
        for name, change in methods.items():
            inner = getattr(held, name)
            setattr(held, name, lambda *args, _i=inner, _c=change, **named: _c(_i, *args, **named))

    def plant(model: nn.Module) -> None:
        for module in model.modules():
            parameters = inspect.signature(type(module).forward).parameters
            if not any(name in parameters for name in CACHES) or hasattr(module, "get_input_embeddings"):
                continue
            inner = module.forward

            def forward(*args: Any, _inner: Any = inner, **named: Any) -> Any:
                for name in CACHES:
                    patched(named.get(name))
                return _inner(*args, **named)

            module.forward = forward

    return plant


def rotary(
    change: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]], path: str
) -> Plant:
    """`change(cos, sin, positions)` for what the rotary module returns."""

    def plant(model: nn.Module) -> None:
        module = model.get_submodule(path)
        inner = module.forward

        def forward(x: torch.Tensor, position_ids: torch.Tensor, *args: Any, **named: Any) -> Any:
            cos, sin = inner(x, position_ids, *args, **named)
            return change(cos, sin, position_ids)

        module.forward = forward

    return plant


def frequencies(make: Callable[[torch.Tensor], torch.Tensor], path: str = "model.rotary_emb") -> Plant:
    """Put other frequencies into the rotary module, of another number if need be."""

    def plant(model: nn.Module) -> None:
        module = model.get_submodule(path)
        module.inv_freq = make(module.inv_freq.clone())
        if hasattr(module, "original_inv_freq"):
            module.original_inv_freq = module.inv_freq

    return plant


def powers(theta: float, dim: int, of: int | None = None) -> torch.Tensor:
    return theta ** -(torch.arange(0, dim, 2).float() / (of or dim))


def half_turned(x: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, dim=-1)
    return torch.cat([-b, a], dim=-1)


def pair_turned(x: torch.Tensor) -> torch.Tensor:
    return torch.stack([-x[..., 1::2], x[..., ::2]], dim=-1).flatten(-2)


def is_decode(x: torch.Tensor) -> bool:
    return x.shape[1] == 1
