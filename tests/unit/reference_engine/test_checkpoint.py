from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from reference_engine.checkpoint import load as checkpoint_module
from reference_engine.checkpoint.load import load_weights
from reference_engine.checkpoint.model_config import ModelConfig
from reference_engine.checkpoint.weights import weight_table
from reference_engine.errors import CheckpointError

CPU = torch.device("cpu")
Q_PROJ = "model.layers.0.self_attn.q_proj.weight"


def load(folder: Path, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return load_weights(folder, ModelConfig.from_folder(folder), dtype, CPU)


@pytest.fixture
def folder(checkpoint: Any, tmp_path: Path) -> Path:
    return Path(shutil.copytree(checkpoint.folder, tmp_path / "copy"))


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def shard(folder: Path) -> dict[str, str]:
    """Split the single file in two and return the index's weight_map."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    files = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in files.items():
        save_file({name: tensors[name] for name in part}, folder / file)
    weight_map = {name: file for file, part in files.items() for name in part}
    write_index(folder, weight_map)
    return weight_map


def write_index(folder: Path, weight_map: object) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize("checkpoint", ["llama", "qwen2", "qwen3", "stories260k"], indirect=True)
def test_every_tensor_arrives_at_its_place(checkpoint: Any) -> None:
    state = checkpoint.model.state_dict()
    parameters = load(checkpoint.folder)
    for name, place in weight_table(ModelConfig.from_folder(checkpoint.folder)).items():
        actual = parameters[place.parameter][place.row : place.row + place.shape[0]]
        assert torch.equal(actual, state[name]), name
    assert sum(p.numel() for p in {id(p): p for p in parameters.values()}.values()) == checkpoint.model.num_parameters()


def test_shards_are_one_checkpoint_and_each_is_opened_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = load(folder)
    shard(folder)
    opened = []
    open_file = checkpoint_module.safe_open
    monkeypatch.setattr(checkpoint_module, "safe_open", lambda path, **kw: opened.append(path) or open_file(path, **kw))
    sharded = load(folder)
    assert sorted(path.name for path in opened) == ["a.safetensors", "b.safetensors"]
    assert whole.keys() == sharded.keys()
    assert all(torch.equal(whole[name], sharded[name]) for name in whole)


def test_weights_are_cast_to_the_engine_s_dtype(checkpoint: Any) -> None:
    exact, rounded = load(checkpoint.folder), load(checkpoint.folder, torch.bfloat16)
    assert all(torch.equal(rounded[name], exact[name].to(torch.bfloat16)) for name in exact)


@pytest.mark.parametrize("checkpoint", ["llama"], indirect=True)
def test_a_tied_head_is_the_embedding_unless_the_checkpoint_has_its_own(folder: Path) -> None:
    tied = load(folder)
    assert tied["lm_head.weight"] is tied["model.embed_tokens.weight"]
    rewrite(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    same = load(folder)
    assert same["lm_head.weight"] is same["model.embed_tokens.weight"]
    rewrite(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] + 1}))
    loaded = load(folder)
    assert torch.equal(loaded["lm_head.weight"], loaded["model.embed_tokens.weight"] + 1)


def test_computed_buffers_of_old_checkpoints_are_ignored(folder: Path) -> None:
    before = set(load(folder))
    rewrite(folder, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}))
    assert set(load(folder)) == before


def _misshape(tensors: dict[str, torch.Tensor]) -> None:
    tensors[Q_PROJ] = tensors[Q_PROJ][:, :-1].contiguous()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(Q_PROJ), rf"\(missing: {Q_PROJ}\).*\(unexpected: none\)"),
        (lambda t: t.update(extra=torch.ones(1)), r"\(missing: none\).*\(unexpected: extra\)"),
        (_misshape, rf"{Q_PROJ}: expected shape \[72, 48\], found \[72, 47\]"),
        (
            lambda t: t.update({Q_PROJ: t[Q_PROJ].int()}),
            rf"{Q_PROJ}: expected dtype F64 or F32 or F16 or BF16, found I32",
        ),
        (lambda t: t.clear(), "and 17 more"),
    ],
    ids=["missing", "unexpected", "misshapen", "integer", "empty"],
)
def test_a_wrong_tensor_is_named(folder: Path, change: Callable[..., object], message: str) -> None:
    rewrite(folder, change)
    with pytest.raises(CheckpointError, match=message):
        load(folder)


def test_a_config_that_contradicts_the_tensors_is_refused(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "intermediate_size": 81}))
    with pytest.raises(CheckpointError, match=r"gate_proj.weight: expected shape \[81, 48\], found \[80, 48\]"):
        load(folder)


def test_a_folder_without_weights_says_what_it_holds(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"expected model.safetensors or .*index.json, found config.json"):
        load(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.update({Q_PROJ: "c.safetensors"}), "shards are missing.*found c.safetensors"),
        (lambda m: m.update(ghost="a.safetensors"), r"\(absent from the shard: ghost\)"),
        (lambda m: m.pop(Q_PROJ), rf"\(absent from the index: {Q_PROJ}\)"),
        (lambda m: m.update({Q_PROJ: "../a.safetensors"}), "no file name.*'../a.safetensors'"),
        (lambda m: m.update({Q_PROJ: 7}), "no file name.*7"),
        (lambda m: m.clear(), "the index lists nothing"),
    ],
    ids=["missing-shard", "absent-tensor", "unlisted-tensor", "outside", "number", "empty"],
)
def test_a_wrong_index_is_refused_by_name(folder: Path, change: Callable[..., object], message: str) -> None:
    weight_map = shard(folder)
    change(weight_map)
    write_index(folder, weight_map)
    with pytest.raises(CheckpointError, match=message):
        load(folder)


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"weight_map": 3}', "[" * 100_000])
def test_an_index_that_is_no_index_is_refused(folder: Path, content: str) -> None:
    shard(folder)
    (folder / "model.safetensors.index.json").write_text(content)
    with pytest.raises(CheckpointError, match="index"):
        load(folder)


@pytest.mark.parametrize("num_bytes", [0, 4, 8, 100, 40_000])
def test_a_truncated_file_is_refused(folder: Path, num_bytes: int) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:num_bytes])
    with pytest.raises(CheckpointError, match=rf"not a safetensors file.*model.safetensors: found {num_bytes} bytes"):
        load(folder)


def test_a_header_longer_than_the_file_is_refused(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(b"\xff" * 8 + path.read_bytes()[8:])
    with pytest.raises(CheckpointError, match="not a safetensors file"):
        load(folder)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(offset=st.integers(0, 2000), byte=st.integers(0, 255))
def test_a_mutated_header_loads_or_is_refused(folder: Path, offset: int, byte: int) -> None:
    path = folder / "model.safetensors"
    sound = path.read_bytes()
    path.write_bytes(sound[:offset] + bytes([byte]) + sound[offset + 1 :])
    try:
        load(folder)
    except CheckpointError:
        pass
    finally:
        path.write_bytes(sound)
