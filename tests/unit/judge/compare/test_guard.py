"""A convention that raises drops itself: no verdict changes, and the finding says which it was and where it raised."""

from dataclasses import replace

import pytest

from harness.errors import Code, HarnessError
from harness.formats.taps import KINDS, Kind
from harness.judge.compare import conventions as registry
from harness.judge.compare import row_judge
from harness.judge.compare.evidence import guarded

CONVENTIONS = registry.all_conventions()
WRONG = (
    "model.layers.0.self_attn.q_proj",
    "model.layers.1.q_rope",
    "model.layers.0.attention",
    "model.layers.0.mlp.act",
    "model.norm",
    "logits",
)


def test_what_was_raised_is_noted_with_its_place():
    failures = []
    for _ in range(2):
        with guarded("a convention", failures):
            registry.attention.scaling(None)
    (note,) = failures
    assert note.startswith("a convention: AttributeError: 'NoneType' object has no attribute")
    assert note.rpartition(":")[0].endswith("(harness/oracle/attention.py")
    assert note.rpartition(":")[2].rstrip(")").isdigit()


def test_what_others_raise_is_noted_too():
    failures = []
    with guarded("a convention", failures):
        raise KeyError
    assert failures[0].startswith("a convention: KeyError (test_guard.py:")


@pytest.mark.parametrize("error", [HarnessError(Code.STEP_ALTERED, "altered"), KeyboardInterrupt()])
def test_what_the_reader_must_know_is_raised(error):
    with pytest.raises(type(error)), guarded("a convention", []):
        raise error


def raising(convention):
    def alternatives(_subject):
        yield from ()
        raise ZeroDivisionError(convention.name)

    return replace(convention, alternatives=alternatives)


@pytest.fixture(scope="module")
def wrong(bench, tmp_path_factory):
    """A recording with a wrong operation of every kind that a convention is for; its logits are capped."""
    one = bench("gemma2")
    assert {one.hf.graph[tap].kind for tap in WRONG} == {
        kind for convention in CONVENTIONS for kind in convention.kinds
    }
    copy = one.recorded()
    for step in copy.computing():
        for tap in WRONG:
            if tap in step.taps:
                step.taps[tap] = step.taps[tap] * 1.5
    return one, copy.write(tmp_path_factory.mktemp("wrong") / "r")


def judged(wrong, monkeypatch, conventions):
    one, recording = wrong
    monkeypatch.setattr(registry, "all_conventions", lambda: tuple(conventions))
    return one.compare(recording)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("number", range(len(CONVENTIONS)))
def test_each_convention_may_raise(wrong, monkeypatch, number):
    conventions = list(CONVENTIONS)
    own = conventions[number]
    without = judged(wrong, monkeypatch, [convention for convention in conventions if convention is not own])
    conventions[number] = raising(own)
    result = judged(wrong, monkeypatch, conventions)
    assert [(tap.name, tap.verdict) for tap in result.taps] == [(tap.name, tap.verdict) for tap in without.taps]
    for finding, other in zip(result.findings, without.findings, strict=True):
        message, _, note = finding.message.partition("; conventions that could not be tried: ")
        assert message == other.message
        is_noted = f"{own.name}: ZeroDivisionError: {own.name} (harness/judge/compare/row_judge.py:" in note
        assert is_noted == (wrong[0].hf.graph[finding.tap].kind in own.kinds)
    assert {finding.tap for finding in result.findings} >= set(WRONG)


def test_a_convention_whose_numbers_raise(wrong, monkeypatch):
    """What a convention yields computes later: that is guarded as well."""

    def expected():
        raise ValueError("late")

    (eager, *_) = (convention for convention in CONVENTIONS if Kind.NORM in convention.kinds)
    late = row_judge.Rounding(name="late", model=KINDS[Kind.NORM].error_model, expected=expected)
    result = judged(wrong, monkeypatch, [replace(eager, alternatives=lambda _subject: iter([late]))])
    assert any("ValueError: late" in finding.message for finding in result.findings)


def test_logits_that_no_module_shows_are_judged(wrong):
    """Gemma 2 without its cap, and any other model whose logits are scaled by no module, raised here."""
    one, recording = wrong
    (finding,) = (finding for finding in one.compare(recording).findings if finding.tap == one.hf.graph.logits)
    assert finding.code is Code.LOCAL_ERROR
    assert "could not be tried" not in finding.message
