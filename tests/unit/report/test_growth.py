"""The plot of growth marks what the heat map marks."""

from dataclasses import replace

import pytest

from harness.report.page.check_view import growth_along_depth
from harness.results.check import Verdict

from .examples import explained_run


@pytest.mark.parametrize(("verdict", "styles"), [("bug", ["wrong"]), ("systematic", ["wrong"]), ("noise", [])])
def test_dots_of_wrong_operations_are_marked(verdict, styles):
    run = explained_run()
    culprit = run.first_divergence.tap
    index = next(at for at, tap in enumerate(run.taps) if tap.name != culprit and tap.propagated_ratio_max is not None)
    taps = list(run.taps)
    taps[index] = replace(taps[index], verdict=Verdict(verdict))
    plot = growth_along_depth(replace(run, taps=tuple(taps)))
    marked = [dot.style for dot in plot.dots if dot.title.startswith(f"{taps[index].name} ") and dot.style]
    assert marked == styles
