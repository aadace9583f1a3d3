"""The narrower command of a check that failed, read by the real command line."""

import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from harness.cli.main import run
from harness.errors import Code, HarnessError
from harness.formats.case import Case, RequestSpec
from harness.judge.jobs import check
from harness.judge.jobs.check import next_place, run_check
from harness.oracle import graph
from harness.oracle.requests import Prompt
from harness.plan import Plan, plan_request
from harness.results.check import Finding, Outcome

EVERY_FIELD = {
    "model": "my model",
    "hf": "/hf",
    "engine": "foreign",
    "tensors": Path("/dump"),
    "names": Path("/names.json"),
    "engine_options": {"block_size": 32, "attention": "eager and more"},
    "engine_timeout_s": 2.5,
    "engine_python": Path("/python"),
    "dtype": "bfloat16",
    "device": "cuda:1",
    "truth": "float32",
    "only": "cache",
    "lora": Path("/lora"),
    "other_loras": [Path("/second"), Path("/third")],
    "mtp": True,
    "budget_s": 9.0,
    "explain_s": 2.0,
    "rows": 7,
    "rows_seed": 3,
}
NOT_ON_THE_COMMAND_LINE = {"truth", "rows_seed"}
NARROWER = {"explain_s", "budget_s"}
PROMPTS = (Prompt(token_ids=(1, 2), max_new_tokens=3), Prompt(token_ids=(4, 5, 6), max_new_tokens=2))


def case_of(**fields):
    return Case(schema_version=1, requests=[RequestSpec(prompt="text")], **fields)


def command(case, *, schedule="plain", request=1, code=Code.LOCAL_ERROR):
    """The words of the command that a failed run is followed by."""
    finding = Finding(code=code, message="wrong", tap="logits", request=request)
    failed = SimpleNamespace(schedule=schedule, findings=[finding], first_divergence=None)
    place = next_place(Plan(case=case, checkpoint=None, prompts=PROMPTS, schedules=()), [failed], {})
    return shlex.split(place.command)[1:]


@pytest.fixture
def parsed(monkeypatch):
    """Has the command line read a command, and returns the fields of a case that it makes of it."""

    def parse(words):
        fields = {}

        def plan_request(**changes):
            fields.update(changes)
            raise HarnessError(Code.BAD_OPTION, "no check is run here")

        for place in ("harness.plan.plan_request", "harness.plan.plan_engine"):
            monkeypatch.setattr(place, plan_request)
        run(words)
        return fields

    return parse


def test_every_option_of_a_case_is_in_the_table():
    """A new option of a check needs a place here: the narrower check repeats it, or has a value of its own."""
    assert {*EVERY_FIELD, "isolate", "schedules", "max_new_tokens"} == {*Case.options()}


@pytest.mark.parametrize(
    ("schedule", "request_id", "token_ids", "max_new_tokens"),
    [("plain", 1, [[4, 5, 6]], 2), ("batched", 1, [[1, 2], [4, 5, 6]], 3), ("plain", None, [[1, 2], [4, 5, 6]], 3)],
)
def test_the_narrower_check_repeats_the_options(parsed, schedule, request_id, token_ids, max_new_tokens):
    case = case_of(**EVERY_FIELD)
    fields = parsed(command(case, schedule=schedule, request=request_id))
    repeated = EVERY_FIELD.keys() - NOT_ON_THE_COMMAND_LINE - NARROWER
    expected = {name: EVERY_FIELD[name] for name in repeated} | {
        "engine_options": {"block_size": "32", "attention": "eager and more"}
    }
    assert {name: fields[name] for name in repeated} == expected
    assert not NOT_ON_THE_COMMAND_LINE & fields.keys()
    assert not NARROWER & {name for name, value in fields.items() if value}
    assert [request.token_ids for request in fields["requests"]] == token_ids
    assert (fields["schedules"], fields["max_new_tokens"]) == ([schedule], max_new_tokens)


def test_an_engine_in_the_harness_s_process_stays_there(parsed):
    assert parsed(command(case_of(model="m", isolate=False)))["isolate"] is False
    assert "isolate" not in parsed(command(case_of(model="m")))


def test_a_setting_that_differs_leads_to_an_inspection(parsed):
    fields = parsed(command(case_of(**EVERY_FIELD), code=Code.SETTING_DIFFERS))
    assert {name: fields[name] for name in ("model", "hf", "engine", "dtype", "device")} == {
        name: EVERY_FIELD[name] for name in ("model", "hf", "engine", "dtype", "device")
    }


def test_a_model_is_traced_once_for_all_prompts(checkpoints, tmp_path, monkeypatch):
    traced, trace = [], graph.trace_graph
    monkeypatch.setattr(graph, "trace_graph", lambda hf: (traced.append(hf.dtype), trace(hf))[1])
    monkeypatch.setenv("HARNESS_CACHE", str(tmp_path / "cache"))
    for dtype, token_ids in (("float32", [5, 6, 7]), ("float32", [8, 9]), ("bfloat16", [5, 6, 7])):
        plan = plan_request(
            model=str(checkpoints / "llama-tiny"), engine="hf", dtype=dtype, device="cpu",
            requests=[RequestSpec(token_ids=token_ids)], max_new_tokens=2, schedules=["plain"], local_files_only=True,
        )  # fmt: skip
        assert run_check(plan).outcome is Outcome.PASS
    assert traced == [torch.float32, torch.bfloat16]


def test_the_time_to_load_the_model_is_not_that_of_the_golden(checkpoints, tmp_path, monkeypatch):
    clock, load = [0.0], check.planned_model
    monkeypatch.setattr(check, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    monkeypatch.setattr(check, "planned_model", lambda plan: (clock.append(clock.pop() + 100), load(plan))[1])
    monkeypatch.setenv("HARNESS_CACHE", str(tmp_path / "cache"))
    plan = plan_request(
        model=str(checkpoints / "llama-tiny"), engine="hf", dtype="float32", device="cpu",
        requests=[RequestSpec(token_ids=[5, 6, 7])], max_new_tokens=2, schedules=["plain"], local_files_only=True,
    )  # fmt: skip
    result = run_check(plan)
    assert (result.golden_s, clock) == (0, [100])
