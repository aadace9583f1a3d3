"""The engine: requests in, tokens out, one step at a time.

Shapes: R sampled rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import replace
from itertools import count
from pathlib import Path

import torch

from reference_engine.admission import Admission
from reference_engine.attention.backend import find_backend
from reference_engine.batch import build_batch
from reference_engine.block_pool import BlockPool
from reference_engine.checkpoint import load_weights
from reference_engine.config import DTYPES, EngineConfig, ModelConfig
from reference_engine.device import open_device
from reference_engine.errors import ConfigError, RequestError
from reference_engine.kv_cache import CacheSpec
from reference_engine.model import Decoder
from reference_engine.observer import Observer
from reference_engine.outputs import FinishReason, RequestOutput, TokenOutput
from reference_engine.rotary import RotaryEmbedding
from reference_engine.sampler import sample
from reference_engine.sampling import SamplingParams
from reference_engine.scheduler import Scheduler
from reference_engine.sequence import Chunk, Sequence
from reference_engine.steps import describe, show_cache

__all__ = ["LLMEngine"]


class LLMEngine:
    """Runs one model for many requests.

    `observer` may be set at any time between steps; None, the default, costs nothing.

    Raises:
        ConfigError: config.json or `config` holds an impossible value.
        UnsupportedModelError: the model asks for what this engine does not have.
        CheckpointError: the weights are absent, damaged, or contradict config.json.
        DeviceError: the device is not there.
    """

    def __init__(
        self, model_dir: str | Path, config: EngineConfig | None = None, *, observer: Observer | None = None
    ) -> None:
        self.config = config = config or EngineConfig()
        self.model_config = model_config = ModelConfig.from_folder(model_dir)
        self.observer = observer
        self.device = open_device(config.device)
        self.dtype = _resolve_dtype(config, model_config)
        self.max_model_len = _resolve_max_model_len(config, model_config)
        open_backend = find_backend(config.attention_backend)
        rotary = RotaryEmbedding(model_config, self.device, self.dtype)
        weights = load_weights(model_dir, model_config, self.dtype, self.device)
        # After the weights, so that on a GPU the cache takes its share of what they leave.
        self.backend = open_backend(self._cache_spec())
        self.model = Decoder.build(model_config, weights, rotary, self.backend)
        self.pool = BlockPool(self.backend.num_blocks, self.backend.block_size)
        self.scheduler = Scheduler(
            self.pool,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_num_seqs=config.max_num_seqs,
            before_release=self._read_back,
        )
        self._admission = Admission(
            vocab_size=model_config.vocab_size,
            max_model_len=self.max_model_len,
            num_usable_blocks=self.pool.num_usable,
            block_size=self.pool.block_size,
        )
        self._sequences: dict[int, Sequence] = {}
        self._request_ids = count()

    def add_request(self, prompt_token_ids: Iterable[int], params: SamplingParams | None = None) -> int:
        """Queue a request and return its id.

        Raises:
            RequestError: the prompt is empty, holds an id outside the vocabulary, or is too long for the model.
            CapacityError: the request is larger than the whole pool of blocks.
        """
        params = params or SamplingParams()
        return self._add(self._admission.check(prompt_token_ids, params), params)

    def has_unfinished(self) -> bool:
        """Whether `step` has anything to do."""
        return self.scheduler.has_unfinished

    @torch.no_grad()
    def step(self) -> list[TokenOutput]:
        """Compute one batch and return its new tokens, one for each request that has caught up."""
        chunks = self.scheduler.schedule()
        assert chunks or not self.has_unfinished(), "the oldest request can always take the blocks of the others"
        if not chunks:
            return []
        sampled = self._compute(chunks)
        sampling = [chunk.sequence for chunk in chunks if chunk.samples]
        for chunk in chunks:
            chunk.sequence.num_computed_tokens = chunk.stop
        return [self._commit(sequence, token_id) for sequence, token_id in zip(sampling, sampled, strict=True)]

    def generate(
        self, prompts: Iterable[Iterable[int]], params: SamplingParams | Seq[SamplingParams] | None = None
    ) -> list[RequestOutput]:
        """Continue all prompts, with the same parameters or one set each, and return them in the prompts' order.

        Raises:
            RequestError: as `add_request`; or other requests are unfinished; or there is not one set for each prompt.
            CapacityError: as `add_request`. Either way no prompt has been queued.
        """
        if self.has_unfinished():
            raise RequestError(
                "generate needs the engine for itself", where="LLMEngine.generate", expected="no unfinished request",
                actual=len(self._sequences), hint="Drive added requests with step().",
            )  # fmt: skip
        sequences = [self._sequences[self._add(*request)] for request in self._check_all(list(prompts), params)]
        try:
            while self.has_unfinished():
                self.step()
        except BaseException:
            self._drop_all()
            raise
        return [sequence.output() for sequence in sequences]

    @torch.no_grad()
    def abort(self, request_id: int) -> None:
        """Drop a request and free its blocks.

        Raises:
            RequestError: it is unknown or finished.
        """
        if request_id not in self._sequences:
            raise RequestError(
                "no such unfinished request", where="LLMEngine.abort", expected=f"one of {sorted(self._sequences)}",
                actual=request_id,
            )  # fmt: skip
        sequence = self._sequences.pop(request_id)
        sequence.finish_reason = FinishReason.ABORTED
        self.scheduler.abort(sequence)

    def _check_all(
        self, prompts: list[Iterable[int]], params: SamplingParams | Seq[SamplingParams] | None
    ) -> list[tuple[list[int], SamplingParams]]:
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(prompts)
        if len(params) != len(prompts):
            raise RequestError(
                "prompts and params do not pair", where="LLMEngine.generate", expected=f"{len(prompts)} params",
                actual=len(params),
            )  # fmt: skip
        return [(self._admission.check(prompt, own), own) for prompt, own in zip(prompts, params, strict=True)]

    def _add(self, prompt: list[int], params: SamplingParams) -> int:
        request_id = next(self._request_ids)
        sequence = Sequence(request_id=request_id, token_ids=prompt, num_prompt_tokens=len(prompt), params=params)
        self._sequences[request_id] = sequence
        self.scheduler.add(sequence)
        return request_id

    def _drop_all(self) -> None:
        """Abort everything behind the observer's back: it may be the one that failed."""
        observer, self.observer = self.observer, None
        for request_id in list(self._sequences):
            self.abort(request_id)
        self.observer = observer

    def _compute(self, chunks: list[Chunk]) -> list[int]:
        """Run the model over the chunks and return the sampled token of each sampled row."""
        computed = chunks if self.backend.keeps_cache else [replace(chunk, start=0) for chunk in chunks]
        batch = build_batch(computed, self.backend.block_size, self.device, self.observer)
        batch = replace(batch, plan=self.backend.plan(batch))
        if self.observer is not None:
            self.observer.begin_step(describe(chunks, computed, self.backend))
        logits_RV = self.model(batch)
        sampled: list[int] = [] if logits_RV is None else sample(logits_RV).tolist()
        if self.observer is not None:
            self.observer.end_step(sampled)
        return sampled

    def _commit(self, sequence: Sequence, sampled_token_id: int) -> TokenOutput:
        token_id = sequence.append(sampled_token_id)
        sequence.finish_reason = self._finish_reason(sequence, token_id)
        if sequence.finish_reason is not None:
            del self._sequences[sequence.request_id]
            self.scheduler.finish(sequence)
        return TokenOutput(
            request_id=sequence.request_id,
            token_id=token_id,
            sampled_token_id=sampled_token_id,
            finish_reason=sequence.finish_reason,
        )

    def _finish_reason(self, sequence: Sequence, token_id: int) -> FinishReason | None:
        if sequence.params.stops_at_eos and token_id in self.model_config.eos_token_ids:
            return FinishReason.EOS
        is_complete = len(sequence.sampled_token_ids) == sequence.params.max_new_tokens
        return FinishReason.LENGTH if is_complete else None

    def _read_back(self, sequence: Sequence) -> None:
        if self.observer is not None and self.backend.keeps_cache and sequence.num_computed_tokens:
            show_cache(sequence, self.backend, self.model_config.num_hidden_layers, self.observer)

    def _cache_spec(self) -> CacheSpec:
        return CacheSpec(
            num_layers=self.model_config.num_hidden_layers,
            num_kv_heads=self.model_config.num_key_value_heads,
            head_dim=self.model_config.head_dim,
            dtype=self.dtype,
            device=self.device,
            block_size=self.config.block_size,
            num_blocks=self.config.num_blocks,
            max_num_seqs=self.config.max_num_seqs,
            max_model_len=self.max_model_len,
        )


def _resolve_dtype(config: EngineConfig, model_config: ModelConfig) -> torch.dtype:
    name = (model_config.dtype or "float32") if config.dtype == "auto" else config.dtype
    if name not in DTYPES:
        raise ConfigError(
            "the checkpoint's dtype is not supported", where="config.json", expected=" or ".join(DTYPES), actual=name,
            hint="Name one with EngineConfig.dtype.",
        )  # fmt: skip
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def _resolve_max_model_len(config: EngineConfig, model_config: ModelConfig) -> int:
    limit = model_config.max_position_embeddings
    if config.max_model_len is not None and config.max_model_len > limit:
        raise ConfigError(
            "max_model_len is more than the model allows", where="EngineConfig.max_model_len",
            expected=f"at most max_position_embeddings = {limit}", actual=config.max_model_len,
        )  # fmt: skip
    return config.max_model_len or limit
