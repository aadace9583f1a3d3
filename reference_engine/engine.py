"""The engine: requests in, tokens out, one step at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace
from functools import cached_property
from itertools import count, islice
from pathlib import Path
from typing import TYPE_CHECKING, Self, TypeAlias

from reference_engine.block_manager import BlockManager
from reference_engine.block_pool import BlockPool
from reference_engine.checkpoint.model_config import ModelConfig
from reference_engine.config import EngineConfig
from reference_engine.errors import ConfigError, RequestError
from reference_engine.model_runner import ModelRunner
from reference_engine.observer import Observer
from reference_engine.observing.debug_checks import DebugChecks
from reference_engine.prefix_cache import HashFunction, PrefixCache, sha256_digest
from reference_engine.requests.admission import Admission
from reference_engine.requests.outputs import FinishReason, RequestOutput, TokenLogprobs, TokenOutput
from reference_engine.requests.sampling import SamplingParams
from reference_engine.requests.sequence import ScheduledChunk, Sequence
from reference_engine.requests.stopping import finish_reason
from reference_engine.requests.tokenizer import Tokenizer
from reference_engine.sampler import Sampled
from reference_engine.scheduler import Scheduler
from reference_engine.share import Share
from reference_engine.speculation import Drafter, DraftModel, NgramDrafter, drop_unscheduled, propose, verify

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["LLMEngine"]

_Choice: TypeAlias = "tuple[int, TokenLogprobs | None]"
Prompt = str | Iterable[int]
"""Text, which the checkpoint's tokenizer reads, or token ids."""


class LLMEngine:
    """Runs one model for many requests. As a context manager, it gives its memory back at the end of the block.

    `observer` may be set at any time between steps; None, the default, costs nothing. `hash_function` is what the
    prefix cache finds blocks by; a bad one costs hits, never correctness. `ranks` are the processes that share the
    model, of which this is the first (`parallel.worker.parallel_engine`); None is one process. `adapters` are folders
    of LoRA adapters in PEFT's format, by the names that requests ask for them (`SamplingParams.adapter`).

    Raises:
        ConfigError: config.json or `config` holds an impossible value; or the draft model has another vocabulary.
        UnsupportedModelError: the model asks for what this engine does not have.
        CheckpointError: the weights are absent, damaged, or contradict config.json.
        DeviceError: the device is not there.
    """

    def __init__(
        self,
        model_dir: str | Path,
        config: EngineConfig | None = None,
        *,
        observer: Observer | None = None,
        hash_function: HashFunction = sha256_digest,
        ranks: Share | None = None,
        adapters: Mapping[str, str | Path] | None = None,
    ) -> None:
        self.config = config = config or EngineConfig()
        self.model_config = model_config = ModelConfig.from_folder(model_dir)
        self.observer = observer
        self._model_dir = model_dir
        self.runner = ModelRunner(model_dir, config, model_config, ranks, adapters)
        self.backend = backend = self.runner.backend
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
            vocab_size=model_config.vocab_size,
            max_model_len=self.runner.max_model_len,
            num_usable_blocks=self.pool.num_usable,
            block_size=self.pool.block_size,
        )
        self.drafter: Drafter | None = self._open_drafter()
        """Guesses tokens for each step to verify; may be set at any time between steps."""
        self.num_drafted = self.num_accepted = 0
        self._sequences: dict[int, Sequence] = {}
        self._request_ids = count()
        self._is_closed = False

    def __enter__(self) -> Self:
        """Return the engine, open as it is."""
        return self

    def __exit__(self, *error: object) -> None:
        """Close it."""
        self.close()

    def close(self) -> None:
        """Drop all requests, and give weights, KV cache and recorded steps back to the device at once.

        A closed engine takes no requests. Closing it again does nothing.
        """
        if not self._is_closed:
            self._is_closed = True
            self._drop_all()
            self.runner.close()
            if isinstance(self.drafter, DraftModel):
                self.drafter.close()

    def weights(self) -> Mapping[str, Tensor]:
        """Return the tensors of the model and its adapters by their paths, as they are in memory."""
        return self.runner.weights()

    def add_request(self, prompt: Prompt, params: SamplingParams | None = None) -> int:
        """Queue a request, text or token ids, and return its id.

        Raises:
            RequestError: the prompt is empty, holds an id outside the vocabulary, or is too long for the model; or the
                engine is closed.
            CapacityError: the request is larger than the whole pool of blocks.
            ConfigError: it is text or has stop strings, and the checkpoint has no tokenizer to read them with.
        """
        params = params or SamplingParams()
        return self._add(self._check(prompt, params), params)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The checkpoint's tokenizer, read when it is first asked for."""
        return Tokenizer(self._model_dir)

    def has_unfinished(self) -> bool:
        """Whether `step` has anything to do."""
        return self.scheduler.has_unfinished

    def step(self) -> list[TokenOutput]:
        """Compute one batch and return its new tokens: one for each request that has caught up, and accepted drafts."""
        proposed = self.scheduler.running[:] if self.drafter is not None else []
        try:
            chunks, sampled = self._compute(proposed)
        except BaseException:
            drop_unscheduled(proposed, [])  # a step that failed leaves nothing to verify
            raise
        if not chunks:
            return []
        kept = [self._verified(chunk, own) for chunk, own in self._by_chunk(chunks, sampled)]
        self.runner.keep_states(chunks, self.observer)
        self.scheduler.advance(chunks)
        for sequence, choices, num_drafts in kept:
            if len(choices) <= num_drafts:
                self.scheduler.take_back(sequence)
        if self._debug is not None:
            self._debug.after_step(chunks, self.scheduler.running, self.pool)
        return [output for sequence, choices, _ in kept for output in self._commit_all(sequence, choices)]

    def generate(
        self, prompts: Iterable[Prompt], params: SamplingParams | Seq[SamplingParams] | None = None
    ) -> list[RequestOutput]:
        """Continue all prompts, with the same parameters or one set each, and return them in the prompts' order.

        Prompts that are text are continued in text too.

        Raises:
            RequestError: as `add_request`; or other requests are unfinished; or there is not one set for each prompt.
            CapacityError, ConfigError: as `add_request`. Whatever is raised, no prompt has been queued.
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

    def fork(self, request_id: int, params: SamplingParams | None = None) -> int:
        """Continue a request a second time from where it is, and return the new request's id.

        The two share the K and V of their past, unless `params` allow a length with other rotary frequencies. Without
        `params` the fork keeps those of the original; where these have no seed, the two draw differently.

        Raises:
            RequestError: the request is unknown or finished; or `params` allow no further token, or change the salt.
            CapacityError: `params` allow more tokens than the whole pool of blocks holds.
            ConfigError: as `add_request`.
        """
        parent = self._find(request_id, "LLMEngine.fork")
        params = params or parent.params
        self._admission.check_fork(parent, params)
        self._check_stops(params)
        request_id = next(self._request_ids)
        child = parent.fork(request_id, params, self._seed(params, request_id))
        child.turn_by(self._rope_len(child.num_prompt_tokens, params))
        if child.rope_len == parent.rope_len:
            self.scheduler.fork(parent, child)
        else:
            self.scheduler.add(child)
        self._sequences[child.request_id] = child
        return child.request_id

    def abort(self, request_id: int) -> None:
        """Drop a request and free its blocks.

        Raises:
            RequestError: it is unknown or finished.
        """
        sequence = self._find(request_id, "LLMEngine.abort")
        del self._sequences[request_id]
        sequence.finish_reason = FinishReason.ABORTED
        self.scheduler.abort(sequence)

    def rewind(self, request_id: int, num_tokens: int, params: SamplingParams | None = None) -> None:
        """Forget what a request has after its first so many tokens, and let it go on otherwise.

        The last of these is computed again, so that another token can be chosen after it; with recurrent layers, all
        that its block holds. Blocks behind it are freed.

        Raises:
            RequestError: the request is unknown or finished, or has not so many tokens after its prompt; or `params`
                allow no further token, or change the salt.
            CapacityError: `params` allow more tokens than the whole pool of blocks holds.
            ConfigError: as `add_request`.
        """
        where, sequence = "LLMEngine.rewind", self._find(request_id, "LLMEngine.rewind")
        first, last, keeps_states = sequence.num_prompt_tokens, sequence.num_tokens, self.runner.states is not None
        if not first <= num_tokens <= last:
            raise RequestError(
                "a request cannot go back there", where=where, expected=f"{first} to {last} tokens", actual=num_tokens
            )
        if params is not None:
            rewound = sequence.fork(request_id, params, sequence.seed)
            rewound.rewind(num_tokens, self.pool.block_size, keeps_states)
            self._admission.check_fork(rewound, params)
            self._check_stops(params)
            sequence.params = params
            sequence.turn_by(self._rope_len(first, params))
        sequence.rewind(num_tokens, self.pool.block_size, keeps_states)
        self.scheduler.take_back(sequence)

    def suspend(self, request_id: int) -> None:
        """Take a request out of the schedule and free its blocks; it keeps its tokens, and waits for `resume`.

        Raises:
            RequestError: it is unknown or finished.
        """
        self.scheduler.abort(self._find(request_id, "LLMEngine.suspend"))

    def resume(self, request_id: int) -> None:
        """Queue a suspended request again: it is computed anew from its tokens, and goes on where it was.

        Raises:
            RequestError: it is unknown or finished.
        """
        self.scheduler.add(self._find(request_id, "LLMEngine.resume"))

    def num_new_tokens(self, request_id: int) -> int:
        """Return how many tokens an unfinished request has sampled; raises RequestError if it is unknown."""
        return len(self._find(request_id, "LLMEngine.num_new_tokens").sampled_token_ids)

    def _open_drafter(self) -> Drafter | None:
        config, num_drafts = self.config, self.config.num_speculative_tokens
        if not num_drafts:
            return None
        if config.draft_model is None:
            return NgramDrafter(num_drafts)
        own = replace(
            config, draft_model=None, num_speculative_tokens=0, num_blocks=None, max_num_seqs=1, max_model_len=None,
            enable_prefix_caching=self.backend.has_blocks,
        )  # fmt: skip
        engine = LLMEngine(config.draft_model, own)
        if engine.model_config.vocab_size != self.model_config.vocab_size:
            engine.close()
            raise ConfigError(
                "the draft model has another vocabulary", where=config.draft_model,
                expected=f"{self.model_config.vocab_size} tokens", actual=engine.model_config.vocab_size,
            )  # fmt: skip
        return DraftModel(engine, num_drafts, engine.runner.max_model_len)

    def _find(self, request_id: int, where: str) -> Sequence:
        if request_id not in self._sequences:
            raise RequestError(
                "no such unfinished request", where=where, expected=f"one of {sorted(self._sequences)}",
                actual=request_id,
            )  # fmt: skip
        return self._sequences[request_id]

    def _check_all(
        self, prompts: list[Prompt], params: SamplingParams | Seq[SamplingParams] | None
    ) -> list[tuple[list[int], SamplingParams]]:
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(prompts)
        if len(params) != len(prompts):
            raise RequestError(
                "prompts and params do not pair", where="LLMEngine.generate", expected=f"{len(prompts)} params",
                actual=len(params),
            )  # fmt: skip
        return [(self._check(prompt, own), own) for prompt, own in zip(prompts, params, strict=True)]

    def _add(self, prompt: list[int], params: SamplingParams) -> int:
        request_id = next(self._request_ids)
        sequence = Sequence(
            request_id=request_id,
            token_ids=prompt,
            num_prompt_tokens=len(prompt),
            params=params,
            rope_len=self._rope_len(len(prompt), params),
            seed=self._seed(params, request_id),
        )
        self._sequences[request_id] = sequence
        self.scheduler.add(sequence)
        return request_id

    def _rope_len(self, num_prompt_tokens: int, params: SamplingParams) -> int | None:
        """Return the length that a request's rotary frequencies follow: the last sampled token is never computed."""
        return self.model_config.rope.rope_len(num_prompt_tokens + params.max_new_tokens - 1)

    def _seed(self, params: SamplingParams, request_id: int) -> int:
        return (self.config.seed << 32) + request_id if params.seed is None else params.seed

    def _check(self, prompt: Prompt, params: SamplingParams) -> list[int]:
        if self._is_closed:
            raise RequestError("the engine is closed", where="LLMEngine", hint="Open another one.")
        self._check_stops(params)
        self._check_adapter(params)
        if isinstance(prompt, str):
            prompt = self.tokenizer.encode(prompt)
        return self._admission.check(prompt, params)

    def _check_adapter(self, params: SamplingParams) -> None:
        known = self.runner.adapters
        if params.adapter is not None and params.adapter not in known:
            raise RequestError(
                "no such adapter", where="SamplingParams.adapter", expected=f"one of {sorted(known)}",
                actual=params.adapter,
            )  # fmt: skip

    def _check_stops(self, params: SamplingParams) -> None:
        if params.stop:
            self.tokenizer.decode([])

    def _drop_all(self) -> None:
        """Abort everything behind the observer's back: it may be the one that failed."""
        observer, self.observer = self.observer, None
        for request_id in list(self._sequences):
            self.abort(request_id)
        self.observer = observer

    def _compute(self, proposed: Seq[Sequence]) -> tuple[list[ScheduledChunk], Sampled]:
        """Compute one batch, with guesses of what continues the requests `proposed`; return its chunks and choices."""
        if self.drafter is not None:
            propose(proposed, self.drafter, self.config.max_num_batched_tokens - len(proposed))
        chunks = self.scheduler.schedule()
        drop_unscheduled(proposed, chunks)
        assert chunks or not self.has_unfinished(), "the oldest request can always take the blocks of the others"
        if not chunks:
            return [], Sampled([], [])
        if self._debug is not None:
            self._debug.before_step(chunks, self.pool)
        return chunks, self.runner.run(chunks, self.observer)

    @staticmethod
    def _by_chunk(chunks: Seq[ScheduledChunk], sampled: Sampled) -> list[tuple[ScheduledChunk, list[_Choice]]]:
        """Return the engine's own choices at the rows of each chunk that has caught up."""
        choices = zip(sampled.token_ids, sampled.logprobs, strict=True)
        return [(chunk, [*islice(choices, chunk.num_sampled)]) for chunk in chunks if chunk.samples]

    def _verified(self, chunk: ScheduledChunk, choices: list[_Choice]) -> tuple[Sequence, list[_Choice], int]:
        """Return the choices up to the first that is not its draft, and how many drafts there were."""
        num_drafts = chunk.sequence.num_drafts
        if num_drafts:
            num_accepted = verify(chunk, [token_id for token_id, _ in choices])
            choices = choices[: num_accepted + 1]
            self.num_drafted, self.num_accepted = self.num_drafted + num_drafts, self.num_accepted + num_accepted
        return chunk.sequence, choices, num_drafts

    def _commit_all(self, sequence: Sequence, choices: Seq[_Choice]) -> Iterator[TokenOutput]:
        """Make accepted drafts known one by one, then the token after them: the request may end at any."""
        del sequence.token_ids[sequence.num_tokens - len(choices) + 1 :]
        for token_id, logprobs in choices:
            yield self._commit(sequence, token_id, logprobs)
            if sequence.finish_reason is not None:
                return

    def _commit(self, sequence: Sequence, sampled_token_id: int, logprobs: TokenLogprobs | None) -> TokenOutput:
        token_id = sequence.append(sampled_token_id)
        if logprobs is not None:
            sequence.logprobs.append(logprobs)
        sequence.finish_reason = finish_reason(sequence, self.model_config.eos_token_ids, self._decode)
        if sequence.finish_reason is not None:
            del self._sequences[sequence.request_id]
            sequence.num_computed_tokens = min(sequence.num_computed_tokens, sequence.num_tokens)
            self.scheduler.finish(sequence)
        return TokenOutput(
            request_id=sequence.request_id,
            token_id=token_id,
            sampled_token_id=sampled_token_id,
            finish_reason=sequence.finish_reason,
            logprobs=logprobs,
        )

    def _decode(self, token_ids: Seq[int]) -> str:
        return self.tokenizer.decode(token_ids)

    def _read_back(self, sequence: Sequence) -> None:
        self.runner.read_back(sequence, self.observer)

    def _copy_block(self, source: int, target: int) -> None:
        self.runner.copy_block(source, target)
        if self._debug is not None:
            self._debug.copy(source, target)
