"""MLX's language models (mlx-lm) as an engine; which tensor is which tap is found by what it holds."""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import torch
from mlx_lm.models.cache import (
    ArraysCache,
    BatchKVCache,
    CacheList,
    KVCache,
    LRUPromptCache,
    make_prompt_cache,
    trim_prompt_cache,
)
from mlx_lm.utils import load_model

from harness.engines.adapter import engine_refusals, refuse_unknown_options
from harness.engines.by_content import StepEngine
from harness.engines.by_content.steps import MODULE, RETURNED, See, Site, Work
from harness.engines.poison import in_range
from harness.errors import Code, HarnessError
from harness.results.settings import ModelSettings

_INPUT = "input"
"""In place of an operator, the argument of a module: sums and products between modules are seen nowhere else."""


def open_engine(folder: Path, *, dtype: str, device: str, options: Mapping[str, str]) -> StepEngine:
    """Open a checkpoint with mlx-lm.

    Raises:
        HarnessError: BAD_OPTION; ENGINE_CANNOT_SERVE: mlx-lm does not know the model, or there is no such device.
    """
    refuse_unknown_options("mlx", options, ())
    if device != "cpu":
        raise HarnessError(
            Code.ENGINE_CANNOT_SERVE, "MLX is run on the CPU here", where="--device", expected="cpu", actual=device
        )
    mx.set_default_device(mx.cpu)
    with engine_refusals("mlx-lm", folder):
        model, _config = load_model(folder)
        model.set_dtype(getattr(mx, dtype))
    return StepEngine(lambda: MLXStepper(model), name="mlx", folder=folder, dtype=dtype)


class MLXStepper:
    """A model of mlx-lm: one request a step with its prompt cache, or a padded batch as in its `BatchGenerator`."""

    rewinds = True

    def __init__(self, model: Any) -> None:
        """Take a model that is loaded."""
        self._model = model
        self._caches: dict[int, Any] = {}
        self._tokens: dict[int, list[int]] = {}
        """Of each request's cache."""
        self._prefixes = LRUPromptCache()
        """Of requests that have ended, as mlx-lm's server keeps them; filled only where prefixes are looked up."""
        self._are_kept: set[int] = set()
        self._batch: list[int] = []
        self._batch_cache: list[Any] = []
        """Of the requests of the batch; what has left it has a cache of its own again."""

    def step(self, work: Work) -> torch.Tensor:
        """See `Stepper.step`; goes back as mlx-lm's own speculation does, which does not look at what trimming returns.

        Raises:
            ValueError: a cache of the model is not made for batches.
        """
        if len(work) > 1 or work[0][0] in self._batch:
            return self._batched_step([request for request, _, _ in work], [tokens for _, tokens, _ in work])
        ((request, tokens, first),) = work
        cache = self._caches.setdefault(request, make_prompt_cache(self._model))
        computed = self._tokens.get(request, [])
        if first < len(computed):
            with engine_refusals("mlx-lm", "a cache that goes back"):
                self._refuse_states()
            trim_prompt_cache(cache, len(computed) - first)
        self._tokens[request] = computed[:first] + tokens
        return as_torch(self._model(mx.array([tokens]), cache=cache))[0]

    def begin(self, request: int, token_ids: list[int]) -> int:
        """Take the nearest cache of a request that has ended, as mlx-lm's server does; see `StepEngine`."""
        self._are_kept.add(request)
        cache, rest = self._prefixes.fetch_nearest_cache("", token_ids)
        if cache is None:
            return 0
        self._caches[request] = cache
        self._tokens[request] = token_ids[: len(token_ids) - len(rest)]
        return len(self._tokens[request])

    def _batched_step(self, requests: list[int], tokens: list[list[int]]) -> torch.Tensor:
        """Compute a batch: padded on the right while the caches are filled, which are then shifted to their end."""
        self._change_batch(requests)
        lengths = [len(token) for token in tokens]
        padding = [max(lengths) - length for length in lengths]
        for cache in self._batch_cache if any(padding) else ():
            cache.prepare(lengths=lengths, right_padding=padding)
        ids = mx.array([token + [0] * pad for token, pad in zip(tokens, padding, strict=True)])
        logits = as_torch(self._model(ids, cache=self._batch_cache))
        for cache in self._batch_cache if any(padding) else ():
            cache.finalize()
        return torch.stack([rows[length - 1] for rows, length in zip(logits, lengths, strict=True)])

    def _change_batch(self, requests: list[int]) -> None:
        """Let requests leave the batch, or put a new one together."""
        if requests == self._batch:
            return
        keep = [at for at, request in enumerate(self._batch) if request in requests]
        self._caches |= {request: self._cache_of(request) for request in self._batch if request not in requests}
        if requests and [self._batch[at] for at in keep] == requests:
            for cache in self._batch_cache:
                cache.filter(keep)
        else:
            layers = zip(*map(self._cache_of, requests), strict=True)
            self._batch_cache = [layer[0].merge(layer) for layer in layers]
        self._batch = requests

    def _cache_of(self, request: int) -> list[Any]:
        """Return a request's cache by layer: out of the batch where it is in it, an empty one where it is new."""
        if request in self._batch:
            return [cache.extract(self._batch.index(request)) for cache in self._batch_cache]
        return list(self._caches.get(request) or make_prompt_cache(self._model))

    def _refuse_states(self) -> None:
        """Refuse what mlx-lm's own speculation does: it looks at caches before they are filled.

        Raises:
            ValueError: a cache of the model never goes back.
        """
        kinds = sorted({type(item).__name__ for item in make_prompt_cache(self._model) if not item.is_trimmable()})
        if kinds:
            raise ValueError(f"a prompt cache of {', '.join(kinds)} cannot be trimmed")

    def states(self, request: int) -> dict[int, list[torch.Tensor]]:
        """Return what convolutions and recurrences of each layer keep, in mlx-lm's order and layout."""
        parts = {layer: _parts(cache) for layer, cache in enumerate(self._cache_of(request))}
        arrays = {
            layer: [array for part in state if isinstance(part, ArraysCache) for array in part.cache]
            for layer, state in parts.items()
        }
        return {
            layer: [as_torch(item)[0] for item in state if item is not None] for layer, state in arrays.items() if state
        }

    def cached(self, request: int) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
        """Return the keys and values that each layer keeps, [positions, KV heads, head size]: see `Cached`."""
        parts = ((layer, part) for layer, cache in enumerate(self._cache_of(request)) for part in _parts(cache))
        return {layer: _keys_and_values(part) for layer, part in parts if hasattr(part, "keys_and_values")}

    def fill_unused(self, value: float) -> int:
        """See `FillsUnused`: places that a cache has behind its tokens; a ring has none."""
        caches = [cache for item in self._caches.values() for cache in item if type(cache) is KVCache]
        ends = [(cache, cache.offset) for cache in caches]
        ends += [(cache, cache.size()) for cache in self._batch_cache if type(cache) is BatchKVCache]
        arrays = [(array, end) for cache, end in ends for array in (cache.keys, cache.values) if array is not None]
        for array, end in arrays:
            array[..., end:, :] = in_range(value, getattr(torch, str(array.dtype).removeprefix("mlx.core.")))
        return sum(array[..., end:, :].size for array, end in arrays)

    def finish(self, request: int) -> None:
        """Forget a request."""
        if request in self._batch:
            self._change_batch([item for item in self._batch if item != request])
        cache, tokens = self._caches.pop(request, None), self._tokens.pop(request, None)
        if request in self._are_kept:
            self._are_kept.remove(request)
            self._prefixes.insert_cache("", tokens, cache)

    def resolved_settings(self) -> ModelSettings:
        """See `SettingsShower`: what mlx-lm has read of the config."""
        args = vars(self._model.args)
        named = {"norm_eps": "rms_norm_eps", "rope_theta": "rope_theta", "head_dim": "head_dim"}
        return ModelSettings(**{name: (args[key],) for name, key in named.items() if args.get(key) is not None})

    def watching(self, see: See, only: Collection[Site] | None) -> "ModuleCalls":
        """Watch what modules are given and return."""
        return ModuleCalls(self._model, see, only)


class ModuleCalls:
    """Shows what the modules of a model are called with and return: their classes' `__call__` is replaced meanwhile."""

    def __init__(self, model: Any, see: See, only: Collection[Site] | None) -> None:
        """Watch a model; `only` are the sites to show, None for all."""
        self._names = {id(module): path for path, module in model.named_modules()}
        self._classes = {type(module) for _path, module in model.named_modules()}
        self._see, self._only = see, None if only is None else frozenset(only)
        self._calls = Counter[str]()
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        for klass in self._classes:
            if "__call__" in vars(klass):
                self._stack.callback(setattr, klass, "__call__", klass.__call__)
                klass.__call__ = self._shown(klass.__call__)
        return self

    def __exit__(self, *_error: object) -> None:
        self._stack.close()

    def returned(self, value: torch.Tensor) -> None:
        """See `Watching.returned`."""
        self._see(Site("", 0, RETURNED), value)

    def _shown(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def shown(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            path = self._names.get(id(module), type(module).__name__)
            number = self._calls[path]
            self._calls[path] += 1
            self._show(Site(path, number, _INPUT), args)
            result = call(module, *args, **kwargs)
            self._show(Site(path, number, MODULE), result)
            return result

        return shown

    def _show(self, site: Site, value: Any) -> None:
        for place, array in enumerate(_arrays(value)):
            placed = Site(site.path, site.call, site.what, place=place)
            if self._only is None or placed in self._only:
                self._see(placed, as_torch(array))


def _parts(cache: Any) -> Iterator[Any]:
    """Yield the caches of a layer: one, or several in a list."""
    if isinstance(cache, CacheList):
        for item in cache.caches:
            yield from _parts(item)
    else:
        yield cache


def _keys_and_values(cache: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what a cache keeps, in the order of positions: a sliding window's ring begins anywhere."""
    in_order: Callable[[Any], Any] | None = getattr(cache, "_temporal_order", None)
    keys, values = cache.keys_and_values() if in_order is None else (in_order(cache.keys), in_order(cache.values))
    return as_torch(keys)[0].transpose(0, 1), as_torch(values)[0].transpose(0, 1)


def as_torch(array: Any) -> torch.Tensor:
    """Return an array of MLX as a tensor of the same dtype, a copy."""
    if array.dtype == mx.bfloat16:
        return torch.from_numpy(np.array(array.astype(mx.float32))).to(torch.bfloat16)
    return torch.from_numpy(np.array(array))


def _arrays(value: Any) -> Iterator[Any]:
    if isinstance(value, mx.array):
        if mx.issubdtype(value.dtype, mx.floating):
            yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _arrays(item)
