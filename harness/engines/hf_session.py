"""A transformers model step by step, through its own KV cache, watched through hooks on its modules.

Requests that are added together are one batch of equally long prompts: HF pads what is not, and padding is not what is
to be measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from harness.engines.stepping import PREPARE, ROTARY, SAMPLE, ModelShape, OperationWatcher
from harness.errors import Code, HarnessError
from harness.formats.taps import EMBEDDING, layer_prefix
from harness.oracle.caches import cache_argument
from harness.oracle.model import HFModel
from harness.results.profile import StepShape

_READERS = {"attention": "self_attn.o_proj", "attn_residual": "post_attention_layernorm", "mlp.act": "mlp.down_proj"}
"""Taps that no module produces, and the module that reads each."""


class HFSession:
    """A loaded model and the cache of the requests at hand; see `Session`."""

    phases = ("prefill", "decode")

    def __init__(self, hf: HFModel, attention: str | None) -> None:
        self._hf = hf
        if attention is not None:
            hf.model.set_attn_implementation(attention)
        self._graph = hf.graph  # traced now: later its forwards would be taken for steps
        self._prompts: list[list[int]] = []
        self._num_added = 0
        self._num_cached = 0
        self._next_ids: torch.Tensor | None = None
        self._cache: Any = None
        self._cache_argument = cache_argument(hf.model.forward)
        self._watcher: OperationWatcher | None = None
        self.model = _model_shape(hf)

    def add(self, prompt: Sequence[int], max_new_tokens: int) -> int:
        """See `TokenSession.add`; raises HarnessError (ENGINE_CANNOT_SERVE) for a prompt that needs padding."""
        if self._num_cached or any(len(prompt) != len(other) for other in self._prompts):
            raise HarnessError(
                Code.ENGINE_CANNOT_SERVE,
                "one batch of HF starts together and has equally long prompts",
                expected=len(self._prompts[0]) if self._prompts else "no batch on its way",
                actual=len(prompt),
            )
        self._prompts.append(list(prompt))
        self._num_added += 1
        return self._num_added - 1

    @torch.no_grad()
    def step(self) -> Mapping[int, int]:
        """See `TokenSession.step`."""
        ids = self._input_ids()
        batch_size, num_tokens = ids.shape
        self._num_cached += num_tokens
        if self._watcher is not None:
            self._watcher.begin_step(self._shape(batch_size, num_tokens))
        cache = {} if self._cache_argument is None else {self._cache_argument: self._cache}
        output = self._hf.model(input_ids=ids, use_cache=True, logits_to_keep=1, **cache)
        self._next_ids = output.logits[:, -1].argmax(dim=-1, keepdim=True)
        if self._watcher is not None:
            self._watcher.reached(SAMPLE)
        first = self._num_added - batch_size
        return {first + place: int(token) for place, token in enumerate(self._next_ids[:, 0].tolist())}

    @contextmanager
    def watching(self, watcher: OperationWatcher) -> Iterator[None]:
        """See `Session.watching`."""
        with ExitStack() as stack:
            stack.callback(setattr, self, "_watcher", self._watcher)
            self._watcher = watcher
            self._hook(stack, watcher.reached)
            yield

    def stop(self) -> None:
        """See `TokenSession.stop`."""
        self._prompts, self._num_cached = [], 0
        self._cache = self._next_ids = None

    def weights(self) -> Mapping[str, torch.Tensor]:
        """See `Session.weights`."""
        return dict(self._hf.model.named_parameters(remove_duplicate=False))

    def cache_tensors(self) -> Sequence[torch.Tensor]:
        """See `Session.cache_tensors`."""
        layers = [] if self._cache is None else self._cache.layers
        return [states for layer in layers if layer.is_initialized for states in (layer.keys, layer.values)]

    def _input_ids(self) -> torch.Tensor:
        if self._next_ids is not None:
            return self._next_ids
        self._cache = _new_cache(self._hf.config, self._update_ends)
        return torch.tensor(self._prompts, device=self._hf.device)

    def _update_ends(self, layer: int, site: str) -> None:
        if self._watcher is not None:
            self._watcher.reached(f"{layer_prefix(layer)}{site}")

    def _shape(self, batch_size: int, num_tokens: int) -> StepShape:
        return StepShape(
            phase="prefill" if self._num_cached == num_tokens else "decode",
            query_lens=(num_tokens,) * batch_size,
            context_lens=(self._num_cached,) * batch_size,
            num_sampled=batch_size,
        )

    def _hook(self, stack: ExitStack, reached: Callable[[str], None]) -> None:
        hf = self._hf
        model = hf.model.model
        stack.callback(_before(model.embed_tokens, PREPARE, reached).remove)
        stack.callback(_before(model.rotary_emb, PREPARE, reached).remove)
        stack.callback(_after(model.rotary_emb, ROTARY, reached).remove)
        stack.callback(_after(model.embed_tokens, EMBEDDING, reached).remove)
        for operation in self._graph:
            reader, prefix = _READERS.get(operation.site), operation.tap.removesuffix(operation.site)
            if operation.site == "mlp.act":  # silu comes before up_proj, the product with it after
                stack.callback(_after(hf.module(f"{prefix}mlp.act_fn"), operation.tap, reached).remove)
            if reader is not None:
                stack.callback(_before(hf.module(prefix + reader), operation.tap, reached).remove)
            elif operation.site == "output":
                layer = hf.module(operation.tap.removesuffix(".output"))
                stack.callback(_after(layer, operation.tap, reached).remove)
            elif operation.inputs and _is_module(hf, operation.tap):
                stack.callback(_after(hf.module(operation.tap), operation.tap, reached).remove)


def _is_module(hf: HFModel, tap: str) -> bool:
    try:
        hf.module(tap)
    except AttributeError:
        return False
    return True


def _before(module: nn.Module, name: str, reached: Callable[[str], None]) -> RemovableHandle:
    return module.register_forward_pre_hook(lambda _module, _args: reached(name))


def _after(module: nn.Module, name: str, reached: Callable[[str], None]) -> RemovableHandle:
    return module.register_forward_hook(lambda _module, _args, _output: reached(name))


def _new_cache(config: Any, ends: Callable[[int, str], None]) -> Any:
    """Make HF's own growing cache, which says where rotary ends and where the update of the cache does."""
    from transformers import DynamicCache  # seconds to import

    class WatchedCache(DynamicCache):  # type: ignore[misc]  # transformers is untyped here
        def update(self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
            ends(layer_idx, "q_rope")
            updated = super().update(keys, values, layer_idx, *args, **kwargs)
            ends(layer_idx, "k_cache")
            return updated

    return WatchedCache(config=config)


def _model_shape(hf: HFModel) -> ModelShape:
    try:
        return _llama_like_shape(hf)
    except AttributeError as error:
        raise HarnessError(
            Code.ENGINE_CANNOT_SERVE,
            f"profiles know the operations of the dense decoders of Llama, Qwen and Mistral; this is another: {error}",
            where=hf.folder,
            actual=type(hf.model).__name__,
            hint="harness check takes it; harness trace summary reads a trace of it that torch.profiler made",
        ) from error


def _llama_like_shape(hf: HFModel) -> ModelShape:
    config, layers = hf.config, hf.model.model.layers
    first: Any = layers[0]
    return ModelShape(
        num_layers=len(layers),
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        vocab_size=hf.vocab_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=hf.head_dim,
        has_qk_norm=hasattr(first.self_attn, "q_norm"),
        itemsize=hf.dtype.itemsize,
        windows=tuple(_window(config, layer) for layer in layers),
        qkv_bias=first.self_attn.q_proj.bias is not None,
        o_bias=first.self_attn.o_proj.bias is not None,
        mlp_bias=first.mlp.gate_proj.bias is not None,
    )


def _window(config: Any, layer: Any) -> int | None:
    """Return the latest tokens that a layer sees: its attention says it, or the config for all (Mistral)."""
    attention = layer.self_attn
    if hasattr(attention, "sliding_window"):
        return attention.sliding_window  # type: ignore[no-any-return]  # transformers is untyped here
    return None if getattr(config, "layer_types", None) else getattr(config, "sliding_window", None)
