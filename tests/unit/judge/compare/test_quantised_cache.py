"""Attention over a quantised cache: ggml's formulas by hand, and what is no rounding of theirs."""

import pytest
import torch

from harness.base.metrics import rounding_unit
from harness.base.numerics import Numerics
from harness.formats.taps import Kind
from harness.judge.compare.conventions.attention import CONVENTIONS
from harness.judge.compare.conventions.entry import SuspectRows
from harness.oracle.model import load_model
from harness.oracle.watch import Seeing, run_attention, watching

gguf = pytest.importorskip("gguf", reason="the package gguf is not installed (extra test or llamacpp)")
FORMATS = [
    "Q8_0",
    "Q5_0",
    "Q4_0",
    "Q5_1",
    "Q4_1",
]  # gguf does not write IQ4_NL: llama.cpp itself does, in the slow tests


@pytest.fixture(scope="module")
def hf(checkpoints):
    return load_model(checkpoints / "llama-tiny", dtype=torch.float32)


@pytest.fixture(scope="module")
def call(hf):
    """The first layer's attention over 24 tokens, with keys that are not centred: their minima weigh."""
    calls = []

    class Watcher(Seeing):
        def attend(self, call, function):
            calls.append(call)
            return run_attention(call, function)

    with watching(hf) as watch, watch.showing(Watcher(lambda *_: None)), torch.no_grad():
        hf.model(input_ids=torch.tensor([list(range(3, 27))]), use_cache=False)
    calls[0].key.add_(0.5 * calls[0].key.std())
    return calls[0]


def blocks_of(x, name):
    """What gguf makes of heads: values and, where the format has them, the minima of blocks."""
    kind, rows = gguf.GGMLQuantizationType[name], x.flatten(0, 2).numpy()
    packed = gguf.quants.quantize(rows, kind)
    values = torch.from_numpy(gguf.quants.dequantize(packed, kind)).double().reshape(x.shape)
    minima = torch.from_numpy(packed.copy())[:, 2:4].clone().view(torch.float16).double() if name[-1] == "1" else None
    return values, None if minima is None else minima.reshape(*x.shape[:-1], 1)


def attend(call, name, *, adds_minima=True):
    """Attention as ggml computes it, for heads of one block: queries in Q8_0 or Q8_1, [tokens, heads * 32]."""
    (query, _), (key, minima), (value, _) = (
        blocks_of(x, kind) for x, kind in ((call.query, "Q8_0"), (call.key, name), (call.value, name))
    )
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    scores = query @ key.mT
    if minima is not None:
        minima = minima.repeat_interleave(groups, dim=1)
        largest = call.query.abs().amax(dim=-1, keepdim=True)
        sums = (largest / 127 * (call.query * (127 / largest)).round().sum(-1, keepdim=True)).half().double()
        scores = query @ (key - minima).mT + (sums @ minima.mT if adds_minima else 0)
    scores = (scores * query.shape[-1] ** -0.5).masked_fill(torch.ones(24, 24).triu(1).bool(), -torch.inf)
    return (scores.softmax(-1) @ value).transpose(1, 2).flatten(2).flatten(0, 1)


def first_rounding(hf, call, name):
    operation = next(op for op in hf.graph if op.module == call.path and op.kind is Kind.ATTENTION)
    rows = torch.arange(24)
    unknown = torch.full((24, 4), torch.nan)
    subject = SuspectRows(
        hf=hf, operation=operation, dtype=torch.float32, rows=rows, positions=rows, actual=unknown, expected=unknown,
        call=call, inputs=[], declared=Numerics(cache=name),
    )  # fmt: skip
    convention = CONVENTIONS[2]  # the last is of formats with scales
    return next(iter(convention.alternatives(subject)))


def roundings(expected, actual):
    return (expected - actual).norm(dim=1) / actual.norm(dim=1) / rounding_unit(torch.float32)


@pytest.mark.parametrize("name", FORMATS)
def test_attention_is_ggmls(hf, call, name):
    rounding = first_rounding(hf, call, name)
    assert f"keys read in {name}, values in {name}" in rounding.name
    assert (roundings(rounding.expected(), attend(call, name)) <= rounding.allowance + 0.1).all()


@pytest.mark.parametrize("name", ["Q5_1", "Q4_1"])
def test_minima_that_are_left_out_are_no_rounding(hf, call, name):
    rounding = first_rounding(hf, call, name)
    error = roundings(rounding.expected(), attend(call, name, adds_minima=False))
    assert (error[1:] > 100 * (rounding.allowance[1:] + 1)).all()  # the first token sees itself alone
