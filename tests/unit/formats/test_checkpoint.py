"""Finding checkpoints, and what is said of folders that are none or are damaged."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from blake3 import blake3
from safetensors.torch import save_file

from harness.errors import Code, HarnessError
from harness.formats import checkpoint
from harness.formats.checkpoint import Checkpoint
from harness.formats.checkpoint import cache as cache_module
from harness.formats.checkpoint import checkpoint as opened_module


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HARNESS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text('{"model_type": "llama"}')
    return path


@pytest.fixture
def sharded(folder):
    save_file({"a": torch.zeros(2)}, folder / "model-00001-of-00002.safetensors")
    save_file({"b": torch.ones(3), "c": torch.ones(1)}, folder / "model-00002-of-00002.safetensors")
    write_index(folder, {"a": 1, "b": 2, "c": 2})
    return folder


def write_index(folder, numbers):
    weight_map = {name: f"model-{number:05d}-of-00002.safetensors" for name, number in numbers.items()}
    (folder / checkpoint.INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))


def refused(code, call, *arguments, **options):
    with pytest.raises(HarnessError) as caught:
        call(*arguments, **options)
    assert caught.value.code is code, caught.value
    return str(caught.value)


class TestResolve:
    def test_a_local_folder(self, folder, monkeypatch):
        assert checkpoint.resolve(str(folder)) == folder
        monkeypatch.chdir(folder.parent)
        assert checkpoint.resolve("model") == Path("model")
        monkeypatch.setenv("HOME", str(folder.parent))
        assert checkpoint.resolve("~/model") == folder

    def test_an_empty_name_is_not_the_working_folder(self, folder, monkeypatch):
        monkeypatch.chdir(folder)
        refused(Code.NOT_A_CHECKPOINT, checkpoint.resolve, "")

    @pytest.mark.parametrize(
        "name", ["/no/such", "./no", "../no", "a/b/c", "no such", "a\0b", "~nobody-of-this-name/x", "-x"]
    )
    def test_neither_a_folder_nor_a_hub_id(self, name):
        message = refused(Code.NOT_A_CHECKPOINT, checkpoint.resolve, name)
        assert "there is no such folder, and this is no hub id" in message
        assert "a folder in HuggingFace's layout, or a hub id" in message

    def test_no_checkpoint_in_the_folder(self, tmp_path):
        assert "the folder has no config.json" in refused(Code.NOT_A_CHECKPOINT, checkpoint.resolve, str(tmp_path))
        (tmp_path / "file").touch()
        assert "is a file" in refused(Code.NOT_A_CHECKPOINT, checkpoint.resolve, str(tmp_path / "file"))

    def test_a_hub_id_that_is_not_in_the_cache(self, tmp_path, monkeypatch):
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
        message = refused(Code.NOT_A_CHECKPOINT, checkpoint.resolve, "nobody/nothing", local_files_only=True)
        assert "the hub cannot be reached" in message
        assert "hf download nobody/nothing" in message

    def test_what_the_hub_is_asked_for(self, folder, monkeypatch):
        asked = {}

        def download(repo, **options):
            asked.update(options, repo=repo)
            return str(folder)

        monkeypatch.setattr("huggingface_hub.snapshot_download", download)
        assert checkpoint.resolve("org/name", revision="v1") == folder
        assert (asked["repo"], asked["revision"], asked["local_files_only"]) == ("org/name", "v1", False)

    @pytest.mark.parametrize("error", [ConnectionError("refused\nmore"), ValueError(), KeyError("x")])
    def test_whatever_goes_wrong_on_the_way(self, monkeypatch, error):
        def download(*_, **__):
            raise error

        monkeypatch.setattr("huggingface_hub.snapshot_download", download)
        message = refused(Code.NOT_A_CHECKPOINT, checkpoint.resolve, "org/name")
        assert "the hub does not deliver it" in message
        assert "more" not in message


class TestConfig:
    def test_read(self, folder):
        assert Checkpoint(folder).config == {"model_type": "llama"}
        assert Checkpoint(folder).config_hash == hashlib.sha256(b'{"model_type": "llama"}').hexdigest()

    @pytest.mark.parametrize("text", [b"", b"{", b"[]", b"3", b'{"a": \xff}', b"[" * 100_000, b'{"a": 1' + b"0" * 5000])
    def test_bad(self, folder, text):
        (folder / "config.json").write_bytes(text)
        refused(Code.BAD_CONFIG, lambda: Checkpoint(folder).config)

    def test_missing(self, tmp_path):
        refused(Code.NOT_A_CHECKPOINT, lambda: Checkpoint(tmp_path).config)


class TestOpenedOnce:
    def test_what_was_read_stays(self, sharded):
        opened = Checkpoint(sharded)
        first = opened.config, opened.config_hash, opened.tensors
        (sharded / "config.json").write_text("{}")
        (sharded / checkpoint.INDEX_NAME).unlink()
        assert (opened.config, opened.config_hash, opened.tensors) == first
        assert Checkpoint(sharded).config == {}

    def test_each_header_and_the_index_are_read_once(self, sharded, monkeypatch):
        read, read_header, read_index = [], opened_module.read_header, opened_module.read_shard_index
        monkeypatch.setattr(opened_module, "read_header", lambda file: read.append(file) or read_header(file))
        monkeypatch.setattr(opened_module, "read_shard_index", lambda path: read.append(path) or read_index(path))
        opened = Checkpoint(sharded)
        for _ in range(2):
            _ = opened.tensors, opened.headers, opened.weights_hash, opened.num_bytes
        assert read == [sharded, *opened.shards]

    def test_a_folder_or_a_checkpoint_itself(self, folder):
        opened = Checkpoint(folder)
        assert Checkpoint.of(opened) is opened
        assert Checkpoint.of(str(folder)) == Checkpoint.of(folder) == opened

    @pytest.mark.parametrize("text", ["{}", '{"dtype": null}', '{"torch_dtype": "float32"}'])
    def test_the_dtype_is_float32_where_none_is_named(self, folder, text):
        (folder / "config.json").write_text(text)
        assert Checkpoint(folder).dtype == "float32"

    @pytest.mark.parametrize(("text", "size"), [('{"hidden_size": 96}', 96), ('{"hidden_size": "x"}', 0), ("{}", 0)])
    def test_the_hidden_size(self, folder, text, size):
        (folder / "config.json").write_text(text)
        assert Checkpoint(folder).hidden_size == size

    def test_the_dtype_under_both_its_names(self, folder):
        (folder / "config.json").write_text('{"torch_dtype": "float16"}')
        assert Checkpoint(folder).dtype == "float16"
        (folder / "config.json").write_text('{"torch_dtype": "float16", "dtype": "bfloat16"}')
        assert Checkpoint(folder).dtype == "bfloat16"


class TestChanges:
    def test_none(self, sharded):
        with Checkpoint(sharded).unchanged():
            (sharded / "tokenizer.json").write_text("{}")

    @pytest.mark.parametrize("name", ["config.json", "model-00002-of-00002.safetensors"])
    def test_a_file_that_is_written_again(self, sharded, name):
        def write():
            with Checkpoint(sharded).unchanged():
                content = (sharded / name).read_bytes()
                (sharded / name).unlink()
                (sharded / name).write_bytes(content)
                os.utime(sharded / name, ns=(0, 0))

        message = refused(Code.CHECKPOINT_CHANGED, write)
        assert str(sharded / name) in message

    def test_a_file_that_is_gone(self, sharded):
        opened = Checkpoint(sharded)
        assert opened.num_bytes == sum(file.stat().st_size for file in sharded.glob("*.safetensors"))
        (sharded / "model-00001-of-00002.safetensors").unlink()
        refused(Code.CHECKPOINT_CHANGED, opened.refuse_changes)

    def test_another_blob_behind_a_link(self, sharded):
        shard = sharded / "model-00001-of-00002.safetensors"
        shard.rename(sharded.parent / "blob")
        shutil.copy2(sharded.parent / "blob", sharded.parent / "other")
        shard.symlink_to("../blob")
        opened = Checkpoint(sharded)
        opened.refuse_changes()
        shard.unlink()
        shard.symlink_to("../other")
        refused(Code.CHECKPOINT_CHANGED, opened.refuse_changes)

    def test_what_the_block_raises_comes_first(self, sharded):
        with pytest.raises(ZeroDivisionError), Checkpoint(sharded).unchanged():  # noqa: PT012
            (sharded / "config.json").unlink()
            raise ZeroDivisionError


class TestShards:
    def test_single_file(self, folder):
        save_file({"a": torch.zeros(2)}, folder / "model.safetensors")
        assert Checkpoint(folder).shards == (folder / "model.safetensors",)
        assert set(Checkpoint(folder).tensors) == {"a"}

    def test_sharded(self, sharded):
        assert [shard.name[:11] for shard in Checkpoint(sharded).shards] == ["model-00001", "model-00002"]
        headers = Checkpoint(sharded).tensors
        assert {name: (entry.shape, shard.name[:11]) for name, (entry, shard) in headers.items()} == {
            "a": ((2,), "model-00001"),
            "b": ((3,), "model-00002"),
            "c": ((1,), "model-00002"),
        }

    def test_no_weights(self, folder):
        assert "neither model.safetensors nor" in refused(Code.NOT_A_CHECKPOINT, lambda: Checkpoint(folder).shards)
        (folder / "pytorch_model.bin").touch()
        message = refused(Code.NOT_A_CHECKPOINT, lambda: Checkpoint(folder).shards)
        assert "convert pytorch_model.bin to safetensors" in message

    def test_missing_shard(self, sharded):
        (sharded / "model-00002-of-00002.safetensors").unlink()
        message = refused(Code.MISSING_SHARD, lambda: Checkpoint(sharded).shards)
        assert "the shard model-00002-of-00002.safetensors is missing" in message
        assert "actual:   model-00001-of-00002.safetensors" in message

    @pytest.mark.parametrize(
        "index",
        [{}, {"weight_map": []}, {"weight_map": {}}, {"weight_map": {"a": 3}}, {"weight_map": {"a": "x.bin"}}, []],
    )
    def test_malformed_index(self, sharded, index):
        (sharded / checkpoint.INDEX_NAME).write_text(json.dumps(index))
        refused(Code.BAD_CONFIG, lambda: Checkpoint(sharded).shards)

    @pytest.mark.parametrize("name", ["../x.safetensors", "/x.safetensors", "a/../../x.safetensors"])
    def test_a_shard_outside_of_the_folder(self, sharded, name):
        (sharded / checkpoint.INDEX_NAME).write_text(json.dumps({"weight_map": {"a": name}}))
        assert "outside of the checkpoint's folder" in refused(Code.BAD_CONFIG, lambda: Checkpoint(sharded).shards)

    def test_shards_that_are_links_as_in_the_hubs_cache(self, sharded):
        shard = sharded / "model-00001-of-00002.safetensors"
        shard.rename(sharded.parent / "blob")
        shard.symlink_to("../blob")
        assert len(Checkpoint(sharded).tensors) == 3

    @pytest.mark.parametrize(
        ("numbers", "message"),
        [
            ({"a": 1, "b": 2, "d": 2}, "the index names a tensor that its shard lacks"),
            ({"a": 2, "b": 1}, "a tensor is in another shard than the index says"),
        ],
    )
    def test_an_index_that_contradicts_its_shards(self, sharded, numbers, message):
        write_index(sharded, numbers)
        assert message in refused(Code.TENSORS_CONTRADICT_CONFIG, lambda: Checkpoint(sharded).tensors)

    def test_a_tensor_in_two_shards(self, sharded):
        save_file({"a": torch.zeros(2), "b": torch.ones(3)}, sharded / "model-00001-of-00002.safetensors")
        message = refused(Code.TENSORS_CONTRADICT_CONFIG, lambda: Checkpoint(sharded).tensors)
        assert "two shards hold the same tensor" in message


class TestWeightsHash:
    def test_is_that_of_the_bytes_in_order(self, sharded):
        content = b"".join(shard.read_bytes() for shard in Checkpoint(sharded).shards)
        assert Checkpoint(sharded).weights_hash == f"blake3:{blake3(content).hexdigest()}"

    def test_a_recording_may_have_it_as_a_sha256_or_lack_it(self, sharded):
        one = Checkpoint(sharded)
        content = b"".join(shard.read_bytes() for shard in one.shards)
        for digest in (None, one.weights_hash, hashlib.sha256(content).hexdigest()):
            assert one.has_weights(digest)
        for digest in (hashlib.sha256(b"").hexdigest(), one.weights_hash[:-1], f"sha256:{'0' * 64}"):
            assert not one.has_weights(digest)

    def test_is_remembered_until_a_shard_changes(self, sharded, cache, monkeypatch):
        monkeypatch.setattr(cache_module, "_SETTLED_NS", 0)
        first = Checkpoint(sharded).weights_hash
        (memo,) = (cache / "weights").iterdir()
        memo.write_text(known := f"blake3:{'0' * 64}")
        assert Checkpoint(sharded).weights_hash == known
        save_file({"a": torch.ones(2)}, sharded / "model-00001-of-00002.safetensors")
        assert Checkpoint(sharded).weights_hash not in (first, known)

    def test_files_that_were_written_a_moment_ago_are_hashed_again(self, sharded, cache):
        assert len(Checkpoint(sharded).weights_hash) == 71
        assert not (cache / "weights").exists()

    def test_a_damaged_memo_is_not_believed(self, sharded, cache, monkeypatch):
        monkeypatch.setattr(cache_module, "_SETTLED_NS", 0)
        first = Checkpoint(sharded).weights_hash
        (memo,) = (cache / "weights").iterdir()
        for damaged in (b"\xff", b"0" * 64):
            memo.write_bytes(damaged)
            assert Checkpoint(sharded).weights_hash == first

    def test_a_cache_that_cannot_be_written(self, sharded, cache):
        cache.write_text("a file")
        assert len(Checkpoint(sharded).weights_hash) == 71


def test_cache_dir(monkeypatch, tmp_path):
    assert checkpoint.cache_dir() == tmp_path / "cache"
    monkeypatch.delenv("HARNESS_CACHE")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert checkpoint.cache_dir() == Path("/home/somebody/.cache/inference-harness")


def test_embedded_cases(tmp_path, monkeypatch):
    assert checkpoint.embedded_cases() == Path(__file__).parents[3] / "cases"
    monkeypatch.setattr(cache_module, "__file__", str(tmp_path / "harness" / "formats" / "checkpoint" / "cache.py"))
    refused(Code.BAD_CASE, checkpoint.embedded_cases)
    (tmp_path / "harness" / "embedded").mkdir(parents=True)
    assert checkpoint.embedded_cases() == tmp_path / "harness" / "embedded"


def test_torch_is_not_imported():
    root = Path(__file__).parents[3]
    code = (
        "import sys, harness.formats.checkpoint, harness.formats.safetensors_header; sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=root)
