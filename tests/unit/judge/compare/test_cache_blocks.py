"""Blocks of integers, against ggml's loops over one block in float32, and how much room a value on a tie is given."""

import numpy as np
import pytest
import torch

from harness.judge.compare.cache_format import FORMATS, quantised, rounded_sums

CODEBOOK = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
F32, F16 = np.float32, np.float16


def of_levels(block, num_levels):
    """Q4_0 and Q5_0: the value of the largest magnitude becomes the lowest of so many levels."""
    largest = max(block, key=abs)
    step = largest / F32(-num_levels // 2)
    inverse = F32(1) / step if step else F32(0)
    integers = [min(num_levels - 1, int(x * inverse + F32(num_levels / 2 + 0.5))) for x in block]
    return [float(F16(step)) * (integer - num_levels // 2) for integer in integers]


def of_steps(block, num_steps):
    """Q4_1 and Q5_1: steps from the least value."""
    least, step = min(block), (max(block) - min(block)) / F32(num_steps)
    inverse = F32(1) / step if step else F32(0)
    integers = [min(num_steps, int((x - least) * inverse + F32(0.5))) for x in block]
    return [float(F16(step)) * integer + float(F16(least)) for integer in integers]


def of_127(block):
    """Q8_0."""
    largest = max(abs(x) for x in block)
    inverse = F32(127) / largest if largest else F32(0)
    return [float(F16(largest / F32(127))) * float(np.rint(x * inverse)) for x in block]


def of_codebook(block):
    """IQ4_NL: levels by the first scale, then the scale of least weighted squares."""
    inverse = F32(1) / (max(block, key=abs) / F32(-127))
    levels = [min(CODEBOOK, key=lambda level: abs(level - float(x * inverse))) for x in block]
    pairs = [(float(x), level) for x, level in zip(block, levels, strict=True)]
    scale = sum(x**3 * level for x, level in pairs) / sum((x * level) ** 2 for x, level in pairs)
    return [float(F16(F32(scale))) * level for level in levels]


BY_HAND = {
    "Q8_0": of_127,
    "Q4_0": lambda block: of_levels(block, 16),
    "Q5_0": lambda block: of_levels(block, 32),
    "Q4_1": lambda block: of_steps(block, 15),
    "Q5_1": lambda block: of_steps(block, 31),
    "IQ4_NL": of_codebook,
}


def heads(seed=0):
    """[3, 5, 96] of blocks that differ in size and in the sign of their largest value."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(3, 5, 3, 32, generator=generator) + torch.randn(3, 5, 3, 1, generator=generator)
    x *= 4 ** torch.randn(3, 5, 3, 1, generator=generator)
    x[0] *= 1e-3
    return x.flatten(2)


@pytest.mark.parametrize("name", FORMATS)
def test_blocks_are_those_of_the_loop(name):
    x = heads()
    held = quantised(x, name)
    expected = [BY_HAND[name](list(block)) for block in x.reshape(-1, 32).numpy()]
    torch.testing.assert_close(held.values, torch.tensor(expected, dtype=torch.float64).view_as(x), rtol=0, atol=0)
    assert held.slack.shape == x.shape
    assert (held.slack == 0).double().mean() > 0.97


@pytest.mark.parametrize("name", FORMATS)
def test_near_values_have_the_same_blocks_and_room_where_float32_could_not_tell(name):
    x = heads()
    held, near = quantised(x, name, is_exact=False), quantised(x * (1 + 1e-7), name, is_exact=False)
    assert ((held.values - near.values).abs() <= held.slack * (1 + 1e-9)).all()
    assert (held.slack == 0).double().mean() > 0.9


@pytest.mark.parametrize("name", FORMATS)
def test_minima_are_kept_by_the_formats_that_have_them(name):
    x = heads()
    minima = quantised(x, name).minima
    if not name.endswith("1"):
        assert minima is None
        return
    assert torch.equal(minima, x.unflatten(2, (-1, 32)).amin(dim=3).half().double())


@pytest.mark.parametrize("name", FORMATS)
def test_a_block_whose_values_are_all_zero_is_zero_beside_one_that_is_not(name):
    x = torch.cat((torch.zeros(1, 32), heads()[0, :1, :32]), dim=1)
    for is_exact in (True, False):
        held = quantised(x, name, is_exact=is_exact)
        assert not held.values[0, :32].any()
        assert not held.slack[0, :32].any()
        assert held.values[0, 32:].any()


def test_a_block_of_one_value_is_its_least():
    held = quantised(torch.full((1, 32), 0.3), "Q4_1")
    assert held.values.unique().tolist() == [float(torch.tensor(0.3).half())]


# A value on a tie: the scale of these blocks is 1, so that a value is its own multiple of the step.

FIRST = {"Q8_0": 127.0, "Q4_0": -8.0, "Q5_0": -16.0, "Q4_1": 15.0, "Q5_1": 31.0}
"""The value that makes it so, over the least one where steps are counted from that."""
LEAST = {"Q4_1": 1.0, "Q5_1": 1.0}
"""Of the block, which float16 holds with room to either side."""
SIZE = {"Q8_0": 0.0, "Q4_0": 8.5, "Q5_0": 16.5, "Q4_1": 0.5, "Q5_1": 0.5}
"""What is added to a multiple before it is cut off."""


def on_tie(name, tie, off, *, is_exact):
    """Slack of a value so far off a tie, and of another in the middle between two ties."""
    block = torch.zeros(1, 32)
    block[0, 0], block[0, 3], block[0, 4] = FIRST[name], tie + off, 2.0
    slack = quantised(block + LEAST.get(name, 0.0), name, is_exact=is_exact).slack
    assert not slack[0, 5:].any()
    assert float(slack[0, 0]) == float(slack[0, 4]) == 0.0
    return float(slack[0, 3])


@pytest.mark.parametrize("sign", [-1, 1])
@pytest.mark.parametrize(
    ("name", "tie"),
    [("Q8_0", 63.5), ("Q8_0", -15.5), ("Q4_0", 5.5), ("Q4_0", -1.5), ("Q5_0", 13.5), ("Q4_1", 7.5), ("Q5_1", 15.5)],
)
def test_a_tie_is_as_wide_as_float32_rounds(name, tie, sign):
    """Five units of the last place of what is cut off, at most half of them to either side."""
    limit = 5 * 2.0**-24 * max(abs(tie), tie + SIZE[name])
    assert on_tie(name, tie, 0.0, is_exact=True) == 1
    assert on_tie(name, tie, sign * 0.8 * limit, is_exact=True) == 1
    assert on_tie(name, tie, sign * 1.25 * limit, is_exact=True) == 0


@pytest.mark.parametrize("sign", [-1, 1])
@pytest.mark.parametrize(("name", "tie"), [("Q8_0", 3.5), ("Q4_0", -1.5), ("Q5_0", 3.5), ("Q4_1", 2.5), ("Q5_1", 7.5)])
def test_a_tie_of_values_that_were_turned_is_wider(name, tie, sign):
    assert on_tie(name, tie, sign * 1.9e-4, is_exact=False) == 1
    assert on_tie(name, tie, sign * 2.1e-4, is_exact=False) == 0


@pytest.mark.parametrize("name", ["Q8_0", "Q4_0", "Q5_0"])
def test_a_scale_on_a_tie_of_float16_gives_room_to_every_value_that_was_turned(name):
    """1 + 2^-11 lies in the middle of two numbers of float16, whose distance is 2^-10."""
    integers = torch.zeros(1, 32)
    integers[0, :4] = torch.tensor([FIRST[name], 3.0, -2.0, 1.0])
    for off, allowance in ((0.0, 2.0**-10), (0.8e-6, 2.0**-10), (-0.8e-6, 2.0**-10), (1.4e-6, 0.0), (-1.4e-6, 0.0)):
        held = quantised(integers * (1 + 2.0**-11) * (1 + off), name, is_exact=False)
        torch.testing.assert_close(held.slack, integers.abs().double() * allowance, rtol=0, atol=0)
    assert not quantised(integers * (1 + 2.0**-11), name).slack.any(), "the engine's own bits are rounded one way"


@pytest.mark.parametrize(("name", "num_steps"), [("Q4_1", 15), ("Q5_1", 31)])
def test_steps_and_least_values_on_a_tie_of_float16_give_room(name, num_steps):
    """Errors of values that were turned are a share of the largest of the block."""
    between, integers = 1 + 2.0**-11, torch.zeros(1, 32)
    integers[0, :4] = torch.tensor([float(num_steps), 3.0, 2.0, 1.0])
    for off, allowance in ((0.0, 2.0**-10), (0.8e-6, 2.0**-10), (1.3e-6, 0.0)):
        x = integers * between * (1 + off) + 1
        largest = float(x.max())  # the share of the step is that over the number of steps, a little more than the step
        held = quantised(x, name, is_exact=False)
        assert largest / num_steps < 1.1
        torch.testing.assert_close(held.slack, integers.double() * allowance, rtol=0, atol=0)
    for off, allowance in ((0.0, 2.0**-10), (0.8e-6, 2.0**-10), (1.3e-6, 0.0)):
        least = between + off * (num_steps + between)
        held = quantised(integers + least, name, is_exact=False)
        torch.testing.assert_close(held.slack, torch.full((1, 32), allowance, dtype=torch.float64), rtol=0, atol=0)
    assert not quantised(integers * between + between, name).slack.any(), "the engine's own bits are rounded one way"


# The codebook: a value in the middle of 13 and 25 beside -127, so that the first scale is 1.


def codebook(off, *, is_exact=True):
    block = torch.zeros(1, 32)
    block[0, 0], block[0, 1] = -127.0, 19.0 + off
    return quantised(block, "IQ4_NL", is_exact=is_exact)


@pytest.mark.parametrize(("scale", "held", "neighbours"), [(None, 1.0, 2.0**-11), (1.5, 1.5, 2 * 2.0**-10)])
def test_room_of_a_tie_in_the_codebook_by_hand(scale, held, neighbours):
    """Least squares over the squares as weights: the scale that 25 gives, and how far 13 would move it.

    It is kept as 1, from which its neighbour below is 2^-11 away, or as 1.5, from which both are 2^-10 away.
    """
    total = 127**4 + (19 * 25) ** 2
    fitted = (127**4 + 19**3 * 25) / total
    assert 1 - 2.0**-12 < fitted < 1
    scale = 1.0 if scale is None else scale / fitted
    block = torch.zeros(1, 32, dtype=torch.float64)
    block[0, :2] = torch.tensor([-127.0, 19.0]) * scale
    actual = quantised(block, "IQ4_NL")
    assert actual.values[0, :3].tolist() == [-127 * held, 25 * held, held]
    moved = 2 * (19**2 * 25 * 12 / total) * held + neighbours
    allowance = torch.tensor([127 * moved, 12 * held + 25 * moved, moved], dtype=torch.float64)
    torch.testing.assert_close(actual.slack[0, :3], allowance, rtol=1e-6, atol=0)


@pytest.mark.parametrize("sign", [-1, 1])
def test_how_near_a_tie_in_the_codebook_is_one(sign):
    limit = 5 * 2.0**-24 * 19
    assert codebook(sign * 0.8 * limit).slack.all()
    assert not codebook(sign * 1.4 * limit).slack.any()
    assert codebook(sign * 1.9e-4, is_exact=False).slack.all()
    assert not codebook(sign * 2.1e-4, is_exact=False).slack.any()


def test_a_scale_of_the_codebook_on_a_tie_of_float16_gives_room():
    levels = torch.zeros(1, 32)
    levels[0, :3] = torch.tensor([-127.0, 53.0, 89.0])
    chosen = levels.double() + (levels == 0)
    for off, allowance in ((0.0, 2.0**-10), (3.5e-6, 2.0**-10), (-3.5e-6, 2.0**-10), (4.6e-6, 0.0), (-4.6e-6, 0.0)):
        held = quantised(levels * (1 + 2.0**-11) * (1 + off), "IQ4_NL")
        torch.testing.assert_close(held.slack, chosen.abs() * allowance, rtol=1e-12, atol=0)


# Sums of blocks beside their integers.


def test_sums_of_blocks_are_those_of_the_loop():
    x = heads(1)
    x[0, 0, :32] = 0
    expected = []
    for block in x.reshape(-1, 32).numpy():
        largest = max(abs(value) for value in block)
        inverse = F32(127) / largest if largest else F32(0)
        kept = F16(largest / F32(127) * F32(sum(float(np.rint(value * inverse)) for value in block)))
        expected.append(float(kept) - sum(of_127(list(block))))
    actual = rounded_sums(x, is_exact=True)
    torch.testing.assert_close(actual, torch.tensor(expected, dtype=torch.float64).view(3, 5, 3), rtol=0, atol=1e-12)
    assert actual[0, 0, 0] == 0
    assert torch.equal(rounded_sums(x, is_exact=False), actual)
