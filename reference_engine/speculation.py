"""Speculation: drafts of the next tokens, computed beside the next one, kept as far as the model chooses them too.

A draft is accepted exactly where the choice that the engine makes at its row anyway is the same token. So what a
request generates does not depend on the drafts: greedy continuations are equal, and drawn ones draw the same numbers.
(Of a proposal that is one token for certain, this is the rejection sampling of Leviathan et al. 2023, algorithm 1.)
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Protocol

from reference_engine.config import EngineConfig
from reference_engine.errors import ConfigError
from reference_engine.requests.outputs import RequestOutput
from reference_engine.requests.sampling import SamplingParams
from reference_engine.requests.sequence import ScheduledChunk, Sequence

__all__ = [
    "Continuer",
    "DraftModel",
    "Drafter",
    "NgramDrafter",
    "Speculation",
    "drop_drafts",
    "open_drafter",
    "sampling_views",
    "verify",
]

_LONGEST_NGRAM = 3


class Drafter(Protocol):
    """Guesses what comes next."""

    def draft(self, sequence: Sequence) -> Seq[int]:
        """Return guesses of the tokens after the last known one, none if there is nothing to go by."""


class NgramDrafter:
    """Guesses that what followed the last tokens before follows them again (Saxena 2023, prompt lookup decoding)."""

    def __init__(self, num_tokens: int) -> None:
        self._num_tokens = num_tokens

    def draft(self, sequence: Sequence) -> Seq[int]:
        """See `Drafter.draft`: after the latest place that has the last three tokens too, or the last two, or one."""
        tokens = sequence.token_ids
        for length in range(min(_LONGEST_NGRAM, len(tokens) - 1), 0, -1):
            last = tokens[-length:]
            for at in range(len(tokens) - length - 1, -1, -1):
                if tokens[at : at + length] == last:
                    return tokens[at + length : at + length + self._num_tokens]
        return []


class Continuer(Protocol):
    """An engine, as far as a draft model needs one."""

    @property
    def max_model_len(self) -> int:
        """Tokens of prompt and continuation together."""

    @property
    def vocab_size(self) -> int:
        """Tokens that it knows."""

    def generate(self, prompts: list[list[int]], params: SamplingParams) -> list[RequestOutput]:
        """Continue prompts."""

    def close(self) -> None:
        """Give its memory back."""


class DraftModel:
    """Guesses what a smaller model would say (Leviathan et al. 2023), one request at a time.

    Its engine caches prefixes, so that of a request that goes on it computes little more than the last block again.
    """

    def __init__(self, engine: Continuer, num_tokens: int) -> None:
        self._engine, self._num_tokens = engine, num_tokens

    def draft(self, sequence: Sequence) -> Seq[int]:
        """See `Drafter.draft`: greedily, as far as the model's context reaches."""
        num_tokens = min(self._num_tokens, self._engine.max_model_len - sequence.num_tokens)
        if num_tokens < 1:
            return []
        params = SamplingParams(max_new_tokens=num_tokens, ignore_eos=True)
        return self._engine.generate([sequence.token_ids], params)[0].token_ids

    def close(self) -> None:
        """Give the model's memory back."""
        self._engine.close()


def open_drafter(
    config: EngineConfig, vocab_size: int, has_blocks: bool, open_engine: Callable[[str, EngineConfig], Continuer]
) -> Drafter | None:
    """Open what makes the drafts that an engine's options ask for; None: they ask for none.

    Raises:
        ConfigError: the draft model has another vocabulary.
        Whatever `open_engine` raises.
    """
    num_drafts = config.num_speculative_tokens
    if not num_drafts:
        return None
    if config.draft_model is None:
        return NgramDrafter(num_drafts)
    draft_config = replace(
        config, draft_model=None, num_speculative_tokens=0, num_blocks=None, max_num_seqs=1, max_model_len=None,
        enable_prefix_caching=has_blocks,
    )  # fmt: skip
    engine = open_engine(config.draft_model, draft_config)
    if engine.vocab_size != vocab_size:
        engine.close()
        raise ConfigError(
            "the draft model has another vocabulary", where=config.draft_model, expected=f"{vocab_size} tokens",
            actual=engine.vocab_size,
        )  # fmt: skip
    return DraftModel(engine, num_drafts)


class Speculation:
    """The drafts of an engine's steps: made before a step is scheduled, verified after it is computed."""

    def __init__(self, max_num_batched_tokens: int) -> None:
        self.num_drafted = self.num_accepted = 0
        self._max_num_batched_tokens = max_num_batched_tokens
        self._proposed: list[Sequence] = []
        """The requests that may have drafts which are not yet verified."""

    def propose(self, running: Seq[Sequence], drafter: Drafter | None) -> None:
        """Add drafts to the running requests that are one token behind, the oldest first.

        Of all rows of a step, one is left for each request.
        """
        self._proposed = [] if drafter is None else list(running)
        num_left = self._max_num_batched_tokens - len(running)
        for sequence in self._proposed:
            last = sequence.num_prompt_tokens + sequence.params.max_new_tokens - 1
            num_drafts = min(num_left, last - sequence.num_tokens)
            if drafter is not None and num_drafts > 0 and sequence.num_remaining_tokens == 1:
                drafts = list(drafter.draft(sequence))[:num_drafts]
                sequence.token_ids += drafts
                sequence.num_drafts = len(drafts)
                num_left -= len(drafts)

    def drop_unscheduled(self, chunks: Seq[ScheduledChunk]) -> None:
        """Take back the drafts that the step does not compute."""
        stops = {chunk.sequence.request_id: chunk.stop for chunk in chunks} if self._proposed else {}
        for sequence in self._proposed:
            if sequence.num_drafts:
                drop_drafts(sequence, stops.get(sequence.request_id, 0))

    def num_accepted_of(self, chunk: ScheduledChunk, chosen: Seq[int]) -> int:
        """Take back the rejected drafts of a computed chunk, and return how many are accepted; see `verify`."""
        self.num_drafted += chunk.sequence.num_drafts
        num_accepted = verify(chunk, chosen)
        self.num_accepted += num_accepted
        return num_accepted


def verify(chunk: ScheduledChunk, chosen: Seq[int]) -> int:
    """Take back the drafts that are rejected, and return how many are accepted.

    Args:
        chunk: the last known token of a request with its drafts; afterwards, without those that were rejected.
        chosen: the engine's own choices at these rows.
    """
    sequence = chunk.sequence
    drafts = sequence.token_ids[chunk.start + 1 : chunk.stop]
    num_accepted = 0
    while num_accepted < len(drafts) and drafts[num_accepted] == sequence.fed(num_accepted, chosen[num_accepted]):
        num_accepted += 1
    chunk.stop = chunk.start + 1 + num_accepted
    drop_drafts(sequence, chunk.stop)
    sequence.num_drafts = 0
    return num_accepted


def drop_drafts(sequence: Sequence, num_tokens: int) -> None:
    """Take back the drafts of a request after its first `num_tokens` tokens."""
    num_known = sequence.num_tokens - sequence.num_drafts
    del sequence.token_ids[max(num_tokens, num_known) :]
    sequence.num_drafts = sequence.num_tokens - num_known


def sampling_views(sequence: Sequence) -> list[Sequence]:
    """Return the request as it is at each row that chooses a token: itself, or as if drafts were accepted."""
    if not sequence.num_drafts:
        return [sequence]
    first, views = sequence.num_tokens - sequence.num_drafts, []
    for num_tokens in range(first, sequence.num_tokens + 1):
        view = sequence.fork(sequence.request_id, sequence.params, sequence.seed)
        view.token_ids = sequence.token_ids[:num_tokens]
        view.sampled_token_ids = [*sequence.sampled_token_ids, *sequence.token_ids[first:num_tokens]]
        views.append(view)
    return views
