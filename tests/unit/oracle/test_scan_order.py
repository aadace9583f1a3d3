"""Sums of decays in any order: how far they may be off, what is left alone, and what a check makes of it."""

import pytest
import torch
from transformers import Mamba2Config, Mamba2ForCausalLM

import harness
from harness.oracle.scan_order import ScanInAnyChunks

CHUNK = 16
UNIT = torch.finfo(torch.float32).eps / 2


def decays() -> torch.Tensor:
    """[1, 1, 3 chunks, 16 tokens] logarithms of decays; one token of each chunk forgets everything."""
    x = -torch.rand(1, 1, 3, CHUNK, generator=torch.Generator().manual_seed(0)) / 100
    x[..., 5] = -60.0
    return x


def spans(x: torch.Tensor) -> torch.Tensor:
    """Mask decays as HF's `segment_sum` does before it sums them."""
    return x[..., None].expand(*x.shape, x.shape[-1]).tril(-1)


def sums(x: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the exact sums, and those of the mode."""
    with ScanInAnyChunks():
        rounded = torch.cumsum(x, dim=dim)
    return x.double().cumsum(dim), rounded.double()


def test_each_sum_is_off_by_a_rounding_of_a_whole_chunk():
    exact, rounded = sums(decays(), -1)
    off = (rounded - exact).abs().flatten()
    assert float(off[:5].max()) < UNIT  # nothing large is in the chunk so far
    assert float(off[5:].min()) > 30 * UNIT  # from here on, the latest 16 tokens hold the large one
    assert float(off.max()) < 4 * 64 * UNIT


def test_sums_of_each_channel_are_off_by_a_rounding_of_its_chunk():
    """As of Kimi's delta attention: [1, 1, 3 chunks, 16 tokens, 2 channels], of which one forgets."""
    exact, rounded = sums(torch.stack([decays(), decays().clamp(min=-0.01)], dim=-1), -2)
    off = (rounded - exact).abs().flatten(2, 3)
    assert float(off[0, 0, 5:, 0].min()) > 30 * UNIT
    assert float(off[0, 0, :, 1].max()) < UNIT


def test_spans_are_differences_of_such_sums():
    exact, rounded = sums(spans(decays()), -2)
    off = (rounded - exact).abs()
    small = exact[0, 0, 0, 15, 6:15]  # spans behind the token that forgets everything
    assert float(small.abs().max()) < 0.1
    assert float(off[0, 0, 0, 15, 6:15].max()) > 50 * UNIT
    assert torch.equal(rounded.triu(1), torch.zeros_like(rounded))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int64])
def test_the_rounding_is_that_of_the_dtype_of_the_sums(dtype):
    x = torch.ones(1, 1, 3, CHUNK, dtype=dtype)
    with ScanInAnyChunks():
        rounded = torch.cumsum(x, dim=-1, dtype=torch.float32)
    off = (rounded - x.cumsum(-1, dtype=torch.float32)).abs()
    assert 0 < float(off.max()) <= 2 * CHUNK * UNIT


@pytest.mark.parametrize(
    ("x", "dim"),
    [(decays()[0, 0], -1), (decays().to(torch.int64), -1), (spans(decays())[0], -2), (decays(), 0)],
    ids=["few dimensions", "integers", "sums of whole chunks", "another dimension"],
)
def test_other_sums_are_left_alone(x, dim):
    with ScanInAnyChunks():
        assert torch.equal(torch.cumsum(x, dim=dim), x.cumsum(dim))


@pytest.fixture(scope="module")
def forgetful(tmp_path_factory):
    """A Mamba 2 whose time steps are so large that single tokens forget nearly everything."""
    torch.manual_seed(307)
    sizes = {"hidden_size": 64, "num_heads": 8, "head_dim": 16, "state_size": 8, "n_groups": 1, "chunk_size": CHUNK}
    model = Mamba2ForCausalLM(Mamba2Config(vocab_size=256, num_hidden_layers=1, conv_kernel=4, expand=2, **sizes))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if not any(part in name for part in ("A_log", "dt_bias", ".D", "norm")):
                weight.normal_(0, 0.3)
    folder = tmp_path_factory.mktemp("forgetful")
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("decay", [0.0, 1e-4])
def test_a_state_that_a_prompt_leaves_inside_a_chunk_is_sound(forgetful, decay):
    prompt = torch.randint(3, 256, (57,), generator=torch.Generator().manual_seed(307)).tolist()
    model = Mamba2ForCausalLM.from_pretrained(forgetful, dtype=torch.float32).eval()
    with torch.no_grad():
        model.backbone.layers[0].mixer.A_log += decay
    report = harness.check(
        model, model=forgetful, dtype="float32", prompts=[prompt], max_new_tokens=4, schedules=["plain"]
    )
    assert bool(report) == (decay == 0), report.text()
