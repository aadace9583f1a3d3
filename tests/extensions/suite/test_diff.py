"""Two runs of a suite: changes are found, and the noise that all cases share is none."""

import json
import random

import pytest

from harness.extensions.suite.history import diff_suites
from harness.extensions.suite.history_report import diff_json, diff_text
from harness.extensions.suite.result import CaseResult, CaseVerdict, SuiteResult


def case(name: str, verdict: str = "pass", *, tap: str = "", seconds: float = 1.0, **figures: float) -> CaseResult:
    place = {"tap": tap, "request": 0, "position": 1, "schedule": "plain"} if tap else None
    return CaseResult(
        name=name, verdict=CaseVerdict(verdict), labels={}, seconds=seconds, figures=figures, first_divergence=place,
        code=None if verdict == "pass" else "H040",
    )  # fmt: skip


def diff(old, new):
    return diff_suites(SuiteResult(cases=tuple(old)), SuiteResult(cases=tuple(new)))


def names(pairs):
    return [new.name for _, new in pairs]


def test_every_change_of_a_verdict_has_its_place():
    old = [case("same"), case("breaks"), case("mended", "mismatch", tap="a"), case("moves", "mismatch", tap="a"),
           case("stays", "mismatch", tap="a"), case("gone")]  # fmt: skip
    new = [case("same"), case("breaks", "error"), case("mended"), case("moves", "mismatch", tap="b"),
           case("stays", "mismatch", tap="a"), case("fresh"), case("fresh and wrong", "mismatch", tap="c")]  # fmt: skip
    changes = diff(old, new)
    assert names(changes.new_failures) == ["breaks"]
    assert names(changes.new_passes) == ["mended"]
    assert names(changes.changed_failures) == ["moves"]
    assert [item.name for item in changes.added] == ["fresh", "fresh and wrong"]
    assert [failure.name for failure in changes.added_failures] == ["fresh and wrong"]
    assert [item.name for item in changes.removed] == ["gone"]
    assert changes.num_same == 2
    text = diff_text(changes)
    assert text.startswith("new failures (1)\n  breaks\n    pass -> error (H040: )")
    assert json.loads(json.dumps(diff_json(changes), allow_nan=False))["new_failures"][0]["new"]["name"] == "breaks"


@pytest.fixture
def noisy():
    """Sixty cases twice: everything takes 1.6 times as long on the busier machine, give or take 10 %."""
    draw = random.Random(3)
    old = {f"c{at}": draw.uniform(0.5, 20.0) for at in range(60)}
    return old, {name: 1.6 * seconds * draw.uniform(0.9, 1.1) for name, seconds in old.items()}


def test_a_busier_machine_makes_no_case_slower_than_the_others(noisy):
    old, new = ([case(name, seconds=seconds) for name, seconds in times.items()] for times in noisy)
    assert diff(old, new).slower == ()


def test_a_case_that_is_slower_than_the_others_is_found(noisy):
    old, new = noisy
    new["c7"] *= 2.0
    new["c8"] /= 2.0
    changes = diff(*([case(name, seconds=seconds) for name, seconds in times.items()] for times in (old, new)))
    assert [item.name for item in changes.slower] == ["c7"], "a faster case is no finding"
    assert changes.slower[0].usual_ratio == pytest.approx(1.6, rel=0.1)
    assert "seconds" in diff_text(changes)


def test_a_figure_that_moved_beyond_the_others_is_found_and_equal_ones_are_not():
    old = [case(f"c{at}", bound_share_max=0.5, kl_max=1e-12) for at in range(20)]
    new = [case(f"c{at}", bound_share_max=0.5, kl_max=3e-12) for at in range(19)]
    changes = diff(old, [*new, case("c19", bound_share_max=0.9, kl_max=1e-3)])
    assert [(item.name, item.figure) for item in changes.moved] == [("c19", "bound_share_max"), ("c19", "kl_max")]


def test_of_a_few_cases_only_a_factor_of_two_is_told():
    old = [case("a", seconds=1.0), case("b", seconds=1.0)]
    assert diff(old, [case("a", seconds=1.9), case("b", seconds=1.0)]).slower == ()
    assert [item.name for item in diff(old, [case("a", seconds=2.1), case("b")]).slower] == ["a"]
