"""High precision that leaves nothing behind: the weights are bit for bit what they were, float64 stays float64."""

import subprocess
import sys
import threading
import weakref
from contextlib import suppress
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers.models.gemma3.modeling_gemma3 import Gemma3TextScaledWordEmbedding
from transformers.models.llama.modeling_llama import LlamaRMSNorm, eager_attention_forward

from harness.oracle import precision
from harness.oracle.precision import (
    Buffers,
    PreservePrecision,
    blocked_linear,
    eager_experts,
    truth_dtype,
    upcast,
    upcast_on_use,
    upcast_parameters,
)

from .state import bits

HIGH = (torch.float64, torch.float32)


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
    model.register_buffer("inv_freq", torch.randn(3, dtype=torch.float32))
    model["mix"].weight.data.view(torch.int16)[0, 0] = 0x7FC3
    return model


@pytest.mark.parametrize("dtype", HIGH)
@pytest.mark.parametrize("fails", [False, True])
def test_upcast_puts_back_every_bit(fails, dtype):
    model = small_model()
    before = bits(model)
    high = {name: x.to(dtype) for name, x in model.named_parameters()}
    try:
        with upcast(dtype, model):
            assert all(x.dtype == dtype for x in model.parameters())
            assert model.scale.dtype == dtype
            assert model.steps.dtype == torch.int64
            for name, x in model.named_parameters():
                torch.testing.assert_close(x.data, high[name], rtol=0, atol=0, equal_nan=True)
            assert model["head"].weight is model["embed"].weight
            if fails:
                raise BoomError
    except BoomError:
        pass
    assert bits(model) == before
    assert model["head"].weight is model["embed"].weight
    assert model["head"].weight.data_ptr() == model["embed"].weight.data_ptr()


def test_frequencies_of_rotary_tables_stay_in_float32():
    """HF defines them so, whatever the dtype of the model."""
    model = small_model()
    with upcast(torch.float64, model):
        assert model.inv_freq.dtype == torch.float32


def test_upcast_of_two_modules_that_share_a_parameter():
    model = small_model()
    before = bits(model)
    with upcast(torch.float64, model["embed"], model["head"]):
        assert model["head"].weight.dtype == torch.float64
        assert model["mix"].weight.dtype == torch.bfloat16
    assert bits(model) == before


def test_upcast_inside_of_upcast():
    model = small_model()
    before = bits(model)
    with upcast(torch.float64, model["mix"]), upcast(torch.float64, model):
        assert model["mix"].weight.dtype == torch.float64
    assert bits(model) == before


@pytest.mark.parametrize("number", [1, 2, 3, 4])
@pytest.mark.parametrize(("where", "name"), [(torch, "empty"), (torch.Tensor, "copy_")])
def test_upcast_puts_back_what_it_had_upcast_when_memory_runs_out(monkeypatch, where, name, number):
    """At whichever of the model's tensors, and whether there is no memory or what it is filled with cannot be read."""
    model, calls = small_model(), []
    before, enough = bits(model), getattr(where, name)

    def scarce(*args, **kwargs):
        calls.append(args)
        if len(calls) == number:
            raise BoomError
        return enough(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(where, name, scarce)
        with pytest.raises(BoomError), upcast(torch.float64, model):
            pass
    assert len(calls) == number
    assert bits(model) == before
    with upcast(torch.float64, model):
        assert {x.dtype for x in model.parameters()} == {torch.float64}
    assert bits(model) == before


# Memory that is used for one layer after the other.


@pytest.mark.parametrize("dtype", HIGH)
@pytest.mark.parametrize("tensor", [torch.randn(3, 4), torch.randn(4, 3).T, torch.tensor(1.5), torch.empty(0, 2)])
def test_a_buffer_is_a_copy_of_its_own(tensor, dtype):
    before, buffers = tensor.clone(), Buffers()
    for _ in range(2):  # fresh memory, then what was used before
        with buffers.copy(tensor, dtype) as copy:
            assert copy.dtype == dtype
            assert copy.shape == tensor.shape
            assert torch.equal(copy, tensor.to(dtype))
            copy += 1
            assert torch.equal(tensor, before)


def test_a_buffer_is_used_again():
    buffers, numbers = Buffers(), torch.randn(3, 3, 4).bfloat16()
    places = []
    for tensor in numbers:
        with buffers.copy(tensor, torch.float64) as copy:
            assert torch.equal(copy, tensor.double())
            places.append(copy.data_ptr())
    assert len(set(places)) == 1


def test_buffers_that_are_lent_at_the_same_time_are_different_ones():
    buffers, (tensor_a, tensor_b) = Buffers(), torch.randn(2, 3, 4)
    with buffers.copy(tensor_a, torch.float64) as first, buffers.copy(tensor_b, torch.float64) as second:
        assert torch.equal(first, tensor_a.double())
        assert torch.equal(second, tensor_b.double())
        places = {first.data_ptr(), second.data_ptr()}
    with buffers.copy(tensor_b, torch.float64) as first, buffers.copy(tensor_a, torch.float64) as second:
        assert {first.data_ptr(), second.data_ptr()} == places
        assert torch.equal(first, tensor_b.double())


def test_a_buffer_is_used_again_for_the_same_shape_and_dtype_only():
    buffers, tensor = Buffers(), torch.randn(3, 4)
    with buffers.copy(tensor, torch.float64) as copy:
        place = copy.data_ptr()
    for unlike, dtype in ((tensor, torch.float32), (tensor.T, torch.float64), (tensor[:2], torch.float64)):
        with buffers.copy(unlike, dtype) as copy:
            assert copy.data_ptr() != place
            assert (copy.shape, copy.dtype) == (unlike.shape, dtype)
            assert torch.equal(copy, unlike.to(dtype))


def test_a_buffer_is_given_back_under_an_exception():
    buffers, tensor = Buffers(), torch.randn(3, 4)
    with suppress(BoomError), buffers.copy(tensor, torch.float64) as copy:
        place = copy.data_ptr()
        raise BoomError
    with buffers.copy(tensor, torch.float64) as copy:
        assert copy.data_ptr() == place


@pytest.mark.parametrize("fails", [False, True])
def test_layers_are_upcast_into_the_same_memory(fails):
    """One after the other, also after one that failed; within one, a parameter that is tied has one place."""
    layers, buffers = [small_model(), small_model(), small_model()], Buffers()
    places = []
    for at, layer in enumerate(layers):
        layer["mix"].bias.data.add_(at)
    before = [bits(layer) for layer in layers]
    for layer in layers:
        expected = {name: x.to(torch.float64) for name, x in layer.named_parameters()}
        with suppress(BoomError), upcast_parameters(torch.float64, layer, buffers=buffers):
            for name, x in layer.named_parameters():
                torch.testing.assert_close(x.data, expected[name], rtol=0, atol=0, equal_nan=True)
            assert layer["head"].weight.data_ptr() == layer["embed"].weight.data_ptr()
            places.append({x.data_ptr() for x in (*layer.parameters(), layer.scale)})
            if fails:
                raise BoomError
    assert len(places[0]) == 4
    assert places[0] == places[1] == places[2]
    assert [bits(layer) for layer in layers] == before


def test_without_buffers_nothing_is_kept():
    model = small_model()
    with upcast_parameters(torch.float64, model):
        made = [weakref.ref(x.untyped_storage()) for x in (*model.parameters(), model.scale)]
        assert None not in [x() for x in made]
    assert {x() for x in made} == {None}


def norm_in_float64(x, weight, eps):
    x, weight = x.numpy(), weight.numpy()
    return x / ((x * x).mean(axis=-1, keepdims=True) + eps) ** 0.5 * weight


def error(actual, expected):
    expected = torch.as_tensor(expected)
    return float((actual - expected).norm() / expected.norm())


def test_precision_of_the_norm_is_preserved():
    norm = LlamaRMSNorm(64).double()
    norm.weight.data = torch.randn(64, dtype=torch.float64)
    x = torch.randn(5, 64, dtype=torch.float64)
    expected = norm_in_float64(x, norm.weight.detach(), norm.variance_epsilon)
    with torch.no_grad():
        assert error(norm(x), expected) > 1e-9, "without it HF's norm rounds its input to float32"
        with PreservePrecision(torch.float64):
            assert error(norm(x), expected) < 1e-14
        assert error(norm(x), expected) > 1e-9, "and it ends with the block"


def test_precision_of_the_eager_softmax_is_preserved():
    module = nn.Module()
    module.num_key_value_groups, module.training = 1, False
    q, k, v = (torch.randn(1, 2, 6, 8, dtype=torch.float64) for _ in range(3))
    scores = (q @ k.transpose(2, 3)).numpy() * 0.3
    p = torch.from_numpy(scores).softmax(dim=-1)
    expected = (p @ v).transpose(1, 2)
    assert error(eager_attention_forward(module, q, k, v, None, scaling=0.3)[0], expected) > 1e-10
    with PreservePrecision(torch.float64):
        assert error(eager_attention_forward(module, q, k, v, None, scaling=0.3)[0], expected) < 1e-14


LOWERINGS = [
    lambda x, low: x.to(low),
    lambda x, low: x.to(dtype=low),
    lambda x, low: x.to(torch.empty(1, dtype=low)),
    lambda x, low: x.to("cpu", low),
    lambda x, low: x.type(low),
    lambda x, low: x.type_as(torch.empty(1, dtype=low)),
    lambda x, low: x.softmax(-1, dtype=low),
    lambda x, low: torch.softmax(x, dim=-1, dtype=low),
    lambda x, low: nn.functional.softmax(x, dim=-1, dtype=low),
    lambda x, low: x.mean(-1, dtype=low),
]


@pytest.mark.parametrize(("high", "low"), [(torch.float64, torch.float32), (torch.float32, torch.bfloat16)])
@pytest.mark.parametrize("lower", LOWERINGS)
def test_precision_is_preserved_whatever_way_a_lower_one_is_asked_for(lower, high, low):
    x = torch.randn(3, 4, dtype=high)
    with PreservePrecision(high):
        assert lower(x, low).dtype == high
    assert lower(x, low).dtype == low


@pytest.mark.parametrize(
    ("cast", "low"),
    [
        (torch.Tensor.float, torch.float32),
        (torch.Tensor.bfloat16, torch.bfloat16),
        (torch.Tensor.half, torch.float16),
    ],
)
def test_precision_is_preserved_by_casts(cast, low):
    x = torch.randn(3, 4, dtype=torch.float64)
    with PreservePrecision(torch.float64):
        assert cast(x) is x
    assert cast(x).dtype == low


def test_precision_of_other_tensors_is_left_alone():
    with PreservePrecision(torch.float64):
        assert torch.ones(2, dtype=torch.bfloat16).float().dtype == torch.float32
        assert torch.ones(2, dtype=torch.int64).to(torch.float32).dtype == torch.float32
        assert torch.ones(2, dtype=torch.float64).to(torch.int64).dtype == torch.int64
    with PreservePrecision(torch.float32):
        assert torch.ones(2, dtype=torch.float32).double().dtype == torch.float64
        assert torch.ones(2, dtype=torch.float64).to(torch.float32).dtype == torch.float32


def test_preserving_ends_under_an_exception():
    with pytest.raises(BoomError), PreservePrecision(torch.float64):
        raise BoomError
    assert torch.ones(2, dtype=torch.float64).float().dtype == torch.float32


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("block_bytes", [1, 8 * 40, 8 * 40 * 7, 1 << 20])
def test_a_blocked_linear_is_the_product(block_bytes, has_bias, monkeypatch):
    monkeypatch.setattr(precision, "_BLOCK_BYTES", block_bytes)
    monkeypatch.setattr(precision, "_LARGE_BYTES", block_bytes)
    torch.manual_seed(1)
    module = nn.Linear(40, 23, bias=has_bias).to(torch.bfloat16)
    x = torch.randn(2, 5, 40, dtype=torch.float64)
    expected = x.numpy() @ module.weight.detach().double().numpy().T
    expected += module.bias.detach().double().numpy() if has_bias else 0
    with torch.no_grad():
        actual = blocked_linear(module, x, torch.float64)
        assert actual.dtype == torch.float64
        assert error(actual, expected) < 1e-15
        assert torch.equal(
            blocked_linear(module, x.float(), torch.float64), blocked_linear(module, x.float().double(), torch.float64)
        )
        low = blocked_linear(module, x.float(), torch.float32)
        assert low.dtype == torch.float32
        assert error(low.double(), expected) < 1e-6
    assert module.weight.dtype == torch.bfloat16


@pytest.fixture
def everything_is_large(monkeypatch):
    monkeypatch.setattr(precision, "_BLOCK_BYTES", 1)
    monkeypatch.setattr(precision, "_LARGE_BYTES", 1)


def test_large_modules_run_in_high_precision_with_their_weights_as_they_are(everything_is_large):
    model, x = small_model(), torch.randn(2, 3, 6, dtype=torch.float64)
    ids, weight, before = torch.tensor([[3, 3, 10]]), model["head"].weight.double(), bits(model)
    with upcast_on_use(torch.float64, model), torch.no_grad():
        assert bits(model) == before
        assert error(model["head"](x), x @ weight.detach().T) < 1e-15
        assert torch.equal(model["embed"](ids), weight[ids])
    assert bits(model) == before
    assert not [module for module in model.modules() if "forward" in vars(module)]


def test_large_modules_run_as_they_are_where_that_is_wanted(everything_is_large):
    """The control shares its modules with the truth, in another thread."""
    model, ids, dtypes = small_model(), torch.tensor([1]), []
    this_thread = threading.get_ident()
    with upcast_on_use(torch.float64, model, applies=lambda: threading.get_ident() == this_thread):
        thread = threading.Thread(target=lambda: dtypes.append(model["embed"](ids).dtype))
        thread.start()
        thread.join()
        dtypes.append(model["embed"](ids).dtype)
    assert dtypes == [torch.bfloat16, torch.float64]


def test_a_large_embedding_that_scales_scales_in_high_precision(everything_is_large):
    embed = Gemma3TextScaledWordEmbedding(11, 6, 0, embed_scale=6**0.5).to(torch.bfloat16)
    ids, table, scale = torch.tensor([4, 9]), embed.weight.detach().double(), embed.embed_scale.double()
    with upcast_parameters(torch.float64, embed), upcast_on_use(torch.float64, embed), torch.no_grad():
        actual = embed(ids)
    assert error(actual, table[ids] * scale) < 1e-15
    assert actual.dtype == torch.float64


def test_another_kind_of_linear_is_asked_to_compute(everything_is_large):
    """One that is more than its weight, as in models with scaled logits, is upcast as a whole."""

    class Scaled(nn.Linear):
        def forward(self, x):
            return 3 * super().forward(x)

    module = Scaled(4, 3).to(torch.float16)
    before, x = bits(module), torch.randn(2, 4, dtype=torch.float64)
    with torch.no_grad(), upcast(torch.float64, module):
        actual = module(x)
    expected = 3 * (x @ module.weight.double().T + module.bias.double())
    assert error(actual, expected.detach()) < 1e-15
    assert bits(module) == before


def test_an_embedding_of_something_else_than_tokens_is_upcast_as_a_whole(everything_is_large):
    """OPT looks up positions in a module of its own, which is given a mask."""

    class Positions(nn.Embedding):
        def forward(self, attention_mask, past=0):
            return super().forward(attention_mask.cumsum(1) + past)

    module = Positions(9, 4).to(torch.bfloat16)
    mask = torch.ones(1, 3, dtype=torch.int64)
    with upcast(torch.float64, module), torch.no_grad():
        assert module.weight.dtype == torch.float64
        assert torch.equal(module(mask, past=2), module.weight[mask.cumsum(1) + 2])
    assert module.weight.dtype == torch.bfloat16


@pytest.mark.parametrize("fails", [False, True])
def test_a_large_embedding_is_put_back(everything_is_large, fails):
    class Failing(nn.Embedding):
        def forward(self, input):
            if fails:
                raise BoomError
            return super().forward(input)

    module = Failing(5, 4).to(torch.bfloat16)
    before = bits(module)
    with suppress(BoomError), upcast_on_use(torch.float64, module):
        module(torch.tensor([1, 3]))
    assert bits(module) == before
    assert "forward" not in vars(module)


@pytest.mark.parametrize("before", [None, "grouped_mm"])
def test_experts_are_eager_and_put_back(before):
    config = SimpleNamespace(_experts_implementation=before)
    with suppress(BoomError), eager_experts(config):
        assert config._experts_implementation == "eager"
        raise BoomError
    assert config._experts_implementation == before


@pytest.mark.parametrize(
    ("choice", "engine", "expected"),
    [
        ("auto", torch.bfloat16, torch.float32),
        ("auto", torch.float16, torch.float32),
        ("auto", torch.float32, torch.float64),
        ("float64", torch.bfloat16, torch.float64),
        ("float32", torch.float32, torch.float32),
    ],
)
def test_the_truth_is_finer_than_the_engine_unless_one_asks_for_less(choice, engine, expected):
    assert truth_dtype(choice, engine) == expected


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "asked",
    [
        "pass",
        "backends.cuda.matmul.allow_tf32 = True",
        "backends.cuda.matmul.fp32_precision = 'tf32'",
        "backends.fp32_precision = 'tf32'",
        "torch.set_float32_matmul_precision('high')",
        "backends.cudnn.conv.fp32_precision = 'ieee'",
        "backends.cudnn.allow_tf32 = False",
    ],
)
def test_without_tf32_nothing_is_in_tf32_and_every_switch_comes_back(asked):
    """In a process of its own: torch does not let one go back from the newer switches to the older ones."""
    code = f"""
import torch
from torch import backends
from harness.oracle.precision import without_tf32
def seen():
    found = []
    for place in (backends, backends.cuda.matmul, backends.cudnn, backends.cudnn.conv):
        for name in ("fp32_precision", "allow_tf32"):
            try:
                found.append(getattr(place, name, None))
            except RuntimeError:
                found.append("mixed")
    return found
{asked}
before = seen()
try:
    with without_tf32():
        switches = backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn
        assert [switch.fp32_precision for switch in switches] == ["ieee"] * 3
        pairs = zip(before[1::2], seen()[1::2])
        assert all(inside is False for own, inside in pairs if isinstance(own, bool))  # and can be read still
        raise KeyError
except KeyError:
    pass
assert seen() == before, (seen(), before)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("make", [lambda x: torch.tensor(x), lambda x: torch.full((), x)])
def test_the_lowest_number_of_the_truths_dtype_is_one_of_it(make):
    lowest = torch.finfo(torch.float64).min
    with PreservePrecision(torch.float64):
        assert make(lowest).item() == lowest
        assert make(0.5).dtype == torch.float64
        assert torch.full((2,), 0.5).dtype == torch.float32
        assert torch.tensor(3).dtype == torch.int64
    assert make(0.5).dtype == torch.float32


def test_only_a_float_without_dimensions_is_a_number():
    with PreservePrecision(torch.float64):
        assert torch.tensor(1.5).dtype is torch.float64
        assert torch.full((), 1.5).dtype is torch.full([], 1.5).dtype is torch.float64
        assert torch.tensor(3).dtype is torch.full((), 3).dtype is torch.int64
        assert torch.tensor([1.5]).dtype is torch.full((2,), 1.5).dtype is torch.float32
        assert torch.full((), fill_value=1.5) == 1.5
        assert torch.tensor(1.5, dtype=torch.float16).dtype is torch.float16


def test_what_is_no_lower_dtype_is_given_as_asked_for():
    x = torch.ones(2, dtype=torch.float64)
    with PreservePrecision(torch.float64):
        assert x.to(torch.int64).dtype is x.long().dtype is x.type_as(torch.ones(1, dtype=torch.int32)).long().dtype
        assert x.to(torch.bool).dtype is torch.bool
        assert x.new_zeros(2, dtype=torch.int32).dtype is torch.int32
        assert (
            x.float().dtype is x.to(dtype=torch.bfloat16).dtype is x.type_as(other=torch.ones(1)).dtype is torch.float64
        )
        assert torch.ones(2).to(torch.bfloat16).dtype is torch.bfloat16, "a tensor of another dtype"
    with PreservePrecision(torch.float32):
        y = torch.ones(2)
        assert y.to(torch.float64).dtype is y.double().dtype is torch.float64
        assert y.to(torch.float16).dtype is y.half().dtype is torch.float32
