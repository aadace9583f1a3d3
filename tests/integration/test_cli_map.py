"""`harness map`: which tensor of an engine is which tap."""

from harness.cli.map import map_text

TAP = {"tap": "model.norm", "tensor": "norm, columns 0 to 3", "code": None, "evidence": "it holds it"}


def test_a_line_for_each_tap_then_what_is_not_shown():
    other = {**TAP, "tap": "lm_head", "evidence": "it is what the step returns"}
    summary = {"engine": "mine", "taps": [TAP, other], "not_shown": ["model.layers.0.k_cache"], "notes": ["a note"]}
    text = map_text(summary)
    assert "model.norm  norm, columns 0 to 3" in text
    assert "lm_head: it is what the step returns" in text
    assert "model.norm: it holds it" not in text
    assert text.endswith("not shown: model.layers.0.k_cache\n\na note")


def test_an_adapter_that_names_its_taps_says_nothing(harness):
    run = harness("map", "--engine", "reference")
    assert (run.status, run.out) == (5, "reference does not say where its taps are: its adapter names them\n")
