"""What can be said of any operation, on products of two requests whose rows are written out one by one."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from harness.base.metrics import rounding_unit
from harness.formats.taps import Kind, Operation
from harness.judge.explain.any_kind import generic
from harness.judge.explain.causes import LATER_STAGES
from harness.judge.explain.core.formats import cut_off

from ..toys import ToyModel, assert_outputs, by_cause, failure_of, linear, named, random, recorded

PREFIX = "model.layers.1."
X_TAP, TAP, GATE, WIDE, EARLIER, FAR, NORM, CACHE, EMBED = (
    f"{PREFIX}norm", f"{PREFIX}mlp.up", f"{PREFIX}gate", f"{PREFIX}wide", "model.layers.0.output",
    "model.layers.2.output", "model.norm", f"{PREFIX}k_cache", "model.embed_tokens",
)  # fmt: skip
INPUTS, OUTPUTS = 6, 8
STEPS = (
    [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)],
    [(0, 3), (1, 2), (1, 3)],
    [(0, 4), (1, 4)],
)
PLACES = [place for step in STEPS for place in step]
STEP = {place: at for at, step in enumerate(STEPS) for place in step}
X, WEIGHT = random(len(PLACES), INPUTS, seed=1), random(OUTPUTS, INPUTS, seed=2)
TENSORS = {
    X_TAP: X, GATE: random(len(PLACES), INPUTS, seed=3), WIDE: random(len(PLACES), OUTPUTS, seed=4),
    EARLIER: random(len(PLACES), INPUTS, seed=5), FAR: random(len(PLACES), INPUTS, seed=6),
    NORM: random(len(PLACES), INPUTS, seed=7), CACHE: random(len(PLACES), INPUTS, seed=8),
    EMBED: random(len(PLACES), OUTPUTS, seed=9),
}  # fmt: skip


def y(x):
    weight = WEIGHT.tolist()
    rows = [[sum(a * b for a, b in zip(row, out, strict=True)) for out in weight] for row in x.tolist()]
    return torch.tensor(rows, dtype=torch.float64)


RIGHT = y(X)
OPERATIONS = (
    Operation(tap=EMBED, kind=Kind.EMBEDDING), Operation(tap="model.layers.0.first", kind=Kind.LINEAR),
    Operation(tap=EARLIER, kind=Kind.ADD), Operation(tap=X_TAP, kind=Kind.NORM, inputs=(EARLIER,), source=X_TAP),
    Operation(tap=GATE, kind=Kind.LINEAR), Operation(tap=TAP, kind=Kind.LINEAR, inputs=(X_TAP,), source=TAP),
    Operation(tap=WIDE, kind=Kind.LINEAR), Operation(tap=CACHE, kind=Kind.CACHE),
    Operation(tap="model.layers.2.first", kind=Kind.LINEAR), Operation(tap=FAR, kind=Kind.ADD),
    Operation(tap=NORM, kind=Kind.NORM), Operation(tap="lm_head", kind=Kind.LINEAR, inputs=(NORM,), source=TAP),
)  # fmt: skip


@pytest.fixture
def of(tmp_path):
    def make(
        actual, places=PLACES, *, tap=TAP, taps=None, kind=None, dtype=torch.float32, all_rows=None, operation=None
    ):
        """`actual` of the places; `all_rows` of the operation's own tap, what was recorded of it, right rows too."""
        tensors = {**TENSORS, **(taps or {}), TAP: RIGHT if all_rows is None else all_rows}
        steps = []
        for step in STEPS:
            rows = [PLACES.index(place) for place in step]
            steps.append({
                "request": [r for r, _ in step], "position": [p for _, p in step],
                "taps": {name: tensor[rows] for name, tensor in tensors.items() if tensor is not None},
            })  # fmt: skip
        back = {"phase": "readback", "request": [0], "position": [0], "taps": {X_TAP: X[:1]}}
        lengths = ((6, 3), (6, 2))
        recording = recorded(
            tmp_path / f"r{len(list(tmp_path.iterdir()))}", [*steps, back], lengths=lengths, dtype="float64"
        )
        rows = [PLACES.index(place) for place in places]
        operation = operation or next(op for op in OPERATIONS if op.tap == tap)
        if kind is not None:
            operation = Operation(tap=tap, kind=kind, inputs=operation.inputs, source=operation.source)
        model = ToyModel(*(operation if op.tap == tap else op for op in OPERATIONS), modules={TAP: linear(WEIGHT)})
        inputs = TENSORS[operation.inputs[0]] if operation.inputs else X
        return failure_of(
            operation, actual, y(inputs)[rows], inputs[rows], model=model, recording=recording, dtype=dtype,
            request=[r for r, _ in places], position=[p for _, p in places], step=[STEP[place] for place in places],
        )  # fmt: skip

    return make


def test_nothing_at_all(of):
    zero = {"the output is zero: not computed, or not loaded": torch.zeros_like(RIGHT)}
    assert_outputs(generic.zero_output, of(RIGHT), zero)


# Gains and offsets.

SCALED_ROWS = "each row is scaled by a factor of its own"


@pytest.mark.parametrize("factor", [1.25, -0.5, 3.0])
def test_one_gain_of_all_rows(of, factor):
    (hypothesis,) = by_cause(generic.constant_gain, of(factor * RIGHT)).values()
    assert hypothesis.cause == f"a constant gain of {factor:.6g}"
    assert (hypothesis.num_fitted, hypothesis.allowance, hypothesis.is_cause) == (1, 1.0, True)
    torch.testing.assert_close(hypothesis.output, factor * RIGHT)


def test_a_gain_of_each_row(of):
    factors = torch.linspace(1.5, 2.5, len(PLACES), dtype=torch.float64)[:, None]
    (hypothesis,) = by_cause(generic.constant_gain, of(factors * RIGHT)).values()
    assert (hypothesis.cause, hypothesis.is_cause, hypothesis.num_fitted) == (SCALED_ROWS, False, len(PLACES))
    assert hypothesis.detail == "from 1.5 to 2.5"
    torch.testing.assert_close(hypothesis.output, factors * RIGHT)


@pytest.mark.parametrize(("spread", "is_one"), [(0.6, True), (1.6, False)])
def test_rows_that_differ_by_less_than_rounding_have_one_gain(of, spread, is_one):
    """In units of a rounding: what is left of one gain is little more than what is left of one each."""
    dtype = torch.bfloat16
    noise = random(*RIGHT.shape, seed=11) * RIGHT.norm(dim=1, keepdim=True) / OUTPUTS**0.5 * rounding_unit(dtype)
    signs = torch.tensor([1.0, -1.0] * 5, dtype=torch.float64)[:, None]
    actual = 1.25 * RIGHT * (1 + spread * rounding_unit(dtype) * signs) + noise
    causes = by_cause(generic.constant_gain, of(actual, dtype=dtype))
    assert (SCALED_ROWS not in causes) == is_one


def with_right_rows(of, change, places, *, is_too, **others):
    """Rows at `places` that are changed, and the rest of the recording, changed as well or right."""
    rows = [PLACES.index(place) for place in places]
    all_rows = change(RIGHT) if is_too else RIGHT.clone()
    all_rows[rows] = change(RIGHT)[rows]
    return of(change(RIGHT)[rows], places, all_rows=all_rows, **others)


GAIN = (generic.constant_gain, lambda rows: 1.25 * rows)
OFFSET = (generic.offset_per_channel, lambda rows: rows + torch.arange(OUTPUTS) / 10)


@pytest.mark.parametrize("is_too", [True, False])
@pytest.mark.parametrize(("explain", "change"), [GAIN, OFFSET])
@pytest.mark.parametrize(
    ("places", "is_enough"),
    [
        ([(0, 0), (1, 0)], False),  # beside them in their step are three rows of their requests
        ([(0, 0), (1, 0), (1, 2)], True),  # and one more
        ([(0, 0), (0, 1), (0, 3), (0, 4)], False),  # two of request 1 do not count
    ],
)
def test_right_rows_of_the_same_requests_and_steps_contradict_it(of, explain, change, is_too, places, is_enough):
    (hypothesis,) = explain(with_right_rows(of, change, places, is_too=is_too))
    assert hypothesis.is_cause == (is_too or not is_enough)


@pytest.mark.parametrize(("num_right", "is_cause"), [(2, True), (3, False)])
def test_most_of_the_right_rows_must_be_the_worse_for_it(of, num_right, is_cause):
    """Four rows are beside the wrong ones: two of them are not most."""
    places = [(0, 0), (1, 0), (1, 2)]
    all_rows = 1.25 * RIGHT
    beside = [PLACES.index(place) for place in [(0, 1), (0, 2), (1, 1), (1, 3)][:num_right]]
    all_rows[beside] = RIGHT[beside]
    rows = [PLACES.index(place) for place in places]
    (hypothesis,) = generic.constant_gain(of(all_rows[rows], places, all_rows=all_rows))
    assert hypothesis.is_cause == is_cause


def test_what_cannot_be_computed_again_contradicts_nothing(of):
    places, change = [(0, 0), (1, 0), (1, 2)], GAIN[1]
    failure = with_right_rows(of, change, places, is_too=False, kind=Kind.OTHER)
    assert [item.is_cause for item in generic.constant_gain(failure)] == [True]
    bare = Operation(tap=TAP, kind=Kind.LINEAR, source=TAP)
    failure = with_right_rows(of, change, places, is_too=False, operation=bare)
    assert [item.is_cause for item in generic.constant_gain(failure)] == [True]


def test_an_offset(of):
    offset = random(OUTPUTS, seed=12)
    failure = of(RIGHT + offset)
    (hypothesis,) = by_cause(generic.offset_per_channel, failure).values()
    assert hypothesis.cause == f"a constant offset per channel, norm {float(offset.norm()):.3g}"
    torch.testing.assert_close(hypothesis.output, RIGHT + offset)
    assert hypothesis.num_fitted == round(failure.num_elements)
    assert (hypothesis.allowance, hypothesis.is_cause) == (1.0, True)
    assert by_cause(generic.offset_per_channel, of(RIGHT[:2] + offset, PLACES[:2]))
    assert by_cause(generic.offset_per_channel, of(RIGHT[:1] + offset, PLACES[:1])) == {}


# Rows of others.

ROW = "the row is that of another token, "


@pytest.mark.parametrize(
    ("source", "where", "num_fitted"),
    [
        (lambda r, p: (r, p + 1), "+1 positions away", 1), (lambda r, p: (r, 4 - p), "elsewhere", 3),
        (lambda r, p: (1 - r, p), "elsewhere", 3), (lambda r, p: (r, p - 1), "-1 positions away", 1),
    ],
)  # fmt: skip
def test_rows_of_other_tokens(of, source, where, num_fitted):
    places = [(0, 1), (0, 3), (1, 1)]
    actual = torch.stack([RIGHT[PLACES.index(source(*place))] for place in places])
    hypothesis = by_cause(generic.row_of_another, of(actual, places))[f"{ROW}{where}"]
    torch.testing.assert_close(hypothesis.output, actual)
    assert hypothesis.num_fitted == num_fitted
    pairs = [(place, source(*place)) for place in places]
    assert hypothesis.detail == "; ".join(
        f"request {r}, position {p} holds that of request {another}, position {at}" for (r, p), (another, at) in pairs
    )


def test_the_first_or_the_last_row_of_the_step(of):
    places = [(0, 1), (1, 2), (0, 4)]
    hypotheses = by_cause(generic.row_of_another, of(RIGHT[[1, 6, 8]] + 1, places))
    for name, at in (("first", 0), ("last", -1)):
        output = torch.stack([RIGHT[PLACES.index(STEPS[STEP[place]][at])] for place in places])
        torch.testing.assert_close(hypotheses[f"{ROW}the {name} one of its step"].output, output)


@pytest.mark.parametrize("most", [10, 6, 3])
def test_rows_of_its_own_steps_are_looked_among_first(of, monkeypatch, most):
    """Those of steps 1 and 2, and then of step 0, up to so many."""
    monkeypatch.setattr(generic, "_MAX_POOL_ROWS", most)
    rows = generic._pool_rows(of(RIGHT[[5, 8]], [(0, 3), (0, 4)]))
    order = [*STEPS[1], *STEPS[2], *STEPS[0]]
    assert list(zip(rows.request.tolist(), rows.position.tolist(), strict=True)) == order[:most]


def test_a_step_whose_rows_are_not_in_the_pool_has_no_first_one(of, monkeypatch):
    monkeypatch.setattr(generic, "_MAX_POOL_ROWS", 3)
    causes = by_cause(generic.row_of_another, of(RIGHT[[5, 8]], [(0, 3), (0, 4)]))
    assert not any("of its step" in cause for cause in causes)


@pytest.mark.parametrize("kind", [Kind.OTHER, Kind.ATTENTION, Kind.EMBEDDING])
def test_rows_of_what_is_not_computed_row_by_row_are_not_looked_for(of, kind):
    assert by_cause(generic.row_of_another, of(RIGHT, kind=kind)) == {}
    assert by_cause(generic.another_input, of(RIGHT, kind=kind)) == {}


# Heads.


EXCHANGED = "heads and elements of a row are exchanged: it is written as [heads, elements] and read as the reverse"


@pytest.mark.parametrize(("kind", "has_heads"), [(Kind.ROTARY, True), (Kind.CACHE, True), (Kind.LINEAR, False)])
def test_heads_in_another_order(of, kind, has_heads):
    """Two heads of four."""
    exchanged, lost = torch.cat((RIGHT[:, 4:], RIGHT[:, :4]), dim=1), torch.cat((0 * RIGHT[:, :4], RIGHT[:, 4:]), dim=1)
    for actual, cause in (
        (exchanged, "the heads are in another order: [1, 0]"),
        (lost, "heads [0] are zero: not written, or lost"),
        (RIGHT.unflatten(1, (2, 4)).roll(1, dims=2).flatten(1), "the elements are in another order: 4 runs of them"),
        (RIGHT.unflatten(1, (2, 4)).transpose(1, 2).flatten(1), EXCHANGED),
    ):
        hypotheses = by_cause(generic.heads_in_another_order, of(actual, kind=kind))
        assert (cause in hypotheses) == has_heads
        assert not has_heads or torch.equal(hypotheses[cause].output, actual)
    assert by_cause(generic.heads_in_another_order, of(RIGHT, kind=kind)) == {}


def test_three_heads_and_rows_that_are_no_heads():
    expected = random(5, 12)
    actual = torch.cat((expected[:, 8:], expected[:, :4], expected[:, 4:8]), dim=1)
    operation = Operation(tap="q", kind=Kind.ROTARY)
    hypotheses = by_cause(generic.heads_in_another_order, failure_of(operation, actual, expected))
    assert torch.equal(hypotheses["the heads are in another order: [2, 0, 1]"].output, actual)
    failure = failure_of(operation, actual[:, :10], expected[:, :10])
    assert by_cause(generic.heads_in_another_order, failure) == {}
    one = failure_of(operation, actual[:1], expected[:1])
    assert set(by_cause(generic.heads_in_another_order, one)) == {"the heads are in another order: [2, 0, 1]"}


def test_rows_of_another_where_only_hfs_code_can_say_them(bench_of):
    """GPT-J's rotation has no known form: HF's code gives the rows of the step."""
    bench, tap = bench_of("gptj"), "transformer.h.1.k_rope"
    actual, rows = bench.tap(tap), bench.rows(tap)
    at = int(((rows.position == 9) & (rows.request == 0)).nonzero()[0])
    last = int(((rows.step == rows.step[at]) & (rows.request == 0)).nonzero()[-1])
    actual[at] = actual[last]
    assert bench.explain(tap, actual).cause.startswith("the row is that of another token")


# Other taps.


def test_another_input(of):
    near = {"gate": GATE, EARLIER: EARLIER, NORM: NORM}
    expected = {f"it reads {name} instead of norm": y(TENSORS[tap]) for name, tap in near.items()}
    assert_outputs(generic.another_input, of(RIGHT), expected)


def test_another_output(of):
    """Of the layer, the one before, and what has no layer; not the cache's rows, nor of another width."""
    hypotheses = by_cause(generic.another_output, of(RIGHT))
    assert {cause: item.num_fitted for cause, item in hypotheses.items()} == {
        "the output is that of wide": 1, f"the output is that of {EMBED}": 1,
    }  # fmt: skip
    torch.testing.assert_close(hypotheses["the output is that of wide"].output, TENSORS[WIDE])


def test_a_gate_that_is_left_out(of):
    """The other of two inputs of an activation has its name."""
    operation = Operation(tap=TAP, kind=Kind.ACTIVATION, inputs=(NORM, EMBED))
    hypotheses = by_cause(generic.another_output, of(RIGHT, operation=operation))
    assert f"the gate of {NORM} is left out: the output is that of {EMBED}" in hypotheses


def test_the_head_reads_what_ends_a_layer(of):
    """Not what is inside of one."""
    taps = {
        name: random(len(PLACES), INPUTS, seed=20 + at)
        for at, name in enumerate(("model.layers.0.first", "model.layers.2.first"))
    }
    causes = set(by_cause(generic.another_input, of(y(TENSORS[NORM]), tap="lm_head", taps=taps)))
    assert causes == {f"it reads {name} instead of model.norm" for name in (EARLIER, FAR)}


# Coarser results.


@pytest.mark.parametrize("name", ["float8_e5m2", "float8_e4m3fn", "bfloat16", "float16"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_result_that_is_rounded_to_a_coarser_dtype(of, name, dtype):
    actual = RIGHT.to(getattr(torch, name)).double()
    is_coarser = rounding_unit(getattr(torch, name)) > rounding_unit(dtype)
    expected = {f"the output is rounded to {name}": actual} if is_coarser else {}
    assert_outputs(generic.rounded_output, of(actual, dtype=dtype), expected)


def test_numbers_of_a_dtype_that_are_far_off_were_not_rounded_to_it(of):
    coarse = RIGHT.to(torch.bfloat16).double()
    most = 2 * torch.finfo(torch.bfloat16).eps / 2
    for share, is_rounded in ((0.9, True), (1.2, False)):
        shift = share * most * RIGHT[3].norm() / RIGHT[3].abs().max()
        actual = coarse.clone()
        at = int(RIGHT[3].abs().argmax())
        actual[3, at] = float((RIGHT[3, at] * (1 + shift)).to(torch.bfloat16))
        assert bool(by_cause(generic.rounded_output, of(actual))) == is_rounded


def cut(x, bits):
    power = 2.0 ** (x.abs().log2().floor() - bits)
    return (x / power).trunc() * power


@pytest.mark.parametrize(("dtype", "bits"), [(torch.bfloat16, 7), (torch.float16, 10)])
def test_a_result_that_is_cut_off_to_the_engines_own_dtype(dtype, bits):
    expected = random(3, 40, seed=13)
    operation = Operation(tap="x", kind=Kind.OTHER)
    name = str(dtype).removeprefix("torch.")
    cause = f"the output is cut off to {name} instead of rounded"
    failure = failure_of(operation, cut(expected, bits), expected, dtype=dtype)
    assert_outputs(generic.rounded_output, failure, {cause: cut(expected, bits)})
    nearest = expected.to(dtype).double()
    assert by_cause(generic.rounded_output, failure_of(operation, nearest, expected, dtype=dtype)) == {}
    exact = expected.float().double()
    assert by_cause(generic.rounded_output, failure_of(operation, exact, expected, dtype=torch.float32)) == {}


@pytest.mark.parametrize(("num_wrong", "is_cut"), [(4, True), (6, False)])
def test_next_to_all_that_tell_are_cut_off(num_wrong, is_cut):
    expected = random(3, 80, seed=13)
    actual, nearest = cut(expected, 7), expected.to(torch.bfloat16).double()
    tells = (actual != nearest).nonzero()[:100]
    mixed = nearest.clone()
    mixed[tells[:, 0], tells[:, 1]] = actual[tells[:, 0], tells[:, 1]]
    expected = torch.where(mixed == actual, expected, nearest)  # what does not tell is exact
    tells = (cut(expected, 7) != expected.to(torch.bfloat16).double()).nonzero()
    assert len(tells) == 100
    mixed[tells[:num_wrong, 0], tells[:num_wrong, 1]] = nearest[tells[:num_wrong, 0], tells[:num_wrong, 1]]
    failure = failure_of(Operation(tap="x", kind=Kind.OTHER), mixed, expected, dtype=torch.bfloat16)
    assert bool(by_cause(generic.rounded_output, failure)) == is_cut


@pytest.mark.parametrize(("num_larger", "how"), [(1, "cut off"), (3, "rounded")])
def test_few_elements_of_what_was_cut_off_are_larger(num_larger, how):
    """One of forty may be, three are more than one in twenty."""
    expected = random(1, 40, seed=14)
    actual = cut(expected, 7)
    up = (cut(expected, 7) != expected.to(torch.bfloat16).double()).nonzero()[:num_larger, 1]
    actual[0, up] = expected.to(torch.bfloat16).double()[0, up]
    (hypothesis,) = generic.rounded_output(failure_of(Operation(tap="x", kind=Kind.OTHER), actual, expected))
    assert hypothesis.cause.startswith(f"the output is {how} to bfloat16")


@pytest.mark.parametrize(("is_known", "is_cause"), [(True, True), (False, False)])
def test_a_gain_of_a_norm_of_no_known_form_may_be_its_eps(is_known, is_cause):
    module = nn.RMSNorm(INPUTS, eps=1e-6, dtype=torch.float64)
    operation = Operation(tap=NORM, kind=Kind.NORM, source=NORM)
    expected = module(X).detach() * (1 if is_known else 3)
    failure = failure_of(operation, 1.01 * expected, expected, X, model=ToyModel(operation, modules={NORM: module}))
    assert [item.is_cause for item in generic.constant_gain(failure)] == [is_cause]


# What the trial names.

LAST_OF_STEP = [PLACES.index(STEPS[STEP[place]][-1]) for place in PLACES]
MISTAKES = {
    "a constant gain of 1.25": 1.25 * RIGHT,
    "a constant offset per channel, norm ": RIGHT + torch.linspace(-1, 1, OUTPUTS),
    "each row is scaled by a factor of its own": RIGHT * torch.linspace(1.5, 2.5, len(PLACES))[:, None],
    f"{ROW}the last one of its step": RIGHT[LAST_OF_STEP],
    "it reads gate instead of norm": y(TENSORS[GATE]),
    "the output is that of wide": TENSORS[WIDE],
    "the output is rounded to bfloat16": RIGHT.bfloat16().double(),
}


@pytest.mark.parametrize("cause", MISTAKES)
def test_a_mistake_is_named(of, cause):
    explanation = named(of(MISTAKES[cause], all_rows=MISTAKES[cause]))
    assert explanation.cause.startswith(cause)
    assert explanation.is_cause == (not cause.startswith("each row"))


def test_where_nothing_fits_it_says_what_it_sees(of):
    wrong = RIGHT.clone()
    wrong[:, 2:5] += random(len(PLACES), 3, seed=15)
    explanation = named(of(wrong, all_rows=wrong))
    assert (explanation.cause, explanation.residual_after) == ("no known way to get it wrong fits", None)
    assert "only in elements 2 to 4 of 8" in explanation.detail


def test_an_explanation_that_raises_costs_no_other(of, monkeypatch):
    def broken(failure):
        raise ValueError("of this shape I know nothing")
        yield

    monkeypatch.setattr("harness.judge.explain.trial.ranking.stages_of", lambda kind: [[broken], *LATER_STAGES[kind]])
    assert named(of(1.25 * RIGHT, all_rows=1.25 * RIGHT)).cause == "a constant gain of 1.25"
    assert "could not be tried: broken: ValueError" in named(of(random(*RIGHT.shape, seed=16))).detail


# In recordings of the reference engine.

RECORDED_TAP = "model.layers.1.mlp.down_proj"


@pytest.mark.parametrize(("power", "is_cause"), [(0, True), (2, False)])
def test_an_offset_must_hold_for_the_right_rows_of_the_same_steps(bench_of, power, is_cause):
    """An error that grows leaves its bound in the last rows only, and of these alone it looks constant."""
    bench = bench_of(dtype=torch.bfloat16)
    right, position = bench.tap(RECORDED_TAP), bench.rows(RECORDED_TAP).position.double()
    channels = torch.zeros(right.shape[1], dtype=torch.float64)
    channels[::5] = 0.0035 * right.norm(dim=1).mean()
    explanation = bench.explain(RECORDED_TAP, right + (position / position.max())[:, None] ** power * channels)
    assert explanation.is_cause == is_cause, explanation
    assert not is_cause or explanation.cause.startswith("a constant offset")


def test_settings_are_tried_at_a_head_that_computes_few_positions(bench):
    right = bench.tap("lm_head")
    explanation = bench.explain("lm_head", right + random(*right.shape))
    assert not explanation.is_cause
    assert "could not be tried" not in explanation.detail


@pytest.mark.parametrize(("numel", "cause"), [
    (31, "the output is rounded to bfloat16"), (32, "the output is cut off to bfloat16 instead of rounded"),
    (256, "the output is cut off to bfloat16 instead of rounded"),
])  # fmt: skip
def test_cutting_off_is_told_from_rounding_only_by_many_elements(numel, cause):
    expected = torch.randn(1, numel, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    actual = cut_off(expected, torch.bfloat16)
    (explanation,) = generic.rounded_output(SimpleNamespace(dtype=torch.float32, actual=actual, expected=expected))
    assert explanation.cause == cause


def test_an_offset_that_leaves_more_than_rounding_is_none(bench_of):
    """A slope of the activation looks like an offset, as far as the gate's mean goes."""
    bench = bench_of(dtype=torch.bfloat16)
    gate, up = (bench.tap(f"model.layers.0.mlp.{site}_proj") for site in ("gate", "up"))
    explanation = bench.explain("model.layers.0.mlp.act", gate * (1.1 * gate).sigmoid() * up)
    assert not explanation.is_cause, explanation


def test_token_ids_have_no_gain():
    """An embedding reads ids, [R]; what should be is [R, W]."""
    failure = SimpleNamespace(inputs=[torch.tensor([3, 5])], expected=torch.ones(2, 4, dtype=torch.float64))
    assert generic._gain_of_input(failure) is None
