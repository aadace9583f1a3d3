"""Which heads of a fused product a rotation reads."""

from types import SimpleNamespace

import torch

from harness.formats.taps import Kind, Operation
from harness.judge.explain.rotary import rotation
from harness.judge.explain.rotary.rotation import heads_read, parts_turned

from ..toys import ToyModel, by_cause, failure_of

H, ROWS = 8, 5


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def turned(heads):
    """Turn each row [R, N, H] by an angle of its own, and scale all of them."""
    angle = torch.arange(len(heads), dtype=torch.float64)[:, None, None]
    a, b = heads.chunk(2, dim=-1)
    return 1.3 * torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), dim=-1)


def test_heads_of_a_product_that_holds_q_k_and_v_by_head():
    fused = random(ROWS, 4, 3, H)
    for part in (0, 1):
        read = heads_read(fused.flatten(1), turned(fused[:, :, part]).flatten(1), H)
        assert torch.equal(read, fused[:, :, part].flatten(1))


def test_what_is_not_known_stays_as_it_is():
    fused, queries = random(ROWS, 6 * H), random(ROWS, 2 * H, seed=1)
    assert heads_read(fused, queries, H) is fused  # no head has these norms
    assert heads_read(fused[:1], fused[:1, : 2 * H], H).shape == (1, 6 * H)  # one row does not tell
    assert heads_read(fused[:, :20], queries, H).shape == (ROWS, 20)
    assert heads_read(queries, queries, H) is queries


def test_heads_of_latent_attention():
    """Of each head of 24 the last 8 are turned, for keys all alike; what is not turned stays in every hypothesis."""
    model = ToyModel(head_dim=H)
    model.model.rotary_emb = SimpleNamespace()
    module = torch.nn.Module()
    module.register_buffer("inv_freq", torch.tensor([1.0, 0.1, 0.01, 0.001]))
    model.model.add_module("rotary", module)
    up, latent = random(ROWS, 2, 4 * H), random(ROWS, 5 * H, seed=1)
    a, b = latent[:, None, 4 * H :].chunk(2, dim=-1)
    angle = torch.arange(ROWS)[:, None, None] * module.inv_freq.double()
    expected = torch.cat(
        (
            up[..., : 2 * H],
            torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), -1).expand(-1, 2, -1),
        ),
        -1,
    ).flatten(1)
    plain = torch.cat((up[..., : 2 * H], latent[:, None, 4 * H :].expand(-1, 2, -1)), -1).flatten(1)
    operation = Operation(tap="k_rope", kind=Kind.ROTARY, inputs=("kv_b", "kv_a"), source="k_rope")
    failure = failure_of(operation, plain, expected, up.flatten(1), latent, model=model)
    ((part, where),) = parts_turned(failure)
    assert where[1].tolist() == [at % (3 * H) >= 2 * H for at in range(6 * H)]
    assert part.rotation is not None
    torch.testing.assert_close(by_cause(rotation.not_rotated, failure)["rotary is not applied"].output, plain)
    backwards = by_cause(rotation.backwards, failure)["rotary turns backwards (sign of the sine)"].output
    assert torch.equal(backwards[:, ~where[1]], expected[:, ~where[1]])
    assert by_cause(rotation.backwards, failure_of(operation, plain, plain, up.flatten(1), latent, model=model)) == {}
