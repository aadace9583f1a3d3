"""Choosing the next token of every request of a step at once, from their logits.

A draw takes one uniform number per request and inverts the cumulative distribution, in the order of the vocabulary. The
number is a hash of the request's seed and of how many tokens it has sampled: no generator with a state, so that neither
batch mates nor preemption change what a request draws. Nothing waits for the device before the tokens are read.

Shapes: R sampled rows, V vocab, S tokens seen of all rows together, P the most logprobs that a row asks for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch

from reference_engine.requests.outputs import TokenLogprobs
from reference_engine.requests.sampling import SamplingParams
from reference_engine.requests.sequence import Sequence

__all__ = ["Sampled", "allowed_tokens", "penalise", "sample", "uniforms"]


@dataclass(frozen=True, slots=True)
class Sampled:
    """The choices of one step, row by row."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs | None]


def sample(logits_RV: torch.Tensor, sequences: Seq[Sequence]) -> Sampled:
    """Choose each row's next token; the lowest id among equally likely ones if nothing is drawn."""
    params = [sequence.params for sequence in sequences]
    if all(own.is_plain for own in params):
        # max and not argmax: both give the first of equals, and on a CPU in bfloat16 this is six times faster.
        return Sampled(logits_RV.max(dim=-1).indices.tolist(), [None] * len(params))
    scores_RV = logits_RV.float()
    if any(own.logit_bias for own in params):
        scores_RV = _add(scores_RV, [own.logit_bias for own in params])
    if any(own.repetition_penalty != 1 for own in params):
        scores_RV = penalise(scores_RV, sequences)
    if any(own.presence_penalty or own.frequency_penalty for own in params):
        scores_RV = _add(scores_RV, [_counted_penalties(sequence) for sequence in sequences])
    token_ids_R = scores_RV.argmax(dim=-1)
    if any(own.temperature for own in params):
        drawn_R = _draw(scores_RV, sequences)
        is_drawn_R = _column([own.temperature > 0 for own in params], torch.bool, scores_RV.device)
        token_ids_R = torch.where(is_drawn_R, drawn_R, token_ids_R)
    if all(own.num_logprobs is None for own in params):
        return Sampled(token_ids_R.tolist(), [None] * len(params))
    return _with_logprobs(logits_RV, token_ids_R, sequences)


def penalise(scores_RV: torch.Tensor, sequences: Seq[Sequence]) -> torch.Tensor:
    """Make the tokens that each row has seen, its prompt included, less likely."""
    seen = [sequence.token_ids if sequence.params.repetition_penalty != 1 else [] for sequence in sequences]
    rows_S = np.repeat(np.arange(len(seen)), [len(token_ids) for token_ids in seen])
    token_ids_S = np.concatenate([np.array(token_ids, np.int64) for token_ids in seen])
    flat_S = _column(rows_S * scores_RV.shape[1] + token_ids_S, torch.int64, scores_RV.device)
    is_seen_RV = torch.zeros_like(scores_RV, dtype=torch.bool).flatten().index_fill_(0, flat_S, True).view_as(scores_RV)
    penalty_R = _column([own.params.repetition_penalty for own in sequences], torch.float32, scores_RV.device)[:, None]
    penalised_RV = torch.where(scores_RV > 0, scores_RV / penalty_R, scores_RV * penalty_R)
    return torch.where(is_seen_RV, penalised_RV, scores_RV)


def _counted_penalties(sequence: Sequence) -> dict[int, float]:
    """Return what is added to the tokens of a continuation, for being there and for each time (OpenAI's reference)."""
    presence, frequency = sequence.params.presence_penalty, sequence.params.frequency_penalty
    counts = Counter(sequence.token_ids[sequence.num_prompt_tokens :] if presence or frequency else [])
    return {token_id: -(presence + frequency * count) for token_id, count in counts.items()}


def _add(scores_RV: torch.Tensor, added: Seq[Mapping[int, float]]) -> torch.Tensor:
    """Add values to some tokens of each row."""
    pairs = [
        (row * scores_RV.shape[1] + token_id, value) for row, own in enumerate(added) for token_id, value in own.items()
    ]
    flat_S = _column([at for at, _ in pairs], torch.int64, scores_RV.device)
    values_S = _column([value for _, value in pairs], torch.float32, scores_RV.device)
    return scores_RV.flatten().index_add(0, flat_S, values_S).view_as(scores_RV)


def allowed_tokens(scores_RV: torch.Tensor, params: Seq[SamplingParams]) -> torch.Tensor:
    """Return [R, V] bool: what top-k, then top-p, then min-p leave of scores already divided by the temperature.

    A row that sets none of them keeps every token, whatever the others set.
    """
    device = scores_RV.device
    min_p_R = _column([own.min_p for own in params], torch.float32, device)
    is_allowed_RV = scores_RV >= scores_RV.amax(dim=-1, keepdim=True) + min_p_R.log()[:, None]
    if all(own.top_k == 0 and own.top_p == 1 for own in params):
        return is_allowed_RV
    vocab_size = scores_RV.shape[1]
    top_k_R = _column([min(own.top_k or vocab_size, vocab_size) for own in params], torch.int64, device)
    top_p_R = _column([own.top_p for own in params], torch.float32, device)
    sorted_RV, order_RV = scores_RV.sort(dim=-1, descending=True, stable=True)
    is_top_RV = torch.arange(vocab_size, device=device) < top_k_R[:, None]
    probs_RV = sorted_RV.masked_fill(~is_top_RV, -torch.inf).softmax(dim=-1)
    before_RV = probs_RV.cumsum(dim=-1) - probs_RV
    # The sum before the last tokens may round up to 1, which must not cut a row that has no top-p.
    is_top_RV &= (before_RV < top_p_R[:, None]) | (top_p_R[:, None] == 1)
    return is_allowed_RV & torch.zeros_like(is_top_RV).scatter(1, order_RV, is_top_RV)


def uniforms(seeds: Seq[int], indices: Seq[int]) -> np.ndarray:
    """Return a float64 in [0, 1) for each pair of a seed and an index (SplitMix64, Steele et al. 2014, figure 13)."""
    with np.errstate(over="ignore"):
        keys = _mix(np.array([seed % 2**64 for seed in seeds], np.uint64) + np.uint64(0x9E3779B97F4A7C15))
        bits = _mix(keys + (np.array(indices, np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15))
    # 52 bits, so that the number times a sum in float64 is below that sum.
    fractions: np.ndarray = (bits >> np.uint64(12)).astype(np.float64) / 2**52
    return fractions


def _mix(z: np.ndarray) -> np.ndarray:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: np.ndarray = z ^ (z >> np.uint64(31))
    return mixed


def _draw(scores_RV: torch.Tensor, sequences: Seq[Sequence]) -> torch.Tensor:
    """Return [R] int64, drawn from what is allowed."""
    params, device = [sequence.params for sequence in sequences], scores_RV.device
    scores_RV = scores_RV / _column([own.temperature or 1.0 for own in params], torch.float32, device)[:, None]
    probs_RV = scores_RV.masked_fill(~allowed_tokens(scores_RV, params), -torch.inf).softmax(dim=-1)
    cumulated_RV = probs_RV.cumsum(dim=-1, dtype=torch.float64)
    uniform_R = uniforms([own.seed for own in sequences], [len(own.sampled_token_ids) for own in sequences])
    level_R1 = _column(uniform_R, torch.float64, device)[:, None] * cumulated_RV[:, -1:]
    # The first token whose sum exceeds the level; tokens of probability 0 do not raise it and are stepped over.
    drawn_R1 = torch.searchsorted(cumulated_RV, level_R1, right=True)
    return drawn_R1[:, 0].clamp_(max=scores_RV.shape[1] - 1)


def _with_logprobs(logits_RV: torch.Tensor, token_ids_R: torch.Tensor, sequences: Seq[Sequence]) -> Sampled:
    device = logits_RV.device
    num_top = max(sequence.params.num_logprobs or 0 for sequence in sequences)
    logprobs_RV = logits_RV.float().log_softmax(dim=-1)
    forced = [sequence.forced_token_id for sequence in sequences]
    forced_R = _column([-1 if token_id is None else token_id for token_id in forced], torch.int64, device)
    chosen_R = torch.where(forced_R < 0, token_ids_R, forced_R)
    own_R = logprobs_RV.gather(1, chosen_R[:, None])[:, 0]
    top_RP, top_ids_RP = logprobs_RV.topk(num_top, dim=-1)
    token_ids, own, top, top_ids = token_ids_R.tolist(), own_R.tolist(), top_RP.tolist(), top_ids_RP.tolist()
    found: list[TokenLogprobs | None] = []
    for row, sequence in enumerate(sequences):
        num_own = sequence.params.num_logprobs
        pairs = tuple(zip(top_ids[row][:num_own], top[row][:num_own], strict=True))
        found.append(None if num_own is None else TokenLogprobs(logprob=own[row], top=pairs))
    return Sampled(token_ids, found)


def _column(values: Seq[float] | np.ndarray, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    host = torch.as_tensor(values, dtype=dtype)
    # Only a copy from pinned memory is asynchronous, and torch.tensor pins no array of numpy's.
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host
