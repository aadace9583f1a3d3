"""The check for programs: JSON, and the figures of a JUnit file."""

import json
from dataclasses import fields
from typing import Any, NoReturn

from harness.report.check.json import check_json, check_json_text, check_properties
from harness.results.check import CheckResult, TapResult

from .examples import NUM_ROWS, build

KEYS = [
    "schema_version", "verdict", "engine", "model", "dtype", "device", "num_requests", "num_rows", "num_taps",
    "schedules", "first_divergence", "taps", "tokens", "coverage", "timings_s", "findings", "seen", "as_served",
    "power", "notes", "sources", "runs", "schedules_not_run", "next",
]  # fmt: skip
RUN_KEYS = {
    "schedule", "verdict", "num_rows", "taps", "findings", "first_divergence", "tokens", "logits", "coverage",
    "timings_s", "positions", "acceptance", "bits", "as_served", "propagated_from",
}  # fmt: skip
DIVERGENCE_KEYS = {
    "tap", "request", "position", "verdict", "code", "local_roundings", "bound_roundings", "propagated_ratio",
    "schedule", "step", "phase", "explanation", "source",
}  # fmt: skip


def refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")


def test_the_keys_are_the_promised_ones(result: CheckResult):
    document = check_json(result)
    assert list(document) == KEYS
    assert all(set(run) == RUN_KEYS for run in document["runs"])
    assert all(set(tap) == {field.name for field in fields(TapResult)} for tap in document["taps"])
    assert set(document["tokens"]) == {"compared", "equal", "ties"}
    assert set(document["coverage"]) == {
        "expected", "recorded", "missing", "missing_taps", "not_offered", "triggers", "only_through", "not_judged",
        "judged_compute", "judged_compute_of_rows", "states_left_out", "rows_ambiguous", "rows_not_judged",
        "taps_partly_judged", "rows_seen_before", "rows_left_out", "least_rows_found", "not_reached",
        "experts_not_chosen", "extent", "steps_mislabelled",
    }  # fmt: skip
    assert set(document["timings_s"]) == {"golden", "engine", "compare"}
    assert document["first_divergence"] is None or set(document["first_divergence"]) == DIVERGENCE_KEYS


def test_the_text_is_strict_json_of_plain_types(result: CheckResult):
    document = check_json(result)
    assert json.loads(check_json_text(result), parse_constant=refuse) == document
    assert plain_types(document) <= {dict, list, str, int, float, bool, type(None)}


def plain_types(value: Any) -> set[type]:
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return {type(value)}.union(*map(plain_types, parts))


def test_a_pass():
    document = check_json(build("pass"))
    assert (document["verdict"], document["first_divergence"], document["findings"]) == ("pass", None, [])
    assert (document["num_rows"], document["num_taps"]) == (3 * NUM_ROWS, 60)
    assert document["schedules"] == ["plain", "chunked", "batched"]
    assert document["timings_s"]["engine"] == 3 * 1.104


def test_the_cause_is_in_the_first_divergence_and_in_its_finding():
    document = check_json(build("explained"))
    explanation = document["first_divergence"]["explanation"]
    assert explanation == document["findings"][0]["explanation"]
    assert (explanation["cause"], explanation["residual_after"]) == ("rotary at a position off by one (+1)", 1.42)
    assert (explanation["provenance"]["slot"], explanation["provenance"]["writer_request"]) == (65, 0)
    assert document["findings"][1]["explanation"] is None


def test_a_mismatch_of_one_schedule_among_three():
    document = check_json(build("schedules"))
    assert document["verdict"] == "mismatch"
    assert [run["verdict"] for run in document["runs"]] == ["pass", "pass", "mismatch"]
    assert document["first_divergence"]["tap"] == "model.layers.20.q_rope"
    assert {finding["schedule"] for finding in document["findings"]} == {"batched"}
    by_name = {tap["name"]: tap for tap in document["taps"]}
    assert by_name["model.layers.20.q_rope"]["verdict"] == "bug"
    assert by_name["model.layers.20.q_rope"]["num_rows"] == 3 * NUM_ROWS


def test_nan_is_a_string_and_what_was_not_measured_is_null():
    document = check_json(build("nan"))
    by_name = {tap["name"]: tap for tap in document["taps"]}
    assert by_name["model.layers.20.q_rope"]["local_roundings_max"] == "nan"
    assert by_name["model.layers.20.k_cache"]["local_roundings_max"] is None
    assert document["first_divergence"]["local_roundings"] == "nan"


def test_a_missing_tap_is_listed_and_not_counted_as_checked():
    document = check_json(build("missing"))
    by_name = {tap["name"]: tap["verdict"] for tap in document["taps"]}
    assert by_name["model.layers.1.attention"] == "missing"
    assert document["num_taps"] == len(document["taps"]) - 1
    assert document["coverage"]["missing_taps"] == ["model.layers.1.attention"]


def test_nothing_checked():
    document = check_json(build("nothing"))
    assert (document["verdict"], document["num_taps"], document["taps"]) == ("nothing", 0, [])
    assert document["timings_s"] == {"golden": 2.314, "engine": None, "compare": None}


def test_every_property_is_a_pair_of_strings_of_its_own(result: CheckResult):
    pairs = check_properties(result)
    assert all(type(name) is str and type(value) is str for name, value in pairs)
    assert len(dict(pairs)) == len(pairs)


def test_a_mismatch():
    figures = dict(check_properties(build("mismatch")))
    assert figures["verdict"] == "mismatch"
    assert figures["roundings_max.rotary"] == "38.2"
    assert figures["propagated_ratio_max"] == "831"
    assert figures["first_divergence"] == (
        "model.layers.20.q_rope: request 1, position 17, step 4, decode, schedule batched"
    )
    assert (figures["tokens_compared"], figures["tokens_equal"], figures["tokens_ties"]) == ("96", "90", "1")
    assert figures["findings"] == "H040 H048"


def test_what_was_not_measured_is_left_out():
    figures = dict(check_properties(build("nothing")))
    assert not {"propagated_ratio_max", "first_divergence"} & figures.keys()
    assert figures["tokens_compared"] == "0"
