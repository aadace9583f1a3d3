import copy

import pytest
import torch

TAP, SOURCE = "model.layers.1.k_rope", "model.layers.1.self_attn.k_norm"


def rotated(bench, positions, *, theta=None, table=None, source=SOURCE, share=1.0):
    """Half-split rotation in float64, angles in float32 as HF has them."""
    x = bench.tap(source).unflatten(1, (-1, bench.head_dim))
    dim = int(bench.head_dim * share)
    theta = theta or bench.config.rope_parameters["rope_theta"]
    frequencies = 1.0 / (theta ** (torch.arange(0, dim, 2, dtype=torch.float) / dim))
    angles = (positions[:, None].float() * frequencies)[:, None].double()
    cos, sin = (f.to(table).double() if table else f for f in (angles.cos(), angles.sin()))
    a, b = x[..., :dim].chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin, x[..., dim:]), dim=-1).flatten(1)


def test_neighbouring_pairs(bench):
    bench = bench()
    x = bench.tap(SOURCE).unflatten(1, (-1, bench.head_dim))
    half_split = rotated(bench, bench.rows().position).unflatten(1, (-1, bench.head_dim))
    assert torch.allclose(half_split.flatten(1), bench.tap(TAP), atol=1e-5)
    frequencies = bench.hf.model.model.rotary_emb.inv_freq
    angles = (bench.rows().position[:, None].float() * frequencies)[:, None].double()
    a, b = x[..., ::2], x[..., 1::2]
    turned = torch.stack((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), -1)
    found = bench.explain(TAP, turned.flatten(1))
    assert "neighbouring pairs (interleaved)" in found.cause
    assert found.scope == "every row but those at position 0"
    assert found.residual_before > 1e6
    assert found.residual_after < 3
    assert found.num_explained == found.num_rows


@pytest.mark.parametrize("offset", [1, -1])
def test_decode_rows_at_a_position_off_by_one(bench, offset):
    bench = bench()
    rows = bench.rows()
    lengths = torch.tensor([request.prompt_length for request in bench.golden.requests])[rows.request]
    is_decode = rows.position >= lengths
    found = bench.explain(TAP, rotated(bench, rows.position + offset * is_decode))
    assert found.cause == f"rotary at a position off by one ({offset:+d})"
    assert found.scope == "decode rows"


def test_every_position_off_by_one(bench):
    bench = bench()
    found = bench.explain(TAP, rotated(bench, bench.rows().position + 1))
    assert (found.cause, found.scope) == ("rotary at a position off by one (+1)", "every row")


def test_the_offset_of_a_chunk_forgotten(bench):
    bench = bench(schedule="chunked")
    rows = bench.rows()
    keys = rows.step * 100 + rows.request
    first = torch.stack([rows.position[keys == key].min() for key in keys])
    lengths = torch.tensor([request.prompt_length for request in bench.golden.requests])[rows.request]
    found = bench.explain(
        TAP, rotated(bench, torch.where(rows.position < lengths, rows.position - first, rows.position))
    )
    assert found.cause == "positions restart at 0 in every step: the chunk's offset is forgotten"
    assert found.scope == "rows of a prompt after its first chunk"


def test_positions_that_run_on_through_the_batch(bench):
    bench = bench()
    rows = bench.rows()
    first_step = rows.step == rows.step.min()
    found = bench.explain(TAP, rotated(bench, torch.where(first_step, torch.arange(len(rows)), rows.position)))
    assert found.cause == "positions run on through the batch instead of restarting for each request"
    assert "request 1" in found.scope


@pytest.mark.parametrize("theta", [10000.0, 31000.0])
def test_wrong_theta(bench, theta):
    bench = bench()
    found = bench.explain(TAP, rotated(bench, bench.rows().position, theta=theta))
    assert found.cause == f"wrong rope theta: {theta:g} instead of 1e+06"


@pytest.mark.parametrize("theta", [20000.0, 31000.0])
def test_wrong_theta_with_the_factors_of_the_right_one(bench, theta):
    bench = bench("llama-tiny")
    x = bench.tap("model.layers.1.self_attn.k_proj").unflatten(1, (-1, bench.head_dim))
    meant = bench.config.rope_parameters["rope_theta"]
    exponents = torch.arange(bench.head_dim // 2).double() / (bench.head_dim // 2)
    frequencies = (bench.hf.model.model.rotary_emb.inv_freq * (meant / theta) ** exponents).float()
    angles = (bench.rows().position[:, None].float() * frequencies)[:, None].double()
    a, b = x.chunk(2, dim=-1)
    turned = torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), dim=-1).flatten(1)
    found = bench.explain(TAP, turned)
    assert found.cause == f"wrong rope theta: {theta:g} instead of 10000"
    assert found.detail == "the factors of the rope scaling are kept"


def test_scaling_ignored(bench):
    bench = bench("llama-tiny")
    unscaled = rotated(bench, bench.rows().position, source="model.layers.1.self_attn.k_proj")
    found = bench.explain(TAP, unscaled)
    assert found.cause == "rope scaling (llama3) is ignored"


def test_partial_rotary(bench):
    bench = bench()
    found = bench.explain(TAP, rotated(bench, bench.rows().position, share=0.5))
    assert found.cause == "partial rotary: the first 16 of 32 elements turn"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_coarse_table(bench, dtype):
    bench = bench()
    found = bench.explain(TAP, rotated(bench, bench.rows().position, table=dtype))
    assert found.cause == f"cos/sin table in {str(dtype).removeprefix('torch.')}"


def test_not_applied_and_backwards(bench):
    bench = bench()
    assert bench.explain(TAP, bench.tap(SOURCE)).cause == "rotary is not applied"
    assert "backwards" in bench.explain(TAP, rotated(bench, -bench.rows().position)).cause


def test_rows_at_the_position_of_the_row_before(bench):
    bench = bench()
    rows, shifted = bench.rows(), bench.rows().position.clone()
    for step in rows.step.unique():
        here = rows.step == step
        shifted[here] = rows.position[here].roll(1)
    assert "row before it in the batch" in bench.explain(TAP, rotated(bench, shifted)).cause


@pytest.mark.parametrize("factor", [4.0, 0.5, 5.7])
def test_a_scaling_that_is_not_asked_for(bench, factor):
    bench = bench()
    found = bench.explain(TAP, rotated(bench, bench.rows().position / factor))
    assert found.cause == f"rope scaling: linear with factor {factor:g}, which config.json does not ask for"
    assert found.num_fitted == (factor == 5.7)


def test_the_factor_of_a_scaling(bench):
    bench = bench("llama-tiny")
    parameters = {**bench.config.rope_parameters, "factor": 32.0}
    config = copy.deepcopy(bench.config)
    config.rope_parameters = parameters
    frequencies = type(bench.hf.model.model.rotary_emb)(config).inv_freq
    x = bench.tap("model.layers.1.self_attn.k_proj").unflatten(1, (-1, bench.head_dim))
    angles = (bench.rows().position[:, None].float() * frequencies)[:, None].double()
    a, b = x.chunk(2, dim=-1)
    turned = torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), dim=-1)
    assert bench.explain(TAP, turned.flatten(1)).cause == "rope scaling: factor is 32 instead of 8"


def test_positions_of_a_padded_batch(bench):
    bench = bench()
    rows = bench.rows()
    found = bench.explain(TAP, rotated(bench, rows.position + torch.where(rows.request == 0, 3, 29)))
    assert found.cause.endswith("each request has for itself: +3 in request 0, +29 in request 1")


def test_positions_without_a_rule_are_no_cause(bench):
    bench = bench()
    rows = bench.rows()
    found = bench.explain(TAP, rotated(bench, (rows.position * 7 + 3) % 40))
    assert found.cause == "rotary at wrong positions"
    assert not found.is_cause


def turned(bench, frequencies=None, tables=None):
    """Half-split rotation in float64 by other frequencies [P], or by other tables than cosine and sine."""
    own = bench.hf.model.model.rotary_emb.inv_freq.clone()
    frequencies = own if frequencies is None else frequencies(own)
    angles = (bench.rows().position[:, None].float() * frequencies)[:, None].double()
    cos, sin = (tables or (lambda a: (a.cos(), a.sin())))(angles)
    a, b = bench.tap(SOURCE).unflatten(1, (-1, bench.head_dim)).chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pairs_that_do_not_turn(bench, dtype):
    bench = bench(dtype=dtype)

    def last_zero(own):
        return torch.where(torch.arange(len(own)) < 3, own, 0)

    found = bench.explain(TAP, turned(bench, last_zero))
    assert found.cause == "some pairs of a head do not turn: their frequencies are zero"
    assert found.detail.startswith("pairs 3 to ")
    assert found.num_fitted <= 2


@pytest.mark.parametrize("order", [lambda own: own.flip(0), lambda own: own.roll(1)], ids=["flipped", "rolled"])
def test_frequencies_in_another_order(bench, order):
    """Where a pair turns as the slowest one should, which hardly turns at all, it does turn."""
    bench = bench()
    found = bench.explain(TAP, turned(bench, order))
    assert (found.cause, found.is_cause) == ("the frequencies of the pairs are in another order", True)


def test_a_pair_of_its_own_frequency_is_none_of_the_others(bench):
    bench = bench()

    def third_faster(own):
        return own * (1 + 0.5 * (torch.arange(len(own)) == 2))

    assert "pairs" not in bench.explain(TAP, turned(bench, third_faster)).cause


def test_other_tables_than_cosine_and_sine(bench):
    bench = bench()
    for cause, tables in {
        "cosine and sine of the rotary table are exchanged": lambda a: (a.sin(), a.cos()),
        "the rotary table's sine is left out: only the cosine is applied": lambda a: (a.cos(), 0 * a),
        "the rotary table's cosine is left out: only the sine is applied": lambda a: (0 * a, a.sin()),
    }.items():
        assert bench.explain(TAP, turned(bench, tables=tables)).cause == cause


def test_positions_that_stop_or_begin_again(bench):
    bench = bench()
    positions = bench.rows().position
    found = bench.explain(TAP, rotated(bench, positions.clamp(max=20)))
    assert found.cause == "positions stop at 20: rows after it are all rotated for it"
    for length in (16, 30):
        found = bench.explain(TAP, rotated(bench, positions % length))
        assert found.cause == f"positions begin at 0 again after {length - 1}: they are taken modulo {length}"
