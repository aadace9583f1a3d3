"""vLLM step by step, for profiles: its modules, watched through hooks, are the boundaries between operations."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from vllm.forward_context import get_forward_context

from harness.engines.stepping import COMMIT, PREPARE, SAMPLE, ModelShape, OperationWatcher
from harness.errors import Code, HarnessError
from harness.extensions.vllm.opening import add_request, model_runner
from harness.results.profile import StepShape

if TYPE_CHECKING:
    import torch

_SITES = {
    "input_layernorm": "input_layernorm",
    "self_attn.qkv_proj": "self_attn.q_proj",
    "self_attn.q_norm": "self_attn.q_norm",
    "self_attn.k_norm": "self_attn.k_norm",
    "self_attn.rotary_emb": "q_rope",
    "self_attn.attn": "attention",
    "self_attn.o_proj": "self_attn.o_proj",
    "post_attention_layernorm": "attn_residual",
    "mlp.gate_up_proj": "mlp.gate_proj",
    "mlp.act_fn": "mlp.act",
    "mlp.down_proj": "mlp.down_proj",
}
"""The first tap that each module of a layer computes: products are fused, and norms add the residual."""

_DENSE = ("llama", "mistral", "qwen2", "qwen3")


class VllmSession:
    """A loaded `LLMEngine`; see `Session`."""

    phases = ("prefill", "decode", "mixed")
    notes = (
        "vLLM computes q, k and v in one product, gate and up in another, and adds residuals in its norms",
        "vLLM's own operators say neither their FLOP nor what they read of the cache: GFLOP and KV are aten's alone",
    )

    def __init__(self, opened: AbstractContextManager[Any]) -> None:
        """Enter `opened`, a block that opens an engine in this process."""
        self._num_added, self._live = 0, set[int]()
        self._watcher: OperationWatcher | None = None
        with ExitStack() as stack:
            self._engine = stack.enter_context(opened)
            self._runner = model_runner(self._engine)
            self.model = _model_shape(self._engine.vllm_config.model_config)
            self._resources = stack.pop_all()

    def add(self, prompt: Sequence[int], max_new_tokens: int) -> int:
        """See `TokenSession.add`."""
        key, self._num_added = self._num_added, self._num_added + 1
        add_request(self._engine, key, prompt, max_new_tokens)
        self._live.add(key)
        return key

    def step(self) -> Mapping[int, int]:
        """See `TokenSession.step`."""
        outputs = self._engine.step()
        if self._watcher is not None:
            self._watcher.reached(COMMIT)
        self._live -= {int(output.request_id) for output in outputs if output.finished}
        return {int(output.request_id): output.outputs[0].token_ids[-1] for output in outputs}

    @contextmanager
    def watching(self, watcher: OperationWatcher) -> Iterator[None]:
        """See `Session.watching`."""
        model = self._runner.get_model()

        def begin(_model: Any, _args: Any, arguments: Mapping[str, Any]) -> None:
            watcher.begin_step(self._step_shape(arguments["positions"]))
            watcher.reached(PREPARE)

        with ExitStack() as stack:
            stack.callback(model.register_forward_pre_hook(begin, with_kwargs=True).remove)
            for module, names in _boundaries(model):
                stack.callback(module.register_forward_hook(_reaching(watcher, names)).remove)
            stack.callback(self._runner.sampler.register_forward_hook(_reaching(watcher, [SAMPLE])).remove)
            self._watcher = watcher
            stack.callback(setattr, self, "_watcher", None)
            yield

    def stop(self) -> None:
        """See `TokenSession.stop`."""
        self._engine.abort_request([str(key) for key in sorted(self._live)])
        self._live.clear()

    def close(self) -> None:
        """Give the engine's memory back."""
        self._resources.close()

    def weights(self) -> Mapping[str, torch.Tensor]:
        """See `Session.weights`."""
        return dict(self._runner.get_model().named_parameters())

    def cache_tensors(self) -> Sequence[torch.Tensor]:
        """See `Session.cache_tensors`."""
        layers = self._runner.compilation_config.static_forward_context.values()
        return [layer.kv_cache for layer in layers if getattr(layer, "kv_cache", None) is not None]

    def _step_shape(self, positions: torch.Tensor) -> StepShape:
        metadata = next(iter(get_forward_context().attn_metadata.values()))
        starts = metadata.query_start_loc.tolist()[: len(self._runner.input_batch.req_ids) + 1]
        spans = list(pairwise(starts))
        contexts = tuple(int(positions[stop - 1]) + 1 for _, stop in spans)
        lengths = tuple(stop - start for start, stop in spans)
        kinds = {
            "decode" if length == 1 and context > 1 else "prefill"
            for length, context in zip(lengths, contexts, strict=True)
        }
        phase = kinds.pop() if len(kinds) == 1 else "mixed"
        return StepShape(phase=phase, query_lens=lengths, context_lens=contexts, num_sampled=len(spans))


def _boundaries(model: Any) -> Iterator[tuple[Any, list[str]]]:
    """Yield modules, and the operation that has ended with each of their calls in a step."""
    paths = dict(model.named_modules(remove_duplicate=False))
    names: dict[int, list[str]] = {}
    modules = {}
    num_layers = sum(path.endswith(".input_layernorm") for path in paths)
    for path, module in paths.items():
        name = _operation(path, num_layers)
        if name is not None:
            names.setdefault(id(module), []).append(name)
            modules[id(module)] = module
    for key, module in modules.items():
        yield module, names[key]


def _operation(path: str, num_layers: int) -> str | None:
    outside = {
        "model.embed_tokens": "model.embed_tokens",
        "model.norm": f"model.layers.{num_layers - 1}.output",
        "logits_processor": "lm_head",
    }
    prefix, _, rest = path.partition("layers.")
    layer, _, site = rest.partition(".")
    if not rest or site not in _SITES:
        return outside.get(path)
    if site == "input_layernorm" and layer != "0":
        return f"{prefix}layers.{int(layer) - 1}.output"
    return f"{prefix}layers.{layer}.{_SITES[site]}"


def _reaching(watcher: OperationWatcher, names: Sequence[str]) -> Callable[..., None]:
    """Return a hook that says the names one after the other: one module may serve all layers."""
    calls = 0

    def after(*_call: Any) -> None:
        nonlocal calls
        watcher.reached(names[calls % len(names)])
        calls += 1

    return after


def _model_shape(config: Any) -> ModelShape:
    text = config.hf_text_config
    if text.model_type not in _DENSE:
        raise HarnessError(
            Code.ENGINE_CANNOT_SERVE,
            "profiles know the operations of the dense decoders of Llama, Qwen and Mistral; this is another",
            where="--model",
            expected=", ".join(_DENSE),
            actual=text.model_type,
            hint="harness check takes it",
        )
    windows = tuple(
        text.sliding_window if kind == "sliding_attention" else None
        for kind in getattr(text, "layer_types", None) or ["full_attention"] * text.num_hidden_layers
    )
    return ModelShape(
        num_layers=text.num_hidden_layers,
        hidden_size=text.hidden_size,
        intermediate_size=text.intermediate_size,
        vocab_size=text.vocab_size,
        num_heads=text.num_attention_heads,
        num_kv_heads=text.num_key_value_heads,
        head_dim=config.get_head_size(),
        has_qk_norm=text.model_type == "qwen3",
        itemsize=config.dtype.itemsize,
        windows=windows,
        qkv_bias=text.model_type == "qwen2" or bool(getattr(text, "attention_bias", False)),
        mlp_bias=bool(getattr(text, "mlp_bias", False)),
    )
