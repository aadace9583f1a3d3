"""`harness inspect PATH --tensor NAME`: one tensor of anything that holds tensors, alone or beside another."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from harness.errors import Code
from harness.formats.values import read_values

TAP = "model.layers.1.mlp.down_proj"
WEIGHT = "model.layers.1.mlp.down_proj.weight"


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A golden, and a recording of the same requests whose rows came in another order."""
    from harness.cli.main import run

    folder = tmp_path_factory.mktemp("recorded")
    asked = ["--model", "llama-tiny", "--token-ids", "5,6,7,8", "--token-ids", "9,10", "--max-new-tokens", "3"]
    assert run(["golden", *asked, "--dtype", "float32", "--out", str(folder / "golden")]) == 0
    recording = ["--golden", str(folder / "golden"), "--schedule", "batched", "--out", str(folder / "recording")]
    assert run(["record", *recording]) == 0
    return folder


@pytest.fixture
def inspect(harness):
    return lambda *arguments: harness("inspect", *arguments, "--format", "json")


def test_a_weight_in_figures(inspect, checkpoints):
    weight = load_file(checkpoints / "llama-tiny" / "model.safetensors")[WEIGHT].double()
    for path in ("llama-tiny", checkpoints / "llama-tiny", checkpoints / "llama-tiny" / "model.safetensors"):
        (shown,) = inspect(path, "--tensor", WEIGHT).json["tensors"]
        assert shown["shape"] == list(weight.shape)
        assert shown["max"] == pytest.approx(float(weight.max()), rel=1e-6)
        assert shown["rms"] == pytest.approx(float(weight.square().mean().sqrt()), rel=1e-6)
        assert sum(shown["histogram"]["counts"]) == weight.numel()
        assert shown["first_values"] == weight[:6, :6].tolist()


def test_a_row_of_a_tap_and_a_part_of_it(inspect, recorded):
    whole = read_values(recorded / "golden", TAP, row=(1, 2))
    (shown,) = inspect(recorded / "golden", "--tap", TAP, "--row", "1:2", "--slice", "3:7").json["tensors"]
    assert shown["first_values"] == whole[3:7].tolist()


def test_rows_of_two_recordings_are_put_side_by_side(inspect, recorded):
    shown = inspect(recorded / "golden", recorded / "recording", "--tensor", TAP).json
    assert [tensor["shape"][0] for tensor in shown["tensors"]] == [10, 10]
    assert shown["difference"]["relative_l2"] < 1e-6


def test_two_weights_that_differ_in_one_place(inspect, checkpoints, tmp_path):
    weights = load_file(checkpoints / "llama-tiny" / "model.safetensors")
    weights[WEIGHT][2, 3] += 1
    save_file(weights, tmp_path / "other.safetensors")
    difference = inspect("llama-tiny", tmp_path / "other.safetensors", "--tensor", WEIGHT).json["difference"]
    assert (difference["at"], difference["num_elements"] - difference["num_equal"]) == ([2, 3], 1)
    assert difference["max_difference"] == pytest.approx(1, rel=1e-6)


def test_what_is_no_number_is_counted(inspect, harness, tmp_path):
    np.save(tmp_path / "x.npy", np.array([[1.0, np.nan], [np.inf, 0.0]], dtype=np.float32))
    (shown,) = inspect(tmp_path, "--tensor", "x.npy").json["tensors"]
    assert (shown["num_nan"], shown["num_infinite"], shown["num_zeros"]) == (1, 1, 1)
    assert shown["first_values"] == [[1.0, "nan"], ["inf", 0.0]]
    assert (shown["min"], shown["max"]) == (0, 1)
    assert harness("inspect", tmp_path, "--tensor", "x.npy").status == 0


def test_for_people(harness, recorded):
    ran = harness("inspect", recorded / "golden", recorded / "recording", "--tensor", TAP, "--row", "0:1")
    assert ran.status == 0
    assert ran.out.startswith(f"{TAP}, request 0, position 1\n")
    assert "elements are equal\nlargest difference" in ran.out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["llama-tiny", "--tensor", "model.layers.1.mlp.down_proj.weigt"], WEIGHT),
        (["llama-tiny", "--tensor", WEIGHT, "--row", "0:1"], "only the taps of a recording have rows"),
        (["llama-tiny", "--tensor", WEIGHT, "--slice", "0:4,:8,3"], "3 parts for 2 dimensions"),
        (["llama-tiny", "--tensor", WEIGHT, "--slice", "a"], "neither a number nor a range"),
        (["llama-tiny", "--tensor", WEIGHT, "--slice", "9999"], "out of bounds"),
        (["llama-tiny", "--row", "0:1"], "name it: --tensor NAME"),
        (
            ["llama-tiny", "qwen2-tiny", "--tensor", "model.layers.1.self_attn.q_proj.weight"],
            "tensors of different shapes",
        ),
        (["--engine", "hf", "--model", "llama-tiny", "--tensor", WEIGHT], "a tensor lies in a file or folder"),
        (["llama-tiny", "--tensor", WEIGHT, "--against", "qwen2-tiny"], "a tensor lies in a file or folder"),
        (["llama-tiny", "--tensor", WEIGHT, "--map"], "a tensor lies in a file or folder"),
    ],
)
def test_what_cannot_be_shown(harness, arguments, words):
    ran = harness("inspect", *arguments)
    assert (ran.status, ran.err[:4]) == (2, Code.BAD_OPTION)
    assert words in ran.err


@pytest.mark.parametrize(("row", "words"), [("0:99", "no row of request 0 at position 99"), ("x", "REQUEST:POSITION")])
def test_a_row_that_is_not_there(harness, recorded, row, words):
    ran = harness("inspect", recorded / "golden", "--tensor", TAP, "--row", row)
    assert (ran.status, ran.err[:4]) == (2, Code.BAD_OPTION)
    assert words in ran.err


def test_a_checkpoint_without_a_tensor_is_a_mismatch(harness, checkpoints, tmp_path):
    weights = load_file(checkpoints / "llama-tiny" / "model.safetensors")
    del weights[WEIGHT]
    save_file(weights, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((checkpoints / "llama-tiny" / "config.json").read_text())
    ran = harness("inspect", tmp_path, "--format", "json")
    assert ran.status == 1
    assert json.loads(ran.out)["against_config"]["missing"] == [WEIGHT]


def test_integers_are_shown_too(inspect, tmp_path):
    save_file({"ids": torch.arange(4)}, tmp_path / "ids.safetensors")
    (shown,) = inspect(tmp_path / "ids.safetensors", "--tensor", "ids").json["tensors"]
    assert (shown["dtype"], shown["first_values"]) == ("int64", [0, 1, 2, 3])
