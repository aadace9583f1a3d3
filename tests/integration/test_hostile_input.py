"""Input that is made to hurt: devices without end, names that a terminal obeys, nestings without measure."""

import gzip
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest

from harness.errors import Code, HarnessError
from harness.profiling.gate.baseline import read_baseline

from ..unit.lora_adapter import FOLDER, write_adapter
from .commands import ENGINE

ESCAPE = "\x1b]0;owned\x07\x1b[2J\x9b31m"
HARNESS = [sys.executable, "-c", "from harness.cli import main; main()"]


@pytest.fixture
def refused(harness):
    """Run a command that must refuse its input with a code and without anything that a terminal would obey."""

    def call(code, *arguments):
        ran = harness(*arguments)
        assert ran.status == 2, ran.err
        assert ran.err.startswith(f"{code}: "), ran.err
        assert all(character.isprintable() or character == "\n" for character in ran.err), repr(ran.err)
        return ran.err

    return call


@pytest.fixture
def sharded(checkpoints, tmp_path):
    return Path(shutil.copytree(checkpoints / "qwen2-tiny", tmp_path / "sharded"))


def index_with(folder, file, *, name=None):
    """Let the index name another file for its first tensor, or another tensor."""
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    first = next(iter(index["weight_map"]))
    if name is not None:
        del index["weight_map"][first]
    index["weight_map"][first if name is None else name] = file
    path.write_text(json.dumps(index))
    return folder


TOKENS = ["--token-ids", "1,4,5", "--max-new-tokens", "2", "--schedule", "plain"]
FIRST_SHARD = "model-00001-of-00002.safetensors"


@pytest.mark.parametrize("command", [["inspect"], ["check", *TOKENS, "--model"]], ids=["inspect", "check"])
def test_a_shard_whose_name_is_longer_than_any_files(refused, sharded, command):
    refused(Code.BAD_CONFIG, *command, index_with(sharded, f"{'m' * 5000}.safetensors"))


def test_names_in_an_index_that_a_terminal_would_obey(refused, sharded):
    refused(Code.MISSING_SHARD, "inspect", index_with(sharded, f"{ESCAPE}.safetensors"))
    shutil.copy(sharded / FIRST_SHARD, sharded / f"{ESCAPE}.safetensors")
    refused(Code.TENSORS_CONTRADICT_CONFIG, "inspect", sharded)


def test_a_tensor_that_a_terminal_would_obey(refused, sharded):
    refused(Code.TENSORS_CONTRADICT_CONFIG, "inspect", index_with(sharded, FIRST_SHARD, name=ESCAPE))


def test_a_config_that_a_terminal_would_obey(harness, sharded):
    config = json.loads((sharded / "config.json").read_text())
    (sharded / "config.json").write_text(json.dumps({**config, "note": ESCAPE, ESCAPE: 1}))
    ran = harness("inspect", sharded)
    assert ran.status == 0
    assert all(character.isprintable() or character == "\n" for character in ran.out), repr(ran.out)


def test_a_manifest_that_a_terminal_would_obey(refused, golden, recording, tmp_path):
    folder = Path(shutil.copytree(recording, tmp_path / "r"))
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(manifest | {ESCAPE: 1}))
    refused(Code.BAD_MANIFEST, "diff", golden, folder)


def test_an_engine_whose_error_a_terminal_would_obey(refused, install, llama):
    name = install(ENGINE.replace("class Between:", f"raise RuntimeError({ESCAPE!r})\nclass Between:"))
    refused(Code.ENGINE_FAILED, "check", "--model", llama, *TOKENS, "--engine", name, "--engine-timeout", "0")


def test_an_error_keeps_its_lines_and_its_tabs():
    error = HarnessError(Code.OTHER_BASELINE, f"a\n\tb{ESCAPE}", where=ESCAPE)
    assert str(error) == (
        "H077: a\n\tb\ufffd]0;owned\ufffd\ufffd[2J\ufffd31m\n  where:    \ufffd]0;owned\ufffd\ufffd[2J\ufffd31m"
    )


# Numbers and nestings

CASE = 'schema_version = 1\nmodel = "m"\n[[requests]]\ntoken_ids = [1, 2]\n'


@pytest.mark.parametrize(
    "text",
    [
        f"schema_version = {'9' * 5000}",
        f"schema_version = 0x{'f' * 5000}\n{CASE[19:]}",
        CASE + f"max_new_tokens = {'9' * 4000}\n",
        CASE + f"x = {'[' * 3000}{']' * 3000}",
        CASE + ".".join(["a"] * 3000) + " = 1",
        f"description = '''{ESCAPE}'''",
        "\ufeff" + CASE,
        "\0",
    ],
    ids=["digits", "hexadecimal", "fewer digits", "nested lists", "nested tables", "escapes", "mark", "NUL"],
)
def test_a_case_without_measure(refused, tmp_path, text):
    path = tmp_path / "case.toml"
    path.write_text(text, encoding="utf-8")
    refused(Code.BAD_CASE, "check", "--case", path)


@pytest.mark.parametrize(
    "name", ["m" * 300, "m" * 5000, "[" * 260 + "/../" + "[" * 260], ids=["300", "5000", "a parent that cannot be"]
)
def test_a_case_whose_model_is_no_name_of_a_file(refused, tmp_path, name):
    path = tmp_path / "case.toml"
    path.write_text(CASE.replace('"m"', f'"{name}"'), encoding="utf-8")
    refused(Code.NOT_A_CHECKPOINT, "check", "--case", path)


NESTED = "[" * 3000 + "]" * 3000


@pytest.mark.parametrize(
    "text", [NESTED, f'{{"a": {NESTED}}}', f'{{"a": {"9" * 5000}}}', '{"a": 1e999}', "[" * 500_000]
)
def test_json_without_measure(refused, sharded, golden, recording, tmp_path, text):
    """Wherever JSON is read."""
    path = tmp_path / "file.json"
    path.write_text(text)
    with pytest.raises(HarnessError) as caught:
        read_baseline(path)
    assert caught.value.code is Code.BAD_BASELINE
    refused(Code.BAD_PROFILE, "gate", path, tmp_path / "none.json")
    (sharded / "model.safetensors.index.json").write_text(text)
    refused(Code.BAD_CONFIG, "inspect", sharded)
    folder = Path(shutil.copytree(recording, tmp_path / "r"))
    (folder / "manifest.json").write_text(text)
    refused(Code.BAD_MANIFEST, "diff", golden, folder)
    (folder / "manifest.json").write_bytes((recording / "manifest.json").read_bytes())
    (folder / "golden.json").write_text(text)
    refused(Code.BAD_MANIFEST, "diff", folder, recording)


@pytest.mark.parametrize("key", ["x", "rope_scaling", "layer_types", "architectures", "eos_token_id", "vocab_size"])
def test_a_config_nested_without_measure(harness, sharded, key):
    config = json.loads((sharded / "config.json").read_text())
    text = json.dumps({**config, key: "here"}).replace('"here"', NESTED)
    (sharded / "config.json").write_text(text)
    for command in (["inspect", sharded], ["check", "--model", sharded, *TOKENS]):
        ran = harness(*command)
        assert ran.status in (0, 2), ran.err
        assert "H099" not in ran.err


@pytest.mark.parametrize("number", ["1" + "0" * 400, "1e300", "-1", "true", NESTED])
@pytest.mark.parametrize("field", ["r", "lora_alpha"])
def test_an_adapter_whose_numbers_have_no_measure(refused, tmp_path, field, number):
    folder = write_adapter(tmp_path / "adapter", seed=1)
    path = folder / "adapter_config.json"
    path.write_text(path.read_text().replace(f'"{field}": ', f'"{field}": {number}, "was": '))
    refused(Code.BAD_LORA, "check", "--model", FOLDER, *TOKENS, "--lora", folder)


@pytest.mark.parametrize("address", [2**64, -(2**63) - 1, "0x1ffffffffffffffffffff", "here", 10**400])
def test_a_trace_with_an_address_that_is_none(refused, tmp_path, address):
    refused(Code.TRACE_NOT_JSON, "trace", "summary", trace_with(tmp_path, address))


@pytest.mark.parametrize("address", [0, -1, 2**63 + 5, 2**64 - 1, "0xffffffffffffffff"])
def test_a_trace_with_an_address_of_64_bits(harness, tmp_path, address):
    assert harness("trace", "summary", trace_with(tmp_path, address)).status == 0


def trace_with(folder, address):
    place = {"pid": 1, "tid": 1}
    events = [
        {"ph": "X", "name": "aten::mm", "cat": "cpu_op", "ts": 1, "dur": 5, "args": {}, **place},
        {"ph": "i", "name": "[memory]", "ts": 2, "s": "t", "args": {"Addr": address, "Bytes": 8}, **place},
    ]
    path = folder / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    return path


# What the machine lacks


def test_no_folder_for_temporary_files(harness, llama, monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    ran = harness("check", "--model", llama, *TOKENS)
    assert ran.status == 2
    assert ran.err.startswith("H154: the operating system refuses: No such file or directory\n"), ran.err


def test_a_closed_standard_output_is_no_pass(checkpoints):
    command = f"exec {' '.join(map(shlex.quote, HARNESS))} inspect {checkpoints / 'qwen2-tiny'} >&-"
    ran = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 2
    assert ran.stderr.startswith("H031: standard output is closed: the result could not be written"), ran.stderr


@pytest.mark.slow
def test_closed_input_and_errors_do_not_matter(checkpoints):
    command = f"exec {' '.join(map(shlex.quote, HARNESS))} inspect {checkpoints / 'qwen2-tiny'} <&- 2>&-"
    ran = subprocess.run(["bash", "-c", command], stdout=subprocess.PIPE, text=True, timeout=120)
    assert ran.returncode == 0
    assert "qwen2" in ran.stdout


# Devices and pipes


@pytest.mark.parametrize("device", ["/dev/zero", "/dev/urandom", "/dev/full"])
def test_a_device_without_end_is_not_read_to_its_end(refused, monkeypatch, device):
    monkeypatch.setattr("harness.base.files.read_bytes.__kwdefaults__", {"most_bytes": 1 << 20})
    monkeypatch.setattr("harness.base.files.read_text.__kwdefaults__", {"most_bytes": 1 << 20})
    assert "it is larger than 1,048,576 bytes" in refused(Code.BAD_OPTION, "check", "--prompt-file", device)
    assert "it is larger than 1,048,576 bytes" in refused(Code.BAD_CASE, "check", "--case", device)
    refused(Code.TRACE_UNREADABLE, "trace", "summary", device)


@pytest.fixture
def pipe(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    return tmp_path / "pipe"


def test_a_pipe_that_nobody_writes_to_is_not_waited_for_for_ever(refused, pipe, golden, recording, monkeypatch):
    monkeypatch.setattr("harness.base.files._WAIT_S", 0.1)
    assert "nothing comes from it" in refused(Code.BAD_OPTION, "check", "--prompt-file", pipe)
    refused(Code.BAD_CASE, "check", "--case", pipe)
    refused(Code.TRACE_UNREADABLE, "trace", "summary", pipe)
    refused(Code.NOT_A_RECORDING, "diff", golden, pipe)


def test_a_pipe_that_somebody_writes_to_is_read(harness, pipe, checkpoints):
    """As `--prompt-file <(command)` gives it."""
    writer = os.open(pipe, os.O_RDWR)
    threading.Timer(0.3, lambda: (os.write(writer, b"abc"), os.close(writer))).start()
    from harness.base.files import read_text

    assert read_text(pipe) == "abc"


def test_a_pipe_that_stays_silent(pipe, monkeypatch):
    from harness.base import files

    monkeypatch.setattr(files, "_WAIT_S", 0.1)
    writer = os.open(pipe, os.O_RDWR)
    with pytest.raises(OSError, match="nothing comes from it"):
        files.read_bytes(pipe)
    os.close(writer)


def test_a_gzip_that_expands_to_more_than_any_trace(refused, tmp_path):
    path = tmp_path / "bomb.json.gz"
    with gzip.open(path, "wb", compresslevel=1) as file:
        for _ in range(150):
            file.write(bytes(1 << 20))
    message = refused(Code.TRACE_DAMAGED, "trace", "summary", path)
    assert "expands to more than any trace does" in message


def test_a_trace_larger_than_the_memory(refused, tmp_path):
    path = tmp_path / "trace.json"
    with path.open("wb") as file:
        file.truncate(1 << 43)  # of holes
    assert "does not fit into memory" in refused(Code.TRACE_UNREADABLE, "trace", "summary", path)


# Output


@pytest.mark.parametrize("command", ["golden", "record", "check"])
def test_an_output_folder_behind_a_link(harness, llama, golden, tmp_path, command):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    start = ["record", "--golden", golden] if command == "record" else [command, "--model", llama, *TOKENS[:4]]
    ran = harness(*start, "--out", tmp_path / "link")
    assert ran.status == 0, ran.err
    assert (tmp_path / "link").is_symlink()
    assert any((tmp_path / "real").iterdir())


def test_a_recording_that_was_interrupted_is_named(refused, golden, recording, tmp_path):
    folder = Path(shutil.copytree(recording, tmp_path / "r"))
    (folder / "manifest.json").unlink()
    assert "interrupted" in refused(Code.OUTPUT_EXISTS, "record", "--golden", golden, "--out", folder)
    assert "interrupted" in refused(Code.OUTPUT_EXISTS, "check", "--out", tmp_path)
    assert "interrupted" in refused(Code.NOT_A_RECORDING, "diff", golden, folder)


def test_python_without_docstrings():
    command = [sys.executable, "-OO", *HARNESS[1:], "check"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert ran.returncode == 2
    assert ran.stderr.startswith("H013: transformers needs docstrings")


@pytest.mark.slow
def test_python_without_assertions(llama):
    """What a command refuses does not hang on `assert`."""
    command = [sys.executable, "-O", *HARNESS[1:], "inspect", str(llama / "nowhere")]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert (ran.returncode, ran.stderr[:6]) == (2, "H001: ")
