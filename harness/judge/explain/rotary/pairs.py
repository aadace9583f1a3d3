"""Ways to turn some pairs of a head otherwise than the rest, or all of them by other tables than cosine and sine.

`R` rows, `N` heads, `P` pairs of a head.
"""

import torch

from harness.judge.explain.core.failure import Failure
from harness.judge.explain.core.hypothesis import Hypothesis
from harness.judge.explain.rotary.rotation import Causes, pairs_of, turned_by, with_rotation
from harness.oracle.rotation import Rotation

_CLEARLY = 0.1
"""Of what a pair is off by at its own frequency, what may be left at another one that is said to be used."""


@with_rotation
def frequencies_of_other_pairs(failure: Failure, own: Rotation) -> Causes:
    """Some pairs do not turn, or turn as fast as another pair should."""
    zero = len(own.frequencies)
    pairs, candidates = torch.arange(zero), torch.cat((own.frequencies, torch.zeros(1)))  # that of each pair, and none
    left = _left_by_frequency(failure, own, candidates)  # [P, P + 1]
    is_changed = left.amin(dim=1) < _CLEARLY * left[pairs, pairs]
    is_still = left[:, zero] < _CLEARLY * left[pairs, pairs]
    runs = _runs(is_changed.nonzero()[:, 0].tolist())
    if not runs or bool(is_still.all()):  # no pair turns: that has a name of its own
        return
    if torch.equal(is_still, is_changed):
        cause = "some pairs of a head do not turn: their frequencies are zero"
        source = torch.where(is_changed, zero, pairs)
        freedom = sum(1 if run[0] == 0 or run[-1] == zero - 1 else 2 for run in runs)  # where each begins and ends
    else:
        cause = "the frequencies of the pairs are in another order"
        source = torch.where(is_changed, left[:, :zero].argmin(dim=1), pairs)
        freedom = int(is_changed.sum())
    yield Hypothesis(
        cause=cause,
        output=own.turned(own.heads(failure.inputs[0]), *own.angles(failure.positions, candidates[source])),
        detail=f"{_named(runs)} of {zero}",
        freedom=freedom,
    )


def _left_by_frequency(failure: Failure, own: Rotation, candidates: torch.Tensor) -> torch.Tensor:
    """Return the energy that is left of each pair if it turns at each frequency: [P, candidates]."""
    before, after = pairs_of(failure, own)
    energy = (before * own.scaling).abs().square().sum(dim=(0, 1)) + after.abs().square().sum(dim=(0, 1))  # [P]
    phases = own.phases(failure.positions, candidates)  # [R, candidates]
    turned = turned_by(failure, own) * own.scaling  # [R, P]
    alike = (turned.T @ torch.polar(torch.ones_like(phases), -phases)).real
    return (energy[:, None] - 2 * alike).clamp(min=0)


def _runs(numbers: list[int]) -> list[list[int]]:
    """Cut numbers in ascending order into runs of neighbours."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return runs


def _named(runs: list[list[int]]) -> str:
    return "pairs " + ", ".join(f"{run[0]} to {run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


@with_rotation
def other_tables(failure: Failure, own: Rotation) -> Causes:
    """Cosine and sine stand in each other's place, or one of them is left out."""
    heads = own.heads(failure.inputs[0])
    cos, sin = own.angles(failure.positions)
    nothing = torch.zeros_like(cos)
    for cause, table in {
        "cosine and sine of the rotary table are exchanged": (sin, cos),
        "the rotary table's sine is left out: only the cosine is applied": (cos, nothing),
        "the rotary table's cosine is left out: only the sine is applied": (nothing, sin),
    }.items():
        yield Hypothesis(cause=cause, output=own.turned(heads, *table))


EXPLANATIONS = (frequencies_of_other_pairs, other_tables)
