"""Which heads of a fused product a rotation reads."""

import torch

from harness.judge.explain.rotary.rotation import heads_read

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
