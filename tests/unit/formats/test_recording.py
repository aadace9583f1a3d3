"""The writer and the reader: what goes in comes out, and calls that contradict themselves are refused."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from harness.errors import Code, HarnessError
from harness.formats.recording import (
    Concat,
    ModelInfo,
    Producer,
    RankInfo,
    Recording,
    RecordingWriter,
    RequestInfo,
    RunInfo,
)
from harness.formats.recording.writer import TensorStream
from harness.formats.safetensors_header import read_header

REQUESTS = [
    RequestInfo(id=7, token_ids=[5, 6, 8], prompt_length=2),
    RequestInfo(id=2, token_ids=[1, 3], prompt_length=1),
]


RUN = RunInfo(
    producer=Producer(name="test", version="1"), model=ModelInfo(id="tiny"), dtype="bfloat16", device="cpu",
    environment={"threads": 2, "gpu": None},
)  # fmt: skip


def open_writer(path, requests=REQUESTS, *, schedule=None, **more):
    return RecordingWriter(path, replace(RUN, schedule=schedule), requests, **more)


def write_steps(writer):
    """Two steps: a mixed one of three rows with everything that a step can hold, and a plain decode step."""
    writer.begin_step(
        phase="mixed",
        request=[7, 7, 2],
        position=[0, 1, 0],
        sampled_rows=[1, 2],
        slot_mapping=[16, 17, -1],
        block_tables={7: [1, 4], 2: [0]},
        partial_rows={"lm_head": [1, 2]},
    )
    taps = {
        "model.embed_tokens": torch.randn(3, 4, 2).to(torch.bfloat16).transpose(1, 2),
        "score": torch.arange(3, dtype=torch.float16),
        "lm_head": torch.randn(2, 9, dtype=torch.float64),
    }
    for name, tensor in taps.items():
        writer.tap(name, tensor)
    writer.end_step([8, 3])
    writer.begin_step(phase="decode", request=[7], position=[2])
    writer.tap("score", torch.tensor([0.5], dtype=torch.float16))
    writer.end_step()
    return taps


@pytest.fixture
def recorded(tmp_path):
    path = tmp_path / "recording"
    with open_writer(path, schedule="batched") as writer:
        taps = write_steps(writer)
    return path, taps


def refused(call, code=Code.BAD_RECORDER_CALL):
    with pytest.raises(HarnessError) as caught:
        call()
    assert caught.value.code is code
    return str(caught.value)


class TestRoundTrip:
    def test_everything_written_is_read(self, recorded):
        path, taps = recorded
        with Recording.open(path) as recording:
            mixed, decode = recording.steps
            assert recording.manifest.requests == REQUESTS
            assert recording.manifest.environment == {"threads": 2, "gpu": None}
            assert recording.manifest.schedule == "batched"
            assert (mixed.index, mixed.phase, decode.index, decode.phase) == (0, "mixed", 1, "decode")
            assert mixed.request.tolist() == [7, 7, 2]
            assert mixed.position.tolist() == [0, 1, 0]
            assert mixed.request.dtype == mixed.position.dtype == torch.int32
            assert mixed.sampled.tolist() == [-1, 8, 3]
            assert mixed.slot_mapping.tolist() == [16, 17, -1]
            assert mixed.block_tables == {7: [1, 4], 2: [0]}
            assert mixed.tap_names == list(taps)
            assert mixed.rows_of("lm_head").tolist() == [1, 2]
            for name, tensor in taps.items():
                assert mixed.tap(name).dtype == tensor.dtype
                assert torch.equal(mixed.tap(name), tensor)

    def test_what_a_step_lacks_is_none(self, recorded):
        with Recording.open(recorded[0]) as recording:
            decode = recording.steps[1]
            assert decode.tap_names == ["score"]
            assert (decode.sampled, decode.slot_mapping, decode.block_tables) == (None, None, None)
            assert decode.rows_of("score") is None
            for name in ("lm_head", "rows.request"):
                with pytest.raises(KeyError):
                    decode.tap(name)

    def test_the_safetensors_library_reads_the_step_files(self, recorded):
        path, taps = recorded
        with safe_open(path / "step-00000.safetensors", "pt") as file:
            index = {"rows.request", "rows.position", "rows.sampled", "rows.of.lm_head"}
            assert set(file.keys()) == set(taps) | index | {"kv.requests", "kv.block_table", "kv.slot_mapping"}
            assert all(torch.equal(file.get_tensor(name), tensor) for name, tensor in taps.items())

    @pytest.mark.parametrize("count", [1, 2, 3])
    def test_tensors_are_aligned_to_their_element(self, tmp_path, count):
        with open_writer(tmp_path / "r") as writer:
            tables = {7: list(range(count))}
            writer.begin_step(phase="prefill", request=[7] * 3, position=[0, 1, 2], block_tables=tables)
            writer.tap("x", torch.zeros(3, 1, dtype=torch.float64))
            writer.end_step()
        header = read_header(tmp_path / "r" / "step-00000.safetensors")
        item_bytes = {"I64": 8, "F64": 8, "I32": 4}
        assert all((header.data_offset + entry.begin) % item_bytes[entry.dtype] == 0 for entry in header.tensors)

    def test_unaligned_taps_are_copied_and_equal(self, tmp_path):
        odd, wide = torch.tensor([[1], [2], [3]], dtype=torch.uint8), torch.randn(3, 2, dtype=torch.float64)
        with open_writer(tmp_path / "r") as writer:
            writer.begin_step(phase="prefill", request=[7] * 3, position=[0, 1, 2])
            writer.tap("odd", odd)
            writer.tap("wide", wide)
            writer.end_step()
        with Recording.open(tmp_path / "r") as recording:
            assert torch.equal(recording.steps[0].tap("wide"), wide)

    @pytest.mark.parametrize(
        "name", ["F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2", "I64", "I32", "I16", "I8", "U8"]
    )
    def test_every_dtype(self, tmp_path, name):
        from harness.formats.recording.reader import TORCH_DTYPES

        tensor = torch.tensor([[0, 1, 2]]).to(TORCH_DTYPES[name])
        with open_writer(tmp_path / "r") as writer:
            writer.begin_step(phase="decode", request=[2], position=[1])
            writer.tap("x", tensor)
            writer.end_step()
        with Recording.open(tmp_path / "r") as recording:
            assert recording.manifest.taps[0].dtype == name
            assert torch.equal(recording.steps[0].tap("x").float(), tensor.float())

    def test_bits_survive_nan_infinity_and_negative_zero(self, tmp_path):
        tensor = torch.tensor([[float("nan"), float("inf"), -0.0]])
        with open_writer(tmp_path / "r") as writer:
            writer.begin_step(phase="decode", request=[2], position=[1])
            writer.tap("x", tensor)
            writer.end_step()
        with Recording.open(tmp_path / "r") as recording:
            assert torch.equal(recording.steps[0].tap("x").view(torch.int32), tensor.view(torch.int32))

    def test_tensors_and_ranges_are_taken_for_lists(self, tmp_path):
        with open_writer(tmp_path / "r") as writer:
            rows = torch.tensor([0, 1])
            writer.begin_step(phase="prefill", request=torch.tensor([7, 7]), position=range(2), sampled_rows=rows)
            writer.end_step(torch.tensor([4, 5], dtype=torch.int32))
        with Recording.open(tmp_path / "r") as recording:
            assert recording.steps[0].sampled.tolist() == [4, 5]

    def test_a_tap_may_cover_no_row(self, tmp_path):
        with open_writer(tmp_path / "r") as writer:
            writer.begin_step(phase="prefill", request=[7], position=[0], partial_rows={"lm_head": []})
            writer.tap("lm_head", torch.empty(0, 5))
            writer.end_step()
        with Recording.open(tmp_path / "r") as recording:
            assert recording.steps[0].tap("lm_head").shape == (0, 5)

    def test_shards_are_described(self, tmp_path):
        with open_writer(tmp_path / "r", ranks=RankInfo(rank=1, world_size=2, shards={"x": Concat(dim=1)})) as writer:
            writer.begin_step(phase="decode", request=[2], position=[1])
            writer.tap("x", torch.zeros(1, 4))
            writer.end_step()
        with Recording.open(tmp_path / "r") as recording:
            assert (recording.manifest.rank, recording.manifest.world_size) == (1, 2)
            assert recording.manifest.taps[0].shard == Concat(dim=1)


class TestHeaderRoom:
    def test_more_taps_than_expected_move_the_data(self, tmp_path):
        taps = {f"layer.{index}.with.a.long.name": torch.full((3, 1000), float(index)) for index in range(200)}
        with open_writer(tmp_path / "r", expected_taps=1) as writer:
            writer.begin_step(phase="prefill", request=[7] * 3, position=[0, 1, 2], sampled_rows=[2])
            for name, tensor in taps.items():
                writer.tap(name, tensor)
            writer.end_step([1])
        with Recording.open(tmp_path / "r") as recording:
            step = recording.steps[0]
            assert step.sampled.tolist() == [-1, -1, 1]
            assert all(torch.equal(step.tap(name), tensor) for name, tensor in taps.items())

    def test_data_is_moved_in_chunks(self, tmp_path, monkeypatch):
        monkeypatch.setattr("harness.formats.recording.writer._CHUNK_BYTES", 7)
        stream = TensorStream(tmp_path / "x.safetensors", reserve_bytes=0)
        data = bytes(range(100))
        stream.add("x", "U8", (100,), memoryview(data))
        assert stream.finish() == (tmp_path / "x.safetensors").stat().st_size
        with safe_open(tmp_path / "x.safetensors", "pt") as file:
            assert bytes(file.get_tensor("x").tolist()) == data


class TestMisuse:
    @pytest.fixture
    def writer(self, tmp_path):
        with open_writer(tmp_path / "misused") as writer:
            yield writer
            if writer._step is not None:
                writer.end_step([0] * len(writer._step.rows.sampled_rows))

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"phase": "warmup"}, "the phase is unknown"),
            ({"request": []}, "at least one row"),
            ({"position": [0]}, "number of values"),
            ({"request": [7, 9]}, "unknown request"),
            ({"position": [0, 3]}, "outside of its request's tokens"),
            ({"position": [0, -1]}, "outside of its request's tokens"),
            ({"position": [0, 0.5]}, "not a list of integers"),
            ({"position": [0, "x"]}, "not integers"),
            ({"sampled_rows": [2]}, "names no row"),
            ({"sampled_rows": [1, 1]}, "names no row, or one twice"),
            ({"slot_mapping": [1]}, "number of values"),
            ({"slot_mapping": [1, -2]}, "too small"),
            ({"block_tables": {9: [1]}}, "unknown request"),
            ({"block_tables": {7: [-1]}}, "too small"),
            ({"partial_rows": {"x": [-1]}}, "names no row"),
        ],
    )
    def test_begin_step(self, writer, change, message):
        call = {"phase": "prefill", "request": [7, 7], "position": [0, 1]} | change
        assert message in refused(lambda: writer.begin_step(**call))
        assert writer._step is None

    def test_calls_outside_of_a_step(self, writer):
        assert "tap 'x' outside of a step" in refused(lambda: writer.tap("x", torch.zeros(1)))
        assert "end_step outside of a step" in refused(writer.end_step)

    @pytest.mark.parametrize(
        ("name", "tensor", "message"),
        [
            (
                "x",
                torch.zeros(3, 4),
                "one entry a row\n  where:    step 0: tap 'x'\n  expected: [2, ...]\n  actual:   [3, 4]",
            ),
            ("x", torch.tensor(1.0), "one entry a row"),
            ("lm_head", torch.zeros(2, 4), "expected: [1, ...]"),
            ("x", torch.zeros(2, dtype=torch.complex64), "no recording holds this dtype"),
            ("x", torch.zeros(2, dtype=torch.bool), "no recording holds this dtype"),
            ("rows.x", torch.zeros(2), "reserved prefix"),
            ("", torch.zeros(2), "at least 1 character"),
            ("x", torch.zeros(2, 0), "greater than or equal to 1"),
        ],
    )
    def test_tap(self, writer, name, tensor, message):
        writer.begin_step(phase="prefill", request=[7, 7], position=[0, 1], partial_rows={"lm_head": [1]})
        assert message in refused(lambda: writer.tap(name, tensor))

    def test_a_tap_twice_and_a_step_in_a_step(self, writer):
        writer.begin_step(phase="decode", request=[7], position=[2])
        writer.tap("x", torch.zeros(1, 4))
        assert "recorded twice" in refused(lambda: writer.tap("x", torch.zeros(1, 4)))
        assert "before the last step ended" in refused(
            lambda: writer.begin_step(phase="decode", request=[7], position=[2])
        )

    @pytest.mark.parametrize("tensor", [torch.zeros(1, 5), torch.zeros(1, 4, dtype=torch.float16)])
    def test_a_tap_changes_from_step_to_step(self, writer, tensor):
        writer.begin_step(phase="decode", request=[7], position=[1])
        writer.tap("x", torch.zeros(1, 4))
        writer.end_step()
        writer.begin_step(phase="decode", request=[7], position=[2])
        assert "expected: F32 [4]" in refused(lambda: writer.tap("x", tensor))

    def test_the_wrong_number_of_choices(self, writer):
        writer.begin_step(phase="decode", request=[7], position=[2], sampled_rows=[0])
        message = refused(lambda: writer.end_step([1, 2]))
        assert "expected: 1\n  actual:   2" in message

    def test_a_description_that_contradicts_itself(self, tmp_path):
        assert "rank 2 is not below" in refused(lambda: open_writer(tmp_path / "r", ranks=RankInfo(rank=2)))
        assert "requests.1.id repeats 7" in refused(lambda: open_writer(tmp_path / "r", requests=[REQUESTS[0]] * 2))
        assert "requests" in refused(lambda: open_writer(tmp_path / "r", requests=[]))
        assert not (tmp_path / "r").exists()

    def test_after_close(self, tmp_path):
        writer = open_writer(tmp_path / "r")
        writer.close()
        writer.close()
        assert "after the recording was closed" in refused(
            lambda: writer.begin_step(phase="decode", request=[7], position=[2])
        )

    def test_close_inside_of_a_step_leaves_nothing(self, tmp_path):
        def run():
            with open_writer(tmp_path / "r") as writer:
                writer.begin_step(phase="decode", request=[7], position=[2])

        assert "close before the last step ended" in refused(run)
        assert not (tmp_path / "r").exists()


class TestFolder:
    def test_an_exception_removes_what_was_written(self, tmp_path):
        def run():
            with open_writer(tmp_path / "r") as writer:
                write_steps(writer)
                writer.begin_step(phase="decode", request=[7], position=[2])
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            run()
        assert not (tmp_path / "r").exists()

    def test_an_exception_leaves_a_folder_that_was_there(self, tmp_path):
        def run():
            with open_writer(tmp_path) as writer:
                write_steps(writer)
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            run()
        assert list(tmp_path.iterdir()) == []

    def test_a_folder_with_something_in_it(self, tmp_path):
        (tmp_path / "x").touch()
        assert "not empty" in refused(lambda: open_writer(tmp_path), Code.OUTPUT_EXISTS)
        assert "is a file" in refused(lambda: open_writer(tmp_path / "x"), Code.OUTPUT_EXISTS)
        assert "cannot be written" in refused(lambda: open_writer(tmp_path / "x" / "y"), Code.CANNOT_WRITE)

    @pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
    def test_a_folder_without_permission(self, tmp_path):
        tmp_path.chmod(0o500)
        assert "Permission denied" in refused(lambda: open_writer(tmp_path / "r"), Code.CANNOT_WRITE)

    @pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="needs a file system that refuses new folders")
    def test_a_file_system_that_refuses(self):
        assert "cannot be written" in refused(lambda: open_writer("/proc/recording"), Code.CANNOT_WRITE)

    def test_a_folder_that_vanishes(self, tmp_path):
        writer = open_writer(tmp_path / "r")
        (tmp_path / "r").rmdir()
        call = {"phase": "decode", "request": [7], "position": [2]}
        assert "No such file" in refused(lambda: writer.begin_step(**call), Code.CANNOT_WRITE)

    def test_only_the_recording_is_left(self, recorded):
        names = sorted(file.name for file in recorded[0].iterdir())
        assert names == ["manifest.json", "step-00000.safetensors", "step-00001.safetensors"]

    def test_the_manifest_is_plain_json(self, recorded):
        manifest = json.loads((recorded[0] / "manifest.json").read_text())
        assert manifest["schema_version"] == 1
        assert manifest["taps"][0] == {"name": "model.embed_tokens", "dtype": "BF16", "shape": [2, 4], "shard": None}
