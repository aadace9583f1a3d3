"""Traces: names of spans, steps that are not the planned ones, what other tools read, and the profiler."""

import dataclasses
import gzip
import json
import warnings

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from harness.errors import Code, HarnessError
from harness.profiling.load import PlannedStep
from harness.profiling.trace.summary import summarize
from harness.profiling.trace.tables import SPAN, layer_of, site_of
from harness.profiling.trace.tables import STEP as WHOLE
from harness.profiling.tracing import SpanEmitter, profiling, step_span, trace
from harness.results.profile import StepShape

SHAPE = StepShape(phase="decode", query_lens=(1,), context_lens=(9,), num_sampled=1)
STEP = PlannedStep(index=3, shape=SHAPE, names=("engine.prepare", "model.layers.0.mlp.act", "lm_head"))


def pass_through(emitter, names):
    with emitter.step(STEP):
        for name in names:
            emitter.reached(name)


@pytest.mark.parametrize(
    ("name", "layer", "site"),
    [
        ("model.layers.3.mlp.act", "model.layers.3", "mlp.act"),
        ("model.layers.12.output", "model.layers.12", "output"),
        ("model.norm", None, "model.norm"),
        ("lm_head", None, "lm_head"),
    ],
)
def test_a_name_is_taken_apart(name, layer, site):
    assert (layer_of(name), site_of(name)) == (layer, site)


def test_the_planned_operations_pass():
    emitter = SpanEmitter()
    for _ in range(2):
        with emitter.step(STEP):
            emitter.begin_step(SHAPE)
            for name in STEP.names:
                emitter.reached(name)


def test_between_steps_nothing_is_expected():
    SpanEmitter().reached("whatever")


def test_spans_are_nvtx_ranges_too_where_there_is_cuda(monkeypatch):
    seen = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", seen.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: seen.append("pop"))
    with step_span(SHAPE.label):
        pass_through(SpanEmitter(), STEP.names)
    layer = ["model.layers.0", "model.layers.0.mlp.act", "pop", "pop"]
    around = [SHAPE.label, WHOLE, "engine.prepare", "pop", *layer, "lm_head", "pop", "pop", "pop"]
    assert seen == around


@pytest.mark.parametrize(
    ("names", "expected", "actual"),
    [
        (["engine.prepare", "lm_head"], "model.layers.0.mlp.act", "lm_head"),
        (["engine.prepare"], "model.layers.0.mlp.act", "the end of the step"),
        ([*STEP.names, "lm_head"], "the end of the step", "lm_head"),
    ],
)
def test_other_operations_are_an_error(names, expected, actual):
    with pytest.raises(HarnessError, match="does not repeat its steps") as caught:
        pass_through(SpanEmitter(), names)
    assert caught.value.code is Code.STEPS_DIFFER
    assert (caught.value.expected, caught.value.actual) == (expected, actual)
    assert caught.value.where == "step 3 of the load"


def test_another_shape_is_an_error():
    emitter = SpanEmitter()
    with pytest.raises(HarnessError, match="does not repeat") as caught, emitter.step(STEP):
        emitter.begin_step(dataclasses.replace(SHAPE, query_lens=(4,)))
    assert caught.value.actual == "decode[bs=1 toks=4 kv=5]"


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


@pytest.mark.parametrize("is_torchs_own", [True, False])
def test_only_torchs_warning_of_cycles_is_kept_from_the_user(is_torchs_own):
    text = "Warning: Profiler clears events at the end of each cycle." if is_torchs_own else "something else"
    profiler = profile(activities=[ProfilerActivity.CPU])
    seen = []
    with profiling(profiler):
        profiler.start()
        try:
            warnings.warn(text, stacklevel=1)  # an error under pytest, where nobody ignores it
        except UserWarning as warning:
            seen.append(str(warning))
    assert seen == ([] if is_torchs_own else [text])
