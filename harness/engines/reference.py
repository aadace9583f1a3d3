"""The reference engine under test: the one place where the harness imports it."""

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import torch

from harness.base.numerics import Numerics
from harness.engines.adapter import LIMITS, Capabilities, Control, Engine, Timeline, Workload
from harness.engines.poison import Poison
from harness.engines.reference_drafts import ForcedDrafts
from harness.engines.reference_errors import reference_errors
from harness.engines.reference_memory import ReferenceMemory
from harness.engines.reference_options import parse_reference_options
from harness.engines.reference_session import ReferenceSession
from harness.errors import Code, HarnessError
from harness.formats.checkpoint.converted import cache_scales, served_folder
from harness.formats.recording import RecordingWriter, RequestInfo
from harness.formats.taps import LOGITS
from harness.results.settings import ModelSettings, distinct
from reference_engine import EngineConfig, LLMEngine, SamplingParams, StepInfo, TokenOutput
from reference_engine.checkpoint.experts import ExpertsShape
from reference_engine.checkpoint.load import read_cache_scales
from reference_engine.checkpoint.model_config import ModelConfig
from reference_engine.errors import EngineError
from reference_engine.parallel.worker import parallel_engine
from reference_engine.rotary import RotaryEmbedding

_WITHOUT_CACHE = ("plain", "chunked", "batched", "mixed", "tensor-parallel")
_WITH_CACHE = (*_WITHOUT_CACHE, "forked", "rewound", "speculative")
_SCHEDULES = {"contiguous": _WITH_CACHE, "recompute": _WITHOUT_CACHE}
"""Schedules that a backend without blocks, or without a cache, can follow."""
_ALL_SCHEDULES = (*_WITH_CACHE, "prefix-hit", "preempted")
_LIMITS_WITHOUT_BLOCKS = ("max_num_batched_tokens", "max_num_seqs")
_EXPANDED = ("self_attn.kv_b_proj", "self_attn.key", "self_attn.value")
"""Taps of latent attention that are never there: the latent is the key and the value."""
_SMALL_BLOCK = 4
"""Tokens of a block where requests are to run out of blocks: the smaller, the sooner."""


def open_engine(folder: Path, *, dtype: str, device: str, options: Mapping[str, str]) -> Engine:
    """Open the reference engine.

    Options are the fields of its `EngineConfig`, `lora`, an adapter's folder, and of a quantised checkpoint `weights`:
    `dequantised`, by the harness's own reader, or `checkpoint`, for the engine's own products with quantised weights.
    """
    config = {name: value for name, value in options.items() if name not in ("lora", "weights")}
    adapters = {"lora": options["lora"]} if "lora" in options else {}
    weights = options.get("weights", "dequantised")
    if weights not in ("dequantised", "checkpoint"):
        what, expected = f"unknown weights {weights!r}", "dequantised or checkpoint"
        raise HarnessError(Code.BAD_OPTION, what, where="--engine-option weights", expected=expected, actual=weights)
    if weights == "checkpoint":
        folder = served_folder(folder)
    own = parse_reference_options(config)
    return ReferenceEngine(folder=folder, dtype=dtype, device=device, options=own, adapters=adapters)


class ReferenceEngine:
    """Adapter of `reference_engine.LLMEngine`."""

    name = "reference"

    def __init__(
        self,
        *,
        folder: Path,
        dtype: str,
        device: str,
        options: Mapping[str, str | int],
        adapters: Mapping[str, str] | None = None,
    ) -> None:
        self._adapters = adapters or {}
        self._folder, self._options = folder, dict[str, Any]({**options, "dtype": dtype, "device": device})
        backend = str(options.get("attention_backend", "paged"))
        schedules = _SCHEDULES.get(backend, _ALL_SCHEDULES)
        if self._adapters:  # ranks have none
            schedules = tuple(name for name in schedules if name != "tensor-parallel")
        limits = LIMITS if backend not in _SCHEDULES else _LIMITS_WITHOUT_BLOCKS
        free = tuple(name for name in limits if name not in self._options)  # no option has decided these
        self._declare_cache(str(options.get("kv_cache_dtype", "auto")))
        follows_length = keeps_states = self._keeps_latents = False
        with suppress(EngineError):  # which a run raises
            config = ModelConfig.from_folder(folder)
            follows_length, keeps_states = config.rope.rope_len(1) is not None, bool(config.delta_nets)
            self._keeps_latents = config.latent is not None
        if keeps_states or self._keeps_latents:
            schedules = tuple(name for name in schedules if name != "tensor-parallel")
        self.capabilities = Capabilities(
            schedules=schedules,
            keeps_cache=backend != "recompute",
            keeps_states=keeps_states,
            unsupported_taps=_EXPANDED if self._keeps_latents else (),
            numerics=self._numerics(rotates_by_request=follows_length),
            control=Control(limits=free, aborts=True, forks=backend != "recompute"),
        )

    def _declare_cache(self, dtype: str) -> None:
        """Give the engine the scales that the checkpoint has for a quantised cache, which its loader may not see."""
        self._cache, self._cache_scales = (None if dtype == "auto" else dtype), dict[str, tuple[float, ...]]()
        if self._cache is None:
            return
        with reference_errors(self._folder):
            layers = ModelConfig.from_folder(self._folder).attention_layers
            pairs = read_cache_scales(self._folder, layers)
        taps = [tuple(f"model.layers.{layer}.{part}_cache" for part in "kv") for layer in layers]
        read = cache_scales(self._folder) or {
            tap: (scale,) for pair, own in zip(taps, pairs, strict=False) for tap, scale in zip(pair, own, strict=True)
        }
        if read and not all(len(read.get(tap, ())) == 1 for pair in taps for tap in pair):
            what = "the reference engine has one scale for K and one for V of each layer"
            hint = "the checkpoint has others, or lacks some"
            raise HarnessError(Code.ENGINE_CANNOT_SERVE, what, where=str(self._folder), hint=hint)
        if read:
            self._cache_scales = read
            self._options["kv_cache_scales"] = tuple((read[k][0], read[v][0]) for k, v in taps)

    def _numerics(self, *, rotates_by_request: bool) -> Numerics | None:
        """Declare the cache; scales that are all 1 leave plain numbers of its dtype."""
        if self._cache is None and not rotates_by_request:
            return None
        scales = {} if set(self._cache_scales.values()) <= {(1.0,)} else self._cache_scales
        return Numerics(rotates_by_request=rotates_by_request, cache=self._cache, cache_scales=scales)

    def run(self, workload: Workload, writer: RecordingWriter) -> None:
        """Run the workload on a fresh engine; see `Engine.run`."""
        with reference_errors(self._folder), self._opened(workload) as engine:
            is_other = engine.runner.acceleration.changes_when_observed
            engine.runner.shows_operations = workload.taps == "all" or not is_other
            memory = ReferenceMemory(engine) if workload.poison is not None else None
            _run(engine, workload, _Recorder(writer, ForcedDrafts(workload), workload.poison, memory))

    def resolved_settings(self) -> ModelSettings:
        """See `SettingsShower`: what the engine reads of config.json, and its rotary embeddings' frequencies."""
        with reference_errors(self._folder):
            return _settings(ModelConfig.from_folder(self._folder))

    def open_session(self, *, max_num_tokens: int, max_num_seqs: int) -> ReferenceSession:
        """See `Steppable.open_session`; explicit options win."""
        unknown = "recurrent layers" if self.capabilities.keeps_states else "latent attention"
        if self.capabilities.keeps_states or self._keeps_latents:
            what = f"the cost of {unknown} is not known here"
            hint = "profile a model of another family; harness estimate sizes this one"
            raise HarnessError(Code.ENGINE_CANNOT_SERVE, what, where=str(self._folder), hint=hint)
        limits = {"max_num_batched_tokens": max_num_tokens, "max_num_seqs": max_num_seqs}
        with reference_errors(self._folder):
            config = EngineConfig(**{**limits, **self._options})
            engine = LLMEngine(self._folder, config, adapters=self._adapters)
        return ReferenceSession(engine, self._folder)

    def _opened(self, workload: Workload) -> AbstractContextManager[LLMEngine]:
        config, num_ranks = self._config(workload), workload.schedule.num_ranks
        if num_ranks == 1:
            return LLMEngine(self._folder, config, adapters=self._adapters)
        return parallel_engine(self._folder, config, num_ranks)

    def _config(self, workload: Workload) -> EngineConfig:
        """Translate the schedule into the engine's own limits; explicit options win."""
        schedule, num_requests = workload.schedule, len(workload.requests)
        if workload.timeline is not None:
            return EngineConfig(**{**workload.timeline.limits, **self._options})
        options: dict[str, str | int] = {"max_num_seqs": 1}
        if schedule.is_batched:
            options["max_num_seqs"] = num_requests + len(workload.copies)
        if schedule.chunk_size is not None:
            options["max_num_batched_tokens"] = schedule.chunk_size
        if schedule.trigger == "prefix_hit":
            options["enable_prefix_caching"] = True
        if schedule.has_drafts:
            options["block_size"] = _SMALL_BLOCK
        if schedule.trigger == "preempted":
            options["block_size"] = int(self._options.get("block_size", _SMALL_BLOCK))
            options["num_blocks"] = 1 + workload.num_blocks(int(options["block_size"]))  # and the null block
        return EngineConfig(**{**options, **self._options})


def _settings(config: ModelConfig) -> ModelSettings:
    ropes = [config.rope, *([] if config.local_rope is None else [config.local_rope])]
    rotaries = [RotaryEmbedding(replace(config, rope=rope), torch.device("cpu"), torch.float32) for rope in ropes]
    experts = [mlp for mlp in config.mlps.values() if isinstance(mlp, ExpertsShape)]
    sliding = {layer: window for layer, window in enumerate(config.layer_windows) if window is not None}
    return ModelSettings(
        num_layers=(config.num_hidden_layers,),
        hidden_size=(config.hidden_size,),
        num_heads=(config.num_attention_heads,),
        num_kv_heads=(config.num_key_value_heads,),
        head_dim=(config.head_dim,),
        norm_eps=(config.rms_norm_eps,),
        rope_theta=distinct(float(rope.theta) for rope in ropes),
        rope_frequencies=distinct(tuple(rotary.inv_freq.tolist()) for rotary in rotaries),
        softmax_scale=(config.score_scale,),
        attention_cap=(None,),
        logit_cap=(None,),
        sliding_window=distinct(sliding.values()),
        sliding_layers=(tuple(sliding),),
        tied_head=(config.tie_word_embeddings,),
        num_experts=distinct(expert.num_experts for expert in experts),
        num_chosen_experts=distinct(expert.num_chosen for expert in experts),
    )


def _run(engine: LLMEngine, workload: Workload, observer: "_Recorder") -> None:
    if workload.timeline is not None:
        _Driver(engine, observer, workload.requests, workload.timeline).run()
        return
    if workload.schedule.num_drafts:
        engine.drafter = observer.drafts
    copies = dict(zip((request.id for request in workload.requests), workload.copies, strict=False))
    forks = copies if workload.schedule.trigger == "forked" else {}
    _drive(engine, observer, workload.requests, forks)
    if not forks and not workload.schedule.has_drafts:
        _drive(engine, observer, workload.copies, {})


def _drive(
    engine: LLMEngine, observer: "_Recorder", requests: Sequence[RequestInfo], forks: Mapping[int, RequestInfo]
) -> None:
    """Run requests to their end; one named in `forks` is forked when it has made its first token."""
    timeline = Timeline(forks={fork.id: original for original, fork in forks.items()})
    _Driver(engine, observer, [*requests, *forks.values()], timeline).run()


class _Driver:
    """Adds requests to an engine, forks and aborts them, and runs its steps until nothing is left to do."""

    def __init__(
        self, engine: LLMEngine, observer: "_Recorder", requests: Sequence[RequestInfo], timeline: Timeline
    ) -> None:
        self._engine, self._observer, self._timeline = engine, observer, timeline
        self._requests = {request.id: request for request in requests}
        self._prompt_lengths = {request.id: request.prompt_length for request in requests}
        arriving = [request for request in requests if request.id not in timeline.forks]
        self._arriving = deque(sorted(arriving, key=lambda request: timeline.arrivals.get(request.id, 0)))
        self._forks: dict[int, list[RequestInfo]] = {}
        for fork, original in timeline.forks.items():
            self._forks.setdefault(original, []).append(self._requests[fork])
        self._num_made: Counter[int] = Counter()

    def run(self) -> None:
        """Run all requests to their end."""
        self._engine.observer = self._observer
        for step in count():
            self._add(step)
            if not self._engine.has_unfinished():
                return
            for output in self._engine.step():
                self._follow(output)

    def _add(self, step: int) -> None:
        """Add the requests that have arrived by now; the next one if there is nothing else to do."""
        while self._arriving:
            is_idle = not self._engine.has_unfinished()
            if not is_idle and self._timeline.arrivals.get(self._arriving[0].id, 0) > step:
                return
            request = self._arriving.popleft()
            prompt, detour = request.token_ids[: request.prompt_length], self._observer.drafts.detour(request)
            number = self._engine.add_request(prompt, self._params(request, detour or request))
            self._observer.request_ids[number] = request.id
            self._observer.drafts.begin(request, detour)

    def _follow(self, output: TokenOutput) -> None:
        """Fork the request that has made a token as often as it is to be, and abort it if it has made enough."""
        own = self._observer.request_ids[output.request_id]
        self._num_made[own] += 1
        for fork in self._forks.pop(own, ()) if output.finish_reason is None else ():
            self._prompt_lengths[fork.id], self._num_made[fork.id] = self._prompt_lengths[own], self._num_made[own]
            request_id = self._engine.fork(output.request_id, self._params(fork, fork))
            self._observer.request_ids[request_id] = fork.id
        self._go_back(output.request_id, self._requests[own])
        if own in self._timeline.aborted and self._num_made[own] == self._num_wanted(self._requests[own]):
            self._engine.abort(output.request_id)

    def _go_back(self, number: int, request: RequestInfo) -> None:
        """Let a request that has computed all of its detour go on with its own tokens."""
        detour = self._observer.drafts.detour(request)
        if detour is not None and self._num_made[request.id] == self._num_wanted(detour):
            self._observer.drafts.begin(request, None)
            self._engine.rewind(number, request.prompt_length, self._params(request, request))

    def _num_wanted(self, request: RequestInfo) -> int:
        """Return how many tokens a request makes: one after each row from its prompt's last one on."""
        return len(request.token_ids) - self._prompt_length(request) + 1

    def _prompt_length(self, request: RequestInfo) -> int:
        return self._prompt_lengths.get(request.id, request.prompt_length)

    def _params(self, request: RequestInfo, fed: RequestInfo) -> SamplingParams:
        """Feed what follows the prompt in `fed`, as far; what the engine would have chosen is still reported."""
        forced = fed.token_ids[self._prompt_length(fed) :]
        num_tokens = self._num_wanted(request) + (request.id in self._timeline.aborted)
        adapter = next(iter(self._engine.runner.adapters), None)
        return SamplingParams(
            max_new_tokens=num_tokens, forced_token_ids=forced or None, ignore_eos=True, adapter=adapter
        )


@dataclass(slots=True)
class _Recorder:
    """The engine's observer: hands every step to the recording."""

    writer: RecordingWriter
    drafts: ForcedDrafts
    poison: Poison | None
    memory: ReferenceMemory | None

    @property
    def request_ids(self) -> dict[int, int]:
        """By the engine's own number of a request, its id."""
        return self.drafts.request_ids

    def begin_step(self, step: StepInfo) -> None:
        if self.poison is not None and step.phase != "readback":
            numbers = (number for number, request in self.request_ids.items() if request == self.poison.victim)
            self.poison.before_step(self.memory, next(numbers, None))
        request = self.drafts.whose(step.request_ids, step.positions)
        tables = {self.request_ids[number]: blocks for number, blocks in step.block_tables.items()}
        for own, number in zip(request, step.request_ids, strict=True):  # a draft's rows are in its request's blocks
            if number in step.block_tables:
                tables[own] = step.block_tables[number]
        self.writer.begin_step(
            phase=step.phase,
            request=request,
            position=step.positions,
            sampled_rows=step.sampled_rows,
            slot_mapping=step.slot_mapping or None,
            block_tables=tables or None,
            partial_rows={LOGITS: step.sampled_rows} if len(step.sampled_rows) else None,
        )

    def tap(self, name: str, tensor: torch.Tensor) -> None:
        self.writer.tap(name, tensor)

    def end_step(self, sampled: Sequence[int]) -> None:
        self.writer.end_step(sampled)
