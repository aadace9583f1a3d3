"""Choosing the next token of every request of a step at once, from their logits.

A draw takes one uniform number per request and inverts the cumulative distribution, in the order of the vocabulary. The
number is a hash of the request's seed and of how many tokens it has sampled: no generator with a state, so that neither
batch mates nor preemption change what a request draws. Nothing waits for the device before the tokens are read.

Shapes: R sampled rows, V vocab.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch

from reference_engine.requests.outputs import TokenLogprobs
from reference_engine.requests.sampling import SamplingParams
from reference_engine.requests.sequence import Sequence
from reference_engine.scores import change_scores, column, token_logprobs

__all__ = ["Sampled", "allowed_tokens", "choose", "sample", "uniforms"]


@dataclass(frozen=True, slots=True)
class Sampled:
    """The choices of one step, row by row."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs | None]


def sample(logits_RV: torch.Tensor, sequences: Seq[Sequence]) -> Sampled:
    """Choose each row's next token; the lowest id among equally likely ones if nothing is drawn."""
    token_ids_R = choose(logits_RV, sequences)
    if all(sequence.params.num_logprobs is None for sequence in sequences):
        return Sampled(token_ids_R.tolist(), [None] * len(sequences))
    return Sampled(token_ids_R.tolist(), token_logprobs(logits_RV, token_ids_R, sequences))


def choose(logits_RV: torch.Tensor, sequences: Seq[Sequence]) -> torch.Tensor:
    """Return each row's next token, [R] int64 on the device; nothing waits for it."""
    params = [sequence.params for sequence in sequences]
    if all(asked.is_plain for asked in params):
        # max and not argmax: both give the first of equals, and on a CPU in bfloat16 this is six times faster.
        return logits_RV.max(dim=-1).indices
    scores_RV = change_scores(logits_RV.float(), sequences)
    token_ids_R = scores_RV.argmax(dim=-1)
    if any(asked.temperature for asked in params):
        drawn_R = _draw(scores_RV, sequences)
        is_drawn_R = column([asked.temperature > 0 for asked in params], torch.bool, scores_RV.device)
        token_ids_R = torch.where(is_drawn_R, drawn_R, token_ids_R)
    return token_ids_R


def allowed_tokens(scores_RV: torch.Tensor, params: Seq[SamplingParams]) -> torch.Tensor:
    """Return [R, V] bool: what top-k, then top-p, then min-p leave of scores already divided by the temperature.

    A row that sets none of them keeps every token, whatever the others set.
    """
    device = scores_RV.device
    min_p_R = column([asked.min_p for asked in params], torch.float32, device)
    is_allowed_RV = scores_RV >= scores_RV.amax(dim=-1, keepdim=True) + min_p_R.log()[:, None]
    if all(asked.top_k == 0 and asked.top_p == 1 for asked in params):
        return is_allowed_RV
    vocab_size = scores_RV.shape[1]
    top_k_R = column([min(asked.top_k or vocab_size, vocab_size) for asked in params], torch.int64, device)
    top_p_R = column([asked.top_p for asked in params], torch.float32, device)
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
    scores_RV = scores_RV / column([asked.temperature or 1.0 for asked in params], torch.float32, device)[:, None]
    probs_RV = scores_RV.masked_fill(~allowed_tokens(scores_RV, params), -torch.inf).softmax(dim=-1)
    cumulated_RV = probs_RV.cumsum(dim=-1, dtype=torch.float64)
    seeds = [sequence.seed for sequence in sequences]
    num_sampled = [len(sequence.sampled_token_ids) for sequence in sequences]
    uniform_R = uniforms(seeds, num_sampled)
    level_R1 = column(uniform_R, torch.float64, device)[:, None] * cumulated_RV[:, -1:]
    # The first token whose sum exceeds the level; tokens of probability 0 do not raise it and are stepped over.
    drawn_R1 = torch.searchsorted(cumulated_RV, level_R1, right=True)
    return drawn_R1[:, 0].clamp_(max=scores_RV.shape[1] - 1)
