"""When a request ends."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

from reference_engine.requests.outputs import FinishReason
from reference_engine.requests.sequence import Sequence

__all__ = ["find_stop", "finish_reason"]


def finish_reason(
    sequence: Sequence, eos_token_ids: frozenset[int], decode: Callable[[Seq[int]], str]
) -> FinishReason | None:
    """Tell why a request ends with its last token, if it does. Where a stop string is found, the text is kept."""
    params, token_id = sequence.params, sequence.token_ids[-1]
    if params.stops_at_eos and token_id in eos_token_ids:
        return FinishReason.EOS
    if token_id in params.stop_token_ids:
        return FinishReason.STOP
    if params.stop:
        # All of it each time: what a tokenizer makes of a token can depend on its neighbours.
        sequence.text = decode(sequence.token_ids[sequence.num_prompt_tokens :])
        end = find_stop(sequence.text, params.stop)
        if end is not None:
            sequence.text = sequence.text[:end]
            return FinishReason.STOP
    return FinishReason.LENGTH if len(sequence.sampled_token_ids) == params.max_new_tokens else None


def find_stop(text: str, stops: Seq[str]) -> int | None:
    """Return where the first stop string begins."""
    places = [text.find(stop) for stop in stops]
    return min((place for place in places if place >= 0), default=None)
