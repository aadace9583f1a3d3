"""Which operations are computed by themselves, and of which inputs."""

import time

import pytest
import torch
from torch import nn

from harness.formats.taps import Kind, Operation
from harness.judge.explain.core.rerun import Budget, activation_of, factors_of, replay
from harness.oracle.make_golden import make_golden
from harness.oracle.model import load_model
from harness.oracle.precision import upcast
from harness.oracle.requests import Prompt
from harness.oracle.rotation import rotations

from ..toys import ToyModel, linear, random

A, B = random(3, 4, seed=1), random(3, 4, seed=2)


class Block(nn.Module):
    def __init__(self, name, function):
        super().__init__()
        setattr(self, name, function)


def of(kind, *inputs, module=None, shape=(), source="mlp.down:input", parent=None):
    operation = Operation(tap="t", kind=kind, inputs=tuple(map(str, range(len(inputs)))), source=source, shape=shape)
    path = operation.module
    model = ToyModel(operation, modules={path: module or nn.Identity(), "mlp": parent or nn.Module(), "": nn.Module()})
    with torch.no_grad():
        return replay(model, operation, list(inputs))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_norm_is_computed_in_float64(dtype):
    """The norm that the head reads is in another part of the model than the head, which alone is upcast."""
    norm = nn.LayerNorm(4, dtype=dtype)
    torch.testing.assert_close(of(Kind.NORM, A, module=norm), nn.functional.layer_norm(A, (4,)), rtol=1e-12, atol=0)
    assert norm.weight.dtype == dtype


def test_a_sum_is_that_of_two_of_one_shape():
    assert torch.equal(of(Kind.ADD, A, B), A + B)
    assert of(Kind.ADD, A) is None
    assert of(Kind.ADD, A, B, B) is None
    assert of(Kind.ADD, A, B[:, :3]) is None
    assert of(Kind.OTHER, A, B) is None
    assert torch.equal(of(Kind.ADD, A.view(3, 2, 2), B), A + B)


@pytest.mark.parametrize("name", ["act_fn", "activation_fn", "act"])
def test_an_activation_stands_beside_the_module_that_reads_it(name):
    parent = Block(name, nn.ReLU())
    assert torch.equal(of(Kind.ACTIVATION, A, B, parent=parent), A.relu() * B)
    assert torch.equal(of(Kind.ACTIVATION, A, parent=parent, shape=(4,)), A.relu())
    both = torch.cat((A, B), dim=1)
    assert torch.equal(of(Kind.ACTIVATION, both, parent=parent, shape=(4,)), A.relu() * B)
    assert torch.equal(of(Kind.ACTIVATION, both, parent=parent, shape=(2, 2)), A.relu() * B)
    assert of(Kind.ACTIVATION, A, B) is None


def test_the_first_of_several_activations_is_used():
    parent = Block("act", nn.ReLU())
    parent.act_fn = nn.Tanh()
    operation = Operation(tap="t", kind=Kind.ACTIVATION, source="mlp.down:input")
    assert activation_of(ToyModel(operation, modules={"mlp": parent}), operation) is parent.act_fn


def test_gate_and_up_may_come_as_one():
    operation = Operation(tap="t", kind=Kind.ACTIVATION, shape=(2,))
    gate, up = factors_of(operation, [A])
    assert torch.equal(gate, A[:, :2])
    assert torch.equal(up, A[:, 2:])
    gate, up = factors_of(operation, [A[:, :3]])
    assert (gate.shape, up) == ((3, 3), None)
    assert factors_of(operation, [A, B]) == (A, B)


@pytest.mark.parametrize("bias", [None, random(5, seed=4)])
def test_a_product_of_a_router_is_taken_with_its_weight_alone(bias):
    class Router(nn.Linear):
        def forward(self, x):
            raise AssertionError("a router does more than its product")

    weight = random(5, 4, seed=3)
    module = Router(4, 5, bias=bias is not None)
    module.weight.data = weight.float()
    if bias is not None:
        module.bias.data = bias.float()
    hypotheses = of(Kind.LINEAR, A, module=module, source="mlp.gate:linear")
    expected = A @ weight.float().double().T + (0 if bias is None else bias.float().double())
    torch.testing.assert_close(hypotheses, expected)
    torch.testing.assert_close(of(Kind.LINEAR, A, module=linear(weight)), A @ weight.T)
    assert of(Kind.LINEAR, A, module=nn.Identity()) is None


def test_a_norm_of_heads_sees_heads():
    norm = nn.RMSNorm(2, eps=1e-6, dtype=torch.float64)
    norm.weight.data = torch.tensor([2.0, 3.0], dtype=torch.float64)
    heads = [
        [v * w for v, w in zip(pair, (2.0, 3.0), strict=True)] for row in A.tolist() for pair in (row[:2], row[2:])
    ]
    sizes = [((pair[0] ** 2 + pair[1] ** 2) / 2 + 1e-6) ** 0.5 for row in A.tolist() for pair in (row[:2], row[2:])]
    expected = (
        torch.tensor([[v / size for v in pair] for pair, size in zip(heads, sizes, strict=True)]).double().view(3, 4)
    )
    torch.testing.assert_close(of(Kind.NORM, A, module=norm), expected, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(of(Kind.NORM, A[:, :2], module=norm), expected[:, :2], rtol=1e-6, atol=1e-7)
    wide = nn.RMSNorm(4, eps=1e-6, dtype=torch.float64)
    torch.testing.assert_close(of(Kind.NORM, A, module=wide), wide(A).detach())


# Operations and rotations of HF's models.

FAMILIES = (
    "gemma3_text", "gpt2", "gpt_neox", "mistral", "phi3", "qwen3_moe", "gpt_oss",
)  # fmt: skip
ROW_BY_ROW = (Kind.LINEAR, Kind.NORM, Kind.ADD, Kind.ACTIVATION)


class Truth:
    """A golden's rows of one request, in float64."""

    def __init__(self, hf, folder):
        self.hf = hf
        tokens = tuple(range(3, 16))
        self.golden = make_golden(hf, [Prompt(token_ids=tokens, max_new_tokens=1)], folder)
        self.step = self.golden.recording.steps[0]
        self.positions = torch.arange(len(tokens))

    def tap(self, name):
        return self.step.tap(name).double()

    def replayed(self, operation, inputs):
        part = self.hf.part_of(operation.module)
        with torch.no_grad(), self.hf.weights.held(part), upcast(torch.float64, self.hf.module(part)):
            return replay(self.hf, operation, inputs)


@pytest.fixture(scope="module")
def truth(checkpoints, tiny, tmp_path_factory):
    made = {}

    def get(name):
        if name not in made:
            embedded = checkpoints / name
            hf = load_model(embedded, dtype=torch.float32) if embedded.exists() else tiny(name)
            made[name] = Truth(hf, tmp_path_factory.mktemp("truth") / name)
        return made[name]

    return get


def relative(actual, expected):
    return float((actual - expected).norm() / expected.norm())


@pytest.mark.parametrize("name", ["llama-tiny", "qwen2-tiny", "qwen3-tiny", *FAMILIES])
def test_the_truth_replays_to_itself(truth, name):
    one, num = truth(name), 0
    for operation in one.hf.graph:
        rows = one.step.rows_of(operation.tap) if operation.tap in one.step.tap_names else None
        if operation.kind not in ROW_BY_ROW or len(operation.inputs) > 2:
            continue
        inputs = [one.tap(tap) if rows is None else one.tap(tap)[rows] for tap in operation.inputs]
        actual = one.replayed(operation, inputs)
        if actual is None:  # an activation that is not one function times the other input: nothing is said of it
            assert operation.kind is Kind.ACTIVATION
            continue
        assert relative(actual, one.tap(operation.tap).flatten(1)) < 1e-12, operation.tap
        num += 1
    assert num > 10


@pytest.mark.parametrize("rows", [[3], [12, 0, 7], []])
def test_rows_are_replayed_by_themselves(truth, rows):
    one = truth("qwen3-tiny")
    for operation in one.hf.graph.of_layer(1):
        if operation.kind in ROW_BY_ROW:
            actual = one.replayed(operation, [one.tap(tap)[rows] for tap in operation.inputs])
            torch.testing.assert_close(actual, one.tap(operation.tap)[rows].flatten(1), rtol=1e-10, atol=1e-12)


def test_recorded_shapes_may_be_flat(truth):
    """Heads and head size may be recorded as one dimension or two (docs/recording-format.md)."""
    one = truth("qwen3-tiny")
    operation = one.hf.graph["model.layers.1.self_attn.q_norm"]
    (x,) = (one.tap(tap) for tap in operation.inputs)
    heads = x.view(len(x), -1, one.hf.head_dim)
    assert torch.equal(*(one.replayed(operation, [item]) for item in (heads, heads.flatten(1))))


@pytest.mark.parametrize("site", ["attention", "q_rope", "k_cache"])
def test_what_does_not_work_row_by_row_is_not_replayed(truth, site):
    one = truth("llama-tiny")
    operation = one.hf.graph[f"model.layers.0.{site}"]
    inputs = [one.tap(tap) for tap in operation.inputs]
    assert replay(one.hf, operation, inputs) is None


def test_another_kind_of_linear_is_asked_to_compute():
    """A head that is more than its weight, as in models with scaled logits."""

    class Doubled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    module = Doubled(6, 4, bias=False).double()
    hf = ToyModel(modules={"lm_head": module})
    operation = Operation(tap="lm_head", kind=Kind.LINEAR, inputs=("x",), source="lm_head")
    x = torch.randn(2, 6, dtype=torch.float64)
    with torch.no_grad():
        assert relative(replay(hf, operation, [x]), 2 * x @ module.weight.T) < 1e-14


def test_the_product_of_a_router_is_that_with_its_weight(truth):
    one = truth("qwen3_moe")
    operation = one.hf.graph["model.layers.0.mlp.gate"]
    (x,) = (one.tap(tap) for tap in operation.inputs)
    assert relative(one.replayed(operation, [x]), x @ one.hf.module(operation.module).weight.double().T) < 1e-14


def test_the_activation_beside_a_product(truth):
    one = truth("gemma3_text")
    function = activation_of(one.hf, one.hf.graph["model.layers.0.mlp.act"])
    x = torch.linspace(-2, 2, 9, dtype=torch.float64)
    torch.testing.assert_close(function(x), nn.functional.gelu(x, approximate="tanh"))


# Rotations.


def fitting(one, name):
    """The rotations of a model that take a tap's input to it."""
    operation = one.hf.graph[name]
    before, after = one.tap(operation.inputs[0]).flatten(1), one.tap(name).flatten(1)
    return [
        rotation
        for rotation in rotations(one.hf, one.hf.head_dim)
        if relative(rotation.turn(before, one.positions), after) < 1e-6
    ]


@pytest.mark.parametrize("name", ["llama-tiny", "qwen2-tiny", "qwen3-tiny", "gemma3_text", "gpt_oss", "mistral"])
@pytest.mark.parametrize("site", ["q_rope", "k_rope"])
def test_a_rotation_of_the_model_is_the_one_it_applies(truth, name, site):
    explanation = fitting(truth(name), f"model.layers.1.{site}")
    assert explanation
    assert not explanation[0].is_interleaved


def test_layers_of_two_kinds_have_frequencies_of_their_own(truth):
    """Gemma 3: windows turn by another base than what sees everything."""
    one = truth("gemma3_text")
    near, far = (fitting(one, f"model.layers.{layer}.q_rope")[0] for layer in (0, 1))
    assert near.name != far.name
    assert not torch.equal(near.frequencies, far.frequencies)


def test_another_position_another_rotation(truth):
    one = truth("llama-tiny")
    name = "model.layers.0.k_rope"
    right, before = fitting(one, name)[0], one.tap(one.hf.graph[name].inputs[0])
    assert relative(right.turn(before, one.positions + 1), one.tap(name).flatten(1)) > 0.1


def test_elements_behind_the_last_pair_stay(truth):
    one = truth("llama-tiny")
    right = fitting(one, "model.layers.0.k_rope")[0]
    half = type(right)(
        frequencies=right.frequencies[: len(right.frequencies) // 2],
        module=right.module,
        name=right.name,
        head_dim=right.head_dim,
    )
    x = torch.randn(5, 2 * right.head_dim, dtype=torch.float64)
    turned = half.heads(half.turn(x, torch.arange(5) + 1))
    assert torch.equal(turned[..., right.head_dim // 2 :], half.heads(x)[..., right.head_dim // 2 :])
    assert not torch.allclose(turned[..., : right.head_dim // 2], half.heads(x)[..., : right.head_dim // 2])


def test_neighbours_that_turn_are_halves_that_turn_in_another_order(truth):
    right = fitting(truth("llama-tiny"), "model.layers.0.k_rope")[0]
    fields = {name: getattr(right, name) for name in ("frequencies", "module", "name", "scaling", "head_dim")}
    neighbours = type(right)(**fields, is_interleaved=True)
    x = torch.randn(5, 3 * right.head_dim, dtype=torch.float64)
    order = torch.arange(right.head_dim).view(-1, 2).T.flatten()
    mixed = right.heads(x)[..., order].flatten(1)
    turned = right.heads(right.turn(mixed, torch.arange(5)))[..., order.argsort()].flatten(1)
    torch.testing.assert_close(neighbours.turn(x, torch.arange(5)), turned)


def test_time_that_other_operations_took_is_not_of_this_one():
    budget = Budget(60.0)
    budget.begin_explanation()
    assert not budget.is_half_spent
    budget.seconds = 1.0
    assert not budget.is_half_spent
    assert budget.left <= 1
    budget = Budget(1e-9)
    budget.begin_explanation()
    assert budget.is_half_spent


def test_what_is_being_spent_is_not_left():
    budget, begin = Budget(0.05), time.thread_time()
    with budget.spent():
        while budget.left > 0 and time.thread_time() < begin + 1:
            pass
    assert -0.05 < budget.seconds <= 0
