"""HF's model watched while it runs: modules' inputs and outputs, attention's interface, its latents, routers' choices.

Nothing of the library is patched: hooks are removed, the registry entry and the model's attention setting are put
back, also when the forward raises. A watcher may put another value in the place of each that it is shown. Values become
rows, one for each token, and tensors again.
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Any, Protocol
from unittest.mock import patch

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from harness.base.progress import quiet_transformers
from harness.oracle.untraced import UntracedModel


def token_dim(tensor: torch.Tensor, num_requests: int, num_tokens: int) -> int | None:
    """Return which dimension counts the tokens: 1, 2 after heads, 0 if requests and tokens are one; None for none.

    Args:
        tensor: any of a forward's.
        num_requests: size of the batch.
        num_tokens: tokens of each request, padding included.
    """
    shape = tensor.shape
    if sum(size == num_tokens for size in shape) > 1:  # probabilities of attention: one for each key
        return None
    if len(shape) >= 2 and shape[0] == num_requests:
        if shape[1] == num_tokens:
            return 1
        if len(shape) >= 3 and shape[2] == num_tokens:
            return 2
    if len(shape) >= 2 and shape[0] and shape[0] % (num_requests * num_tokens) == 0:
        return 0
    return None


def as_rows(tensor: torch.Tensor, dim: int, num_requests: int, num_tokens: int) -> torch.Tensor:
    """Return [requests * tokens, ...] of a tensor whose dimension `dim` counts the tokens; a view if it can be."""
    if dim == 2:
        tensor = tensor.transpose(1, 2)
    if dim == 0 and tensor.shape[0] == num_requests * num_tokens:
        return tensor
    rest = tensor.shape[2:] if dim else (-1,)
    return tensor.reshape(num_requests * num_tokens, *rest)


def chosen_positions(chosen: torch.Tensor, scores: torch.Tensor, width: int) -> torch.Tensor:
    """Return which of the tokens so far were chosen, [..., width]: -1 for what is masked, and where there are too few.

    Args:
        chosen: [..., k] indices.
        scores: [..., n] by which they were chosen.
        width: what k is where there are enough tokens.
    """
    is_masked = scores.gather(-1, chosen) <= torch.finfo(scores.dtype).min / 2
    return torch.nn.functional.pad(chosen.masked_fill(is_masked, -1), (0, width - chosen.shape[-1]), value=-1)


def choice_of_positions(positions: torch.Tensor, like: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """Return positions [..., width] as indices of the shape of `like`; a position of the same row replaces -1."""
    rows = positions.sort(dim=-1, descending=True).values[..., : like.shape[-1]].reshape(like.shape)
    return torch.where(rows < 0, rows[..., :1], rows).clamp(0, num_tokens - 1)


def from_rows(rows: torch.Tensor, like: torch.Tensor, dim: int) -> torch.Tensor:
    """Return rows in the shape of the tensor that they were made of by `as_rows`."""
    if dim != 2:
        return rows.reshape(like.shape)
    shape = (like.shape[0], like.shape[2], like.shape[1], *like.shape[3:])
    return rows.reshape(shape).transpose(1, 2)


CHOICE = ":topk"
"""End of a source: the indices that a router's `torch.topk` chose."""
LATENTS = ("latent", "rotary_key")
"""What latent attention expands to keys and values, and HF's cache holds in their place."""
_REGISTRATIONS = count()
"""Numbers the entries in HF's registry of attention functions: one watch inside of another needs two."""
_ELEMENTWISE_FILES = ("transformers.activations", "torch.nn.modules.activation", "torch.nn.modules.dropout")


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCall:
    """One call of HF's attention interface.

    `B` batch, `N` query heads, `K` KV heads, `T` queries, `S` keys, `H` head size.
    """

    path: str
    module: nn.Module
    query: torch.Tensor
    """[B, N, T, H]."""
    key: torch.Tensor
    """[B, K, S, H]."""
    value: torch.Tensor
    """[B, K, S, H], of a head size that may be another."""
    mask: torch.Tensor | None
    """[B, 1, T, S] bool or additive; None for the causal mask."""
    options: Mapping[str, Any]
    """`scaling`, `softcap`, `sliding_window`, `s_aux` and whatever else the family passes."""


class Watcher(Protocol):
    """Is shown the values of a forward in the order of the run."""

    def see(self, source: str, value: torch.Tensor) -> torch.Tensor | None:
        """Return the value with which the forward goes on; None to go on with `value`."""

    def attend(self, call: AttentionCall, function: Callable[..., Any]) -> Any:
        """Compute attention by HF's own function; return what that returns, the context [B, T, N, H] first."""

    def choose(self, source: str, scores: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor | None:
        """Return the indices [..., k] that replace those `chosen` by their `scores` [..., n]; None to keep them."""


class Seeing:
    """A watcher that replaces nothing."""

    def __init__(self, sink: Callable[[str, torch.Tensor], None]) -> None:
        """Show every value to `sink`, which must copy what it keeps."""
        self._sink = sink
        self.calls: dict[str, AttentionCall] = {}
        """The latest call of each attention module, by its path."""
        self.num_scores: dict[str, int] = {}
        """By source: among how many the latest choice was made."""

    def see(self, source: str, value: torch.Tensor) -> None:
        """See `Watcher.see`."""
        self._sink(source, value.detach())

    def attend(self, call: AttentionCall, function: Callable[..., Any]) -> Any:
        """See `Watcher.attend`."""
        self.calls[call.path] = call
        return run_attention(call, function)

    def choose(self, source: str, scores: torch.Tensor, chosen: torch.Tensor) -> None:
        """See `Watcher.choose`."""
        self.num_scores[source] = scores.shape[-1]
        self._sink(source, chosen)


def window_of(call: AttentionCall) -> int | None:
    """Return the sliding window of an attention; None if it sees everything before it."""
    window = call.options.get("sliding_window") or getattr(call.module, "sliding_window", None)
    return window if isinstance(window, int) else None


def run_attention(call: AttentionCall, function: Callable[..., Any]) -> Any:
    """Run an attention function of HF's on a call."""
    return function(call.module, call.query, call.key, call.value, call.mask, **call.options)


class Watch:
    """Hooks on a model, and the watcher of each thread."""

    def __init__(self, hf: UntracedModel) -> None:
        self._hf = hf
        self._runs: dict[int, _Run] = {}

    @contextmanager
    def showing(
        self,
        watcher: Watcher,
        *,
        narrowed: Callable[[str, torch.Tensor], torch.Tensor | None] = lambda _path, _x: None,
    ) -> Iterator[None]:
        """Show the forwards that this thread runs in the block to `watcher`.

        Args:
            watcher: is shown the values.
            narrowed: told the path of a module and its input; returns the rows of it that the module is to compute,
                None for all. The watcher then returns all rows in the place of the output.
        """
        ident = threading.get_ident()
        run = _Run(self._hf, watcher, narrowed)
        self._runs[ident] = run
        try:
            with _Calls(run):
                yield
        finally:
            del self._runs[ident]

    @property
    def _run(self) -> "_Run | None":
        return self._runs.get(threading.get_ident())

    def _before(self, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        run = self._run
        if run is None:
            return None
        run.enter(path)
        key = _input_key(args, kwargs)
        if key is None:
            return None
        value = args[key] if isinstance(key, int) else kwargs[key]
        replacement = run.show(f"{path}:input", value)
        fewer = run.narrowed(path, value if replacement is None else replacement)
        replacement = replacement if fewer is None else fewer
        if replacement is None:
            return None
        if isinstance(key, int):
            return (*args[:key], replacement, *args[key + 1 :]), kwargs
        return args, {**kwargs, key: replacement}

    def _after(self, path: str, output: Any) -> Any:
        run = self._run
        if run is None:
            return None
        run.leave(path)
        if isinstance(output, torch.Tensor):
            return run.show(path, output)
        if not isinstance(output, tuple):
            return None
        shown = [run.show(path if not at else f"{path}:{at}", item) for at, item in enumerate(output)]
        if all(item is None for item in shown):
            return None
        values = [old if new is None else new for old, new in zip(output, shown, strict=True)]
        return type(output)(*values) if hasattr(output, "_fields") else tuple(values)

    def _attend(self, function: Callable[..., Any], call: AttentionCall) -> Any:
        run = self._run
        if run is None:
            return run_attention(call, function)
        query, key, value = run.show_parts(call.path, query=call.query, key=call.key, value=call.value)
        call = replace(call, query=query, key=key, value=value)
        context = run.watcher.attend(call, function)[0]
        replacement = run.show(f"{call.path}:context", context)
        # Without the weights, as sdpa does it: a row of them is as wide as the history.
        return (context if replacement is None else replacement), None

    def _expand(self, path: str, function: Callable[..., Any], *latents: torch.Tensor) -> Any:
        run = self._run
        if run is not None:
            latents = tuple(run.show_parts(path, **dict(zip(LATENTS, latents, strict=True))))
        return function(*latents)


class _Run:
    """A forward that is being watched: which modules run, and how often each value was shown."""

    def __init__(
        self,
        hf: UntracedModel,
        watcher: Watcher,
        narrowed: Callable[[str, torch.Tensor], torch.Tensor | None] = lambda _path, _x: None,
    ) -> None:
        self.watcher, self.narrowed = watcher, narrowed
        self._hf = hf
        self._num_shown = Counter[str]()
        self._path: list[str] = []

    def enter(self, path: str) -> None:
        self._path.append(path)

    def leave(self, path: str) -> None:
        while self._path and self._path.pop() != path:
            pass

    @property
    def path(self) -> str:
        """Path of the module that is being run."""
        return self._path[-1] if self._path else ""

    def is_own_weight(self, weight: Any) -> bool:
        """Whether a tensor is the weight of the module that is being run, and that module is no linear one itself."""
        module = self._hf.module(self.path) if self.path else None
        return module is not None and not isinstance(module, nn.Linear) and weight is getattr(module, "weight", None)

    def show(self, source: str, value: Any) -> torch.Tensor | None:
        """Show a value under a name that says how often it was there before."""
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            return None
        with torch._C.DisableTorchFunction():  # what a watcher computes is not the model's code
            return self.watcher.see(self._numbered(source), value)

    def show_parts(self, path: str, **parts: torch.Tensor) -> Iterator[torch.Tensor]:
        """Show what a module passes on by name, and yield what to go on with."""
        for part, value in parts.items():
            replacement = self.show(f"{path}:{part}", value)
            yield value if replacement is None else replacement

    def show_choice(self, scores: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor | None:
        """Show what the module that is being run chose."""
        with torch._C.DisableTorchFunction():
            return self.watcher.choose(self._numbered(f"{self.path}{CHOICE}"), scores, chosen)

    def _numbered(self, source: str) -> str:
        self._num_shown[source] += 1
        number = self._num_shown[source]
        return source if number == 1 else f"{source}@{number}"


class _Calls(TorchFunctionMode):
    """Shows what modules compute by functions: choices by `torch.topk`, and products with a weight of their own.

    Every router of HF's chooses by `topk`, most from a product that is no module.
    """

    def __init__(self, run: _Run) -> None:
        super().__init__()
        self._run = run

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.topk or func is torch.Tensor.topk:
            chosen = self._run.show_choice(args[0], result.indices)
            return result if chosen is None else type(result)((args[0].gather(-1, chosen), chosen))
        if func is nn.functional.linear and self._run.is_own_weight(args[1] if len(args) > 1 else None):
            replacement = self._run.show(f"{self._run.path}:linear", result)
            return result if replacement is None else replacement
        return result


@contextmanager
def watching(hf: UntracedModel, *, attention: str | None = None) -> Iterator[Watch]:
    """Put hooks on the model for the duration of the block.

    Args:
        hf: the model to listen to.
        attention: the attention of HF's registry to run, `sdpa`, `eager` or another registered one; None for
            the one that the model is set to.
    """
    watch = Watch(hf)
    with ExitStack() as stack:
        stack.enter_context(_attention_shown(hf, watch, attention))
        for path, module in hf.model.named_modules():
            if path and _is_shown(module):
                for handle in _hooks(watch, path, module):
                    stack.callback(handle.remove)
                if hasattr(module, "expand_kv"):
                    expand = partial(watch._expand, path, module.expand_kv)
                    stack.enter_context(patch.object(module, "expand_kv", expand))
        yield watch


def _is_shown(module: nn.Module) -> bool:
    """Whether a module's output is a tap: activation functions and rotary tables are part of what reads them."""
    has_table = any("inv_freq" in name for name, _ in module.named_buffers(recurse=False))
    return not has_table and type(module).__module__ not in _ELEMENTWISE_FILES


def _hooks(watch: Watch, path: str, module: nn.Module) -> Iterator[Any]:
    yield module.register_forward_pre_hook(
        lambda _module, args, kwargs: watch._before(path, args, kwargs), with_kwargs=True
    )
    yield module.register_forward_hook(lambda _module, _args, output: watch._after(path, output))


def _input_key(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int | str | None:
    """Return where a module's first floating-point input stands."""
    if isinstance(kwargs.get("hidden_states"), torch.Tensor):
        return "hidden_states"
    places: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
    for place, value in places:
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            return place
    return None


class _NameOf(str):
    """A name in HF's registry that equals its alias, too: some families leave keys out for one name only."""

    def __new__(cls, name: str, alias: str) -> "_NameOf":
        member = super().__new__(cls, name)
        member.alias = alias
        return member

    alias: str

    def __reduce__(self) -> tuple[type, tuple[str, str]]:  # a config is copied to be written
        return _NameOf, (str(self), self.alias)

    def __eq__(self, value: object) -> bool:
        return super().__eq__(value) or self.alias == value

    def __ne__(self, value: object) -> bool:
        return not self == value

    __hash__ = str.__hash__


@contextmanager
def _attention_shown(hf: UntracedModel, watch: Watch, attention: str | None) -> Iterator[None]:
    """Register an attention function that shows queries, keys, values and context of the new tokens.

    They exist only between two lines of HF's attention modules; the registry of attention functions is the public way
    to see them. A family that does not use it computes attention as ever, and shows it as modules.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    before = hf.config._attn_implementation
    attention = attention or before or "sdpa"
    name = f"harness_watch_{next(_REGISTRATIONS)}"
    chosen = None if attention == "eager" else AttentionInterface()[attention]
    try:
        AttentionInterface.register(name, _shown_to(watch, hf, chosen))
        if attention in AttentionMaskInterface._global_mapping:  # an attention of the user's may do without
            AttentionMaskInterface.register(name, AttentionMaskInterface()[attention])
        _set_attention(hf, name)
        _rename_attention(hf, name, _NameOf(name, attention))
        yield
    finally:
        _rename_attention(hf, name, name)  # HF leaves a name as it is that is equal to the new one
        _set_attention(hf, before)
        AttentionInterface._global_mapping.pop(name, None)
        AttentionMaskInterface._global_mapping.pop(name, None)


def _shown_to(watch: Watch, hf: UntracedModel, chosen: Callable[..., Any] | None) -> Callable[..., Any]:
    """Return an attention function that shows each call and computes with `chosen`, or with eager attention if None."""
    paths = {module: path for path, module in hf.model.named_modules()}

    def listen(
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **options: Any,
    ) -> Any:
        function = hf.eager_attention(module) if chosen is None else chosen
        assert function is not None, f"{type(module).__name__} has no eager attention"
        call = AttentionCall(
            path=paths[module],
            module=module,
            query=query,
            key=key,
            value=value,
            mask=attention_mask,
            options=options,
        )
        return watch._attend(function, call)

    return listen


def _rename_attention(hf: UntracedModel, name: str, new_name: str) -> None:
    for module in hf.model.modules():
        if getattr(getattr(module, "config", None), "_attn_implementation", None) == name:
            module.config._attn_implementation = new_name


def _set_attention(hf: UntracedModel, name: str) -> None:
    with quiet_transformers():  # it warns of families that do not use the registry
        hf.model.set_attn_implementation(name)
        if hf.mtp is not None:
            hf.mtp.model.set_attn_implementation(name)
