import torch
from torch.nn import functional

TAP = "model.layers.1.mlp.act"


def test_gate_up_and_activation(bench):
    gate, up = (bench.tap(f"model.layers.1.mlp.{name}_proj") for name in ("gate", "up"))
    wrong = {
        "gate and up are swapped: the activation is applied to up": functional.silu(up) * gate,
        "the activation is GELU": functional.gelu(gate) * up,
        "the activation is GELU (tanh)": functional.gelu(gate, approximate="tanh") * up,
        "the activation is ReLU": functional.relu(gate) * up,
        "no activation is applied": gate * up,
        "the product with up is missing": functional.silu(gate),
        "the gate is missing": up,
        "act(gate) and up are added instead of multiplied": functional.silu(gate) + up,
        "the activation is applied to the product": functional.silu(gate * up),
        "the activation is computed in bfloat16": functional.silu(gate.bfloat16()).double() * up,
    }
    for cause, tensor in wrong.items():
        explanation = bench.explain(TAP, tensor)
        assert (explanation.cause, explanation.scope) == (cause, "every row")
        assert explanation.residual_after < 10


def test_one_request_alone(bench):
    gate, wrong = bench.tap("model.layers.1.mlp.gate_proj"), bench.tap(TAP)
    second = bench.rows(TAP).request == 1
    wrong[second] = (torch.sigmoid(gate) * bench.tap("model.layers.1.mlp.up_proj"))[second]
    explanation = bench.explain(TAP, wrong)
    assert (explanation.cause, explanation.scope) == ("the activation is sigmoid", "request 1")


def test_an_activation_without_a_gate(bench_of):
    """GPT-2's; nothing that is said of gate and up can hold for it."""
    bench, tap = bench_of("gpt2"), "transformer.h.1.mlp.c_proj.input"
    x = bench.tap("transformer.h.1.mlp.c_fc")
    for cause, tensor in {
        "the activation is ReLU": functional.relu(x),
        "no activation is applied": x,
    }.items():
        explanation = bench.explain(tap, tensor)
        assert (explanation.cause, explanation.scope) == (cause, "every row")
