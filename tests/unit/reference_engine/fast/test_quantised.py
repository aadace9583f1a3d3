"""Products with quantised weights by the kernels: which of them runs, and that it is given what is its own."""

from __future__ import annotations

import pytest
import torch

from reference_engine.families.quantised import quantised_linear

from .kernels.launching import DEVICES, IGNORE_NUMPY, launch_on

pytestmark = IGNORE_NUMPY


class Counted:
    """Triton's operators, and the names of those that ran."""

    def __init__(self) -> None:
        self.ran: list[str] = []

    def __getattr__(self, name: str) -> object:
        from reference_engine.fast import triton_operators

        self.ran.append(name)
        return getattr(triton_operators, name)


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    return launch_on(request.param, monkeypatch)


@pytest.mark.parametrize(
    ("dtype", "block", "num_rows", "ran"),
    [
        (torch.int8, None, 1, ["linear_int8"]),
        (torch.int8, None, 20, ["linear_int8"]),
        (torch.float8_e4m3fn, None, 1, ["linear_float8"]),
        (torch.float8_e4m3fn, 48, 1, ["linear_float8"]),
        (torch.float8_e4m3fn, 48, 3, []),
    ],
)
@pytest.mark.parametrize("has_bias", [False, True])
def test_the_kernel_that_runs_gives_the_plain_product(
    device: torch.device, dtype: torch.dtype, block: int | None, num_rows: int, ran: list[str], has_bias: bool
) -> None:
    from reference_engine.fast.quantised import with_quantised_kernels

    generator, operators = torch.Generator().manual_seed(1), Counted()
    weight = (100 * torch.randn(70, 200, generator=generator)).clamp(-127, 127).to(device, dtype)
    scale = (0.01 + torch.rand(70, 1 if block is None else 5, generator=generator)).to(device)
    x = torch.randn(num_rows, 200, generator=generator).to(device)
    bias = (1000 * torch.randn(70, generator=generator)).to(device) if has_bias else None
    actual = with_quantised_kernels(operators, weight, bias, scale, block)(x)
    assert operators.ran == ran
    torch.testing.assert_close(actual, quantised_linear(weight, bias, scale, block)(x), rtol=1e-5, atol=1e-2)
