"""The attention suite on the Triton kernels, interpreted on the CPU."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import settings

from harness.properties.attention.cache import check_read_back, check_store
from harness.properties.attention.case import FOCUSES
from harness.properties.attention.subject import AttentionUnderTest
from harness.properties.attention.suite import check_batching, check_definition, check_placement
from harness.properties.core.search import PROFILES

from ...reference_engine.fast.kernels.launching import DEVICES, IGNORE_NUMPY, launch_on
from .backends import TritonSubject
from .kernel_attention import KernelAttention

pytestmark = [pytest.mark.slow, IGNORE_NUMPY]
Check = Callable[[Any, settings], None]
FEW = settings(PROFILES["dev"].settings(), max_examples=40)


class OnDevice(TritonSubject):
    """By the backend, with the tiles that it chooses."""

    device = "cpu"


def served(adapter: Any) -> list[str]:
    return [focus for focus in FOCUSES if AttentionUnderTest(adapter).served.refusal(focus) is None]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    device = launch_on(request.param, monkeypatch)
    for adapter in (OnDevice, KernelAttention):
        monkeypatch.setattr(adapter, "device", str(device))
    return device


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("focus", served(OnDevice))
def test_the_backend_is_what_the_definition_says(focus: str) -> None:
    check_definition(OnDevice, FEW, focus)


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("focus", served(KernelAttention))
def test_small_tiles_wide_tables_and_strided_rows(focus: str) -> None:
    check_definition(KernelAttention, settings(FEW, max_examples=20), focus)


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("check", [check_placement, check_batching, check_store, check_read_back])
def test_the_backend_depends_on_nothing_else(check: Check) -> None:
    check(OnDevice, FEW)


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("check", [check_placement, check_batching, check_store])
def test_the_kernels_depend_on_nothing_else(check: Check) -> None:
    check(KernelAttention, settings(FEW, max_examples=20))
