"""`harness fuzz`."""

import time

import pytest

from harness.engines import hf
from harness.errors import Code, HarnessError
from harness.extensions.fuzz import invariance, poison, search

from ...integration.commands import ENGINE


@pytest.fixture(autouse=True)
def _shrink_briefly(monkeypatch):
    monkeypatch.setattr(search, "SHRINKING_S", 3.0)


@pytest.fixture
def twenty_workloads(monkeypatch):
    """End a search by its count, so that a busy machine judges as much as another."""
    monkeypatch.setattr(search.Search, "_is_over", lambda self: self.num_workloads + self.rejected.total() >= 20)


@pytest.mark.slow
def test_a_fault_is_found_explained_and_repeated(harness, tmp_path):
    out = tmp_path / "out"
    ran = harness("fuzz", "run", "--fault", "wrong-block", "--first", "--out", out, "--format", "json")
    assert ran.status == 1, ran.err
    (finding,) = ran.json["findings"]
    assert finding["first_divergence"]["tap"].endswith(".attention")
    again = harness("fuzz", "run", "--replay", finding["workload_file"])
    assert again.status == 1
    cause = finding["first_divergence"]["explanation"][
        "cause"
    ]  # of the few rows of a small workload, not always a cause
    assert " ".join(cause.split()) in " ".join(again.out.split())


@pytest.mark.slow
def test_a_case_repeats_it_where_a_case_can(harness, tmp_path, monkeypatch):
    monkeypatch.setattr(
        search, "SHRINKING_S", 60.0
    )  # to the end, on a busy machine too: one that was cut short is no case
    out = tmp_path / "out"
    ran = harness("fuzz", "run", "--fault", "k-and-v-swapped", "--first", "--out", out)
    assert ran.status == 1
    assert f"harness check --case {out / 'finding-1.case.toml'}" in ran.out
    assert harness("check", "--case", out / "finding-1.case.toml").status == 0  # the fault is not there any more


@pytest.mark.slow
@pytest.mark.usefixtures("twenty_workloads")
def test_a_sound_engine_passes_and_what_it_did_is_printed(harness):
    ran = harness("fuzz", "run")
    assert ran.status == 0, ran.out
    assert "NOTHING FOUND" in ran.out
    assert "step of 0 decodes and 1 prompts" in ran.out


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--seconds", "0"], "--seconds"),
        (["--seconds", "-3"], "--seconds"),
        (["--seconds", "nan"], "--seconds"),
        (["--workload-seconds", "0"], "--workload-seconds"),
        (["--seed", "-1"], "--seed"),
        (["--engine", "nobody"], "H014"),
        (["--fault", "nothing"], "no fault is called 'nothing'"),
        (["--fault", "wrong-block", "--dtype", "float32"], "leave the other options out"),
        (["--replay", "nothing.toml"], "there is no such workload file"),
        (["--replay", "nothing.toml", "--engine", "hf"], "leave the other options out"),
        (["--replay", "nothing.toml", "--first"], "leave the other options out"),
        (["--replay", "nothing.toml", "--seconds", "5"], "leave the other options out"),
        (["--replay", "nothing.toml", "--seed", "1"], "leave the other options out"),
        (["--engine-option", "blocks=3"], "no option 'blocks'"),
    ],
)
def test_what_makes_no_sense_is_refused(harness, options, said):
    ran = harness("fuzz", "run", *options)
    assert ran.status == 2
    assert said in ran.err


def test_an_output_folder_that_is_not_empty_is_left_alone(harness, tmp_path):
    (tmp_path / "notes").write_text("mine")
    ran = harness("fuzz", "run", "--out", tmp_path)
    assert ran.status == 2
    assert [path.name for path in tmp_path.iterdir()] == ["notes"]


@pytest.mark.slow
def test_an_engine_that_raises_is_a_finding(harness, install):
    source = ENGINE.replace(
        "        self.inner.run", "        assert len(workload.requests) < 2\n        self.inner.run"
    )
    ran = harness("fuzz", "run", "--engine", install(source), "--first", "--seconds", "600", "--format", "json")
    assert ran.status == 1
    (finding,) = ran.json["findings"]
    assert finding["signature"] == "H017: the engine raised AssertionError: "
    assert len(finding["workload"]["requests"]) == 2
    assert finding["run"] is None


def test_an_engine_that_hangs_is_a_finding(harness, install, monkeypatch):
    monkeypatch.setattr(search, "SHRINKING_S", 0.0)
    waiting = "        import time\n        time.sleep(600)\n        self.inner.run"
    name = install(ENGINE.replace("        self.inner.run", waiting))
    ran = harness("fuzz", "run", "--engine", name, "--first", "--seconds", "600", "--workload-seconds", "0.2")
    assert ran.status == 1
    assert "the engine did not come to its end in time" in ran.out


NO_CONTROL = """
        from dataclasses import replace
        self.inner, self.capabilities = inner, replace(inner.capabilities, control=None, schedules={schedules})"""


def without_control(*schedules):
    return ENGINE.replace(
        "\n        self.inner, self.capabilities = inner, inner.capabilities", NO_CONTROL.format(schedules=schedules)
    )


@pytest.mark.slow
@pytest.mark.usefixtures("twenty_workloads")
def test_an_engine_that_cannot_batch_is_searched_by_what_it_can(harness, install):
    ran = harness("fuzz", "run", "--engine", install(without_control("plain")), "--format", "json")
    assert ran.status == 0
    assert ran.json["num_workloads"] >= 1
    assert "batch" not in ran.json["coverage"]


def test_an_engine_that_follows_no_schedule_is_refused(harness, install):
    ran = harness("fuzz", "run", "--engine", install(without_control()))
    assert ran.status == 2
    assert "no schedule that can be searched" in ran.err


def test_an_engine_that_serves_nothing_was_not_checked(harness, install):
    refuses = (
        "        from harness.errors import Code, HarnessError\n"
        "        raise HarnessError(Code.ENGINE_CANNOT_SERVE, 'not today')\n"
    )
    name = install(ENGINE.replace("        self.inner.run", refuses + "        self.inner.run"))
    ran = harness("fuzz", "run", "--engine", name, "--seconds", "0.2")
    assert ran.status == 5
    assert "not today" in ran.err


def test_a_workload_that_the_engine_does_not_follow_is_refused(harness, install, tmp_path):
    file = tmp_path / "w.toml"
    name = install(without_control("plain"))
    header = f'schema_version = 1\nmodel = "nowhere"\nengine = "{name}"\ndtype = "float32"\n'
    file.write_text(header + "[[requests]]\ntoken_ids = [5, 6]\nprompt_length = 2\narrival = 2\n")
    ran = harness("fuzz", "run", "--replay", file)
    assert ran.status == 2


def only(monkeypatch, *names):
    """Try these changes of schedule, and no others."""
    chosen = tuple(change for change in invariance.CHANGES if change.name in names)
    monkeypatch.setattr(invariance, "CHANGES", chosen)


@pytest.mark.slow
def test_changes_of_schedule_that_change_bits(harness, monkeypatch):
    only(monkeypatch, "repetition", "chunk", "ranks")
    ran = harness("fuzz", "invariance", "--engine", "hf", "--seconds", "0.1", "--format", "json")
    assert ran.status == 0, ran.err
    repetition, chunk, ranks = ran.json["changes"]
    assert repetition["state"] == "same"
    assert repetition["first"] is None
    assert sum(operation["num_rows"] for operation in repetition["operations"]) > 1000
    assert chunk["state"] in ("same", "noise")
    assert (ranks["is_offered"], ranks["state"]) == (False, "unknown")


@pytest.mark.slow
@pytest.mark.parametrize("command", ["invariance", "run"])
def test_an_engine_is_told_the_taps_of_the_model(harness, monkeypatch, command):
    only(monkeypatch, "repetition")
    told = []
    monkeypatch.setattr(hf.HFEngine, "match_taps", lambda _engine, graph: told.append(graph))
    assert harness("fuzz", command, "--engine", "hf", "--seconds", "0.1").status in (0, 5)  # what it is told matters
    (graph,) = told
    assert "model.layers.0.attention" in graph


def test_where_every_run_fails_one_round_is_enough(harness, monkeypatch):
    only(monkeypatch, "repetition", "chunk")
    began = []

    def fail(_engine, _workload, _writer):
        began.append(1)
        raise HarnessError(Code.ENGINE_FAILED, "no such kernel")

    monkeypatch.setattr(hf.HFEngine, "run", fail)
    ran = harness("fuzz", "invariance", "--engine", "hf", "--seconds", "600", "--format", "json")
    assert ran.status == 1
    assert {change["error"] for change in ran.json["changes"]} == {"no such kernel"}
    assert len(began) == 3


def test_a_run_that_hangs_ends_at_the_limit(harness, monkeypatch):
    only(monkeypatch, "chunk")
    monkeypatch.setattr(hf.HFEngine, "run", lambda *_: time.sleep(600))
    ran = harness("fuzz", "invariance", "--engine", "hf", "--workload-seconds", "0.2", "--format", "json")
    assert ran.status == 1
    (change,) = ran.json["changes"]
    assert change["error"] == "the engine did not come to its end in time"


def test_a_change_that_goes_beyond_rounding(harness, monkeypatch):
    only(monkeypatch, "KV length", "preemption")  # other changes may change low bits before the fault, by instructions
    ran = harness("fuzz", "invariance", "--fault", "wrong-block", "--seconds", "0.1", "--format", "json")
    assert ran.status == 1
    assert ran.json["verdict"] == "mismatch"


@pytest.mark.parametrize("question", ["invariance", "poison"])
@pytest.mark.parametrize("option", [["--first"], ["--out", "new"], ["--replay", "file"]])
def test_nothing_is_searched_where_two_runs_are_compared(harness, question, option):
    ran = harness("fuzz", question, *option)
    assert ran.status == 2
    assert option[0] in ran.err


@pytest.fixture
def poisons_one_schedule(monkeypatch):
    """Poison one schedule, with NaN."""
    monkeypatch.setattr(poison, "SCHEDULES", ("batched",))
    monkeypatch.setattr(poison, "VALUES", {"nan": float("nan")})


@pytest.mark.slow
@pytest.mark.usefixtures("poisons_one_schedule")
def test_poison_that_is_let_in_is_a_finding(harness):
    ran = harness("fuzz", "poison", "--fault", "past-the-end", "--seconds", "0.1", "--format", "json")
    assert ran.status == 1, ran.err
    (leak,) = ran.json["leaks"]
    assert (leak["code"], leak["memory"], leak["tap"]) == ("H240", "unused cache", "model.layers.0.attention")


@pytest.mark.usefixtures("poisons_one_schedule")
def test_poison_that_is_not_let_in_passes_and_what_was_filled_is_printed(harness):
    ran = harness("fuzz", "poison", "--seconds", "0.1")
    assert ran.status == 0, ran.err
    assert "NOTHING LET IN" in ran.out
    assert "padded rows      -" in ran.out


@pytest.mark.usefixtures("poisons_one_schedule")
def test_an_engine_whose_memory_is_not_reached_was_not_checked(harness, install):
    deaf = ENGINE.replace("self.inner.run(workload,", "self.inner.run(replace(workload, poison=None),")
    name = install("from dataclasses import replace\n" + deaf)
    ran = harness("fuzz", "poison", "--engine", name, "--seconds", "0.1")
    assert ran.status == 5
    assert "NOTHING CHECKED" in ran.out


@pytest.mark.usefixtures("poisons_one_schedule")
def test_an_engine_that_computes_other_bits_each_time_is_refused(harness, install):
    wavering = (
        "    def tap(self, name, tensor):\n        self.writer.tap(name, tensor + tensor.new_empty(()).uniform_())\n"
    )
    name = install(ENGINE.replace("\n\nclass Engine:", f"\n{wavering}\n\nclass Engine:"))
    ran = harness("fuzz", "poison", "--engine", name, "--seconds", "0.1")
    assert ran.status == 5
    assert "H241: two runs of the same workload without poison differ" in ran.err
    assert "it reads memory that nothing has set" in ran.err
