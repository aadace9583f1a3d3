"""The truth is HF's own forward in float64, a layer at a time, and the weights are not touched by it."""

import copy
import weakref

import pytest
import torch

from harness.oracle import precision
from harness.oracle.capture import capturing
from harness.oracle.precision import keeping_double
from harness.oracle.truth import truth_forward
from harness.taps import Kind

from .state import bits, surroundings

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class BoomError(Exception):
    """Raised by the tests."""


def truth(decoder, token_ids, logit_rows=None):
    taps = {}
    rows = range(len(token_ids)) if logit_rows is None else logit_rows
    truth_forward(decoder, token_ids, lambda tap, x: taps.setdefault(tap, x.clone()), logit_rows=rows)
    return taps


def whole_model_in_double(decoder, token_ids):
    """The plain way: the whole model in float64 at once. Its rotary frequencies are float32 by HF's definition."""
    model = copy.deepcopy(decoder.model)
    frequencies = model.model.rotary_emb.inv_freq.clone()
    model.double()
    model.model.rotary_emb.inv_freq = frequencies
    double = type(decoder)(
        model=model, graph=decoder.graph, folder=decoder.folder, dtype=torch.float64, device=decoder.device
    )
    taps = {}
    with torch.no_grad(), keeping_double(), capturing(double, lambda tap, x: taps.setdefault(tap, x.clone())):
        model(input_ids=torch.tensor([token_ids]), use_cache=False)
    return taps


def relative(actual, expected):
    return float((actual - expected).norm() / expected.norm())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["llama-tiny", "qwen2-tiny", "qwen3-tiny"])
def test_truth_is_the_whole_model_in_double(load, token_ids, name, dtype):
    decoder = load(name, dtype)
    actual, expected = truth(decoder, token_ids), whole_model_in_double(decoder, token_ids)
    assert actual.keys() == expected.keys() == {op.tap for op in decoder.graph if op.kind is not Kind.CACHE}
    for tap in actual:
        assert actual[tap].dtype == torch.float64, tap
        assert actual[tap].shape == expected[tap].shape, tap
        assert relative(actual[tap], expected[tap]) < 1e-12, tap


def test_truth_is_not_a_rounded_forward(load, token_ids):
    """Taps hold more than float32 can: nothing on the way was rounded to it."""
    taps = truth(load("qwen3-tiny"), token_ids)
    rounded = [tap for tap, x in taps.items() if torch.equal(x, x.float().double())]
    assert rounded == ["model.embed_tokens"], "a row of the embedding is the weight itself"


def test_only_the_wanted_logits(load, token_ids):
    decoder = load("qwen2-tiny")
    rows = [20, 3, 22]
    logits = truth(decoder, token_ids, rows)["lm_head"]
    torch.testing.assert_close(logits, truth(decoder, token_ids)["lm_head"][rows], rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("dtype", DTYPES)
def test_nothing_is_left_behind(load, token_ids, dtype):
    decoder = load("qwen3-tiny", dtype)
    before, weights = surroundings(decoder), bits(decoder.model)
    truth(decoder, token_ids)
    assert surroundings(decoder) == before
    assert bits(decoder.model) == weights
    assert decoder.model.lm_head.weight is decoder.model.model.embed_tokens.weight, "the tying stays"


@pytest.mark.parametrize("tap", ["model.layers.1.mlp.act", "model.layers.0.output", "model.norm", "lm_head"])
def test_nothing_is_left_behind_when_the_sink_raises(load, token_ids, tap):
    decoder = load("llama-tiny", torch.bfloat16)
    before, weights = surroundings(decoder), bits(decoder.model)

    def sink(name, _):
        if name == tap:
            raise BoomError

    with pytest.raises(BoomError):
        truth_forward(decoder, token_ids, sink, logit_rows=[0])
    assert surroundings(decoder) == before
    assert bits(decoder.model) == weights


def test_no_more_than_one_layer_is_in_float64_at_a_time(load, token_ids):
    decoder = load("llama-tiny", torch.bfloat16)
    layer_bytes = max(sum(p.numel() for p in layer.parameters()) for layer in decoder.layers) * 8
    in_double = []

    def look(_tap, _x):
        alive = [p for p in decoder.model.parameters() if p.dtype == torch.float64]
        in_double.append(sum(p.numel() for p in alive) * 8)

    truth_forward(decoder, token_ids, look, logit_rows=[0])
    assert max(in_double) == layer_bytes
    assert in_double[0] == 0, "the embedding's table is not raised"
    assert in_double[-1] == 0, "nor is the head"


def test_raised_layers_are_freed(load, token_ids, monkeypatch):
    """Not only put back: nothing holds on to a layer's float64 weights once the next one runs."""
    decoder, made = load("llama-tiny", torch.bfloat16), {}
    to = torch.Tensor.to

    def tracking(self, *args, **kwargs):
        result = to(self, *args, **kwargs)
        if args == (precision.TRUTH_DTYPE,) and result is not self and any(self.data_ptr() == at for at in weights):
            made[result.data_ptr()] = weakref.ref(result.untyped_storage())
        return result

    weights = {p.data_ptr() for layer in decoder.layers for p in layer.parameters()}
    alive = []
    monkeypatch.setattr(torch.Tensor, "to", tracking)
    truth_forward(
        decoder,
        token_ids,
        lambda *_: alive.append(sum(x().nbytes() for x in made.values() if x() is not None)),
        logit_rows=[0],
    )
    layer_bytes = sum(p.numel() for p in decoder.layers[0].parameters()) * 8
    assert 0 < max(alive) <= layer_bytes
