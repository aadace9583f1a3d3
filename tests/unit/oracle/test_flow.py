"""Where a tensor comes from: the watched values behind it, and what was computed since."""

import pytest
import torch

from harness.oracle.flow import NOWHERE, Flow, Origin

FIRST, MASK, ORDER = torch.zeros(4, 2, dtype=torch.int64), torch.zeros(4, 6, dtype=torch.bool), torch.tensor([2, 0])
"""Made before: a tensor that is made in the block is computed in it."""


def marked(flow, *names, shape=(4, 6)):
    """Tensors that are watched under these names."""
    tensors = [torch.randn(shape) for _ in names]
    for tensor, name in zip(tensors, names, strict=True):
        flow.mark(tensor, Origin((name,)))
    return tensors


def test_operations_are_noted_with_their_sources_in_order():
    with Flow() as flow:
        a, b = marked(flow, "a", "b")
        assert flow.of(a) == Origin(("a",))
        assert flow.of(a + b) == Origin(("a", "b"), ("add",))
        assert flow.of(b + a) == Origin(("b", "a"), ("add",))
        assert flow.of((a * b).sigmoid() * a) == Origin(("a", "b"), ("mul", "sigmoid"))
        assert flow.of(MASK) == NOWHERE


@pytest.mark.parametrize(
    "move",
    [
        lambda x: x.view(6, 4),
        lambda x: x.t().contiguous(),
        lambda x: x[1:, ::2].clone(),
        lambda x: x.to(torch.bfloat16),
        lambda x: torch.cat([x, x]),
        lambda x: x.gather(1, FIRST),
        lambda x: x[ORDER],
        lambda x: x.masked_fill(MASK, 0),
        lambda x: x.repeat_interleave(2, dim=0),
    ],
)
def test_moving_is_no_operation(move):
    with Flow() as flow:
        (a,) = marked(flow, "a")
        assert flow.of(move(a)) == Origin(("a",))


def test_what_is_written_in_place_is_noted():
    with Flow() as flow:
        a, b = marked(flow, "a", "b")
        c = a * 2
        c += b
        assert flow.of(c) == Origin(("a", "b"), ("mul", "add_"))
        d = torch.empty(4, 6)
        d[1] = b[0]
        assert flow.of(d).sources == ("b",)


def test_views_share_what_is_noted_of_their_storage():
    with Flow() as flow:
        (a,) = marked(flow, "a")
        view = (a + 1).view(-1)[3:9]
        assert flow.of(view) == Origin(("a",), ("add",))


def test_a_part_of_a_storage_may_be_a_value_of_its_own():
    """Query, key and value of one projection."""
    with Flow() as flow:
        (a,) = marked(flow, "a")
        first, second = (a * 2).chunk(2, dim=0)
        flow.mark(first, Origin(("first",)))
        assert flow.of(first) == Origin(("first",))
        assert flow.of(first + 1) == Origin(("first",), ("add",))
        assert flow.of(second) == Origin(("a",), ("mul",))
        assert flow.of(first.view(-1)) == Origin(("first",))


def test_what_is_marked_anew_forgets_what_was_noted():
    with Flow() as flow:
        (a,) = marked(flow, "a")
        b = a + 1
        flow.mark(b, Origin(("b",)))
        assert flow.of(b * 2) == Origin(("b",), ("mul",))


def test_nothing_is_noted_behind_the_block():
    with Flow() as flow:
        (a,) = marked(flow, "a")
    assert flow.of(a * 2) == NOWHERE


def test_a_tensor_in_the_place_of_another_does_not_inherit_its_origin():
    """Weights that are read while the model is traced get memory that was given back a moment ago."""
    flow = Flow()
    for _ in range(100):
        with flow:
            (a,) = marked(flow, "a")
            del a
        fresh = torch.zeros(4, 6)  # nobody's
        assert flow.of(fresh) == NOWHERE
