"""Log probabilities of tokens under a distribution: temperature, then what min-p, top-k and top-p leave."""

from collections.abc import Sequence

import torch

from harness.campaigns.rollout.setting import Meaning
from harness.formats.rollout import Sampling


def token_logprobs(
    logits: torch.Tensor, tokens: torch.Tensor, sampling: Sequence[Sampling], meaning: Meaning
) -> torch.Tensor:
    """Return the log probability of each row's token, [rows] float64.

    Args:
        logits: [rows, vocabulary] float64.
        tokens: [rows] int64.
        sampling: of each row.
        meaning: of the log probability.
    """
    own = [each.temperature if meaning.temperature is None else meaning.temperature for each in sampling]
    scaled = logits / torch.tensor(own, dtype=logits.dtype, device=logits.device)[:, None]
    if meaning.is_truncated:
        scaled = scaled.masked_fill(~_left(scaled, tokens, sampling), -torch.inf)
    return scaled.log_softmax(dim=-1).gather(1, tokens[:, None])[:, 0]


def _left(logits: torch.Tensor, tokens: torch.Tensor, sampling: Sequence[Sampling]) -> torch.Tensor:
    """[rows, vocabulary] bool: what can be chosen. The token that was chosen is there, if only by a rounding."""

    def column(values: Sequence[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=logits.dtype, device=logits.device)[:, None]

    order = logits.argsort(dim=-1, descending=True)
    ranked = logits.gather(1, order)
    least = column([each.min_p for each in sampling]).log() + ranked[:, :1]
    most = column([each.top_k or logits.shape[1] for each in sampling])
    kept = (ranked >= least) & (torch.arange(logits.shape[1], device=logits.device)[None] < most)
    chances = ranked.masked_fill(~kept, -torch.inf).softmax(dim=-1)
    before = chances.cumsum(dim=-1) - chances
    kept &= before < column([each.top_p for each in sampling])
    kept[:, 0] = True
    left = torch.zeros_like(kept).scatter(1, order, kept)
    return left.scatter(1, tokens[:, None], True)
