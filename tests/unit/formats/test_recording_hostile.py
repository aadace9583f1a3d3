"""What the reader says of recordings that are damaged, contradictory or hostile."""

import hashlib
import json
import os
import struct

import pytest
import torch
from safetensors.torch import save

from harness.errors import Code, HarnessError
from harness.formats.recording import Recording, reader

STEP = "step-00000.safetensors"


def step_tensors():
    return {
        "rows.request": torch.tensor([0, 0], dtype=torch.int32),
        "rows.position": torch.tensor([0, 1], dtype=torch.int32),
        "x": torch.ones(2, 4),
    }


def manifest_table():
    return {
        "schema_version": 1,
        "producer": {"name": "test", "version": "1"},
        "model": {"id": "m"},
        "dtype": "float32",
        "device": "cpu",
        "requests": [{"id": 0, "token_ids": [1, 2], "prompt_length": 1}],
        "steps": [{"index": 0, "phase": "prefill", "file": STEP, "num_rows": 2}],
        "taps": [{"name": "x", "dtype": "F32", "shape": [4]}],
    }


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "recording"
    path.mkdir()
    write(path, manifest_table(), save(step_tensors()))
    return path


def write(path, manifest, content):
    """Write a recording of one step, its size and digest as they are unless the manifest gives them."""
    (path / STEP).write_bytes(content)
    digest_fields = {"num_bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    manifest["steps"] = [digest_fields | step for step in manifest["steps"]]
    (path / "manifest.json").write_text(json.dumps(manifest))


def altered(path, where):
    """Flip one bit of the step file, in the bytes `where`, and return its content."""
    content = bytearray((path / STEP).read_bytes())
    content[content.index(where)] ^= 1
    (path / STEP).write_bytes(content)
    return content


def refused(path, code):
    with pytest.raises(HarnessError) as caught, Recording.open(path) as recording:
        recording.verify_all()
    assert caught.value.code is code, caught.value
    return str(caught.value)


def test_a_sound_recording_reads(folder):
    with Recording.open(folder) as recording:
        assert torch.equal(recording.steps[0].tap("x"), torch.ones(2, 4))
        assert recording.unverified == ()


class TestFolder:
    def test_no_recording(self, tmp_path, folder):
        assert "has no manifest.json" in refused(tmp_path, Code.NOT_A_RECORDING)
        refused(tmp_path / "missing", Code.NOT_A_RECORDING)
        refused(folder / STEP, Code.NOT_A_RECORDING)
        refused(f"{tmp_path}/\0", Code.NOT_A_RECORDING)

    def test_a_manifest_that_is_no_file(self, tmp_path):
        os.mkfifo(tmp_path / "manifest.json")
        refused(tmp_path, Code.NOT_A_RECORDING)

    def test_step_missing(self, folder):
        (folder / STEP).unlink()
        assert STEP in refused(folder, Code.STEP_MISSING)

    @pytest.mark.parametrize("change", [-1, 1, 100])
    def test_step_of_another_size(self, folder, change):
        content = (folder / STEP).read_bytes()
        (folder / STEP).write_bytes(content[:change] if change < 0 else content + bytes(change))
        message = refused(folder, Code.STEP_TRUNCATED)
        assert f"expected: {len(content)} bytes" in message
        assert f"actual:   {len(content) + change} bytes" in message

    def test_step_altered(self, folder):
        content = altered(folder, b"\0\0\x80?")
        assert hashlib.sha256(content).hexdigest() in refused(folder, Code.STEP_ALTERED)
        with Recording.open(folder, verify=False) as recording:
            assert recording.unverified == (STEP,)

    @pytest.mark.parametrize("where", [b"{", b"F32", b"\1\0\0\0"])
    def test_an_altered_step_is_altered_before_it_is_malformed(self, folder, where):
        altered(folder, where)
        refused(folder, Code.STEP_ALTERED)

    def test_an_altered_step_is_found_by_verify_all(self, folder):
        altered(folder, b"\0\0\x80?")
        recording = Recording.open(folder)
        with pytest.raises(HarnessError, match="H025"):
            recording.verify_all()

    def test_a_digest_may_be_left_out(self, folder):
        manifest = manifest_table()
        manifest["steps"][0]["sha256"] = None
        write(folder, manifest, (folder / STEP).read_bytes())
        with Recording.open(folder) as recording:
            assert recording.unverified == (STEP,)

    def test_a_step_file_that_is_a_pipe_or_a_folder(self, folder):
        (folder / STEP).unlink()
        os.mkfifo(folder / STEP)
        assert "not a regular file" in refused(folder, Code.STEP_MALFORMED)
        (folder / STEP).unlink()
        (folder / STEP).mkdir()
        assert "not a regular file" in refused(folder, Code.STEP_MALFORMED)

    def test_a_link_out_of_the_folder(self, folder):
        (folder / STEP).rename(folder.parent / "elsewhere")
        (folder / STEP).symlink_to(folder.parent / "elsewhere")
        assert "leads out of the recording" in refused(folder, Code.STEP_MALFORMED)

    def test_a_link_to_itself_and_a_link_inside(self, folder):
        (folder / STEP).rename(folder / "data")
        (folder / STEP).symlink_to("data")
        Recording.open(folder).close()
        (folder / STEP).unlink()
        (folder / STEP).symlink_to(STEP)
        refused(folder, Code.STEP_MISSING)

    def test_a_small_file_is_as_it_was_at_opening(self, folder):
        with Recording.open(folder, verify=False) as recording:
            (folder / STEP).unlink()
            assert torch.equal(recording.steps[0].tap("x"), step_tensors()["x"])

    def test_a_file_that_changes_after_opening(self, folder, monkeypatch):
        monkeypatch.setattr(reader, "_KEPT_BYTES", 0)
        with Recording.open(folder, verify=False) as recording:
            (folder / STEP).write_bytes(save(step_tensors() | {"x": torch.ones(2, 5)}))
            with pytest.raises(HarnessError, match="H024"):
                recording.steps[0].tap("x")
            (folder / STEP).unlink()
            with pytest.raises(HarnessError, match="H023"):
                recording.steps[0].tap("x")


class TestManifest:
    @pytest.mark.parametrize(
        ("text", "message"),
        [
            (b"", "EOF"),
            (b"{", "EOF"),
            (b"[]", "object"),
            (b"\xff\xfe", "Invalid JSON"),
            (b"{}", "schema_version"),
            (b'{"schema_version": "1"}', "schema_version"),
            (b'{"schema_version": 1' + b"0" * 5000 + b"}", "out of range"),
            (b"[" * 100_000, "recursion"),
            (b'{"schema_version": 1, "a": ' + b"[" * 100_000, "recursion"),
            (b"\x80\x04cos\nsystem\n", "Invalid JSON"),
        ],
    )
    def test_not_json_or_not_a_manifest(self, folder, text, message):
        (folder / "manifest.json").write_bytes(text)
        assert message in refused(folder, Code.BAD_MANIFEST)

    def test_a_manifest_of_a_terabyte(self, folder):
        with (folder / "manifest.json").open("wb") as file:
            file.truncate(1 << 40)
        assert "too large" in refused(folder, Code.BAD_MANIFEST)

    @pytest.mark.parametrize("version", [0, 2, 10**30])
    def test_another_version(self, folder, version):
        (folder / "manifest.json").write_text(json.dumps({"schema_version": version, "other": 1}))
        assert str(version) in refused(folder, Code.UNKNOWN_SCHEMA)

    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("unknown", 1),
            ("producer", None),
            ("producer.version", 3),
            ("requests", []),
            ("requests.0.id", -1),
            ("requests.0.id", 2**31),
            ("requests.0.token_ids", []),
            ("requests.0.token_ids.1", -1),
            ("requests.0.token_ids.1", 1.0),
            ("requests.0.token_ids.1", True),
            ("requests.0.prompt_length", 0),
            ("requests.0.prompt_length", 3),
            ("steps.0.index", 1),
            ("steps.0.phase", "warmup"),
            ("steps.0.file", "../step-00000.safetensors"),
            ("steps.0.file", "/etc/passwd"),
            ("steps.0.file", "step-00000.safetensors\n"),
            ("steps.0.file", "a/step-00000.safetensors"),
            ("steps.0.file", "step-00000.safetensors\0"),
            ("steps.0.num_rows", 0),
            ("steps.0.num_rows", 2**63),
            ("steps.0.num_bytes", "72"),
            ("steps.0.sha256", "0" * 63),
            ("taps.0.dtype", "BOOL"),
            ("taps.0.shape", [0]),
            ("taps.0.shape", [1] * 9),
            ("taps.0.name", "rows.x"),
            ("taps.0.name", ""),
            ("taps.0.shard", {"mode": "concat", "dim": 0}),
            ("taps.0.shard", {"mode": "concat", "dim": 2}),
            ("taps.0.shard", {"mode": "other"}),
            ("rank", 1),
            ("world_size", 0),
        ],
    )
    def test_a_field_that_breaks_its_rule(self, folder, field, value):
        manifest = json.loads((folder / "manifest.json").read_text())
        *parents, last = [int(key) if key.isdigit() else key for key in field.split(".")]
        table = manifest
        for key in parents:
            table = table[key]
        table[last] = value
        (folder / "manifest.json").write_text(json.dumps(manifest))
        message = refused(folder, Code.BAD_MANIFEST)
        assert str(last) in message or str(parents[-1]) in message

    def test_repeated_entries(self, folder):
        for table, message in (("taps", "taps.1.name repeats 'x'"), ("requests", "requests.1.id repeats 0")):
            manifest = json.loads((folder / "manifest.json").read_text())
            manifest[table] *= 2
            (folder / "manifest.json").write_text(json.dumps(manifest))
            assert message in refused(folder, Code.BAD_MANIFEST)
            write(folder, manifest_table(), save(step_tensors()))

    def test_the_message_names_the_field(self, folder):
        manifest = manifest_table()
        manifest["steps"][0]["file"] = "../x"
        (folder / "manifest.json").write_text(json.dumps(manifest))
        message = refused(folder, Code.BAD_MANIFEST)
        assert f"where:    {folder / 'manifest.json'}: steps.0.file" in message
        assert "actual:   '../x'" in message


class TestContents:
    """Step files whose digest is right and whose contents contradict the manifest."""

    @pytest.mark.parametrize(
        ("tensors", "message"),
        [
            ({"rows.request": torch.tensor([0, 1], dtype=torch.int32)}, "a row is of an unknown request"),
            ({"rows.request": None}, "a step names the request and the position of its rows"),
            ({"rows.position": torch.tensor([0, 2], dtype=torch.int32)}, "is outside of its request's tokens"),
            ({"rows.sampled": torch.tensor([0, -2])}, "below -1"),
            ({"rows.of.x": torch.tensor([0, 2])}, "names no row, or one twice"),
            ({"kv.requests": torch.tensor([0], dtype=torch.int32)}, "come together"),
            ({"kv.requests": torch.zeros(2).int(), "kv.block_table": torch.ones(2, 1).int()}, "two block tables"),
            ({"kv.requests": torch.tensor([5]).int(), "kv.block_table": torch.ones(1, 1).int()}, "unknown request"),
            ({"x": torch.ones(2, 5)}, "expected: F32 [2, 4]\n  actual:   F32 [2, 5]"),
            ({"y": torch.ones(2, 4)}, "lists no such tap"),
        ],
    )
    def test_tensors(self, folder, tensors, message):
        """Every rule of a step is applied to its file; recording/test_check.py has what each rule refuses."""
        changed = step_tensors() | tensors
        write(folder, manifest_table(), save({key: value for key, value in changed.items() if value is not None}))
        assert message in refused(folder, Code.STEP_MALFORMED)

    def test_rows_of_a_tap_that_is_absent_are_ignored(self, folder):
        write(folder, manifest_table(), save(step_tensors() | {"rows.of.y": torch.tensor([0])}))
        with Recording.open(folder) as recording:
            assert not recording.steps[0].has("y")

    @pytest.mark.parametrize("length", [2**63, 2**64 - 1, 10**9])
    def test_a_header_length_that_is_a_lie(self, folder, length):
        content = save(step_tensors())
        write(folder, manifest_table(), struct.pack("<Q", length) + content[8:])
        assert "header is longer than the file" in refused(folder, Code.STEP_MALFORMED)

    def test_a_pickle_is_not_opened(self, folder):
        write(folder, manifest_table(), b"\x80\x04cos\nsystem\n(S'false'\ntR." + bytes(64))
        refused(folder, Code.STEP_MALFORMED)
