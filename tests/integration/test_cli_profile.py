"""`harness profile`: its figures, its files, and every way it refuses."""

import json
import pickle
from functools import partial
from pathlib import Path

import pytest

from harness.profiling.gate.baseline import read_profile

from ..unit.lora_adapter import write_adapter
from ..unit.profiling.test_trace import problems_of

KEYS = {"schema_version", "engine", "model", "dtype", "device", "ttft_ms", "tpot_ms", "tokens_per_second", "phases",
        "overhead", "report"}  # fmt: skip
PHASE_KEYS = {"name", "num_steps", "wall_ms", "attributed_share", "flops_measured", "flops_formula",
              "kv_bytes_measured", "kv_bytes_formula", "peak_bytes", "mfu", "mbu", "bound_by", "trace",
              "snapshot"}  # fmt: skip
SMALL = ["--prompt-tokens", "24", "--max-new-tokens", "6", "--runs", "2"]


@pytest.fixture(autouse=True)
def small_ceilings(monkeypatch):
    """Measure the machine's roofs on small tensors: their height is not what is tested."""
    from harness.profiling import profile

    small = partial(profile.measure_ceilings, num_bytes=1 << 16, matrix_size=32)
    monkeypatch.setattr(profile, "measure_ceilings", small)


@pytest.fixture(params=["reference", "hf"])
def engine(request):
    return request.param


@pytest.mark.slow
def test_a_profile_says_what_each_phase_costs(harness, tmp_path, engine):
    out = tmp_path / "profile"
    ran = harness("profile", "--engine", engine, *SMALL, "--batch-size", "2", "--out", out, "--format", "json")
    assert ran.status == 0, ran.err
    assert ran.json.keys() >= KEYS
    assert ran.json["schema_version"] == 1
    assert (ran.json["engine"], ran.json["dtype"], ran.json["device"]) == (engine, "float32", "cpu")
    for latency in ("ttft_ms", "tpot_ms"):
        assert 0 < ran.json[latency]["median"] <= ran.json[latency]["p90"] <= ran.json[latency]["p99"]
    assert ran.json["overhead"].keys() == {"trace", "memory", "counters"}
    phases = {phase["name"]: phase for phase in ran.json["phases"]}
    assert list(phases) == ["prefill", "decode", *(["mixed"] if engine == "reference" else [])]
    assert phases["prefill"]["kv_bytes_formula"] == 2 * 3 * 2 * 32 * 4 * 2 * 24
    for phase in phases.values():
        check_phase(out, phase)
    whole = json.loads((out / "profile.json").read_text())
    assert whole["phases"][0]["flops_measured"] == phases["prefill"]["flops_measured"]
    assert whole["phases"][0]["memory"]["points"]


def check_phase(out: Path, phase):
    assert phase.keys() >= PHASE_KEYS
    assert phase["num_steps"] >= 1
    assert phase["flops_measured"] == phase["flops_formula"] > 0
    assert phase["kv_bytes_measured"] == phase["kv_bytes_formula"] > 0
    assert phase["num_allocations"] == phase["num_frees"] > 0
    assert phase["bound_by"] in ("compute", "memory", "overhead")
    assert 0 < phase["attributed_share"] <= 1
    assert phase["operations"][-1]["name"] == "unattributed"
    assert problems_of(out / phase["trace"]) == []
    snapshot = pickle.loads((out / phase["snapshot"]).read_bytes())
    assert snapshot.keys() == {"segments", "device_traces"}
    assert phase["peak_bytes"] > sum(segment["total_size"] for segment in snapshot["segments"]) / 2


@pytest.mark.slow
def test_a_profile_for_people(harness, tmp_path, llama):
    ran = harness("profile", "--model", llama, *SMALL, "--phase", "decode", "--out", tmp_path / "profile")
    assert ran.status == 0, ran.err
    for words in ("TTFT ms", "tok/s", "decode", "equal", "aten::mm", "self_attn.q_proj", "unattributed", "peak of"):
        assert words in ran.out
    assert "prefill:" not in ran.out


@pytest.mark.slow
def test_the_schedule_can_be_set(harness, tmp_path):
    schedule = ["--wait", "0", "--warmup", "0", "--active", "2", "--repeat", "2", "--phase", "decode"]
    ran = harness("profile", *SMALL, *schedule, "--out", tmp_path / "profile", "--format", "json")
    (decode,) = ran.json["phases"]
    assert decode["num_steps"] == 2
    assert [step["label"] for step in decode["steps"]] == ["decode[bs=1 toks=1 kv=24]", "decode[bs=1 toks=1 kv=25]"]
    assert len(decode["traces"]) == 2


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--max-new-tokens", "1"], "H061", "the phase 'decode' ran no step"),
        (["--engine", "hf", "--phase", "mixed"], "H061", "engine 'hf' has no steps of phase 'mixed'"),
        (["--phase", "verify"], "H061", "has no steps of phase 'verify'"),
        (["--batch-size", "0"], "H013", "must be positive"),
        (["--active", "0"], "H013", "active is too small"),
        (["--engine", "none"], "H014", "no engine is called 'none'"),
        (["--prompt-tokens", "100000"], "H015", ""),
        (["--engine-option", "nonsense=1"], "H013", "nonsense"),
    ],
)
def test_what_cannot_be_profiled_is_an_error_and_leaves_nothing(harness, tmp_path, options, code, message):
    out = tmp_path / "profile"
    ran = harness("profile", *SMALL, *options, "--out", out, "--format", "json")
    assert ran.status == 2
    assert ran.json["error"]["code"] == code
    assert message in ran.json["error"]["message"]
    assert not out.exists()


def test_an_engine_that_offers_no_steps_is_an_error(harness, tmp_path, install):
    name = install("""
from harness.engines import Capabilities

class Engine:
    name = "whole"
    capabilities = Capabilities(schedules=("plain",))

    def run(self, workload, writer):
        raise AssertionError

def open_engine(folder, *, dtype, device, options):
    return Engine()
""")
    ran = harness("profile", "--engine", name, *SMALL, "--out", tmp_path / "profile", "--format", "json")
    assert (ran.status, ran.json["error"]["code"]) == (2, "H060")
    assert "open_session" in ran.json["error"]["expected"]


def test_an_output_folder_that_is_not_empty_is_left_alone(harness, tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    ran = harness("profile", *SMALL, "--out", tmp_path, "--format", "json")
    assert (ran.status, ran.json["error"]["code"]) == (2, "H030")
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


@pytest.mark.slow
def test_what_was_captured_before_a_failure_stays(harness, tmp_path, monkeypatch):
    from harness.errors import Code, HarnessError
    from harness.profiling import profile

    original = profile.capture_memory

    def capture(session, window, path, *, device):
        if window.phase == "decode":
            raise HarnessError(Code.PROFILER_FAILED, "no space left")
        return original(session, window, path, device=device)

    monkeypatch.setattr(profile, "capture_memory", capture)
    out = tmp_path / "profile"
    ran = harness("profile", *SMALL, "--out", out, "--format", "json")
    assert (ran.status, ran.json["error"]["code"]) == (2, "H064")
    traces = sorted(path.name for path in (out / "trace").iterdir())
    assert [name.split(".")[0] for name in traces] == ["reference-decode-r0", "reference-prefill-r0"]
    assert [problems_of(path) for path in (out / "trace").iterdir()] == [[], []]
    assert [path.name for path in (out / "memory").iterdir()] == ["reference-prefill-r0.pickle"]


def test_an_engine_that_fails_is_named(harness, tmp_path, install):
    name = install("""
from harness.engines import open_engine as open_any

class Engine:
    def __init__(self, inner):
        self.inner, self.name, self.capabilities, self.run = inner, "failing", inner.capabilities, inner.run

    def open_session(self, **limits):
        session, steps = self.inner.open_session(**limits), []
        original = session.step

        def step():
            steps.append(1)
            if len(steps) == 30:
                raise RuntimeError("out of pages")
            return original()

        session.step = step
        return session

def open_engine(folder, *, dtype, device, options):
    return Engine(open_any("reference", folder, dtype=dtype, device=device, options=options))
""")
    ran = harness("profile", "--engine", name, *SMALL, "--out", tmp_path / "profile", "--format", "json")
    assert (ran.status, ran.json["error"]["code"]) == (2, "H017")
    assert "out of pages" in ran.json["error"]["message"]


@pytest.mark.slow
def test_an_interrupted_profile_keeps_the_phases_that_were_finished(harness, tmp_path, llama, monkeypatch):
    from harness.profiling import profile

    def interrupted(session, window, **options):
        if window.phase == "decode":
            raise KeyboardInterrupt
        return count(session, window, **options)

    count = profile.count
    monkeypatch.setattr(profile, "count", interrupted)
    out = tmp_path / "profile"
    ran = harness("profile", "--model", llama, *SMALL, "--quick", "--out", out)
    assert ran.status == 130
    document = json.loads((out / "profile.json").read_text())
    assert [phase["name"] for phase in document["phases"]] == ["prefill"]
    assert document["notes"] == ["interrupted: without decode, mixed"]
    assert (out / "report.html").is_file()


@pytest.mark.slow
def test_a_profile_knows_its_machine(harness, tmp_path, llama):
    ran = harness("profile", "--model", llama, *SMALL, "--phase", "decode", "--out", tmp_path / "x", "--format", "json")
    (phase,) = ran.json["phases"]
    fastest, slowest = phase["wall_ms_range"]
    assert 0 < fastest <= phase["wall_ms"] <= slowest
    assert phase["cpu_ms"] > 0
    assert phase["num_involuntary_switches"] >= 0
    assert phase["bound_by"] == phase["bound_by_within_noise"][0]


def test_prompts_of_ones_own_are_profiled(harness, tmp_path):
    prompts = ["--token-ids", "1,2,3,4,5", "--token-ids", "9,8,7", "--max-new-tokens", 3]
    quick = ["--runs", 1, "--phase", "prefill", "--quick"]
    ran = harness("profile", *prompts, *quick, "--out", tmp_path / "own", "--format", "json")
    assert ran.status == 0, ran.err
    document = json.loads((tmp_path / "own" / "profile.json").read_text())
    (phase,) = document["phases"]
    assert phase["steps"][0]["query_lens"] == [5, 3]
    assert (document["batch_size"], document["prompt_tokens"], document["max_new_tokens"]) == (2, 5, 3)
    assert "the prompts have 5, 3 tokens: 8 together" in document["notes"]


def test_an_adapter_is_in_what_is_measured_and_not_in_the_formulas(harness, tmp_path):
    adapter, rank = write_adapter(tmp_path / "adapter", seed=1, rank=4, modules=("q_proj", "down_proj")), 4
    options = ["--token-ids", "1,2,3,4,5", "--max-new-tokens", 2, "--runs", 1, "--phase", "prefill", "--quick"]
    ran = harness("profile", *options, "--lora", adapter, "--out", tmp_path / "own", "--format", "json")
    assert ran.status == 0, ran.err
    (phase,) = ran.json["phases"]
    products = 5 * 3 * 2 * rank * ((96 + 192) + (192 + 96))  # rows, layers; inputs and outputs of q and of down
    assert phase["flops_measured"] - phase["flops_formula"] == products
    assert any("with the adapter" in note for note in ran.json["notes"])


@pytest.mark.parametrize("option", ["--prompt-tokens", "--batch-size"])
def test_prompts_of_ones_own_have_sizes_of_their_own(harness, tmp_path, option):
    ran = harness("profile", "--token-ids", "1,2", option, 3, "--out", tmp_path / "own")
    assert ran.status == 2
    assert f"leave {option} out" in ran.err
    assert not (tmp_path / "own").exists()


def write_requests(tmp_path, *lines):
    path = tmp_path / "requests.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def test_requests_of_a_file_are_profiled_each_to_its_own_end(harness, tmp_path):
    path = write_requests(
        tmp_path,
        {"prompt_token_ids": [1, 2, 3, 4, 5], "max_tokens": 2},
        {"prompt_tokens": 3, "max_tokens": 4},
        {"prompt": "the quick"},
    )
    schedule = ["--runs", 1, "--phase", "decode", "--wait", 0, "--warmup", 0]
    ran = harness("profile", "--requests", path, "--max-new-tokens", 3, *schedule, "--out", tmp_path / "own")
    assert ran.status == 0, ran.err
    document = json.loads((tmp_path / "own" / "profile.json").read_text())
    assert document["lengths"][:2] == [[5, 2], [3, 4]]
    assert document["lengths"][2][1] == 3
    assert [len(step["query_lens"]) for step in document["phases"][0]["steps"]] == [3, 2, 1]
    assert "3 x up to 5 prompt tokens, up to 4 new tokens each" in ran.out
    assert "the requests generate 2, 4, 3 tokens: 9 together" in document["notes"]
    assert "lengths" in read_profile(tmp_path / "own").key


@pytest.mark.parametrize(
    ("line", "options", "message"),
    [
        ({"prompt_tokens": 3}, ["--prompt", "the"], "the requests are given twice"),
        ({"prompt_tokens": 3}, ["--batch-size", 2], "the prompts that are given have sizes of their own"),
        ({"prompt_tokens": 3}, ["--max-new-tokens", 0], "the number must be positive"),
        ({"prompt_tokens": 3, "at": 0.5}, [], "a request of a profile cannot arrive later"),
        ({"prompt_token_ids": []}, [], "the prompt is neither text nor token ids"),
        ({"tokens": 3}, [], "this line has other fields"),
    ],
)
def test_requests_that_cannot_be_profiled(harness, tmp_path, line, options, message):
    path = write_requests(tmp_path, {"prompt_tokens": 3, "max_tokens": 2}, line)
    ran = harness("profile", "--requests", path, *options, "--out", tmp_path / "own", "--format", "json")
    assert (ran.status, ran.json["error"]["code"]) == (2, "H013")
    assert message in ran.json["error"]["message"]
    assert not (tmp_path / "own").exists()
