"""Experts with quantised inputs: against a loop over rows that casts with torch, and where no scheme is known."""

from dataclasses import replace

import pytest
import torch
from torch.nn import functional

from harness.base.numerics import Numerics
from harness.formats.checkpoint import resolve
from harness.judge.compare.conventions.entry import SuspectRows
from harness.judge.compare.conventions.experts import CONVENTIONS
from harness.oracle.model import load_model
from tests.quantised_checkpoints import write_quantised

pytest.importorskip("harness.extensions.quantised", reason="quantised checkpoints are an extension")
from harness.extensions.quantised.conventions import CONVENTIONS as DECLARED

ROWS = 7
TAP = "model.layers.1.mlp.experts"


@pytest.fixture(scope="module")
def of_scheme(checkpoints, tmp_path_factory):
    """Rows of the experts of a checkpoint in some scheme, and what they are with inputs `seen` by each product."""
    folder = tmp_path_factory.mktemp("experts")

    def subject(kind, seen, dtype=torch.float32):
        path = folder / kind
        if not path.exists():
            write_quantised(checkpoints / "qwen3-moe-tiny", path, kind)
        hf = load_model(resolve(str(path)), dtype=torch.float32, stays=True)
        module = hf.module(TAP)
        generator = torch.Generator().manual_seed(4)
        x = torch.randn(ROWS, module.gate_up_proj.shape[2], generator=generator)
        chosen = torch.rand(ROWS, len(module.gate_up_proj), generator=generator).topk(2).indices
        weights = torch.rand(ROWS, 2, generator=generator)
        actual = torch.stack([by_hand(module, *row, seen) for row in zip(x, chosen, weights, strict=True)])
        return SuspectRows(
            hf=hf, operation=hf.graph[TAP], dtype=dtype, actual=actual, expected=actual,
            rows=torch.arange(ROWS), positions=torch.arange(ROWS), inputs=[x, chosen, weights],
        )  # fmt: skip

    return subject


def by_hand(module, x, chosen, weights, seen):
    output = torch.zeros_like(x, dtype=torch.float64)
    for expert, weight in zip(chosen.tolist(), weights.tolist(), strict=True):
        gate, up = (module.gate_up_proj[expert].detach().double() @ seen(x.double())).chunk(2)
        output += weight * (module.down_proj[expert].detach().double() @ seen(functional.silu(gate) * up))
    return output


def int8_of_a_token(x):
    scale = x.abs().max().float() / 127
    return (x / scale).round() * scale


def float8_of_a_token(x):
    scale = x.abs().max().float() / 448
    return (x / scale).float().to(torch.float8_e4m3fn).double() * scale


def float8_of_groups(x, size):
    return torch.cat([float8_of_a_token(part) for part in x.split(size)])


def errors(subject):
    (of_ggml,), (_, convention) = CONVENTIONS, DECLARED
    actual = []
    assert list(of_ggml.alternatives(subject)) == [], "no format of ggml's was declared"
    for rounding in convention.alternatives(subject):
        error = (subject.actual - rounding.expected()).norm(dim=1) / subject.actual.norm(dim=1)
        actual.append((float(error.median()), rounding))
    return sorted(actual, key=lambda pair: pair[0])


@pytest.mark.parametrize(("kind", "seen"), [("w8a8", int8_of_a_token), ("fp8-dynamic", float8_of_a_token)])
def test_inputs_of_each_product_are_those_of_the_scheme(of_scheme, kind, seen):
    error, rounding = errors(of_scheme(kind, seen))[0]
    assert error < 1e-6
    assert "one scale for a token, as the checkpoint says" in rounding.name
    assert errors(of_scheme(kind, lambda x: x))[0][0] > 1e-3, "inputs that are not quantised are something else"


def test_groups_of_inputs_have_scales_of_their_own(of_scheme):
    plain = of_scheme("fp8-blocks", lambda x: x)
    source = plain.hf.quantised_source.open()
    size = next(weight.scheme.inputs.group for name, weight in source.weights.items() if ".experts." in name)
    error, _ = errors(of_scheme("fp8-blocks", lambda x: float8_of_groups(x, size)))[0]
    assert error < 1e-6


def test_what_the_dtype_does_to_a_code_is_allowed(of_scheme):
    fine, coarse = (errors(of_scheme("w8a8", int8_of_a_token, dtype))[0][1] for dtype in (torch.float32, torch.float16))
    assert bool((coarse.allowance > 0).all())
    assert float(fine.allowance.median()) < 100  # of float32, where no value is on a tie


@pytest.mark.parametrize("kind", ["w4a16", "fp8-static"])
def test_inputs_without_a_scheme_of_their_own_are_left_alone(of_scheme, kind):
    assert errors(of_scheme(kind, lambda x: x)) == []


def int8_of_blocks(x):
    """ggml's Q8_0: a scale in float16 for 32 values."""
    parts = []
    for block in x.split(32):
        scale = block.abs().max().float() / 127
        parts.append((block / scale).round() * scale.half())
    return torch.cat(parts)


def test_inputs_in_blocks_are_those_of_ggml(of_scheme):
    """Of an engine that declares weights in such a format, whatever the checkpoint says."""
    subject = replace(of_scheme("w4a16", int8_of_blocks), declared=Numerics(weights=("F16", "Q4_0")))
    (of_ggml,) = CONVENTIONS
    (rounding,) = of_ggml.alternatives(subject)
    assert rounding.name == "inputs quantised to Q8_0"
    error = (subject.actual - rounding.expected()).norm(dim=1) / subject.actual.norm(dim=1)
    assert float(error.median()) < 1e-6
    assert list(of_ggml.alternatives(replace(subject, declared=Numerics(weights=("F16",))))) == []
