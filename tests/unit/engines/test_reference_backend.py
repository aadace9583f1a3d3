"""Which backend the commands take that want tokens: the fast one where it serves, never a slower one in silence."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from harness.engines import reference_backend
from harness.engines.reference_backend import choose_backend
from harness.extensions.bench.shape import SHAPES
from reference_engine.errors import DeviceError

LARGE = 512


def checkpoint(folder: Path, **sizes: int) -> Path:
    """Write the config.json of a model; none of its weights is read."""
    shape = replace(SHAPES["tiny"], **{"hidden_size": LARGE, **sizes})
    shape.config().save_pretrained(folder)
    return folder


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference_backend, "load_operators", SimpleNamespace)


def refuse() -> SimpleNamespace:
    raise DeviceError("there is no C++ compiler", hint="Get one.")


@pytest.mark.usefixtures("compiled")
def test_it_is_the_fast_one_on_a_cpu(tmp_path: Path) -> None:
    chosen = choose_backend({"block_size": "8"}, folder=checkpoint(tmp_path), device="cpu")
    assert (chosen.options, chosen.why_slower) == ({"attention_backend": "cpp", "block_size": "8"}, "")
    assert chosen.description == "attention_backend=cpp"


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize(
    ("options", "device", "has_adapters"),
    [({}, "cuda:1", True), ({}, "cpu", True), ({"compile_layers": "true"}, "cpu", False)],
)
def test_it_is_the_default_where_the_fast_one_does_not_serve(
    options: dict[str, str], device: str, has_adapters: bool, tmp_path: Path
) -> None:
    chosen = choose_backend(options, folder=checkpoint(tmp_path), device=device, has_adapters=has_adapters)
    assert (chosen.options, chosen.why_slower) == ({"attention_backend": "paged", **options}, "")


@pytest.mark.usefixtures("compiled")
def test_a_small_model_is_not_worth_compiling_for(tmp_path: Path) -> None:
    assert (
        choose_backend({}, folder=checkpoint(tmp_path, hidden_size=LARGE - 2), device="cpu").description
        == "attention_backend=paged"
    )


@pytest.mark.usefixtures("compiled")
def test_the_one_that_is_named_wins(tmp_path: Path) -> None:
    named = {"attention_backend": "contiguous"}
    assert choose_backend(named, folder=checkpoint(tmp_path), device="cpu").options == named


def test_without_a_compiler_it_says_what_is_slower_and_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(reference_backend, "load_operators", refuse)
    chosen = choose_backend({}, folder=checkpoint(tmp_path), device="cpu")
    assert chosen.options == {"attention_backend": "paged"}
    assert chosen.description == "attention_backend=paged, slower: there is no C++ compiler (Get one.)"
    assert choose_backend({"attention_backend": "paged"}, folder=checkpoint(tmp_path), device="cpu").why_slower == ""


@pytest.mark.parametrize(("head_dim", "backend"), [(32, "triton"), (512, "paged")])
def test_on_a_gpu_it_is_triton_for_heads_that_the_kernels_serve(tmp_path: Path, head_dim: int, backend: str) -> None:
    chosen = choose_backend({}, folder=checkpoint(tmp_path, head_dim=head_dim), device="cuda:1")
    assert (chosen.options, chosen.why_slower) == ({"attention_backend": backend}, "")


def test_on_a_gpu_without_triton_it_says_what_is_slower_and_why(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(reference_backend, "find_spec", lambda name: None)
    chosen = choose_backend({}, folder=checkpoint(tmp_path), device="cuda")
    assert chosen.description == "attention_backend=paged, slower: there is no package triton (pip install triton)"


def test_a_model_that_is_not_read_gets_the_default(tmp_path: Path) -> None:
    assert choose_backend({}, folder=tmp_path, device="cpu").options == {"attention_backend": "paged"}
