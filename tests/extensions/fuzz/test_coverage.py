"""What a scheduler did, told from the steps that were recorded."""

from types import SimpleNamespace

import torch

from harness.extensions.fuzz.judge import conditions, pairs
from harness.formats.recording.manifest import RequestInfo


def step(rows, tables=None, phase="mixed"):
    return SimpleNamespace(
        index=0,
        phase=phase,
        request=torch.tensor([request for request, _ in rows]),
        position=torch.tensor([position for _, position in rows]),
        sampled=None,
        block_tables=tables,
    )


def reached(*steps, num_requests=4):
    requests = [RequestInfo(id=at, prompt_length=2, token_ids=list(range(8))) for at in range(num_requests)]
    return conditions(SimpleNamespace(steps=steps, manifest=SimpleNamespace(requests=requests)))


def blocks(*tables):
    """Conditions of blocks, over steps with these tables."""
    events = reached(*(step([(request, 0) for request in table] or [(3, 0)], table) for table in tables))
    return {name for name in events if name.startswith("block ") and name != "block boundary"}


def test_triggers_are_conditions():
    assert {"batch", "ragged batch"} <= reached(step([(0, 1), (1, 0)]))


def test_a_step_is_told_by_its_decodes_and_prompts():
    assert "step of 1 decodes and 1 prompts" in reached(step([(0, 2), (1, 0), (1, 1)]))
    assert "step of 0 decodes and 3+ prompts" in reached(step([(0, 0), (1, 0), (2, 0), (3, 0)]))


def test_what_is_read_back_is_no_step():
    assert not {name for name in reached(step([(0, 2)], phase="readback")) if name.startswith("step of")}


def test_a_prompt_that_is_interrupted_or_begun_again():
    amid, done = step([(0, 0)]), step([(0, 0), (0, 1)])
    assert "prompt interrupted" in reached(amid, step([(1, 0)]), step([(0, 1)]))
    assert "prompt interrupted" not in reached(done, step([(1, 0), (1, 1)]), step([(0, 2)]))
    assert "preempted amid its prompt" in reached(amid, done)
    assert "preempted amid its prompt" not in reached(amid, step([(0, 1)]))
    assert "preempted amid its prompt" not in reached(done, done)


def test_what_becomes_of_a_block():
    assert blocks({0: [1]}) == {"block taken for the first time"}
    assert blocks({0: [1], 1: [1]}) == {"block taken for the first time by several"}
    assert blocks({0: [1]}, {0: [1]}) == {"block taken for the first time", "block kept"}
    assert blocks({0: [1]}, {0: [1], 1: [1]}) == {"block taken for the first time", "block shared"}
    assert "block shared no more" in blocks({0: [1], 1: [1]}, {0: [1]})
    assert "block handed over" in blocks({0: [1]}, {1: [1]})
    assert "block freed" in blocks({0: [1]}, {})
    assert "block taken again by its last owner" in blocks({0: [1]}, {}, {0: [1]})
    assert "block taken again by another" in blocks({0: [1]}, {}, {1: [1]})
    assert "block replaced in a table" in blocks({0: [1, 2]}, {0: [1, 3]})
    assert "block replaced in a table" not in blocks({0: [1, 2]}, {0: [1, 2, 3]})


def test_an_engine_without_block_tables_has_no_conditions_of_blocks():
    assert not {name for name in reached(step([(0, 0)])) if name.startswith("block")}


def test_two_conditions_together_are_new():
    assert pairs(frozenset({"a", "b"})) == {"a", "b", "a & b"}
