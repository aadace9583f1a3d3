"""Conditions of the model and of the workload that a case can require."""

from types import SimpleNamespace

import pytest
import torch

from harness.compare.traits import Traits
from harness.compare.triggers import reached_triggers
from harness.errors import Code
from harness.oracle.model import load_model
from harness.recording.manifest import RequestInfo

from ..tiny_models import WINDOW

PLAIN = Traits(num_groups=1, window=None, original_positions=None)


def step(index, request, position, *, sampled=None, tables=None, phase="mixed"):
    return SimpleNamespace(
        index=index,
        phase=phase,
        request=torch.tensor(request),
        position=torch.tensor(position),
        sampled=None if sampled is None else torch.tensor(sampled),
        block_tables=tables,
    )


def recording(*steps, prompt_lengths=(4, 4)):
    requests = [
        RequestInfo(id=index, prompt_length=length, token_ids=list(range(length + 8)))
        for index, length in enumerate(prompt_lengths)
    ]
    return SimpleNamespace(steps=steps, manifest=SimpleNamespace(requests=requests))


@pytest.mark.parametrize(
    ("traits", "name"),
    [
        (Traits(num_groups=2, window=None, original_positions=None), "gqa"),
        (Traits(num_groups=1, window=4, original_positions=None), "window_exceeded"),
        (Traits(num_groups=1, window=None, original_positions=4), "rope_extended"),
    ],
)
def test_what_the_model_decides(traits, name):
    long = recording(step(0, [0] * 5, range(5)))
    assert name in reached_triggers(long, traits)
    assert name not in reached_triggers(long, PLAIN)
    assert name not in reached_triggers(long)
    if name != "gqa":
        assert name not in reached_triggers(recording(step(0, [0] * 4, range(4))), traits)


def test_a_ragged_batch_holds_requests_of_different_lengths():
    assert "ragged_batch" in reached_triggers(recording(step(0, [0, 1], [3, 2])))
    even = reached_triggers(recording(step(0, [0, 1], [3, 3])))
    assert "batch" in even
    assert "ragged_batch" not in even


def test_a_decode_step_that_opens_a_block():
    prefill = step(0, [0] * 4, range(4), sampled=[-1, -1, -1, 9], tables={0: [1]})
    assert "new_block" in reached_triggers(recording(prefill, step(1, [0], [4], sampled=[9], tables={0: [1, 2]})))
    assert "new_block" not in reached_triggers(recording(prefill, step(1, [0], [4], sampled=[9], tables={0: [1]})))


@pytest.mark.parametrize(("tables", "is_preempted"), [({0: [1]}, True), (None, False)])
def test_only_an_engine_with_blocks_can_lose_them(tables, is_preempted):
    """One without a cache computes every position in every step."""
    steps = [step(0, [0] * 4, range(4), tables=tables), step(1, [0] * 5, range(5), tables=tables)]
    assert ("preempted" in reached_triggers(recording(*steps))) == is_preempted
    once = [step(0, [0] * 4, range(4), tables=tables), step(1, [0], [4], tables=tables)]
    assert "preempted" not in reached_triggers(recording(*once))


def test_a_prompt_in_chunks():
    whole = step(0, [0] * 4, range(4), sampled=[-1, -1, -1, 9])
    assert "chunked_prefill" not in reached_triggers(recording(whole))
    first, last = step(0, [0] * 3, range(3), sampled=[-1] * 3), step(1, [0], [3], sampled=[9])
    assert "chunked_prefill" in reached_triggers(recording(first, last))
    assert "chunked_prefill" in reached_triggers(recording(step(0, [0] * 3, range(3)), step(1, [0], [3])))
    early = step(0, [0] * 3, range(3), sampled=[-1, -1, 9])  # it chose a token: that was its prompt
    assert "chunked_prefill" not in reached_triggers(recording(early))


def test_a_request_that_begins_behind_its_beginning():
    first = step(0, [0] * 4, range(4))
    hit = reached_triggers(recording(first, step(1, [1] * 2, [2, 3])))
    assert "prefix_hit" in hit
    assert "forked" not in hit
    together = reached_triggers(recording(first, step(1, [0, 1], [4, 4])))
    assert "forked" in together
    assert "forked" not in reached_triggers(recording(step(0, [0] * 3, range(3)), step(1, [0, 1], [3, 5])))


def test_traits_of_a_model(checkpoints, tiny):
    llama = load_model(checkpoints / "llama-tiny", dtype=torch.float32)
    original = llama.config.rope_parameters["original_max_position_embeddings"]
    assert Traits.of(llama) == Traits(num_groups=3, window=None, original_positions=original)
    assert Traits.of(tiny("gemma3_text")) == Traits(num_groups=2, window=WINDOW, original_positions=None)
    assert Traits.of(tiny("mamba")) == PLAIN


def test_a_requirement_that_is_not_reached_fails(bench, tmp_path):
    bench = bench("llama-tiny")
    sound = bench.recorded().write(tmp_path / "r")
    assert "gqa" in bench.compare(sound).coverage.triggers
    assert bench.compare(sound, require=("gqa", "ragged_batch")).findings == ()
    (finding,) = bench.compare(sound, require=("window_exceeded",)).findings
    assert finding.code is Code.TRIGGER_NOT_REACHED
    assert "sliding window" in finding.message
