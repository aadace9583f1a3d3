"""Which states are judged, over which rows, and what is said of the others."""

from itertools import pairwise
from types import SimpleNamespace

import torch

from harness.formats.recording import RequestInfo
from harness.formats.taps import Kind, Operation
from harness.judge.compare.sequences import sequences
from harness.judge.compare.states import (
    ReadState,
    StateRuns,
    _affordable,
    _before_the_first,
    _errors,
    _in_words,
    line_of,
)

PROMPT, END = 40, 60


def step(index, phase, *rows):
    """Return a step of rows (request, position)."""
    return SimpleNamespace(
        index=index,
        phase=phase,
        request=torch.tensor([request for request, _ in rows]),
        position=torch.tensor([position for _, position in rows]),
        entry=SimpleNamespace(num_rows=len(rows)),
        slot_mapping=None,
        block_tables=None,
    )


def recording(requests, *steps):
    return SimpleNamespace(manifest=SimpleNamespace(requests=requests), steps=list(steps))


def runs_of(made):
    graph = []
    return StateRuns(made, SimpleNamespace(graph=graph), set(), torch.float64)


def read(position, step=0, request=0):
    return ReadState(request, position, step)


def one_request(length=END, prompt=PROMPT):
    return SimpleNamespace(
        manifest=SimpleNamespace(requests=[RequestInfo(id=0, token_ids=[1] * length, prompt_length=prompt)])
    )


def test_ends_and_chunks_come_first_and_decode_is_spread():
    reads = [read(at) for at in (9, 19, 29, *range(PROMPT - 1, END))]
    chosen = [item.position for item in _affordable(reads, one_request())]
    assert {9, 19, 29, 39, 59} <= set(chosen)
    assert len(chosen) == 12
    decode = [at for at in chosen if at >= PROMPT]
    assert max(b - a for a, b in pairwise(decode)) <= 5


def test_long_prompts_are_judged_within_a_budget_of_tokens():
    length, chunk = 4000, 400
    reads = [read(at) for at in (*range(chunk - 1, length, chunk), *range(length, length + 100))]
    chosen = _affordable(reads, one_request(length + 100, length))
    assert sum(item.position + 1 for item in chosen) <= 4 * (length + 100)
    assert read(length + 99) in chosen


def test_one_state_is_judged_whatever_it_costs():
    assert _affordable([read(99_999)], one_request(100_000, 10)) == [read(99_999)]


def test_a_tap_that_hf_does_not_have_is_no_input():
    """As the parts of gpt-oss's fused product, which vLLM names otherwise than HF."""
    runs = StateRuns(recording([]), SimpleNamespace(graph={}), {"model.layers.0.attn.v_proj"}, torch.float64)
    assert not runs._judge.usable


def test_what_was_left_out_is_named_by_position():
    left_out = {read(41), read(43), read(44), read(45), read(7, request=2)}
    assert _in_words(left_out) == ("request 0: 41, 43 to 45", "request 2: 7")


def test_what_lies_between_the_last_right_and_the_first_wrong_one_is_judged_after_all():
    reads = [read(at, step=at) for at in range(10)]
    errors = SimpleNamespace(rows=SimpleNamespace(step=torch.tensor([2, 6, 9])), bad=torch.tensor([False, True, True]))
    actual = SimpleNamespace(errors={"tap": errors})
    assert _before_the_first(reads, {reads[at]: None for at in (2, 6, 9)}, actual) == reads[3:6]
    assert _before_the_first(reads, {reads[2]: None}, SimpleNamespace(errors={})) == []


TOKENS = [5, 6, 7, 8, 9, 10]


def test_the_rows_of_a_state_are_its_requests_latest_or_others_with_the_same_tokens():
    first = RequestInfo(id=0, token_ids=TOKENS, prompt_length=4)
    copy = RequestInfo(id=1, token_ids=TOKENS, prompt_length=4)
    made = recording(
        [first, copy],
        step(0, "prefill", (0, 0), (0, 1), (0, 2), (0, 3)),
        step(1, "decode", (0, 4)),
        step(2, "readback", (0, 4)),
        step(3, "decode", (0, 4)),  # once more
        step(4, "prefill", (1, 3)),
        step(5, "decode", (1, 4)),
    )
    runs = runs_of(made)
    assert line_of(runs, ReadState(0, 4, 2)) == [(5, 0, 0), (6, 0, 1), (7, 0, 2), (8, 0, 3), (9, 1, 0)]
    assert line_of(runs, ReadState(0, 4, 6))[-1] == (9, 3, 0)
    assert line_of(runs, ReadState(1, 4, 6)) == [(5, 0, 0), (6, 0, 1), (7, 0, 2), (8, 4, 0), (9, 5, 0)]
    assert line_of(runs, ReadState(1, -1, 6)) == []
    assert runs.num_taken_over(1) == 3
    assert runs.last_computed(0, 3) == (4, 1)
    assert runs.last_computed(1, 4) == (-1, -1)


def test_a_draft_goes_on_from_what_its_request_computed_last():
    """After a rejection an engine with states computes the accepted rows again: these are what the state is of."""
    request = RequestInfo(id=0, token_ids=TOKENS, prompt_length=3)
    draft = RequestInfo(id=1, token_ids=[*TOKENS[:4], 30], prompt_length=4, draft_of=0)
    made = recording(
        [request, draft],
        step(0, "prefill", (0, 0), (0, 1), (0, 2)),
        step(1, "decode", (0, 3)),
        step(2, "decode", (0, 3), (1, 4)),
    )
    (sequence,) = (sequence for sequence in sequences(made) if sequence.request.id == 1)
    assert list(zip(sequence.step.tolist(), sequence.row.tolist(), strict=True)) == [
        (0, 0),
        (0, 1),
        (0, 2),
        (2, 0),
        (2, 1),
    ]


def test_a_state_is_judged_where_the_rows_before_it_are_finite():
    nan, states = torch.full((4,), torch.nan), torch.ones(4, dtype=torch.float64)
    values = [(states.float(), states), (nan, states), (nan, nan.double()), (2 * states.float(), states)]
    reads = [(read(at), value) for at, (value, _) in enumerate(values)]
    pairs = {read(at): ({"tap": truth}, {"tap": truth}) for at, (_, truth) in enumerate(values)}
    errors = _errors(Operation(tap="tap", kind=Kind.STATE), reads, pairs, 4.0, torch.float32)
    assert errors.bad.tolist() == [False, True, False, True]
    assert errors.roundings[1] == torch.inf
