"""The folder of the cache with dequantised weights, and what it says of its source."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from harness.errors import Code, HarnessError
from harness.extensions.quantised.folder import is_quantised
from harness.formats.checkpoint import Checkpoint, resolve
from harness.formats.checkpoint.quantised import cache_scales, read_quantised_source, served_folder
from harness.plan import plan_engine
from tests.quantised_checkpoints import write_quantised
from tests.quantised_faults import CHECKPOINTS


@pytest.fixture
def quantised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small W4A16 checkpoint, and a cache of its own."""
    monkeypatch.setenv("HARNESS_CACHE", str(tmp_path / "cache"))
    write_quantised(CHECKPOINTS / "qwen3-tiny", tmp_path / "model", "w4a16")
    return tmp_path / "model"


def test_it_is_an_ordinary_checkpoint_made_once(quantised: Path):
    made = resolve(str(quantised))
    assert made != quantised
    assert is_quantised(quantised)
    assert not is_quantised(made)
    assert Checkpoint(made).has_tokenizer == Checkpoint(quantised).has_tokenizer
    assert resolve(str(quantised)) == made
    assert served_folder(made) == quantised.resolve()
    assert served_folder(CHECKPOINTS / "qwen3-tiny") == CHECKPOINTS / "qwen3-tiny"
    assert read_quantised_source(CHECKPOINTS / "qwen3-tiny") is None


def test_a_plan_says_what_was_read(quantised: Path):
    (note,) = plan_engine(model=str(quantised)).notes
    assert note == (
        "the weights are those of a quantised checkpoint, dequantised to float32: compressed-tensors, packed integers "
        "in 21 modules (model.layers.0.mlp.down_proj, model.layers.0.mlp.gate_proj, model.layers.0.mlp.up_proj "
        "and 18 more); not judged: whether they are the original model's"
    )
    (quantised / "quantize_config.json").write_text("{}")
    (longer,) = plan_engine(model=str(quantised)).notes
    assert longer == f"{note}, and what quantize_config.json says of them"


def test_a_source_that_was_changed_is_not_read_again(quantised: Path):
    source = read_quantised_source(resolve(str(quantised)))
    assert source is not None
    assert source.open() is source.open()
    (quantised / "config.json").write_text((quantised / "config.json").read_text() + "\n")
    with pytest.raises(HarnessError) as caught:
        source.open()
    assert caught.value.code is Code.CHECKPOINT_CHANGED


def test_scales_of_a_cache_are_read_from_the_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HARNESS_CACHE", str(tmp_path / "cache"))

    def write(name: str, key: list[float]) -> Path:
        def scaled(tensors: dict[str, torch.Tensor]) -> None:
            tensors["model.layers.1.self_attn.k_scale"] = torch.tensor(key)
            tensors["model.layers.1.self_attn.v_proj.output_scale"] = torch.tensor([0.5], dtype=torch.bfloat16)

        write_quantised(CHECKPOINTS / "qwen3-tiny", tmp_path / name, "w4a16", changed=scaled)
        return resolve(str(tmp_path / name))

    assert cache_scales(write("heads", [0.25, 0.125])) == {
        "model.layers.1.k_cache": (0.25, 0.125), "model.layers.1.v_cache": (0.5,)
    }  # fmt: skip
    assert cache_scales(CHECKPOINTS / "qwen3-tiny") == {}
    with pytest.raises(HarnessError) as caught:
        cache_scales(write("zero", [0.0]))
    assert caught.value.code is Code.BAD_SCALE
    assert "model.layers.1.self_attn.k_scale" in str(caught.value)


def kv_cache_alone(folder: Path, groups: object, scheme: object) -> Path:
    """Write qwen3-tiny with a scale for its cache, as a quantiser leaves it that was told of nothing else."""
    shutil.copytree(CHECKPOINTS / "qwen3-tiny", folder)
    tensors = load_file(folder / "model.safetensors") | {"model.layers.0.self_attn.k_scale": torch.tensor([0.25])}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    table = {
        "quant_method": "compressed-tensors",
        "format": "dense",
        "config_groups": groups,
        "kv_cache_scheme": scheme,
    }
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": table}))
    return folder


def test_a_cache_alone_may_be_quantised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HARNESS_CACHE", str(tmp_path / "cache"))
    path = kv_cache_alone(tmp_path / "cached", {}, {"num_bits": 8, "type": "float", "strategy": "tensor"})
    folder = resolve(str(path))
    assert cache_scales(folder) == {"model.layers.0.k_cache": (0.25,)}
    checkpoint_tensors = {
        name: tensor for shard in folder.glob("*.safetensors") for name, tensor in load_file(shard).items()
    }
    plain = load_file(CHECKPOINTS / "qwen3-tiny" / "model.safetensors")
    assert checkpoint_tensors.keys() == plain.keys()
    assert all(torch.equal(checkpoint_tensors[name], plain[name]) for name in checkpoint_tensors)
    assert str(read_quantised_source(folder)) == (
        "the checkpoint is quantised in its KV cache alone: the weights are its own"
    )


@pytest.mark.parametrize(("groups", "scheme"), [({}, None), (None, {"num_bits": 8})])
def test_a_table_that_names_nothing_is_refused(tmp_path: Path, groups: object, scheme: object):
    with pytest.raises(HarnessError, match="there are no groups of modules"):
        resolve(str(kv_cache_alone(tmp_path / "empty", groups, scheme)))


@pytest.mark.parametrize(("shift", "says"), [(0, None), (1, "read as 9. The codes' mean of"), (-3, "read as 5.")])
def test_zero_points_that_contradict_symmetry_are_said(tmp_path, monkeypatch, shift, says):
    monkeypatch.setenv("HARNESS_CACHE", str(tmp_path / "cache"))
    write_quantised(CHECKPOINTS / "qwen3-tiny", tmp_path / "model", "gptq-symmetric")
    file = tmp_path / "model" / "model.safetensors"
    tensors = load_file(file)
    word = 0x11111111 * shift
    save_file({name: x + word if name.endswith(".qzeros") else x for name, x in tensors.items()}, file)
    notes = plan_engine(model=str(tmp_path / "model")).notes
    assert any("sym=true" in note for note in notes) == (says is not None)
    assert says is None or any(says in note for note in notes), notes
