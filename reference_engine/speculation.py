"""Speculation: tokens that are guessed, computed beside the next one, and kept as far as the model chooses them too.

A guess is accepted exactly where the choice that the engine makes at its row anyway is the same token. So what a
request is given does not depend on the guesses: greedy continuations are equal, and drawn ones draw the same numbers.
(Of a proposal that is one token for certain, this is the rejection sampling of Leviathan et al. 2023, algorithm 1.)
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Protocol

from reference_engine.requests.outputs import RequestOutput
from reference_engine.requests.sampling import SamplingParams
from reference_engine.requests.sequence import ScheduledChunk, Sequence

__all__ = ["Continuer", "DraftModel", "Drafter", "NgramDrafter", "drop_unscheduled", "propose", "verify"]

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

    def generate(self, prompts: list[list[int]], params: SamplingParams) -> list[RequestOutput]:
        """Continue prompts."""

    def close(self) -> None:
        """Give its memory back."""


class DraftModel:
    """Guesses what a smaller model would say (Leviathan et al. 2023), one request at a time.

    Its engine caches prefixes, so that of a request that goes on it computes little more than the last block again.
    """

    def __init__(self, engine: Continuer, num_tokens: int, max_model_len: int) -> None:
        self._engine, self._num_tokens, self._max_model_len = engine, num_tokens, max_model_len

    def draft(self, sequence: Sequence) -> Seq[int]:
        """See `Drafter.draft`: greedily, as far as the model's context reaches."""
        num_tokens = min(self._num_tokens, self._max_model_len - sequence.num_tokens)
        if num_tokens < 1:
            return []
        params = SamplingParams(max_new_tokens=num_tokens, ignore_eos=True)
        return self._engine.generate([sequence.token_ids], params)[0].token_ids

    def close(self) -> None:
        """Give the model's memory back."""
        self._engine.close()


def propose(sequences: Seq[Sequence], drafter: Drafter, most: int) -> None:
    """Add guesses to the running requests that are one token behind, as many as they may still be given.

    Args:
        sequences: the running requests, the oldest first.
        drafter: guesses.
        most: guesses of all together, so that the step still has a token for each request.
    """
    for sequence in sequences:
        last = sequence.num_prompt_tokens + sequence.params.max_new_tokens - 1
        num_drafts = min(most, last - sequence.num_tokens)
        if num_drafts > 0 and sequence.num_remaining_tokens == 1:
            drafts = list(drafter.draft(sequence))[:num_drafts]
            sequence.token_ids += drafts
            sequence.num_drafts = len(drafts)
            most -= len(drafts)


def drop_unscheduled(sequences: Seq[Sequence], chunks: Seq[ScheduledChunk]) -> None:
    """Take back the guesses that the step does not compute."""
    stops = {chunk.sequence.request_id: chunk.stop for chunk in chunks}
    for sequence in sequences:
        if sequence.num_drafts:
            sequence.drop_drafts(stops.get(sequence.request_id, 0))


def verify(chunk: ScheduledChunk, chosen: Seq[int]) -> int:
    """Take back the guesses that are rejected, and return how many are accepted.

    Args:
        chunk: the last known token of a request with its guesses; afterwards, without those that were rejected.
        chosen: the engine's own choices at these rows.
    """
    sequence = chunk.sequence
    drafts = sequence.token_ids[chunk.start + 1 : chunk.stop]
    num_accepted = 0
    while num_accepted < len(drafts) and drafts[num_accepted] == sequence.fed(num_accepted, chosen[num_accepted]):
        num_accepted += 1
    chunk.stop = chunk.start + 1 + num_accepted
    sequence.drop_drafts(chunk.stop)
    sequence.num_drafts = 0
    return num_accepted
