"""What a module's weights say, and what they contradict."""

import pytest
import torch
from torch import nn

from harness.engines.module import check_has_values, module_device, module_dtype
from harness.errors import Code, HarnessError


def test_the_dtype_is_that_of_most_elements():
    module = nn.Sequential(nn.Linear(8, 8).to(torch.bfloat16), nn.LayerNorm(8))
    assert module_dtype(module) == "bfloat16"
    assert module_dtype(module, "bfloat16") == "bfloat16"


def test_a_module_without_weights_says_nothing():
    assert (module_dtype(nn.ReLU()), module_device(nn.ReLU())) == (None, None)
    assert (module_dtype(nn.ReLU(), "float16"), module_device(nn.ReLU(), "cpu")) == ("float16", "cpu")


def test_another_dtype_than_was_asked_for():
    with pytest.raises(HarnessError) as caught:
        module_dtype(nn.Linear(2, 2), "bfloat16")
    assert caught.value.code is Code.BAD_OPTION
    assert "expected: bfloat16" in str(caught.value)
    assert "actual:   float32" in str(caught.value)


def test_a_dtype_without_an_oracle():
    with pytest.raises(HarnessError, match="computes in float64"):
        module_dtype(nn.Linear(2, 2).double())


def test_the_device_is_the_modules():
    assert module_device(nn.Linear(2, 2)) == "cpu"
    assert module_device(nn.Linear(2, 2), torch.device("cpu")) == "cpu"


@pytest.mark.parametrize(
    ("wanted", "words"), [("cuda", "actual:   cpu"), ("cuda:1", "cuda:1"), ("gpu", "unknown device")]
)
def test_another_device_than_was_asked_for(wanted, words):
    with pytest.raises(HarnessError) as caught:
        module_device(nn.Linear(2, 2), wanted)
    assert caught.value.code is Code.BAD_OPTION
    assert words in str(caught.value)


def test_weights_on_several_devices():
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).to("meta"))
    with pytest.raises(HarnessError, match="cpu, meta"):
        module_device(module)


def test_weights_without_values():
    check_has_values(nn.Linear(2, 2))
    with pytest.raises(HarnessError) as caught:
        check_has_values(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).to("meta")))
    assert caught.value.code is Code.ENGINE_CANNOT_SERVE
    assert "2 weights of the module are on the meta device" in str(caught.value)
    assert "Sequential.1.weight" in str(caught.value)
