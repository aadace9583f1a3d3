"""Distances to a golden: of whole runs, on recordings by hand against a loop over rows, and position by position."""

import math
import random
import re
from dataclasses import replace

import pytest
import torch

from harness.base.metrics import rounding_unit
from harness.errors import Code
from harness.formats.taps import Graph, Kind, Operation
from harness.judge.compare import align
from harness.judge.compare.align import Locator
from harness.judge.compare.propagated import (
    MAX_POSITIONS,
    RATIO_BOUND,
    Propagation,
    position_errors,
    propagated_errors,
    what_logits_show,
)
from harness.results.check import Verdict

from ....closeness import near
from .conftest import LENGTHS, NUM_NEW
from .in_memory import Step, recording_of
from .judgements import propagated_of
from .recordings import Copy

TAP = "model.layers.1.mlp.down_proj"
ROW = (2, 5)


def tap(result, name=TAP):
    (actual,) = [tap for tap in result.taps if tap.name == name]
    return actual


def noise_at(one, request, position, name=TAP):
    """The golden's noise of a row: its steps are its requests, in order."""
    before = sum(length + NUM_NEW - 1 for length in LENGTHS[:request])
    return float(one.golden.noise[name][before + position])


def displaced(one, distance, name=TAP, at=ROW):
    """A recording that is the golden but for one row, which is off by a relative `distance`."""
    actual = Copy.of(one.golden.recording)
    row = actual.at(name, *at)
    direction = torch.randn(row.shape, generator=torch.Generator().manual_seed(1), dtype=row.dtype)
    row += direction / direction.norm() * row.norm() * distance
    return actual


def test_the_golden_is_no_distance_from_itself(one):
    result = one.measure(one.golden.recording)
    assert {tap.propagated_ratio_max for tap in result.taps} == {0}
    assert {tap.verdict for tap in result.taps} == {Verdict.EXACT}
    assert result.logits.top1_agreement == 1
    assert result.logits.kl_max == 0


@pytest.mark.parametrize("ratio", [0.5, 3.0, 300.0])
def test_the_ratio_is_the_error_over_the_noise_of_the_same_row(one, tmp_path, ratio):
    noise = max(noise_at(one, *ROW), float(one.golden.noise[TAP].median()))
    result = one.measure(displaced(one, ratio * noise).write(tmp_path / "r"))
    assert tap(result).propagated_ratio_max == pytest.approx(ratio, rel=1e-3)
    assert tap(result).propagated_relative_l2_max == pytest.approx(ratio * noise, rel=1e-3)
    assert (tap(result).worst.request, tap(result).worst.position) == ROW
    assert (tap(result).verdict is Verdict.BUG) == (ratio > RATIO_BOUND)
    assert tap(result).judged_by == "propagated"


def test_a_bad_row_is_the_first_divergence(one, tmp_path):
    result = one.measure(displaced(one, 0.1).write(tmp_path / "r"), require=())
    first = result.first_divergence
    assert (first.tap, first.request, first.position, first.code) == (TAP, *ROW, Code.PROPAGATED_ERROR)
    assert first.local_roundings is None
    assert first.propagated_ratio == pytest.approx(tap(result).propagated_ratio_max)
    assert [finding.code for finding in result.findings] == [Code.PROPAGATED_ERROR]


def test_figures_do_not_depend_on_the_schedule(one, tmp_path):
    """Every tap's figures from recordings of three schedules agree within the noise, and none is exact by chance."""
    results = [one.measure(one.recorded(name).write(tmp_path / name)) for name in ("plain", "chunked", "batched")]
    for name in (TAP, "lm_head", "model.layers.2.attention"):
        ratios = [tap(result, name).propagated_ratio_max for result in results]
        assert all(0.1 < ratio < 4 for ratio in ratios), ratios
        assert len({tap(result, name).num_rows for result in results}) == 1


def test_rows_in_another_order_give_the_same_figures(one, tmp_path):
    actual = Copy.of(one.golden.recording)
    scrambled = Copy.of(one.golden.recording)
    generator = torch.Generator().manual_seed(2)
    for copy in (actual, scrambled):
        copy.at(TAP, *ROW).mul_(1.01)
    scrambled.steps = [
        step.select(torch.randperm(len(step.request), generator=generator).tolist())
        for step in reversed(scrambled.steps)
    ]
    first, second = (one.measure(copy.write(tmp_path / name)) for name, copy in (("a", actual), ("b", scrambled)))
    for here, there in zip(first.taps, second.taps, strict=True):
        assert replace(there, worst=None) == near(replace(here, worst=None)), "rows are summed in other blocks"
    assert tap(first).worst == tap(second).worst
    assert second.first_divergence.tap == TAP
    assert (second.first_divergence.request, second.first_divergence.position) == ROW


@pytest.mark.parametrize("name", ["model.layers.0.mlp.up_proj", "lm_head"])
def test_another_shape_is_a_finding(one, tmp_path, name):
    actual = Copy.of(one.golden.recording)
    for step in actual.steps:
        step.taps[name] = step.taps[name][:, :-1].contiguous()
    result = one.compare(actual.write(tmp_path / "r"))
    mismatches = [finding for finding in result.findings if finding.code is Code.TAP_MISMATCH]
    width = actual.steps[0].taps[name].shape[1]
    assert [finding.tap for finding in mismatches] == [name]
    assert f"expected [{width + 1}], actual [{width}]" in mismatches[0].message


def test_the_same_elements_in_two_dimensions_are_no_finding(one, actual, tmp_path):
    for step in actual.computing():
        step.taps[TAP] = step.taps[TAP].unflatten(1, (4, -1))
    assert one.compare(actual.write(tmp_path / "r")).findings == ()


def test_another_dtype_than_the_engines(one, actual, tmp_path):
    for step in actual.computing():
        step.taps[TAP] = step.taps[TAP].to(torch.bfloat16)
    result = one.compare(actual.write(tmp_path / "r"))
    (finding,) = [finding for finding in result.findings if finding.code is Code.TAP_MISMATCH]
    assert "BF16, coarser than the engine's float32" in finding.message


def test_integers_are_no_tap(one, actual, tmp_path):
    for step in actual.computing():
        step.taps[TAP] = step.taps[TAP].to(torch.int32)
    result = one.compare(actual.write(tmp_path / "r"))
    assert (Code.TAP_MISMATCH, TAP) in {(finding.code, finding.tap) for finding in result.findings}


def test_a_golden_that_is_not_finite(one, tmp_path):
    expected = Copy.of(one.golden.recording)
    expected.at(TAP, *ROW)[0] = math.nan
    result = one.measure(one.recorded().write(tmp_path / "a"), expected=expected.write(tmp_path / "e"))
    actual = [(f.code, f.tap, f.request, f.position) for f in result.findings]
    assert (Code.ORACLE_NOT_FINITE, TAP, *ROW) in actual


def test_logits(one, tmp_path):
    actual = Copy.of(one.golden.recording)
    row = actual.at("lm_head", *ROW[:1], LENGTHS[ROW[0]])
    p = row.softmax(0)
    best = int(row.argmax())
    row[best] -= 100
    q = row.softmax(0)
    result = one.measure(actual.write(tmp_path / "r"))
    num_rows = len(LENGTHS) * NUM_NEW
    assert result.logits.num_rows == num_rows
    assert result.logits.top1_agreement == pytest.approx(1 - 1 / num_rows)
    assert result.logits.kl_max == pytest.approx(float((p * (p / q).log()).sum()), rel=1e-6)
    margins = [step.tap("lm_head").topk(2).values.diff(dim=1).neg().min() for step in one.golden.recording.steps]
    assert result.logits.margin_min == pytest.approx(float(min(margins)))


@pytest.mark.parametrize(("dtype", "least"), [("bfloat16", 1e-2), ("float32", 1e-7)])
def test_what_logits_show(bench, dtype, least):
    """A change of all weights is found where the note says so, and a quarter of it is not."""
    one = bench("llama-tiny", getattr(torch, dtype))
    noise, logits = one.golden.noise[one.hf.graph.logits], one.hf.graph.logits
    said = what_logits_show(noise, one.hf.graph)
    actual = re.search(r"change of all weights from about (\S+) % on", said)
    change = float(actual[1]) / 100
    assert least < change < 100 * least
    for share, is_found in ((1.0, True), (0.25, False)):
        ratio = _ratio_after(one, share * change, logits)
        assert (ratio > RATIO_BOUND) == is_found


def _ratio_after(one, change, logits):
    """Change each weight by its own amount, run HF, and return the largest error of its logits over HF's own."""
    weights = [weight for weight in one.hf.model.parameters() if weight.dim() > 1]
    before, generator = [weight.clone() for weight in weights], torch.Generator().manual_seed(0)
    model = one.hf.model
    ids = [request.token_ids for request in one.golden.requests]
    with torch.no_grad():
        sound = [model(torch.tensor([tokens])).logits[0].double() for tokens in ids]
        for weight in weights:
            weight.mul_(1 + change * torch.randn(weight.shape, generator=generator).to(weight.dtype))
        logits_of = [model(torch.tensor([tokens])).logits[0].double() for tokens in ids]
        for weight, noise in zip(weights, before, strict=True):
            weight.copy_(noise)
    noise = float(one.golden.noise[logits].nanmedian())
    return (
        max(float(((a - b).norm(dim=1) / b.norm(dim=1)).max()) for a, b in zip(logits_of, sound, strict=True)) / noise
    )


GRAPH = Graph(
    (
        Operation(tap="embed", kind=Kind.EMBEDDING),
        Operation(tap="sum", kind=Kind.ADD, inputs=("embed",)),
        Operation(tap="choice", kind=Kind.CHOICE, inputs=("sum",)),
        Operation(tap="lm_head", kind=Kind.LINEAR, is_head=True),
    )
)
DEPTHS = {"embed": 1, "sum": 2, "lm_head": 4, "own": 1}
REQUESTS = {3: (1, 2, 3, 4), 8: (5, 6, 7)}
ROWS = [(request, at) for request, tokens in REQUESTS.items() for at in range(len(tokens))]


def run_of(generator, values, num_steps, share):
    """Recorded rows of each tap, in some order of the steps, and the running number of each row of a tap."""
    rows = ROWS.copy()
    generator.shuffle(rows)
    steps, running = [], {}
    for index in range(num_steps):
        part, taps, covered = rows[index::num_steps], {}, {}
        for tap in values:
            here = [at for at in range(len(part)) if generator.random() < share]
            if here:
                taps[tap] = torch.stack([values[tap][part[at]] for at in here])
                covered[tap] = here
                for at in here:
                    running[tap, part[at]] = sum(of == tap for of, _ in running)
        steps.append(Step(part, taps=taps, rows_of=covered))
    return steps, running


def drawn(seed, share=0.8):
    generator, of_torch = random.Random(seed), torch.Generator().manual_seed(seed)
    golden = {tap: {row: torch.randn(2, 3, generator=of_torch, dtype=torch.float64) for row in ROWS} for tap in DEPTHS}
    ours = {
        tap: {
            row: x + (generator.random() < 0.7) * 0.01 * torch.randn(2, 3, generator=of_torch)
            for row, x in rows.items()
        }
        for tap, rows in golden.items()
    }
    ours["choice"] = {row: torch.ones(2, dtype=torch.int64) for row in ROWS}
    golden["choice"] = {row: torch.zeros(2, dtype=torch.int64) for row in ROWS}
    return run_of(generator, golden, 2, share), run_of(generator, ours, 4, share), golden, ours


@pytest.mark.parametrize("rows_at_once", [1, 2048])
@pytest.mark.parametrize("seed", range(6))
def test_ratios_are_those_of_the_loop(monkeypatch, seed, rows_at_once):
    monkeypatch.setattr(align, "_CHUNK_ROWS", rows_at_once)
    (expected, running), (steps, recorded), golden, ours = drawn(seed)
    num_sum = sum(tap == "sum" for tap, _ in running)
    noise = {"sum": torch.rand(num_sum, generator=torch.Generator().manual_seed(seed)) * 0.01, "embed": torch.zeros(0)}
    noise["sum"][:1] = torch.nan if seed % 2 else 0.0
    actual = recording_of(REQUESTS, steps, dtype="bfloat16")
    usable = {"embed", "sum", "choice", "lm_head", "own"}
    propagation = propagated_errors(actual, Locator(recording_of(REQUESTS, expected)), noise, GRAPH, usable)
    assert propagation.errors.keys() == DEPTHS.keys()
    least = float(noise["sum"].nanmedian())
    for tap, depth in DEPTHS.items():
        errors = propagation.errors[tap]
        rows = list(zip(errors.rows.request.tolist(), errors.rows.position.tolist(), strict=True))
        assert sorted(rows) == sorted(row for row in ROWS if (tap, row) in recorded and (tap, row) in running)
        for row, ratio, relative in zip(rows, errors.ratio.tolist(), errors.metrics.relative_l2.tolist(), strict=True):
            distance = float((ours[tap][row] - golden[tap][row]).norm() / golden[tap][row].norm())
            assert relative == pytest.approx(distance, rel=1e-9)
            floor = rounding_unit(torch.bfloat16) * math.sqrt(depth)
            if tap == "sum":
                floor = float(noise["sum"][running[tap, row]])
                floor = floor if math.isnan(floor) else max(floor, least)
            assert ratio == pytest.approx(distance / floor, rel=1e-6, nan_ok=True)


def test_logits_are_summed_up_over_all_steps():
    logits = {row: torch.randn(6, generator=torch.Generator().manual_seed(at)) for at, row in enumerate(ROWS)}
    ours = {row: x.clone() for row, x in logits.items()}
    ours[8, 1][int(ours[8, 1].argmax())] -= 50
    expected = [Step(ROWS, taps={"lm_head": torch.stack([logits[row] for row in ROWS])})]
    steps = [Step([row], taps={"lm_head": ours[row][None]}) for row in ROWS]
    golden = Locator(recording_of(REQUESTS, expected))
    errors = propagated_errors(recording_of(REQUESTS, steps), golden, {}, GRAPH, {"lm_head"}).logits
    assert errors.num_rows == len(ROWS)
    assert errors.top1_agreement == pytest.approx(1 - 1 / len(ROWS))
    p, q = logits[8, 1].double().softmax(0), ours[8, 1].double().softmax(0)
    assert errors.kl_max == pytest.approx(float((p * (p / q).log()).sum()), rel=1e-6)
    margins = [float(x.topk(2).values[0] - x.topk(2).values[1]) for x in logits.values()]
    assert errors.margin_min == pytest.approx(min(margins))
    assert propagated_errors(recording_of(REQUESTS, steps), golden, {}, GRAPH, set()).logits is None


@pytest.mark.parametrize(
    ("off", "noise", "ratio"), [(0.0, 0.0, 0.0), (1.0, 0.0, math.inf), (0.0, 0.5, 0.0), (1.0, 0.5, 2.0)]
)
def test_no_error_is_no_ratio_even_where_there_is_no_noise(off, noise, ratio):
    row = torch.tensor([[1.0, 0.0]])
    steps = [Step(ROWS[:1], taps={"sum": row + torch.tensor([[0.0, off]])})]
    golden = Locator(recording_of(REQUESTS, [Step(ROWS[:1], taps={"sum": row})]))
    noises = {"sum": torch.tensor([noise])}
    errors = propagated_errors(recording_of(REQUESTS, steps), golden, noises, GRAPH, {"sum"})
    assert errors.errors["sum"].ratio.tolist() == [ratio]


def test_what_only_one_side_has_is_not_compared():
    steps = [Step(ROWS[:2], taps={"sum": torch.ones(2, 1), "own": torch.ones(2, 1)})]
    golden = Locator(recording_of(REQUESTS, [Step(ROWS[2:3], taps={"sum": torch.ones(1, 1)})]))
    assert propagated_errors(recording_of(REQUESTS, steps), golden, {}, GRAPH, {"sum", "own"}).errors == {}


def with_errors(errors):
    """A golden of ones without noise, and a run whose taps are off by so many times what rounding adds up to."""
    graph = Graph(tuple(Operation(tap=tap, kind=Kind.OTHER) for tap in errors))
    unit, rows = rounding_unit(torch.float32), {tap: torch.ones(7, 4, dtype=torch.float64) for tap in errors}
    ours = {tap: rows[tap].clone() for tap in errors}
    for depth, (tap, ratio) in enumerate(errors.items(), start=1):
        ours[tap][3] += ratio * unit * math.sqrt(depth)
    sides = [recording_of(REQUESTS, [Step(ROWS, taps=taps)], dtype="float32") for taps in (ours, rows)]
    return propagated_errors(sides[0], Locator(sides[1]), {}, graph, set(errors)).errors


@pytest.mark.parametrize(
    ("errors", "far"),
    [
        ({"a": 3, "b": 12, "c": 110, "d": 40}, []),  # each enlarges what came in by less than ten
        ({"a": 3, "b": 40, "c": 300, "d": 4_000}, ["b", "d"]),  # what follows is held to what came in, wrong or not
        ({"a": 11, "b": 1}, ["a"]),
        ({"a": 9, "b": 80, "c": 700, "d": 6_000, "e": 50_000}, ["e"]),  # a drift is not followed for ever
        ({"a": 9, "b": math.nan, "c": 1}, ["b"]),
    ],
)
def test_without_noise_the_bound_grows_with_earlier_ratios(errors, far):
    propagation = with_errors(errors)
    assert [tap for tap, item in propagation.items() if bool(item.is_far.any())] == far
    assert not any(item.has_noise for item in propagation.values())


SMALL_GRAPH = Graph((
    Operation(tap="embed", kind=Kind.EMBEDDING), Operation(tap="first", kind=Kind.ADD),
    Operation(tap="last", kind=Kind.ADD), Operation(tap="k_cache", kind=Kind.CACHE),
    Operation(tap="logits", kind=Kind.LINEAR, sampled_only=True),
))  # fmt: skip


def by_position(rows, ratio, tap="last"):
    errors = {tap: propagated_of(ratio, rows=rows)}
    return [(error.tap, error.position, error.ratio_median, error.ratio_max)
            for error in position_errors(Propagation(errors=errors), SMALL_GRAPH)]  # fmt: skip


def test_rows_of_one_position_are_summed_up():
    rows = [(0, 2), (1, 0), (3, 2), (4, 2), (5, 0)]
    assert by_position(rows, [5.0, 1.0, 9.0, 6.0, 3.0]) == [("last", 0, 1.0, 3.0), ("last", 2, 6.0, 9.0)]


def test_the_deepest_tap_that_is_at_every_row():
    errors = propagated_of([1.0], rows=[(0, 0)])

    def deepest(*taps):
        return {result.tap for result in position_errors(Propagation(errors=dict.fromkeys(taps, errors)), SMALL_GRAPH)}

    assert deepest("embed", "first", "last", "k_cache", "logits") == {"last"}
    assert deepest("embed", "first", "k_cache", "unknown") == {"first"}
    assert deepest("k_cache", "logits") == deepest() == set()
    assert by_position([], []) == []


@pytest.mark.parametrize(
    ("last", "width"), [(MAX_POSITIONS - 1, 1), (MAX_POSITIONS, 2), (2 * MAX_POSITIONS - 1, 2), (2 * MAX_POSITIONS, 3)]
)
def test_neighbours_share_an_entry_where_there_are_many(last, width):
    rows = [(0, at) for at in range(last + 1)]
    entries = by_position(rows, [float(at) for at in range(last + 1)])
    assert [position for _, position, _, _ in entries] == list(range(0, last + 1, width))
    assert entries[0][3] == width - 1
    assert entries[-1][3] == last
    assert len(entries) <= MAX_POSITIONS
