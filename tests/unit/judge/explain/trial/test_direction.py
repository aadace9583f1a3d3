"""Errors with a direction and within all bounds: a cause is named if it takes the direction away, and else none."""

import torch

from harness.errors import Code
from harness.judge.explain.core.hypothesis import Hypothesis
from harness.judge.explain.trial.ranking import NO_CAUSE

TAP, SOURCE = "model.layers.0.input_layernorm", "model.embed_tokens"
ACT, GATE, UP = (f"model.layers.1.mlp.{name}" for name in ("act", "gate_proj", "up_proj"))
DOWN = "model.layers.1.mlp.down_proj"


def normed(x, weight, eps):
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight


def explained(bench, tap, tensor):
    """The explanation of a tap whose rows are all within their bounds."""
    recording = bench.planted({tap: tensor})
    found = bench.compare(recording)
    assert not bool(found.errors[tap].bad.any())
    assert found.errors[tap].effect is not None
    return bench.explain(tap, tensor, code=Code.SYSTEMATIC_ERROR)


def test_a_constant_that_is_slightly_wrong(bench):
    bench = bench("qwen3-tiny", torch.float16)
    found = explained(bench, TAP, normed(bench.tap(SOURCE), bench.weight(TAP), eps=1e-5))
    assert found.cause == "wrong eps: 1e-05 instead of 1e-06"
    assert found.is_cause
    assert found.residual_after < found.residual_before < 4.7
    assert found.num_explained > 0.5 * found.num_rows


def test_a_gain_is_measured(bench):
    bench = bench("qwen3-tiny", torch.bfloat16)
    exact = torch.nn.functional.silu(bench.tap(GATE)) * bench.tap(UP)
    found = explained(bench, ACT, exact * 1.004)
    assert found.cause.startswith("a constant gain of 1.00")
    assert found.num_fitted == 1


def test_an_offset_of_a_channel_is_seen(bench):
    bench = bench("qwen3-tiny", torch.bfloat16)
    exact = bench.tap(ACT) @ bench.weight(DOWN).T
    exact[:, 5] += 0.012 * exact[:, 5].std()
    assert "offset per channel" in explained(bench, DOWN, exact).cause


def test_a_direction_that_nothing_known_takes_away(bench, monkeypatch):
    """Nothing but the truth again, half of the gain, and twice of it is tried."""
    bench = bench("qwen3-tiny", torch.bfloat16)
    exact = torch.nn.functional.silu(bench.tap(GATE)) * bench.tap(UP)

    def tried(failure):
        for share in (0, 0.5, 2):
            yield Hypothesis(cause="not this", output=failure.expected * (1 + 0.004 * share))

    monkeypatch.setattr("harness.judge.explain.trial.direction.causes_of", lambda _kind: [tried])
    found = explained(bench, ACT, exact * 1.004)
    assert (found.cause, found.is_cause) == (NO_CAUSE, False)
    assert found.residual_after is None
