"""Choices of a router: which experts a row goes to, judged as tokens are.

A row may choose other experts than the truth does on the same input if the truth's own scores are as near as rounding
makes them: a tie. What the experts then compute is judged on the engine's choice.
"""

import torch

from harness.base.metrics import rounding_unit
from harness.judge.compare.replay import TapRows


def choice_errors(rows: TapRows) -> torch.Tensor:
    """Return how far each row's choice is from the truth's, as a multiple of what rounding allows: [rows] float64.

    With s the truth's scores, the distance is the highest of those that the truth chose and the engine did not, less
    the lowest of those that the engine chose and the truth did not; infinite where an index does not exist or is there
    twice. Scores of -inf are masked: where there are too few others, it does not matter which of them are chosen.
    Rounding allows twice the largest error that HF's own scores have in the engine's dtype, in that row or in the
    median of all rows, and at least one rounding of the scores.
    """
    scores = rows.value.scores
    assert scores is not None
    s = scores[rows.places.to(scores.device)].to(torch.float64).reshape(-1, scores.shape[-1])
    chosen, meant = (x.to(s.device, torch.int64).reshape(len(s), -1) for x in (rows.actual, rows.expected))
    distance = _distances(s, chosen, meant).view(len(rows.places), -1).amax(dim=1)
    noise = torch.zeros_like(distance)
    if rows.control_scores is not None:
        noise = _noise(s, rows.control_scores.reshape(s.shape)).view(len(rows.places), -1).amax(dim=1)
    allowed = 2 * noise.clamp(min=float(noise.median()))
    return torch.where(distance == 0, 0.0, distance / allowed).cpu()


def _distances(s: torch.Tensor, chosen: torch.Tensor, meant: torch.Tensor) -> torch.Tensor:
    """[rows] float64, of scores [rows, n], the engine's indices [rows, k] and the truth's [rows, k or fewer]."""
    is_seen = s > -torch.inf
    ours, theirs = _members(chosen, s.shape[1]), _members(meant, s.shape[1]) & is_seen
    missed = s.masked_fill(~(theirs & ~ours), -torch.inf).amax(dim=1)
    extra = s.masked_fill(~(ours & ~theirs), torch.inf).amin(dim=1)
    distance = (missed - extra).clamp(min=0).nan_to_num(0.0, posinf=torch.inf)
    is_full = theirs.sum(dim=1) == chosen.shape[1]
    has_nonsense = (ours.sum(dim=1) < chosen.shape[1]) & (is_full | (missed > -torch.inf))
    return distance.masked_fill(has_nonsense, torch.inf)


def _members(indices: torch.Tensor, count: int) -> torch.Tensor:
    """[rows, count] bool: which of so many scores are named by indices [rows, k], of which some may not exist."""
    inside = (indices >= 0) & (indices < count)
    named = torch.zeros(len(indices), count + 1, dtype=torch.bool, device=indices.device)
    return named.scatter(1, indices.where(inside, count), True)[:, :count]


def _noise(s: torch.Tensor, control: torch.Tensor) -> torch.Tensor:
    """[rows] float64: the largest error of HF's own scores, at least a rounding."""
    is_seen = s.isfinite() & control.isfinite()
    error = (control.to(torch.float64) - s).abs().where(is_seen, 0).amax(dim=1)
    return error.clamp(min=rounding_unit(control.dtype) * s.abs().where(is_seen, 0).amax(dim=1))
