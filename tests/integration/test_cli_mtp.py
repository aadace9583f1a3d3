"""Layers that predict further tokens on the command line: judged by `check`, kept by `golden` and `run` for `diff`."""

import pytest
from safetensors.torch import load_file, save_file

from tests import mtp


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mellum")
    mtp.save("mellum", folder)
    return folder


def options(folder):
    return ["--model", folder, "--token-ids", "5,6,7,8,9", "--token-ids", "12,13,14", "--max-new-tokens", 5]


def test_hf_passes_in_every_schedule_that_it_follows(harness, folder):
    command = ["check", "--engine", "hf", *options(folder), "--mtp", "--dtype", "bfloat16", "--schedule"]
    ran = harness(*command, "plain,chunked:3,prefix-hit,forked")
    assert ran.status == 0
    assert "eh_proj" in ran.out
    ran = harness(*command, "speculative")
    assert ran.status == 2
    assert "cannot follow the schedule 'speculative'" in ran.err


def test_a_fault_is_seen_between_two_recordings(harness, folder, tmp_path):
    golden, wrong = tmp_path / "golden", tmp_path / "wrong"
    assert harness("golden", *options(folder), "--mtp", "--out", golden).status == 0
    wrong.mkdir()
    (wrong / "config.json").write_bytes((folder / "config.json").read_bytes())
    tensors = load_file(folder / "model.safetensors")
    tensors["mtp.fc.weight"] = tensors["mtp.fc.weight"].roll(64, dims=1)
    save_file(tensors, wrong / "model.safetensors", metadata={"format": "pt"})
    for checkpoint, status in ((folder, 0), (wrong, 1)):
        recording = tmp_path / f"run-{status}"
        assert harness("record", "--engine", "hf", *options(checkpoint), "--mtp", "--out", recording).status == 0
        ran = harness("diff", golden, recording, "--model", folder)
        assert ran.status == status
    assert "model.layers.2.eh_proj" in ran.out


def test_a_checkpoint_or_an_engine_without_them_is_refused(harness, folder):
    ran = harness("check", "--mtp", "--schedule", "plain")
    assert ran.status == 2
    assert "transformers runs no layers that predict further tokens" in ran.err
    assert harness("check", "--engine", "reference", *options(folder), "--mtp").status == 2
    ran = harness("check", "--engine", "hf", *options(folder), "--mtp", "--dry-run")
    assert ran.status == 2
    assert "leave --mtp out" in ran.err
