"""What poison was let in, as text and as JSON."""

import json
from dataclasses import replace

import pytest

from harness.extensions.fuzz.report import poison_text
from harness.extensions.fuzz.result import FailedRun, Leak, PoisonedMemory, PoisonResult
from harness.report.document import document as result_document
from harness.results.check import Memory, Outcome

LEAK = Leak(
    memory=Memory.OTHERS, tap="model.layers.0.attention", request=0, position=21, step=1, phase="decode",
    schedule="batched", values=("nan", "inf"), poisoned_request=1, unrecorded=("model.layers.0.q_rope",),
)  # fmt: skip
UNUSED = PoisonedMemory(
    memory=Memory.UNUSED, num_filled=1234567, schedules=("plain", "batched"), num_rows=99, num_rounded=2
)
NO_PADDING = PoisonedMemory(memory=Memory.PADDING, num_filled=0, schedules=(), num_rows=0)
OTHERS = replace(UNUSED, memory=Memory.OTHERS, schedules=("batched",), num_rounded=0)
SCRATCH = replace(OTHERS, memory=Memory.SCRATCH)
RESULT = PoisonResult(
    engine="mine", model="/models/tiny", dtype="bfloat16", device="cpu", seed=3, num_rounds=1, elapsed_s=4.5,
    memories=(UNUSED, NO_PADDING, OTHERS, SCRATCH), leaks=(LEAK,), failures=(), refusals=("preempted: one only",),
)  # fmt: skip
FAILED = FailedRun(memory=Memory.UNUSED, value="nan", schedule="plain", error="the engine raised\nmore")


def test_a_leak_is_told_with_operation_row_and_memory():
    text = poison_text(RESULT)
    assert text.startswith("POISON LET IN  mine · tiny · bfloat16 · cpu · 1 set of prompts\n")
    table = {line[:15].strip(): line[15:].split() for line in text.splitlines()}
    assert table["unused cache"] == ["1,234,567", "99", "no", "plain,", "batched"]
    assert table["another request"] == ["1,234,567", "99", "YES", "batched"]
    assert "padded rows      -                  -                -         (the engine has none, or shows none)" in text
    told = text[text.index("1. ") :]
    assert told.startswith(
        "1. H240: model.layers.0.attention lets in another request (1): keys, values and states of another request\n"
        "   request 0, position 21, step 1 (decode), batched\n"
        "   the first value that changes where the memory is filled with nan, inf\n"
        "   a finite value changes nothing: as where what is read is multiplied by zero, since 0 * NaN is NaN\n"
        "   it may be an operation before it: the engine does not record model.layers.0.q_rope\n"
    )
    assert "in 2 runs bits of live rows changed by no more than rounding" in text
    assert "not served: preempted: one only" in text


def test_what_counts_with_finite_values_is_said():
    text = poison_text(replace(RESULT, leaks=(replace(LEAK, values=("1e+30",), unrecorded=()),)))
    assert "a finite value changes it, too: the memory is read, and what is read counts" in text
    assert "may be an operation before" not in text


@pytest.mark.parametrize(
    ("changes", "outcome", "headline"),
    [
        ({}, Outcome.MISMATCH, "POISON LET IN"),
        ({"leaks": ()}, Outcome.PASS, "NOTHING LET IN"),
        ({"leaks": (), "failures": (FAILED,)}, Outcome.MISMATCH, "POISON LET IN"),
        ({"leaks": (), "was_interrupted": True}, Outcome.NOTHING, "NOTHING CHECKED"),
        ({"leaks": (), "memories": (NO_PADDING, SCRATCH)}, Outcome.NOTHING, "NOTHING CHECKED"),
    ],
)
def test_the_verdict(changes, outcome, headline):
    result = replace(RESULT, **changes)
    assert result.outcome is outcome
    assert poison_text(result).startswith(headline)


def test_a_run_that_fails_is_said():
    text = poison_text(replace(RESULT, failures=(FAILED,)))
    assert "unused cache filled with nan, schedule plain: the run failed: the engine raised\n" in text


def test_an_engine_whose_memory_is_not_reached_is_told_what_to_do():
    text = poison_text(replace(RESULT, leaks=(), memories=(NO_PADDING, SCRATCH)))
    assert "no more than scratch could be filled:\ngive the engine fill_unused and fill_states (docs/fuzz.md)" in text


def test_json_has_code_and_weight_of_every_leak():
    document = json.loads(json.dumps(result_document(RESULT), allow_nan=False))
    assert document["verdict"] == "mismatch"
    (leak,) = document["leaks"]
    assert (leak["code"], leak["memory"], leak["has_weight"]) == ("H240", "another request", False)
    assert [memory["num_filled"] for memory in document["memories"]] == [1234567, 0, 1234567, 1234567]


def test_names_that_a_terminal_would_obey_are_printed_as_text():
    hostile = replace(LEAK, tap="\x1b[2J", unrecorded=("\x1b[3J",))
    assert "\x1b" not in poison_text(replace(RESULT, leaks=(hostile,)))
