"""Every cause of a product against sums that are written out, on a toy graph of seven products."""

from types import SimpleNamespace

import pytest
import torch

from harness.base.numerics import Numerics
from harness.errors import Code
from harness.formats.taps import Kind, Operation
from harness.judge.explain.products import linear
from harness.judge.explain.products import rows as weight_rows

from ..toys import ToyModel, assert_outputs, failure_of, found, outputs, random
from ..toys import linear as product

Q, KV, FAR_Q, FAR_V, GATE, LATER, NARROW, NORM, TABLE = (
    "model.layers.1.self_attn.q_proj", "model.layers.1.self_attn.k_proj", "model.layers.0.self_attn.q_proj",
    "model.layers.0.self_attn.v_proj", "model.layers.1.mlp.gate", "model.layers.2.mlp.up", "model.layers.1.narrow",
    "model.layers.1.norm", "model.embed_tokens",
)  # fmt: skip
ROWS, WIDTH = 5, 6
X = random(ROWS, WIDTH, seed=1)
WEIGHTS = {name: random(WIDTH, WIDTH, seed=10 + at) for at, name in enumerate((Q, KV, FAR_Q, GATE, FAR_V, LATER))}
WEIGHTS[NARROW] = random(4, WIDTH, seed=20)
BIASES = {name: random(len(weight), seed=30 + at) for at, (name, weight) in enumerate(WEIGHTS.items())}


def y(weight, bias=None, x=X):
    """W x + b, an element at a time."""
    rows = [[sum(float(a * b) for a, b in zip(row, out, strict=True)) for out in weight] for row in x]
    return torch.tensor(rows, dtype=torch.float64) + (0 if bias is None else bias)


def of(actual=None, own=Q, *, bias=True, x=X, weights=None, recording=None, kind=Kind.LINEAR, **config):
    weights = {**WEIGHTS, **(weights or {})}
    biases = {name: BIASES[name] if bias else None for name in WEIGHTS}
    inputs = {name: ("x",) if name in (Q, KV, NARROW) else (name,) for name in weights}
    operations = [Operation(tap=TABLE, kind=Kind.EMBEDDING, source=TABLE)] if TABLE in weights else []
    operations += [
        Operation(tap=tap, kind=Kind.LINEAR, inputs=inputs[tap], source=tap) for tap in weights if tap != TABLE
    ]
    operations.append(Operation(tap=NORM, kind=Kind.NORM, source=GATE))
    modules = {tap: product(weight, biases.get(tap)) for tap, weight in weights.items()}
    expected = y(weights[own], biases.get(own), x)
    return failure_of(
        next(op for op in operations if op.tap == own), expected if actual is None else actual, expected, x,
        model=ToyModel(*operations, modules=modules, **config), recording=recording,
    )  # fmt: skip


def test_the_bias():
    right = y(WEIGHTS[Q], BIASES[Q])
    assert_outputs(linear.bias_dropped, of(), {
        "the bias is dropped": right - BIASES[Q], "the bias is added twice": right + BIASES[Q],
    })  # fmt: skip
    assert found(linear.bias_dropped, of(bias=False)) == {}


def test_weights_that_are_zero():
    zero = torch.zeros(ROWS, WIDTH, dtype=torch.float64)
    assert_outputs(linear.zero_weights, of(), {
        "the weights are zero: not loaded": zero + BIASES[Q], "weights and bias are zero: not loaded": zero,
    })  # fmt: skip
    assert_outputs(linear.zero_weights, of(bias=False), {"the weights are zero: not loaded": zero})


@pytest.mark.parametrize("bias", [True, False])
def test_weights_of_another_module_of_the_layer_or_of_the_site(bias):
    expected = {}
    for tap in (KV, FAR_Q, GATE):  # not that of another site of another layer, nor a narrower one, nor a norm's
        expected[f"the weights are those of {tap}"] = y(WEIGHTS[tap], BIASES[tap] if bias else None)
        if bias:
            expected[f"the weight, without its bias, is that of {tap}"] = y(WEIGHTS[tap], BIASES[Q])
    assert_outputs(linear.other_weights, of(bias=bias), expected)


def test_a_head_that_is_tied():
    head, table = random(9, WIDTH, seed=50), random(9, WIDTH, seed=51)
    weights = {"lm_head": head, TABLE: table}
    expected = {"the head is tied to the embedding though it has weights of its own": y(table)}
    assert_outputs(linear.tied_head, of(own="lm_head", weights=weights), expected)
    assert found(linear.tied_head, of(own=Q, weights={TABLE: WEIGHTS[KV]})) == {}
    assert found(linear.tied_head, of(own="lm_head", weights={**weights, TABLE: table[:8]})) == {}
    assert found(linear.tied_head, of(own="lm_head", weights={"lm_head": head})) == {}


def test_the_transpose_of_a_square_weight():
    expected = {"the weight is transposed": y(WEIGHTS[Q].T, BIASES[Q])}
    assert_outputs(linear.transposed, of(), expected)
    assert_outputs(linear.transposed, of(bias=False), {"the weight is transposed": y(WEIGHTS[Q].T)})
    assert found(linear.transposed, of(own=NARROW)) == {}
    tall = random(8, WIDTH, seed=60)
    assert found(linear.transposed, of(own="tall", weights={"tall": tall})) == {}


# Outputs in another order.

OWN, OTHER, THIRD = y(WEIGHTS[Q], BIASES[Q]), y(WEIGHTS[KV], BIASES[KV]), y(WEIGHTS[NARROW], BIASES[NARROW])


@pytest.mark.parametrize(
    ("actual", "cause", "detail", "num_fitted"),
    [
        (
            OWN[:, [3, 4, 5, 0, 1, 2]], "the rows of the weight are in another order",
            "outputs 0-2 from self_attn.q_proj 3-5, 3-5 from self_attn.q_proj 0-2", 2,
        ),
        (OTHER, "the outputs are those of self_attn.k_proj", "outputs 0-5 from self_attn.k_proj 0-5", 1),
        (
            torch.cat((OWN[:, 4:], OTHER[:, :4]), dim=1),
            "the rows of the stacked weight are in the wrong order: outputs of self_attn.k_proj among its own",
            "outputs 0-1 from self_attn.q_proj 4-5, 2-5 from self_attn.k_proj 0-3", 2,
        ),
        (
            torch.cat((OWN[:, :2], THIRD[:, 1:3], OTHER[:, 2:4]), dim=1),
            "the rows of the stacked weight are in the wrong order: outputs of narrow, self_attn.k_proj among its own",
            "outputs 0-1 from self_attn.q_proj 0-1, 2-3 from narrow 1-2, 4-5 from self_attn.k_proj 2-3", 3,
        ),
        (
            OWN[:, [5, 4, 3, 2, 1, 0]], "the rows of the weight are in another order",
            "outputs 0-0 from self_attn.q_proj 5-5, 1-1 from self_attn.q_proj 4-4, 2-2 from self_attn.q_proj 3-3, "
            "3-3 from self_attn.q_proj 2-2 and 2 more runs", 6,
        ),
        (
            OWN[:, [2, 3, 1, 0, 4, 5]], "the rows of the weight are in another order",
            "outputs 0-1 from self_attn.q_proj 2-3, 2-2 from self_attn.q_proj 1-1, 3-3 from self_attn.q_proj 0-0, "
            "4-5 from self_attn.q_proj 4-5", 4,
        ),
    ],
)  # fmt: skip
def test_outputs_in_another_order(actual, cause, detail, num_fitted):
    (hypothesis,) = found(linear.outputs_in_another_order, of(actual)).values()
    assert (hypothesis.cause, hypothesis.detail, hypothesis.num_fitted) == (cause, detail, num_fitted)
    torch.testing.assert_close(hypothesis.output, actual)


@pytest.mark.parametrize("bias", [True, False])
def test_a_weight_in_another_order_than_its_bias(bias):
    order = [3, 4, 5, 0, 1, 2]
    given = found(linear.weight_in_another_order, of(y(WEIGHTS[Q][order], BIASES[Q] if bias else None), bias=bias))
    cause = "the rows of the weight are in another order, and those of its bias are not"
    assert set(given) == ({cause} if bias else set())
    if bias:
        torch.testing.assert_close(given[cause].output, y(WEIGHTS[Q][order], BIASES[Q]))
        assert found(linear.weight_in_another_order, of()) == {}


def test_parts_of_the_inputs():
    given = outputs(linear.part_of_the_inputs, of())
    assert len(given) == 2 + 3  # of six inputs, halves alone are parts
    weight = WEIGHTS[Q]
    for at, here in ((1, slice(0, 3)), (2, slice(3, 6))):
        zero, twice = weight.clone(), weight.clone()
        zero[:, here], twice[:, here] = 0, 2 * weight[:, here]
        name = f"part {at} of 2 of the inputs is"
        torch.testing.assert_close(given[f"{name} not summed, as if a rank were left out"], y(zero, BIASES[Q]))
        torch.testing.assert_close(given[f"{name} summed twice"], y(twice, BIASES[Q]))
    first = torch.cat((weight[:, :3], weight[:, :3]), dim=1)
    torch.testing.assert_close(
        given["part 2 of 2 of the inputs is multiplied by the weights of part 1"], y(first, BIASES[Q])
    )


def test_an_update_of_low_rank():
    rows, weight = random(12, WIDTH, seed=7), random(9, WIDTH, seed=8)
    update = random(9, 1, seed=3) @ random(1, WIDTH, seed=4)
    own = {"own": "wide", "weights": {"wide": weight}, "x": rows}
    (hypothesis,) = found(linear.low_rank_update, of(y(weight + update, x=rows), **own)).values()
    assert (
        hypothesis.cause == "an update of rank 1 is added to the weight: an adapter that is merged, or is still merged"
    )
    torch.testing.assert_close(hypothesis.output, y(weight + update, x=rows))
    assert hypothesis.is_fallback
    assert hypothesis.num_fitted >= WIDTH
    others = found(linear.low_rank_update, of(y(random(9, WIDTH, seed=9), x=rows), **own)).values()
    assert all(float((item.output - y(random(9, WIDTH, seed=9), x=rows)).norm()) > 0.1 for item in others)
    assert found(linear.low_rank_update, of(y(weight + update, x=rows[:3]), **{**own, "x": rows[:3]})) == {}
    same = rows[:3].repeat(4, 1)
    any_other = random(9, WIDTH, seed=9)
    assert found(linear.low_rank_update, of(y(any_other, x=same), **{**own, "x": same})) == {}, "of three tokens alone"
    grows = y(weight, x=rows) + torch.arange(12)[:, None] * random(9, seed=5)
    (other,) = found(linear.low_rank_update, of(grows, **own)).values()
    assert float((other.output - grows).norm()) > 0.1 * float(grows.norm()), "what is not linear in the inputs is left"
    few = rows[:9]
    (unsure,) = found(linear.low_rank_update, of(y(weight + update, x=few), **{**own, "x": few})).values()
    assert (hypothesis.is_cause, unsure.is_cause) == (True, False)


def test_heads_that_are_interleaved_on_purpose():
    """Three heads of 2 are in order; 2 heads of 4 are merged halves: what neighbouring pairs need."""
    order = torch.tensor([0, 2, 1, 3, 4, 6, 5, 7])
    assert linear._is_interleaved(order, 4)
    assert not linear._is_interleaved(order, 8)
    assert not linear._is_interleaved(order, 3)
    assert not linear._is_interleaved(torch.arange(8), 4)


def test_a_run_ends_where_the_next_module_begins():
    """The last output of q and the first of k lie side by side in the pool, and in no module."""
    actual = torch.cat((OWN[:, 2:], OTHER[:, :2]), dim=1)
    (hypothesis,) = found(linear.outputs_in_another_order, of(actual)).values()
    assert hypothesis.detail == "outputs 0-3 from self_attn.q_proj 2-5, 4-5 from self_attn.k_proj 0-1"


def test_outputs_in_their_own_order_and_what_cannot_be_matched(monkeypatch):
    wrong = OWN.flip(1)
    assert found(linear.outputs_in_another_order, of()) == {}
    assert found(linear.outputs_in_another_order, of(wrong[:2], x=X[:2]))
    assert found(linear.outputs_in_another_order, of(wrong[:1], x=X[:1])) == {}, "by chance"
    for most, is_matched in ((16, True), (15, False)):  # two products of six outputs and one of four
        monkeypatch.setattr(linear, "_MAX_MATCHED", most)
        assert bool(found(linear.outputs_in_another_order, of(wrong))) == is_matched


# One element.


@pytest.mark.parametrize("rows", [5, 3])
def test_one_element_of_the_weight(rows):
    changed = WEIGHTS[Q].clone()
    changed[4, 1] += 2.5
    failure = of(y(changed, BIASES[Q], X[:rows]), x=X[:rows])
    (hypothesis,) = found(linear.one_weight, failure).values()
    assert hypothesis.cause == "one element of the weight is another: [4, 1]"
    own = float(WEIGHTS[Q][4, 1])
    assert hypothesis.detail == f"it is {own + 2.5:.4g} instead of {own:.4g}"
    assert hypothesis.num_fitted == 3
    torch.testing.assert_close(hypothesis.output, failure.actual)


def test_two_rows_do_not_tell_one_element():
    assert found(linear.one_weight, of(x=X[:2])) == {}


def test_inputs_of_zeros_have_no_element():
    x = X.clone()
    x[:, 0] = 0
    changed = WEIGHTS[Q].clone()
    changed[2, 5] -= 1
    (hypothesis,) = found(linear.one_weight, of(y(changed, BIASES[Q], x), x=x)).values()
    assert hypothesis.cause == "one element of the weight is another: [2, 5]"


# Coarser formats.


def levels(values, largest=127):
    """Eight bits of numbers that share a scale."""
    scale = max(abs(value) for value in values) / largest
    return [round(value / scale) * scale for value in values]


def by_rows(x, size=None):
    rows = []
    for row in x.tolist():
        pieces = [row[at : at + (size or len(row))] for at in range(0, len(row), size or len(row))]
        rows.append([value for piece in pieces for value in levels(piece)])
    return torch.tensor(rows, dtype=torch.float64)


def eighth(x, dtype, scale):
    return (x / scale).float().to(dtype).double() * scale


def manifest(device="cpu"):
    return SimpleNamespace(manifest=SimpleNamespace(device=device))


def coarse(dtype):
    return lambda x: x.to(dtype).double()


def test_a_coarser_weight_or_input():
    """Of 32 inputs, so that groups of 16 share a scale."""
    x, weight, bias = random(3, 32, seed=70), random(WIDTH, 32, seed=71), BIASES[Q]
    e4, e5 = torch.float8_e4m3fn, torch.float8_e5m2
    own = weight.abs().amax()
    each = weight.abs().amax(dim=1, keepdim=True)
    weights = {
        "in bfloat16": coarse(torch.bfloat16)(weight),
        "in float16": coarse(torch.float16)(weight),
        "in int8, with one scale for each output": by_rows(weight),
        "in int8, with one scale for all of it": by_rows(weight.flatten()[None]).view_as(weight),
        "in int8, with one scale for 16 inputs": by_rows(weight, 16),
        **{
            f"in {name}, without a scale": coarse(dtype)(weight)
            for name, dtype in (("float8_e4m3fn", e4), ("float8_e5m2", e5))
        },
        "in float8_e4m3fn, with one scale for all of it": eighth(weight, e4, own / 448),
        "in float8_e5m2, with one scale for all of it": eighth(weight, e5, own / 57344),
        "in float8_e4m3fn, with one scale for each output": eighth(weight, e4, each / 448),
        "in float8_e5m2, with one scale for each output": eighth(weight, e5, each / 57344),
    }
    expected = {f"the weight is {name}": y(changed, bias, x) for name, changed in weights.items()}
    tokens = {
        "in int8": ("int8, with one scale for each token", by_rows(x)),
        "in float8_e4m3fn": (
            "float8_e4m3fn, with one scale for each token", eighth(x, e4, x.abs().amax(dim=1, keepdim=True) / 448),
        ),
    }  # fmt: skip
    for name, changed in weights.items():
        for start, (what, inputs) in tokens.items():
            if name.startswith(start):
                expected[f"the weight is {name}, and the input in {what}"] = y(changed, bias, inputs)
    for name, dtype in (("bfloat16", torch.bfloat16), ("float16", torch.float16)):
        low = coarse(dtype)
        expected[f"the product is of inputs in {name}"] = y(low(weight), bias, low(x))
        expected[f"the input of the product is rounded to {name}, and the weight is not"] = y(weight, bias, low(x))
    input_in = "the input of the product is in int8, with one scale"
    expected[f"{input_in} for each token"] = y(weight, bias, by_rows(x))
    expected[f"{input_in} for 16 inputs"] = y(weight, bias, by_rows(x, 16))
    scales = x.unflatten(1, (2, 16)).abs().amax(dim=2, keepdim=True) / 127
    ratio = (scales.float().half().double() / scales).expand(3, 2, 16).flatten(1)
    expected[f"{input_in} in float16 for 16 inputs"] = y(weight, bias, by_rows(x, 16) * ratio)
    failure = of(own=Q, weights={Q: weight}, x=x, recording=manifest())
    actual = outputs(linear.coarse_product, failure)
    assert {cause for cause in actual if "cut off" not in cause} == set(expected)
    assert {cause for cause in actual if "cut off" in cause} == {
        f"the weight is cut off to {name} instead of rounded" for name in ("bfloat16", "float16")
    }
    for cause, rows in expected.items():
        torch.testing.assert_close(actual[cause], rows, rtol=1e-9, atol=1e-9, msg=cause)


def test_formats_that_weight_or_input_are_in_already():
    weight = coarse(torch.bfloat16)(WEIGHTS[Q])
    x = coarse(torch.bfloat16)(X)
    causes = set(found(linear.coarse_product, of(weights={Q: weight}, x=x, recording=manifest())))
    assert not {cause for cause in causes if "bfloat16" in cause}
    assert "the weight is in int8, with one scale for each output" in causes, "what comes after it is tried"
    causes = set(found(linear.coarse_product, of(weights={Q: weight}, recording=manifest())))
    assert "the product is of inputs in bfloat16" in causes
    assert "the input of the product is rounded to bfloat16, and the weight is not" not in causes


def test_tf32_has_ten_bits_and_is_no_cpus():
    """A number plus what its last bit is worth is kept, and what is less than half of that is dropped."""
    assert not any("TF32" in cause for cause in found(linear.coarse_product, of(recording=manifest("cpu"))))
    x = torch.tensor([[1 + 2**-10, 1 + 0.4 * 2**-10, -3 - 2**-9, 5e-30, 0.0, 1 + 0.6 * 2**-10]], dtype=torch.float64)
    kept = torch.tensor([[1 + 2**-10, 1.0, -3 - 2**-9, 5e-30, 0.0, 1 + 2**-10]], dtype=torch.float64)
    weight = 1 + torch.eye(6, dtype=torch.float64)
    for device in ("cuda", "xpu", "a"):
        given = found(linear.coarse_product, of(weights={Q: weight}, x=x, bias=False, recording=manifest(device)))
        torch.testing.assert_close(
            given["the product is of inputs in TF32"].output, y(weight, x=kept), rtol=1e-12, atol=0
        )


def test_a_weight_of_another_width_than_its_input_is_left_alone():
    wide = random(ROWS, WIDTH + 1)
    failure = of(recording=manifest())
    failure = type(failure)(**{**vars(failure), "inputs": [wide]})
    assert found(linear.coarse_product, failure) == {}
    assert found(linear.sums_in_16_bits, failure) == {}


@pytest.mark.parametrize("explain", [
    linear.other_weights, linear.transposed, linear.one_weight, linear.coarse_product, linear.sums_in_16_bits,
])  # fmt: skip
def test_a_product_without_a_weight_is_left_alone(explain):
    failure = of(recording=manifest())
    failure.hf.modules[Q] = torch.nn.Identity()
    assert found(explain, failure) == {}


@pytest.mark.parametrize("bias", [True, False])
def test_sums_that_are_kept_in_16_bits(bias):
    failure = of(bias=bias)
    given = {(h.cause, h.detail): h.output for h in linear.sums_in_16_bits(failure)}
    expected = {}
    for name, dtype in (("bfloat16", torch.bfloat16), ("float16", torch.float16)):
        for size in (1, 2, 4):  # of six inputs
            total = torch.zeros(ROWS, WIDTH, dtype=dtype)
            for at in range(0, WIDTH, size):
                part = y(WEIGHTS[Q][:, at : at + size], x=X[:, at : at + size]).to(dtype)
                total = (total.double() + part.double()).to(dtype)
            detail = f"{size} products at a time are added to it"
            expected[f"the sum of the products is kept in {name}", detail] = total.double() + (BIASES[Q] if bias else 0)
    assert set(given) == set(expected)
    for name, output in expected.items():
        torch.testing.assert_close(given[name], output, rtol=1e-12, atol=1e-12, msg=str(name))


@pytest.mark.parametrize(
    ("name", "most", "sizes"),
    [("_MAX_PIECES", 3, (2, 4)), ("_MAX_PIECES", 2, (4,)), ("_MAX_SUMMED", 6, (1, 2, 4)), ("_MAX_SUMMED", 5, ())],
)
def test_long_sums_are_not_replayed(monkeypatch, name, most, sizes):
    monkeypatch.setattr(linear, name, most)
    details = {h.detail for h in linear.sums_in_16_bits(of())}
    assert details == {f"{size} products at a time are added to it" for size in sizes}


def test_a_wide_product_of_few_inputs_is_replayed(monkeypatch):
    monkeypatch.setattr(linear, "_MAX_SUMMED", 6)
    assert found(linear.sums_in_16_bits, of(own="wide", weights={"wide": random(9, WIDTH)}))


# Weights that are nobody's.

MANY = random(14, WIDTH, seed=80)


def nobody(own, wrong, **config):
    failure = of(
        y(wrong, BIASES.get(own), MANY), own=own, x=MANY, weights={"lm_head": random(WIDTH, WIDTH, seed=90)}, **config
    )
    (hypothesis,) = found(linear.nobodys_weights, failure).values()
    torch.testing.assert_close(hypothesis.output, failure.actual)
    assert hypothesis.num_fitted == round(7 * failure.num_elements)
    return hypothesis.cause


NOISE = random(WIDTH, WIDTH, seed=91)


@pytest.mark.parametrize("own", [Q, "lm_head"])
@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("is_like", [True, False])
def test_weights_that_are_fitted(own, is_tied, is_like):
    weight = WEIGHTS[Q] if own == Q else random(WIDTH, WIDTH, seed=90)
    cause = nobody(own, weight + 0.5 * NOISE if is_like else NOISE, tie_word_embeddings=is_tied)
    if own == "lm_head" and is_tied:
        why = "stale" if is_like else "not loaded, or another checkpoint's"
        assert cause == f"the weights of the tied head are not those of the embedding: {why}"
    elif is_like:
        assert cause == "the weights are not quite those of this checkpoint: changed, or in another format"
    else:
        assert cause == "the weights are none of this checkpoint: not loaded, or another checkpoint's"


@pytest.mark.parametrize(("cosine", "is_like"), [(0.69, False), (0.71, True), (-0.9, False)])
def test_fitted_weights_are_like_the_right_ones_from_a_cosine_on(cosine, is_like):
    own = WEIGHTS[Q] / WEIGHTS[Q].norm()
    across = NOISE - (NOISE * own).sum() * own
    cause = nobody(Q, cosine * own + (1 - cosine**2) ** 0.5 * across / across.norm())
    assert ("not quite those" in cause) == is_like


@pytest.mark.parametrize(("rows", "is_fitted"), [(10, False), (11, True)])
def test_weights_are_fitted_to_rows_enough(rows, is_fitted):
    x = random(rows, WIDTH)
    assert bool(found(linear.nobodys_weights, of(y(NOISE, x=x), x=x))) == is_fitted


# The same causes planted in recordings of the reference engine and of HF.

TAP, SOURCE = "model.layers.1.self_attn.k_proj", "model.layers.1.input_layernorm"
RECORDED_GATE, UP, NORMED = (
    "model.layers.1.mlp.gate_proj",
    "model.layers.1.mlp.up_proj",
    "model.layers.1.post_attention_layernorm",
)


def test_bias_dropped(bench_of):
    bench = bench_of("qwen2-tiny")
    found = bench.explain(TAP, bench.tap(SOURCE) @ bench.weight(TAP).T)
    assert (found.cause, found.scope) == ("the bias is dropped", "every row")
    assert found.residual_after < 20
    bias = bench.hf.module(TAP).bias.detach().double()
    assert bench.explain(TAP, bench.tap(TAP) + bias).cause == "the bias is added twice"


def test_weights_of_another_module(bench):
    x = bench.tap(SOURCE)
    found = bench.explain(TAP, x @ bench.weight("model.layers.0.self_attn.k_proj").T)
    assert found.cause == "the weights are those of model.layers.0.self_attn.k_proj"
    found = bench.explain(RECORDED_GATE, bench.tap(UP))
    assert found.cause == f"the weights are those of {UP}"


def test_weights_not_loaded(bench_of):
    bench = bench_of("qwen2-tiny")
    bias = bench.hf.module(TAP).bias.detach().double()
    found = bench.explain(TAP, bias.expand(len(bench.tap(TAP)), -1))
    assert found.cause == "the weights are zero: not loaded"
    found = bench.explain(TAP, torch.zeros_like(bench.tap(TAP)))
    assert found.cause == "weights and bias are zero: not loaded"


def test_weights_of_nobody(bench):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(bench.weight(TAP).shape, generator=generator, dtype=torch.float64)
    found = bench.explain(TAP, bench.tap(SOURCE) @ weight.T)
    assert found.residual_after is None  # fewer rows than inputs: any output could be fitted
    assert "unrelated to what it should be" in found.detail


def scene_of(x, weight, wrong, numerics):
    """What explanations of a product look at, where they need no recording."""
    return SimpleNamespace(
        operation=Operation(tap=TAP, kind=Kind.LINEAR), inputs=[x], actual=x @ wrong.T, expected=x @ weight.T,
        weight=lambda _tap, name="weight": weight if name == "weight" else None, num_elements=float(len(weight)),
        recording=SimpleNamespace(manifest=SimpleNamespace(numerics=numerics)),
        hf=SimpleNamespace(config=SimpleNamespace()), graph=(), siblings=list,
    )  # fmt: skip


def test_scales_of_blocks_of_a_quantised_weight():
    x, weight = random(12, 128), random(5, 128, seed=1)
    factors = torch.tensor([1.0, 1.5, 1.0, 0.25], dtype=torch.float64)
    wrong = weight.clone()
    wrong[3] = (weight[3].unflatten(0, (4, 32)) * factors[:, None]).flatten()
    (found,) = weight_rows.scales_of_blocks(scene_of(x, weight, wrong, Numerics(weights=("int8",))))
    assert found.cause == "the scales of blocks in row 3 of the quantised weight are others"
    assert found.detail == "factors 1, 1.5, 1, 0.25"
    assert found.num_fitted == 5
    assert torch.allclose(found.output, x @ wrong.T)


@pytest.mark.parametrize(("rows", "width", "numerics"), [
    (12, 128, None), (12, 128, Numerics()),
    (12, 120, Numerics(weights=("int8",))), (4, 128, Numerics(weights=("int8",))),
])  # fmt: skip
def test_scales_are_fitted_only_where_blocks_and_rows_are_there(rows, width, numerics):
    x, weight = random(rows, width), random(5, width, seed=1)
    assert list(weight_rows.scales_of_blocks(scene_of(x, weight, weight * 2, numerics))) == []


@pytest.mark.parametrize(("rows", "is_fitted"), [(13, False), (14, True)])
def test_weights_are_fitted_from_more_rows_than_inputs(rows, is_fitted):
    x, weight, wrong = random(rows, 8), random(20, 8, seed=1), random(20, 8, seed=2)
    found = list(linear.nobodys_weights(scene_of(x, weight, wrong, None)))
    assert bool(found) == is_fitted, "one and a half rows for each input and the bias"
    assert all(torch.allclose(item.output, x @ wrong.T) for item in found)


def test_one_element_of_the_weight_in_a_recording(bench):
    weight = bench.weight(TAP).clone()
    own, weight[7, 20] = float(weight[7, 20]), 0.75
    found = bench.explain(TAP, bench.tap(SOURCE) @ weight.T)
    assert found.cause == "one element of the weight is another: [7, 20]"
    assert found.detail == f"it is 0.75 instead of {own:.4g}"
    weight[7, 21] += 0.5
    assert "one element" not in bench.explain(TAP, bench.tap(SOURCE) @ weight.T).cause


def test_the_transpose(bench_of):
    bench = bench_of("qwen2-tiny")  # whose output projection is square
    tap, source = "model.layers.1.self_attn.o_proj", "model.layers.1.attention"
    assert bench.explain(tap, bench.tap(source) @ bench.weight(tap)).cause == "the weight is transposed"


def test_rows_of_the_stacked_weight_in_the_wrong_order(bench):
    names = [f"model.layers.1.self_attn.{name}_proj" for name in "qkv"]
    stacked = torch.cat([bench.tap(name) for name in names], dim=1)
    width = bench.tap(names[1]).shape[1]
    q = stacked[:, width : width + bench.tap(names[0]).shape[1]]  # k first, then q
    found = bench.explain(names[0], q)
    assert found.cause.startswith("the rows of the stacked weight are in the wrong order")
    assert "self_attn.k_proj 0-63" in found.detail
    found = bench.explain(TAP, bench.tap(TAP).roll(bench.head_dim, dims=1))
    assert found.cause == "the rows of the weight are in another order"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_coarse_weight(bench, dtype):
    name = str(dtype).removeprefix("torch.")
    x, weight = bench.tap(SOURCE), bench.weight(TAP)
    assert bench.explain(TAP, x @ weight.to(dtype).double().T).cause == f"the weight is in {name}"
    both = x.to(dtype).double() @ weight.to(dtype).double().T
    assert bench.explain(TAP, both).cause == f"the product is of inputs in {name}"


def test_tied_head(bench_of):
    bench = bench_of("qwen2-tiny")
    x = torch.cat([step.tap("model.norm")[step.rows_of("lm_head")] for step in bench.steps("lm_head")]).double()
    found = bench.explain("lm_head", x @ bench.weight("model.embed_tokens").T)
    assert found.cause == "the head is tied to the embedding though it has weights of its own"


def test_overflow(bench):
    x, wrong = bench.tap(SOURCE), bench.tap(TAP)
    x[7] = (x[7] * 1e38).clamp(-3e38, 3e38)
    wrong[7] = torch.inf
    found = bench.explain(TAP, wrong, code=Code.NOT_FINITE, **{SOURCE: x})
    assert found.cause == "overflow of float32"
    assert found.residual_after is None


def int8(x, dim):
    scale = x.abs().amax(dim=dim, keepdim=True) / 127
    return (x / scale).round() * scale


def test_weights_in_8_bits(bench):
    x, weight = bench.tap(SOURCE), bench.weight(TAP)
    groups = int8(weight.unflatten(1, (-1, 32)), 2).flatten(1)
    scale = weight.abs().amax() / 448
    wrong = {
        "the weight is in int8, with one scale for each output": x @ int8(weight, 1).T,
        "the weight is in int8, with one scale for 32 inputs": x @ groups.T,
        "the weight is in int8, with one scale for each output, and the input in int8, with one scale for each token": (
            int8(x, 1) @ int8(weight, 1).T
        ),
        "the weight is in float8_e4m3fn, with one scale for all of it": (
            x @ ((weight / scale).float().to(torch.float8_e4m3fn).double() * scale).T
        ),
        "the weight is cut off to bfloat16 instead of rounded": (
            x @ (weight.float().view(torch.int32) & -(1 << 16)).view(torch.float32).double().T
        ),
    }
    for cause, tensor in wrong.items():
        assert bench.explain(TAP, tensor).cause == cause


@pytest.mark.parametrize(("dtype", "size"), [(torch.bfloat16, 8), (torch.float16, 16)])
def test_sums_in_16_bits(bench, dtype, size):
    x, weight = bench.tap(SOURCE), bench.weight(TAP)
    total = torch.zeros(len(x), len(weight), dtype=dtype)
    for at in range(0, x.shape[1], size):
        total = total + (x[:, at : at + size] @ weight[:, at : at + size].T).to(dtype)
    found = bench.explain(TAP, total.double())
    name = str(dtype).removeprefix("torch.")
    assert (found.cause, found.detail) == (
        f"the sum of the products is kept in {name}",
        f"{size} products at a time are added to it",
    )


def test_single_rows_of_the_weight(bench_of):
    bench = bench_of("qwen2-tiny")
    bias = bench.hf.module(TAP).bias.detach().double()
    for factor, cause in {
        0.0: "some outputs are zero: these rows of the weight were not loaded",
        -1.0: "some outputs have the other sign: these rows of the weight are negated",
        0.6: "each output is scaled by a factor of its own: the scales of the weight's rows are others",
    }.items():
        wrong = bench.tap(TAP)
        wrong[:, 3:5] *= factor
        found = bench.explain(TAP, wrong)
        assert found.cause == cause
        assert "outputs 3, 4: 2 of" in found.detail or "0.6 for output 3, 0.6 for output 4; 2 of" in found.detail
        wrong[:, 3:5] += (1 - factor) * bias[3:5]
        found = bench.explain(TAP, wrong)
        assert found.cause == cause.replace(":", ", but for the bias:", 1)


def test_all_rows_of_the_weight_with_scales_of_their_own(bench):
    generator = torch.Generator().manual_seed(2)
    scales = 1 + 0.05 * torch.randn(bench.weight(RECORDED_GATE).shape[0], generator=generator, dtype=torch.float64)
    found = bench.explain(RECORDED_GATE, bench.tap(RECORDED_GATE) * scales)
    assert found.cause.startswith("each output is scaled by a factor of its own")
    assert found.is_cause


def test_rows_that_are_wrong_otherwise_have_no_scale(bench):
    generator = torch.Generator().manual_seed(3)
    wrong = bench.tap(TAP)
    wrong[:, 3] += torch.randn(len(wrong), generator=generator, dtype=torch.float64)
    assert not bench.explain(TAP, wrong).is_cause


def test_a_soft_cap_behind_a_product(bench):
    cap = 3.0
    found = bench.explain(RECORDED_GATE, cap * torch.tanh(bench.tap(RECORDED_GATE) / cap))
    assert found.cause == "a soft cap of 3 is applied, which the model does not have"
    assert bench.explain(RECORDED_GATE, 20 * torch.tanh(bench.tap(RECORDED_GATE) / 20)).num_fitted == 0
