"""Choices of a router: which experts a row goes to, judged as tokens are.

A row may choose other experts than the truth does on the same input if the truth's own scores are as near as rounding
makes them: a tie. What the experts then compute is judged on the engine's choice.
"""

import torch

from harness.compare.replay import TapRows


def choice_errors(rows: TapRows) -> torch.Tensor:
    """Return how far each row's choice is from the truth's, as a multiple of what rounding allows: [rows] float64.

    With s the truth's scores, the distance is the lowest score that the truth chose less the lowest that the engine
    chose; rounding allows twice the largest error that HF's own scores have in the engine's dtype, in that row or in the
    median of all rows.
    """
    scores, control = rows.value.scores, rows.control_scores
    chosen = rows.actual.to(torch.int64)
    if scores is None:
        return (chosen.sort(dim=1).values != rows.expected.sort(dim=1).values).any(dim=1).to(torch.float64).cpu() * 2
    s = scores[rows.places.to(scores.device)].to(torch.float64)
    is_known = (chosen >= 0) & (chosen < s.shape[1])
    best = s.gather(1, rows.expected.to(torch.int64)).amin(dim=1)
    own = s.gather(1, chosen.to(s.device).clamp(0, s.shape[1] - 1)).amin(dim=1)
    distance = torch.where(is_known.all(dim=1).to(s.device), (best - own).clamp(min=0), torch.inf)
    noise = torch.zeros_like(distance) if control is None else (control.to(torch.float64) - s).abs().amax(dim=1)
    allowed = 2 * noise.clamp(min=float(noise.median()))
    return torch.where(distance == 0, 0.0, distance / allowed).cpu()
