"""The engine: takes requests and generates their tokens, one step at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Self, TypeAlias

from reference_engine.block_manager import BlockManager
from reference_engine.block_pool import BlockPool
from reference_engine.checkpoint.model_config import ModelConfig
from reference_engine.config import EngineConfig
from reference_engine.control import Prompt, RequestControl
from reference_engine.errors import RequestError
from reference_engine.hooks.debug_checks import DebugChecks
from reference_engine.in_flight import StepInFlight, can_be_read_late, rows_for_tokens
from reference_engine.model_runner import ModelRunner
from reference_engine.observer import Observer
from reference_engine.prefix_cache import HashFunction, PrefixCache, sha256_digest
from reference_engine.requests.admission import Admission
from reference_engine.requests.outputs import RequestOutput, TokenLogprobs, TokenOutput
from reference_engine.requests.sampling import SamplingParams
from reference_engine.requests.sequence import ScheduledChunk, Sequence
from reference_engine.requests.stopping import finish_reason
from reference_engine.requests.tokenizer import Tokenizer
from reference_engine.sampler import Sampled
from reference_engine.scheduler import Scheduler
from reference_engine.speculation import Drafter, DraftModel, Speculation, open_drafter
from reference_engine.tensor_parallel import TensorParallel

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["LLMEngine"]

_Choice: TypeAlias = "tuple[int, TokenLogprobs | None]"


class LLMEngine(RequestControl):
    """Runs one model for many requests. As a context manager, it frees its memory at the end of the block.

    `observer` may be set at any time between steps; None, the default, costs nothing. The prefix cache finds blocks by
    `hash_function`; a bad function causes fewer hits, but no errors. `ranks` are the tensor-parallel processes, of
    which this is the first (`parallel.worker.parallel_engine`); None for a single process. `adapters` maps names of
    LoRA adapters (`SamplingParams.adapter`) to their folders in PEFT format.

    Raises:
        ConfigError: config.json or `config` has an invalid value; or the draft model has a different vocabulary.
        UnsupportedModelError: the engine does not support the model.
        CheckpointError: the weights are missing or damaged, or contradict config.json.
        DeviceError: the device does not exist.
    """

    def __init__(
        self,
        model_dir: str | Path,
        config: EngineConfig | None = None,
        *,
        observer: Observer | None = None,
        hash_function: HashFunction = sha256_digest,
        ranks: TensorParallel | None = None,
        adapters: Mapping[str, str | Path] | None = None,
    ) -> None:
        self.config = config = config or EngineConfig()
        self.model_config = model_config = ModelConfig.from_folder(model_dir)
        self.observer = observer
        self._model_dir = model_dir
        self.runner = ModelRunner(model_dir, config, model_config, ranks, adapters)
        self.backend = backend = self.runner.backend
        super().__init__(block_size=backend.block_size, keeps_states=self.runner.states is not None)
        self._debug = DebugChecks(backend.cache, self.runner.states) if config.debug_checks else None
        self.pool = BlockPool(
            backend.num_blocks,
            backend.block_size,
            prefix_cache=PrefixCache(backend.block_size, hash_function) if config.enable_prefix_caching else None,
            on_discard=self._debug.discard if self._debug is not None else None,
        )
        self.scheduler = Scheduler(
            BlockManager(self.pool, self._copy_block),
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_num_seqs=config.max_num_seqs,
            before_release=self._read_back,
        )
        self._admission = Admission(
            vocab_size=self.vocab_size,
            max_model_len=self.max_model_len,
            num_usable_blocks=self.pool.num_usable,
            block_size=backend.block_size,
            rope=model_config.rope,
            adapters=self.runner.adapters,
            open_tokenizer=lambda: self.tokenizer,
        )
        self.drafter: Drafter | None = open_drafter(config, self.vocab_size, backend.has_blocks, LLMEngine)
        """Proposes draft tokens, which each step verifies; may be set at any time between steps."""
        self.speculation = Speculation(config.max_num_batched_tokens)

    def __enter__(self) -> Self:
        """Return the engine."""
        return self

    def __exit__(self, *error: object) -> None:
        """Close the engine."""
        self.close()

    def close(self) -> None:
        """Drop all requests, and free the memory of weights, KV cache and recorded steps at once.

        A closed engine takes no requests. Closing it again does nothing.
        """
        if not self._is_closed:
            self._is_closed = True
            self._drop_all()
            self.runner.close()
            if isinstance(self.drafter, DraftModel):
                self.drafter.close()

    @property
    def vocab_size(self) -> int:
        """Number of tokens in the vocabulary of the model."""
        return self.model_config.vocab_size

    @property
    def max_model_len(self) -> int:
        """Maximum number of tokens of prompt and continuation together."""
        return self.runner.max_model_len

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the checkpoint, loaded on first use."""
        return Tokenizer(self._model_dir)

    def weights(self) -> Mapping[str, Tensor]:
        """Return the tensors of the model and its adapters by path, as they are in memory."""
        return self.runner.weights()

    def has_unfinished(self) -> bool:
        """Whether `step` has anything to do."""
        return self.scheduler.has_unfinished

    def step(self) -> list[TokenOutput]:
        """Compute one batch and return its new tokens: accepted drafts, and one token per request without a backlog."""
        try:
            chunks, sampled = self._compute()
        except BaseException:
            self.speculation.drop_unscheduled([])  # a step that failed leaves nothing to verify
            self._in_flight = None
            raise
        if not chunks:
            return []
        verified = [self._verified(chunk, choices) for chunk, choices in self._by_chunk(chunks, sampled)]
        self.runner.keep_states(chunks, self.observer)
        self.scheduler.advance(chunks)
        for sequence, _, has_rejected in verified:
            if has_rejected:
                self.scheduler.take_back(sequence)
        if self._debug is not None:
            self._debug.after_step(chunks, self.scheduler.running, self.pool)
        return [output for sequence, choices, _ in verified for output in self._commit(sequence, choices)]

    def generate(
        self, prompts: Iterable[Prompt], params: SamplingParams | Seq[SamplingParams] | None = None
    ) -> list[RequestOutput]:
        """Continue all prompts, with the same parameters or one set each; return the outputs in order of the prompts.

        Outputs of text prompts also have text.

        Raises:
            RequestError: as `add_request`; or other requests are unfinished; or the numbers of prompts and sets differ.
            CapacityError, ConfigError: as `add_request`. After any error, no prompt is queued.
        """
        if self.has_unfinished():
            raise RequestError(
                "generate needs the engine for itself", where="LLMEngine.generate", expected="no unfinished request",
                actual=len(self._sequences), hint="Drive added requests with step().",
            )  # fmt: skip
        prompts = list(prompts)
        sequences = [self._sequences[self._add(*request)] for request in self._check_all(prompts, params)]
        try:
            while self.has_unfinished():
                self.step()
        except BaseException:
            self._drop_all()
            raise
        for sequence, prompt in zip(sequences, prompts, strict=True):
            if isinstance(prompt, str) and sequence.text is None:
                sequence.text = self._decode(sequence.token_ids[sequence.num_prompt_tokens :])
        return [sequence.output() for sequence in sequences]

    def _compute(self) -> tuple[list[ScheduledChunk], Sampled]:
        """Compute one batch, drafts included; return its chunks and the choices at their sampled rows."""
        if self.runner.can_run_ahead and self.observer is None and self.drafter is None:
            return self._compute_ahead()
        self._in_flight = None
        chunks = self._schedule()
        return chunks, self.runner.run(chunks, self.observer) if chunks else Sampled([], [])

    def _compute_ahead(self) -> tuple[list[ScheduledChunk], Sampled]:
        """Compute one batch as well, and launch the next one before the tokens are read, where that can be."""
        step, self._in_flight = self._in_flight, None
        if step is None or not step.live:
            chunks = self._schedule()
            if not chunks or not can_be_read_late(chunks):
                return chunks, self.runner.run(chunks, None) if chunks else Sampled([], [])
            step = StepInFlight.of(chunks, self.runner.launch(chunks))
        self._in_flight = self._launch_next(step)
        return step.read()

    def _launch_next(self, step: StepInFlight) -> StepInFlight | None:
        """Launch the step after one that has not been read; None where that one decides what it is."""
        unread = step.continued
        if not unread or not self.scheduler.admits_none(len(step.live)):
            return None
        with rows_for_tokens(unread):
            chunks = self.scheduler.schedule_next([sequence for _, sequence in unread])
            if chunks is None:
                return None
            if self._debug is not None:
                self._debug.before_step(chunks, self.pool)
            return StepInFlight.of(chunks, self.runner.launch(chunks, step.token_ids_R))

    def _schedule(self) -> list[ScheduledChunk]:
        """Return the chunks of the next step, whose blocks are allocated."""
        self.speculation.propose(self.scheduler.running, self.drafter)
        chunks = self.scheduler.schedule()
        self.speculation.drop_unscheduled(chunks)
        assert chunks or not self.has_unfinished(), "the oldest request can always take the blocks of the others"
        if chunks and self._debug is not None:
            self._debug.before_step(chunks, self.pool)
        return chunks

    @staticmethod
    def _by_chunk(chunks: Seq[ScheduledChunk], sampled: Sampled) -> list[tuple[ScheduledChunk, list[_Choice]]]:
        """Return each chunk that has caught up with the tokens that the engine chose at its sampled rows."""
        choices = zip(sampled.token_ids, sampled.logprobs, strict=True)
        return [(chunk, [*islice(choices, chunk.num_sampled)]) for chunk in chunks if chunk.samples]

    def _verified(self, chunk: ScheduledChunk, choices: list[_Choice]) -> tuple[Sequence, list[_Choice], bool]:
        """Return the choices up to the first that differs from its draft, and whether a draft was rejected."""
        num_drafts = chunk.sequence.num_drafts
        if not num_drafts:
            return chunk.sequence, choices, False
        num_accepted = self.speculation.num_accepted_of(chunk, [token_id for token_id, _ in choices])
        return chunk.sequence, choices[: num_accepted + 1], num_accepted < num_drafts

    def _commit(self, sequence: Sequence, choices: Seq[_Choice]) -> Iterator[TokenOutput]:
        """Append accepted drafts one by one, then the token after them; the request may end at any of them."""
        del sequence.token_ids[sequence.num_tokens - len(choices) + 1 :]
        for sampled_token_id, logprobs in choices:
            token_id = sequence.append(sampled_token_id)
            if logprobs is not None:
                sequence.logprobs.append(logprobs)
            sequence.finish_reason = finish_reason(sequence, self.model_config.eos_token_ids, self._decode)
            if sequence.finish_reason is not None:
                self._finish(sequence)
            yield TokenOutput(
                request_id=sequence.request_id,
                token_id=token_id,
                sampled_token_id=sampled_token_id,
                finish_reason=sequence.finish_reason,
                logprobs=logprobs,
            )
            if sequence.finish_reason is not None:
                return

    def _decode(self, token_ids: Seq[int]) -> str:
        return self.tokenizer.decode(token_ids)

    def _read_back(self, sequence: Sequence) -> None:
        self.runner.read_back(sequence, self.observer)

    def _copy_block(self, source: int, target: int) -> None:
        self.runner.copy_block(source, target)
        if self._debug is not None:
            self._debug.copy(source, target)
