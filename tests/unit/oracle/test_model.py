"""What is read off a model and its configuration, on small modules by hand."""

import json
import shutil
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn

from harness.errors import Code, HarnessError
from harness.formats.checkpoint import Checkpoint
from harness.oracle.model import HFModel, _contradiction, _loading_error, _with_attention, load_model


class Decoder(nn.Module):
    """Two embeddings side by side, a stack of layers within a stack, a norm, a head, and an empty list."""

    def __init__(self):
        super().__init__()
        self.body = nn.Module()
        self.body.embed = nn.Embedding(7, 4)
        self.body.layers = nn.ModuleList([nn.Sequential(nn.Linear(4, 4)), nn.Linear(4, 4)])
        self.body.norm = nn.LayerNorm(4)
        self.none = nn.Module()
        self.none.empty = nn.ModuleList()
        self.head = nn.Linear(4, 7)

    def get_input_embeddings(self):
        return self.body.embed

    def forward(self, x):
        return x + 1


def hf():
    checkpoint = Checkpoint(Path("folder"))
    return HFModel(model=Decoder(), checkpoint=checkpoint, dtype=torch.float32, device=torch.device("cpu"))


def test_parts_run_one_after_the_other():
    parts = ("body.embed", "body.layers.0", "body.layers.1", "body.norm", "none", "head")
    assert hf().parts == parts


@pytest.mark.parametrize(
    ("path", "part"),
    [
        ("body.layers.0", "body.layers.0"), ("body.layers.0.0", "body.layers.0"), ("body.layers.10", "body.layers.10"),
        ("body.layers.1.q:input", "body.layers.1"), ("head", "head"), ("header", "header"), ("body", "body"),
    ],
)  # fmt: skip
def test_the_part_that_holds_a_module(path, part):
    assert hf().part_of(path) == part


def test_sizes_of_a_model():
    one = hf()
    assert one.vocab_size == 7
    assert one.module("body.layers.1") is one.model.body.layers[1]
    assert one.run(x=2) == 3


@pytest.mark.parametrize(
    ("config", "limit"),
    [
        ({"max_position_embeddings": 32}, 32), ({"n_positions": 16}, 16), ({"max_sequence_length": 8}, 8),
        ({"max_seq_len": 1}, 1), ({"context_length": 5}, 5), ({}, None), ({"max_position_embeddings": -1}, None),
        ({"max_position_embeddings": 0, "n_positions": 9}, 9), ({"max_position_embeddings": "32", "max_seq_len": 4}, 4),
        ({"n_positions": 16, "max_position_embeddings": 32}, 32), ({"max_position_embeddings": None}, None),
    ],
)  # fmt: skip
def test_the_number_of_positions(config, limit):
    assert HFModel.max_positions.fget(SimpleNamespace(config=SimpleNamespace(**config))) == limit


@pytest.mark.parametrize(
    ("config", "size"),
    [
        ({"head_dim": 24, "hidden_size": 64, "num_attention_heads": 4}, 24),
        ({"head_dim": None, "hidden_size": 64, "num_attention_heads": 4}, 16),
        ({"hidden_size": 65, "num_attention_heads": 4}, 16),
    ],
)
def test_the_size_of_a_head(config, size):
    one = hf()
    one.model.config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(**config))
    assert (one.head_dim, one.head_dim_of(1)) == (size, size)


def test_layers_may_have_heads_of_other_sizes():
    layers = [SimpleNamespace(head_dim=size) for size in (16, 32)]
    one = hf()
    text = SimpleNamespace(is_heterogeneous=True, per_layer_config=layers)
    one.model.config = SimpleNamespace(get_text_config=lambda: text)
    assert (one.head_dim, one.head_dim_of(0), one.head_dim_of(1)) == (16, 16, 32)


@pytest.mark.parametrize("redirect", ["adapter_config.json", "transformers_weights"])
def test_a_folder_whose_weights_transformers_takes_from_elsewhere_is_refused(tmp_path, checkpoints, redirect):
    folder = shutil.copytree(checkpoints / "llama-tiny", tmp_path / "model")
    if redirect == "adapter_config.json":
        (folder / redirect).write_text('{"base_model_name_or_path": "elsewhere"}')
    else:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {redirect: "other.safetensors"}))
    with pytest.raises(HarnessError, match="H001: transformers would load other weights") as caught:
        load_model(folder, dtype=torch.float32)
    assert redirect in str(caught.value.where)


def test_eager_attention_is_that_of_the_file_of_the_class_or_of_what_it_is_derived_from(monkeypatch):
    base, derived, plain = (ModuleType(name) for name in ("file_of_base", "file_of_derived", "file_of_plain"))
    base.eager_attention_forward = print
    for module in (base, derived, plain):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    Base = type("Base", (nn.Module,), {"__module__": base.__name__})
    Derived = type("Derived", (Base,), {"__module__": derived.__name__})
    Plain = type("Plain", (nn.Module,), {"__module__": plain.__name__})
    assert hf().eager_attention(Base()) is hf().eager_attention(Derived()) is print
    assert hf().eager_attention(Plain()) is None
    derived.eager_attention_forward = repr
    assert hf().eager_attention(Derived()) is repr


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (ValueError("The model type `x` is unknown"), Code.UNSUPPORTED_ARCHITECTURE, "The model type `x` is unknown"),
        (ValueError("Unrecognized configuration class"), Code.UNSUPPORTED_ARCHITECTURE, "Unrecognized"),
        (ValueError("transformers does not recognize it"), Code.UNSUPPORTED_ARCHITECTURE, "does not recognize"),
        (RuntimeError("a size Mismatch\nof many lines"), Code.TENSORS_CONTRADICT_CONFIG, "a size Mismatch"),
        (type("SafetensorError", (Exception,), {})("bad header"), Code.DAMAGED_SAFETENSORS, "bad header"),
        (KeyError(), Code.BAD_CONFIG, "KeyError"),
        (OSError("  \n"), Code.BAD_CONFIG, "OSError"),
    ],
)
def test_why_a_model_cannot_be_loaded(error, code, text):
    refusal = _loading_error(Path("folder"), error)
    assert refusal.code is code
    assert text in str(refusal)
    assert "of many lines" not in str(refusal)


@pytest.mark.parametrize("said", ["attn_implementation is unknown", "no scaled_dot_product_attention here"])
def test_a_family_without_sdpa_is_built_with_eager_attention(said):
    asked = []

    def build(name, *, attn_implementation, dtype):
        asked.append((name, attn_implementation, dtype))
        if attn_implementation == "sdpa":
            raise ValueError(said)
        return "built"

    assert _with_attention(build, "a", dtype=1) == "built"
    assert asked == [("a", "sdpa", 1), ("a", "eager", 1)]


def test_other_errors_are_not_about_attention():
    def build(*, attn_implementation):
        raise ValueError(f"not {attn_implementation}")

    with pytest.raises(ValueError, match="not sdpa"):
        _with_attention(build)


@pytest.mark.parametrize(
    ("names", "shown"),
    [(["a"], "a"), (["a", "b", "c"], "a, b, c"), (["a", "b", "c", "d"], "a, b, c and 1 more"),
     (list("abcdefg"), "a, b, c and 4 more")],
)  # fmt: skip
def test_tensors_that_contradict_the_config_are_named(names, shown):
    refusal = _contradiction(Path("folder"), "missing", names)
    assert refusal.what.endswith(f"missing: {shown}")
    assert (refusal.code, refusal.expected, refusal.actual) == (Code.TENSORS_CONTRADICT_CONFIG, None, None)
    tensors = [{"name": name, "expected": [at], "actual": [at + 1]} for at, name in enumerate(names)]
    refusal = _contradiction(Path("folder"), "misshapen", tensors)
    assert refusal.what.endswith(f"misshapen: {shown}")
    assert (refusal.expected, refusal.actual) == ([0], [1])
