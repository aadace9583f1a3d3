"""What other tools read in our traces: spans as annotations, counters, and arrows from step to step."""

import gzip
import json

import pytest

from harness.profiling.trace.summary import summarize
from harness.profiling.trace.tables import SPAN
from harness.profiling.tracing import trace


@pytest.fixture(scope="module")
def traced(reference, find_window, tmp_path_factory):
    """The window of decode, and its trace."""
    window = find_window(reference, "decode")
    (path,) = trace(reference, window, tmp_path_factory.mktemp("trace"), worker="x", device="cpu", about={})
    with gzip.open(path, "rt") as file:
        return window, path, json.load(file)["traceEvents"]


def test_spans_are_annotations_and_no_operators(traced):
    _, path, events = traced
    spans = [event for event in events if SPAN.match(event.get("name", "")) and event["ph"] == "X"]
    assert len(spans) > 100
    assert {event["cat"] for event in spans} == {"user_annotation"}
    summary = summarize(path)
    assert all("::" in operator.name for operator in summary.operators)
    assert "self_attn.q_proj" in {operation.name for operation in summary.operations}
    assert [phase.name for phase in summary.phases] == ["decode"]


def test_counters_show_requests_and_what_they_hold(traced, reference):
    window, _, events = traced
    for name, key, values in (
        ("running requests", "requests", [2] * len(window.shapes)),
        ("K and V held", "bytes", [sum(s.context_lens) * reference.model.kv_bytes_per_token for s in window.shapes]),
    ):
        track = [event for event in events if event["ph"] == "C" and event["name"] == name]
        assert [event["args"][key] for event in track] == values


def test_an_arrow_leads_from_each_step_to_the_next(traced):
    window, _, events = traced
    steps = {event["ts"]: event for event in events if event.get("name", "").startswith("decode[")}
    arrows = [event for event in events if event.get("name") == "next step"]
    assert len(arrows) == 2 * (len(window.steps) - 1)
    for begin, end in zip(arrows[::2], arrows[1::2], strict=True):
        assert (begin["ph"], end["ph"], begin["id"]) == ("s", "f", end["id"])
        assert end["ts"] in steps
        assert any(at < begin["ts"] < at + step["dur"] for at, step in steps.items())
