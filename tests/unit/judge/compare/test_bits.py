"""Two runs bit for bit: an operation counts only where it was given the same in both."""

import random

import pytest
import torch

from harness.base.metrics import rounding_unit
from harness.formats.taps import Graph, Kind, Operation
from harness.judge.compare.bits import ComparedRows, compare_bits, first_changed

from .in_memory import Step, recording_of

PREFIX = "model.layers.1."


def changed(before, after, graph):
    """Return the rows that changed, as (tap, request, position)."""
    return {
        (rows.operation.tap, rows.request, int(position))
        for rows in compare_bits(before, after, graph)
        for position in rows.position[rows.is_changed]
    }


def compared(before, after, graph, tap):
    """Return the rows of a tap that were compared, as (request, position)."""
    return {
        (rows.request, int(position))
        for rows in compare_bits(before, after, graph)
        if rows.operation.tap == tap
        for position in rows.position
    }


@pytest.fixture
def pair(one, tmp_path):
    """A run, and the same with something changed; under the graph's names."""

    def made(change):
        before = one.recorded().write(tmp_path / f"before-{len(list(tmp_path.iterdir()))}")
        after = one.recorded()
        change(after)
        aliases = one.hf.graph.aliases
        folder = tmp_path / f"after-{len(list(tmp_path.iterdir()))}"
        return before.with_names(aliases), after.write(folder).with_names(aliases), one.hf.graph

    return made


def test_the_same_run_twice_is_the_same_in_every_row(pair):
    before, after, graph = pair(lambda _actual: None)
    assert changed(before, after, graph) == set()
    computed = {operation.tap for operation in graph if operation.kind is not Kind.CACHE}
    assert {rows.operation.tap for rows in compare_bits(before, after, graph)} == computed
    assert first_changed(compare_bits(before, after, graph), graph) is None


def test_a_changed_bit_is_the_operations_that_made_it_and_of_no_other(pair):
    before, after, graph = pair(lambda actual: actual.at(f"{PREFIX}mlp.up_proj", 2, 8).mul_(1 + 2**-23))
    assert changed(before, after, graph) == {(f"{PREFIX}mlp.up_proj", 2, 8)}
    act = compared(before, after, graph, f"{PREFIX}mlp.act")
    assert (2, 8) not in act, "it was given something else"
    assert (2, 7) in act


def test_zero_of_another_sign_is_another_number(pair):
    before, after, graph = pair(lambda actual: actual.at(f"{PREFIX}mlp.up_proj", 2, 8).zero_())
    tap = f"{PREFIX}mlp.up_proj"
    negative = pair(lambda actual: actual.at(tap, 2, 8).zero_().neg_())
    assert (tap, 2, 8) in changed(before, after, graph)
    assert torch.equal(after.steps[0].tap(tap), negative[1].steps[0].tap(tap))
    assert (tap, 2, 8) in changed(after, negative[1], graph)


def test_attention_counts_as_far_as_its_history_is_the_same(pair):
    before, after, graph = pair(lambda actual: actual.at(f"{PREFIX}k_rope", 2, 3).mul_(1.5))
    rows = compared(before, after, graph, f"{PREFIX}attention")
    assert {position for request, position in rows if request == 2} == {0, 1, 2}
    assert {request for request, _ in rows} > {2}


def test_the_first_change_is_the_first_operation_of_the_first_position(pair):
    def change(actual):
        actual.at("model.layers.0.mlp.up_proj", 2, 8).mul_(2)
        actual.at(f"{PREFIX}mlp.up_proj", 2, 5).mul_(2)
        actual.at(f"{PREFIX}mlp.gate_proj", 2, 5).mul_(1.5)

    before, after, graph = pair(change)
    first = first_changed(compare_bits(before, after, graph), graph)
    assert (first.operation.tap, first.request, first.position.tolist()) == (f"{PREFIX}mlp.gate_proj", 2, [5])
    assert float(first.roundings[0]) > 1e6


# On two runs by hand, against a loop over rows and operations.

GRAPH = Graph(
    (
        Operation(tap="embed", kind=Kind.EMBEDDING),
        Operation(tap="q", kind=Kind.LINEAR, inputs=("embed",)),
        Operation(tap="attention", kind=Kind.ATTENTION, inputs=("q", "embed")),
        Operation(tap="k_cache", kind=Kind.CACHE, inputs=("q",)),
        Operation(tap="scan", kind=Kind.OTHER, inputs=("attention",)),
        Operation(tap="choice", kind=Kind.CHOICE, inputs=("scan",)),
        Operation(tap="last", kind=Kind.ADD, inputs=("q", "scan")),
    )
)
REQUESTS = {3: (1, 2, 3, 4, 5), 8: (6, 7, 8)}


def run_of(generator, values, ids):
    """A recording with rows in some order, each tap left out at some of them; requests have the ids that are given."""
    rows = [(request, at) for request, ids_ in REQUESTS.items() for at in range(len(ids_))]
    generator.shuffle(rows)
    cut = generator.randint(1, len(rows) - 1)
    steps, recorded = [], {}
    for part in (rows[:cut], rows[cut:]):
        taps, rows_of = {}, {}
        for operation in GRAPH:
            tap = operation.tap
            here = [at for at in range(len(part)) if generator.random() < 0.9]
            if here:
                taps[tap] = torch.stack([values[tap][part[at]] for at in here])
                rows_of[tap] = here
                recorded |= {(tap, part[at]): values[tap][part[at]] for at in here}
        steps.append(Step([(ids[request], at) for request, at in part], taps=taps, rows_of=rows_of))
    return recording_of(
        {ids[request]: tokens for request, tokens in REQUESTS.items()}, steps, dtype="bfloat16"
    ), recorded


def two_runs(seed):
    generator, torch_generator = random.Random(seed), torch.Generator().manual_seed(seed)
    before, after = {}, {}
    for operation in GRAPH:
        before[operation.tap], after[operation.tap] = {}, {}
        for request, tokens in REQUESTS.items():
            for at in range(len(tokens)):
                row = torch.randn(4, generator=torch_generator)
                row = row.mul(10).to(torch.int64) if operation.kind is Kind.CHOICE else row.bfloat16()
                changed = row.clone()
                if generator.random() < 0.15:
                    changed[2] += 1
                before[operation.tap][request, at], after[operation.tap][request, at] = row, changed
    return (
        run_of(generator, before, {3: 3, 8: 8}),
        run_of(generator, after, {3: 20, 8: 10}),
    )


@pytest.mark.parametrize("seed", range(12))
def test_rows_are_compared_as_a_loop_does(seed):
    (before, left), (after, right) = two_runs(seed)
    expected = {}
    for request, tokens in REQUESTS.items():
        same = {}
        for operation in GRAPH:
            tap = operation.tap
            both = [at for at in range(len(tokens)) if (tap, (request, at)) in left and (tap, (request, at)) in right]
            for at in both:
                same[tap, at] = torch.equal(left[tap, (request, at)], right[tap, (request, at)])
            for at in both if operation.kind is not Kind.CACHE else ():
                looks_back = operation.kind in (Kind.ATTENTION, Kind.OTHER, Kind.CHOICE)
                rows = range(at + 1) if looks_back else [at]
                if all(same.get((source, row), False) for source in operation.inputs for row in rows):
                    expected[tap, {3: 20, 8: 10}[request], at] = (
                        left[tap, (request, at)].double(), right[tap, (request, at)].double()
                    )  # fmt: skip
    actual = {}
    for rows in compare_bits(before, after, GRAPH):
        figures = zip(rows.position.tolist(), rows.is_changed.tolist(), rows.roundings.tolist(), strict=True)
        for position, is_changed, roundings in figures:
            actual[rows.operation.tap, rows.request, position] = is_changed, roundings
    assert actual.keys() == expected.keys()
    for key, (ours, theirs) in expected.items():
        distance = float((ours - theirs).norm() / ours.norm()) / rounding_unit(torch.bfloat16)
        assert actual[key][0] == (not torch.equal(ours, theirs))
        assert actual[key][1] == pytest.approx(0.0 if key[0] == "choice" else distance, rel=1e-2)


def test_requests_that_only_one_run_has_and_dtypes_that_differ_are_left_out():
    def run(tokens, dtype):
        taps = {"embed": torch.ones(2, 3, dtype=dtype)}
        return recording_of({1: tokens}, [Step([(1, 0), (1, 1)], taps=taps)], dtype="float32")

    assert len(list(compare_bits(run((1, 2), torch.float32), run((1, 2), torch.float32), GRAPH))) == 1
    assert list(compare_bits(run((1, 2), torch.float32), run((1, 3), torch.float32), GRAPH)) == []
    assert list(compare_bits(run((1, 2), torch.float32), run((1, 2), torch.float64), GRAPH)) == []


def rows_of(tap, request, position, is_changed, roundings):
    return ComparedRows(
        operation=GRAPH[tap], request=request, position=torch.tensor(position),
        is_changed=torch.tensor(is_changed), roundings=torch.tensor(roundings),
    )  # fmt: skip


def test_the_first_change_of_several_operations():
    """The lowest position, there the first operation of the run, and of two requests the first that was compared."""
    compared = [
        rows_of("last", 1, [0, 7, 4], [False, True, True], [0.0, 1.0, 2.0]),
        rows_of("scan", 1, [4, 6], [True, True], [3.0, 4.0]),
        rows_of("scan", 2, [9, 4], [True, True], [5.0, 6.0]),
        rows_of("q", 1, [5], [True], [7.0]),
        rows_of("embed", 1, [1, 2], [False, False], [0.0, 0.0]),
    ]
    actual = first_changed(iter(compared), GRAPH)
    assert (actual.operation.tap, actual.request, actual.position.tolist()) == ("scan", 1, [4])
    assert (actual.is_changed.tolist(), actual.roundings.tolist()) == ([True], [3.0])
    assert first_changed(compared[4:], GRAPH) is None
