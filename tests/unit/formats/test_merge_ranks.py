"""Ranks' recordings become one: slices after one another, whole taps once; what must be equal and is not is said."""

import pytest
import torch

from harness.errors import Code, HarnessError
from harness.formats.recording import Recording, RequestInfo
from harness.formats.recording.merge import merge_ranks
from harness.formats.taps import Graph, Kind, Operation

from ...recording_writer import new_writer

GRAPH = Graph(
    (
        Operation(tap="heads", kind=Kind.LINEAR, shape=(4, 3)),
        Operation(tap="whole", kind=Kind.LINEAR, shape=(2,)),
        Operation(tap="lm_head", kind=Kind.LINEAR, shape=(5,)),
    )
)
REQUESTS = [RequestInfo(id=7, token_ids=[1, 2, 3], prompt_length=2)]
HEADS = torch.arange(24.0).view(2, 4, 3)
WHOLE = torch.arange(4.0).view(2, 2)


def writer(path):
    return new_writer(path, REQUESTS)


def rank(path, heads, whole=WHOLE, positions=(0, 1), num_steps=1):
    with writer(path) as out:
        for _ in range(num_steps):
            out.begin_step(
                phase="prefill", request=[7, 7], position=positions, sampled_rows=[1], slot_mapping=[4, 5],
                block_tables={7: [2]}, partial_rows={"lm_head": [1]},
            )  # fmt: skip
            out.tap("heads", heads)
            out.tap("whole", whole)
            out.tap("lm_head", torch.ones(1, 5))
            out.end_step([3])
    return Recording.open(path)


def merged(tmp_path, *ranks):
    with writer(tmp_path / "merged") as out:
        merge_ranks(ranks, GRAPH, out)
    return Recording.open(tmp_path / "merged")


def test_slices_are_put_behind_one_another(tmp_path):
    both = [rank(tmp_path / str(n), HEADS[:, 2 * n : 2 * n + 2]) for n in range(2)]
    (step,) = merged(tmp_path, *both).steps
    assert torch.equal(step.tap("heads"), HEADS)
    assert torch.equal(step.tap("whole"), WHOLE)
    assert (step.request.tolist(), step.position.tolist(), step.sampled.tolist()) == ([7, 7], [0, 1], [-1, 3])
    assert (step.slot_mapping.tolist(), step.block_tables) == ([4, 5], {7: [2]})
    assert step.rows_of("lm_head").tolist() == [1]


def refused(tmp_path, *ranks):
    with pytest.raises(HarnessError) as caught:
        merged(tmp_path, *ranks)
    assert not (tmp_path / "merged").exists()
    return caught.value


def test_a_whole_tap_that_differs(tmp_path):
    error = refused(tmp_path, rank(tmp_path / "0", HEADS[:, :2]), rank(tmp_path / "1", HEADS[:, 2:], WHOLE + 1))
    assert (error.code, error.where, error.actual) == (Code.RANKS_DIFFER, "whole, step 0", "rank 1's")


def test_minus_zero_is_not_zero(tmp_path):
    zeros = torch.zeros(2, 2)
    error = refused(tmp_path, rank(tmp_path / "0", HEADS[:, :2], zeros), rank(tmp_path / "1", HEADS[:, 2:], -zeros))
    assert error.code is Code.RANKS_DIFFER


def test_other_rows_and_other_steps(tmp_path):
    first = rank(tmp_path / "0", HEADS[:, :2])
    assert refused(tmp_path, first, rank(tmp_path / "1", HEADS[:, 2:], positions=(1, 2))).code is Code.RANKS_DIFFER
    error = refused(tmp_path, first, rank(tmp_path / "2", HEADS[:, 2:], num_steps=2))
    assert (error.code, error.actual) == (Code.RANKS_DIFFER, [1, 2])


def test_a_tap_that_one_rank_alone_has(tmp_path):
    with writer(tmp_path / "1") as out:
        out.begin_step(phase="prefill", request=[7, 7], position=[0, 1])
        out.tap("heads", HEADS[:, 2:])
        out.end_step()
    error = refused(tmp_path, rank(tmp_path / "0", HEADS[:, :2]), Recording.open(tmp_path / "1"))
    assert (error.code, error.actual) == (Code.RANKS_DIFFER, "lm_head")


def test_a_part_that_is_neither(tmp_path):
    error = refused(tmp_path, *(rank(tmp_path / str(n), HEADS[:, :3]) for n in range(2)))
    assert (error.code, error.expected, error.actual) == (Code.ENGINE_FAILED, "12 or 6 elements", 9)


def steps_of(path, *steps):
    """A recording whose steps hold the taps that are given; nothing is sampled."""
    with writer(path) as out:
        for taps in steps:
            out.begin_step(phase="decode", request=[7, 7], position=[0, 1])
            for name, x in taps.items():
                out.tap(name, x)
            out.end_step()
    return Recording.open(path)


@pytest.mark.parametrize(("ours", "theirs"), [("whole heads", "whole"), ("whole", "whole heads"), ("whole", "heads")])
def test_taps_that_one_rank_lacks_are_named_whichever_it_is(tmp_path, ours, theirs):
    taps = {"whole": WHOLE, "heads": HEADS}
    first, second = (
        steps_of(tmp_path / str(at), {name: taps[name] for name in names.split()})
        for at, names in enumerate((ours, theirs))
    )
    error = refused(tmp_path, first, second)
    assert (error.code, error.where) == (Code.RANKS_DIFFER, "step 0, rank 1")
    assert error.actual == "heads"


def test_every_step_and_one_rank_alone_are_merged(tmp_path):
    steps = [{"whole": WHOLE}, {"whole": WHOLE + 1}, {"unknown": HEADS}]
    ranks = [steps_of(tmp_path / str(at), *steps) for at in range(3)]
    merged_steps = merged(tmp_path, *ranks).steps
    assert [step.tap_names for step in merged_steps] == [["whole"], ["whole"], ["unknown"]]
    assert torch.equal(merged_steps[1].tap("whole"), WHOLE + 1)
    assert torch.equal(merged_steps[2].tap("unknown"), HEADS), "whose size is not known: all of it"
    assert [step.sampled for step in merged_steps] == [None] * 3
    alone = rank(tmp_path / "alone", HEADS, num_steps=1)
    with writer(tmp_path / "of one") as out:
        merge_ranks([alone], GRAPH, out)
    (step,) = Recording.open(tmp_path / "of one").steps
    assert torch.equal(step.tap("heads"), HEADS)
    assert step.sampled.tolist() == [-1, 3]


@pytest.mark.parametrize("width", [1, 3])
def test_a_part_that_is_neither_all_nor_its_share(tmp_path, width):
    ranks = [steps_of(tmp_path / str(at), {"heads": HEADS[:, :width]}) for at in range(2)]
    error = refused(tmp_path, *ranks)
    assert (error.code, error.where) == (Code.ENGINE_FAILED, "heads, step 0")
    assert (error.expected, error.actual) == ("12 or 6 elements", 3 * width)
    larger = [steps_of(tmp_path / f"larger{at}", {"whole": torch.ones(2, 3)}) for at in range(2)]
    assert refused(tmp_path, *larger).expected == "2 or 1 elements"


def test_rows_that_only_the_last_rank_has_otherwise(tmp_path):
    ranks = [rank(tmp_path / str(at), HEADS[:, :1], positions=(0, 1 + (at == 3))) for at in range(4)]
    assert refused(tmp_path, *ranks).where == "step 0, rank 3"
