"""Parameters that are mapped from the checkpoint: HF's numbers, no memory of their own, and errors with a code."""

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import conversion_mapping
from transformers.core_model_loading import Transpose, WeightConverter

from harness.errors import Code, HarnessError
from harness.oracle import weights
from harness.oracle.model import load_model
from harness.oracle.weights import StreamedWeights

from ..tiny_models import save, tiny_model
from .state import bits
from .test_weights import on_meta, parameters

FAMILIES = ("axk2", "gemma3_text", "gpt2", "gpt_neox", "gpt_oss", "llama", "mamba", "mixtral", "phi3", "qwen3_moe")
PART = "model.layers.1"
TIED = ("model.embed_tokens.weight", "lm_head.weight")


@pytest.fixture
def folder(tmp_path):
    """A checkpoint that nobody else has mapped."""
    return save(tiny_model("llama").to(torch.bfloat16), tmp_path / "llama")


def held(hf):
    """Return dtype and bytes of each parameter, and of what else the model has, as held part by part."""
    weights = {}
    for part in hf.parts:
        with hf.weights.held(part):
            weights |= {f"{part}.{name}": (dtype, values) for name, (dtype, _, values) in bits(hf.module(part)).items()}
    return weights


def resident(folder, dtype):
    hf = load_model(folder, dtype=dtype, stays=True)
    known = {name: (dtype, values) for name, (dtype, _, values) in bits(hf.model).items()}
    return {name: values for name, values in known.items() if hf.part_of(name) != name}


@pytest.mark.sampled(12)
@pytest.mark.parametrize(
    ("stored", "dtype"),
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.float16),
        (torch.float16, torch.bfloat16),
    ],
)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_bit_is_that_of_hfs_own_loader(streamed, tmp_path, family, stored, dtype):
    """What a family merges, splits, converts or keeps in float32, and what it does not."""
    folder = save(tiny_model(family).to(stored), tmp_path / "checkpoint")
    actual, expected = held(streamed(folder, dtype)), resident(folder, dtype)
    assert actual.keys() == expected.keys()
    assert [name for name in actual if actual[name] != expected[name]] == []


def test_some_weights_stay_in_float32(streamed, tmp_path):
    """Else the test above would say nothing of them."""
    dtypes = {dtype for dtype, _ in held(streamed(save(tiny_model("axk2"), tmp_path / "x"), torch.float16)).values()}
    assert dtypes == {torch.float16, torch.float32}


def test_a_tensor_that_is_converted_into_its_own_shape(streamed, folder, monkeypatch):
    """As interleaved halves are: its shape says nothing, and the file's numbers are not the parameter's."""
    stored = load_file(folder / "model.safetensors")[f"{PART}.self_attn.q_proj.weight"].clone()
    assert stored.shape[0] == stored.shape[1]
    converter = WeightConverter(
        source_patterns="self_attn.q_proj.weight",
        target_patterns="self_attn.q_proj.weight",
        operations=[Transpose(0, 1)],
    )
    monkeypatch.setattr(conversion_mapping, "get_model_conversion_mapping", lambda *_args, **_options: [converter])
    hf = streamed(folder, torch.bfloat16)
    with hf.weights.held(PART):
        assert torch.equal(hf.module(f"{PART}.self_attn.q_proj").weight, stored.T)


@pytest.mark.parametrize(("family", "num_converted"), [("llama", 0), ("mixtral", 2 * 4 * 3)])
def test_hfs_loader_is_given_what_it_converts_and_nothing_else(streamed, tmp_path, monkeypatch, family, num_converted):
    hf, converted = streamed(save(tiny_model(family), tmp_path / "checkpoint")), []
    convert = StreamedWeights._convert
    monkeypatch.setattr(StreamedWeights, "_convert", lambda self, keys: converted.extend(keys) or convert(self, keys))
    held(hf)
    assert all(".experts." in key for key in converted)
    assert len(converted) == len(set(converted)) == num_converted, "one for each layer, expert and product"


def test_numbers_that_are_not_finite_keep_their_bits(streamed, folder):
    tensors = load_file(folder / "model.safetensors")
    odd = torch.tensor([0x7FC3, -0x7F, 0x7F80, -0x8000], dtype=torch.int16)  # two NaN with a payload, infinity, -0
    tensors[f"{PART}.mlp.up_proj.weight"].view(torch.int16)[0, :4] = odd
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    hf = streamed(folder, torch.bfloat16)
    with hf.weights.held(PART):
        assert torch.equal(hf.module(f"{PART}.mlp.up_proj").weight.data.view(torch.int16)[0, :4], odd)


# Memory.


def mappings(folder):
    """Return (first address, one past the last, bytes of memory that is no file's) of each mapping of a checkpoint."""
    lines = []
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *others = line.split()
        if "-" in first and not first.endswith(":"):
            is_ours = bool(others) and others[-1].startswith(f"{folder}/")
            begin, end = (int(address, 16) for address in first.split("-"))
        elif is_ours and first == "Anonymous:":
            lines.append((begin, end, int(others[0]) * 1024))
    return lines


needs_smaps = pytest.mark.skipif(sys.platform != "linux", reason="/proc/self/smaps is Linux's")


def is_mapped(tensor, folder):
    return any(begin <= tensor.data_ptr() < end for begin, end, _ in mappings(folder))


@needs_smaps
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_parameter_in_its_own_dtype_is_the_file_itself(streamed, folder, dtype):
    """Reading all of it costs no memory but the system's for files; converted it is a copy."""
    hf = streamed(folder, dtype)
    assert mappings(folder) == []
    for part in (part for part in hf.parts if list(hf.module(part).parameters())):
        with hf.weights.held(part):
            parameters = list(hf.module(part).parameters())
            assert all(float(x.double().norm()) > 0 for x in parameters)
            assert {is_mapped(x, folder) for x in parameters} == {dtype == torch.bfloat16}
            assert sum(anonymous for _, _, anonymous in mappings(folder)) == 0
        del parameters
        assert mappings(folder) == []


@needs_smaps
def test_what_hf_merges_is_a_copy_and_all_else_is_the_file(streamed, tmp_path):
    folder = save(tiny_model("mixtral"), tmp_path / "mixtral")
    hf = streamed(folder)
    with hf.weights.held(PART):
        copies = {name for name, x in hf.module(PART).named_parameters() if not is_mapped(x, folder)}
        assert copies == {"mlp.experts.gate_up_proj", "mlp.experts.down_proj"}


def test_the_file_is_not_written_to(streamed, folder):
    """Whatever is done to a parameter."""
    before, hf = (folder / "model.safetensors").read_bytes(), streamed(folder, torch.bfloat16)
    with hf.weights.held(PART):
        hf.module(f"{PART}.mlp.up_proj").weight.data.zero_()
    assert (folder / "model.safetensors").read_bytes() == before
    with hf.weights.held(PART):
        assert bool(hf.module(f"{PART}.mlp.up_proj").weight.any())


# Files.


@pytest.fixture
def opened(monkeypatch):
    """Return the names of the files that are opened for their tensors."""
    names, opening = [], weights.safe_open
    monkeypatch.setattr(weights, "safe_open", lambda path, **how: names.append(path.name) or opening(path, **how))
    return names


def in_shards(folder):
    """Write a checkpoint again, each layer's tensors in two files; return which tensors are in which."""
    tensors, weight_map = load_file(folder / "model.safetensors"), {}
    (folder / "model.safetensors").unlink()
    for at, name in enumerate(sorted(tensors)):
        layer = name.split(".")[2] if ".layers." in name else "none"
        weight_map[name] = f"model-{layer}-{at % 2}.safetensors"
    for file in set(weight_map.values()):
        save_file({name: tensors[name] for name in tensors if weight_map[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return weight_map


def test_the_files_of_a_part_are_opened_once_each_and_no_other(streamed, folder, opened):
    whole = resident(folder, torch.bfloat16)
    weight_map = in_shards(folder)
    hf = streamed(folder, torch.bfloat16)
    assert opened == [], "the headers say where everything is"
    with hf.weights.held(PART):
        assert sorted(opened) == ["model-1-0.safetensors", "model-1-1.safetensors"]
        assert {weight_map[name] for name in weight_map if name.startswith(f"{PART}.")} == set(opened)
    assert held(hf) == whole


def test_a_part_without_weights_opens_no_file(streamed, folder, opened):
    hf = streamed(folder, torch.bfloat16)
    with hf.weights.held("model.rotary_emb"):
        assert opened == []


@needs_smaps
@pytest.mark.parametrize("name", ["model.embed_tokens", "lm_head"])
def test_a_tied_head_and_its_embedding_are_one_tensor_of_the_file(streamed, tmp_path, opened, name):
    folder = save(tiny_model("llama", tie_word_embeddings=True), tmp_path / "tied")
    (table,) = (x.clone() for key, x in load_file(folder / "model.safetensors").items() if key in TIED)
    hf = streamed(folder)
    assert mappings(folder) == []
    with hf.weights.held(name):
        assert torch.equal(hf.module(name).weight, table)
        assert is_mapped(hf.module(name).weight, folder)
        assert opened == ["model.safetensors"]
    assert on_meta(hf) == parameters(hf)
    assert mappings(folder) == []


@pytest.mark.parametrize("outer", ["model.embed_tokens", "lm_head"])
def test_a_tied_head_that_is_held_beside_its_embedding(streamed, tmp_path, outer):
    folder = save(tiny_model("llama", tie_word_embeddings=True), tmp_path / "tied")
    table = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    (inner,) = {"model.embed_tokens", "lm_head"} - {outer}
    hf = streamed(folder)
    with hf.weights.held(outer):
        with hf.weights.held(inner):
            assert torch.equal(hf.module(inner).weight, table)
        assert torch.equal(hf.module(outer).weight, table)
    assert on_meta(hf) == parameters(hf)


# Files that are not what they were.


def truncate(path):
    path.write_bytes(path.read_bytes()[:-100])


def cut_off_the_header(path):
    path.write_bytes(path.read_bytes()[:20])


def empty(path):
    path.write_bytes(b"")


def remove(path):
    path.unlink()


DAMAGES = [
    (remove, Code.MISSING_SHARD),
    *((item, Code.DAMAGED_SAFETENSORS) for item in (truncate, cut_off_the_header, empty)),
]


@pytest.mark.parametrize(("damage", "code"), DAMAGES)
def test_a_damaged_file_is_an_error_on_loading(streamed, folder, damage, code):
    in_shards(folder)
    damage(folder / "model-1-1.safetensors")
    with pytest.raises(HarnessError) as caught:
        streamed(folder, torch.bfloat16)
    assert caught.value.code is code
    assert "model-1-1.safetensors" in str(caught.value)


@pytest.mark.parametrize(("damage", "code"), DAMAGES)
def test_a_file_that_is_damaged_later_is_an_error_when_it_is_read(streamed, folder, damage, code):
    """Hours may lie between the first layer and the last; nothing is left in memory then."""
    in_shards(folder)
    hf = streamed(folder, torch.bfloat16)
    damage(folder / "model-1-1.safetensors")
    with hf.weights.held("model.layers.0"):
        pass
    with pytest.raises(HarnessError) as caught, hf.weights.held(PART):
        pass
    assert caught.value.code is code
    assert "model-1-1.safetensors" in str(caught.value)
    assert on_meta(hf) == parameters(hf)


@pytest.mark.parametrize("damage", [remove, truncate])
def test_nothing_is_left_in_memory_when_a_file_cannot_be_read(streamed, folder, damage):
    """Whatever is raised."""
    in_shards(folder)
    hf = streamed(folder, torch.bfloat16)
    damage(folder / "model-1-1.safetensors")
    with pytest.raises((HarnessError, OSError, SafetensorError)), hf.weights.held(PART):
        pass
    assert on_meta(hf) == parameters(hf)


def test_a_checkpoint_without_its_only_file(streamed, folder):
    shutil.move(folder / "model.safetensors", folder / "elsewhere")
    with pytest.raises(HarnessError) as caught:
        streamed(folder, torch.bfloat16)
    assert caught.value.code is Code.NOT_A_CHECKPOINT
