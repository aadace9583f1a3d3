"""`harness bench engine` on the tiny shape: what it prints, and how it ends."""

import json
import logging
import sys

import pytest

from harness.errors import Code
from harness.extensions.bench import peers
from harness.extensions.bench.peer import Generation
from harness.extensions.llamacpp.engine.tensor import llama

TINY = ("bench", "engine", "--shape", "tiny", "--repeats", "1")


@pytest.fixture
def wrong_peer(monkeypatch):
    """A peer that says 0 for every token."""

    class Zeros:
        name, shows_steps = "hf-generate", True

        def generate(self, workload):
            generation = Generation(token_ids=[[0] * length for length in workload.output_lens])
            generation.end_step()
            return generation

        def close(self): ...

    monkeypatch.setitem(peers.PEERS, "hf-generate", lambda setting: Zeros())


@pytest.mark.slow
def test_all_measures_of_all_peers(harness, tmp_path):
    ran = harness(*TINY, "--out", tmp_path / "bench.json", "--peer", "hf-generate", "--peer", "hf-continuous")
    assert (ran.status, ran.err) == (0, "")
    measures = ["prefill, batch 1", "decode step, batch 1", "decode step, batch 16", "uneven workload"]
    assert all(measure in ran.out for measure in measures)
    document = json.loads((tmp_path / "bench.json").read_text())
    assert [measure["name"] for measure in document["measures"]] == measures
    assert set(document["measures"][0]["samples"]) == {"reference", "hf-generate"}
    assert set(document["measures"][-1]["samples"]) == {"reference", "hf-generate", "hf-continuous"}
    assert all(
        value > 0 for measure in document["measures"] for entry in measure["samples"].values() for value in entry
    )
    assert [entry["batch_size"] for entry in document["shares"]] == [1, 16]
    assert {entry["peer"]: entry["num_requests"] for entry in document["agreements"]} == dict.fromkeys(
        ["hf-generate", "hf-continuous"], 22
    )
    assert all(rate > 1e8 for rate in document["rates"][0].values())
    assert document["machine"]["num_threads"] >= 1
    assert document["reference_backend"] == "attention_backend=paged"  # of a model this small
    assert "\nreference: attention_backend=paged\n" in ran.out


def test_json_goes_to_standard_output(harness):
    ran = harness(*TINY, "--peer", "hf-generate", "--dtype", "bfloat16", "--requests", "3", "--format", "json")
    assert (ran.status, ran.err) == (0, "")
    assert (ran.json["shape"], ran.json["dtype"], ran.json["repeats"]) == ("tiny", "bfloat16", 1)
    assert ran.json["agreements"][0]["num_requests"] == 20
    assert logging.getLogger("ContinuousBatchingLogger").disabled is False


def test_engine_options_reach_the_engine(harness):
    ran = harness(*TINY, "--peer", "hf-generate", "--engine-option", "attention_backend=nope")
    assert (ran.status, ran.err.split(":")[0]) == (2, Code.BAD_OPTION)
    assert "unknown attention backend" in ran.err


def test_a_peer_with_other_tokens_ends_it_before_anything_is_timed(harness, wrong_peer):
    ran = harness(*TINY, "--peer", "hf-generate")
    assert (ran.status, ran.out) == (1, "")
    assert ran.err.startswith(f"{Code.PEER_TOKENS_DIFFER}: hf-generate and the reference engine generate different")


ENGINE = """
from harness.engines import Capabilities, open_engine as open_any

class Engine:
    name, capabilities = "mine", Capabilities(schedules=("plain",))

    def __init__(self, folder, dtype, device):
        self.inner = open_any("reference", folder, dtype=dtype, device=device)

    def run(self, workload, writer):
        raise AssertionError
    {method}

def open_engine(folder, *, dtype, device, options):
    return Engine(folder, dtype, device)
"""
STEPS = """
    def open_session(self, **limits):
        return self.inner.open_session(**limits)
"""
GENERATE = """
    def generate(self, prompts, max_new_tokens):
        session = self.inner.open_session(max_num_tokens=512, max_num_seqs=16)
        numbers = [session.add(prompt, count) for prompt, count in zip(prompts, max_new_tokens)]
        tokens = {number: [] for number in numbers}
        while any(len(tokens[number]) < count for number, count in zip(numbers, max_new_tokens)):
            for number, token in session.step().items():
                tokens[number].append(token)
        session.close()
        return [tokens[number] for number in numbers]
"""


def test_any_installed_engine_is_timed_step_by_step(harness, install):
    name = install(ENGINE.format(method=STEPS))
    ran = harness(*TINY, "--engine", name, "--peer", "reference", "--requests", "3", "--format", "json")
    assert (ran.status, ran.err) == (0, "")
    assert ran.json["engine"] == name
    assert all(set(measure["samples"]) == {name, "reference"} for measure in ran.json["measures"])
    assert ran.json["agreements"] == [
        {"peer": "reference", "num_requests": 20, "num_ties": 0, "worst_tie_stds": 0.0},
    ]


def test_an_engine_that_only_generates_is_timed_as_a_whole(harness, install):
    name = install(ENGINE.format(method=GENERATE))
    ran = harness(*TINY, "--peer", name, "--requests", "3", "--format", "json")
    assert (ran.status, ran.err) == (0, "")
    *even, uneven = ran.json["measures"]
    assert all(set(measure["samples"]) == {"reference"} for measure in even)
    assert set(uneven["samples"]) == {"reference", name}
    assert [(entry["peer"], entry["num_requests"]) for entry in ran.json["agreements"]] == [(name, 20)]


def test_an_engine_that_cannot_continue_a_prompt_is_told_what_it_lacks(harness, install):
    ran = harness(*TINY, "--engine", install(ENGINE.format(method="")))
    assert (ran.status, ran.err.split(":")[0]) == (2, Code.ENGINE_LACKS_METHOD)
    assert "expected: open_session or generate" in ran.err


def test_what_an_engine_does_not_serve_is_said_and_the_rest_is_timed(harness):
    ran = harness(*TINY, "--engine", "hf", "--peer", "reference", "--requests", "3", "--format", "json")
    assert (ran.status, ran.err) == (0, "")
    assert list(ran.json["absent"]) == ["hf, uneven"]
    assert "equally long prompts" in ran.json["absent"]["hf, uneven"]
    assert [sorted(measure["samples"]) for measure in ran.json["measures"]] == [["hf", "reference"]] * 3 + [
        ["reference"]
    ]
    assert ran.json["agreements"][0]["num_requests"] == 17


def test_options_of_a_peer_that_reads_none_are_refused(harness):
    ran = harness(*TINY, "--engine", "hf-generate", "--engine-option", "block_size=4")
    assert (ran.status, ran.err.split(":")[0]) == (2, Code.BAD_OPTION)
    assert "block_size" in ran.err


@pytest.mark.parametrize(("options", "words"), [
    (["--shape", "huge"], "tiny, 142m"),
    (["--peer", "nobody"], "hf-generate, hf-continuous"),
    (["--repeats", "0"], "--repeats"),
    (["--engine", "hf-generate", "--peer", "nobody"], "nobody"),
    (["--dtype", "int8"], "float32, bfloat16, float16"),
    (["--device", "tpu"], "cpu or cuda"),
])  # fmt: skip
def test_bad_input(harness, options, words):
    ran = harness("bench", "engine", *options)
    assert (ran.status, ran.err.split(":")[0]) == (2, Code.BAD_OPTION)
    assert words in ran.err


def test_a_file_that_is_there_is_not_overwritten(harness, tmp_path):
    (tmp_path / "bench.json").write_text("mine")
    ran = harness(*TINY, "--out", tmp_path / "bench.json")
    assert (ran.status, ran.err.split(":")[0]) == (2, Code.OUTPUT_EXISTS)
    assert (tmp_path / "bench.json").read_text() == "mine"


def test_a_named_peer_that_is_not_installed(harness, monkeypatch):
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    llama.cache_clear()  # it may be installed, and in use by now
    ran = harness(*TINY, "--peer", "llamacpp")
    assert (ran.status, ran.err.split(":")[0]) == (2, Code.BAD_OPTION)
    assert "pip install -e '.[llamacpp]' in the harness's checkout" in ran.err


@pytest.mark.slow
def test_a_checkpoint_of_ones_own_is_timed(harness, checkpoints):
    before = sorted((checkpoints / "qwen2-tiny").iterdir())
    ran = harness(
        "bench", "engine", "--model", checkpoints / "qwen2-tiny", "--requests", 3, "--repeats", 1,
        "--peer", "hf-generate", "--format", "json",
    )  # fmt: skip
    assert ran.status == 0, ran.err
    assert ran.json["shape"] == str(checkpoints / "qwen2-tiny")
    assert {name for measure in ran.json["measures"] for name in measure["samples"]} == {"reference", "hf-generate"}
    assert sorted((checkpoints / "qwen2-tiny").iterdir()) == before


def test_sizes_of_decode_and_peers_of_fixed_caches(harness):
    """The peers compute the same tokens; a share is of what the machine reached in the same run."""
    sizes = ("--batch-size", "1", "--batch-size", "3", "--prompt-tokens", "7", "--prompt-tokens", "12")
    ran = harness(*TINY, "--peer", "gpt-fast", "--peer", "hf-static", *sizes, "--requests", "2", "--format", "json")
    assert (ran.status, ran.err) == (0, "")
    assert [measure["name"] for measure in ran.json["measures"][:4]] == [
        "prefill, batch 1, 7 tokens", "prefill, batch 1, 12 tokens",
        "decode step, batch 1, 7 tokens", "decode step, batch 3, 7 tokens",
    ]  # fmt: skip
    assert all(
        set(measure["samples"]) == {"reference", "hf-static", "gpt-fast"} for measure in ran.json["measures"][:6]
    )
    assert {entry["peer"]: entry["num_requests"] for entry in ran.json["agreements"]} == {
        "hf-static": 10,
        "gpt-fast": 8,
    }
    (rates,), share = ran.json["rates"], ran.json["shares"][0]
    step_s = ran.json["measures"][2]["medians"]["gpt-fast"] / 1000
    assert share["read_shares"]["gpt-fast"] == pytest.approx(
        share["bytes_per_step"]["gpt-fast"] / step_s / rates["read_bytes_per_second"]
    )
    products = ran.json["product_shares"][0]
    assert products["flops"] == 2 * 7 * (2 * (64 * 128 * 2 + 64 * 64 * 2 + 3 * 64 * 128 + 2 * 64 + 2 * 32) + 64)


def test_bytes_are_those_of_the_form_that_each_engine_keeps(harness):
    """Peers read the same values in the dtype: tokens are compared, and K and V in float8 would change some."""
    sizes = ("--batch-size", "3", "--prompt-tokens", "7", "--requests", "2", "--dtype", "bfloat16", "--format", "json")
    ran = harness(*TINY, "--float8-weights", "--peer", "hf-generate", *sizes)
    assert (ran.status, ran.err) == (0, "")
    in_layers, num_blocks = 2 * (64 * 128 * 2 + 64 * 64 * 2 + 3 * 64 * 128), 2 * 7
    others, cached = 512 * 64 + 2 * (2 * 64 + 2 * 32) + 64, 3 * (7 + 4 / 2) * 2 * 2 * 2 * 32
    assert ran.json["shares"][0]["bytes_per_step"] == {
        "reference": in_layers + 4 * num_blocks + 2 * (others + cached),
        "hf-generate": 2 * (in_layers + others + cached),
    }  # fmt: skip
    ran = harness(*TINY, "--engine-option", "kv_cache_dtype=float8_e4m3fn", "--peer", "reference", *sizes)
    assert (ran.status, ran.err) == (0, "")
    assert ran.json["shares"][0]["bytes_per_step"] == {"reference": 2 * (in_layers + others) + cached}


def test_float8_weights_are_a_shapes_own(harness):
    ran = harness("bench", "engine", "--model", "qwen3-tiny", "--float8-weights", "--peer", "reference")
    assert (ran.status, ran.err.split(":")[0]) == (2, Code.BAD_OPTION)


def test_a_peer_that_computes_one_architecture_refuses_another(harness):
    ran = harness("bench", "engine", "--model", "llama-tiny", "--peer", "gpt-fast", "--requests", "2")
    assert (ran.status, ran.err.split(":")[0]) == (2, Code.ENGINE_CANNOT_SERVE)
    assert "gpt-fast computes Qwen3 alone, and not llama" in ran.err
