"""Products with quantised inputs, against ggml's loops over blocks; and values on ties."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from harness.base.numerics import Numerics
from harness.formats.taps import Kind, Operation
from harness.judge.compare.conventions import linear
from harness.judge.compare.conventions.entry import SuspectRows
from harness.judge.compare.conventions.linear import CONVENTIONS, QUANTISED_INPUTS, ROUNDED_INPUTS, quantised_inputs

from ..judgements import draw

ADAPTED, QUANTISED = (convention.alternatives for convention in CONVENTIONS[3:])
Q8_0, Q8_K = (QUANTISED_INPUTS.format(name) for name in ("Q8_0", "Q8_K"))


def by_loop(x, size):
    """ggml's `quantize_row_q8_0` of blocks of 32, `quantize_row_q8_K` of blocks of 256, and back."""
    rows = []
    for block in x.float().reshape(-1, size).numpy():
        largest = max(block, key=abs)
        if not largest:
            rows.append([0.0] * size)
        elif size == 32:
            step = abs(largest) / np.float32(127)
            rows.append([float(np.rint(float(value) / float(step))) * float(np.float16(step)) for value in block])
        else:
            inverse = np.float32(-127) / largest
            step = float(np.float32(1) / inverse)
            rows.append([float(np.rint(float(value) * float(inverse))) * step for value in block])
    return torch.tensor(rows, dtype=torch.float64).view_as(x)


def inputs_of(width, seed=0):
    x = draw(4, width, seed=seed) * torch.tensor([[1.0], [-30.0], [1e-3], [2.0]])
    x[2, :256] = 0
    return x


@pytest.mark.parametrize(
    ("formats", "width", "sizes"),
    [
        (["Q8_0"], 512, [32]), (["Q4_0", "F16"], 96, [32]), (["Q6_K"], 512, [256]), (["Q6_K"], 96, []),
        (["Q4_K", "Q5_0"], 512, [32, 256]), (["Q4_K", "Q5_0"], 288, [32]), (["F32"], 512, []), ([], 512, []),
        (["Q8_0"], 40, []),
    ],
)  # fmt: skip
def test_inputs_as_quantised_products_see_them(formats, width, sizes):
    x = inputs_of(width)
    actual = list(quantised_inputs(x, formats))
    assert len(actual) == len(sizes)
    for item, size in zip(actual, sizes, strict=True):
        torch.testing.assert_close(item, by_loop(x, size), rtol=1e-7, atol=0)


def subject_of(module, x, actual, *, dtype=torch.float32, inputs=None, expected=None, **declared):
    operation = Operation(tap="proj", kind=Kind.LINEAR, inputs=("x",), source="proj")
    return SuspectRows(
        hf=SimpleNamespace(module=lambda _path: module), operation=operation, dtype=dtype, actual=actual,
        expected=actual.double() if expected is None else expected, rows=torch.arange(len(x)),
        positions=torch.arange(len(x)), inputs=[x] if inputs is None else inputs, declared=Numerics(**declared),
    )  # fmt: skip


def plain(weight, bias=None, **more):
    return SimpleNamespace(weight=weight, bias=bias, **more)


@pytest.mark.parametrize(("formats", "size", "name"), [(("Q8_0",), 32, Q8_0), (("Q3_K",), 256, Q8_K)])
def test_products_with_quantised_inputs(formats, size, name):
    x, weight, bias = inputs_of(512), draw(6, 512, seed=1), draw(6, seed=2)
    expected = by_loop(x, size) @ weight.T + bias
    (alternative,) = QUANTISED(
        subject_of(plain(weight, bias), x.unflatten(1, (2, -1)), expected.float(), weights=formats)
    )
    assert (alternative.name, alternative.allowance) == (name, None)
    torch.testing.assert_close(alternative.expected(), expected, rtol=1e-6, atol=1e-6)


def test_where_inputs_are_quantised():
    x, module = inputs_of(512), plain(draw(6, 512))
    actual = draw(4, 6)

    def names(**declared):
        return [item.name for item in QUANTISED(subject_of(module, declared.pop("x", x), actual, **declared))]

    assert names(weights=("IQ4_XS", "IQ4_NL")) == [Q8_0, Q8_K]
    assert names() == names(weights=("F16",)) == []
    assert names(weights=("Q8_0",), dtype=torch.float16) == []
    assert names(weights=("Q8_0",), inputs=[x, x]) == []
    assert names(weights=("Q8_0", "Q2_K"), x=x[:, :288]) == [Q8_0]


# Ties.


def tied(*values):
    """A row of 32 whose scale is 1, with these values after the first."""
    x = torch.zeros(1, 32, dtype=torch.float64)
    x[0, 0] = 127.0
    x[0, 1 : 1 + len(values)] = torch.tensor(values)
    return x


def expected_of(x, integers, weight):
    """What the convention expects of rows that an engine made of these integers."""
    actual = integers @ weight.T
    (alternative,) = QUANTISED(subject_of(plain(weight), x, actual, weights=("Q8_0",)))
    return alternative.expected(), actual


@pytest.mark.parametrize("sign", [-1, 1])
@pytest.mark.parametrize(("off", "is_tie"), [(0.0, True), (1.8e-4, True), (2.2e-4, False)])
@pytest.mark.parametrize("is_up", [True, False])
def test_how_near_a_tie_is_one(sign, off, is_tie, is_up):
    weight, x = draw(6, 32), torch.cat((tied(3.0, 4.2), tied(17.5 + sign * off, 4.2), tied(9.0)))
    integers = x.round()
    integers[1, 1] = 18.0 if is_up else 17.0
    expected, actual = expected_of(x, integers, weight)
    is_nearest = off != 0 and is_up == (sign > 0)
    assert torch.allclose(expected, actual) == (is_tie or is_nearest)


@pytest.mark.parametrize("num_out", [1, 2, 4, 8])
def test_several_values_on_ties_are_rounded_each_as_the_engine_did(num_out):
    """Four are told at once by twice as many outputs; by fewer one after the other."""
    weight = draw(num_out, 32)
    if num_out < 8:  # one after the other: what each changes is seen in an output of its own
        weight[:, 1:5] = 5 * torch.eye(num_out, 4, dtype=torch.float64)
    x = tied(2.5, -3.5, 8.5, 1.5, 6.2)
    for chosen in ((3.0, -3.0, 8.0, 2.0), (2.0, -4.0, 9.0, 1.0), (2.0, -3.0, 9.0, 2.0)):
        integers = x.round()
        integers[0, 1:5] = torch.tensor(chosen)
        expected, actual = expected_of(x, integers, weight)
        torch.testing.assert_close(expected, actual, rtol=1e-12, atol=1e-12)


def test_many_ties_of_a_row_are_decided_at_once():
    """A quantised embedding after a norm of ones: a whole level of its grid is on ties."""
    weight, upwards = draw(256, 96), draw(3, 96, seed=1) > 0
    x = (40 * draw(3, 96, seed=2)).round().clamp(-100, 100)
    x[:, ::32] = 127.0  # the scale is 1
    x[:, 1:64:2] += 0.5
    integers = torch.where(upwards, x.ceil(), x.floor())
    expected, actual = expected_of(x, integers, weight)
    torch.testing.assert_close(expected, actual, rtol=1e-9, atol=1e-9)


def test_a_row_that_is_wrong_elsewhere_stays_wrong():
    weight, x = draw(6, 32), tied(2.5, 4.0)
    integers = x.round()
    integers[0, 2] += 1
    expected, actual = expected_of(x, integers, weight)
    assert not torch.allclose(expected, actual, rtol=1e-2)


@pytest.mark.parametrize(("most", "is_resolved"), [(3, True), (2, False)])
def test_more_ties_than_the_limit_are_left(monkeypatch, most, is_resolved):
    monkeypatch.setattr(linear, "_MAX_TIES", most)
    weight, x = draw(8, 32), torch.cat((tied(2.5, 5.5), tied(9.5)))
    integers = x.round()
    integers[:, 1] = torch.tensor([3.0, 9.0])
    integers[0, 2] = 5.0
    expected, actual = expected_of(x, integers, weight)
    assert torch.allclose(expected, actual) == is_resolved


# An adapter beside a product.


def adapted(x, weight, **more):
    a, b = draw(2, x.shape[1], seed=7), draw(6, 2, seed=8)
    return plain(weight, lora_a=a, lora_b=b, scaling=0.5, **more), 0.5 * (x @ a.T) @ b.T


def test_an_adapters_part_is_not_rounded():
    x, weight = inputs_of(64), draw(6, 64, seed=1).half().double()
    module, update = adapted(x, weight)
    parts = {
        ROUNDED_INPUTS.format("float16"): x.float().half().double() @ weight.T,
        Q8_0: by_loop(x, 32) @ weight.T,
    }
    actual = parts[Q8_0] + update
    by_name = {item.name: item for item in ADAPTED(subject_of(module, x, actual, weights=("F16", "Q8_0")))}
    assert list(by_name) == list(parts)
    for name, product in parts.items():
        torch.testing.assert_close(by_name[name].expected(), product + update, rtol=1e-6, atol=1e-6)


def test_ties_of_a_product_are_decided_without_its_adapter():
    x, weight = tied(17.5), draw(6, 32, seed=1)
    module, update = adapted(x * 1.0, weight)
    for value in (17.0, 18.0):
        integers = x.round()
        integers[0, 1] = value
        actual = integers @ weight.T + update
        (alternative,) = ADAPTED(subject_of(module, x, actual, weights=("Q8_0",)))
        torch.testing.assert_close(alternative.expected(), actual, rtol=1e-9, atol=1e-9)


def test_where_an_adapter_is_looked_for():
    x, weight = inputs_of(64), draw(6, 64)
    module, _ = adapted(x, weight)
    actual = draw(4, 6)
    assert list(ADAPTED(subject_of(plain(weight), x, actual, weights=("Q8_0",)))) == []
    assert list(ADAPTED(subject_of(module, x, actual, weights=("Q8_0",), dtype=torch.float16))) == []
    assert len(list(ADAPTED(subject_of(module, x, actual, weights=("Q8_0",))))) == 1


def with_minima(x, num_out=48):
    """Weights of steps less minima, and what float32 makes of both sums by themselves: errors in roundings, by row."""
    generator = torch.Generator().manual_seed(0)
    steps, least = (torch.rand(num_out, x.shape[1] // 32, 1, generator=generator) + 0.5 for _ in range(2))
    integers = torch.randint(0, 16, (num_out, x.shape[1] // 32, 32), generator=generator).float()
    weight = (steps * integers / 7.5 - least).flatten(1).double()
    blocks = x.float().unflatten(1, (-1, 32))
    sums = torch.einsum("rbs,obs->rob", blocks, integers) * (steps[..., 0] / 7.5)
    left = sums.sum(dim=-1) - blocks.sum(dim=-1) @ least[..., 0].T
    expected = x.double() @ weight.T
    return weight, expected, (left.double() - expected).norm(dim=1) / expected.norm(dim=1) * 2**24


@pytest.mark.parametrize("declared", ["Q4_K", "Q5_K", "Q2_K"])
def test_two_sums_that_cancel_lose_digits_where_inputs_have_one_sign(declared):
    x = draw(6, 512, seed=3).float()
    for inputs, is_large in ((x, False), (x.abs(), True)):
        weight, expected, errors = with_minima(inputs)
        (rounding,) = QUANTISED(
            subject_of(SimpleNamespace(weight=weight, bias=None), inputs, expected, weights=(declared,))
        )
        assert bool((rounding.allowance > 10).all()) == is_large
        assert bool((errors < 2 * rounding.allowance + 10).all())


def test_types_without_a_minimum_lose_none():
    x = draw(6, 512, seed=3).float().abs()
    weight, expected, _ = with_minima(x)
    module = SimpleNamespace(weight=weight, bias=None)
    for declared in ("Q6_K", "Q3_K", "Q8_0"):
        (rounding,) = QUANTISED(subject_of(module, x, expected, weights=(declared,)))
        assert rounding.allowance is None
