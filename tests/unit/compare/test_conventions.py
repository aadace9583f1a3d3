"""Legitimate orders of rounding: an engine that follows one is held to it, and no other engine is given its room."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from harness.compare.conventions import EAGER, PARTIAL_SUMS, conventions
from harness.oracle.watch import AttentionCall, Seeing, run_attention, watching
from harness.results import Verdict
from harness.taps import Kind, Operation

from .conftest import LENGTHS, NUM_NEW

ROW = (2, LENGTHS[2] + 1)
ATTENTION = "model.layers.1.attention"


def tap(result, name):
    (found,) = [tap for tap in result.taps if tap.name == name]
    return found


def names(hf, operation, **given):
    given = {"dtype": torch.bfloat16, "rows": torch.arange(3), "inputs": [torch.ones(3, 8)], "call": None} | given
    return [each.name for each in conventions(hf, operation, **given)]


def test_which_conventions_apply(tiny):
    hf = tiny("llama")
    row_parallel, other = hf.graph["model.layers.0.self_attn.o_proj"], hf.graph["model.layers.0.self_attn.q_proj"]
    assert names(hf, row_parallel) == [PARTIAL_SUMS.format(count) for count in (2, 4, 8)]
    assert names(hf, row_parallel, inputs=[torch.ones(3, 6)]) == [PARTIAL_SUMS.format(2)]
    assert names(hf, other) == []
    assert names(hf, hf.graph["model.layers.0.input_layernorm"]) == []
    call = AttentionCall(path="", module=hf.module("model.layers.0.self_attn"), query=None, key=None, value=None,
                         mask=None, options={})  # fmt: skip
    assert names(hf, hf.graph["model.layers.0.attention"], call=call) == [EAGER]


# Attention whose scores are rounded.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss", "mistral"])
def test_the_eager_convention_is_bit_for_bit_hfs_eager_attention(tiny, family, dtype):
    """Caps, sinks and windows too; with the mask of HF's own eager attention made anew from what is seen."""
    hf, calls = tiny(family, dtype), []

    class Watcher(Seeing):
        def attend(self, call, function):
            result = run_attention(call, function)
            calls.append((call, result[0].flatten(2).flatten(0, 1)))
            return result

    with watching(hf, attention="eager") as watch, watch.showing(Watcher(lambda *_: None)), torch.no_grad():
        hf.model(input_ids=torch.tensor([list(range(3, 16)), list(range(23, 36))]), use_cache=False)
    for call, context in calls:
        operation = next(op for op in hf.graph if op.module == call.path and op.kind is Kind.ATTENTION)
        rows = torch.tensor([25, 0, 13, 7])
        (convention,) = conventions(hf, operation, dtype=dtype, rows=rows, inputs=[], call=call)
        with torch.no_grad():
            assert torch.equal(convention.expected(), context[rows].double())


def loud(copy):
    """Make queries so long that rounded scores show: their error grows with their size."""
    for step in copy.computing():
        for name in [name for name in step.taps if name.endswith(".q_rope")]:
            step.taps[name] = step.taps[name] * 24


class Forcing(Seeing):
    """Gives attention one request's recorded queries, keys and values, and keeps the contexts."""

    def __init__(self, graph, copy, request):
        super().__init__(lambda *_: None)
        self._graph, self._copy, self._request = graph, copy, request
        self.contexts = {}

    def see(self, source, value):
        if not source.endswith((":query", ":key", ":value")):
            return None
        tap, (heads, num_tokens) = self._graph.canonical(source), value.shape[1:3]
        rows = [self._copy.at(tap, self._request, at).view(heads, -1) for at in range(num_tokens)]
        return torch.stack(rows).transpose(0, 1)[None].to(value.dtype)

    def attend(self, call, function):
        result = run_attention(call, function)
        self.contexts[call.path] = result[0][0]
        return result


def attend(one, copy, attention):
    """Put what HF's attention of that name makes of a recording's queries, keys and values into it."""
    graph = one.hf.graph
    for request in copy.requests:
        ids = torch.zeros(1, len(request.token_ids), dtype=torch.int64)
        watcher = Forcing(graph, copy, request.id)
        with watching(one.hf, attention=attention) as watch, watch.showing(watcher), torch.no_grad():
            one.hf.model(input_ids=ids, use_cache=False)
        for operation in (op for op in graph if op.kind is Kind.ATTENTION):
            for at, row in enumerate(watcher.contexts[operation.module]):
                copy.at(operation.tap, request.id, at).view(-1).copy_(row.flatten())


@pytest.fixture
def one(bench):
    return bench("llama-tiny", torch.bfloat16)


def test_rounded_scores_are_a_convention_that_an_engine_is_held_to(one, tmp_path):
    actual = one.recorded()
    loud(actual)
    attend(one, actual, "eager")
    found = one.comparison(actual.write(tmp_path / "a"))
    errors = found.errors[ATTENTION]
    assert errors.convention == EAGER
    assert not bool(errors.bad.any())
    assert tap(found.result, ATTENTION).verdict in (Verdict.CONVENTION, Verdict.EXACT)
    assert tap(found.result, ATTENTION).convention == EAGER
    actual.at(ATTENTION, *ROW).mul_(1.1)
    result = one.compare(actual.write(tmp_path / "b"))
    assert tap(result, ATTENTION).verdict is Verdict.BUG
    assert tap(result, ATTENTION).num_bad_rows == 1
    assert tap(result, ATTENTION).num_rows == sum(LENGTHS) + len(LENGTHS) * (NUM_NEW - 1)


def test_an_engine_that_does_not_round_its_scores_is_given_no_room_for_it(one, tmp_path):
    """A row that is off by half of what the convention moves is a bug in an engine that follows it nowhere."""
    actual, eager = one.recorded(), one.recorded()
    for copy, attention in ((actual, "sdpa"), (eager, "eager")):
        loud(copy)
        attend(one, copy, attention)
    sound = one.comparison(actual.write(tmp_path / "a")).errors[ATTENTION]
    assert sound.convention is None
    assert not bool(sound.bad.any())
    other = one.comparison(eager.write(tmp_path / "b")).errors[ATTENTION]
    moved = (actual.at(ATTENTION, *ROW).float() - eager.at(ATTENTION, *ROW).float()).norm()
    assert float(moved) > 0
    row = actual.at(ATTENTION, *ROW)
    direction = torch.randn(row.shape, generator=torch.Generator().manual_seed(2))
    row += (direction / direction.norm() * row.float().norm() * 0.1).to(row.dtype)
    result = one.compare(actual.write(tmp_path / "c"))
    assert tap(result, ATTENTION).num_bad_rows == 1
    assert other.convention == EAGER


# Products that several ranks add up.


@pytest.mark.parametrize("name", ["model.layers.1.self_attn.o_proj", "model.layers.1.mlp.down_proj"])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_partial_sums_are_those_of_the_ranks(bench, name, num_ranks):
    one = bench("qwen3-tiny", torch.bfloat16)
    weight = one.hf.module(name).weight.detach()
    x = torch.randn(5, weight.shape[1], generator=torch.Generator().manual_seed(1)).bfloat16()
    found = {
        each.name: each.expected()
        for each in conventions(
            one.hf, one.hf.graph[name], dtype=torch.bfloat16, rows=torch.arange(5), inputs=[x.double()], call=None
        )
    }[PARTIAL_SUMS.format(num_ranks)]
    shares = zip(x.double().chunk(num_ranks, dim=1), weight.double().chunk(num_ranks, dim=1), strict=True)
    torch.testing.assert_close(found, sum((a @ w.T).bfloat16().double() for a, w in shares), rtol=1e-12, atol=0)


@pytest.mark.parametrize("is_conv1d", [False, True])
def test_the_first_rank_adds_the_bias(is_conv1d):
    module = nn.Linear(8, 3).to(torch.bfloat16)
    x, weight, bias = torch.randn(4, 8).double(), module.weight.detach().double(), module.bias.detach().double()
    if is_conv1d:
        module.weight = nn.Parameter(module.weight.T.contiguous())
    hf = SimpleNamespace(module=lambda _path: module)
    operation = Operation(tap="c_proj", kind=Kind.LINEAR, inputs=("x",), source="c_proj")
    with torch.no_grad():
        found = next(conventions(hf, operation, dtype=torch.bfloat16, rows=torch.arange(4), inputs=[x], call=None))
        parts = (x[:, :4] @ weight[:, :4].T + bias).bfloat16(), (x[:, 4:] @ weight[:, 4:].T).bfloat16()
        torch.testing.assert_close(found.expected(), parts[0].double() + parts[1].double(), rtol=1e-12, atol=0)


def test_an_engine_that_adds_partial_sums_is_held_to_them(bench, tmp_path):
    one, name = bench("qwen3-tiny", torch.bfloat16), "model.layers.1.mlp.down_proj"
    actual, weight = one.recorded(), one.hf.module(name).weight.detach().double()
    for step in actual.computing():
        x = step.taps["model.layers.1.mlp.act"].double()
        shares = zip(x.chunk(8, dim=1), weight.chunk(8, dim=1), strict=True)
        step.taps[name] = sum((a @ w.T).bfloat16().double() for a, w in shares).bfloat16()
    errors = one.comparison(actual.write(tmp_path / "a")).errors[name]
    assert not bool(errors.bad.any())
    actual.at(name, *ROW).mul_(1.1)
    result = one.compare(actual.write(tmp_path / "b"))
    assert tap(result, name).num_bad_rows == 1
