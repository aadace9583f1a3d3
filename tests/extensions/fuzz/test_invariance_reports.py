"""What changes of schedule did, as text and as JSON."""

import json
from dataclasses import replace

import pytest

from harness.extensions.fuzz.report import invariance_text
from harness.extensions.fuzz.result import ChangedOperation, FirstChange, Invariance, InvarianceResult, ScheduleChange
from harness.report.document import document as result_document
from harness.results.check import Outcome


def operation(site, state, changed=0):
    return ChangedOperation(site=site, state=state, num_rows=9, num_changed=changed, roundings_max=float(changed))


SAME = ScheduleChange(
    name="repetition", before="alone", after="alone, again", is_offered=True,
    operations=(operation("attention", Invariance.SAME), operation("mlp.act", Invariance.SAME)),
)  # fmt: skip
NOISE = ScheduleChange(
    name="batch mates", before="alone", after="in one batch", is_offered=True,
    operations=(operation("attention", Invariance.NOISE, 2), operation("mlp.act", Invariance.UNKNOWN)),
    first=FirstChange(tap="model.layers.0.attention", request=1, position=7, roundings=0.5),
)  # fmt: skip
RANKS = ScheduleChange(name="ranks", before="one rank", after="two ranks", is_offered=False)
RESULT = InvarianceResult(
    engine="mine", model="/models/tiny", dtype="bfloat16", device="cpu", seed=3, num_rounds=2, elapsed_s=4.5,
    changes=(SAME, NOISE, RANKS),
)  # fmt: skip


def test_the_table_has_a_row_for_each_operation_and_a_column_for_each_change():
    text = invariance_text(RESULT)
    assert text.startswith("WITHIN ROUNDING  mine · tiny · bfloat16 · cpu · 2 sets of prompts")
    assert "model.layers.0.attention, request 1, position 7" in text
    assert "(the engine does not follow it)" in text
    table = [line.split() for line in text.splitlines() if line.startswith(("attention", "mlp.act"))]
    assert table == [["attention", "same", "noise"], ["mlp.act", "same", "-"]]


@pytest.mark.parametrize(
    ("change", "outcome", "headline"),
    [
        (SAME, Outcome.PASS, "INVARIANT"),
        (NOISE, Outcome.PASS, "WITHIN ROUNDING"),
        (
            replace(NOISE, operations=(operation("attention", Invariance.BEYOND, 2),)),
            Outcome.MISMATCH,
            "BEYOND ROUNDING",
        ),
        (replace(SAME, operations=(), error="the engine raised"), Outcome.MISMATCH, "BEYOND ROUNDING"),
        (
            replace(SAME, operations=(), refusal="one NUMA node only"),
            Outcome.NOTHING,
            "NOTHING CHECKED",
        ),
        (RANKS, Outcome.NOTHING, "NOTHING CHECKED"),
    ],
)
def test_the_verdict_is_that_of_the_worst_change(change, outcome, headline):
    result = replace(RESULT, changes=(change,))
    assert result.outcome is outcome
    assert invariance_text(result).startswith(headline)


def test_what_the_engine_cannot_serve_here_is_no_finding():
    refused = replace(SAME, operations=(), refusal="one NUMA node only\nand more")
    result = replace(RESULT, changes=(SAME, refused))
    assert result.outcome is Outcome.PASS
    assert "(not served: one NUMA node only)" in invariance_text(result)
    assert result_document(result)["changes"][1]["refusal"] == "one NUMA node only\nand more"


def test_json_has_the_state_of_every_change():
    document = json.loads(json.dumps(result_document(RESULT), allow_nan=False))
    assert document["verdict"] == "pass"
    assert [change["state"] for change in document["changes"]] == ["same", "noise", "unknown"]
    assert document["changes"][1]["operations"][0]["num_changed"] == 2
    assert document["changes"][1]["first"]["tap"] == "model.layers.0.attention"


def test_names_that_a_terminal_would_obey_are_printed_as_text():
    hostile = replace(NOISE, first=replace(NOISE.first, tap="\x1b[2J"))
    assert "\x1b" not in invariance_text(replace(RESULT, changes=(hostile,)))
