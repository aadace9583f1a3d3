"""Attention with every part of it open to change, against torch's own."""

import pytest
import torch

from harness.judge.compare.align import Rows
from harness.judge.compare.evidence import AttentionContext

GENERATOR = torch.Generator().manual_seed(5)
LENGTH, HEADS, KV_HEADS, HEAD_DIM = 6, 4, 2, 8


def random(*shape):
    return torch.randn(*shape, generator=GENERATOR, dtype=torch.float64)


QUERY, KEY, VALUE = random(LENGTH, HEADS, HEAD_DIM), *(random(LENGTH, KV_HEADS, HEAD_DIM) for _ in range(2))


def view(step=None, key_step=None, **parts):
    given = {"window": None, "scale": HEAD_DIM**-0.5, **parts}
    zeros = torch.zeros(LENGTH, dtype=torch.int64)
    rows = Rows(request=zeros, position=torch.arange(LENGTH), step=zeros if step is None else torch.tensor(step))
    return AttentionContext(
        rows=rows,
        query=QUERY,
        key=KEY,
        value=VALUE,
        key_step=zeros if key_step is None else torch.tensor(key_step),
        **given,
    )


def sdpa(mask, *, scale=HEAD_DIM**-0.5, key=KEY, value=VALUE, heads=(0, 0, 1, 1)):
    q, k, v = QUERY.transpose(0, 1), *(x[:, list(heads)].transpose(0, 1) for x in (key, value))
    attended = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    return attended.transpose(0, 1).flatten(1)


CAUSAL = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()


def test_the_definition_is_torchs():
    assert torch.allclose(view().attend(), sdpa(CAUSAL))


def test_a_window_hides_what_lies_before_it():
    distance = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)
    assert torch.allclose(view(window=3).attend(), sdpa(CAUSAL & (distance < 3)))
    assert view(window=3).visible()[5].tolist() == [False] * 3 + [True] * 3


@pytest.mark.parametrize("change", [
    {"scale": 0.1}, {"key": random(LENGTH, KV_HEADS, HEAD_DIM)}, {"value": random(LENGTH, KV_HEADS, HEAD_DIM)},
])  # fmt: skip
def test_a_part_is_replaced(change):
    assert torch.allclose(view().attend(**change), sdpa(CAUSAL, **change))


def test_query_heads_may_read_other_kv_heads():
    heads = torch.tensor([1, 0, 0, 1])
    assert torch.allclose(view().attend(heads=heads), sdpa(CAUSAL, heads=heads.tolist()))


def test_a_row_that_sees_nothing_is_zero():
    mask = CAUSAL.clone()
    mask[2] = False
    assert view().attend(visible=mask)[2].abs().max() == 0


def test_sinks_take_their_share_and_give_nothing():
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=torch.float64)
    plain, with_sinks = (item.attend().unflatten(1, (HEADS, -1)) for item in (view(), view(sinks=sinks)))
    weights = view().scores().masked_fill(~CAUSAL, -torch.inf).exp().sum(dim=-1).T
    share = weights / (weights + sinks.exp())
    assert torch.allclose(with_sinks, plain * share[..., None])


def test_a_soft_cap_bounds_the_scores():
    capped = view(softcap=0.7).scores()
    assert torch.allclose(capped, 0.7 * torch.tanh(view().scores() / 0.7))


def test_which_keys_a_step_has_and_where_it_begins():
    steps = [0, 0, 0, 1, 1, 2]
    own = view(step=steps, key_step=steps)
    assert own.first_of_step.tolist() == [0, 0, 0, 3, 3, 5]
    assert own.is_computed[3].tolist() == [True] * 5 + [False]
    assert own.is_computed[0].tolist() == [True] * 3 + [False] * 3


def test_selected_rows_keep_their_history():
    keep = torch.tensor([False, True, False, False, True, False])
    assert torch.allclose(view().select(keep).attend(), view().attend()[keep])
    assert view().select(keep).rows.position.tolist() == [1, 4]
