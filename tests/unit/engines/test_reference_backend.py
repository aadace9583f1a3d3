"""Which backend the commands take that want tokens: the fast one where it serves, never a slower one in silence."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from harness.engines import reference_backend
from harness.engines.reference_backend import choose_backend
from reference_engine.errors import DeviceError

LARGE = 512


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference_backend, "load_operators", SimpleNamespace)


def refuse() -> SimpleNamespace:
    raise DeviceError("there is no C++ compiler", hint="Get one.")


@pytest.mark.usefixtures("compiled")
def test_it_is_the_fast_one_on_a_cpu() -> None:
    chosen = choose_backend({"block_size": "8"}, hidden_size=LARGE, device="cpu")
    assert (chosen.options, chosen.why_slower) == ({"attention_backend": "cpp", "block_size": "8"}, "")
    assert chosen.description == "attention_backend=cpp"


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize(
    ("options", "device", "has_adapters"),
    [({}, "cuda:1", False), ({}, "cpu", True), ({"compile_layers": "true"}, "cpu", False)],
)
def test_it_is_the_default_where_the_fast_one_does_not_serve(
    options: dict[str, str], device: str, has_adapters: bool
) -> None:
    chosen = choose_backend(options, hidden_size=LARGE, device=device, has_adapters=has_adapters)
    assert (chosen.options, chosen.why_slower) == ({"attention_backend": "paged", **options}, "")


@pytest.mark.usefixtures("compiled")
def test_a_small_model_is_not_worth_compiling_for() -> None:
    assert choose_backend({}, hidden_size=LARGE - 1, device="cpu").description == "attention_backend=paged"


@pytest.mark.usefixtures("compiled")
def test_the_one_that_is_named_wins() -> None:
    named = {"attention_backend": "contiguous"}
    assert choose_backend(named, hidden_size=LARGE, device="cpu").options == named


def test_without_a_compiler_it_says_what_is_slower_and_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference_backend, "load_operators", refuse)
    chosen = choose_backend({}, hidden_size=LARGE, device="cpu")
    assert chosen.options == {"attention_backend": "paged"}
    assert chosen.description == "attention_backend=paged, slower: there is no C++ compiler (Get one.)"
    assert choose_backend({"attention_backend": "paged"}, hidden_size=LARGE, device="cpu").why_slower == ""
