"""Engines whose layers run in pieces that nothing sees into, attention between them: recorded ones, and compiled ones.

A recorded piece stands for a CUDA graph: it reads and writes fixed tensors, and a replay calls no hook, shows no
operation, and goes on with what it was recorded with.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.functional import gelu, linear, silu
from torch.utils._python_dispatch import _disable_current_modes

import harness
from harness.errors import Code
from harness.results.check import Outcome, ServedStatus
from reference_engine.fast import compiled

PROMPTS = [[5, 9, 14, 3, 8, 21], [7, 8, 9, 10]]
INSIDE = ("self_attn.o_proj", "post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.act")
"""What a piece computes and does not return."""
MAX_RECORDED = 3
"""Rows: a prompt is launched, and a step of decode is replayed."""


class Recorded:
    def __init__(self, function: Callable[..., Any], num_copied: int = 2) -> None:
        self.function, self.num_copied, self.fixed, self.num_replays = function, num_copied, {}, 0

    def __call__(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if len(inputs[0]) > MAX_RECORDED:
            return self.function(*inputs)
        self.num_replays += 1
        with _disable_current_modes():
            fixed, results = self.fixed.setdefault(
                len(inputs[0]), ([x.clone() for x in inputs], [x.clone() for x in self.function(*inputs)])
            )
            for place, x in zip(fixed[: self.num_copied], inputs, strict=False):
                place.copy_(x)
            for place, x in zip(results, self.function(*fixed), strict=True):
                place.copy_(x)
        return tuple(results)


def after_attention(layer: Any, activation: Callable[..., Any] = silu) -> Callable[..., Any]:
    """Return what computes the rest of a layer: of the context and the residual stream, both for the next layer."""

    def rest(context: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        residual, norm = residual + linear(context, layer.o_proj.weight), layer.post_attention_layernorm
        x = norm.weight * (residual * torch.rsqrt(residual.pow(2).mean(-1, keepdim=True) + norm.eps))
        gate, up = linear(x, layer.gate_up_proj.weight).chunk(2, dim=-1)
        return linear(activation(gate) * up, layer.down_proj.weight), residual

    return rest


@pytest.fixture
def folder(checkpoints):
    return checkpoints / "qwen2-tiny"


@pytest.fixture
def engine_of(fused, folder):
    """Return an engine whose layers end in pieces, each made of its layer and that layer's number."""

    def make(make_piece):
        engine = fused.FusedEngine(folder)
        engine.pieces = [make_piece(layer, number) for number, layer in enumerate(engine.model.layers)]
        for layer, piece in zip(engine.model.layers, engine.pieces, strict=True):

            def forward(x, residual, batch, layer=layer, piece=piece):
                normed = layer.input_layernorm(x, residual)
                x, residual = (normed, x.clone()) if residual is None else normed
                sizes = [layer.o_proj.weight.shape[1], layer.kv_width, layer.kv_width]
                q, k, v = (part.contiguous() for part in layer.qkv_proj(x)[0].split(sizes, dim=-1))
                return piece(layer.attn(*layer.rotary(batch["positions"], q, k), v, batch), residual)

            layer.forward = forward
        return engine

    return make


def check(engine, folder):
    return harness.check(engine, model=folder, prompts=PROMPTS, max_new_tokens=4, schedules=["batched"])


def test_a_sound_engine_in_recorded_pieces_passes_and_what_is_inside_is_said(engine_of, folder):
    engine = engine_of(lambda layer, _: Recorded(after_attention(layer)))
    result = check(engine, folder)
    result.assert_ok()
    assert result.as_served.status is ServedStatus.EQUAL
    assert all(piece.num_replays for piece in engine.pieces)
    text = " ".join(result.text().split())
    assert "only through what is computed from them: " + ", ".join(INSIDE) in text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make_piece", "cause"),
    [
        (lambda layer: Recorded(after_attention(layer, gelu)), "gelu"),
        (lambda layer: Recorded(after_attention(layer), num_copied=1), None),
    ],
    ids=["another activation", "the residual stream is the recording's"],
)
def test_a_mistake_inside_of_a_recorded_piece_is_found_at_what_the_piece_returns(make_piece, cause, engine_of, folder):
    right = lambda layer: Recorded(after_attention(layer))  # noqa: E731
    result = check(engine_of(lambda layer, number: (make_piece if number == 1 else right)(layer)), folder)
    assert result.outcome is Outcome.MISMATCH
    first = result.first_divergence
    assert first.tap.startswith("model.layers.1.")
    assert first.tap.endswith(("mlp.down_proj", "attn_residual", "output"))
    if cause is None:
        assert first.phase == "decode"
    else:
        assert cause in result.next_place.cause


def miscompiled(graph, _inputs):
    """Stand for a compiler that takes one activation for the other."""
    for node in graph.graph.nodes:
        if node.target is silu:
            node.target = gelu
    graph.recompile()
    return graph.forward


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_sound_compiled_engine_passes(engine_of, folder):
    result = check(engine_of(lambda layer, _: torch.compile(after_attention(layer), dynamic=True)), folder)
    result.assert_ok()
    assert result.as_served.status in (ServedStatus.EQUAL, ServedStatus.WITHIN_NOISE)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_what_a_compiler_makes_wrong_is_found_as_served(engine_of, folder):
    """While operations are watched, torch does not compile: what is watched is right."""

    def make_piece(layer, number):
        backend = miscompiled if number == 1 else "eager"
        return torch.compile(after_attention(layer), backend=backend, dynamic=True)

    result = check(engine_of(make_piece), folder)
    assert result.outcome is Outcome.MISMATCH
    assert [finding.code for run in result.runs for finding in run.findings] == [Code.OBSERVED_NOT_SERVED]
    assert result.as_served.num_different == result.as_served.num_rows


@pytest.mark.parametrize("is_wrong", [False, True])
def test_compiled_layers_of_the_reference_engine_are_judged_as_served(is_wrong, folder, monkeypatch):
    """`torch.compile` is replaced: what is judged is the layers that it returns."""
    monkeypatch.setattr(compiled.torch, "compile", lambda call, **_: call)
    if is_wrong:
        served = lambda call, **_: lambda *inputs: call(*inputs) * 1.01  # noqa: E731
        monkeypatch.setattr(compiled.torch, "compile", served)
    result = harness.check(
        "reference", model=folder, prompts=PROMPTS, max_new_tokens=4, schedules=["batched"],
        engine_options={"compile_layers": "true"},
    )  # fmt: skip
    assert (result.outcome is Outcome.MISMATCH) is is_wrong
    assert (result.as_served.status is ServedStatus.DIFFERS) is is_wrong
