"""How a command line opens the engine: with the fast backend where it serves, and as many threads as are fast."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import Qwen3Config

from reference_engine import launch
from reference_engine.errors import CheckpointError, ConfigError, DeviceError
from reference_engine.fast import cpp_operators, threads
from reference_engine.launch import choose_backend, engine_threads, find_model, parse_options

LARGE = 512


def checkpoint(folder: Path, **sizes: int) -> Path:
    """Write the config.json of a model; none of its weights is read."""
    settings = {
        "hidden_size": LARGE, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 32, "intermediate_size": 128, "vocab_size": 512, "architectures": ["Qwen3ForCausalLM"],
    }  # fmt: skip
    Qwen3Config(**(settings | sizes)).save_pretrained(folder)
    return folder


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpp_operators, "load_operators", SimpleNamespace)


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
    monkeypatch.setattr(cpp_operators, "load_operators", refuse)
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
    monkeypatch.setattr(launch, "find_spec", lambda name: None if name == "triton" else name)
    chosen = choose_backend({}, folder=checkpoint(tmp_path), device="cuda")
    assert chosen.description == "attention_backend=paged, slower: there is no package triton (pip install triton)"


def test_a_model_that_is_not_read_gets_the_default(tmp_path: Path) -> None:
    assert choose_backend({}, folder=tmp_path, device="cpu").options == {"attention_backend": "paged"}


@pytest.fixture
def _two_threads(monkeypatch: pytest.MonkeyPatch) -> object:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    monkeypatch.setattr(threads, "choose_num_threads", lambda: threads.ThreadCount(3, "measured", {}))
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("_two_threads")
def test_a_large_model_has_as_many_as_were_measured_and_the_number_is_put_back() -> None:
    with suppress(ZeroDivisionError), engine_threads(512, "cpu") as description:
        assert (torch.get_num_threads(), description) == (3, "3, measured")
        raise ZeroDivisionError
    assert torch.get_num_threads() == 2


@pytest.mark.usefixtures("_two_threads")
def test_a_small_model_has_one() -> None:
    with engine_threads(511, "cpu") as description:
        assert (torch.get_num_threads(), description) == (1, "")


@pytest.mark.usefixtures("_two_threads")
def test_nothing_is_measured_for_a_gpu() -> None:
    with engine_threads(4096, "cuda:0") as description:
        assert (torch.get_num_threads(), description) == (2, "")


def test_options_have_the_types_of_their_fields() -> None:
    options = {"block_size": "8", "num_blocks": "9", "enable_prefix_caching": "true", "attention_backend": "cpp"}
    assert parse_options(options) == {
        "block_size": 8, "num_blocks": 9, "enable_prefix_caching": True, "attention_backend": "cpp",
    }  # fmt: skip


@pytest.mark.parametrize(("options", "words"), [
    ({"blocks": "8"}, r"the engine has no option 'blocks', in --engine-option: expected attention_backend, .*blocks=8"),
    ({"dtype": "float32"}, "has no option 'dtype'"),
    ({"block_size": "8.0"}, "block_size must be an integer"),
    ({"cuda_graphs": "1"}, "cuda_graphs must be true or false"),
])  # fmt: skip
def test_an_option_that_is_none_is_refused(options: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_options(options)


def test_a_model_is_a_folder_or_an_embedded_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert find_model(str(tmp_path)) == tmp_path
    assert (find_model(None).name, find_model("llama-tiny").name) == ("qwen3-tiny", "llama-tiny")


@pytest.mark.parametrize(
    ("model", "words"),
    [("/nowhere", "no such folder, and this is no hub id"), ("not/there", "the hub does not deliver it")],
)
def test_a_model_that_is_nowhere_is_refused(model: str, words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        find_model(model, local_files_only=True)


def test_a_folder_without_a_config_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"the folder has no config\.json"):
        find_model(str(tmp_path))
