from types import SimpleNamespace

import pytest
import torch

from harness.base.numerics import Numerics
from harness.errors import Code
from harness.formats.taps import Kind, Operation
from harness.judge.explain.products import block_scales, linear

TAP, SOURCE = "model.layers.1.self_attn.k_proj", "model.layers.1.input_layernorm"
GATE, UP, NORMED = (
    "model.layers.1.mlp.gate_proj",
    "model.layers.1.mlp.up_proj",
    "model.layers.1.post_attention_layernorm",
)


def test_bias_dropped(bench):
    bench = bench("qwen2-tiny")
    found = bench.explain(TAP, bench.tap(SOURCE) @ bench.weight(TAP).T)
    assert (found.cause, found.scope) == ("the bias is dropped", "every row")
    assert found.residual_after < 20
    bias = bench.hf.module(TAP).bias.detach().double()
    assert bench.explain(TAP, bench.tap(TAP) + bias).cause == "the bias is added twice"


def test_weights_of_another_module(bench):
    bench = bench()
    x = bench.tap(SOURCE)
    found = bench.explain(TAP, x @ bench.weight("model.layers.0.self_attn.k_proj").T)
    assert found.cause == "the weights are those of model.layers.0.self_attn.k_proj"
    found = bench.explain(GATE, bench.tap(UP))
    assert found.cause == f"the weights are those of {UP}"


def test_weights_not_loaded(bench):
    bench = bench("qwen2-tiny")
    bias = bench.hf.module(TAP).bias.detach().double()
    found = bench.explain(TAP, bias.expand(len(bench.tap(TAP)), -1))
    assert found.cause == "the weights are zero: not loaded"
    found = bench.explain(TAP, torch.zeros_like(bench.tap(TAP)))
    assert found.cause == "weights and bias are zero: not loaded"


def test_weights_of_nobody(bench):
    bench = bench()
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


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_scales_of_blocks_of_a_quantised_weight():
    x, weight = random(12, 128), random(5, 128, seed=1)
    factors = torch.tensor([1.0, 1.5, 1.0, 0.25], dtype=torch.float64)
    wrong = weight.clone()
    wrong[3] = (weight[3].unflatten(0, (4, 32)) * factors[:, None]).flatten()
    (found,) = block_scales.scales_of_blocks(scene_of(x, weight, wrong, Numerics(weights=("int8",))))
    assert found.cause == "the scales of blocks in row 3 of the quantised weight are others"
    assert found.detail == "factors 1, 1.5, 1, 0.25"
    assert found.freedom == 5
    assert torch.allclose(found.output, x @ wrong.T)


@pytest.mark.parametrize(("rows", "width", "numerics"), [
    (12, 128, None), (12, 128, Numerics()),
    (12, 120, Numerics(weights=("int8",))), (4, 128, Numerics(weights=("int8",))),
])  # fmt: skip
def test_scales_are_fitted_only_where_blocks_and_rows_are_there(rows, width, numerics):
    x, weight = random(rows, width), random(5, width, seed=1)
    assert list(block_scales.scales_of_blocks(scene_of(x, weight, weight * 2, numerics))) == []


@pytest.mark.parametrize(("rows", "is_fitted"), [(13, False), (14, True)])
def test_weights_are_fitted_from_more_rows_than_inputs(rows, is_fitted):
    x, weight, wrong = random(rows, 8), random(20, 8, seed=1), random(20, 8, seed=2)
    found = list(linear.nobodys_weights(scene_of(x, weight, wrong, None)))
    assert bool(found) == is_fitted, "one and a half rows for each input and the bias"
    assert all(torch.allclose(each.output, x @ wrong.T) for each in found)


def test_one_element_of_the_weight(bench):
    bench = bench()
    weight = bench.weight(TAP).clone()
    own, weight[7, 20] = float(weight[7, 20]), 0.75
    found = bench.explain(TAP, bench.tap(SOURCE) @ weight.T)
    assert found.cause == "one element of the weight is another: [7, 20]"
    assert found.detail == f"it is 0.75 instead of {own:.4g}"
    weight[7, 21] += 0.5
    assert "one element" not in bench.explain(TAP, bench.tap(SOURCE) @ weight.T).cause


def test_the_transpose(bench):
    bench = bench("qwen2-tiny")  # whose output projection is square
    tap, source = "model.layers.1.self_attn.o_proj", "model.layers.1.attention"
    assert bench.explain(tap, bench.tap(source) @ bench.weight(tap)).cause == "the weight is transposed"


def test_rows_of_the_stacked_weight_in_the_wrong_order(bench):
    bench = bench()
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
    bench = bench()
    name = str(dtype).removeprefix("torch.")
    x, weight = bench.tap(SOURCE), bench.weight(TAP)
    assert bench.explain(TAP, x @ weight.to(dtype).double().T).cause == f"the weight is in {name}"
    both = x.to(dtype).double() @ weight.to(dtype).double().T
    assert bench.explain(TAP, both).cause == f"the product is of inputs in {name}"


def test_tied_head(bench):
    bench = bench("qwen2-tiny")
    x = torch.cat([step.tap("model.norm")[step.rows_of("lm_head")] for step in bench.steps("lm_head")]).double()
    found = bench.explain("lm_head", x @ bench.weight("model.embed_tokens").T)
    assert found.cause == "the head is tied to the embedding though it has weights of its own"


def test_overflow(bench):
    bench = bench()
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
    bench = bench()
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
    bench = bench()
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


def test_single_rows_of_the_weight(bench):
    bench = bench("qwen2-tiny")
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
    bench = bench()
    generator = torch.Generator().manual_seed(2)
    scales = 1 + 0.05 * torch.randn(bench.weight(GATE).shape[0], generator=generator, dtype=torch.float64)
    found = bench.explain(GATE, bench.tap(GATE) * scales)
    assert found.cause.startswith("each output is scaled by a factor of its own")
    assert found.is_cause


def test_rows_that_are_wrong_otherwise_have_no_scale(bench):
    bench = bench()
    generator = torch.Generator().manual_seed(3)
    wrong = bench.tap(TAP)
    wrong[:, 3] += torch.randn(len(wrong), generator=generator, dtype=torch.float64)
    assert not bench.explain(TAP, wrong).is_cause


def test_a_soft_cap_behind_a_product(bench):
    bench, cap = bench(), 3.0
    found = bench.explain(GATE, cap * torch.tanh(bench.tap(GATE) / cap))
    assert found.cause == "a soft cap of 3 is applied, which the model does not have"
    assert bench.explain(GATE, 20 * torch.tanh(bench.tap(GATE) / 20)).num_fitted == 0
