"""The library as its files define it is accepted; whatever replaces a part of it for the whole process is not."""

import functools
import importlib.util
import sys
from contextlib import nullcontext

import pytest
import torch
from transformers.models.llama import modeling_llama as llama

from harness.errors import Code, HarnessError
from harness.oracle import model
from harness.oracle.model import check_is_unpatched, load_model


class OwnNorm(llama.LlamaRMSNorm):
    pass


def own_rotary(q, k, cos, sin):
    return q, k


@functools.wraps(llama.LlamaMLP.forward)
def own_forward(self, x):
    return x


@pytest.mark.parametrize(
    ("owner", "name", "replacement"),
    [
        (llama, "LlamaRMSNorm", OwnNorm),
        (llama, "apply_rotary_pos_emb", own_rotary),
        (llama.LlamaMLP, "forward", own_forward),
        (llama.LlamaAttention, "forward", lambda self: None),
    ],
)
def test_a_patched_library_cannot_say_what_is_right(checkpoints, monkeypatch, owner, name, replacement):
    monkeypatch.setattr(owner, name, replacement)
    with pytest.raises(HarnessError) as caught:
        load_model(checkpoints / "llama-tiny", dtype=torch.float32)
    assert caught.value.code is Code.ORACLE_PATCHED
    assert f".{name}" in str(caught.value.where)
    assert "test_patches" in str(caught.value.actual) or name == "forward"


@pytest.mark.filterwarnings("ignore:`torch.jit.script`")
@pytest.mark.parametrize(("function", "is_theirs"), [(llama.rotate_half, True), (own_rotary, False)])
def test_a_scripted_function_is_whose_code_it_is(checkpoints, monkeypatch, function, is_theirs):
    monkeypatch.setattr(llama, "rotate_half", torch.jit.script(function))
    with nullcontext() if is_theirs else pytest.raises(HarnessError, match="H009"):
        load_model(checkpoints / "llama-tiny", dtype=torch.float32)


def test_a_large_model_is_looked_at_too(checkpoints, monkeypatch):
    monkeypatch.setattr("harness.oracle.model._RESIDENT_BYTES", 0)
    monkeypatch.setattr(llama, "apply_rotary_pos_emb", own_rotary)
    with pytest.raises(HarnessError, match="H009"):
        load_model(checkpoints / "llama-tiny", dtype=torch.float32)


def test_a_module_of_one_model_may_be_replaced(checkpoints):
    model = load_model(checkpoints / "llama-tiny", dtype=torch.float32).model
    model.model.norm = OwnNorm(96)
    model.model.layers[0].mlp.forward = lambda x: x
    check_is_unpatched(model)


@pytest.mark.parametrize("family", ["gemma3_text", "gpt2", "mamba", "qwen3_moe"])
def test_families_are_accepted_as_they_are(tiny_folder, family):
    check_is_unpatched(load_model(tiny_folder(family), dtype=torch.float32).model)


SOURCE = """
import functools


class Part:
    @property
    def size(self):
        return 1

    @functools.cached_property
    def kept(self):
        return 2

    @classmethod
    def made(cls):
        return 3

    @staticmethod
    def plain():
        return 4

    def forward(self):
        return 5


def function():
    return 6


CONSTANT = 7
"""


@pytest.fixture
def file(tmp_path, monkeypatch):
    """A file of the library's with everything that a class may define."""
    name, path = "transformers.models.own", tmp_path / "own.py"
    path.write_text(SOURCE)
    monkeypatch.setattr(model, "_LIBRARIES", (str(tmp_path),))
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    model._defined.cache_clear()
    yield module
    model._defined.cache_clear()


def test_whatever_a_class_defines_is_looked_at(file):
    assert list(model._replaced(file)) == []
    file.Part.size = property(lambda _self: 9)
    file.Part.kept = functools.cached_property(lambda _self: 9)
    file.Part.made = classmethod(lambda _cls: 9)
    file.Part.plain = staticmethod(lambda: 9)
    file.Part.forward = lambda _self: 9
    file.function = lambda: 9
    assert [name for name, _ in model._replaced(file)] == [
        "Part.size", "Part.kept", "Part.made", "Part.plain", "Part.forward", "function",
    ]  # fmt: skip
