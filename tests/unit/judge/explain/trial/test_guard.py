"""An explanation that raises drops itself: no finding changes, and the note says which it was and where it raised."""

from dataclasses import replace

import pytest

from harness.errors import Code
from harness.formats.taps import KINDS, Operation
from harness.judge.explain import explain_run
from harness.judge.explain.causes import causes_of, stages_of
from harness.judge.explain.core.wrong_operation import Hypothesis
from harness.judge.explain.trial import direction, ranking
from harness.judge.explain.trial.ranking import rank_hypotheses

from ..toys import failure_of, random

CAUSES = [(kind, at) for kind in KINDS for at in range(len(causes_of(kind)))]


def raising(explain):
    def raises(failure):
        yield from ()
        raise ZeroDivisionError("planted")

    raises.__name__ = explain.__name__
    return raises


@pytest.mark.parametrize(("kind", "at"), CAUSES)
def test_each_explanation_may_raise(monkeypatch, kind, at):
    """Beside one that fits, which is named with a note of the other."""
    explain = causes_of(kind)[at]
    actual, expected = random(12, 32, seed=1), random(12, 32)

    def fits(failure):
        yield Hypothesis(cause="this one", output=failure.actual.clone())

    monkeypatch.setattr(ranking, "stages_of", lambda _kind: [[raising(explain), fits]])
    explanation = rank_hypotheses(failure_of(Operation(tap="t", kind=kind), actual, expected), "every row")
    assert (explanation.cause, explanation.is_cause, explanation.num_explained) == ("this one", True, 12)
    note = (
        f"could not be tried: {explain.__name__}: ZeroDivisionError: planted (harness/judge/explain/trial/ranking.py:"
    )
    assert explanation.detail.startswith(note)


@pytest.mark.parametrize("code", [Code.LOCAL_ERROR, Code.SYSTEMATIC_ERROR])
def test_all_of_them_may_raise(bench_of, monkeypatch, code):
    one = bench_of("gemma2")
    size = 1.5 if code is Code.LOCAL_ERROR else 1 + 2e-8 * 3
    taps = [op.tap for op in one.hf.graph if op.layer == 1 and op.tap in one.recording.steps[0].tap_names]
    taps.append(one.hf.graph.logits)
    recording = one.planted({tap: one.tap(tap) * size for tap in taps})
    comparison = one.compare(recording)
    sound = explain_run(comparison, recording, one.golden, one.hf)
    monkeypatch.setattr(ranking, "stages_of", lambda kind: [list(map(raising, stage)) for stage in stages_of(kind)])
    monkeypatch.setattr(direction, "causes_of", lambda kind: list(map(raising, causes_of(kind))))
    result = explain_run(comparison, recording, one.golden, one.hf)
    assert [replace(finding, explanation=None) for finding in result.findings] == [
        replace(finding, explanation=None) for finding in sound.findings
    ]
    assert (result.outcome, result.taps) == (sound.outcome, sound.taps)
    explained = [finding for finding in result.findings if finding.code is code and finding.explanation is not None]
    assert explained
    for item in explained:
        assert not item.explanation.is_cause
        for explain in causes_of(one.hf.graph[item.tap].kind):
            assert f"{explain.__name__}: ZeroDivisionError: planted (harness/judge/explain/" in item.explanation.detail
