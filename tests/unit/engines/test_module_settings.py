"""The settings that modules show: standard names, and tables of rotary by their numbers. What is not understood is left
out."""

import pytest
import torch
from torch import nn

from harness.engines.module_settings import settings_of_modules
from harness.results.settings import ModelSettings

DIM, THETA = 16, 500000.0


def frequencies(theta: float = THETA) -> torch.Tensor:
    return 1 / theta ** (torch.arange(0, DIM, 2) / DIM)


class RMSNorm(nn.Module):
    def __init__(self, **attributes):
        super().__init__()
        for name, value in attributes.items():
            if isinstance(value, torch.Tensor):
                self.register_buffer(name, value)
            else:
                setattr(self, name, value)


class SelfAttention(RMSNorm):
    pass


class RotaryEmbedding(RMSNorm):
    pass


class UnknownModule(RMSNorm):
    pass


def shown(*modules):
    return settings_of_modules(dict(nn.ModuleList(modules).named_modules()))


@pytest.mark.parametrize("name", ["eps", "variance_epsilon", "epsilon"])
def test_the_eps_of_norms(name):
    assert shown(RMSNorm(**{name: 1e-6}), RMSNorm(**{name: 1e-6})).norm_eps == (1e-6,)
    assert shown(nn.LayerNorm(4), nn.RMSNorm(4, eps=1e-3)).norm_eps == (1e-5, 1e-3)


def test_head_size_window_and_scale_of_attention():
    settings = shown(SelfAttention(head_dim=64, scaling=64**-0.5, sliding_window=512))
    assert (settings.head_dim, settings.softmax_scale, settings.sliding_window) == ((64,), (0.125,), (512,))


def test_the_base_of_a_rotary_module():
    assert shown(RotaryEmbedding(base=10000)).rope_theta == (10000.0,)


def cosine_and_sine(table: torch.Tensor, num_positions: int = 50, factor: float = 1.0):
    angles = torch.arange(num_positions)[:, None] * table
    return factor * angles.cos(), factor * angles.sin()


def tables():
    cos, sin = cosine_and_sine(frequencies())
    scaled = cosine_and_sine(frequencies(), factor=1.3)
    twice = [torch.cat((x, x), dim=-1) for x in (cos, sin)]
    neighbours = [x.repeat_interleave(2, dim=-1) for x in (cos, sin)]
    yield "inverse frequencies", {"inv_freq": frequencies()}
    yield "of a type of layer", {"full_attention_inv_freq": frequencies()}
    yield "cosine and sine", {"cos": cos, "sin": sin}
    yield "each angle twice", dict(zip(("cos_cached", "sin_cached"), twice, strict=True))
    yield "for neighbours", dict(zip(("cos", "sin"), neighbours, strict=True))
    yield "one tensor, times a factor", {"cos_sin_cache": torch.cat(scaled, dim=-1)}


@pytest.mark.parametrize(("buffers"), [pytest.param(held, id=name) for name, held in tables()])
def test_frequencies_and_theta_follow_from_the_numbers(buffers):
    settings = shown(UnknownModule(**buffers))
    (table,) = settings.rope_frequencies
    torch.testing.assert_close(torch.tensor(table), frequencies(), rtol=1e-5, atol=0)
    assert settings.rope_theta == (THETA,)


def test_a_scaled_table_shows_no_theta():
    settings = shown(UnknownModule(inv_freq=frequencies() / 4))
    assert settings.rope_theta == ()
    assert len(settings.rope_frequencies) == 1


NOT_UNDERSTOOD = {
    "a small number of no norm": UnknownModule(eps=1e-8),
    "a tensor for a number": RMSNorm(eps=torch.tensor(1e-6)),
    "no eps": RMSNorm(eps=None),
    "a switch": SelfAttention(sliding_window=True),
    "no window": SelfAttention(sliding_window=-1),
    "bounds of a window": SelfAttention(sliding_window=(511, 0)),
    "a scale that stands in the weights": SelfAttention(scaling=1.0),
    "a scale for powers of two": SelfAttention(scaling=256**-0.5 * 1.4426950408889634),
    "the head size of no attention": UnknownModule(head_dim=64),
    "frequencies that were rounded": UnknownModule(inv_freq=frequencies().bfloat16()),
    "frequencies without values": UnknownModule(inv_freq=frequencies().to("meta")),
    "frequencies of two dimensions": UnknownModule(inv_freq=frequencies()[None]),
    "cosines of something else": UnknownModule(cos=torch.rand(50, 8), sin=torch.rand(50, 8)),
    "tables that were rounded": UnknownModule(cos_sin_cache=torch.cat(cosine_and_sine(frequencies()), dim=-1).half()),
    "tables that are not filled": UnknownModule(cos=torch.ones(50, 8), sin=torch.zeros(50, 8)),
    "frequencies that are not filled": UnknownModule(inv_freq=torch.zeros(8)),
    "a short table": UnknownModule(cos=torch.ones(1, 8), sin=torch.zeros(1, 8)),
    "tables of unequal shapes": UnknownModule(cos=torch.ones(50, 8), sin=torch.zeros(50, 4)),
    "the base of no rotary": UnknownModule(base=10000),
}


@pytest.mark.parametrize("module", [pytest.param(module, id=name) for name, module in NOT_UNDERSTOOD.items()])
def test_what_is_not_understood_is_left_out(module):
    assert shown(module) == ModelSettings()
