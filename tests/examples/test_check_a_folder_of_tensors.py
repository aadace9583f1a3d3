"""The page on folders of tensors: its dump is judged by its command."""

import importlib
import json
from pathlib import Path

import numpy as np
import torch

from harness.cli.main import run
from harness.engines.by_content.steps import watched_run

from ..documentation import Page

PAGE = Page("check-a-folder-of-tensors")


def test_the_dump_of_the_page_passes_the_command_of_the_page(tmp_path, monkeypatch, checkpoints, capsys):
    (code,) = PAGE.blocks("python")
    (command,) = [block for block in PAGE.blocks("sh") if block.startswith("harness ")]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cases").symlink_to(checkpoints.parent)
    exec(code, {})
    assert run(command.split()[1:]) == 0
    assert capsys.readouterr().out.startswith("PASS  tensors · qwen2-tiny · float32")


def test_every_tap_of_the_fused_toy_is_found_in_arrays_without_names(tmp_path, monkeypatch, checkpoints, capsys):
    """Fused projections, a residual stream in its norms, rotary in place, a row of padding."""
    monkeypatch.syspath_prepend(Path(__file__).parent)
    engine = importlib.import_module("fused_engine").FusedEngine(checkpoints / "qwen2-tiny", torch.float32)
    ids = [5, 9, 14, 3, 8, 21, 4, 17, 6, 33, 12, 40, 7, 7, 90, 31]
    tensors = {}
    watched_run(engine, [(0, ids, 0)], lambda site, tensor: tensors.update({site: tensor.clone()}))
    for at, tensor in enumerate(tensors.values()):
        np.save(tmp_path / f"{at * 7919 % 10007}.npy", tensor.numpy())
    options = ["--model", "qwen2-tiny", "--dtype", "float32", "--format", "json"]
    assert run(["check", "--tensors", str(tmp_path), "--token-ids", ",".join(map(str, ids)), *options]) == 0
    report = json.loads(capsys.readouterr().out)
    assert len(report["sources"]) == report["num_taps"] == 48
    reason = "it holds what HF computes from the engine's own values"
    assert {source["evidence"] for source in report["sources"]} == {reason}
