"""mlx-lm under test, where it is installed."""

import re

import pytest

import harness

pytest.importorskip("mlx_lm", exc_type=ImportError)

PROMPTS = [[5, 9, 14, 3, 8, 21, 4, 17, 6], [*range(3, 17)]]


def check(checkpoints, name, **options):
    return harness.check("mlx", model=checkpoints / name, prompts=PROMPTS, max_new_tokens=4, **options)


@pytest.mark.parametrize(("name", "num_taps"), [("qwen3-tiny", 54), ("gemma3-tiny", 117)])
def test_every_operation_passes(checkpoints, name, num_taps):
    report = check(checkpoints, name, schedules=["plain", "chunked:3"])
    assert report, report.text()
    assert any(f"{num_taps} taps were found by content" in note for note in report.notes)
    assert all(run.coverage.not_offered == () for run in report.runs)


def test_what_its_config_does_not_read_is_named(checkpoints):
    (run,) = check(checkpoints, "llama-tiny", schedules=["plain"]).runs
    assert run.first_divergence.tap == "model.layers.0.q_rope"
    assert "rope scaling (llama3) is ignored" in run.first_divergence.explanation.cause


def test_a_window_that_does_not_rewind_is_named(checkpoints):
    """The second prompt is longer than the window: trimming its cache does nothing."""
    assert check(checkpoints, "qwen3-tiny", schedules=["rewound"])
    options = {"model": checkpoints / "gemma3-tiny", "prompts": [[*range(5, 41)]], "max_new_tokens": 8}
    for schedule, what in (("rewound", "a token that was taken back"), ("speculative", "a rejected draft")):
        (run,) = harness.check("mlx", schedules=[schedule], **options).runs
        causes = {finding.tap: finding.explanation.cause for finding in run.findings if finding.explanation}
        assert re.fullmatch(
            f"positions go on behind {what}, position .*: the request never went back", causes["model.layers.0.q_rope"]
        )
        assert causes["model.layers.0.attention"].startswith(f"attends to {what}, position ")


def test_a_model_that_it_does_not_know_is_refused_in_its_words(checkpoints):
    with pytest.raises(harness.HarnessError, match=r"(?s)H015.*rope_theta"):
        check(checkpoints, "qwen3-moe-tiny")


def test_what_it_cannot_do_is_refused(checkpoints):
    from harness.engines.mlx import open_engine

    for given, words in (({"device": "cuda"}, "on the CPU here"), ({"options": {"a": "1"}}, "no option 'a'")):
        with pytest.raises(harness.HarnessError, match=words):
            open_engine(checkpoints / "qwen3-tiny", **{"dtype": "float32", "device": "cpu", "options": {}, **given})
