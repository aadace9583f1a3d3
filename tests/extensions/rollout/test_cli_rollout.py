"""`harness rollout`: the verdict in every form, and what cannot be compared."""

import json

import pytest

from harness.formats.checkpoint import resolve
from reference_engine import EngineConfig, LLMEngine, SamplingParams

from .training import sampled_rows

PROMPTS = [[1, 64, 155, 143, 3, 64], [1, 20, 31, 7, 9], [1, 99, 98, 97]]


@pytest.fixture(scope="module")
def rows():
    engine = LLMEngine(resolve("llama-tiny"), EngineConfig(dtype="bfloat16", num_blocks=32))
    params = SamplingParams(max_new_tokens=10, temperature=1.0, seed=0, num_logprobs=0, ignore_eos=True)
    return sampled_rows(engine, PROMPTS, params)


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


TERM = {
    "kind": "rest", "side": "both", "detail": "", "mean": 0.001, "mean_abs": 0.002, "rms": 0.004, "floor_rms": 0.008,
    "is_rounding": True, "explains": 0.0, "remedy": "", "worst_row": 0, "worst_token": 3,
}  # fmt: skip
STALE = TERM | {"kind": "weights", "side": "engine", "mean_abs": 0.3, "rms": 0.5, "is_rounding": False}
GAP = {
    "mean": 0.001, "mean_abs": 0.002, "rms": 0.004, "max_abs": 0.02, "k1": -0.001, "k3": 8e-6, "max_ratio": "inf",
    "effective_samples": 0.9999,
}  # fmt: skip


def kept(step, *terms, verdict="pass"):
    line = {"step": step, "verdict": verdict, "gap": GAP, "terms": terms, "seconds": 1.5, "share": 0.031}
    return json.dumps(line)


@pytest.fixture
def show(harness, tmp_path):
    def show(*lines, out=None, end="\n"):
        path = tmp_path / "gap.jsonl"
        path.write_text("\n".join(lines) + end)
        return harness("rollout", "--history", str(path), *([] if out is None else ["--out", str(out)]))

    return show


def test_a_history_is_shown_step_by_step_and_as_a_page(show, tmp_path):
    page = tmp_path / "gap.html"
    ran = show(kept(0, TERM), kept(50, TERM, STALE, verdict="mismatch"), out=page)
    assert ran.status == 1
    assert ran.out.startswith("MISMATCH  gap.jsonl · 2 steps\n")
    assert "50 mismatch 0.00200 8.00e-06 99.99 % weights (engine) 1.50 3.1 %" in " ".join(ran.out.split())
    text = page.read_text()
    assert "step 50 · weights (engine) · 0.300 nats, 62.5 times its floor" in text
    assert text.count('class="dot part-1 wrong') == 2, "in nats, and in floors"
    assert "https:" not in text
    again = show(kept(0, TERM), out=page)
    assert (again.status, "the output exists" in again.err) == (2, True)


def test_a_line_that_a_kill_has_cut_off_is_counted(show, tmp_path):
    whole = kept(50, TERM)
    ran = show(kept(0, TERM), whole[:200], whole, kept(50, TERM), whole[:3], out=tmp_path / "gap.html", end="")
    assert ran.status == 0, ran.err
    assert "2 lines of the file end in the middle (the run was killed): left out" in " ".join(ran.out.split())
    assert "2 lines of the file end in the middle" in (tmp_path / "gap.html").read_text()
    ran = show(kept(0, TERM)[:100], end="", out=tmp_path / "nothing.html")
    assert ran.status == 5
    assert ran.out.startswith("NOTHING CHECKED  gap.jsonl · 0 steps")
    assert "Nothing checked" in (tmp_path / "nothing.html").read_text()


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("prose", "gap.jsonl: line 2"),
        ('{"prompt_ids": [1]}', "step: Field required"),
        (kept("one"), "step: Input should be a valid integer"),
    ],
)
def test_what_is_no_history_is_refused(show, line, said):
    ran = show(kept(0, TERM), line)
    assert ran.status == 2
    assert "H230: this is no history of a training run" in ran.err
    assert said in ran.err
    assert "name the monitor's file" in ran.err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ((), "there is nothing to compare"),
        (("ROLLOUTS", "--out", "page.html"), "a page shows the steps of a run, and none is given"),
        (("ROLLOUTS", "--history", "gap.jsonl"), "leave ROLLOUTS or --history out"),
        (("--history", "gap.jsonl", "--rows", "2"), "leave --rows or --history out"),
    ],
)
def test_a_history_or_rollouts(harness, options, said):
    ran = harness("rollout", *options)
    assert ran.status == 2
    assert said in ran.err
