"""Which backend the commands take that want tokens: the fast one where it serves, never a slower one in silence."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from harness.engines import reference_backend
from harness.engines.reference_backend import choose_backend
from reference_engine.errors import DeviceError


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model that is large enough."""
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 512}))
    return tmp_path


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference_backend, "load_operators", SimpleNamespace)


def refuse() -> SimpleNamespace:
    raise DeviceError("there is no C++ compiler", hint="Get one.")


@pytest.mark.usefixtures("compiled")
def test_it_is_the_fast_one_on_a_cpu(model: Path) -> None:
    chosen = choose_backend({"block_size": "8"}, folder=model, device="cpu")
    assert (chosen.options, chosen.why_slower) == ({"attention_backend": "cpp", "block_size": "8"}, "")
    assert chosen.description == "attention_backend=cpp"


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize(
    ("options", "device", "has_adapters"),
    [({}, "cuda:1", False), ({}, "cpu", True), ({"compile_layers": "true"}, "cpu", False)],
)
def test_it_is_the_default_where_the_fast_one_does_not_serve(
    model: Path, options: dict[str, str], device: str, has_adapters: bool
) -> None:
    chosen = choose_backend(options, folder=model, device=device, has_adapters=has_adapters)
    assert (chosen.options, chosen.why_slower) == ({"attention_backend": "paged", **options}, "")


@pytest.mark.usefixtures("compiled")
def test_a_small_model_is_not_worth_compiling_for(model: Path) -> None:
    (model / "config.json").write_text(json.dumps({"hidden_size": 511}))
    assert choose_backend({}, folder=model, device="cpu").description == "attention_backend=paged"


@pytest.mark.usefixtures("compiled")
def test_the_one_that_is_named_wins(model: Path) -> None:
    named = {"attention_backend": "contiguous"}
    assert choose_backend(named, folder=model, device="cpu").options == named


def test_without_a_compiler_it_says_what_is_slower_and_why(monkeypatch: pytest.MonkeyPatch, model: Path) -> None:
    monkeypatch.setattr(reference_backend, "load_operators", refuse)
    chosen = choose_backend({}, folder=model, device="cpu")
    assert chosen.options == {"attention_backend": "paged"}
    assert chosen.description == "attention_backend=paged, slower: there is no C++ compiler (Get one.)"
    assert choose_backend({"attention_backend": "paged"}, folder=model, device="cpu").why_slower == ""
