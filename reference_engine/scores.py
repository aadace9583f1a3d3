"""What requests ask of the scores of tokens besides a choice: logit bias, penalties, log probabilities.

Shapes: R sampled rows, V vocab, S tokens of all rows together, P the most logprobs that a row asks for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from collections.abc import Sequence as Seq

import numpy as np
import torch

from reference_engine.requests.outputs import TokenLogprobs
from reference_engine.requests.sequence import Sequence

__all__ = ["change_scores", "column", "penalise", "token_logprobs"]


def change_scores(scores_RV: torch.Tensor, sequences: Seq[Sequence]) -> torch.Tensor:
    """Return the scores after each row's bias, then its penalties, in transformers' order."""
    params = [sequence.params for sequence in sequences]
    if any(asked.logit_bias for asked in params):
        scores_RV = _add(scores_RV, [asked.logit_bias for asked in params])
    if any(asked.repetition_penalty != 1 for asked in params):
        scores_RV = penalise(scores_RV, sequences)
    if any(asked.presence_penalty or asked.frequency_penalty for asked in params):
        scores_RV = _add(scores_RV, [_counted_penalties(sequence) for sequence in sequences])
    return scores_RV


def penalise(scores_RV: torch.Tensor, sequences: Seq[Sequence]) -> torch.Tensor:
    """Make the tokens that each row has seen, its prompt included, less likely."""
    seen = [sequence.token_ids if sequence.params.repetition_penalty != 1 else [] for sequence in sequences]
    rows_S = np.repeat(np.arange(len(seen)), [len(token_ids) for token_ids in seen])
    token_ids_S = np.concatenate([np.array(token_ids, np.int64) for token_ids in seen])
    flat_S = column(rows_S * scores_RV.shape[1] + token_ids_S, torch.int64, scores_RV.device)
    is_seen_RV = torch.zeros_like(scores_RV, dtype=torch.bool).flatten().index_fill_(0, flat_S, True).view_as(scores_RV)
    penalties = [sequence.params.repetition_penalty for sequence in sequences]
    penalty_R1 = column(penalties, torch.float32, scores_RV.device)[:, None]
    penalised_RV = torch.where(scores_RV > 0, scores_RV / penalty_R1, scores_RV * penalty_R1)
    return torch.where(is_seen_RV, penalised_RV, scores_RV)


def _counted_penalties(sequence: Sequence) -> dict[int, float]:
    """Return what is added to the tokens of a continuation, for being there and for each time (OpenAI's reference)."""
    presence, frequency = sequence.params.presence_penalty, sequence.params.frequency_penalty
    counts = Counter(sequence.token_ids[sequence.num_prompt_tokens :] if presence or frequency else [])
    return {token_id: -(presence + frequency * count) for token_id, count in counts.items()}


def _add(scores_RV: torch.Tensor, added: Seq[Mapping[int, float]]) -> torch.Tensor:
    """Add values to some tokens of each row."""
    pairs = [
        (row * scores_RV.shape[1] + token_id, value)
        for row, values in enumerate(added)
        for token_id, value in values.items()
    ]
    flat_S = column([at for at, _ in pairs], torch.int64, scores_RV.device)
    values_S = column([value for _, value in pairs], torch.float32, scores_RV.device)
    return scores_RV.flatten().index_add(0, flat_S, values_S).view_as(scores_RV)


def token_logprobs(
    logits_RV: torch.Tensor, token_ids_R: torch.Tensor, sequences: Seq[Sequence]
) -> list[TokenLogprobs | None]:
    """Return the log probabilities that each row asks for, of the unchanged logits; None where it asks for none."""
    device = logits_RV.device
    num_top = max(sequence.params.num_logprobs or 0 for sequence in sequences)
    logprobs_RV = logits_RV.float().log_softmax(dim=-1)
    forced = [sequence.forced_token_id for sequence in sequences]
    forced_R = column([-1 if token_id is None else token_id for token_id in forced], torch.int64, device)
    chosen_R = torch.where(forced_R < 0, token_ids_R, forced_R)
    chosen_logprobs_R = logprobs_RV.gather(1, chosen_R[:, None])[:, 0]
    top_RP, top_ids_RP = logprobs_RV.topk(num_top, dim=-1)
    logprobs, top, top_ids = chosen_logprobs_R.tolist(), top_RP.tolist(), top_ids_RP.tolist()
    rows: list[TokenLogprobs | None] = []
    for row, sequence in enumerate(sequences):
        num_asked = sequence.params.num_logprobs
        pairs = tuple(zip(top_ids[row][:num_asked], top[row][:num_asked], strict=True))
        rows.append(None if num_asked is None else TokenLogprobs(logprob=logprobs[row], top=pairs))
    return rows


def column(values: Seq[float] | np.ndarray, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return one value for each row, on the device."""
    host = torch.as_tensor(values, dtype=dtype)
    # Only a copy from pinned memory is asynchronous, and torch.tensor pins no array of numpy's.
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host
