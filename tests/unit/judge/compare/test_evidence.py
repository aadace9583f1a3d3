"""What is kept of wrong rows: which of many, with what history, and how batches are put together."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from harness.formats.taps import Kind, Operation
from harness.judge.compare.batch import spread
from harness.judge.compare.evidence import MAX_ROWS, AttentionContext, Evidence, histories, merged
from harness.oracle.watch import AttentionCall

from .judgements import floats, rows_of

LINEAR, ATTENTION = (Operation(tap=kind, kind=kind, inputs=("x", "y")) for kind in (Kind.LINEAR, Kind.ATTENTION))


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        (1, [0]),
        (2, [0, 5]),
        (3, [0, 3, 6]),
        (4, [0, 2, 5, 7]),
        (9, [*range(9)]),
        (10, [*range(10)]),
        (11, [*range(10)]),
    ],
)
def test_items_are_spread_over_all(count, expected):
    assert spread([100 + at for at in range(10)], count) == [100 + at for at in expected]


def evidence(rows, *, operation=LINEAR, held=()):
    """Of rows whose figures are told by their request and position."""
    numbers = floats([100 * request + position for request, position in rows])
    return Evidence(
        operation=operation, rows=rows_of(rows), expected=numbers[:, None] + floats([[0.0, 0.5]]),
        inputs=[numbers[:, None], 2 * numbers[:, None]] if operation is LINEAR else [], roundings=numbers + 1,
        bound=numbers + 2, dtype=torch.bfloat16, histories=tuple(held),
    )  # fmt: skip


def check(found, rows):
    assert list(zip(found.rows.request.tolist(), found.rows.position.tolist(), strict=True)) == rows
    numbers = [100 * request + position for request, position in rows]
    assert found.expected[:, 1].tolist() == [number + 0.5 for number in numbers]
    assert found.roundings.tolist() == [number + 1 for number in numbers]
    assert found.bound.tolist() == [number + 2 for number in numbers]
    if found.operation is LINEAR:
        assert found.inputs[0][:, 0].tolist() == numbers
        assert found.inputs[1][:, 0].tolist() == [2 * number for number in numbers]
    assert found.dtype is torch.bfloat16


def test_batches_are_put_together_in_the_order_of_requests_and_positions():
    check(merged([evidence([(3, 1), (1, 9)])]), [(1, 9), (3, 1)])
    parts = [evidence([(3, 1), (1, 9)]), evidence([(1, 2), (3, 0)]), evidence([(2, 2**20)])]
    check(merged(parts), [(1, 2), (1, 9), (2, 2**20), (3, 0), (3, 1)])


def test_no_more_rows_are_kept_than_of_one_batch():
    parts = [evidence([(0, at + MAX_ROWS * part) for at in range(MAX_ROWS)]) for part in range(2)]
    check(merged(parts), [(0, at) for at in range(0, 2 * MAX_ROWS, 2)])


def held(number):
    nothing = torch.zeros(0)
    return AttentionContext(
        rows=rows_of([]), query=nothing, key=nothing, value=nothing, key_step=nothing, scale=number, window=None
    )


def test_of_attention_all_rows_stay_as_they_are():
    whole = evidence([(3, 1), (1, 9)], operation=ATTENTION, held=[held(0)])
    assert whole.select(torch.tensor([0])) is whole
    check(merged([whole]), [(3, 1), (1, 9)])
    both = merged([whole, evidence([(0, 0)], operation=ATTENTION, held=[held(at) for at in range(1, 8)])])
    check(both, [(3, 1), (1, 9), (0, 0)])
    assert [history.scale for history in both.histories] == [0, 1, 2, 3, 4, 5]


# Histories.

SIZE, TOKENS = 2, 4


class Sequence:
    """Rows of steps 10, 11, ..., of which some are its own."""

    def __init__(self, length, own):
        self.step, self.is_own = torch.arange(10, 10 + length), torch.tensor([at in own for at in range(length)])

    def __len__(self):
        return len(self.step)


def batch_of(num_sequences, length=TOKENS - 1):
    sequences = [Sequence(length, {1, 2}) for _ in range(num_sequences)]
    return SimpleNamespace(
        num_tokens=TOKENS, sequences=sequences,
        rows=lambda places: rows_of([divmod(place, TOKENS) for place in places.tolist()]),
    )  # fmt: skip


def call_of(num_sequences, **options):
    shape = (num_sequences, 4, TOKENS, SIZE)
    query = torch.arange(float(torch.Size(shape).numel())).view(shape)
    module = nn.Module()
    return AttentionCall(
        path="", module=module, query=query, key=-query[:, :2], value=query[:, 2:] / 2, mask=None, options=options
    )


def test_the_history_behind_a_row():
    call = call_of(3, scaling=0.3, sliding_window=5, softcap=20.0, s_aux=torch.arange(4.0).view(4, 1))
    (one, other), places = histories(batch_of(3), call, torch.tensor([10, 2, 9]))
    assert places.tolist() == [2, 9, 10]
    assert other.rows.request.tolist() == [2, 2]
    assert other.rows.position.tolist() == [1, 2]
    for history, line, positions in ((one, 0, [2]), (other, 2, [1, 2])):
        assert torch.equal(history.query, call.query[line, :, positions].transpose(0, 1).double())
        assert torch.equal(history.key, call.key[line, :, :3].transpose(0, 1).double())
        assert torch.equal(history.value, call.value[line, :, :3].transpose(0, 1).double())
        assert {x.dtype for x in (history.query, history.key, history.value)} == {torch.float64}
        assert history.key_step.tolist() == [-1, 11, 12]
        assert (history.scale, history.softcap) == (0.3, 20.0)
        assert torch.equal(history.sinks, floats([0, 1, 2, 3]))


def test_without_options_there_is_neither_cap_nor_sink_nor_window():
    ((history,), _) = histories(batch_of(1), call_of(1), torch.tensor([1]))
    assert (history.softcap, history.sinks, history.window) == (None, None, None)
    assert history.scale == pytest.approx(SIZE**-0.5)


def test_of_many_requests_and_rows_some_are_kept():
    num = 12
    found, places = histories(batch_of(num), call_of(num), torch.arange(num * TOKENS))
    assert [int(history.rows.request[0]) for history in found] == [0, 2, 4, 6, 8, 10]
    assert len(places) == 6 * TOKENS
    wide = SimpleNamespace(num_tokens=48, sequences=[Sequence(48, {1})], rows=batch_of(1).rows)
    x = torch.zeros(1, 4, 48, SIZE)
    call = AttentionCall(path="", module=nn.Module(), query=x, key=x, value=x, mask=None, options={})
    assert histories(wide, call, torch.arange(48).flip(0))[1].tolist() == list(range(0, 48, 2))
