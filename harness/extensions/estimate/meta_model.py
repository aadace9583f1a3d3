"""HF's model of a config without its weights: what it would keep and compute, measured on tensors that hold nothing."""

from collections.abc import Iterator
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from harness.engines.hf import llama_like_shape
from harness.engines.stepping import ModelShape
from harness.errors import Code, HarnessError
from harness.formats.checkpoint.locate import embedded_folder
from harness.oracle.caches import caches_of

_DTYPE = torch.bfloat16
_CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts", "num_selected_experts")
_WINDOWS = ("sliding_window", "attention_chunk_size", "window_size", "local_window")
_DEPTH = 5


def read_config(model: str) -> PreTrainedConfig:
    """Return the text config of a folder, a JSON file, an embedded checkpoint, or a model of the hub.

    Raises:
        HarnessError: MODEL_NOT_SIZED.
    """
    folder = embedded_folder(model)
    place = model if folder is None else str(folder)
    try:
        return AutoConfig.from_pretrained(place, trust_remote_code=False).get_text_config()
    except Exception as error:  # transformers raises whatever a hostile config makes it raise
        raise _not_sized("its config cannot be read", model, error) from error


class MetaModel:
    """A model on torch's meta device: shapes and dtypes alone. Experts compute nothing; they are counted by weights."""

    def __init__(self, config: PreTrainedConfig, name: str) -> None:
        """Build the model of a config.

        Raises:
            HarnessError: MODEL_NOT_SIZED.
        """
        self._config, self._name = config, name
        try:
            with torch.device("meta"):
                self._model = AutoModelForCausalLM.from_config(config, dtype=_DTYPE).eval()
        except Exception as error:
            raise _not_sized("transformers builds no model of its config", name, error) from error
        self.experts = [module for path, module in self._model.named_modules() if path.split(".")[-1] == "experts"]
        for module in self.experts:
            module.forward = _no_experts
        if self.experts and not self.num_chosen:
            what = f"it has experts, and its config does not say how many are chosen ({' or '.join(_CHOSEN)})"
            raise _not_sized(what, name, None)

    @property
    def num_experts(self) -> int:
        """Of one layer; 0 for a dense model."""
        return next((_num_experts(module) for module in self.experts), 0)

    @property
    def num_chosen(self) -> int:
        """Experts that a token goes through, besides those that are shared; 0 for a dense model."""
        values = (getattr(self._config, name, None) for name in _CHOSEN)
        return next((count for count in values if isinstance(count, int)), 0) if self.experts else 0

    @property
    def head_flops(self) -> int:
        """Of one row of logits."""
        head = self._model.get_output_embeddings()
        return 0 if head is None else 2 * head.weight.numel()

    def shape(self, **sizes: Any) -> ModelShape | None:
        """Return what the formulas of operations need, with other sizes; None if they do not know such a decoder."""
        config = self._config
        try:
            head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
            return llama_like_shape(self._model, config, vocab_size=config.vocab_size, head_dim=head_dim, **sizes)
        except AttributeError:
            return None

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters with their names, tied ones once."""
        yield from self._model.named_parameters()

    @property
    def model_type(self) -> str:
        """As transformers calls it."""
        return str(self._config.model_type)

    @property
    def is_tied(self) -> bool:
        """Whether the head has the embedding's weights."""
        head = self._model.get_output_embeddings()
        return head is not None and head.weight is self.embedding()

    def embedding(self) -> nn.Parameter:
        """Return the weight of the token embedding."""
        weight: nn.Parameter = self._model.get_input_embeddings().weight
        return weight

    def cache_bytes(self, context: int, itemsize: int) -> int:
        """Return the bytes that HF keeps of a request of so many tokens; what it keeps in float32 stays so."""
        return sum(self.cache_sizes(context, itemsize))

    def cache_sizes(self, context: int, itemsize: int) -> list[int]:
        """Return the bytes of each tensor of the cache, in an order that no context changes; its counters are none."""
        tensors = (tensor for tensor in _tensors(self._cache(context)) if tensor.dim())
        return [tensor.numel() * (itemsize if tensor.dtype is _DTYPE else tensor.element_size()) for tensor in tensors]

    def decode_flops(self, context: int) -> int:
        """Return the FLOPs of a token that sees itself and `context - 1` others.

        What HF computes again of all cached tokens (keys from the latents of MLA) counts for the one token.
        """
        total, projections = self._counted_step(context)
        if len(projections) != len(self._alone):
            raise _not_sized("its steps have other projections at other contexts", self._name, None)
        repeated = sum(now - alone for now, alone in zip(projections, self._alone, strict=True))
        return total - repeated + self.experts_flops

    @cached_property
    def _alone(self) -> list[int]:
        """FLOPs of each projection of a token that sees itself alone."""
        return self._counted_step(1)[1]

    def _counted_step(self, context: int) -> tuple[int, list[int]]:
        """Return the FLOPs of a token's step as HF computes it, and of these those of each projection."""
        arguments = self._cache(context - 1) if context > 1 else {}
        projections: list[int] = []

        def count(module: nn.Linear, args: tuple[torch.Tensor, ...]) -> None:
            projections.append(2 * module.weight.numel() * (args[0].numel() // module.in_features))

        linears = [module for module in self._model.modules() if isinstance(module, nn.Linear)]
        hooks = [module.register_forward_pre_hook(count) for module in linears]
        with FlopCounterMode(display=False) as counter:
            self._run(1, arguments)
        for hook in hooks:
            hook.remove()
        return int(counter.get_total_flops()), projections

    @property
    def experts_flops(self) -> int:
        """Of the experts of one token, in all layers."""
        total = sum(parameter.numel() for module in self.experts for parameter in module.parameters())
        return int(2 * total * self.num_chosen // max(1, self.num_experts))

    def prefill_flops(self, num_tokens: int) -> int:
        """Return the FLOPs of a prompt: of each token what a decode step takes, and the head once.

        Attention grows evenly with the context up to each window, and then stays: decode steps at these ends tell all.
        """
        windows = {getattr(self._config, name, None) for name in _WINDOWS}
        ends = sorted(
            {1, num_tokens, *(window for window in windows if isinstance(window, int) and 1 < window < num_tokens)}
        )
        flops = {end: self.decode_flops(end) for end in ends}
        total = flops[1]
        for low, high in pairwise(ends):  # an arithmetic series from low + 1 to high
            step = (flops[high] - flops[low]) / (high - low)
            total += round((high - low) * (flops[low] + step + flops[high]) / 2)
        return total - (num_tokens - 1) * self.head_flops

    def _cache(self, num_tokens: int) -> dict[str, Any]:
        output = self._run(num_tokens, {})
        caches = caches_of(output)
        if not caches:
            raise _not_sized("its forward keeps no cache", self._name, None)
        return caches

    def _run(self, num_tokens: int, cache: dict[str, Any]) -> Any:
        ids = torch.zeros(1, num_tokens, dtype=torch.long, device="meta")
        try:
            with torch.no_grad():
                return self._model(input_ids=ids, use_cache=True, **cache)
        except Exception as error:
            raise _not_sized("its forward does not run without weights", self._name, error) from error


def _no_experts(hidden: torch.Tensor, *_args: object, **_kwargs: object) -> torch.Tensor:
    return torch.zeros_like(hidden)


def _num_experts(module: nn.Module) -> int:
    """Return the number of experts of a module that holds them as a list, or as tensors [experts, ...]."""
    if isinstance(module, nn.ModuleList):
        return len(module)
    return max((parameter.shape[0] for parameter in module.parameters() if parameter.dim() == 3), default=0)


def _tensors(value: Any, seen: set[int] | None = None, depth: int = 0) -> Iterator[torch.Tensor]:
    """Yield the tensors in a cache of transformers, each once."""
    seen = set() if seen is None else seen
    if isinstance(value, torch.Tensor):
        if id(value) not in seen:
            seen.add(id(value))
            yield value
        return
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    if type(value).__module__.startswith("transformers") and depth < _DEPTH:
        parts = vars(value).values()
    for part in parts:
        yield from _tensors(part, seen, depth + 1)


def _not_sized(what: str, model: str, error: Exception | None) -> HarnessError:
    return HarnessError(
        Code.MODEL_NOT_SIZED,
        f"the model's sizes cannot be told: {what}",
        where=model,
        actual=None if error is None else f"{type(error).__name__}: {error}",
        hint="name a folder with a config.json of a text model that transformers knows",
    )
