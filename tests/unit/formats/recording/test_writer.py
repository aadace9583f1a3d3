"""Parts of the writer by hand: the stream of a file, refusals, what JSON holds, and folders that were left behind."""

import json
import math
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.numpy import load

from harness.errors import Code, HarnessError
from harness.formats.recording import Producer, Recording, writer
from harness.formats.recording.writer import (
    ALIGNMENT,
    TensorStream,
    _file_name,
    _header_room,
    discard_unfinished,
    is_unfinished,
    plain,
)
from harness.formats.safetensors_header import LENGTH_BYTES

from ....recording_writer import new_writer, requests_of


@pytest.mark.parametrize("num_bytes", [0, 1, 55, 56, 57, 119, 120, 121, 1000])
def test_the_least_room_behind_which_data_is_aligned(num_bytes):
    room = _header_room(num_bytes)
    assert (LENGTH_BYTES + room) % ALIGNMENT == 0
    assert num_bytes <= room < num_bytes + ALIGNMENT


def write(path, tensors, reserve_bytes):
    out = TensorStream(path, reserve_bytes=reserve_bytes)
    for name, x in tensors.items():
        assert name not in out
        out.add(name, "F32", x.shape, x.reshape(-1).view(np.uint8).data)
        assert name in out
    return out


TENSORS = {f"tap{at}": np.arange(7 * at, 7 * at + 6, dtype=np.float32).reshape(2, 3) for at in range(5)}


@pytest.mark.parametrize("chunk", [1, 7, 48, 1 << 23])
@pytest.mark.parametrize("reserve_bytes", [0, 100, 5000])
def test_a_header_of_any_size(tmp_path, monkeypatch, reserve_bytes, chunk):
    """One that outgrows its room moves the data, a chunk at a time."""
    monkeypatch.setattr(writer, "_CHUNK_BYTES", chunk)
    path = tmp_path / "file"
    out = write(path, TENSORS, reserve_bytes)
    out.patch("tap3", (TENSORS["tap3"] + 1).reshape(-1).view(np.uint8).data)
    size = out.finish()
    content = path.read_bytes()
    assert size == len(content)
    room = int.from_bytes(content[:LENGTH_BYTES], "little")
    assert (LENGTH_BYTES + room) % ALIGNMENT == 0
    assert size == LENGTH_BYTES + room + 5 * 24
    assert room == _header_room(max(reserve_bytes, len(content[LENGTH_BYTES : LENGTH_BYTES + room].rstrip())))
    tensors = load(content)
    for name, x in TENSORS.items():
        np.testing.assert_array_equal(tensors[name], x + (name == "tap3"))


def test_a_file_that_is_there_is_not_written_again(tmp_path):
    (tmp_path / "file").write_text("kept")
    with pytest.raises(HarnessError):
        TensorStream(tmp_path / "file", reserve_bytes=0)
    assert (tmp_path / "file").read_text() == "kept"


def test_what_is_abandoned_is_gone_and_closed_once(tmp_path):
    out = write(tmp_path / "file", TENSORS, 0)
    out.close()
    out.close()
    out.abandon()
    assert not (tmp_path / "file").exists()
    out.abandon()


def writer_of(path, schedule=None):
    return new_writer(path, requests_of({7: [1, 2, 3]}, prompt_length=2), schedule=schedule)


def begin(writer, **fields):
    writer.begin_step(**{"phase": "prefill", "request": [7, 7], "position": [0, 1]} | fields)


def refused(call, *arguments, **options):
    with pytest.raises(HarnessError) as caught:
        call(*arguments, **options)
    assert caught.value.code is Code.BAD_RECORDER_CALL
    return caught.value


def test_a_step_is_between_its_begin_and_its_end(tmp_path):
    writer = writer_of(tmp_path / "r")
    assert "outside of a step" in refused(writer.tap, "a", torch.ones(2, 1)).what
    assert "outside of a step" in refused(writer.end_step).what
    begin(writer)
    assert refused(begin, writer).where == "step 0"
    assert refused(writer.close).where == "step 0"
    writer.end_step()
    begin(writer, position=[1, 2])
    assert refused(writer.tap, "a", torch.ones(3, 1)).where == "step 1: tap 'a'"
    writer.end_step()
    writer.close()
    writer.close()
    refused(begin, writer)
    assert [step.position.tolist() for step in Recording.open(tmp_path / "r").steps] == [[0, 1], [1, 2]]


@pytest.mark.parametrize(
    ("tensor", "expected", "actual"),
    [
        (torch.ones(1, 3), "[2, ...]", [1, 3]), (torch.ones(3), "[2, ...]", [3]), (torch.tensor(1.0), "[2, ...]", []),
        (np.ones((0, 2)), "[2, ...]", [0, 2]),
    ],
)  # fmt: skip
def test_a_tap_has_one_entry_for_each_row(tmp_path, tensor, expected, actual):
    with writer_of(tmp_path / "r") as writer:
        begin(writer, partial_rows={"part": [1]})
        error = refused(writer.tap, "a", tensor)
        assert (error.expected, error.actual) == (expected, actual)
        assert refused(writer.tap, "part", torch.ones(2, 1)).expected == "[1, ...]"
        writer.tap("part", torch.ones(1, 1))
        assert "twice" in refused(writer.tap, "part", torch.ones(1, 1)).what
        writer.tap("a", torch.ones(2))
        writer.end_step()


@pytest.mark.parametrize(
    "changed", [torch.ones(2, 4), torch.ones(2, 3, 1), torch.ones(2), torch.ones(2, 3, dtype=torch.float16)]
)
def test_a_tap_keeps_its_dtype_and_shape(tmp_path, changed):
    with writer_of(tmp_path / "r") as writer:
        begin(writer)
        writer.tap("a", torch.ones(2, 3))
        writer.end_step()
        begin(writer)
        error = refused(writer.tap, "a", changed)
        assert error.expected == "F32 [3]"
        assert error.actual.endswith(str(list(changed.shape[1:])))
        writer.tap("a", torch.zeros(2, 3))
        writer.end_step()
    assert [step.tap("a").sum().item() for step in Recording.open(tmp_path / "r").steps] == [6, 0]


@pytest.mark.parametrize("dtype", [torch.bool, torch.complex64])
def test_a_dtype_that_no_recording_holds(tmp_path, dtype):
    with writer_of(tmp_path / "r") as writer:
        begin(writer)
        assert refused(writer.tap, "a", torch.ones(2, 1).to(dtype)).actual == dtype
        writer.end_step()


def test_choices_stand_behind_the_rows_that_were_sampled(tmp_path):
    with writer_of(tmp_path / "r") as writer:
        begin(writer, sampled_rows=[1])
        for wrong in ([], [3, 4], [-1]):
            refused(writer.end_step, wrong)
        writer.end_step([5])
        begin(writer, sampled_rows=[1, 0])
        writer.end_step([5, 0])
    assert [step.sampled.tolist() for step in Recording.open(tmp_path / "r").steps] == [[-1, 5], [0, 5]]


def test_the_manifest_says_what_was_written(tmp_path):
    with writer_of(tmp_path / "r", schedule="plain") as writer:
        begin(writer)
        writer.tap("a", torch.ones(2, 3))
        writer.end_step()
    manifest = json.loads((tmp_path / "r" / "manifest.json").read_text())
    (step,) = manifest["steps"]
    file = tmp_path / "r" / "step-00000.safetensors"
    assert (step["index"], step["phase"], step["file"], step["num_rows"]) == (0, "prefill", file.name, 2)
    assert step["num_bytes"] == file.stat().st_size
    assert (manifest["schedule"], "numerics" in manifest) == ("plain", False)
    assert [(tap["name"], tap["dtype"], tap["shape"]) for tap in manifest["taps"]] == [("a", "F32", [3])]


def test_names_of_steps_are_in_their_order():
    assert [_file_name(index) for index in (0, 12345)] == ["step-00000.safetensors", "step-12345.safetensors"]


@dataclass
class Part:
    size: float
    parts: tuple[int, ...] = (1,)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (math.nan, None), (math.inf, None), (1.5, 1.5), ((1, -math.inf), [1, None]), ({"a": [math.nan]}, {"a": [None]}),
        (Part(math.nan), {"size": None, "parts": [1]}),
        (SimpleNamespace(a=Part(2.0)), {"a": {"size": 2.0, "parts": [1]}}),
        (Part, Part), ("text", "text"), (None, None), (Producer(name="x", version="1"), {"name": "x", "version": "1"}),
    ],
    ids=str,
)  # fmt: skip
def test_what_json_can_hold(value, expected):
    assert plain(value) == expected


def left_behind(folder, *, is_finished=False):
    folder.mkdir()
    for name in ("step-00000.safetensors", ".manifest.json.tmp", *(["manifest.json"] if is_finished else [])):
        (folder / name).write_text("")
    return folder


def test_what_a_killed_writer_left_is_removed(tmp_path):
    gone, kept, foreign, whole = (tmp_path / name for name in ("gone", "kept", "other", "whole"))
    for folder in (gone, kept, foreign):
        assert is_unfinished(left_behind(folder))
    (foreign / "notes").write_text("mine")
    assert not is_unfinished(left_behind(whole, is_finished=True))
    for folder in (gone, foreign, whole):
        discard_unfinished(folder, keep_folder=False)
    discard_unfinished(kept, keep_folder=True)
    assert not gone.exists()
    assert list(kept.iterdir()) == []
    assert [path.name for path in foreign.iterdir()] == ["notes"]
    assert len(list(whole.iterdir())) == 3
    assert not is_unfinished(kept)


def test_folders_above_the_recording_are_made(tmp_path):
    writer_of(tmp_path / "a" / "b" / "r").close()
    assert Recording.open(tmp_path / "a" / "b" / "r").steps == []


def test_a_recording_that_is_given_up_leaves_what_was_there_before(tmp_path):
    (tmp_path / "there").mkdir()
    for name, remains in (("made", False), ("there", True)):
        writer = writer_of(tmp_path / name)
        begin(writer)
        writer.end_step()
        begin(writer)
        writer.abandon()
        writer.abandon()
        assert (tmp_path / name).exists() == remains
        assert not remains or list((tmp_path / name).iterdir()) == []
    done = writer_of(tmp_path / "done")
    done.close()
    done.abandon()
    assert (tmp_path / "done" / "manifest.json").exists()
