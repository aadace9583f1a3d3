"""Rotations of heads, against complex numbers pair by pair."""

import cmath
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from transformers import Phi3Config
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

from harness.oracle.rotation import Rotation, rotations

SIZE, HEADS, POSITIONS = 6, 2, torch.tensor([0, 1, 5, 1000])


def rotation(num_pairs=3, **fields):
    frequencies = torch.tensor([1.0, 0.3, 0.07])[:num_pairs]
    return Rotation(frequencies=frequencies, module=None, name="inv_freq", head_dim=SIZE, **fields)


def draw(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.mark.parametrize("is_interleaved", [False, True])
@pytest.mark.parametrize("num_pairs", [3, 2, 1])
@pytest.mark.parametrize("scaling", [1.0, 0.5])
def test_each_pair_turns_by_position_times_frequency(is_interleaved, num_pairs, scaling):
    turning, x = rotation(num_pairs, is_interleaved=is_interleaved, scaling=scaling), draw(4, HEADS * SIZE)
    expected = x.clone().view(4, HEADS, SIZE)
    for row, position in enumerate(POSITIONS.tolist()):
        for pair in range(num_pairs):
            first, second = (2 * pair, 2 * pair + 1) if is_interleaved else (pair, pair + num_pairs)
            angle = float(np.float32(position) * np.float32(turning.frequencies[pair]))
            for head in range(HEADS):
                turned = complex(x.view(4, HEADS, SIZE)[row, head, first], x.view(4, HEADS, SIZE)[row, head, second])
                turned *= cmath.exp(1j * angle) * scaling
                expected[row, head, first], expected[row, head, second] = turned.real, turned.imag
    torch.testing.assert_close(turning.turn(x, POSITIONS), expected.flatten(1), rtol=1e-12, atol=1e-12)
    pairs = turning.pairs(turning.heads(x))
    assert pairs.shape == (4, HEADS, num_pairs, 2)
    assert pairs.is_contiguous()
    heads = x.view(4, HEADS, SIZE)
    for pair in range(num_pairs):
        first, second = (2 * pair, 2 * pair + 1) if is_interleaved else (pair, pair + num_pairs)
        assert torch.equal(pairs[:, :, pair, 0], heads[..., first])
        assert torch.equal(pairs[:, :, pair, 1], heads[..., second])


def test_neighbours_that_are_written_half_a_head_apart():
    """DeepSeek's rotary embedding in HF."""
    x = draw(4, HEADS * SIZE)
    plain, apart = rotation(is_interleaved=True), rotation(is_interleaved=True, is_regrouped=True)
    turned, regrouped = plain.heads(plain.turn(x, POSITIONS)), apart.heads(apart.turn(x, POSITIONS))
    assert torch.equal(regrouped, torch.cat((turned[..., ::2], turned[..., 1::2]), dim=-1))
    assert torch.equal(apart.pairs(regrouped, is_turned=True), plain.pairs(turned))
    assert torch.equal(apart.pairs(apart.heads(x)), plain.pairs(plain.heads(x)))


def test_phases_are_rounded_to_float32_and_of_any_frequencies():
    turning, others = rotation(), torch.tensor([0.1, 0.2], dtype=torch.float64)
    assert turning.phases(POSITIONS).dtype is torch.float64
    assert torch.equal(turning.phases(POSITIONS), (POSITIONS[:, None].float() * turning.frequencies).double())
    expected = (POSITIONS[:, None].float() * others.float()).double()
    assert torch.equal(turning.phases(POSITIONS, others), expected)
    cos, sin = turning.angles(POSITIONS, others)
    assert torch.equal(cos, expected.cos()[:, None])
    assert torch.equal(sin, expected.sin()[:, None])
    assert cos.shape == (4, 1, 2)


def test_rotations_of_a_model():
    first, second = nn.Module(), nn.Module()
    first.register_buffer("other", torch.ones(2))
    first.register_buffer("original_inv_freq", torch.tensor([1.0, 0.5], dtype=torch.bfloat16))
    first.register_buffer("inv_freq", torch.tensor([1.0, 0.5], dtype=torch.bfloat16))
    first.attention_scaling = 2
    second.register_buffer("sliding_inv_freq", torch.tensor([0.25]))
    second.sliding_attention_scaling, second.attention_scaling = 3.0, 4.0
    second.register_buffer("full_inv_freq", torch.tensor([0.125]))
    hf = SimpleNamespace(model=nn.ModuleList([nn.ModuleList([first]), second]))
    ways_of_model = list(rotations(hf, 4))
    named = (("inv_freq", 2), ("sliding_inv_freq", 3), ("full_inv_freq", 1))
    ways = ((False, False), (True, False), (True, True))
    assert [(item.name, item.scaling, item.is_interleaved, item.is_regrouped) for item in ways_of_model] == [
        (*name, *way) for name in named for way in ways
    ]
    assert [item.frequencies.tolist() for item in ways_of_model[::3]] == [[1.0, 0.5], [0.25], [0.125]]
    assert {item.frequencies.dtype for item in ways_of_model} == {torch.float32}
    assert [item.module for item in ways_of_model[::3]] == [first, second, second]
    assert {item.head_dim for item in ways_of_model} == {4}


@pytest.mark.parametrize("last", [8, 20], ids=["short", "long"])
def test_rotations_for_requests_of_either_length(last):
    """HF's module has the frequencies of the request that ran last; the wrong rows may be another one's."""
    factors = {"short_factor": [1.0, 1.5], "long_factor": [2.0, 3.0]}
    length = {"original_max_position_embeddings": 16, "factor": 4.0}
    parameters = {"rope_type": "longrope", "rope_theta": 1e4, **length, **factors}
    sizes = {"hidden_size": 8, "num_attention_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0}
    module = Phi3RotaryEmbedding(Phi3Config(**sizes, original_max_position_embeddings=16, rope_parameters=parameters))
    for length in (20, last):
        module(torch.zeros(1, length, 8), torch.arange(length)[None])
    both = list(rotations(SimpleNamespace(model=module), 4))
    plain = [1.0, 1e4**-0.5]
    expected = {
        tuple(round(item / factor, 6) for item, factor in zip(plain, factors[name], strict=True)) for name in factors
    }
    assert {tuple(round(frequency, 6) for frequency in one.frequencies.tolist()) for one in both} == expected
    assert {(item.name, item.module) for item in both} == {("inv_freq", module)}


def test_frequencies_of_larger_heads_are_none_of_these():
    """Gemma 4 has heads of two sizes."""
    model = nn.Module()
    for name, num_pairs in (("sliding_inv_freq", 3), ("full_inv_freq", 4)):
        model.register_buffer(name, torch.ones(num_pairs))
    hf = SimpleNamespace(model=model)
    assert {item.name for item in rotations(hf, SIZE)} == {"sliding_inv_freq"}
    assert {item.name for item in rotations(hf, 8)} == {"sliding_inv_freq", "full_inv_freq"}
