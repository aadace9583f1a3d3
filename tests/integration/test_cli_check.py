"""`harness check`: what its options change, and the JSON that others rely on."""

import json
import shutil

import pytest

from harness.cli.main import run
from harness.errors import Code

from .commands import ENGINE

KEYS = [
    "schema_version", "verdict", "engine", "model", "dtype", "device", "num_requests", "num_rows", "num_taps",
    "schedules", "first_divergence", "taps", "tokens", "coverage", "timings_s",
]  # fmt: skip
TAP_KEYS = {"name", "num_rows", "local_roundings_max", "local_roundings_median", "propagated_ratio_max", "verdict"}
DIVERGENCE_KEYS = {"tap", "request", "position", "local_roundings", "propagated_ratio", "verdict"}

# What the reference engine records, but for one tap at one row of the batched schedule.
PERTURBED = ENGINE.replace(
    "    def __getattr__",
    """    def begin_step(self, **step):
        self.rows = list(zip(list(step["request"]), list(step["position"])))
        self.writer.begin_step(**step)

    def tap(self, name, tensor):
        if name == "model.layers.1.mlp.up_proj" and (1, 2) in self.rows:
            tensor = tensor.clone()
            tensor[self.rows.index((1, 2))] *= 1.01
        self.writer.tap(name, tensor)

    def __getattr__""",
)


@pytest.fixture
def check(harness, llama, workload):
    """Check the smallest model under a short workload."""
    return lambda *options: harness("check", "--model", llama, *workload, *options)


def test_the_keys_of_a_check_that_passes(check, llama):
    ran = check("--format", "json")
    assert ran.status == 0
    assert [line for line in ran.err.splitlines() if "%" not in line] == []  # progress, on a slow machine
    document = ran.json
    assert list(document)[: len(KEYS)] == KEYS
    assert (document["schema_version"], document["verdict"]) == (1, "pass")
    assert (document["engine"], document["model"]) == ("reference", str(llama))
    assert (document["dtype"], document["device"]) == ("float32", "cpu")
    assert document["schedules"] == ["plain", "batched"]  # no prompt is longer than a chunk
    assert document["num_requests"] == 2
    assert document["num_rows"] == 2 * (6 + 2 + 3 + 2)
    assert document["num_taps"] == len(document["taps"]) == 3 + 3 * 17
    assert document["first_divergence"] is None
    assert document["tokens"] == {"compared": 12, "equal": 12, "ties": 0}
    assert set(document["timings_s"]) == {"golden", "engine", "compare"}
    assert all(seconds > 0 for seconds in document["timings_s"].values())
    coverage = document["coverage"]
    assert coverage["missing"] == 0
    assert coverage["recorded"] == coverage["expected"] > 0
    for tap in document["taps"]:
        assert set(tap) >= TAP_KEYS
        assert tap["num_rows"] > 0
        assert tap["verdict"] in ("exact", "noise", "convention")
        assert tap["local_roundings_median"] <= tap["local_roundings_max"] < 20
        assert tap["propagated_ratio_max"] is None or tap["propagated_ratio_max"] < 10


@pytest.mark.slow
def test_the_keys_of_a_check_that_does_not(check, install):
    ran = check("--engine", install(PERTURBED), "--format", "json")
    assert ran.status == 1
    document = ran.json
    assert document["verdict"] == "mismatch"
    divergence = document["first_divergence"]
    assert set(divergence) >= DIVERGENCE_KEYS
    assert (divergence["tap"], divergence["request"], divergence["position"]) == ("model.layers.1.mlp.up_proj", 1, 2)
    assert divergence["verdict"] == "bug"
    assert divergence["local_roundings"] > 1e4
    assert divergence["propagated_ratio"] > 1e3
    (tap,) = [tap for tap in document["taps"] if tap["verdict"] == "bug" and tap["name"].endswith("up_proj")]
    assert tap["name"] == divergence["tap"]
    assert Code.LOCAL_ERROR in {finding["code"] for finding in document["findings"]}


@pytest.mark.slow
def test_who_stops_early_judges_up_to_the_first_wrong_operation_and_runs_no_further_schedule(check, install):
    engine = install(PERTURBED)
    whole = check("--engine", engine, "--schedule", "plain,batched", "--format", "json").json
    ran = check("--engine", engine, "--schedule", "plain,batched", "--explain-seconds", "0", "--format", "json")
    assert ran.status == 1
    assert ran.json["first_divergence"]["tap"] == whole["first_divergence"]["tap"] == "model.layers.1.mlp.up_proj"
    assert {finding["schedule"] for finding in ran.json["findings"]} == {"plain"}
    assert "lm_head" not in {tap["name"] for tap in ran.json["taps"]}
    assert any(note.startswith("stopped at the first operation that is wrong") for note in ran.json["notes"])


def test_the_next_place_to_look(check, install, llama):
    engine = install(PERTURBED)
    document = check("--engine", engine, "--engine-timeout", "0", "--schedule", "batched", "--format", "json").json
    cause = document["first_divergence"]["explanation"]
    assert document["next"] == {
        "tap": "model.layers.1.mlp.up_proj",
        "cause": cause["cause"] if cause["is_cause"] else None,
        "command": f"harness check --model {llama} --engine foreign --dtype float32 --engine-timeout 0 "
        "--schedule batched --token-ids 1,4,5,6,7,8 --token-ids 1,9,10 --max-new-tokens 3",
        "file": None,
        "line": None,
    }
    assert run(document["next"]["command"].split()[1:]) == 1


@pytest.mark.slow
def test_the_next_command_is_about_the_one_request_where_its_rows_depend_on_no_other(check, install):
    ran = check(
        "--engine", install(PERTURBED), "--schedule", "plain,batched", "--explain-seconds", "0", "--format", "json"
    )
    assert ran.json["next"]["command"].endswith(" --schedule plain --token-ids 1,9,10 --max-new-tokens 3")


def test_a_sample_of_rows_says_what_it_left_out(check):
    ran = check("--schedule", "plain", "--rows", "2", "--format", "json")
    (document,) = ran.json["runs"]
    assert (ran.status, ran.json["verdict"]) == (0, "pass")
    assert document["coverage"]["rows_left_out"] > 0
    assert any("--rows 2, seed 0" in note for note in ran.json["notes"])
    whole = check("--schedule", "plain", "--format", "json").json
    assert whole["runs"][0]["coverage"]["rows_left_out"] == 0
    by_name = {tap["name"]: tap["num_rows"] for tap in whole["taps"]}
    fewer = {tap["name"] for tap in ran.json["taps"] if tap["num_rows"] < by_name[tap["name"]]}
    assert {"model.layers.0.mlp.up_proj", "model.layers.1.attention"} <= fewer
    assert "model.layers.0.input_layernorm" not in fewer


def test_rows_that_are_no_number_of_rows_are_refused(check):
    ran = check("--schedule", "plain", "--rows", "0")
    assert ran.status == 2
    assert ran.err.startswith(f"{Code.BAD_OPTION}: ")
    assert "where:    --rows" in ran.err


@pytest.mark.slow
def test_a_sample_finds_a_fault_and_the_next_command_has_it(check, install):
    ran = check("--engine", install(PERTURBED), "--schedule", "plain", "--rows", "2", "--format", "json")
    assert (ran.status, ran.json["first_divergence"]["tap"]) == (1, "model.layers.1.mlp.up_proj")
    assert "--rows 2" in ran.json["next"]["command"]


def test_a_pass_has_no_next_place(check):
    assert check("--schedule", "plain", "--format", "json").json["next"] is None


def test_a_budget_that_is_used_up_is_no_pass(check):
    ran = check("--schedule", "plain,batched", "--budget", "0.001", "--format", "json")
    assert ran.status == 5
    assert (ran.json["verdict"], ran.json["schedules"]) == ("nothing", ["plain"])
    assert ran.json["schedules_not_run"] == ["batched"]
    assert ran.json["runs"][0]["verdict"] == "pass"
    assert ran.json["notes"][-1] == "H051: the budget of 0.001 s was used up: not judged under batched"
    human = check("--schedule", "plain,batched", "--budget", "0.001")
    assert human.status == 5
    assert human.out.startswith("NOTHING")
    assert "PASS" not in human.out


def test_a_budget_that_is_large_enough_changes_nothing(check):
    ran = check("--schedule", "plain,batched", "--budget", "600", "--format", "json")
    assert (ran.status, ran.json["schedules_not_run"]) == (0, [])


@pytest.mark.slow
def test_a_mismatch_within_the_budget_is_one(check, install):
    ran = check("--engine", install(PERTURBED), "--schedule", "plain,batched", "--budget", "0.001", "--format", "json")
    assert (ran.status, ran.json["verdict"], ran.json["schedules_not_run"]) == (1, "mismatch", ["batched"])


@pytest.mark.parametrize("budget", ["0", "-1", "nan", "inf"])
def test_a_budget_is_a_positive_time(check, budget):
    ran = check("--budget", budget)
    assert ran.status == 2
    assert ran.err.startswith("H013: the budget must be positive\n  where:    --budget\n  expected: seconds\n")


@pytest.mark.parametrize("seconds", ["-1", "nan", "inf"])
def test_the_time_for_explanations_is_not_negative(check, seconds):
    ran = check("--explain-seconds", seconds)
    assert ran.status == 2
    assert ran.err.startswith(
        "H013: the time must not be negative\n  where:    --explain-seconds\n  expected: seconds\n"
    )


def test_a_mismatch_for_people(check, install):
    ran = check("--engine", install(PERTURBED))
    assert ran.status == 1
    assert "MISMATCH" in ran.out
    assert "model.layers.1.mlp.up_proj" in ran.out
    assert "request 1, position 2" in ran.out


def test_markdown(check):
    ran = check("--schedule", "plain", "--format", "markdown")
    assert ran.status == 0
    assert ran.out.startswith("#")
    assert "| " in ran.out


def test_schedules_are_repeated_or_listed_and_run_once(check):
    options = ["--schedule", "chunked:4,plain", "--schedule", "batched", "--schedule", "plain"]
    ran = check(*options, "--format", "json")
    assert ran.json["schedules"] == ["chunked:4", "plain", "batched"]
    assert ran.status == 0


def test_a_schedule_that_is_not_reached_passes_only_as_a_default(check):
    assert check().status == 0
    ran = check("--schedule", "chunked", "--format", "json")
    assert ran.status == 1
    assert [finding["code"] for finding in ran.json["findings"]] == [Code.TRIGGER_NOT_REACHED]


def test_a_workload_without_decode_does_not_pass(check):
    ran = check("--schedule", "plain", "--max-new-tokens", "1", "--format", "json")
    assert ran.status == 1
    assert [finding["code"] for finding in ran.json["findings"]] == [Code.NO_DECODE]


def test_recordings_are_kept_one_folder_a_schedule(check, harness, golden, tmp_path):
    assert check("--schedule", "plain,chunked:2", "--out", tmp_path / "out").status == 0
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["chunked-2", "plain", "report.html"]
    assert harness("diff", golden, tmp_path / "out" / "plain").status == 0


def test_an_empty_output_folder_is_used(check, tmp_path):
    assert check("--schedule", "plain", "--out", tmp_path).status == 0
    assert (tmp_path / "plain" / "manifest.json").exists()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_another_dtype_than_the_checkpoints(check, dtype):
    ran = check("--schedule", "plain", "--dtype", dtype, "--format", "json")
    assert ran.status == 0, ran.out
    assert ran.json["dtype"] == dtype


def test_auto_is_the_checkpoints_dtype(harness, llama, tmp_path):
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    for file in llama.iterdir():
        (folder / file.name).symlink_to(file)
    config = json.loads((llama / "config.json").read_text())
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    options = ["--token-ids", "1,4", "--max-new-tokens", "2", "--schedule", "plain", "--format", "json"]
    assert harness("check", "--model", folder, *options).json["dtype"] == "bfloat16"


def test_a_text_and_a_file_and_ids_are_requests(harness, tmp_path):
    (tmp_path / "prompt.txt").write_text("bun hon dou | bun")
    options = ["--prompt", "bun hon", "--prompt-file", tmp_path / "prompt.txt", "--token-ids", "1 4", "--prompt", "dou"]
    ran = harness("check", *options, "--max-new-tokens", "2", "--schedule", "batched", "--format", "json")
    assert ran.status == 0, ran.err
    assert ran.json["num_requests"] == 4
    assert ran.json["model"].endswith("qwen3-tiny")


def test_without_prompts_the_embedded_default_is_checked(harness):
    ran = harness("check", "--engine", "hf", "--schedule", "plain", "--max-new-tokens", "2", "--format", "json")
    assert ran.status == 0, ran.out
    assert ran.json["num_requests"] == 4
    (note,) = [note for note in ran.json["notes"] if "not asked for" not in note]
    assert "block_boundary" in note  # HF has no blocks, so the default's own requirement cannot hold


@pytest.fixture
def case(tmp_path, llama):
    path = tmp_path / "case.toml"
    path.write_text(
        f"""schema_version = 1
model = "{llama}"
engine = "hf"
dtype = "bfloat16"
schedules = ["plain"]
max_new_tokens = 2
engine_options = {{ attention = "eager" }}

[[requests]]
token_ids = [1, 4, 5]
"""
    )
    return path


def test_a_case_says_everything(harness, case):
    document = harness("check", "--case", case, "--format", "json").json
    assert (document["engine"], document["dtype"], document["schedules"]) == ("hf", "bfloat16", ["plain"])


def test_what_is_given_outranks_the_case(harness, case):
    options = ["--engine", "reference", "--dtype", "auto", "--schedule", "chunked:2", "--device", "cpu"]
    ran = harness("check", "--case", case, *options, "--format", "json")
    assert ran.status == 0, ran.err
    document = ran.json
    assert (document["engine"], document["dtype"], document["schedules"]) == ("reference", "float32", ["chunked:2"])


def test_several_dtypes_side_by_side(capsys):
    options = ["check", "--token-ids", "5,6,7,8", "--max-new-tokens", "3", "--schedule", "plain"]
    dtypes = ["--dtype", "float32", "--dtype", "bfloat16", "--dtype", "float32"]
    assert run([*options, *dtypes, "--format", "json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["verdict"], document["dtypes"]) == ("pass", ["float32", "bfloat16"])
    assert [check["dtype"] for check in document["checks"]] == document["dtypes"]
    assert run([*options, *dtypes]) == 0
    table, *_ = capsys.readouterr().out.split("\n\n")
    assert "float32 median" in table
    assert "bfloat16 median" in table
    assert "self_attn.q_proj" in table


@pytest.mark.parametrize("truth", ["float64", "float32", "auto"])
def test_the_precision_of_the_truth(check, tmp_path, truth):
    case = tmp_path / "case.toml"
    case.write_text(f'schema_version = 1\nmodel = "llama-tiny"\ntruth = "{truth}"\n[[requests]]\ntoken_ids = [1, 2]\n')
    ran = check("--case", case, "--dtype", "bfloat16", "--schedule", "plain", "--format", "json")
    assert (ran.status, ran.json["verdict"]) == (0, "pass")


def test_a_truth_that_there_is_not(harness, tmp_path):
    ran = harness("golden", "--truth", "float16", "--out", tmp_path / "out")
    assert ran.status == 2
    assert "--truth" in ran.err
    assert "float16" in ran.err
    assert "auto" in ran.err


def test_a_truth_in_float32_is_another_golden(harness, llama, workload):
    folders = {
        truth: harness("golden", "--model", llama, *workload, "--truth", truth, "--format", "json").json["golden"]
        for truth in ("float32", "float64", "auto")
    }
    assert folders["float64"] == folders["auto"] != folders["float32"]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("scaling", "limit"),
    [
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}, 32),
        ({"rope_type": "linear", "factor": 3.0}, 24),
        ({"rope_type": "dynamic", "factor": 3.0}, 24),
        ({"rope_type": "longrope", "factor": 2.0, "short_factor": [1.0] * 16, "long_factor": [2.0] * 16}, 16),
    ],
)
def test_rotary_scaling_stretches_the_context(harness, llama, tmp_path, scaling, limit):
    folder = tmp_path / "stretched"
    shutil.copytree(llama, folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"max_position_embeddings": 8, "rope_parameters": {"rope_theta": 10_000.0, **scaling}}
    (folder / "config.json").write_text(json.dumps(config))
    command = ["check", "--model", folder, "--schedule", "chunked", "--max-new-tokens", "2", "--format", "json"]
    fits = ",".join(str(token) for token in range(1, limit - 1))
    ran = harness(*command, "--token-ids", fits)
    assert (ran.status, ran.json["num_rows"]) == (0, limit - 1), ran.err
    ran = harness(*command, "--token-ids", f"{fits},1")
    assert ran.status == 2
    assert f"expected: at most {limit} positions" in ran.err
