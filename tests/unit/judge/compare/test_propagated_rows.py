"""Distances to a golden on recordings by hand, against a loop over rows."""

import math
import random

import pytest
import torch

from harness.base.metrics import rounding_unit
from harness.formats.taps import Graph, Kind, Operation
from harness.judge.compare import align
from harness.judge.compare.align import Locator
from harness.judge.compare.propagated import propagated_errors

from .in_memory import Step, recording_of

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
    found = propagated_errors(actual, Locator(recording_of(REQUESTS, expected)), noise, GRAPH, usable)
    assert found.errors.keys() == DEPTHS.keys()
    least = float(noise["sum"].nanmedian())
    for tap, depth in DEPTHS.items():
        errors = found.errors[tap]
        rows = list(zip(errors.rows.request.tolist(), errors.rows.position.tolist(), strict=True))
        assert sorted(rows) == sorted(row for row in ROWS if (tap, row) in recorded and (tap, row) in running)
        for row, ratio, relative in zip(rows, errors.ratio.tolist(), errors.metrics.relative_l2.tolist(), strict=True):
            distance = float((ours[tap][row] - golden[tap][row]).norm() / golden[tap][row].norm())
            assert relative == pytest.approx(distance, rel=1e-9)
            own = rounding_unit(torch.bfloat16) * math.sqrt(depth)
            if tap == "sum":
                own = float(noise["sum"][running[tap, row]])
                own = own if math.isnan(own) else max(own, least)
            assert ratio == pytest.approx(distance / own, rel=1e-6, nan_ok=True)


def test_logits_are_summed_up_over_all_steps():
    logits = {row: torch.randn(6, generator=torch.Generator().manual_seed(at)) for at, row in enumerate(ROWS)}
    ours = {row: x.clone() for row, x in logits.items()}
    ours[8, 1][int(ours[8, 1].argmax())] -= 50
    expected = [Step(ROWS, taps={"lm_head": torch.stack([logits[row] for row in ROWS])})]
    steps = [Step([row], taps={"lm_head": ours[row][None]}) for row in ROWS]
    golden = Locator(recording_of(REQUESTS, expected))
    found = propagated_errors(recording_of(REQUESTS, steps), golden, {}, GRAPH, {"lm_head"}).logits
    assert found.num_rows == len(ROWS)
    assert found.top1_agreement == pytest.approx(1 - 1 / len(ROWS))
    p, q = logits[8, 1].double().softmax(0), ours[8, 1].double().softmax(0)
    assert found.kl_max == pytest.approx(float((p * (p / q).log()).sum()), rel=1e-6)
    margins = [float(x.topk(2).values[0] - x.topk(2).values[1]) for x in logits.values()]
    assert found.margin_min == pytest.approx(min(margins))
    assert propagated_errors(recording_of(REQUESTS, steps), golden, {}, GRAPH, set()).logits is None


@pytest.mark.parametrize(
    ("off", "noise", "ratio"), [(0.0, 0.0, 0.0), (1.0, 0.0, math.inf), (0.0, 0.5, 0.0), (1.0, 0.5, 2.0)]
)
def test_no_error_is_no_ratio_even_where_there_is_no_noise(off, noise, ratio):
    row = torch.tensor([[1.0, 0.0]])
    steps = [Step(ROWS[:1], taps={"sum": row + torch.tensor([[0.0, off]])})]
    golden = Locator(recording_of(REQUESTS, [Step(ROWS[:1], taps={"sum": row})]))
    noises = {"sum": torch.tensor([noise])}
    found = propagated_errors(recording_of(REQUESTS, steps), golden, noises, GRAPH, {"sum"})
    assert found.errors["sum"].ratio.tolist() == [ratio]


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
def test_without_noise_an_operation_is_held_to_what_came_in(errors, far):
    found = with_errors(errors)
    assert [tap for tap, item in found.items() if bool(item.is_far.any())] == far
    assert not any(item.has_noise for item in found.values())
