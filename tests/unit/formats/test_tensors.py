"""Folders of dumped tensors: what is read, and what is refused without being unpickled."""

import os
import pickle

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from harness.errors import Code, HarnessError
from harness.formats import tensors
from harness.formats.tensors import TensorFolder, read_tensors

MARK = "ran"


class RunsCode:
    def __reduce__(self):
        return os.mkdir, (MARK,)


def by_name(folder):
    return {tensor.name: tensor.tensor for tensor in read_tensors(folder).tensors}


def refusal(folder) -> HarnessError:
    with pytest.raises(HarnessError) as caught:
        read_tensors(folder)
    return caught.value


def test_all_formats_in_nested_folders(tmp_path):
    values = torch.randn(5, 7)
    (tmp_path / "rank0" / "step0").mkdir(parents=True)
    np.save(tmp_path / "a.npy", values.numpy())
    np.savez(tmp_path / "z.npz", q=values.numpy(), ids=np.arange(3), w=values.half().numpy())
    save_file({"q": values.bfloat16(), "w": values}, tmp_path / "rank0" / "s.safetensors")
    torch.save({"mlp": [values, None, values * 2], "norm": {"out": values.half()}, "count": 3}, tmp_path / "rank0/x.pt")
    torch.save(torch.nn.Parameter(values), tmp_path / "rank0" / "step0" / "p.pth")
    tensors = by_name(tmp_path)
    assert sorted(tensors) == [
        "a.npy", "rank0/s.safetensors: q", "rank0/s.safetensors: w", "rank0/step0/p.pth",
        "rank0/x.pt: mlp.0", "rank0/x.pt: mlp.2", "rank0/x.pt: norm.out", "z.npz: q", "z.npz: w",
    ]  # fmt: skip
    assert torch.equal(tensors["a.npy"], values)
    assert torch.equal(tensors["z.npz: w"], values.half())
    assert torch.equal(tensors["rank0/s.safetensors: q"], values.bfloat16())
    assert torch.equal(tensors["rank0/x.pt: mlp.2"], values * 2)
    assert not tensors["rank0/step0/p.pth"].requires_grad


@pytest.mark.parametrize("array", [np.asfortranarray, lambda x: x.astype(">f8"), lambda x: x[::2]])
def test_arrays_in_any_layout(tmp_path, array):
    values = array(np.arange(12.0).reshape(4, 3))
    np.save(tmp_path / "a.npy", values)
    assert np.array_equal(by_name(tmp_path)["a.npy"].numpy(), values)


def test_large_tensors_are_mapped(tmp_path, monkeypatch):
    monkeypatch.setattr(tensors, "_MAP_FROM_BYTES", 8)
    values = torch.randn(50, 30)
    np.save(tmp_path / "a.npy", values.numpy())
    save_file(
        {"odd": torch.zeros(3, dtype=torch.uint8), "w": values, "b": values[:3].bfloat16()}, tmp_path / "s.safetensors"
    )
    mapped = by_name(tmp_path)
    assert torch.equal(mapped["a.npy"], values)
    assert torch.equal(mapped["s.safetensors: w"], values)
    assert torch.equal(mapped["s.safetensors: b"], values[:3].bfloat16())


def test_files_of_the_old_format_of_torch(tmp_path):
    torch.save(torch.ones(3, 2), tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    assert torch.equal(by_name(tmp_path)["old.pt"], torch.ones(3, 2))


def test_what_is_left_out_is_named(tmp_path):
    np.save(tmp_path / "a.npy", np.zeros((2, 2)))
    np.save(tmp_path / "ids.npy", np.arange(4))
    np.save(tmp_path / "none.npy", np.zeros((0, 3)))
    (tmp_path / "dump.json").write_text("{}")
    os.mkfifo(tmp_path / "pipe.npy")
    assert read_tensors(tmp_path).left_out == (
        "dump.json: no file of tensors",
        "ids.npy: no floating-point numbers (int64, shape [4])",
        "none.npy: no floating-point numbers (float64, shape [0, 3])",
        "pipe.npy: no regular file",
    )


@pytest.mark.parametrize("save", [torch.save, lambda value, path: path.write_bytes(pickle.dumps(value))])
def test_a_file_that_wants_to_run_code_is_refused(tmp_path, monkeypatch, save):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "dump").mkdir()
    save(RunsCode(), tmp_path / "dump" / "x.pt")
    error = refusal(tmp_path / "dump")
    assert error.code is Code.BAD_TENSOR_FILE
    assert error.what == "the file holds more than tensors, and reading it would run code"
    assert error.hint == "save tensors alone, in dicts and lists: torch.save({name: tensor, ...}, path)"
    assert not (tmp_path / MARK).exists()


def test_a_module_is_refused_by_its_class(tmp_path):
    torch.save(torch.nn.Linear(2, 2), tmp_path / "x.pt")
    assert refusal(tmp_path).actual == "torch.nn.modules.linear.Linear"


def test_an_array_of_objects_is_refused(tmp_path):
    np.save(tmp_path / "x.npy", np.array([RunsCode(), 1], dtype=object), allow_pickle=True)
    error = refusal(tmp_path)
    assert (error.code, error.actual) == (Code.BAD_TENSOR_FILE, np.dtype(object))
    assert error.what == "the array holds Python objects, which are never unpickled"


@pytest.mark.parametrize("name", ["x.npy", "x.npz", "x.pt", "x.safetensors"])
@pytest.mark.parametrize("kept", [0, 1, 0.5, -1])
def test_a_truncated_file_is_refused(tmp_path, name, kept):
    path, values = tmp_path / name, torch.randn(40, 30)
    if path.suffix in (".npy", ".npz"):
        (np.save if path.suffix == ".npy" else np.savez)(path, values.numpy())
    else:
        (torch.save if path.suffix == ".pt" else save_file)({"a": values}, path)
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * kept) if isinstance(kept, float) else kept])
    error = refusal(tmp_path)
    assert error.code is (Code.DAMAGED_SAFETENSORS if path.suffix == ".safetensors" else Code.BAD_TENSOR_FILE)


def test_a_tensor_that_is_too_large_is_refused(tmp_path):
    torch.save({"big": torch.zeros(1).expand(10**5, 10**5)}, tmp_path / "x.pt")
    error = refusal(tmp_path)
    assert error.code is Code.BAD_TENSOR_FILE
    assert error.what == "the tensor 'big' is too large"
    assert (error.expected, error.actual) == ("at most 8,589,934,592 bytes", "40,000,000,000 bytes")


@pytest.mark.parametrize("target", ["secret.npy", "."])
def test_a_link_that_leaves_the_folder_is_refused(tmp_path, target):
    np.save(tmp_path / "secret.npy", np.zeros(3))
    (tmp_path / "dump").mkdir()
    (tmp_path / "dump" / "link.npy").symlink_to(tmp_path / target)
    error = refusal(tmp_path / "dump")
    assert (error.code, error.what) == (Code.BAD_TENSOR_FOLDER, "a link leads out of the folder")


def test_two_tensors_of_one_name_are_refused(tmp_path):
    torch.save({"a.b": torch.zeros(2), "a": {"b": torch.ones(2)}}, tmp_path / "x.pt")
    error = refusal(tmp_path)
    assert (error.code, error.what, error.actual) == (Code.BAD_TENSOR_FOLDER, "two tensors have one name", "a.b")


def test_a_folder_without_tensors_is_refused(tmp_path):
    error = refusal(tmp_path)
    assert (error.code, error.what) == (Code.BAD_TENSOR_FOLDER, "the folder has no tensors")
    assert (error.expected, error.actual) == (
        "floating-point tensors in .npy, .npz, .safetensors, .pt, .pth",
        "an empty folder",
    )
    (tmp_path / "dump.json").write_text("{}")
    assert refusal(tmp_path).actual == "1 others: dump.json: no file of tensors"


def test_a_folder_that_is_not_there(tmp_path):
    assert refusal(tmp_path / "none").what == "there is no such folder"
    (tmp_path / "file").touch()
    assert refusal(tmp_path / "file").what == "the path is not a folder"


@pytest.mark.parametrize("suffix", ["npz", "pt", "safetensors"])
def test_a_folder_reads_one_tensor_after_the_other_in_any_order(tmp_path, suffix):
    values = {name: torch.randn(3, 4) for name in "abc"}
    if suffix == "npz":
        np.savez_compressed(tmp_path / "x.npz", **{name: value.numpy() for name, value in values.items()})
    else:
        (torch.save if suffix == "pt" else save_file)(values, tmp_path / f"x.{suffix}")
    folder = TensorFolder(tmp_path)
    assert [item.name for item in folder.tensors()] == [f"x.{suffix}: {name}" for name in "abc"]
    for name in "bcabac":
        assert torch.equal(folder.read(f"x.{suffix}: {name}"), values[name])
    folder.check_unchanged()


def test_a_tensor_that_is_gone_was_changed(tmp_path):
    torch.save({"a": torch.ones(3)}, tmp_path / "x.pt")
    folder = TensorFolder(tmp_path)
    assert len(list(folder.tensors())) == 1
    torch.save({"other": torch.ones(3)}, tmp_path / "x.pt")
    with pytest.raises(HarnessError) as caught:
        folder.read("x.pt: a")
    assert (caught.value.code, caught.value.what) == (Code.BAD_TENSOR_FILE, "the file was changed while it was read")


def test_an_archive_of_objects_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "dump").mkdir()
    np.savez(tmp_path / "dump" / "x.npz", a=np.array([RunsCode(), 1], dtype=object))
    assert refusal(tmp_path / "dump").code is Code.BAD_TENSOR_FILE
    assert not (tmp_path / MARK).exists()
