"""HF as an engine under test: prefill and decode with HF's KV cache, eager or sdpa.

HF as an engine shows the errors of a sound engine, and compares HF's decode with HF's forward. transformers loads a
quantised checkpoint with the package that quantised it. `HFSession` runs HF step by step for profiles. Requests that
are added together form one batch of equally long prompts: HF would pad others, and a profile must not measure padding.
"""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from harness.base.progress import quiet_transformers
from harness.engines.adapter import Capabilities, Engine, Workload, refuse_unknown_options
from harness.engines.hf_batch import HFBatch, ShownTap
from harness.engines.module_settings import settings_of_modules
from harness.engines.stepping import PREPARE, ROTARY, SAMPLE, ModelShape, OperationWatcher
from harness.errors import Code, HarnessError
from harness.formats.checkpoint import Checkpoint
from harness.formats.checkpoint.quantised import read_quantised_source, served_folder
from harness.formats.recording import RecordingWriter, RequestInfo
from harness.formats.taps import EMBEDDING, Graph, layer_prefix
from harness.oracle.caches import cache_argument
from harness.oracle.decode import HFDecoder, Snapshot
from harness.oracle.images import decoder_inputs
from harness.oracle.lora import add_adapter
from harness.oracle.model import HFModel, add_mtp_layers, load_model
from harness.oracle.untraced import frequencies_follow_length
from harness.results.profile import StepShape
from harness.results.settings import ModelSettings

_ATTENTIONS = ("sdpa", "eager")
_WEIGHTS = ("checkpoint", "dequantised")
_SCHEDULES = ("plain", "chunked", "batched", "prefix-hit", "forked", "preempted", "rewound", "speculative")
_WITH_MTP = ("plain", "chunked", "prefix-hit", "forked")
"""Schedules with MTP layers: there HF does not mask padding, and would read a draft as the next token."""


def open_engine(folder: Path, *, dtype: str, device: str, options: Mapping[str, str]) -> Engine:
    """Open HF on a checkpoint.

    The option `attention` is `sdpa` or `eager`, by default `sdpa` where a family has it. Of a quantised checkpoint
    `weights` is `checkpoint`, as transformers loads it, or `dequantised`, by the harness's own reader.
    """
    refuse_unknown_options("hf", options, ("attention", "lora", "weights"))
    for name, values in (("attention", _ATTENTIONS), ("weights", _WEIGHTS)):
        if options.get(name) not in (None, *values):
            raise HarnessError(
                Code.BAD_OPTION,
                f"unknown {name} {options[name]!r}",
                where=f"--engine-option {name}",
                expected=" or ".join(values),
                actual=options[name],
            )
    if read_quantised_source(folder) is None or options.get("weights") == "dequantised":
        hf = load_model(folder, dtype=getattr(torch, dtype), device=device, stays=True)
    else:
        hf = served_model(folder, getattr(torch, dtype), device)
    if "lora" in options:
        add_adapter(hf, Path(options["lora"]))
    return HFEngine(hf, options.get("attention"))


_FOLLOWS_LENGTH = (
    "rotary frequencies follow the length: HF's decode takes that so far, and the truth that of the whole request, so "
    "beyond the original context HF's own rows differ (docs/models.md, known limits)"
)


class HFEngine:
    """Adapter of a transformers model."""

    name = "hf"

    def __init__(self, hf: HFModel, attention: str | None) -> None:
        self._hf, self._attention = hf, attention
        notes = (_FOLLOWS_LENGTH,) if frequencies_follow_length(hf.config) else ()
        self.capabilities = Capabilities(
            schedules=_SCHEDULES, keeps_states=True, takes_images=True, not_served=None, notes=notes
        )

    @cached_property
    def sources(self) -> Mapping[str, ShownTap]:
        """The taps of the model, by HF's name of the value; the logits are the output of the model."""
        graph = self._hf.graph
        return {
            "logits" if op.tap == graph.logits else source: ShownTap(op, op.token_dim)
            for source, op in graph.by_source.items()
        }

    def match_taps(self, graph: Graph) -> None:
        """Take the graph that the oracle traced of the same checkpoint; see `TapMatcher.match_taps`.

        The graph of an old golden does not have HF's names; the engine then traces another one.
        """
        if graph.has_mtp and self._hf.mtp is None:
            add_mtp_layers(self._hf)
            reason = "layers that predict further tokens run in a hook"
            self.capabilities = replace(self.capabilities, schedules=_WITH_MTP, not_served=reason)
        if graph.by_source:
            self._hf.graph = graph

    def resolved_settings(self) -> ModelSettings:
        """See `SettingsShower`: of the modules as they are, some of which may not be HF's."""
        return settings_of_modules(dict(self._hf.model.named_modules()))

    @torch.no_grad()
    def run(self, workload: Workload, writer: RecordingWriter) -> None:
        """Run the workload through HF's own cache; see `Engine.run`."""
        is_padded = len({request.prompt_length for request in workload.requests}) > 1
        together = workload.schedule.is_batched and (not is_padded or self._masks_padding)
        schedule, forks = workload.schedule, dict[int, RequestInfo]()
        alone = workload.requests if schedule.is_batched else [one for (one,) in workload.batches]
        if schedule.trigger == "forked":
            forks = {one.id: copy for one, copy in zip(workload.requests, workload.copies, strict=True)}
        groups = [list(workload.requests)] if together else [[request] for request in alone]
        known: dict[tuple[object, ...], Snapshot] = {}
        images = {item.id: decoder_inputs(self._hf, item) for item in workload.all_requests if item.inputs is not None}
        dtypes: dict[str, torch.dtype] = {}
        for group in groups:
            batch = HFBatch(self._hf, self._attention, self.sources, group, writer, workload, dtypes, images)
            if workload.schedule.has_drafts:
                batch.run_with_drafts(workload)
            elif forks:
                batch.run_with_forks(forks)
            elif schedule.is_repeated:
                batch.run_on_prefix(known)
            elif schedule.trigger == "preempted":
                batch.run_preempted()
            else:
                batch.run(schedule.chunk_size)
            unread = {op.site for op in self._hf.graph if op.is_kept and op.tap not in batch.read_back}
            self.capabilities = replace(
                self.capabilities, unsupported_taps=tuple(sorted({*self.capabilities.unsupported_taps, *unread}))
            )

    @cached_property
    def _masks_padding(self) -> bool:
        """Whether HF masks padding. Families such as RWKV ignore the mask, so their requests run one by one."""
        if self._hf.mtp is not None:
            return False
        logits = []
        for mask in ([0, 1], [1, 1]):
            with HFDecoder(self._hf) as decoder:
                logits.append(decoder.feed([[1, 2]], attention_mask=torch.tensor([mask], device=self._hf.device)))
        return not torch.equal(*logits)

    def open_session(self, *, max_num_tokens: int, max_num_seqs: int) -> HFSession:
        """See `Steppable.open_session`; HF takes steps of any size."""
        return HFSession(self._hf, self._attention)


_READERS = {"attention": "self_attn.o_proj", "attn_residual": "post_attention_layernorm", "mlp.act": "mlp.down_proj"}
"""Taps that are not the output of a module, each with the module that reads it."""


class HFSession:
    """A loaded model and the cache of the current requests; see `Session`."""

    phases = ("prefill", "decode")

    def __init__(self, hf: HFModel, attention: str | None) -> None:
        self._hf = hf
        if attention is not None:
            hf.model.set_attn_implementation(attention)
        self._graph = hf.graph  # traced now: later, its forwards would count as steps
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
        if self._num_cached or any(len(prompt) != len(added) for added in self._prompts):
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
    """Return HF's dynamic cache; it reports the end of rotary and of the cache update to `ends`."""
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
        sizes = {"vocab_size": hf.vocab_size, "head_dim": hf.head_dim, "itemsize": hf.dtype.itemsize}
        return llama_like_shape(hf.model, hf.config, **sizes)
    except AttributeError as error:
        raise HarnessError(
            Code.ENGINE_CANNOT_SERVE,
            f"profiles know the operations of the dense decoders of Llama, Qwen and Mistral; this is another: {error}",
            where=hf.folder,
            actual=type(hf.model).__name__,
            hint="harness check takes it; harness trace summary reads a trace of it that torch.profiler made",
        ) from error


def llama_like_shape(model: Any, config: Any, **sizes: Any) -> ModelShape:
    """Return the shape of HF's model of a dense decoder like Llama; AttributeError for another.

    Args:
        model: the model; its weights are not read.
        config: of the text model.
        sizes: fields of the shape that the model does not say: `vocab_size`, `head_dim`, `itemsize`, ...
    """
    layers = model.model.layers
    first: Any = layers[0]
    return ModelShape(
        num_layers=len(layers),
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        has_qk_norm=hasattr(first.self_attn, "q_norm"),
        windows=tuple(_window(config, layer) for layer in layers),
        qkv_bias=first.self_attn.q_proj.bias is not None,
        o_bias=first.self_attn.o_proj.bias is not None,
        mlp_bias=first.mlp.gate_proj.bias is not None,
        has_norms_behind=hasattr(first, "pre_feedforward_layernorm"),
        **sizes,
    )


def _window(config: Any, layer: Any) -> int | None:
    """Return the latest tokens that a layer sees: its attention says it, or the config for all (Mistral)."""
    attention = layer.self_attn
    if hasattr(attention, "sliding_window"):
        return attention.sliding_window  # type: ignore[no-any-return]  # transformers is untyped here
    return None if getattr(config, "layer_types", None) else getattr(config, "sliding_window", None)


def load_quantised(folder: Path, *, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    """Return transformers' model of a checkpoint in a dtype, quantised as the options or the checkpoint say."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, local_files_only=True, trust_remote_code=False, **options
    )
    return model.eval().requires_grad_(False)


def served_model(folder: Path, dtype: torch.dtype, device: str) -> HFModel:
    """Load what a folder was dequantised from as transformers does: with its packed weights.

    Args:
        folder: as `resolve` returned it for a quantised checkpoint.
        dtype: of what is not quantised.
        device: where it runs.

    Raises:
        HarnessError: QUANTISER_REFUSED.
    """
    where = served_folder(folder)
    with quantising(str(where), "install the package that it names, or --engine-option weights=dequantised"):
        model = load_quantised(where, dtype=dtype).to(device)
    return HFModel(model=model, checkpoint=Checkpoint(folder), dtype=dtype, device=torch.device(device))


@contextmanager
def quantising(
    where: str, hint: str = "leave the type out; docs/quant.md names the versions that were tried"
) -> Iterator[None]:
    """Silence the quantisers, and turn what they raise into an error.

    Raises:
        HarnessError: QUANTISER_REFUSED.
    """
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)  # torchao says at import which of its CUDA libraries are not there
    try:
        with quiet_transformers(), warnings.catch_warnings(), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    except HarnessError:
        raise
    except Exception as error:  # of torchao, compressed-tensors or transformers: assertions, KeyError, RuntimeError
        message = " ".join(str(error).split())[:300]
        raise HarnessError(
            Code.QUANTISER_REFUSED,
            f"the model cannot be quantised or run in this type: {type(error).__name__}: {message}",
            where=where,
            hint=hint,
        ) from error
    finally:
        logging.disable(before)
