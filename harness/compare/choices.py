"""Choices of a router: which experts a row goes to, judged as tokens are.

A row may choose other experts than the truth does on the same input if the truth's own scores are as near as rounding
makes them: a tie. What the experts then compute is judged on the engine's choice.
"""

import torch

from harness.compare.replay import TapRows, are_indices
from harness.metrics import rounding_unit


def choice_errors(rows: TapRows) -> torch.Tensor:
    """Return how far each row's choice is from the truth's, as a multiple of what rounding allows: [rows] float64.

    With s the truth's scores, the distance is the lowest score that the truth chose less the lowest that the engine
    chose; infinite for an index that does not exist and for one that is there twice. Rounding allows twice the largest
    error that HF's own scores have in the engine's dtype, in that row or in the median of all rows, and at least one
    rounding of the scores.
    """
    scores, control = rows.value.scores, rows.control_scores
    assert scores is not None
    num_rows, num_chosen = len(rows.places), rows.value.rows.shape[-1]
    s = scores[rows.places.to(scores.device)].to(torch.float64).reshape(num_rows, -1, scores.shape[-1])
    chosen, meant = (x.to(s.device, torch.int64).view(num_rows, -1, num_chosen) for x in (rows.actual, rows.expected))
    is_choice = are_indices(chosen, s.shape[-1]) & ~(chosen.sort(dim=-1).values.diff(dim=-1) == 0).flatten(1).any(dim=1)
    best, own = s.gather(-1, meant).amin(dim=-1), s.gather(-1, chosen.clamp(0, s.shape[-1] - 1)).amin(dim=-1)
    distance = torch.where(is_choice, (best - own).clamp(min=0).amax(dim=1), torch.inf)
    noise = torch.zeros_like(distance)
    if control is not None:
        noise = (control.to(torch.float64).view_as(s) - s).abs().flatten(1).amax(dim=1)
        noise = noise.clamp(min=rounding_unit(control.dtype) * s.abs().flatten(1).amax(dim=1))
    allowed = 2 * noise.clamp(min=float(noise.median()))
    return torch.where(distance == 0, 0.0, distance / allowed).cpu()
