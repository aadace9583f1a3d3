"""`harness faults`: the score, and the check of one fault."""

import json

import pytest

from harness.cli.main import run


@pytest.mark.slow
def test_the_score_of_one_fault(capsys):
    assert run(["faults", "--only", "rotary-interleaved", "--format", "json"]) == 0
    score = json.loads(capsys.readouterr().out)
    assert (score["num_faults"], score["detected"], score["localised"], score["named"]) == (1, 1, 1, 1)
    assert (score["num_variants"], score["false_alarms"], score["equivalent"]) == (0, 0, [])
    (fault,) = score["faults"]
    assert fault["first_divergence"] == {"tap": "model.layers.0.q_rope", "request": 0, "position": 1}
    assert "interleaved" in fault["explanation"]


def test_the_score_for_people(capsys):
    of_sampling = "logits-of-the-row-before"
    assert run(["faults", "--category", "numbers", "--only", "logits-bf16", "--only", of_sampling]) == 0
    text = capsys.readouterr().out
    assert "logits-bf16" in text
    assert of_sampling not in text
    assert "allclose 1e-3" in text


def test_a_planted_fault_is_a_mismatch(capsys):
    assert run(["faults", "--check", "wrong-block"]) == 1
    assert "block 1 of the table is read from its own block 0" in " ".join(capsys.readouterr().out.split())


def test_a_fault_that_is_not_there_is_refused(capsys):
    assert run(["faults", "--check", "nope"]) == 2
    assert "H013" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "where"),
    [
        (["--only", "wrong-block"], "--only"),
        (["--category", "cache"], "--category"),
        (["--seeds", "0"], "--seeds"),
        (["--device", "cuda:99"], "--device"),
    ],
)
def test_a_check_of_one_fault_ignores_no_option(capsys, option, where):
    assert run(["faults", "--check", "wrong-block", *option]) == 2
    assert f"where:    {where}\n" in capsys.readouterr().err
