"""`harness diff` of two folders of tensors: planted mistakes of HF's model, and input that cannot be compared."""

import json
import re
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from .test_cli_check_tensors import dump

PAIR_KEYS = {
    "names", "evidence", "shapes", "dtypes", "precisions", "layouts", "num_elements", "num_different", "roundings",
    "roundings_median", "relative_l2", "row", "column", "values", "num_not_finite", "same_not_finite", "likeness",
    "bound", "bound_median", "is_jump",
}  # fmt: skip
FOLDER_KEYS = {
    "path", "num_tensors", "num_compared", "num_elements", "num_elements_compared", "without_partner", "left_out",
}  # fmt: skip
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture
def folders(tmp_path, checkpoints):
    """Return two folders, of which a function fills the second one: HF's model in both."""

    def filled(*, dtypes=(torch.float32, torch.float32), plant=lambda model: None, model="llama-tiny"):
        for name, dtype, change in zip("ab", dtypes, (lambda model: None, plant), strict=True):
            shutil.rmtree(tmp_path / name, ignore_errors=True)
            (tmp_path / name).mkdir()
            torch.save(dump(checkpoints / model, dtype=dtype, plant=change), tmp_path / name / "all.pt")
        return tmp_path / "a", tmp_path / "b"

    return filled


def eager(model):
    model.set_attn_implementation("eager")


def wrong_eps(model):
    model.model.layers[1].input_layernorm.variance_epsilon = 0.3


def wrong_theta(model):
    eager(model)
    model.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq**1.2


def scaled_layer(model):
    eager(model)
    model.model.layers[1].mlp.down_proj.weight.data *= 1.5


def transposed_weight(model):
    weight = model.model.layers[2].self_attn.o_proj.weight
    weight.data = weight.data.reshape(weight.shape[::-1]).t().contiguous()


FAULTS = {
    wrong_eps: "model.layers.1.input_layernorm",
    wrong_theta: "model.layers.0.self_attn.o_proj",
    scaled_layer: "model.layers.1.mlp.down_proj",
    transposed_weight: "model.layers.2.self_attn.o_proj",
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("plant", "first"), FAULTS.items(), ids=lambda value: getattr(value, "__name__", value))
def test_a_planted_mistake_is_the_first_difference(harness, folders, plant, first, dtype):
    ran = harness("diff", *folders(dtypes=(dtype, dtype), plant=plant), "--format", "json")
    assert ran.status == 1, ran.out + ran.err
    result = ran.json
    assert result["verdict"] == "mismatch"
    assert result["first_difference"]["names"] == [f"all.pt: {first}"] * 2
    assert result["first_difference"]["is_jump"]
    at = result["pairs"].index(result["first_difference"])
    assert all(pair["likeness"] in ("same", "close") for pair in result["pairs"][:at])


@pytest.mark.parametrize("model", ["llama-tiny", "qwen2-tiny", "gemma3-tiny", "qwen3-moe-tiny"])
@pytest.mark.parametrize(
    "dtypes",
    [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.float32, torch.bfloat16)],
    ids=str,
)
def test_another_attention_of_hf_is_close(harness, folders, model, dtypes):
    ran = harness("diff", *folders(dtypes=dtypes, plant=eager, model=model), "--format", "json")
    assert ran.status == 0, ran.out + ran.err
    result = ran.json
    assert result["verdict"] == "pass"
    assert result["first_difference"] is None
    assert set(result) == {
        "schema_version", "verdict", "first_difference", "folders", "order", "close", "pairs", "ambiguous", "unproven",
    }  # fmt: skip
    assert set(result["pairs"][0]) == PAIR_KEYS
    assert set(result["folders"][0]) == FOLDER_KEYS
    kinds = {pair["likeness"] for pair in result["pairs"]}
    assert kinds == {"same", "close"}
    shares = [folder["num_elements_compared"] / folder["num_elements"] for folder in result["folders"]]
    assert shares == [1, 1]


def test_a_dump_of_arrays_under_other_names_and_layouts(harness, folders, tmp_path):
    first, second = folders(plant=scaled_layer)
    tensors = torch.load(second / "all.pt")
    (tmp_path / "c").mkdir()
    for at, (name, tensor) in enumerate(tensors.items()):
        words = name.replace("model.layers.", "blk.").replace("self_attn.", "att_").replace("_proj", "")
        np.save(tmp_path / "c" / f"{at:03}.{words}.npy", tensor[0].numpy())
    ran = harness("diff", first, tmp_path / "c")
    assert ran.status == 1, ran.out + ran.err
    first_difference = r"H088: all.pt: model\.layers\.1\.mlp\.down_proj = \d+\.blk\.1\.mlp\.down\.npy row "
    assert re.search(first_difference, " ".join(ran.out.split()))
    assert "harness check --tensors" in ran.out
    archive = tmp_path / "d"
    archive.mkdir()
    np.savez_compressed(archive / "all.npz", **{name: tensor.numpy() for name, tensor in tensors.items()})
    assert harness("diff", second, archive).status == 0


def test_markdown_is_the_text_in_a_fence(harness, folders):
    paths = folders()
    human, markdown = harness("diff", *paths), harness("diff", *paths, "--format", "markdown")
    assert human.out.startswith(f"PASS  {paths[0]} and {paths[1]}: compared ")
    assert markdown.out == f"```text\n{human.out}```\n"


def test_another_prompt_and_another_model_are_refused(harness, folders, checkpoints, tmp_path):
    first, _second = folders()
    for name, model, ids in (
        ("p", "llama-tiny", list(range(50, 62))),
        ("m", "gemma3-tiny", None),
    ):
        (tmp_path / name).mkdir()
        tensors = dump(checkpoints / model) if ids is None else dump(checkpoints / model, ids=ids)
        torch.save(tensors, tmp_path / name / "all.pt")
        ran = harness("diff", first, tmp_path / name, "--format", "json")
        assert (ran.status, ran.json["error"]["code"]) == (2, "H086")


def write(folder, kind, tensor):
    folder.mkdir()
    if kind == "safetensors":
        save_file({"x": tensor}, folder / "x.safetensors")
    elif kind == "npz":
        np.savez(folder / "x.npz", x=tensor.numpy())
    else:
        torch.save({"x": tensor}, folder / "x.pt")
    (path,) = folder.iterdir()
    return path


@pytest.mark.parametrize("kind", ["safetensors", "npz", "pt"])
@pytest.mark.parametrize("damage", ["truncated", "empty", "objects"])
def test_files_that_cannot_be_read(harness, tmp_path, kind, damage):
    write(tmp_path / "a", kind, torch.randn(50, 60))
    path = write(tmp_path / "b", kind, torch.randn(50, 60))
    if damage == "objects":
        path.unlink()
        path = tmp_path / "b" / "x.npz"
        np.savez(path, x=np.array([{}, 1], dtype=object))
    else:
        path.write_bytes(path.read_bytes()[: len(path.read_bytes()) // 2] if damage == "truncated" else b"")
    ran = harness("diff", tmp_path / "a", tmp_path / "b", "--format", "json")
    assert ran.status == 2
    assert ran.json["error"]["code"] in ("H084", "H004")
    assert str(path) in ran.json["error"]["where"]


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--model", "x"),
        ("--lora", "x"),
        ("--truth", "float64"),
        ("--taps", "all"),
        ("--lacking", "x"),
        ("--require", "decode"),
        ("--device", "cuda"),
    ],
)
def test_options_of_recordings_are_refused(harness, tmp_path, option, value):
    for name in "ab":
        write(tmp_path / name, "pt", torch.randn(50, 60))
    ran = harness("diff", tmp_path / "a", tmp_path / "b", option, value, "--format", "json")
    assert (ran.status, ran.json["error"]["code"], ran.json["error"]["where"]) == (2, "H013", option)


def test_close_is_refused_for_recordings(harness, golden, recording):
    ran = harness("diff", golden, recording, "--close", "3", "--format", "json")
    assert (ran.status, ran.json["error"]["where"]) == (2, "--close")


def test_a_recording_is_not_compared_with_a_folder_of_tensors(harness, golden, tmp_path):
    write(tmp_path / "b", "pt", torch.randn(50, 60))
    for paths in ((golden, tmp_path / "b"), (tmp_path / "b", golden), (tmp_path / "b", tmp_path / "none")):
        ran = harness("diff", *paths, "--format", "json")
        assert (ran.status, ran.json["error"]["code"]) == (2, "H020")


def test_the_json_of_numbers_that_are_none(harness, folders):
    first, second = folders()
    tensors = torch.load(second / "all.pt")
    tensors["model.norm"][0, 2, 1] = float("nan")
    torch.save(tensors, second / "all.pt")
    ran = harness("diff", first, second, "--format", "json")
    assert ran.status == 1
    pair = json.loads(ran.out)["first_difference"]
    assert (pair["roundings"], pair["values"][1], pair["num_not_finite"]) == ("inf", "nan", [0, 1])
