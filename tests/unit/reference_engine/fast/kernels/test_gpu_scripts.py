"""What times a GPU runs on the CPU, small: a GPU is rarely there, and a script that nobody runs breaks unseen."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from socket import socket
from types import ModuleType

import pytest
import torch

from reference_engine import cache_spec, loader

from .launching import IGNORE_NUMPY, launch_on

BENCHMARKS = Path(__file__).parents[4] / "benchmarks"
ON_A_CPU = {"dtype": "float32", "device": "cpu", "attention_backend": "paged", "num_blocks": 64}


def script(name: str) -> ModuleType:
    spec = spec_from_file_location(f"benchmark_{name}", BENCHMARKS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    for module, name in (
        (loader, "load_weights"),
        (cache_spec, "read_cache_scales"),
    ):  # which the script replaces
        monkeypatch.setattr(module, name, getattr(module, name))
    return script("gpu_steps")


def test_steps_of_decode_are_timed(steps: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    steps.decode("tiny", [1, 2], **ON_A_CPU)
    one, two = capsys.readouterr().out.splitlines()
    assert " batch 1: " in one
    assert " batch 2: " in two
    assert "ms a step" in two


def test_a_workload_is_timed_twice(steps: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    options = {name: value for name, value in ON_A_CPU.items() if name != "num_blocks"}
    steps.workload("tiny", 3, **options)
    assert [line.count("3 requests: ") for line in capsys.readouterr().out.splitlines()] == [1, 1]


def test_the_host_s_share_is_shown(steps: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    steps.host("tiny", 2, **ON_A_CPU)
    assert "function calls" in capsys.readouterr().out


def test_one_rank_makes_the_same_tokens(steps: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with socket() as free:
        free.bind(("127.0.0.1", 0))
        steps.RANK_PORT = free.getsockname()[1]
    steps.one_rank("cpu")
    assert capsys.readouterr().out == "one rank, commands by gloo and sums by gloo: the same tokens\n"


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script on the CPU, which runs the first of its calls and takes a microsecond for it."""
    launch_on("cpu", monkeypatch)

    def microseconds(calls: list[Callable[[], object]], num_replays: int = 20) -> float:
        calls[0]()
        return 1.0

    module = script("gpu_kernels")
    for name, value in {"DEVICE": "cpu", "DTYPE": torch.float32, "L2_BYTES": 1, "microseconds": microseconds}.items():
        monkeypatch.setattr(module, name, value)
    return module


@IGNORE_NUMPY
def test_attention_is_timed_under_a_tiling(kernels: ModuleType) -> None:
    case = kernels.Decode([20, 3], num_heads=2, num_kv_heads=1)
    assert kernels._timed_variant(case, (32, 2, 4, 256))[2:] == [32, 2, 4, 256]


@IGNORE_NUMPY
def test_prefill_is_timed_beside_torch(kernels: ModuleType) -> None:
    assert [row[1].split(",")[0] for row in kernels._prefill_rows(8, 20)] == [
        "128 x 64", "64 x 64", "128 x 32", "torch",
    ]  # fmt: skip


@IGNORE_NUMPY
def test_small_operations_are_timed_beside_torch(kernels: ModuleType) -> None:
    """Both compute the same, so that their times can be compared."""
    add_norm, norm_rotate, silu_mul, _ = kernels._small_operations(1)
    assert torch.allclose(add_norm[0]()[1], add_norm[1](), atol=1e-5)
    rotated, (q, k) = norm_rotate[0]()[0], norm_rotate[1]()
    assert torch.allclose(rotated, torch.cat([q, k], dim=1), atol=1e-5)
    assert torch.allclose(silu_mul[0](), silu_mul[1](), atol=1e-5)


@IGNORE_NUMPY
def test_the_product_of_a_row_is_timed_under_a_shape_of_its_programs(kernels: ModuleType) -> None:
    weight = torch.randn(6, 40)
    before = kernels.row_product.OUTPUTS
    assert kernels._row_product_us(torch.randn(1, 40), [weight], (2, 512, 4)) == 1.0
    assert before == kernels.row_product.OUTPUTS
