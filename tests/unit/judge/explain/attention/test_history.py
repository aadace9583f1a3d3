"""A history that is read from elsewhere, planted in recordings of the reference engine."""

import torch

from harness.errors import Code

from ..conftest import BLOCK_SIZE

TAP = "model.layers.1.attention"
Q, K, V = "model.layers.1.q_rope", "model.layers.1.k_rope", "model.layers.1.self_attn.v_proj"


def attended(bench, key, value):
    """Attention of every row in float64, over these keys and values of all rows."""
    rows, size = bench.rows(), bench.head_dim
    q, k, v = (x.unflatten(1, (-1, size)) for x in (bench.tap(Q), key, value))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = torch.einsum("tnh,snh->nts", q, k) * size**-0.5
    is_seen = (rows.request[:, None] == rows.request) & (rows.position <= rows.position[:, None])
    weights = scores.masked_fill(~is_seen, -torch.inf).softmax(-1)
    return torch.einsum("nts,snh->tnh", weights, v).flatten(1)


def moved(bench, source, target):
    """Keys and values of all rows, with those of some positions of request 0 in the place of others."""
    rows, tensors = bench.rows(), [bench.tap(name) for name in (K, V)]
    for tensor in tensors:
        content = tensor.clone()
        for here, there in zip(source, target, strict=True):
            tensor[(rows.request == 0) & (rows.position == there)] = content[
                (rows.request == 0) & (rows.position == here)
            ]
    return tensors


def only_decode(bench, tensor):
    """The wrong rows are request 0's decode rows; the rest is right."""
    rows, result = bench.rows(), bench.tap(TAP)
    decode = (rows.request == 0) & (rows.position >= 37)
    result[decode] = tensor[decode]
    return result


def test_one_block_read_from_another_place(bench):
    key, value = moved(bench, range(8), range(8, 16))
    explanation = bench.explain(TAP, only_decode(bench, attended(bench, key, value)))
    assert explanation.cause == "reads one block of its history from a wrong place"
    begins = "the first bad row is at position 37 of request 0, where decode begins"
    assert explanation.detail == f"block 1 of the table is read from its own block 0; {begins}"
    assert explanation.scope == "decode rows of request 0"
    place = explanation.provenance
    assert (place.layer, place.request, place.position) == (1, 0, BLOCK_SIZE)
    assert place.holds == "the key of request 0, position 0"
    assert place.slot == place.block * BLOCK_SIZE


def test_rows_that_are_not_finite(bench):
    wrong = bench.tap(TAP)
    wrong[-1] = torch.nan
    explanation = bench.explain(TAP, wrong, code=Code.NOT_FINITE)
    assert explanation.cause.startswith(
        "not finite though all that it should read is: reads past the context length, or "
    )
    assert not explanation.is_cause
