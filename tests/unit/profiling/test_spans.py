"""Spans: names, and steps that are not the planned ones."""

import dataclasses

import pytest

from harness.errors import Code, HarnessError
from harness.profiling.load import PlannedStep
from harness.profiling.trace.tables import layer_of, site_of
from harness.profiling.tracing import SpanEmitter
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
