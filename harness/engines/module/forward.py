"""The call of a user's module: token ids and positions in, logits and perhaps a cache out."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from harness.errors import Code, HarnessError

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
        unknown = [name for name, required in is_required.items() if required and name not in self._given]
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
        given = torch.tensor([list(ids)], device=self._device)
        options = {name: fill(positions, self._device) for name, fill in self._fills.items()}
        if self._cache is not None:
            options[self._cache] = cache
        output = self._module(**{self._ids: given}, **options) if self._ids else self._module(given, **options)
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

        Positions ask some modules for a cache of their own, which nobody has made.
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
    def _given(self) -> set[str]:
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
        found = output.get(self._cache) if isinstance(output, Mapping) else getattr(output, self._cache, None)
        return None if isinstance(output, torch.Tensor) else found

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
