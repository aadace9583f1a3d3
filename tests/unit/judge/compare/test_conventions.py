"""Legitimate orders of rounding: an engine that follows one is held to it, and no other engine is given its room."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from harness.base.metrics import rounding_unit
from harness.base.numerics import Numerics
from harness.errors import Code, HarnessError
from harness.extensions.faults.fault import FaultConfig
from harness.extensions.faults.trial import checkpoint
from harness.formats.taps import Kind, Operation
from harness.judge.compare.conventions import SuspectRows, conventions
from harness.judge.compare.conventions.attention import EAGER, SCALED_FIRST, SCALED_FIRST_BY_ROUNDED
from harness.judge.compare.conventions.linear import PARTIAL_SUMS, QUANTISED_INPUTS, ROUNDED_INPUTS, SUMS_IN_DTYPE
from harness.judge.compare.conventions.rowwise import SUMMED_IN_ORDER, UNROUNDED_SUM, error_of_sum
from harness.oracle.rotation import rotations
from harness.oracle.watch import AttentionCall, Seeing, run_attention, watching
from harness.results.check import Verdict

from .conftest import LENGTHS, NUM_NEW, Bench
from .judgements import tap
from .recordings import Copy

ROW = (2, LENGTHS[2] + 1)
ATTENTION = "model.layers.1.attention"


def subject(hf, operation, **given):
    """Rows of an operation; what is not given does not matter."""
    rows = given.pop("rows", torch.arange(3))
    unknown = torch.full((len(rows), 4), torch.nan)
    given = {"dtype": torch.bfloat16, "actual": unknown, "expected": unknown, "positions": rows} | given
    return SuspectRows(hf=hf, operation=operation, rows=rows, **given)


def roundings(subject):
    """Yield the orders of rounding that apply to some rows."""
    for convention in conventions(subject.operation.kind):
        yield from convention.alternatives(subject)


def names(hf, operation, **given):
    return [rounding.name for rounding in roundings(subject(hf, operation, **{"inputs": [torch.ones(3, 8)]} | given))]


def test_which_conventions_apply(tiny):
    hf = tiny("llama")
    row_parallel, other = hf.graph["model.layers.0.self_attn.o_proj"], hf.graph["model.layers.0.self_attn.q_proj"]
    width = hf.module("model.layers.0.self_attn.o_proj").weight.shape[1]
    two, four, eight = (PARTIAL_SUMS.format(count) for count in (2, 4, 8))
    rounded = SUMS_IN_DTYPE.format("bfloat16", 4)
    inputs = [torch.ones(3, width)]
    assert names(hf, row_parallel, inputs=inputs) == [two, four, eight]
    assert names(hf, row_parallel, inputs=inputs, declared=Numerics(num_ranks=4)) == [four, rounded]
    assert names(hf, row_parallel, inputs=inputs, declared=Numerics(num_ranks=1)) == []
    assert names(hf, row_parallel, inputs=inputs, declared=Numerics(num_ranks=7)) == []
    assert names(hf, row_parallel, inputs=inputs, dtype=torch.float32) == []
    assert names(hf, other) == []
    assert names(hf, hf.graph["model.layers.0.input_layernorm"]) == []
    call = AttentionCall(path="", module=hf.module("model.layers.0.self_attn"), query=None, key=None, value=None,
                         mask=None, options={})  # fmt: skip
    assert names(hf, hf.graph["model.layers.0.attention"], call=call) == [
        EAGER, SCALED_FIRST, SCALED_FIRST_BY_ROUNDED,
    ]  # fmt: skip


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
        convention, *_ = roundings(subject(hf, operation, dtype=dtype, rows=rows, call=call))
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


def test_rounded_scores_are_a_convention_that_an_engine_is_held_to(one, actual, tmp_path):
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
        rounding.name: rounding.expected()
        for rounding in roundings(subject(one.hf, one.hf.graph[name], rows=torch.arange(5), inputs=[x.double()]))
    }[PARTIAL_SUMS.format(num_ranks)]
    shares = zip(x.double().chunk(num_ranks, dim=1), weight.double().chunk(num_ranks, dim=1), strict=True)
    torch.testing.assert_close(found, sum((a @ w.T).bfloat16().double() for a, w in shares), rtol=1e-12, atol=0)


@pytest.mark.parametrize("is_conv1d", [False, True])
def test_the_first_rank_adds_the_bias(is_conv1d):
    module = nn.Linear(8, 3).to(torch.bfloat16)
    x, weight, bias = torch.randn(4, 8).double(), module.weight.detach().double(), module.bias.detach().double()
    if is_conv1d:
        module.weight = nn.Parameter(module.weight.T.contiguous())
    hf = SimpleNamespace(module=lambda _path: module, quantised_source=None)
    operation = Operation(tap="c_proj", kind=Kind.LINEAR, inputs=("x",), source="c_proj")
    with torch.no_grad():
        found = next(roundings(subject(hf, operation, rows=torch.arange(4), inputs=[x])))
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


# Inputs that are rounded or quantised before a product in float32.


def linear(weight, bias=None):
    """A model of one product, and the operation that it is."""
    module = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None).requires_grad_(False)
    module.weight.copy_(weight)
    if bias is not None:
        module.bias.copy_(bias)
    return SimpleNamespace(module=lambda _path: module, quantised_source=None), Operation(
        tap="proj", kind=Kind.LINEAR, inputs=("x",), source="proj"
    )


def held(hf, operation, actual, x, **declared):
    """Names of the conventions of a product in float32 that rows agree with, to a few float32 roundings."""
    rows = torch.arange(len(x))
    given = {"dtype": torch.float32, "actual": actual, "expected": actual.double(), "inputs": [x.double()]}
    found = roundings(subject(hf, operation, rows=rows, declared=Numerics(**declared), **given))
    return [item.name for item in found if float((item.expected() - actual).norm() / actual.norm()) < 1e-6]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_inputs_rounded_to_the_dtype_of_the_weight(dtype):
    generator = torch.Generator().manual_seed(3)
    weight, x = torch.randn(12, 64, generator=generator), torch.randn(5, 64, generator=generator)
    name = ROUNDED_INPUTS.format(str(dtype).removeprefix("torch."))
    coarse, bias = weight.to(dtype).float(), torch.randn(12, generator=generator)
    actual = x.to(dtype).float() @ coarse.T
    assert held(*linear(coarse), actual, x) == [name]
    assert held(*linear(coarse, bias), actual + bias, x) == [name]
    assert held(*linear(weight), x.to(dtype).float() @ weight.T, x) == [], "the weight is no such weight"
    other = torch.float16 if dtype is torch.bfloat16 else torch.bfloat16
    named = {torch.bfloat16: "BF16", torch.float16: "F16"}
    assert held(*linear(coarse), actual, x, weights=(named[dtype], "F32")) == [name]
    assert held(*linear(coarse), actual, x, weights=(named[other],)) == [], "it is declared to be another"
    if dtype is torch.float16:
        assert held(*linear(coarse), x.to(other).float() @ coarse.T, x) == [], "the dtype is not the weight's"


def q8_0(x, block=32):
    """The integers and scales of ggml's Q8_0, by hand: [rows, blocks, block] and [rows, blocks, 1]."""
    blocks = x.unflatten(1, (-1, block))
    scale = blocks.abs().amax(dim=2, keepdim=True) / 127
    return (blocks / scale).round(), scale.half().float()


def test_inputs_quantised_as_the_weights_ask_for():
    generator = torch.Generator().manual_seed(4)
    weight, x = torch.randn(12, 64, generator=generator), torch.randn(5, 64, generator=generator)
    integers, scale = q8_0(x)
    actual, name = (integers * scale).flatten(1) @ weight.T, QUANTISED_INPUTS.format("Q8_0")
    assert held(*linear(weight), actual, x, weights=("Q4_0", "F32")) == [name]
    assert held(*linear(weight), actual, x) == [], "it is not declared"
    assert held(*linear(weight), actual, x, weights=("Q6_K",)) == [], "those are declared with other inputs"
    integers, scale = q8_0(x, 16)
    assert held(*linear(weight), (integers * scale).flatten(1) @ weight.T, x, weights=("Q8_0",)) == []


def test_inputs_in_blocks_of_256():
    generator = torch.Generator().manual_seed(5)
    weight, x = torch.randn(6, 512, generator=generator), torch.randn(3, 512, generator=generator)
    x[0, 7] = -9.0  # the largest of its block becomes -127 all the same
    blocks = x.unflatten(1, (2, 256))
    largest = blocks.gather(2, blocks.abs().argmax(dim=2, keepdim=True))
    integers = (blocks * (-127 / largest)).round()
    assert integers.min() == -127
    actual = (integers * (largest / -127)).flatten(1) @ weight.T
    assert held(*linear(weight), actual, x, weights=("Q4_K",)) == [QUANTISED_INPUTS.format("Q8_K")]
    assert held(*linear(weight[:, :96]), actual, x[:, :96], weights=("Q4_K",)) == []


@pytest.mark.parametrize("is_up", [True, False])
def test_a_value_on_a_tie_is_rounded_either_way_and_no_other_value_is(is_up):
    weight = torch.randn(12, 32, generator=torch.Generator().manual_seed(6))
    x = torch.arange(32.0)[None] + 0.25
    x[0, 0] = 127.0  # the scale is 1
    x[0, 5] = 17.5
    integers = x.round()
    integers[0, 5] = 18.0 if is_up else 17.0
    name = QUANTISED_INPUTS.format("Q8_0")
    assert held(*linear(weight), integers @ weight.T, x, weights=("Q8_0",)) == [name]
    integers[0, 9] += 1
    assert held(*linear(weight), integers @ weight.T, x, weights=("Q8_0",)) == []


def test_many_values_of_a_row_on_ties_are_told_at_once():
    """A quantised embedding after a norm of ones: a whole level of its grid is on ties."""
    generator = torch.Generator().manual_seed(6)
    weight = torch.randn(256, 96, generator=generator)
    x = torch.randint(-60, 60, (3, 96), generator=generator).float()
    x[:, ::32] = 127.0  # the scale is 1
    x[:, 1:64:2] += 0.5
    integers = x.trunc() + (torch.rand(3, 96, generator=generator) < 0.5) * (x != x.trunc()) * x.sign()
    name = QUANTISED_INPUTS.format("Q8_0")
    assert held(*linear(weight), integers @ weight.T, x, weights=("Q8_0",)) == [name]
    integers[:, 40] += 1
    assert held(*linear(weight), integers @ weight.T, x, weights=("Q8_0",)) == []


# Rotary angles.


def rotary(one, x, angles):
    """x [rows, heads, size] turned by angles [rows, pairs], halves of a head paired."""
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(1)


@pytest.mark.parametrize("model", ["qwen3-tiny", "llama-tiny"])
def test_angles_of_another_order_and_no_wrong_ones(bench, model):
    """At the position 3,000, where an angle in float32 is off by thousands of roundings."""
    one = bench(model)
    own = next(rotations(one.hf))
    size, positions = one.hf.head_dim, torch.tensor([0, 1, 500, 3000])
    x = torch.randn(4, 2, size, generator=torch.Generator().manual_seed(7)).double()
    frequencies = own.frequencies

    def bad(angles):
        actual, expected = rotary(one, x, angles), rotary(one, x, own.phases(positions))
        operation = Operation(tap="q_rope", kind=Kind.ROTARY, inputs=("q",), source="q")
        given = {"dtype": torch.float32, "actual": actual, "expected": expected, "inputs": [x.flatten(1)]}
        (found,) = roundings(subject(one.hf, operation, rows=torch.arange(4), **given | {"positions": positions}))
        error = (found.expected() - actual).norm(dim=1) / actual.norm(dim=1) / rounding_unit(torch.float32)
        return (error > found.allowance + 3).tolist()

    at = positions[:, None]
    assert bad(at.double() * frequencies.double()) == [False] * 4
    assert bad((at.float() / (1 / frequencies)).double()) == [False] * 4
    assert bad(at.double() * frequencies.double() * (1 + 1e-6)) == [False, True, True, True]
    assert bad(at.double() * frequencies.half().double())[1:] == [True] * 3
    assert bad((at + 1).double() * frequencies.double()) == [True] * 4


# Norms of a sum that was not rounded.


def test_a_norm_of_the_sum_before_it_is_rounded(bench):
    one, name = bench("qwen3-tiny", torch.bfloat16), "model.layers.1.post_attention_layernorm"
    operation = one.hf.graph[name]
    module = one.hf.module(name)
    first, second = torch.randn(2, 3, module.weight.shape[0], generator=torch.Generator().manual_seed(8)).bfloat16()
    exact = first.float() + second.float()
    taps = dict(zip(one.hf.graph[operation.inputs[0]].inputs, (first, second), strict=True))
    given = {"inputs": [exact.bfloat16().float()], "expected": torch.zeros(3, 4), "recorded": taps.get}
    with torch.no_grad():
        (found,) = roundings(subject(one.hf, operation, **given))
        assert found.name == UNROUNDED_SUM
        root = torch.rsqrt(exact.square().mean(-1, keepdim=True) + module.variance_epsilon)
        torch.testing.assert_close(found.expected().float(), exact * root * module.weight.float(), rtol=1e-2, atol=1e-2)
        away = (found.expected().float() - exact * root * module.weight.float()).norm()
        rounded = exact.bfloat16().float()
        assert away < (rounded * root * module.weight.float() - exact * root * module.weight.float()).norm() * 3
    assert list(roundings(subject(one.hf, operation, **given | {"recorded": lambda tap: None}))) == []


def test_a_norm_whose_squares_are_summed_in_order(bench):
    one, name = bench("qwen3-tiny", torch.float32), "model.layers.1.input_layernorm"
    x = torch.randn(4000, 128, generator=torch.Generator().manual_seed(3)) * torch.linspace(0.1, 3, 128).flip(0)
    exact = x.double() / x.double().square().mean(-1, keepdim=True).sqrt()
    total = np.add.accumulate(x.square().numpy(), axis=-1, dtype=np.float32)[:, -1:]
    in_order = x.double() / (torch.from_numpy(total).double() / 128).sqrt()
    given = {"inputs": [x], "expected": exact, "dtype": torch.float32}
    (found,) = roundings(subject(one.hf, one.hf.graph[name], **given))
    assert found.name == SUMMED_IN_ORDER
    errors = (in_order - exact).norm(dim=1) / exact.norm(dim=1) / rounding_unit(torch.float32)
    sigmas = errors / error_of_sum(x)
    assert 0.7 < float(sigmas.square().mean().sqrt()) < 1.6  # the prediction is what such a sum loses
    assert bool((errors <= found.allowance).all())
    assert error_of_sum(x.view(4000, 4, 32)).shape == (4000,)


# A cache that is coarser than the arithmetic.


def stored(copy, dtype):
    """Let the cache give back what it was given in another dtype."""
    for step in copy.steps:
        for name in [name for name in step.taps if name.endswith(("k_cache", "v_cache"))]:
            step.taps[name] = step.taps[name].to(dtype)


@pytest.mark.parametrize("declared", ["float16", "bfloat16", None])
def test_a_coarser_cache_has_to_be_declared(bench, tmp_path, declared):
    one, cache = bench(), "model.layers.1.k_cache"
    actual = one.recorded(engine="reference")
    stored(actual, torch.float16)
    actual.numerics = None if declared is None else Numerics(cache=declared)
    result = one.compare(actual.write(tmp_path / "r"), wanted=[])
    found = tap(result, cache)
    if declared == "float16":
        assert (found.verdict, found.convention) == (Verdict.CONVENTION, "kept in float16, as declared")
    else:
        assert (found.verdict, found.num_bad_rows) == (Verdict.BUG, found.num_rows)


def test_a_cache_of_no_dtype_is_refused(bench, tmp_path):
    one = bench()
    actual = one.recorded(engine="reference")
    actual.numerics = Numerics(cache="Q3_K")
    with pytest.raises(HarnessError) as caught:
        one.measure(actual.write(tmp_path / "r"))
    assert caught.value.code is Code.BAD_MANIFEST


# The dtype of an operation is that of its tensors.


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    """An engine with weights in bfloat16 and everything else in float32, judged by HF in bfloat16."""
    setting = FaultConfig(model="qwen3-tiny", weights_in="bfloat16")
    with checkpoint(setting) as folder:
        runs = tmp_path_factory.mktemp("mixed")
        judge, engine = (Bench(folder, dtype, runs) for dtype in (torch.bfloat16, torch.float32))
        with engine.run(judge.golden.requests, "batched", runs / "r") as recording:
            copy = Copy.of(recording)
        copy.dtype = "bfloat16"
        yield judge, copy


def test_activations_in_float32_are_held_to_float32(mixed, tmp_path):
    judge, actual = mixed
    sound = judge.comparison(actual.write(tmp_path / "a"))
    kinds = {tap: judge.hf.graph[tap].kind for tap in sound.errors}
    finer = {tap for tap, errors in sound.errors.items() if errors.dtype is torch.float32}
    assert finer >= {tap for tap, kind in kinds.items() if kind in (Kind.LINEAR, Kind.NORM, Kind.ADD, Kind.ATTENTION)}
    assert not [tap for tap, errors in sound.errors.items() if bool(errors.bad.any())]
    name = "model.layers.1.mlp.down_proj"
    row = actual.at(name, *ROW)
    before = row.clone()
    row.mul_(1 + 1e-4)  # a tenth of a rounding to bfloat16
    wrong = judge.comparison(actual.write(tmp_path / "b"))
    row.copy_(before)
    assert int(wrong.errors[name].bad.sum()) == 1
    assert wrong.result.first_divergence.tap == name


def test_rows_on_the_engines_own_grid_are_held_to_its_dtype(bench, tmp_path):
    """An engine of 16 bits that records float32, logits for one."""
    one, name = bench("qwen3-tiny", torch.bfloat16), "model.layers.1.mlp.down_proj"
    actual = one.recorded()
    for step in actual.computing():
        step.taps[name] = step.taps[name].float()
    errors = one.comparison(actual.write(tmp_path / "r")).errors[name]
    assert errors.dtype is torch.bfloat16
    assert not bool(errors.bad.any())
