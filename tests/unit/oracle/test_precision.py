"""High precision that leaves nothing behind: the weights are bit for bit what they were, float64 stays float64."""

import subprocess
import sys
from contextlib import suppress

import pytest
import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm, eager_attention_forward

from harness.oracle.precision import keeping_double, linear_in_double, raised, without_tf32

from .state import bits


class BoomError(Exception):
    """Raised by the tests."""


def small_model(dtype=torch.bfloat16):
    """Tied embedding and head, a bias, a float buffer and an integer one, NaN bits with a payload."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"embed": nn.Embedding(11, 6), "mix": nn.Linear(6, 6), "head": nn.Linear(6, 11, bias=False)})
    model["head"].weight = model["embed"].weight
    model.to(dtype)
    model.register_buffer("scale", torch.randn(3, dtype=dtype))
    model.register_buffer("steps", torch.tensor([1, 2]))
    model["mix"].weight.data.view(torch.int16)[0, 0] = 0x7FC3
    return model


@pytest.mark.parametrize("fails", [False, True])
def test_raised_puts_back_every_bit(fails):
    model = small_model()
    before = bits(model)
    doubles = {name: x.double() for name, x in model.named_parameters()}
    try:
        with raised(model):
            assert all(x.dtype == torch.float64 for x in model.parameters())
            assert model.scale.dtype == torch.float64
            assert model.steps.dtype == torch.int64
            for name, x in model.named_parameters():
                torch.testing.assert_close(x.data, doubles[name], rtol=0, atol=0, equal_nan=True)
            assert model["head"].weight is model["embed"].weight
            if fails:
                raise BoomError
    except BoomError:
        pass
    assert bits(model) == before
    assert model["head"].weight is model["embed"].weight
    assert model["head"].weight.data_ptr() == model["embed"].weight.data_ptr()


def test_raised_of_two_modules_that_share_a_parameter():
    model = small_model()
    before = bits(model)
    with raised(model["embed"], model["head"]):
        assert model["head"].weight.dtype == torch.float64
        assert model["mix"].weight.dtype == torch.bfloat16
    assert bits(model) == before


def test_raised_inside_of_raised():
    model = small_model()
    before = bits(model)
    with raised(model["mix"]), raised(model):
        assert model["mix"].weight.dtype == torch.float64
    assert bits(model) == before


def test_raised_puts_back_what_it_had_raised_when_memory_runs_out(monkeypatch):
    model = small_model()
    before = bits(model)
    to, calls = torch.Tensor.to, []

    def scarce(self, *args, **kwargs):
        calls.append(self)
        if len(calls) == 3:
            raise BoomError
        return to(self, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "to", scarce)
    with pytest.raises(BoomError), raised(model):
        pass
    monkeypatch.undo()
    assert bits(model) == before


def norm_in_float64(x, weight, eps):
    x, weight = x.numpy(), weight.numpy()
    return x / ((x * x).mean(axis=-1, keepdims=True) + eps) ** 0.5 * weight


def error(actual, expected):
    expected = torch.as_tensor(expected)
    return float((actual - expected).norm() / expected.norm())


def test_keeping_double_keeps_the_norm_in_float64():
    norm = LlamaRMSNorm(64).double()
    norm.weight.data = torch.randn(64, dtype=torch.float64)
    x = torch.randn(5, 64, dtype=torch.float64)
    expected = norm_in_float64(x, norm.weight.detach(), norm.variance_epsilon)
    with torch.no_grad():
        assert error(norm(x), expected) > 1e-9, "without it HF's norm rounds its input to float32"
        with keeping_double():
            assert error(norm(x), expected) < 1e-14
        assert error(norm(x), expected) > 1e-9, "and it ends with the block"


def test_keeping_double_keeps_the_eager_softmax_in_float64():
    module = nn.Module()
    module.num_key_value_groups, module.training = 1, False
    q, k, v = (torch.randn(1, 2, 6, 8, dtype=torch.float64) for _ in range(3))
    scores = (q @ k.transpose(2, 3)).numpy() * 0.3
    p = torch.from_numpy(scores).softmax(dim=-1)
    expected = (p @ v).transpose(1, 2)
    assert error(eager_attention_forward(module, q, k, v, None, scaling=0.3)[0], expected) > 1e-10
    with keeping_double():
        assert error(eager_attention_forward(module, q, k, v, None, scaling=0.3)[0], expected) < 1e-14


@pytest.mark.parametrize(
    "lower",
    [
        torch.Tensor.float,
        lambda x: x.to(torch.float32),
        lambda x: x.to(dtype=torch.float32),
        lambda x: x.type(torch.float32),
        lambda x: x.softmax(-1, dtype=torch.float32),
        lambda x: torch.softmax(x, dim=-1, dtype=torch.float32),
        lambda x: nn.functional.softmax(x, dim=-1, dtype=torch.float32),
        lambda x: x.mean(-1, dtype=torch.float32),
    ],
)
def test_keeping_double_whatever_way_float32_is_asked_for(lower):
    x = torch.randn(3, 4, dtype=torch.float64)
    with keeping_double():
        assert lower(x).dtype == torch.float64
    assert lower(x).dtype == torch.float32


def test_keeping_double_leaves_other_dtypes_alone():
    with keeping_double():
        assert torch.ones(2, dtype=torch.bfloat16).float().dtype == torch.float32
        assert torch.ones(2, dtype=torch.int64).to(torch.float32).dtype == torch.float32
        assert torch.ones(2, dtype=torch.float64).to(torch.bfloat16).dtype == torch.bfloat16


def test_keeping_double_ends_under_an_exception():
    with pytest.raises(BoomError), keeping_double():
        raise BoomError
    assert torch.ones(2, dtype=torch.float64).float().dtype == torch.float32


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("block_bytes", [1, 8 * 40, 8 * 40 * 7, 1 << 20])
def test_linear_in_double_is_the_product(block_bytes, has_bias):
    torch.manual_seed(1)
    module = nn.Linear(40, 23, bias=has_bias).to(torch.bfloat16)
    x = torch.randn(5, 40, dtype=torch.float64)
    expected = x.numpy() @ module.weight.detach().double().numpy().T
    expected += module.bias.detach().double().numpy() if has_bias else 0
    with torch.no_grad():
        actual = linear_in_double(module, x, block_bytes=block_bytes)
        assert actual.dtype == torch.float64
        assert error(actual, expected) < 1e-15
        assert torch.equal(
            linear_in_double(module, x.float(), block_bytes=block_bytes).double(),
            linear_in_double(module, x.float().double()),
        )
    assert module.weight.dtype == torch.bfloat16


def test_linear_in_double_of_another_kind_of_linear():
    """An adapter's own linear layer is asked to compute, in float64, not taken for its weight."""

    class Scaled(nn.Linear):
        def forward(self, x):
            return 3 * super().forward(x.float())

    module = Scaled(4, 3).to(torch.float16)
    before = bits(module)
    x = torch.randn(2, 4)
    with torch.no_grad():
        actual = linear_in_double(module, x)
    expected = 3 * (x.double() @ module.weight.double().T + module.bias.double())
    assert error(actual, expected.detach()) < 1e-15
    assert bits(module) == before


@pytest.mark.parametrize("before", [True, False])
def test_without_tf32_puts_the_switch_back(before):
    at_first = torch.backends.cuda.matmul.allow_tf32
    try:
        torch.backends.cuda.matmul.allow_tf32 = before
        with suppress(BoomError), without_tf32():
            assert not torch.backends.cuda.matmul.allow_tf32
            raise BoomError
        assert torch.backends.cuda.matmul.allow_tf32 == before
    finally:
        torch.backends.cuda.matmul.allow_tf32 = at_first


def test_without_tf32_where_somebody_uses_the_new_switches():
    """In a process of its own: torch does not let one go back to the legacy switches."""
    code = """
import torch
from harness.oracle.precision import without_tf32
torch.backends.cuda.matmul.fp32_precision = "tf32"
with without_tf32():
    assert torch.backends.cuda.matmul.fp32_precision == "ieee", torch.backends.cuda.matmul.fp32_precision
assert torch.backends.cuda.matmul.fp32_precision == "tf32"
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
