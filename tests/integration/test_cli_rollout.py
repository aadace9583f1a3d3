"""`harness rollout`: the verdict in every form, and what cannot be compared."""

import json

import pytest

from harness.formats.checkpoint import resolve
from reference_engine import EngineConfig, LLMEngine, SamplingParams

PROMPTS = [[1, 64, 155, 143, 3, 64], [1, 20, 31, 7, 9], [1, 99, 98, 97]]


@pytest.fixture(scope="module")
def rows():
    engine = LLMEngine(resolve("llama-tiny"), EngineConfig(dtype="bfloat16", num_blocks=32))
    params = SamplingParams(max_new_tokens=10, temperature=1.0, seed=0, num_logprobs=0, ignore_eos=True)
    return [
        {
            "prompt_ids": prompt,
            "response_ids": list(output.token_ids),
            "engine_logprobs": [each.logprob for each in output.logprobs],
        }
        for prompt, output in zip(PROMPTS, engine.generate(PROMPTS, params), strict=True)
    ]


@pytest.fixture
def compare(harness, tmp_path):
    def compare(rows, *options):
        path = tmp_path / "rollouts.jsonl"
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        return harness("rollout", str(path), "--model", "llama-tiny", "--dtype", "bfloat16", *options)

    return compare


def test_a_sound_log_passes(compare, rows):
    ran = compare(rows)
    assert ran.status == 0, ran.err
    assert ran.out.startswith("PASS  rollouts.jsonl · llama-tiny · bfloat16 · 3 rows, 30 tokens compared")
    assert "tokens      45 = 30 compared + 15 of prompts" in ran.out
    assert "not judged the trainer (the named model in high precision stands in its place)" in " ".join(ran.out.split())


def test_a_fault_is_a_mismatch_in_json(compare, rows):
    shifted = [{**row, "trainer_logprobs": [value - 1 for value in row["engine_logprobs"]]} for row in rows]
    ran = compare(shifted, "--format", "json")
    assert ran.status == 1
    document = ran.json
    assert document["verdict"] == "mismatch"
    assert document["gap"]["mean"] == pytest.approx(-1)
    assert sum(term["mean"] for term in document["terms"]) == pytest.approx(-1)
    assert [finding["code"] for finding in document["findings"]] == ["H235"]


def test_sides_at_hand_as_markdown(compare, rows):
    ran = compare(rows, "--trainer", "llama-tiny", "--layout", "left", "--rows", "2", "--format", "markdown")
    assert ran.status == 0, ran.err
    assert ran.out.startswith("```text\nPASS  ")
    assert "operations  trainer" in ran.out


def test_nothing_to_compare(compare, rows):
    ran = compare([{**row, "mask": [0] * len(row["response_ids"])} for row in rows])
    assert ran.status == 5
    assert ran.out.startswith("NOTHING CHECKED  ")


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"response_ids": [300] * 10}, "H010"),
        ({"prompt_ids": [1] * 600}, "H012"),
        ({"response_ids": []}, "H231"),
        ({"routed_experts": [[[0, 1]]] * 15}, "H232"),
        ({"engine_logprobs": [0.5] * 10}, "H233"),
        ({"weight_version": "other"}, "H234"),
    ],
)
def test_what_cannot_be_compared_is_refused(compare, rows, change, code):
    first = {**rows[1], "weight_version": "one"}
    ran = compare([first, {**first, **change}])
    assert ran.status == 2
    assert ran.err.startswith(f"{code}: ")


@pytest.mark.parametrize("options", [["--layout", "top"], ["--head", "float8"], ["--previous", ""]])
def test_bad_options_are_refused(compare, rows, options):
    ran = compare(rows, *options)
    assert ran.status == 2
    assert ran.err.startswith("H013: ")
    assert options[0] in ran.err
