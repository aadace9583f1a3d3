"""What an engine passes to the recorder: what is taken, and what is refused with its values, at both sides."""

import random

import numpy as np
import pytest
import torch

from harness.errors import Code, HarnessError
from harness.formats.recording import RequestInfo
from harness.formats.recording.arguments import (
    RequestLengths,
    block_tables,
    column,
    first_invalid_index,
    indices,
    known_phase,
    rows,
    step_rows,
    validated,
)

LENGTHS = {9: 3, 2: 1, 40: 5}
COUNTS = RequestLengths(RequestInfo(id=id_, token_ids=[1] * num, prompt_length=1) for id_, num in LENGTHS.items())


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("as_column", [np.array, torch.tensor])
def test_the_first_row_that_is_wrong(seed, as_column):
    generator = random.Random(seed)
    requests = [generator.choice([*LENGTHS, *LENGTHS, 0, 3, 41]) for _ in range(6)]
    unknown = next((at for at, request in enumerate(requests) if request not in LENGTHS), None)
    assert COUNTS.first_unknown(as_column(requests)) == unknown
    known = [generator.choice([*LENGTHS]) for _ in range(6)]
    positions = [generator.choice([-1, *range(LENGTHS[request]), *range(LENGTHS[request] + 1)]) for request in known]
    pairs = enumerate(zip(known, positions, strict=True))
    outside = next((at for at, (request, place) in pairs if not 0 <= place < LENGTHS[request]), None)
    assert COUNTS.first_outside(as_column(known), as_column(positions)) == outside
    assert COUNTS.of(as_column(known)).tolist() == [LENGTHS[request] for request in known]


@pytest.mark.parametrize("seed", range(30))
def test_the_first_index_that_is_wrong(seed):
    """What names no row comes before what names one twice."""
    generator = random.Random(seed)
    num_rows = generator.randint(1, 8)
    values = generator.choices(
        range(-1 if seed % 3 == 0 else 0, num_rows + 3 * (seed % 4 == 0)), k=generator.randint(0, 5)
    )
    outside = [at for at, value in enumerate(values) if not 0 <= value < num_rows]
    repeated = [at for at, value in enumerate(values) if value in values[:at]]
    expected = (outside or repeated or [None])[0]
    assert first_invalid_index(np.array(values, dtype=np.int64), num_rows) == expected


def test_one_row_is_known_by_itself():
    assert int(COUNTS.of(40)) == 5


TOKENS = RequestLengths(RequestInfo(id=id_, token_ids=[1] * num, prompt_length=1) for id_, num in {9: 3, 2: 1}.items())


def refused(function, *arguments, **options):
    with pytest.raises(HarnessError) as caught:
        function(*arguments, **options)
    assert caught.value.code is Code.BAD_RECORDER_CALL
    return caught.value


@pytest.mark.parametrize("phase", ["prefill", "decode", "mixed", "readback"])
def test_phases(phase):
    assert known_phase("here", phase) == phase
    assert refused(known_phase, "here", f"{phase}s").actual == f"{phase}s"


@pytest.mark.parametrize(
    "values",
    [
        [3, 0, -2], range(3, 6), (1,), [], torch.tensor([4, 5]), torch.tensor([1, 2], dtype=torch.uint8),
        np.array([7, 8], dtype=np.uint64), np.array([7, 8], dtype=np.int16), torch.zeros(0),
        np.array([2**63 - 1], dtype=np.uint64),
    ],
    ids=str,
)  # fmt: skip
def test_integers_as_callers_hold_them(values):
    array = column("here", values)
    assert array.tolist() == [int(value) for value in values]
    assert array.dtype == np.int64


@pytest.mark.parametrize(
    "values",
    [
        [1.5], ["a"], [None], [2**70], torch.tensor([1.0]), torch.tensor([[1]]), torch.tensor(3), [[1], [2]], 5,
        np.array([2**63], dtype=np.uint64), np.array([True]), [[1], [2, 3]],
    ],
    ids=str,
)  # fmt: skip
def test_what_is_no_list_of_integers(values):
    assert "integers" in refused(column, "here", values).what


def test_lengths_and_least_values_of_a_column():
    assert column("here", [1, 2], 2).tolist() == [1, 2]
    for length in (1, 3, 0):
        error = refused(column, "here", [1, 2], length)
        assert (error.expected, error.actual) == (length, 2)
    assert column("here", [0, -1, 5], at_least=-1).tolist() == [0, -1, 5]
    error = refused(column, "here", [0, -2, 5, -1], at_least=-1)
    assert (error.expected, error.actual) == ("at least -1", -2)
    assert column("here", [], at_least=3).tolist() == []
    assert column("here", [0], at_least=0).tolist() == [0]


def test_indices_name_rows_once():
    assert indices("here", [2, 0], 3).tolist() == [2, 0]
    for wrong, actual in (([0, 3], 3), ([-1], -1), ([1, 2, 1], 1)):
        error = refused(indices, "here", wrong, 3)
        assert (error.expected, error.actual) == ("different indices from 0 to 2", actual)


def test_rows_are_tokens_of_the_recording():
    request, position = rows("here", TOKENS, [9, 2, 9], [2, 0, 0])
    assert (request.tolist(), position.tolist()) == ([9, 2, 9], [2, 0, 0])
    assert request.dtype == position.dtype == np.int32
    assert "at least one row" in refused(rows, "here", TOKENS, [], []).what
    error = refused(rows, "here", TOKENS, [9, 4], [0, 0])
    assert (error.where, error.actual) == ("here, row 1", 4)
    error = refused(rows, "here", TOKENS, [2, 9, 9], [0, 1, 3])
    assert (error.where, error.expected, error.actual) == ("here, row 2", "0 to 2 for request 9", 3)
    assert refused(rows, "here", TOKENS, [2], [-1]).expected == "0 to 0 for request 2"
    assert refused(rows, "here", TOKENS, [2, 2], [0]).expected == 2


@pytest.mark.parametrize(
    ("tables", "table"),
    [
        ({9: [5, 0], 2: [7]}, [[5, 0, -1], [7, -1, -1]]), ({2: [1, 2, 3]}, [[1, 2, 3]]), ({2: []}, [[-1]]), ({}, []),
        ({9: [1, 2, 3, 4]}, [[1, 2, 3, 4, -1]]),
    ],
)  # fmt: skip
def test_block_tables_have_an_odd_width(tables, table):
    requests, padded = block_tables("here", TOKENS, tables)
    assert requests.tolist() == list(tables)
    assert padded.tolist() == table
    assert requests.dtype == padded.dtype == np.int32


def test_block_tables_of_requests_and_blocks_that_do_not_exist():
    assert refused(block_tables, "here", TOKENS, {9: [1], 3: [1]}).actual == 3
    error = refused(block_tables, "here", TOKENS, {9: [1, -1]})
    assert (error.where, error.actual) == ("here of request 9", -1)


def step(**changed):
    fields = {
        "phase": "mixed", "request": [9, 2], "position": [1, 0], "sampled_rows": [], "slot_mapping": None,
        "tables": None, "partial_rows": {},
    }  # fmt: skip
    return step_rows("step 3", TOKENS, **fields | changed)


def test_the_tensors_of_a_step():
    checked = step()
    assert (checked.phase, checked.num_rows, checked.partial_rows) == ("mixed", 2, {})
    assert list(checked.tensors) == ["rows.request", "rows.position"]
    checked = step(sampled_rows=[1], slot_mapping=[-1, 4], tables={2: [3]}, partial_rows={"a": [1], "b": []})
    assert list(checked.tensors) == [
        "rows.of.a", "rows.of.b", "rows.sampled", "kv.slot_mapping", "rows.request", "rows.position", "kv.requests",
        "kv.block_table",
    ]  # fmt: skip
    assert checked.tensors["rows.sampled"].tolist() == [-1, -1]
    assert checked.tensors["kv.slot_mapping"].tolist() == [-1, 4]
    assert checked.sampled_rows.tolist() == [1]
    assert {name: row.tolist() for name, row in checked.partial_rows.items()} == {"a": [1], "b": []}
    order = [tensor.dtype.itemsize for tensor in checked.tensors.values()]
    assert order == sorted(order, reverse=True)


@pytest.mark.parametrize(
    ("changed", "where"),
    [
        ({"phase": "late"}, "step 3"),
        ({"sampled_rows": [2]}, "step 3: sampled_rows"),
        ({"partial_rows": {"a": [0, 0]}}, "step 3: rows of a"),
        ({"slot_mapping": [0, -2]}, "step 3: slot_mapping"),
        ({"slot_mapping": [0]}, "step 3: slot_mapping"),
        ({"request": [9, 3]}, "step 3, row 1"),
        ({"request": [9, None]}, "step 3: request"),
        ({"position": [9]}, "step 3: position"),
        ({"tables": {3: [0]}}, "step 3: block_tables"),
    ],
)
def test_where_a_call_is_wrong(changed, where):
    assert refused(step, **changed).where == where


def test_what_the_manifest_cannot_hold():
    made = validated("RequestInfo", "wrong", "here", id=3, token_ids=[1, 2], prompt_length=1)
    assert made == RequestInfo(id=3, token_ids=[1, 2], prompt_length=1)
    error = refused(validated, "RequestInfo", "a request is wrong", "here", id="x", token_ids=[1], prompt_length=1)
    assert (error.what, error.where) == ("a request is wrong", "here: id")
