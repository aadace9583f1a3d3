"""Plans: names resolved once, for the command line and for Python."""

import shutil

import pytest
from transformers import AutoTokenizer

from harness.engines import Capabilities
from harness.errors import Code, HarnessError
from harness.formats.case import RequestSpec
from harness.formats.checkpoint import resolve
from harness.formats.taps import Graph
from harness.judge.jobs.opened import followed_schedules, match_taps, open_planned
from harness.plan import plan_request

REQUESTS = [RequestSpec(token_ids=[1, 4, 5, 6, 7, 8, 9, 10, 11])]


class Plain:
    name = "plain only"
    capabilities = Capabilities(schedules=("plain",))

    def run(self, workload, writer):
        raise NotImplementedError


class Matching(Plain):
    graph = None

    def match_taps(self, graph):
        self.graph = graph


def test_an_embedded_checkpoint_is_found_by_its_name(checkpoints):
    assert resolve("llama-tiny").samefile(checkpoints / "llama-tiny")
    assert plan_request(model="llama-tiny", requests=REQUESTS).folder.samefile(checkpoints / "llama-tiny")


def test_a_folder_comes_before_an_embedded_checkpoint_of_its_name(checkpoints, tmp_path, monkeypatch):
    (tmp_path / "llama-tiny").symlink_to(checkpoints / "qwen3-tiny")
    monkeypatch.chdir(tmp_path)
    assert resolve("llama-tiny").samefile(checkpoints / "qwen3-tiny")


@pytest.mark.parametrize("name", ["..", "llama-tiny/..", "checkpoints"])
def test_what_is_no_embedded_checkpoint_is_not_taken_for_one(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(HarnessError) as caught:
        resolve(name, local_files_only=True)
    assert caught.value.code is Code.NOT_A_CHECKPOINT


def test_default_schedules_that_the_engine_cannot_follow_are_left_out_and_said():
    plan = plan_request(model="llama-tiny", requests=REQUESTS)
    assert [schedule.name for schedule in plan.schedules] == ["plain", "chunked"]
    followed = followed_schedules(plan, Plain())
    assert [schedule.name for schedule in followed.schedules] == ["plain"]
    assert followed.notes[-1] == "schedule chunked left out: engine reference cannot follow it"


def test_a_schedule_that_was_asked_for_is_refused():
    plan = plan_request(model="llama-tiny", requests=REQUESTS, schedules=["plain", "chunked:4"])
    with pytest.raises(HarnessError) as caught:
        followed_schedules(plan, Plain())
    assert caught.value.code is Code.ENGINE_CANNOT_SERVE
    assert "chunked:4" in str(caught.value)


def test_another_engine_than_the_default_one_need_not_follow_the_default_cases_schedules():
    assert not plan_request().has_default_schedules
    assert plan_request(engine="hf").has_default_schedules


def test_an_engine_at_hand_is_not_looked_for_by_its_name():
    engine = Plain()
    plan = plan_request(model="llama-tiny", requests=REQUESTS, engine="nobody has installed it", subject=engine)
    with open_planned(plan) as opened:
        assert opened is engine


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_checkpoint_that_changes_while_its_engine_is_open_is_refused(name, checkpoints, tmp_path):
    folder = shutil.copytree(checkpoints / "llama-tiny", tmp_path / "model")
    plan = plan_request(model=str(folder), requests=REQUESTS, schedules=["plain"], subject=Plain())
    with pytest.raises(HarnessError) as caught, open_planned(plan):
        (folder / name).write_bytes((folder / name).read_bytes() + b" ")
    assert caught.value.code is Code.CHECKPOINT_CHANGED


def test_an_engine_that_finds_its_taps_is_told_the_graph():
    engine, plan, graph = Matching(), plan_request(), Graph(())
    match_taps(plan, engine, graph)
    assert engine.graph is graph
    match_taps(plan, Plain(), graph)  # one that does not is left alone


def test_what_an_engine_raises_while_it_finds_them_names_it():
    class Broken(Plain):
        def match_taps(self, graph):
            raise ZeroDivisionError("no")

    with pytest.raises(HarnessError) as caught:
        match_taps(plan_request(), Broken(), object())
    assert caught.value.code is Code.ENGINE_FAILED


def test_the_tokenizer_is_loaded_once_for_all_prompts_and_not_for_token_ids(monkeypatch, checkpoints):
    loaded, load = [], AutoTokenizer.from_pretrained
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda *a, **k: loaded.append(a) or load(*a, **k))
    folder = str(checkpoints / "qwen3-tiny")
    plan = plan_request(model=folder, requests=[RequestSpec(prompt="hu rin"), RequestSpec(prompt="pun | hu")])
    assert (len(loaded), len(plan.prompts)) == (1, 2)
    plan_request(model=folder, requests=[RequestSpec(token_ids=[3, 4])])
    assert len(loaded) == 1


@pytest.mark.parametrize(("prompts", "is_hinted"), [(["hu rin"], True), (["hu rin", "pun"], False)])
def test_a_schedule_that_one_prompt_cannot_reach_asks_for_a_second(checkpoints, prompts, is_hinted):
    requests = [RequestSpec(prompt=prompt) for prompt in prompts]
    notes = plan_request(model=str(checkpoints / "qwen3-tiny"), requests=requests).notes
    assert any(note.endswith("cannot reach it, give a second one") for note in notes) == is_hinted


@pytest.mark.parametrize("schedule", ["batched", "tensor-parallel", "preempted"])
def test_a_batch_of_one_prompt_is_refused_before_anything_runs(schedule):
    asked = {"model": "qwen3-tiny", "schedules": [schedule]}
    with pytest.raises(HarnessError, match="runs several requests at once") as caught:
        plan_request(**asked, requests=REQUESTS[:1])
    assert caught.value.code is Code.BAD_OPTION
    assert plan_request(**asked, requests=REQUESTS[:1] * 2).schedules
    assert plan_request(**(asked | {"schedules": ["prefix-hit", "forked"]}), requests=REQUESTS[:1]).schedules


def test_an_embedded_model_has_the_prompts_of_a_check_without_options():
    default, named = plan_request(), plan_request(model="qwen3-tiny")
    assert (named.prompts, named.schedules, named.folder) == (default.prompts, default.schedules, default.folder)
    assert plan_request(model="llama-tiny").prompts == default.prompts


@pytest.mark.parametrize(("text", "is_said"), [("<bos>hu rin", True), ("hu rin", False)])
def test_a_text_that_has_the_tokenizers_begin_of_text_already_is_said(checkpoints, text, is_said):
    notes = plan_request(model=str(checkpoints / "llama-tiny"), requests=[RequestSpec(prompt=text)]).notes
    expected = "request 0: the prompt begins with <bos>, and the tokenizer adds another one"
    assert any(note.startswith(expected) for note in notes) == is_said
