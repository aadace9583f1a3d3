"""`harness faults`: the benchmark, and the check of one fault."""

import ast
import json
import re
import sys
from pathlib import Path

import pytest

from harness.cli.main import run
from harness.extensions.faults import power
from harness.extensions.faults.catalogue import FAULTS
from harness.extensions.faults.power import SmallestError
from harness.extensions.faults.reference import norm
from harness.extensions.faults.score import grade
from tests.fault_trial import try_entry

TOOL, FAULT, OF_MODULES = re.findall(
    r"```py\n(.*?)```", Path(__file__).parents[3].joinpath("docs/faults.md").read_text(), re.DOTALL
)
"""The examples of the page, as they stand there."""


@pytest.mark.slow
def test_two_tools_on_two_faults(capsys):
    chosen = ["--only", "rotary-interleaved", "--only", "olmo2/kv-heads-tiled"]
    assert run(["faults", *chosen, "--tool", "harness", "--tool", "hooks", "--format", "json"]) == 0
    result = json.loads(capsys.readouterr().out)
    ours, *others = result["tools"]
    assert {name: ours[name]["count"] for name in ("detected", "row", "named", "named_wrongly")} == {
        "detected": 2, "row": 2, "named": 2, "named_wrongly": 0,
    }  # fmt: skip
    fault = ours["faults"][0]
    assert (fault["id"], fault["answer"]["operation"]) == ("rotary-interleaved", "model.layers.0.q_rope")
    assert fault["answer"]["row"] == [0, 1]
    assert "interleaved" in fault["answer"]["cause"]
    assert {tool["name"] for tool in others} >= {"assert_close", "SGLang's comparator"}
    assert all(tool["detected"]["count"] == 2 for tool in others if tool["name"] != "greedy tokens")


def test_the_score_for_people(capsys):
    of_sampling = "logits-of-the-row-before"
    assert run(["faults", "--category", "numbers", "--only", "logits-bf16", "--only", of_sampling]) == 0
    text = capsys.readouterr().out
    assert "1/1 (21-100 %)" in text
    assert of_sampling not in text


def test_a_planted_fault_is_a_mismatch(capsys):
    assert run(["faults", "--check", "wrong-block"]) == 1
    assert "block 1 of the table is read from its own block 0" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    "options",
    [
        ["--check", "nope"], ["--check", "olmo2/kv-heads-tiled"], ["--only", "nope"], ["--engine", "nope"],
        ["--tool", "nope", "--only", "wrong-block"], ["--device", "cuda:99"],
    ],
)  # fmt: skip
def test_what_is_not_there_is_refused(capsys, options):
    assert run(["faults", *options]) == 2
    assert capsys.readouterr().err.startswith("H0")


@pytest.mark.parametrize(
    ("option", "where"),
    [
        (["--only", "wrong-block"], "--only"),
        (["--category", "cache"], "--category"),
        (["--variants", "0"], "--variants"),
        (["--tool", "hooks"], "--tool"),
        (["--device", "cuda:99"], "--device"),
    ],
)
def test_a_check_of_one_fault_ignores_no_option(capsys, option, where):
    assert run(["faults", "--check", "wrong-block", *option]) == 2
    assert f"where:    {where}\n" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--only", "--category", "--engine", "--sample", "--drawn", "--variants"])
def test_a_power_ignores_no_option(capsys, option):
    assert run(["faults", "--power", option, "1"]) == 2
    assert f"where:    {option}\n" in capsys.readouterr().err


def test_a_power_has_every_form(capsys, monkeypatch):
    smallest = {"harness": 1e-4, "other": None}
    measured = SmallestError(quantity="eps", dtype="float32", smallest=smallest, alarms=["other"])
    monkeypatch.setattr(power, "measure", lambda *_: [measured])
    shown = {}
    for form in ("human", "markdown", "json"):
        assert run(["faults", "--power", "--format", form]) == 0
        shown[form] = capsys.readouterr().out
    assert "1.0e-04    (-)" in shown["human"]
    assert "| eps   | float32 | 1.0e-04   | (-)     |" in shown["markdown"]
    (entry,) = json.loads(shown["json"])["power"]
    assert entry == {
        "quantity": "eps", "dtype": "float32", "smallest": smallest, "alarms": ["other"],
    }  # fmt: skip


def test_the_tool_of_the_page_is_asked(tmp_path, monkeypatch, capsys):
    (tmp_path / "my_tool.py").write_text(TOOL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    chosen = ["--only", "olmo2/kv-heads-tiled", "--variants", "0", "--format", "json"]
    try:
        assert run(["faults", "--tool", "my_tool:OBJECT", *chosen]) == 0
    finally:
        sys.modules.pop("my_tool", None)
    (scored,) = json.loads(capsys.readouterr().out)["tools"]
    assert (scored["name"], scored["detected"]["count"]) == ("mine", 1)


def test_the_faults_of_the_page_are_found():
    space = {**vars(norm), "FAULTS": []}
    exec(FAULT, space)
    (fault,) = space["FAULTS"]
    graded = grade(fault, try_entry(fault).answer)
    assert (graded.row, graded.named) == (True, True)
    called = ast.parse(OF_MODULES).body[0].value
    declared = FAULTS["/".join(argument.value for argument in called.args[:2])]
    assert (declared.summary, declared.tap) == ("The window is 15, not 16.", called.args[3].value)
