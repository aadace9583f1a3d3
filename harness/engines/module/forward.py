"""The call of a user's module: token ids and positions in, logits and perhaps a cache out.

Hooks show the inputs and outputs of the modules in it. `ModuleStepper` makes an engine of steps of it, one request at a
time, with the cache that its forward returns.
"""

import inspect
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from harness.engines.adapter import engine_refusals
from harness.engines.by_content.steps import Work
from harness.engines.declared import DECLARATIONS
from harness.errors import Code, HarnessError
from harness.oracle.caches import held_states

INPUT = "input"

Sink = Callable[[str, tuple[torch.Tensor, ...]], None]


@contextmanager
def showing_values(module: nn.Module, paths: Collection[str], sink: Sink) -> Iterator[None]:
    """Show what the modules at some paths are called with and return.

    Args:
        module: what is run in the block.
        paths: of modules in it.
        sink: called with `PATH:input` or `PATH` and all tensors of floating-point numbers that there are; the second
            time in one block that a module is called, with `PATH:input@2` and `PATH@2`. It must copy what it keeps.
    """
    num_calls = Counter[str]()

    def show(name: str, values: Any) -> None:
        num_calls[name] += 1
        number = num_calls[name]
        sink(name if number == 1 else f"{name}@{number}", tuple(_tensors(values)))

    with ExitStack() as stack:
        for path in paths:
            submodule = module.get_submodule(path)
            stack.callback(submodule.register_forward_pre_hook(_before(path, show), with_kwargs=True).remove)
            stack.callback(submodule.register_forward_hook(_after(path, show)).remove)
        yield


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Run a module as in inference, without dropout, and put the mode of each part of it back."""
    modes = [(item, item.training) for item in module.modules()]
    module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for item, mode in modes:
            item.training = mode


def _before(path: str, show: Callable[[str, Any], None]) -> Callable[..., None]:
    return lambda _module, args, kwargs: show(f"{path}:{INPUT}", (*args, *kwargs.values()))


def _after(path: str, show: Callable[[str, Any], None]) -> Callable[..., None]:
    return lambda _module, _args, output: show(path, output)


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    """Go through the tensors of floating-point numbers in what a module takes or returns."""
    if isinstance(values, torch.Tensor):
        if values.is_floating_point() and values.itemsize > 1:  # float8 holds codes
            yield values.detach()
    elif isinstance(values, tuple | list):
        for value in values:
            yield from _tensors(value)
    elif isinstance(values, Mapping):
        for value in values.values():
            yield from _tensors(value)


_IDS = "input_ids"
CACHES = ("past_key_values", "kv_cache", "cache")
"""Names of the argument by which a forward takes the cache that it returned the time before; None the first time."""

_FILLED: Mapping[str, Callable[[range, torch.device], Any]] = {
    "position_ids": lambda positions, device: torch.tensor([[*positions]], device=device),
    "positions": lambda positions, device: torch.tensor([[*positions]], device=device),
    "cache_position": lambda positions, device: torch.tensor([*positions], device=device),
    "input_pos": lambda positions, device: torch.tensor([*positions], device=device),
    "start_pos": lambda positions, _device: positions.start,
    "use_cache": lambda _positions, _device: True,
}
"""Arguments that are given where a forward has them."""
_FILLED_IF_REQUIRED: Mapping[str, Callable[[range, torch.device], Any]] = {
    "attention_mask": lambda positions, device: torch.ones(1, positions.stop, dtype=torch.int64, device=device),
}


@dataclass(frozen=True, slots=True)
class ForwardResult:
    """The result of a forward."""

    logits: torch.Tensor
    """[rows, vocabulary]: of all tokens that were fed, or of the last one."""
    cache: Any
    """None if it returned none."""


class Forward:
    """Calls a module's forward for one request at a time."""

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        """Look at the arguments of the forward.

        Raises:
            HarnessError: ENGINE_CANNOT_SERVE: it takes no token ids, or needs something that is not known here.
        """
        self._module, self._device, self._name = module, device, type(module).__name__
        parameters = dict(inspect.signature(module.forward).parameters)
        ids = parameters.pop(self._ids_argument(parameters))
        self._ids = ids.name if ids.kind in (ids.POSITIONAL_OR_KEYWORD, ids.KEYWORD_ONLY) else ""
        self._cache = next((name for name in CACHES if name in parameters), None)
        is_required = {
            name: parameter.default is parameter.empty
            and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
            for name, parameter in parameters.items()
        }
        self._fills = {name: fill for name, fill in _FILLED.items() if name in parameters}
        self._fills |= {name: fill for name, fill in _FILLED_IF_REQUIRED.items() if is_required.get(name)}
        self._required = {name: fill for name, fill in self._fills.items() if is_required[name]}
        unknown = [name for name, required in is_required.items() if required and name not in self._passed_arguments]
        if unknown:
            raise self._error(
                f"its forward needs the argument {unknown[0]!r}, which the harness does not know",
                expected=f"token ids [1, tokens], and of {', '.join((*_FILLED, *CACHES))} what it has",
                actual=f"forward{inspect.signature(module.forward)}",
            )

    @property
    def takes_cache(self) -> bool:
        """Whether the forward takes a cache."""
        return self._cache is not None

    def __call__(self, ids: Sequence[int], start: int, cache: Any = None) -> ForwardResult:
        """Feed tokens of one request.

        Args:
            ids: the tokens.
            start: position of the first of them.
            cache: what the call before returned; None for a request's first tokens.

        Raises:
            HarnessError: ENGINE_CANNOT_SERVE: it returned no logits.
        """
        positions = range(start, start + len(ids))
        token_ids = torch.tensor([list(ids)], device=self._device)
        options = {name: fill(positions, self._device) for name, fill in self._fills.items()}
        if self._cache is not None:
            options[self._cache] = cache
        output = self._module(**{self._ids: token_ids}, **options) if self._ids else self._module(token_ids, **options)
        logits = _logits(output)
        if logits is None or not logits.is_floating_point():
            raise self._error(
                "its forward returns no logits",
                expected="a tensor [1, tokens, vocabulary], (logits, cache), or an object with `logits`",
                actual=_described(output),
            )
        rows = logits.reshape(-1, logits.shape[-1])
        if len(rows) not in (1, len(ids)):
            raise self._error(
                "its forward returns another number of rows than it was given tokens",
                expected=f"[1, {len(ids)}, vocabulary], or the last row alone",
                actual=list(logits.shape),
            )
        return ForwardResult(rows, self._returned_cache(output))

    def leave_out_what_it_refuses(self, ids: Sequence[int]) -> None:
        """Leave out the arguments that have a default if the module raises with them and does not without them.

        With positions, some modules read a cache of their own that was never made.
        """
        if self._required == self._fills:
            return
        everything = self._fills
        for fills in (everything, self._required):
            self._fills = fills
            try:
                self(ids, 0)
            except HarnessError:
                raise
            except Exception:
                continue
            return
        self._fills = everything

    def check_vocabulary(self, answer: ForwardResult, size: int) -> None:
        """Refuse what has another width than HF's logits.

        Raises:
            HarnessError: ENGINE_CANNOT_SERVE.
        """
        if answer.logits.shape[-1] != size:
            raise self._error(
                "its forward returns no logits of this model",
                expected=f"{size} logits a token",
                actual=f"{answer.logits.shape[-1]} numbers a token",
                hint="return the head's output, without padding of the vocabulary",
            )

    @property
    def _passed_arguments(self) -> set[str]:
        return {*self._fills, *(() if self._cache is None else (self._cache,))}

    def _ids_argument(self, parameters: Mapping[str, inspect.Parameter]) -> str:
        """Return the name of the argument that takes the token ids: `input_ids`, or the first one."""
        if _IDS in parameters:
            return _IDS
        for name, parameter in parameters.items():
            if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD, parameter.VAR_POSITIONAL):
                return name
        raise self._error("its forward takes no token ids", expected="forward(input_ids)", actual=list(parameters))

    def _returned_cache(self, output: Any) -> Any:
        if self._cache is None:
            return None
        if isinstance(output, tuple | list):
            return output[1] if len(output) > 1 else None
        cache = output.get(self._cache) if isinstance(output, Mapping) else getattr(output, self._cache, None)
        return None if isinstance(output, torch.Tensor) else cache

    def _error(self, what: str, *, expected: object, actual: object, hint: str | None = None) -> HarnessError:
        return HarnessError(
            Code.ENGINE_CANNOT_SERVE,
            f"the module cannot be run: {what}",
            where=self._name,
            expected=expected,
            actual=actual,
            hint=hint or "wrap it in a module whose forward does, or write an adapter: docs/write-an-adapter.md",
        )


def _logits(output: Any) -> torch.Tensor | None:
    if isinstance(output, Mapping):
        output = output.get("logits")
    elif isinstance(output, tuple | list):
        output = output[0] if output else None
    elif not isinstance(output, torch.Tensor):
        output = getattr(output, "logits", None)
    return output if isinstance(output, torch.Tensor) and output.dim() >= 1 else None


def _described(output: Any) -> str:
    if isinstance(output, torch.Tensor):
        return f"{output.dtype} {list(output.shape)}"
    if isinstance(output, Mapping):
        return f"{type(output).__name__} of {', '.join(map(str, output)) or 'nothing'}"
    if isinstance(output, tuple | list):
        return f"{type(output).__name__} of {', '.join(map(_described, output)) or 'nothing'}"
    return type(output).__name__


class ModuleStepper:
    """Feeds a module each token once if it takes and returns a cache, and else all tokens again in each step."""

    attached = "a module"
    """See `harness.results.check.SeenTensors`."""

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        """Look at the module's forward.

        Raises:
            HarnessError: ENGINE_CANNOT_SERVE: the forward cannot be called.
        """
        self.module = module
        self._forward = Forward(module, device)
        self._tokens: dict[int, list[int]] = {}
        self._caches: dict[int, Any] = {}
        with evaluating(module):
            self._forward.leave_out_what_it_refuses([0, 0])
            cache = self._forward([0], 0).cache
        self.recomputes = cache is None
        self.rewinds = hasattr(cache, "crop")
        """Whether the cache is one of transformers', which can be cut off at its end."""
        if held_states(cache):
            self.states = self._held
        for name in DECLARATIONS:
            setattr(self, name, getattr(module, name, None))

    def step(self, work: Work) -> torch.Tensor:
        """See `Stepper.step`.

        Raises:
            HarnessError: ENGINE_CANNOT_SERVE: the forward returned no logits, or the cache cannot go back.
            ValueError: the work is of several requests.
        """
        ((request, tokens, first),) = work
        known = self._tokens.setdefault(request, [])
        if num_given_up := len(known) - first:
            del known[first:]
            with engine_refusals(type(self.module).__name__, "--schedule"):
                self._caches[request].crop(-num_given_up)
        known += tokens
        start = 0 if self.recomputes else first
        with evaluating(self.module):
            answer = self._forward(known[start:], start, self._caches.get(request))
        self._caches[request] = answer.cache
        return answer.logits[-len(tokens) :]

    def _held(self, request: int) -> dict[int, dict[str, torch.Tensor]]:
        """Return the states that a request's cache holds, by layer and name."""
        states: dict[int, dict[str, torch.Tensor]] = {}
        for (layer, name), state in held_states(self._caches[request]).items():
            states.setdefault(layer, {})[name] = state[0]
        return states

    def finish(self, request: int) -> None:
        """Forget a request."""
        self._tokens.pop(request, None)
        self._caches.pop(request, None)
