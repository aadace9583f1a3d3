"""Memory that no live row may depend on: what lets it in is named, and what does not is no finding."""

from contextlib import nullcontext

import pytest
import torch

from harness.engines import open_engine
from harness.extensions.fuzz.poison import Poisoner
from harness.formats.schedule import parse_schedule
from harness.oracle.model import load_model
from harness.plan import plan_engine
from harness.results.check import Memory

from .planted_leaks import BLOCK, LEAKS, NOT_FINITE, REQUESTS, THROWN_AWAY, VICTIM, ZEROED_BY_WHERE


@pytest.fixture(scope="module")
def poisoned(checkpoints, tiny_folder):
    """Return what poisons an engine under a schedule, and returns the poisoner."""
    graphs = {}

    def run(
        *, model="qwen3-tiny", engine="reference", schedule="batched", planted=nullcontext, subject=None, **options
    ):
        folder = checkpoints / model if (checkpoints / model).exists() else tiny_folder(model)
        if model not in graphs:
            graphs[model] = load_model(folder, dtype=torch.float32).graph
        if engine == "reference":
            options = {"block_size": str(BLOCK), **options}
        subject = subject or open_engine(engine, folder, dtype="float32", device="cpu", options=options)
        poisoner = Poisoner(
            plan=plan_engine(model=str(folder), dtype="float32"), engine=subject, graph=graphs[model], pool=None,
            progress=lambda *_: None, limit_s=60.0, planted=planted,
        )  # fmt: skip
        poisoner.poison(parse_schedule(schedule), REQUESTS, victim=VICTIM)
        return poisoner

    return run


@pytest.mark.sampled(1)
@pytest.mark.parametrize("planted", LEAKS, ids=lambda planted: planted.id)
def test_a_leak_is_named_with_its_operation_row_and_memory(poisoned, planted):
    result = poisoned(model=planted.model, schedule=planted.schedule, planted=planted.inject)
    assert result.failures == []
    first = result.leaks[0]
    assert (first.memory, first.tap, (first.request, first.position)) == (planted.memory, planted.tap, planted.row)
    assert first.values == planted.values
    assert {leak.memory for leak in result.leaks} == {planted.memory}


def filled(result):
    return {memory.memory for memory in result.memories() if memory.num_filled}


REACHED = {Memory.UNUSED, Memory.OTHERS, Memory.SCRATCH}
ALONE = REACHED - {Memory.OTHERS}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("setting", "reached"),
    [
        ({}, REACHED),
        ({"planted": ZEROED_BY_WHERE}, REACHED),
        ({"planted": THROWN_AWAY}, REACHED),
        ({"model": "gemma3-tiny", "schedule": "mixed"}, REACHED),
        ({"model": "qwen3-moe-tiny"}, REACHED),
        ({"model": "llama-tiny", "schedule": "preempted", "block_size": "4"}, REACHED),
        ({"model": "qwen3-next-tiny", "schedule": "mixed", "block_size": "4"}, REACHED),
        ({"model": "qwen3-next-tiny", "schedule": "prefix-hit"}, ALONE),
        ({"attention_backend": "contiguous"}, REACHED),
        ({"attention_backend": "cpp"}, REACHED),
        ({"debug_checks": "true", "schedule": "prefix-hit"}, ALONE),
        ({"schedule": "forked", "block_size": "4"}, ALONE),
        ({"schedule": "rewound", "block_size": "4"}, ALONE),
        ({"schedule": "speculative", "block_size": "2"}, ALONE),
        ({"model": "qwen2-tiny", "schedule": "chunked:7"}, ALONE),
    ],
)
def test_what_lets_nothing_in_is_no_finding(poisoned, setting, reached):
    result = poisoned(**setting)
    assert result.leaks == ()
    assert result.failures == []
    assert filled(result) == reached


@pytest.mark.slow
def test_an_engine_without_a_cache_has_nothing_to_poison(poisoned):
    result = poisoned(attention_backend="recompute")
    assert filled(result) <= {Memory.SCRATCH}


@pytest.mark.slow
def test_padding_of_hf_reaches_its_rows_as_zero_times_nan(poisoned):
    result = poisoned(engine="hf")
    (leak,) = result.leaks
    assert (leak.memory, leak.tap, leak.values) == (Memory.PADDING, "model.layers.0.attention", NOT_FINITE)
    assert (leak.request, leak.position) == (1, 0)  # request 0 is the longest, and has no padding
    assert Memory.OTHERS in filled(result)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["mamba", "falcon_h1"])
def test_states_of_recurrent_layers_are_poisoned(poisoned, family):
    result = poisoned(model=family, engine="hf")
    assert Memory.OTHERS in filled(result)
    assert {leak.memory for leak in result.leaks} == {Memory.PADDING}  # multiplied by a mask of zero
