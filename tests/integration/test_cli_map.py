"""`harness inspect --map`: which tensor of an engine is which tap."""

import json
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from harness.cli.tap_map import map_text
from harness.results.check import TapSource

TAP = {"tap": "model.norm", "tensor": "norm, columns 0 to 3", "code": None, "evidence": "it holds it"}


def test_a_line_for_each_tap_then_what_is_not_shown():
    head = {**TAP, "tap": "lm_head", "evidence": "it is what the step returns"}
    summary = {"engine": "mine", "taps": [TAP, head], "not_shown": ["model.layers.0.k_cache"], "notes": ["a note"]}
    text = map_text(summary)
    assert "model.norm  norm, columns 0 to 3" in text
    assert "lm_head: it is what the step returns" in text
    assert "model.norm: it holds it" not in text
    assert text.endswith("not shown: model.layers.0.k_cache\n\na note")


def test_an_adapter_that_names_its_taps_says_nothing(harness):
    run = harness("inspect", "--map", "--engine", "reference")
    assert (run.status, run.out) == (5, "reference does not say where its taps are: its adapter names them\n")


@pytest.fixture
def mapped(monkeypatch):
    """Return the taps that an engine is found to have; tests change them."""
    taps = {"model.norm": TapSource(tensor="norm"), "lm_head": TapSource(tensor="head")}
    wanted = SimpleNamespace(sources=taps, notes=(), all_unsupported_taps=lambda: ())
    monkeypatch.setattr("harness.judge.jobs.opened.match_taps", lambda _plan, engine, _graph: None)
    opened = nullcontext(SimpleNamespace(capabilities=wanted))
    monkeypatch.setattr("harness.judge.jobs.opened.open_planned", lambda _plan: opened)
    return taps


def test_what_moved_since_a_map_that_was_kept(mapped, tmp_path, harness):
    command = ("inspect", "--map", "--engine", "reference", "--model", "qwen3-tiny")
    kept = tmp_path / "kept.json"
    kept.write_text(harness(*command, "--format", "json").out)
    same = harness(*command, "--against", str(kept))
    assert (same.status, same.out.rstrip().endswith("nothing moved")) == (0, True)
    mapped["model.norm"] = TapSource(tensor="another")
    del mapped["lm_head"]
    run = harness(*command, "--against", str(kept), "--format", "json")
    assert run.status == 1
    assert json.loads(run.out)["moved"] == [
        {"tap": "model.norm", "before": "norm", "after": "another"},
        {"tap": "lm_head", "before": "head", "after": None},
    ]


@pytest.mark.parametrize(
    ("content", "words"),
    [("{", "not JSON"), ("[]", "no"), ("{}", "no map"), ('{"taps": 7}', "no map"), ('{"taps": [7]}', "no map")],
)
def test_a_kept_map_that_is_none_is_bad_input(tmp_path, harness, content, words):
    (tmp_path / "kept.json").write_text(content)
    run = harness("inspect", "--map", "--engine", "reference", "--against", str(tmp_path / "kept.json"))
    assert run.status == 2
    assert words in run.err
