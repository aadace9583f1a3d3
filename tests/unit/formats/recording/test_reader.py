"""Parts of the reader by hand: which files are kept in memory, and taps under other names."""

from types import SimpleNamespace

import pytest
import torch

from harness.errors import Code, HarnessError
from harness.formats.recording import Recording, RequestInfo, reader

from ....recording_writer import new_writer


def entries(*sizes):
    return [SimpleNamespace(index=at, num_bytes=size) for at, size in enumerate(sizes)]


@pytest.mark.parametrize(
    ("sizes", "kept"),
    [((10, 49, 50, 51), {0, 1}), ((49, 49, 2, 1, 1), {0, 1, 3}), ((49, 40, 12, 10, 1, 1), {0, 1, 3}), ((), set())],
)
def test_small_files_are_kept_as_long_as_there_is_room(monkeypatch, sizes, kept):
    """Of less than 50 bytes each; 100 in all, of which the last is left."""
    monkeypatch.setattr(reader, "_MAP_FROM_BYTES", 50)
    monkeypatch.setattr(reader, "_KEPT_BYTES", 100)
    assert reader._small_files(entries(*sizes)) == kept


@pytest.fixture
def recording(tmp_path):
    with new_writer(tmp_path / "r", [RequestInfo(id=7, token_ids=[1, 2, 3], prompt_length=2)]) as writer:
        writer.begin_step(
            phase="prefill", request=[7, 7], position=[0, 1], partial_rows={"head": [1]}, block_tables={7: [4, 9]}
        )
        writer.tap("first", torch.tensor([[1.0], [2.0]]))
        writer.tap("second", torch.tensor([[3.0], [4.0]]))
        writer.tap("head", torch.tensor([[5.0]]))
        writer.end_step()
    return Recording.open(tmp_path / "r")


def test_taps_under_their_own_names(recording):
    (step,) = recording.steps
    assert step.tap_names == ["first", "second", "head"]
    assert recording.with_names({"unknown": "other"}) is recording
    assert step.tap_names == ["first", "second", "head"]
    assert [tap.name for tap in recording.taps] == ["first", "second", "head"]
    assert step.rows_of("head").tolist() == [1]
    assert step.rows_of("first") is None
    assert step.block_tables == {7: [4, 9]}
    assert (step.sampled, step.slot_mapping, step.phase, step.index) == (None, None, "prefill", 0)


def test_taps_under_other_names(recording):
    recording.with_names({"first": "renamed", "head": "lm_head"})
    (step,) = recording.steps
    assert step.tap_names == ["renamed", "second", "lm_head"]
    assert [tap.name for tap in recording.taps] == ["renamed", "second", "lm_head"]
    assert step.tap("renamed").tolist() == [[1.0], [2.0]]
    assert step.rows_of("lm_head").tolist() == [1]
    assert [step.has(tap) for tap in ("renamed", "first", "second", "lm_head", "head")] == [
        True,
        False,
        True,
        True,
        False,
    ]


def test_of_two_taps_with_one_name_the_first_is_shown(recording):
    recording.with_names({"second": "first"})
    (step,) = recording.steps
    assert step.tap_names == ["first", "head"]
    assert [tap.name for tap in recording.taps] == ["first", "head"]
    assert step.tap("first").tolist() == [[1.0], [2.0]]


def test_index_tensors_are_no_taps(recording):
    (step,) = recording.steps
    assert not step.has("rows.request")
    assert not step.has("rows.of.head")
    for name in ("rows.request", "kv.requests"):
        with pytest.raises(KeyError):
            step.tap(name)


@pytest.mark.parametrize("map_from", [0, 1 << 20])
@pytest.mark.parametrize("kept", [0, 1 << 20])
def test_tensors_are_the_same_mapped_or_read_or_kept(recording, monkeypatch, map_from, kept):
    monkeypatch.setattr(reader, "_MAP_FROM_BYTES", map_from)
    monkeypatch.setattr(reader, "_KEPT_BYTES", kept)
    again = Recording.open(recording.path)
    assert again.steps[0].tap("second").tolist() == [[3.0], [4.0]]
    assert again.steps[0].position.tolist() == [0, 1]
    assert again.unverified == ()
    again.close()


@pytest.mark.parametrize("kept", [0, 1 << 20])
def test_a_file_that_is_kept_is_read_once(recording, monkeypatch, kept):
    monkeypatch.setattr(reader, "_KEPT_BYTES", kept)
    again = Recording.open(recording.path)
    again.verify_all()
    (step,) = again.steps
    assert step.tap("first").tolist() == [[1.0], [2.0]]
    step.path.unlink()
    if kept:
        assert step.tap("second").tolist() == [[3.0], [4.0]]
        return
    with pytest.raises(HarnessError) as caught:
        step.tap("second")
    assert caught.value.code is Code.STEP_MISSING
