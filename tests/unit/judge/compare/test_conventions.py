"""Legitimate orders of rounding: an engine that follows one is held to it, and no other engine is given its room."""

import numpy as np
import pytest
import torch

from harness.base.metrics import rounding_unit
from harness.base.numerics import Numerics
from harness.errors import Code, HarnessError
from harness.formats.taps import Kind, Operation
from harness.judge.compare.conventions import SuspectRows, conventions
from harness.judge.compare.conventions.attention import EAGER
from harness.judge.compare.conventions.rowwise import SUMMED_IN_ORDER, UNROUNDED_SUM, error_of_sum
from harness.oracle.rotation import rotations
from harness.oracle.watch import Seeing, run_attention, watching
from harness.results.check import Verdict

from .conftest import LENGTHS, NUM_NEW, Bench
from .judgements import tap
from .recordings import Copy

pytest.importorskip("harness.extensions.faults", reason="the catalogue of faults is an extension")
from harness.extensions.faults.fault import FaultConfig
from harness.extensions.faults.subject import checkpoint

ROW = (2, LENGTHS[2] + 1)
ATTENTION = "model.layers.1.attention"


def subject(hf, operation, **fields):
    """Rows of an operation; what is not given does not matter."""
    rows = fields.pop("rows", torch.arange(3))
    unknown = torch.full((len(rows), 4), torch.nan)
    fields = {"dtype": torch.bfloat16, "actual": unknown, "expected": unknown, "positions": rows} | fields
    return SuspectRows(hf=hf, operation=operation, rows=rows, **fields)


def roundings(subject):
    """Yield the orders of rounding that apply to some rows."""
    for convention in conventions(subject.operation.kind):
        yield from convention.alternatives(subject)


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


def test_an_engine_is_judged_under_the_convention_of_rounded_scores(one, actual, tmp_path):
    loud(actual)
    attend(one, actual, "eager")
    comparison = one.comparison(actual.write(tmp_path / "a"))
    errors = comparison.errors[ATTENTION]
    assert errors.convention == EAGER
    assert not bool(errors.bad.any())
    assert tap(comparison.result, ATTENTION).verdict in (Verdict.CONVENTION, Verdict.EXACT)
    assert tap(comparison.result, ATTENTION).convention == EAGER
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
    of_eager = one.comparison(eager.write(tmp_path / "b")).errors[ATTENTION]
    moved = (actual.at(ATTENTION, *ROW).float() - eager.at(ATTENTION, *ROW).float()).norm()
    assert float(moved) > 0
    row = actual.at(ATTENTION, *ROW)
    direction = torch.randn(row.shape, generator=torch.Generator().manual_seed(2))
    row += (direction / direction.norm() * row.float().norm() * 0.1).to(row.dtype)
    result = one.compare(actual.write(tmp_path / "c"))
    assert tap(result, ATTENTION).num_bad_rows == 1
    assert of_eager.convention == EAGER


# Products that several ranks add up.


def test_an_engine_is_judged_under_the_convention_of_partial_sums(bench, tmp_path):
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
    rotation = next(rotations(one.hf, one.hf.head_dim))
    size, positions = one.hf.head_dim, torch.tensor([0, 1, 500, 3000])
    x = torch.randn(4, 2, size, generator=torch.Generator().manual_seed(7)).double()
    frequencies = rotation.frequencies

    def bad(angles):
        actual, expected = rotary(one, x, angles), rotary(one, x, rotation.phases(positions))
        operation = Operation(tap="q_rope", kind=Kind.ROTARY, inputs=("q",), source="q")
        fields = {"dtype": torch.float32, "actual": actual, "expected": expected, "inputs": [x.flatten(1)]}
        (alternative,) = roundings(
            subject(one.hf, operation, rows=torch.arange(4), **fields | {"positions": positions})
        )
        error = (alternative.expected() - actual).norm(dim=1) / actual.norm(dim=1) / rounding_unit(torch.float32)
        return (error > alternative.allowance + 3).tolist()

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
    fields = {"inputs": [exact.bfloat16().float()], "expected": torch.zeros(3, 4), "recorded": taps.get}
    with torch.no_grad():
        (alternative,) = roundings(subject(one.hf, operation, **fields))
        assert alternative.name == UNROUNDED_SUM
        root = torch.rsqrt(exact.square().mean(-1, keepdim=True) + module.variance_epsilon)
        torch.testing.assert_close(
            alternative.expected().float(), exact * root * module.weight.float(), rtol=1e-2, atol=1e-2
        )
        away = (alternative.expected().float() - exact * root * module.weight.float()).norm()
        rounded = exact.bfloat16().float()
        assert away < (rounded * root * module.weight.float() - exact * root * module.weight.float()).norm() * 3
    assert list(roundings(subject(one.hf, operation, **fields | {"recorded": lambda tap: None}))) == []
    no_sum = one.hf.graph["model.layers.0.input_layernorm"]
    assert list(roundings(subject(one.hf, no_sum, **fields))) == []


def test_a_norm_whose_squares_are_summed_in_order(bench):
    one, name = bench("qwen3-tiny", torch.float32), "model.layers.1.input_layernorm"
    x = torch.randn(4000, 128, generator=torch.Generator().manual_seed(3)) * torch.linspace(0.1, 3, 128).flip(0)
    exact = x.double() / x.double().square().mean(-1, keepdim=True).sqrt()
    total = np.add.accumulate(x.square().numpy(), axis=-1, dtype=np.float32)[:, -1:]
    in_order = x.double() / (torch.from_numpy(total).double() / 128).sqrt()
    fields = {"inputs": [x], "expected": exact, "dtype": torch.float32}
    (alternative,) = roundings(subject(one.hf, one.hf.graph[name], **fields))
    assert alternative.name == SUMMED_IN_ORDER
    errors = (in_order - exact).norm(dim=1) / exact.norm(dim=1) / rounding_unit(torch.float32)
    sigmas = errors / error_of_sum(x)
    assert 0.7 < float(sigmas.square().mean().sqrt()) < 1.6  # the prediction is what such a sum loses
    assert bool((errors <= alternative.allowance).all())
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
    measured = tap(result, cache)
    if declared == "float16":
        assert (measured.verdict, measured.convention) == (Verdict.CONVENTION, "kept in float16, as declared")
    else:
        assert (measured.verdict, measured.num_bad_rows) == (Verdict.BUG, measured.num_rows)


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


def test_activations_in_float32_have_the_bounds_of_float32(mixed, tmp_path):
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


def test_rows_on_the_grid_of_the_engine_s_dtype_have_its_bounds(bench, tmp_path):
    """An engine of 16 bits that records float32, logits for one."""
    one, name = bench("qwen3-tiny", torch.bfloat16), "model.layers.1.mlp.down_proj"
    actual = one.recorded()
    for step in actual.computing():
        step.taps[name] = step.taps[name].float()
    errors = one.comparison(actual.write(tmp_path / "r")).errors[name]
    assert errors.dtype is torch.bfloat16
    assert not bool(errors.bad.any())
