"""Tools that fail in every way: each gets a row that says so, and the run goes on."""

import json
import sys
from pathlib import Path

import pytest
import torch

from harness.extensions.faults import benchmark, worker
from harness.extensions.faults.answer import ToolAnswer
from harness.extensions.faults.benchmark import ANSWERS, AskedTool, Questions, ask_all, sampled
from harness.extensions.faults.catalogue import FAULTS, VARIANTS, entry_of
from harness.extensions.faults.operations import distance_to
from harness.extensions.faults.report import Benchmark, as_text
from harness.extensions.faults.score import Rate, grade, score
from harness.extensions.faults.subject import opened
from harness.extensions.faults.tools import TOOLS, num_lines, open_tool

ID = "olmo2/kv-heads-tiled"
TOOL = """
import os, sys, time
import torch
from harness.errors import Code, HarnessError
from harness.extensions.faults.answer import ToolAnswer
from harness.extensions.faults.fault import EngineKind

class Tool:
    names = ("mine",)
    kinds = frozenset({EngineKind.MODULE})
    rules = frozenset()

    def __init__(self, act):
        self.act = act

    def check(self, subject):
        self.act(subject)
        return {"mine": ToolAnswer(is_sound=False, operation="model.layers.0.attention", row=(0, 0), cause="heads")}

def missing(subject):
    import a_package_that_is_not_there

@torch.no_grad()
def changes(subject):
    next(subject.engine.parameters()).mul_(2)

@torch.no_grad()
def exchanges(subject):
    weight = next(subject.engine.parameters())  # their sum stays
    weight.copy_(weight.flip(0))

def refuses(subject):
    raise HarnessError(Code.BAD_OPTION, "there is no such schedule")

def hears(subject):
    raise HarnessError(Code.ENGINE_FAILED, "the engine raised")

TOOLS = {
    "hangs": lambda subject: time.sleep(99), "exits": lambda subject: os._exit(3), "missing": missing,
    "raises": lambda subject: 1 / 0, "prints": lambda subject: print("hello"), "changes": changes,
    "exchanges": exchanges, "refuses": refuses, "hears": hears,
    "sound": lambda subject: None,
}
globals().update({name: Tool(act) for name, act in TOOLS.items()})
"""


def asked_of(names, *ids, **options):
    with Questions(**options) as questions:
        return ask_all(names, [entry_of(id) for id in ids], questions)


@pytest.fixture
def tools(tmp_path, monkeypatch):
    (tmp_path / "my_tool.py").write_text(TOOL)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield lambda name: f"my_tool:{name}"
    sys.modules.pop("my_tool", None)


@pytest.mark.slow
def test_a_tool_that_fails_has_a_row_and_the_run_goes_on(tools, tmp_path):
    names = [tools(name) for name in ("hangs", "exits", "missing", "raises", "prints", "changes", "sound")]
    asked = {item.tool: item for item in asked_of(names, ID, limit_s=40)}
    problems = {name: asked[tools(name)].problem for name in ("hangs", "exits", "missing", "raises")}
    assert problems == {
        "hangs": "no answer within 40 s",
        "exits": "its process ended",
        "missing": "not installed: No module named 'a_package_that_is_not_there'",
        "raises": "ZeroDivisionError: division by zero",
    }
    assert asked[tools("prints")].notes == ("wrote to standard output",)
    assert asked[tools("changes")].notes == ("changed the model",)
    assert asked[tools("sound")].notes == ()
    for name in ("prints", "changes", "sound"):
        assert asked[tools(name)].answers["mine"].row == (0, 0)


@pytest.fixture
def asked_of_a_module(tools):
    def asked(name, change=None):
        with opened(entry_of(ID)) as (subject, planted):
            if change is not None:
                change(subject.engine)
            return worker.asked(open_tool(tools(name)), subject, entry_of(ID), planted)

    return asked


def test_a_change_of_a_model_is_one_of_its_bits(asked_of_a_module):
    assert asked_of_a_module("exchanges")["notes"] == ["changed the model"]

    def spoil(model):
        next(model.parameters()).data.fill_(torch.nan)

    assert asked_of_a_module("sound", spoil)["notes"] == []


def test_an_engine_that_is_not_checked_has_no_answer(asked_of_a_module):
    assert asked_of_a_module("hears")["answers"]["mine"]["error"].startswith("H017")
    refused = asked_of_a_module("refuses")
    assert (refused["answers"], refused["problem"]) == ({}, "H013: there is no such schedule")


def test_answers_are_kept_and_a_run_goes_on(tools, tmp_path):
    first = asked_of([tools("sound")], ID, "wrong-block", out=tmp_path)
    assert [item.is_refused for item in first] == [False, True]
    kept = tmp_path / ANSWERS
    kept.write_text(kept.read_text().splitlines()[0] + '\n{"tool": "cut')
    Path(tmp_path / "my_tool.py").write_text("raise RuntimeError")  # whoever is asked again cannot answer
    again = asked_of([tools("sound")], ID, out=tmp_path)
    assert again[0].answers == first[0].answers


def lines_of(*asked, device="cpu"):
    return [
        {"tool": tool, "id": ID, "seed": 0, "device": device, "answers": {}, "distances": {}, "problem": problem}
        | {"notes": [], "seconds": 1.0, "is_refused": problem.startswith("takes no ")}
        for tool, problem in asked
    ]


def test_no_answer_and_an_answer_on_another_device_are_asked_for_again(tmp_path, monkeypatch):
    monkeypatch.setattr(benchmark, "ToolProcess", Answering)
    lines = [
        *lines_of(("slow", "no answer within 9 s"), ("refuses", "takes no module")),
        *lines_of(("on-cuda", ""), device="cuda"),
    ]
    (tmp_path / ANSWERS).write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"tool": "cut')
    with Questions(out=tmp_path) as questions:
        asked = {tool: questions.ask(tool, ID) for tool in ("slow", "refuses", "on-cuda")}
    assert {tool: list(item.answers) for tool, item in asked.items()} == {
        "slow": ["mine"], "refuses": [], "on-cuda": ["mine"],
    }  # fmt: skip
    added = (tmp_path / ANSWERS).read_text().splitlines()[-2:]
    assert [json.loads(line)["tool"] for line in added] == ["slow", "on-cuda"]


class Answering:
    """The process of a tool that says that an engine is sound."""

    is_alive = True

    def __init__(self, tool):
        pass

    def ask(self, question, *, doing, timeout_s):
        answers = {"mine": ToolAnswer(is_sound=True).as_json()}
        return {"answers": answers, "problem": "", "notes": [], "seconds": 1.0, "distances": {}, "is_refused": False}

    def close(self):
        pass


def test_only_an_answer_about_every_engine_is_clean():
    variant = next(iter(VARIANTS))
    entries = {**FAULTS, **VARIANTS}

    def is_clean(*asked):
        scored = score("mine", asked, entries, is_rule=False, num_lines=1)
        return Benchmark(seed=0, scores=[scored], seconds=1.0).is_clean

    def said(id, is_sound=None, problem=""):
        answers = {} if is_sound is None else {"mine": ToolAnswer(is_sound=is_sound)}
        return AskedTool(tool="mine", id=id, answers=answers, distances={}, problem=problem, notes=(), seconds=1.0,
                         is_refused=problem.startswith("takes no "))  # fmt: skip

    assert is_clean(said(ID, is_sound=False), said(variant, is_sound=True))
    assert not is_clean(said(ID, is_sound=True), said(variant, is_sound=True))
    assert not is_clean(said(ID, is_sound=False), said(variant, is_sound=False))
    assert not is_clean(said(ID, is_sound=False), said(variant, problem="its process ended"))
    assert not is_clean(said(ID, problem="takes no module"))


def test_a_sound_engine_without_an_answer_is_no_silence(tmp_path):
    passed, silent = list(VARIANTS)[:2]
    asked = [
        AskedTool(tool="mine", id=passed, answers={"mine": ToolAnswer(is_sound=True)}, distances={}, problem="",
                  notes=(), seconds=1.0),
        AskedTool(tool="mine", id=silent, answers={}, distances={}, problem="its process ended", notes=(), seconds=1.0),
    ]  # fmt: skip
    scored = score("mine", asked, {**FAULTS, **VARIANTS}, is_rule=False, num_lines=1)
    assert (scored.false_alarms, scored.num_unanswered) == (Rate(0, 1), 1)
    text = as_text(Benchmark(seed=0, scores=[scored], seconds=1.0))
    assert "0/1 (0-79 %)" in text
    assert any(silent in line and "its process ended" in line for line in text.splitlines())


def test_a_served_fault_is_detected_and_a_sound_server_passes():
    pytest.importorskip("uvicorn", reason="the extra `serve` is not installed")
    pytest.importorskip("fastapi", reason="the extra `serve` is not installed")
    tool = open_tool("harness")
    for id, is_sound in (
        ("server/logits-of-the-row-before", False),
        ("server/blocks-permuted/llama-tiny/float32", True),
    ):
        with opened(entry_of(id)) as (subject, _):
            answer = tool.check(subject)["harness"]
        assert (answer.is_sound, answer.error) == (is_sound, None)


def test_a_score_counts_what_is_right():
    fault = FAULTS[ID]
    right = ToolAnswer(is_sound=False, operation="model.layers.0.attention", row=(0, 0), cause="the heads are tiled")
    assert grade(fault, right).named
    elsewhere = ToolAnswer(is_sound=False, operation="model.layers.1.mlp.up_proj", row=(0, 0), cause="theta")
    graded = grade(fault, elsewhere, distance=1)
    assert (graded.detected, graded.exact, graded.within_one, graded.row) == (True, False, True, False)
    assert (graded.named, graded.named_wrongly) == (False, True)
    missed = grade(fault, ToolAnswer(is_sound=True))
    assert not any((missed.detected, missed.exact, missed.row, missed.named, missed.named_wrongly))
    assert not grade(fault, None, problem="no answer within 1 s").detected
    assert not grade(fault, ToolAnswer(is_sound=False, error="the code with the fault raised")).detected


def test_a_folder_shows_a_fault_at_the_first_module_that_it_reaches():
    """The context of attention is in no folder: `o_proj` is what shows it."""
    fault = entry_of("dump/cohere2/window-in-full-layer")
    near = {name: f"model.layers.1.{name}" for name in ("self_attn.o_proj", "mlp.up_proj", "attention")}
    with opened(fault) as (subject, _):
        distances = distance_to(fault, subject, near)
    assert distances["self_attn.o_proj"] == 0
    assert all(distances[name] > 0 for name in ("mlp.up_proj", "attention"))


def test_intervals_are_wilsons():
    low, high = Rate(8, 10).interval
    assert (round(low, 3), round(high, 3)) == (0.490, 0.943)
    assert Rate(0, 250).interval[1] == pytest.approx(0.0151, abs=1e-4)
    assert Rate(0, 0).interval == (0.0, 1.0)


def test_a_sample_is_drawn_by_its_seed():
    entries = list(FAULTS.values())
    drawn = sampled(entries, 20, 1)
    assert drawn == sampled(entries, 20, 1) != sampled(entries, 20, 2)
    assert len(drawn) == 20
    assert {entry.id for entry in drawn} < {entry.id for entry in sampled(entries, 40, 1)}
    kept = [entry for entry in entries if entry not in drawn[:1]]
    assert sampled(kept, 19, 1) == drawn[1:]
    assert sampled(entries, None, 1) == sampled(entries, 9999, 1) == entries


def test_a_tool_that_takes_no_such_engine_is_not_counted():
    empty = score("x", [], {**FAULTS, **VARIANTS}, is_rule=False, num_lines=1)
    assert (empty.rate("detected").total, empty.median_seconds) == (0, 0.0)


@pytest.mark.parametrize("name", TOOLS)
def test_every_adapter_opens_without_its_package(name):
    tool = open_tool(name)
    assert tool.names
    assert tool.rules <= set(tool.names)
    assert 20 < num_lines(name) < 250
