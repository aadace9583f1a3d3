"""Verdicts: from the best to the worst, each with what the reports need to know of it."""

import pickle

import pytest

from harness.report.check.table import Role
from harness.report.check.terminal import _STYLES
from harness.results.check import Verdict


def test_verdicts_stand_from_the_best_to_the_worst():
    words = ["exact", "noise", "convention", "unjudged", "systematic", "missing", "bug"]
    assert sorted(Verdict, key=lambda verdict: verdict.severity) == [Verdict(word) for word in words]


def test_only_an_operation_that_is_at_fault_is_wrong():
    assert [verdict for verdict in Verdict if verdict.is_wrong] == [Verdict.SYSTEMATIC, Verdict.BUG]
    assert [verdict for verdict in Verdict if verdict.failure] == [Verdict.SYSTEMATIC, Verdict.MISSING, Verdict.BUG]


@pytest.mark.parametrize("verdict", Verdict)
def test_every_verdict_is_its_word_and_can_be_shown(verdict):
    assert f"{verdict}" == verdict.value
    assert verdict.color in _STYLES
    assert not verdict.failure or Role(verdict.failure)
    assert pickle.loads(pickle.dumps(verdict)) is verdict
