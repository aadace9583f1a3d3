"""A request on its way through llama.cpp, and which rows each of its batches holds."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from harness.formats.recording import RequestInfo


@dataclass(slots=True)
class LlamaSequence:
    """One request; llama.cpp calls its number the sequence id."""

    request: RequestInfo
    number: int
    num_computed: int = 0
    """Tokens in the cache."""

    @property
    def is_finished(self) -> bool:
        """Whether all tokens have been fed."""
        return self.num_computed == len(self.request.token_ids)

    @property
    def is_in_prompt(self) -> bool:
        """Whether tokens of the prompt are left."""
        return self.num_computed < self.request.prompt_length


@dataclass(frozen=True, slots=True)
class SequencePiece:
    """Tokens of one sequence in a batch."""

    sequence: LlamaSequence
    positions: range

    def rows(self) -> Iterator[tuple[int, int, int, bool]]:
        """Yield (token, position, sequence, whether its logits are wanted)."""
        request = self.sequence.request
        for position in self.positions:
            is_sampled = position >= request.prompt_length - 1
            yield request.token_ids[position], position, self.sequence.number, is_sampled


def next_batch(sequences: Sequence[LlamaSequence], *, chunk_size: int | None, num_batch: int) -> list[SequencePiece]:
    """Return what the next batch holds: a token of each sequence after its prompt, then pieces of prompts.

    Args:
        sequences: those that are not finished, in the order of their arrival.
        chunk_size: most tokens of prompts; None for no limit.
        num_batch: most tokens of all.
    """
    pieces = [
        SequencePiece(sequence, range(sequence.num_computed, sequence.num_computed + 1))
        for sequence in sequences
        if not sequence.is_in_prompt
    ][:num_batch]
    room = num_batch - len(pieces) if chunk_size is None else min(chunk_size, num_batch - len(pieces))
    for sequence in sequences:
        if sequence.is_in_prompt and room > 0:
            end = min(sequence.request.prompt_length, sequence.num_computed + room)
            pieces.append(SequencePiece(sequence, range(sequence.num_computed, end)))
            room -= end - sequence.num_computed
    return pieces
