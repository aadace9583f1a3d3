"""Limits of rounding errors inside of attention.

`B` requests, `T` queries, `S` keys, `N` query heads, `K` KV heads, `H` head size.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from harness.oracle.watch import AttentionCall

_SCORE_BYTES = 16 << 20
"""Scores held at a time. Beyond 32 MB the C library maps and clears fresh memory for each tensor, and sensitivities
take twice as long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSensitivity:
    """The sensitivity of each row of attention, softmax(q k^T scale + mask) v, to rounding inside of it.

    With p the probabilities and o the context of a row; all sums run over the heads as well.
    """

    amplification: torch.Tensor
    """[B, T]: sqrt(sum_j p_j^2 ||v_j||^2) / ||o||, each product p_j v_j rounded by itself."""
    score_sensitivity: torch.Tensor
    """[B, T]: sqrt(sum_j p_j^2 b_j^2 ||v_j - o||^2) / ||o||, each score rounded by itself, its sum at every channel.

    With x_i = q_i k_ji scale, b_j^2 = H (sum_i x_i^2 + (sum_i x_i)^2 / 3). The sums of the first channels are what is
    rounded: if one channel makes most of a score, all that follow it are as large as the score. In a random order the
    squares of all H sums add up to H (sum_i x_i^2 / 6 + (sum_i x_i)^2 / 3) on average."""


def attention_sensitivity(call: AttentionCall) -> AttentionSensitivity:
    """Compute the sensitivities, in float32: they are factors of a bound."""
    parts = [_sensitivities(call, *query) for query in _some_queries(call, *_in_float32(call))]
    amplification, sensitivity = (torch.cat(column, dim=1) for column in zip(*parts, strict=True))
    return AttentionSensitivity(amplification=amplification, score_sensitivity=sensitivity)


def score_slope(call: AttentionCall) -> torch.Tensor:
    """Return how the context moves with the logarithm of the scores' factor: [B, T, N*H] float32.

    With scores s, probabilities p and values v it is sum_j p_j (s_j - sum_i p_i s_i) v_j.
    """
    parts = []
    for query, key, value, visible in _some_queries(call, *_in_float32(call)):
        scores, p = _scores(call, query, key, visible)
        centered = scores - (p * scores).sum(dim=-1, keepdim=True)
        parts.append((p * centered) @ value)
    return torch.cat(parts, dim=2).transpose(1, 2).flatten(2)


def probabilities(
    call: AttentionCall, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield probabilities [B, N, t, s] of some queries at a time, and the values [B, N, s, H] that they weigh.

    Args:
        call: says what is seen, and how scores are scaled and capped.
        query: [B, N, T, H] in the place of the call's, and so on.
        key: [B, K, S, H].
        value: [B, K, S, H].
    """
    for some, own_key, own_value, visible in _some_queries(call, query, key, value):
        yield _scores(call, some, own_key, visible)[1], own_value


def _in_float32(call: AttentionCall) -> Iterator[torch.Tensor]:
    return (x.to(torch.float32) for x in (call.query, call.key, call.value))


def _some_queries(
    call: AttentionCall, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Yield queries, as many as memory is meant for, with keys and values of their heads, and what they may see.

    Where not all queries come at once, these are the keys and values up to the last that one of them sees.
    """
    num_groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(num_groups, dim=1) for x in (key, value))
    step = _queries_at_a_time(query, key)
    for at in range(0, query.shape[2], step):
        some = slice(at, at + step)
        visible = visible_keys(call, some)
        num_keys = key.shape[2]
        if step < query.shape[2]:
            seen = visible.any(dim=2).flatten(0, 1).any(dim=0).nonzero()
            num_keys = int(seen[-1]) + 1 if len(seen) else 1
        yield query[:, :, some], key[:, :, :num_keys], value[:, :, :num_keys], visible[..., :num_keys]


def _queries_at_a_time(query: torch.Tensor, key: torch.Tensor) -> int:
    return max(1, _SCORE_BYTES // (query.itemsize * query.shape[0] * query.shape[1] * max(1, key.shape[2])))


def in_pieces(call: AttentionCall) -> Iterator[AttentionCall]:
    """Yield the call of some queries after the other, as many at a time as memory is meant for; of all if it is."""
    num_queries, step = call.query.shape[2], _queries_at_a_time(call.query, call.key)
    if num_queries <= step:
        yield call
        return
    for positions in torch.arange(num_queries).split(step):
        yield of_queries(call, positions)


def of_queries(call: AttentionCall, positions: torch.Tensor) -> AttentionCall:
    """Return the call of some of its queries, [n] int64, which see what they saw."""
    at, mask = positions.to(call.query.device), call.mask
    if mask is None:
        mask = visible_keys(call, at)
    elif mask.shape[2] > 1:
        mask = mask.index_select(2, at)
    return replace(call, query=call.query.index_select(2, at), mask=mask)


def visible_keys(call: AttentionCall, queries: torch.Tensor | slice = slice(None)) -> torch.Tensor:
    """Return [B or 1, 1, T, S] bool: which keys each query may see, or some of the queries."""
    num_queries, num_keys = call.query.shape[2], call.key.shape[2]
    if call.mask is None:
        device = call.query.device
        positions = torch.arange(num_keys - num_queries, num_keys, device=device)[queries]
        return (torch.arange(num_keys, device=device)[None] <= positions[:, None])[None, None]
    mask = call.mask[..., :num_keys]
    if mask.shape[2] > 1:
        mask = mask[:, :, queries]
    return mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2


def scaling(call: AttentionCall) -> float:
    """Return the factor of the scores."""
    scale = call.options.get("scaling")
    if scale is None:
        scale = getattr(call.module, "scaling", None)
    return float(call.query.shape[-1] ** -0.5 if scale is None else scale)


def _sensitivities(
    call: AttentionCall, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, visible: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the two sensitivities of some queries, [B, t]."""
    scores, p = _scores(call, query, key, visible)
    o = p @ value
    v2, p2 = value.square().sum(-1), p.square()
    norm = o.square().sum(dim=(1, 3)).sqrt()
    amplification = (p2 @ v2[..., None]).sum(dim=(1, 3)).sqrt() / norm
    if call.options.get("softcap") is not None:
        scores = query @ key.transpose(2, 3) * scaling(call)
    squares = query.square() @ key.square().transpose(2, 3) * scaling(call) ** 2
    bound2 = query.shape[-1] * (squares + scores.square() / 3)
    spread = v2[:, :, None] - 2 * o @ value.transpose(2, 3) + o.square().sum(-1)[..., None]
    sensitivity = (p2 * bound2 * spread).sum(dim=(1, 3)).clamp(min=0).sqrt() / norm
    return amplification, sensitivity


def _scores(
    call: AttentionCall, query: torch.Tensor, key: torch.Tensor, visible: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scores, 0 where they are masked, and probabilities of some queries, [B, N, t, S] each."""
    scale, softcap, sinks = scaling(call), call.options.get("softcap"), call.options.get("s_aux")
    scores = query @ key.transpose(2, 3) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~visible, -torch.inf)
    if sinks is not None:
        column = sinks.reshape(1, -1, 1, 1).to(scores.dtype).expand(*scores.shape[:3], 1)
        p = torch.cat((scores, column), dim=-1).softmax(dim=-1)[..., :-1]
    else:
        p = scores.softmax(dim=-1)
    return scores.masked_fill(~visible, 0.0), p
