"""Mistakes of a product, made by plain code of an engine: the trial names each."""

from types import SimpleNamespace

import pytest
import torch

from harness.base.numerics import Numerics
from harness.errors import Code
from harness.formats.taps import Kind, Operation
from harness.judge.compare.conventions.linear import quantised_inputs
from harness.judge.explain.products import linear
from harness.judge.explain.trial.ranking import rank_hypotheses

from ..toys import ToyModel, by_cause, failure_of, random
from ..toys import linear as product

Q, KV, FAR_Q, FAR_V, GATE, LATER, NARROW, NORM, TABLE, HEAD = (
    "model.layers.1.self_attn.q_proj", "model.layers.1.self_attn.k_proj", "model.layers.0.self_attn.q_proj",
    "model.layers.0.self_attn.v_proj", "model.layers.1.mlp.gate", "model.layers.2.mlp.up", "model.layers.1.narrow",
    "model.layers.1.norm", "model.embed_tokens", "lm_head",
)  # fmt: skip
ROWS, WIDTH = 20, 32
X = random(ROWS, WIDTH, seed=1)
WEIGHTS = {name: random(WIDTH, WIDTH, seed=10 + at) for at, name in enumerate((Q, KV, FAR_Q, GATE, FAR_V, LATER))}
WEIGHTS |= {
    NARROW: random(12, WIDTH, seed=20),
    HEAD: random(WIDTH, WIDTH, seed=50),
    TABLE: random(WIDTH, WIDTH, seed=51),
}
BIASES = {name: random(len(weight), seed=30 + at) for at, (name, weight) in enumerate(WEIGHTS.items())}
WEIGHT, BIAS = WEIGHTS[Q], BIASES[Q]


def y(weight=WEIGHT, bias=BIAS, x=X):
    return x @ weight.T + (0 if bias is None else bias)


def wrong_rows(actual=None, tap=Q, *, bias=True, x=X, weights=None, device="cpu", **config):
    """Rows of a product among others; q, k and `narrow` read the same, and the norm is no product."""
    weights = {**WEIGHTS, **(weights or {})}
    biases = {name: BIASES[name] if bias and name not in (HEAD, TABLE) else None for name in weights}
    inputs = {name: ("x",) if name in (Q, KV, NARROW) else (name,) for name in weights}
    operations = [
        Operation(tap=name, kind=Kind.EMBEDDING if name == TABLE else Kind.LINEAR, source=name,
                  inputs=() if name == TABLE else inputs[name])
        for name in weights
    ]  # fmt: skip
    operations.append(Operation(tap=NORM, kind=Kind.NORM, source=GATE))
    modules = {name: product(weight, biases[name]) for name, weight in weights.items()}
    expected = y(weights[tap], biases[tap], x)
    actual = expected if actual is None else actual.float().double()
    manifest = SimpleNamespace(device=device, numerics=None)
    return failure_of(
        next(item for item in operations if item.tap == tap), actual, expected, x, bound=10.0,
        model=ToyModel(*operations, modules=modules, **config), recording=SimpleNamespace(manifest=manifest, steps=()),
    )  # fmt: skip


def named(actual, tap=Q, **options):
    with torch.no_grad():
        return rank_hypotheses(wrong_rows(actual, tap, **options), "every row")


def changed(at, value):
    weight = WEIGHT.clone()
    weight[at] = value
    return weight


def of_columns(factor):
    return torch.where((torch.arange(WIDTH) == 3) | (torch.arange(WIDTH) == 4), factor, 1.0)


def part_of_inputs(change, at=1, count=2):
    """Return the rows where `change` has been made to one part of the weight's inputs."""
    parts = list(WEIGHT.chunk(count, dim=1))
    parts[at] = change(parts)
    return y(torch.cat(parts, dim=1))


# Formats.


def coarse(dtype):
    return lambda x: x.to(dtype).double()


def cut_off_to_bfloat16(x):
    return (x.float().view(torch.int32) & -(1 << 16)).view(torch.float32).double()


def int8(size=WIDTH):
    """Eight bits of so many numbers that share a scale, one group after the other."""

    def change(x):
        groups = x.reshape(-1, size)
        scale = groups.abs().amax(dim=1, keepdim=True) / 127
        return ((groups / scale).round() * scale).view(x.shape)

    return change


def int8_scaled_in_float16(x):
    groups = x.reshape(-1, 16)
    scale = groups.abs().amax(dim=1, keepdim=True) / 127
    return ((groups / scale).round() * scale.float().half().double()).view(x.shape)


def float8(name, size=WIDTH):
    dtype = getattr(torch, name)

    def change(x):
        groups = x.reshape(-1, size)
        scale = groups.abs().amax(dim=1, keepdim=True) / torch.finfo(dtype).max
        return ((groups / scale).float().to(dtype).double() * scale).view(x.shape)

    return change


def tf32(x):
    bits = x.float().view(torch.int32)
    return ((bits + (1 << 12)) & -(1 << 13)).view(torch.float32).double()


FORMATS = {
    "in bfloat16": coarse(torch.bfloat16),
    "in float16": coarse(torch.float16),
    "cut off to bfloat16 instead of rounded": cut_off_to_bfloat16,
    "in int8, with one scale for each output": int8(),
    "in int8, with one scale for all of it": int8(WIDTH * WIDTH),
    "in int8, with one scale for 16 inputs": int8(16),
    "in float8_e4m3fn, without a scale": coarse(torch.float8_e4m3fn),
    "in float8_e5m2, without a scale": coarse(torch.float8_e5m2),
    "in float8_e4m3fn, with one scale for all of it": float8("float8_e4m3fn", WIDTH * WIDTH),
    "in float8_e5m2, with one scale for all of it": float8("float8_e5m2", WIDTH * WIDTH),
    "in float8_e4m3fn, with one scale for each output": float8("float8_e4m3fn"),
    "in float8_e5m2, with one scale for each output": float8("float8_e5m2"),
}
TOKENS = {
    "in int8": ("int8, with one scale for each token", int8()),
    "in float8_e4m3fn": ("float8_e4m3fn, with one scale for each token", float8("float8_e4m3fn")),
}
OF_FORMATS = {f"the weight is {name}": y(change(WEIGHT)) for name, change in FORMATS.items()} | {
    f"the weight is {name}, and the input in {what}": y(change(WEIGHT), x=inputs(X))
    for name, change in FORMATS.items()
    for start, (what, inputs) in TOKENS.items()
    if name.startswith(start)
}
for _name, _low in (("bfloat16", coarse(torch.bfloat16)), ("float16", coarse(torch.float16))):
    OF_FORMATS[f"the product is of inputs in {_name}"] = y(_low(WEIGHT), x=_low(X))
    OF_FORMATS[f"the input of the product is rounded to {_name}, and the weight is not"] = y(x=_low(X))
OF_INPUT = "the input of the product is in int8, with one scale"
OF_FORMATS |= {
    f"{OF_INPUT} for each token": y(x=int8()(X)),
    f"{OF_INPUT} for 16 inputs": y(x=int8(16)(X)),
    f"{OF_INPUT} in float16 for 16 inputs": y(x=int8_scaled_in_float16(X)),
}


# Outputs in another order.

OTHERS = y(WEIGHTS[KV], BIASES[KV]), y(WEIGHTS[NARROW], BIASES[NARROW])
IN_ORDER, STACKED = (
    "the rows of the weight are in another order",
    "the rows of the stacked weight are in the wrong order",
)
OF_ORDER = [
    (y().roll(16, 1), IN_ORDER, "outputs 0-15 from self_attn.q_proj 16-31, 16-31 from self_attn.q_proj 0-15", 2),
    (y()[:, [2, 3, 1, 0, *range(4, WIDTH)]], IN_ORDER,
     "outputs 0-1 from self_attn.q_proj 2-3, 2-2 from self_attn.q_proj 1-1, 3-3 from self_attn.q_proj 0-0, "
     "4-31 from self_attn.q_proj 4-31", 4),
    (y().flip(1), IN_ORDER, "outputs 0-0 from self_attn.q_proj 31-31, 1-1 from self_attn.q_proj 30-30, "
     "2-2 from self_attn.q_proj 29-29, 3-3 from self_attn.q_proj 28-28 and 28 more runs", WIDTH),
    (torch.cat((y()[:, 8:], OTHERS[0][:, :8]), dim=1), f"{STACKED}: outputs of self_attn.k_proj among its own",
     "outputs 0-23 from self_attn.q_proj 8-31, 24-31 from self_attn.k_proj 0-7", 2),
    (torch.cat((y()[:, :20], OTHERS[1][:, 1:5], OTHERS[0][:, 2:10]), dim=1),
     f"{STACKED}: outputs of narrow, self_attn.k_proj among its own",
     "outputs 0-19 from self_attn.q_proj 0-19, 20-23 from narrow 1-4, 24-31 from self_attn.k_proj 2-9", 3),
]  # fmt: skip


@pytest.mark.parametrize(("actual", "cause", "detail", "num_fitted"), OF_ORDER)
def test_outputs_in_another_order(actual, cause, detail, num_fitted):
    explanation = named(actual)
    assert (explanation.cause, explanation.num_fitted) == (cause, num_fitted)
    assert explanation.detail.startswith(detail)


MISTAKES = OF_FORMATS | {
    f"{IN_ORDER}, and those of its bias are not": y(WEIGHT.roll(5, 0)),
    linear.INTERLEAVED: y().unflatten(1, (-1, 2, 4)).transpose(2, 3).flatten(1),
    "part 1 of 2 of the inputs is not summed, as if a rank were left out": part_of_inputs(lambda w: 0 * w[0], 0),
    "part 2 of 2 of the inputs is not summed, as if a rank were left out": part_of_inputs(lambda w: 0 * w[1]),
    "part 3 of 4 of the inputs is summed twice": part_of_inputs(lambda w: 2 * w[2], 2, 4),
    "part 2 of 8 of the inputs is multiplied by the weights of part 1": part_of_inputs(lambda w: w[0], 1, 8),
    "one element of the weight is another: [4, 1]": y(changed((4, 1), 2.5)),
    "some outputs are zero: these rows of the weight were not loaded": y(
        changed(slice(3, 5), 0), torch.cat((BIAS[:3], torch.zeros(2), BIAS[5:]))
    ),
    "some outputs are zero, but for the bias: these rows of the weight were not loaded": y(changed(slice(3, 5), 0)),
    "some outputs have the other sign, but for the bias: these rows of the weight are negated": y(
        changed(slice(3, 5), -WEIGHT[3:5])
    ),
    "each output is scaled by a factor of its own, but for the bias: the scales of the weight's rows are others": y(
        WEIGHT * (1 + 0.05 * random(WIDTH, 1, seed=2))
    ),
    "some outputs have the other sign: these rows of the weight are negated": y() * of_columns(-1),
    "each output is scaled by a factor of its own: the scales of the weight's rows are others": y() * of_columns(0.6),
    "a soft cap of 3 is applied, which the model does not have": 3 * torch.tanh(y() / 3),
    "a soft cap of 20 is applied, which the model does not have": 20 * torch.tanh(y() / 20),
}


@pytest.mark.parametrize("cause", MISTAKES)
def test_a_mistake_is_named(cause):
    explanation = named(MISTAKES[cause], head_dim=8)
    assert (explanation.cause, explanation.is_cause) == (cause, True)
    assert explanation.residual_after < 5


@pytest.mark.parametrize("name", ["bfloat16", "float16"])
@pytest.mark.parametrize("size", [2, 8, 16])
def test_a_sum_that_is_kept_in_16_bits(name, size):
    dtype, total = getattr(torch, name), torch.zeros(ROWS, WIDTH, dtype=torch.float64)
    for at in range(0, WIDTH, size):
        total = (total + (X[:, at : at + size] @ WEIGHT[:, at : at + size].T).to(dtype).double()).to(dtype).double()
    explanation = named(total + BIAS)
    assert explanation.cause == f"the sum of the products is kept in {name}"
    assert explanation.detail.startswith(f"{size} products at a time are added to it")


def test_tf32_has_ten_bits_and_is_no_cpus():
    x = 1e-6 * X  # too small for float16, which has as many bits
    wrong = y(tf32(WEIGHT), None, tf32(x))
    for device in ("cuda", "xpu"):
        assert named(wrong, x=x, bias=False, device=device).cause == "the product is of inputs in TF32"
    assert not any("TF32" in name for name in by_cause(linear.coarse_product, wrong_rows()))


# What is said of no other product.


def test_what_is_not_tried():
    assert by_cause(linear.weight_in_another_order, wrong_rows(bias=False)) == {}
    assert by_cause(linear.one_weight, wrong_rows(x=X[:2])) == {}
    assert by_cause(linear.outputs_in_another_order, wrong_rows()) == {}
    assert set(by_cause(linear.outputs_in_another_order, wrong_rows(OTHERS[0]))) == {
        "the outputs are those of self_attn.k_proj"
    }
    assert by_cause(linear.outputs_in_another_order, wrong_rows(y(x=X[:1]).flip(1), x=X[:1])) == {}, "by chance"


@pytest.mark.parametrize("explain", [
    linear.one_weight, linear.coarse_product, linear.sums_in_16_bits,
])  # fmt: skip
def test_a_product_without_a_weight_or_of_another_width_is_left_alone(explain):
    rows = wrong_rows()
    rows.hf.modules[Q] = torch.nn.Identity()
    assert by_cause(explain, rows) == {}
    if explain in (linear.coarse_product, linear.sums_in_16_bits):
        rows = wrong_rows()
        rows.inputs[0] = random(ROWS, WIDTH + 1)
        assert by_cause(explain, rows) == {}


def test_formats_that_weight_or_input_are_in_already():
    weight, x = coarse(torch.bfloat16)(WEIGHT), coarse(torch.bfloat16)(X)
    causes = set(by_cause(linear.coarse_product, wrong_rows(weights={Q: weight}, x=x)))
    assert not any("bfloat16" in cause for cause in causes)
    assert "the weight is in int8, with one scale for each output" in causes, "what comes after it is tried"
    causes = set(by_cause(linear.coarse_product, wrong_rows(weights={Q: weight})))
    assert "the product is of inputs in bfloat16" in causes
    assert "the input of the product is rounded to bfloat16, and the weight is not" not in causes


@pytest.mark.parametrize(
    ("name", "most", "sizes"),
    [("_MAX_PIECES", 8, (4, 8, 16)), ("_MAX_PIECES", 2, (16,)), ("_MAX_SUMMED", 32, (1, 2, 4, 8, 16)),
     ("_MAX_SUMMED", 31, ())],
)  # fmt: skip
def test_long_sums_are_not_replayed(monkeypatch, name, most, sizes):
    monkeypatch.setattr(linear, name, most)
    details = {hypothesis.detail for hypothesis in linear.sums_in_16_bits(wrong_rows())}
    assert details == {f"{size} products at a time are added to it" for size in sizes}


def test_many_outputs_are_not_matched(monkeypatch):
    for most, is_matched in ((76, True), (75, False)):  # two products of 32 outputs and one of twelve
        monkeypatch.setattr(linear, "_MAX_MATCHED", most)
        assert bool(by_cause(linear.outputs_in_another_order, wrong_rows(y().flip(1)))) == is_matched


def test_heads_that_are_interleaved_on_purpose():
    order = torch.tensor([0, 2, 1, 3, 4, 6, 5, 7])
    assert [linear._is_interleaved(order, size) for size in (4, 8, 3)] == [True, False, False]
    assert not linear._is_interleaved(torch.arange(8), 4)


# An update of low rank, and weights that are nobody's: what is fitted to rows enough.


def test_an_update_of_low_rank():
    """It is asserted from four rows more than directions of the inputs, and what is not linear in them is left."""
    tall, rows = random(48, 12, seed=8), random(24, 12, seed=7)
    update = random(48, 1, seed=3) @ random(1, 12, seed=4)
    options = {"tap": "tall", "weights": {"tall": tall}, "bias": False}
    cause = "an update of rank 1 is added to the weight: an adapter that is merged, or is still merged"

    def updated(x, actual=None):
        wrong = wrong_rows(x @ (tall + update).T if actual is None else actual, x=x, **options)
        return list(by_cause(linear.low_rank_update, wrong).values())

    (hypothesis,) = updated(rows)
    assert (hypothesis.cause, hypothesis.is_fallback, hypothesis.is_cause) == (cause, True, True)
    torch.testing.assert_close(hypothesis.output, rows @ (tall + update).T, rtol=1e-5, atol=1e-5)
    assert [item.is_cause for item in updated(rows[:15])] == [False]
    assert updated(rows[:3]) == []
    assert updated(rows[:3].repeat(4, 1)) == [], "of three tokens alone"
    for another in (rows @ random(48, 12, seed=9).T, rows @ tall.T + torch.arange(24)[:, None] * random(48, seed=5)):
        assert all(
            float((item.output - another).norm()) > 0.1 * float(another.norm()) for item in updated(rows, another)
        )


MANY, NOISE = random(52, WIDTH, seed=80), random(WIDTH, WIDTH, seed=91)


@pytest.mark.parametrize("tap", [Q, HEAD])
@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("is_like", [True, False])
def test_weights_that_are_fitted(tap, is_tied, is_like):
    weight = WEIGHTS[tap] + 0.5 * NOISE if is_like else NOISE
    wrong = y(weight, BIAS if tap == Q else None, MANY)
    (hypothesis,) = by_cause(
        linear.nobodys_weights, wrong_rows(wrong, tap, x=MANY, tie_word_embeddings=is_tied)
    ).values()
    if tap == HEAD and is_tied:
        why = "stale" if is_like else "not loaded, or another checkpoint's"
        assert hypothesis.cause == f"the weights of the tied head are not those of the embedding: {why}"
    elif is_like:
        assert hypothesis.cause == "the weights are not quite those of this checkpoint: changed, or in another format"
    else:
        assert hypothesis.cause == "the weights are none of this checkpoint: not loaded, or another checkpoint's"
    torch.testing.assert_close(hypothesis.output, wrong, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("cosine", "is_like"), [(0.69, False), (0.71, True), (-0.9, False)])
def test_fitted_weights_are_like_the_right_ones_from_a_cosine_on(cosine, is_like):
    right = WEIGHT / WEIGHT.norm()
    across = NOISE - (NOISE * right).sum() * right
    wrong = cosine * right + (1 - cosine**2) ** 0.5 * across / across.norm()
    (hypothesis,) = by_cause(linear.nobodys_weights, wrong_rows(y(wrong, x=MANY), x=MANY)).values()
    assert ("not quite those" in hypothesis.cause) == is_like


@pytest.mark.parametrize(("rows", "is_fitted"), [(49, False), (50, True)])
def test_weights_are_fitted_to_rows_enough(rows, is_fitted):
    """One and a half for each input and the bias."""
    assert bool(by_cause(linear.nobodys_weights, wrong_rows(y(NOISE, x=MANY[:rows]), x=MANY[:rows]))) == is_fitted


# In recordings of the reference engine.

TAP, SOURCE = "model.layers.1.self_attn.k_proj", "model.layers.1.input_layernorm"


def test_weights_of_nobody(bench):
    explanation = bench.explain(TAP, bench.tap(SOURCE) @ random(*bench.weight(TAP).shape).T)
    assert explanation.residual_after is None  # fewer rows than inputs: any output could be fitted
    assert "unrelated to what it should be" in explanation.detail


def test_two_elements_are_not_one_and_rows_that_are_wrong_otherwise_have_no_scale(bench):
    weight = bench.weight(TAP).clone()
    weight[7, 20] = 0.75
    weight[7, 21] += 0.5
    assert "one element" not in bench.explain(TAP, bench.tap(SOURCE) @ weight.T).cause
    wrong = bench.tap(TAP)
    wrong[:, 3] += random(len(wrong), seed=3)
    assert not bench.explain(TAP, wrong).is_cause


def test_overflow(bench):
    x, wrong = bench.tap(SOURCE), bench.tap(TAP)
    x[7] = (x[7] * 1e38).clamp(-3e38, 3e38)
    wrong[7] = torch.inf
    explanation = bench.explain(TAP, wrong, code=Code.NOT_FINITE, **{SOURCE: x})
    assert explanation.cause == "overflow of float32"
    assert explanation.residual_after is None


def test_other_weights_behind_inputs_that_the_engine_declares_to_quantise(bench):
    tap, source = "model.layers.1.mlp.down_proj", "model.layers.1.mlp.act"
    (x,) = quantised_inputs(bench.tap(source), ("Q8_0",))
    recording = bench.planted({tap: x @ bench.weight("model.layers.0.mlp.down_proj").T})
    recording.manifest = recording.manifest.model_copy(update={"numerics": Numerics(weights=("Q8_0",))})
    assert bench.explained(recording, tap).cause == "the weights are those of model.layers.0.mlp.down_proj"
