"""Figures of one operation for the report."""

import torch

from harness.compare.align import Rows
from harness.compare.figures import _control_figures
from harness.compare.local_judge import LocalErrors


def errors(control, bound):
    at = torch.arange(len(control))
    return LocalErrors(
        rows=Rows(request=torch.zeros_like(at), position=at, step=torch.zeros_like(at)),
        roundings=torch.ones(len(control)), bound=torch.tensor(bound), bad=torch.zeros(len(control), dtype=torch.bool),
        exact=False, control=torch.tensor(control),
    )  # fmt: skip


def test_a_control_without_an_error_takes_nothing_of_a_bound_of_zero():
    assert _control_figures(errors([0.0, 0.0], [0.0, 2.0]))["control_bound_share_max"] == 0.0


def test_the_largest_share_of_a_bound_and_the_largest_error_may_be_of_different_rows():
    found = _control_figures(errors([1.0, 3.0, torch.inf], [2.0, 30.0, 1.0]))
    assert found == {"control_roundings_max": 3.0, "control_bound_share_max": 0.5}
