"""The attention suite on the Triton kernels, interpreted on the CPU."""

import pytest
import torch
from hypothesis import settings

from harness.properties.attention import check_batching, check_definition, check_placement
from harness.properties.attention_batches import FOCUSES
from harness.properties.attention_subject import AttentionUnderTest
from harness.properties.cache_access import check_read_back, check_store
from harness.properties.profiles import PROFILES
from harness.properties.reference_attention import TritonAttention

from ..reference_engine.kernels.launching import DEVICES, IGNORE_NUMPY, launch_on

pytestmark = [pytest.mark.slow, IGNORE_NUMPY]
FEW = settings(PROFILES["dev"].settings(), max_examples=40)
OURS = [focus for focus in FOCUSES if AttentionUnderTest(TritonAttention).served.refusal(focus) is None]


class OnDevice(TritonAttention):
    device = "cpu"


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    device = launch_on(request.param, monkeypatch)
    monkeypatch.setattr(OnDevice, "device", str(device))
    return device


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("focus", OURS)
def test_the_kernels_are_what_the_definition_says(focus: str) -> None:
    check_definition(OnDevice, FEW, focus)


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("check", [check_placement, check_batching, check_store, check_read_back])
def test_the_kernels_depend_on_nothing_else(check: object) -> None:
    check(OnDevice, FEW)  # type: ignore[operator]
