"""Distances between distributions over the next token."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Distance:
    """Of one set of distributions from another, over all rows."""

    mean: float
    median: float
    p99: float
    max: float
    same_top: float


def distance(truth: Sequence[torch.Tensor], actual: Sequence[torch.Tensor]) -> Distance:
    """Return the KL from the truth, in nats.

    Both are logarithms of probabilities, [tokens, vocabulary] of each sequence.
    """
    rows = torch.cat([kl(ours, theirs) for ours, theirs in zip(truth, actual, strict=True)])
    pairs = zip(truth, actual, strict=True)
    same = torch.cat([ours.argmax(dim=1) == theirs.argmax(dim=1) for ours, theirs in pairs])
    return Distance(
        mean=float(rows.mean()),
        median=float(rows.median()),
        p99=float(rows.quantile(0.99)),
        max=float(rows.max()),
        same_top=float(same.double().mean()),
    )


def kl(truth: torch.Tensor, actual: torch.Tensor) -> torch.Tensor:
    """Return the KL of each row, [rows] float64; rounding may make a sum of zero slightly negative."""
    log_p, log_q = truth.double(), actual.double()
    terms = log_p.exp() * (log_p - log_q)
    return terms.nan_to_num(nan=math.inf).sum(dim=1).clamp(min=0)


def perplexity(distributions: Sequence[torch.Tensor], sequences: Sequence[Sequence[int]]) -> float:
    """Return exp of the mean negative logarithm of each next token's probability."""
    losses = [
        -rows[:-1].double().gather(1, torch.tensor(ids[1:])[:, None])
        for rows, ids in zip(distributions, sequences, strict=True)
    ]
    return float(torch.cat(losses).mean().exp())
