"""States that go on from row to row, in a mixer of plain numbers: h = exp(-exp(A_log)) h + c, y = h + D x.

c is a convolution of two rows: c = w0 x before + w1 x. Two requests in chunks.
"""

import math
from contextlib import ExitStack
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from harness.formats.taps import Kind, Operation
from harness.judge.compare.align import Rows
from harness.judge.explain.states import recurrence
from harness.judge.explain.states.recurrence import recurrence_of
from harness.oracle.watch import watching

from ..toys import ToyModel, by_cause, failure_of, random, recorded

MIXER, THEIRS = "model.layers.1.mixer", "model.layers.0.mixer"
ENTRY, IN, OUT, Y = "model.layers.1.norm", f"{MIXER}.in_proj", f"{MIXER}.out_proj", f"{MIXER}.y"
WIDTH = 3
STEPS = (
    {0: range(4), 1: range(2)},
    {0: range(4, 6), 1: range(2, 3)},
    {0: range(6, 7), 1: range(3, 4)},
    {0: range(7, 8), 1: range(4, 5)},
)
PLACES = [(r, p) for r in (0, 1) for step in STEPS for p in step[r]]
STEP = {(r, p): at for at, step in enumerate(STEPS) for r, positions in step.items() for p in positions}
X = dict(zip(PLACES, random(len(PLACES), WIDTH, seed=1), strict=True))


class Mixer(nn.Module):
    def __init__(self, seed=2):
        super().__init__()
        self.in_proj, self.out_proj = nn.Linear(WIDTH, WIDTH).double(), nn.Linear(WIDTH, WIDTH).double()
        self.A_log, self.D = (
            nn.Parameter(0.3 * random(WIDTH, seed=seed) - 1),
            nn.Parameter(random(WIDTH, seed=seed + 1)),
        )
        self.conv1d = nn.Conv1d(WIDTH, WIDTH, 2, groups=WIDTH, padding=1, bias=False).double()
        self.conv1d.weight.data = random(WIDTH, 1, 2, seed=seed + 2)

    def forward(self, hidden):
        x = self.in_proj(hidden)
        taken = self.conv1d(x.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2)
        decay, h, rows = torch.exp(-torch.exp(self.A_log)), torch.zeros(WIDTH, dtype=torch.float64), []
        for at in range(x.shape[1]):
            h = decay * h + taken[0, at]
            rows.append(h + self.D * x[0, at])
        return self.out_proj(torch.stack(rows)[None])


RIGHT_MIXER, FAR_MIXER = Mixer(), Mixer(12)


def scan(sequence, *, a_log=None, d=None, weight=None, is_growing=False, convolved=None):
    """Rows of a sequence of places, in plain numbers; `convolved` gives what the convolution gives at a place."""
    a_log = (RIGHT_MIXER.A_log if a_log is None else a_log).tolist()
    d, weight = (
        (RIGHT_MIXER.D if d is None else d).tolist(),
        (RIGHT_MIXER.conv1d.weight if weight is None else weight)[:, 0].tolist(),
    )
    h, before, rows = [0.0] * WIDTH, [0.0] * WIDTH, []
    for place in sequence:
        x = X[place].tolist()
        c = [weight[i][0] * before[i] + weight[i][1] * x[i] for i in range(WIDTH)]
        c = c if convolved is None else convolved[place].tolist()
        sign = 1 if is_growing else -1
        h = [math.exp(sign * math.exp(a_log[i])) * h[i] + c[i] for i in range(WIDTH)]
        rows.append(torch.tensor([h[i] + d[i] * x[i] for i in range(WIDTH)], dtype=torch.float64))
        before = x
    return rows


def taken(sequence):
    """What the convolution gives over a sequence of places."""
    weight, before, rows = RIGHT_MIXER.conv1d.weight[:, 0], torch.zeros(WIDTH), []
    for place in sequence:
        rows.append(weight[:, 0] * before + weight[:, 1] * X[place])
        before = X[place]
    return dict(zip(sequence, rows, strict=True))


HISTORIES = {r: [place for place in PLACES if place[0] == r] for r in (0, 1)}


def of_sequences(sequences, places=PLACES, **others):
    """Rows that follow each other in sequences of places; the last one of a place counts."""
    rows = {}
    for sequence in sequences:
        rows |= dict(zip(sequence, scan(sequence, **others), strict=True))
    return torch.stack([rows[place] for place in places])


@pytest.fixture(autouse=True)
def _without_gradients():
    with torch.no_grad():
        yield


class Tree(nn.Module):
    """Modules by their paths, with hooks on them."""

    def __init__(self, modules):
        super().__init__()
        for path, module in sorted(modules.items()):
            parent, _, name = path.rpartition(".")
            parent = self.get_submodule(parent)
            if getattr(parent, name, None) is not module:
                parent.add_module(name, module)

    def set_attn_implementation(self, name):
        """It has no attention."""


@pytest.fixture(scope="module")
def of(tmp_path_factory):
    def make(actual=None, places=PLACES, *, expected_rows=RIGHT_MIXER, dtype=torch.float32, expected=None, omitted=()):
        own_operation = Operation(tap=Y, kind=Kind.OTHER, inputs=(IN,), source=f"{OUT}:input")
        operations = (
            Operation(tap=ENTRY, kind=Kind.NORM, source=ENTRY),
            Operation(tap=IN, kind=Kind.LINEAR, inputs=(ENTRY,), source=IN), own_operation,
            Operation(tap=OUT, kind=Kind.LINEAR, inputs=(Y,), source=OUT),
            Operation(tap=f"{THEIRS}.y", kind=Kind.OTHER, source=f"{THEIRS}.out_proj:input"),
        )  # fmt: skip
        steps = []
        for step in STEPS:
            here = [(r, p) for r, positions in step.items() for p in positions if (r, p) not in omitted]
            rows = torch.stack([X[place] for place in here])
            steps.append(
                {"request": [r for r, _ in here], "position": [p for _, p in here], "taps": {ENTRY: rows, IN: rows}}
            )
        recording = recorded(tmp_path_factory.mktemp("state") / "r", steps, lengths=((9, 6), (6, 3)))
        layers = (f"model.layers.{at}" for at in range(2))
        modules = {path: nn.Module() for path in ("model", "model.layers", *layers, ENTRY)}
        for path, mixer in ((MIXER, expected_rows), (THEIRS, FAR_MIXER)):
            modules[path] = mixer
            modules |= {f"{path}.{name}": getattr(mixer, name) for name in ("in_proj", "out_proj", "conv1d")}
        model = ToyModel(*operations, modules=modules, _attn_implementation="sdpa")
        model.model, model.mtp = Tree(modules), None
        model.part_of = lambda path: ".".join(path.split(".")[:4])
        meant = of_sequences(HISTORIES.values(), places) if expected is None else expected
        return failure_of(
            own_operation, meant if actual is None else actual, meant, torch.stack([X[place] for place in places]),
            model=model, recording=recording, dtype=dtype, request=[r for r, _ in places],
            position=[p for _, p in places], step=[STEP[place] for place in places],
            rerun=SimpleNamespace(watch=stack.enter_context(watching(model))),
        )  # fmt: skip

    with ExitStack() as stack:
        yield make


@pytest.fixture(scope="module")
def right(of):
    """What is tried, and what it would give."""
    return by_cause(recurrence.wrong_state, of())


def test_the_mixer_run_again_gives_what_it_should(of):
    recurrence = recurrence_of(of())
    assert (recurrence.path, recurrence.entry) == (MIXER, ENTRY)
    torch.testing.assert_close(recurrence.run(), of_sequences(HISTORIES.values()))
    assert [len(rows) for rows in recurrence.histories] == [8, 5]
    assert [len(rows) for rows in recurrence_of(of(places=[(0, 3), (0, 1), (1, 4)])).histories] == [4, 5]
    convolved = recurrence.convolved()
    for place, row in {**taken(HISTORIES[0]), **taken(HISTORIES[1])}.items():
        torch.testing.assert_close(convolved[0, place], row)


def test_a_mixer_that_gives_something_else_says_nothing(of):
    right = of_sequences(HISTORIES.values())
    for distance, is_same in ((0.9e-4, True), (1.1e-4, False)):
        far = right.clone()
        far[3] *= 1 + distance
        assert (recurrence_of(of(expected=far)) is not None) == is_same
    assert by_cause(recurrence.wrong_state, of(expected=2 * right)) == {}
    assert recurrence_of(of(places=[(0, 3)], omitted=((0, 1),))) is None
    assert recurrence_of(of(places=[(1, 3)], omitted=((0, 1),))) is not None


# Where the state begins.


def steps_of(history):
    return [[place for place in history if STEP[place] == step] for step in range(len(STEPS))]


def joined(pieces):
    return [place for piece in pieces for place in piece]


def frozen(history):
    first, *later = steps_of(history)
    return [first, *([*first, place] for step in later for place in step)]


def late(history):
    steps = steps_of(history)
    return [[*joined(steps[: max(at - 1, 0)]), *step] for at, step in enumerate(steps)]


def doubled(history):
    pieces = [steps_of(history)[0]]
    for before, step in zip(steps_of(history), steps_of(history)[1:], strict=False):
        pieces.append([*pieces[-1], before[-1], *step])
    return pieces


def prefill_and_decode(history):
    number = {0: 6, 1: 2}[history[0][0]]  # request 1 has one row in each step after the first
    return [history[:number], history[number:]]


BEGINNINGS = {
    "{} is not carried from one step to the next": steps_of,
    "{} of the prefill is not carried into decode": prefill_and_decode,
    "{} is not updated in decode: every row goes on from the end of the first step": frozen,
    "{} is a step late: the rows of the step before are not in it": late,
    "{} takes in the last row of the step before twice": doubled,
    "no {} is carried from row to row": lambda history: [[place] for place in history],
    "{} begins with what request 0 left, instead of with zero": lambda history: (
        [history] if history[0][0] == 0 else [[*HISTORIES[0], *history]]
    ),
    "{} begins with what request 1 left, instead of with zero": lambda history: (
        [history] if history[0][0] == 1 else [[*HISTORIES[1], *history]]
    ),
}


@pytest.mark.parametrize("cause", BEGINNINGS)
def test_states_that_begin_elsewhere(right, cause):
    sequences = [sequence for history in HISTORIES.values() for sequence in BEGINNINGS[cause](history)]
    wrong, expected_rows = {}, {}
    for sequence in sequences:
        wrong |= taken(sequence)
    for history in HISTORIES.values():
        expected_rows |= taken(history)
    expected = {
        "the state": of_sequences(sequences),
        "the convolution's state": of_sequences(HISTORIES.values(), convolved=wrong),
        "the recurrence's state": of_sequences(sequences, convolved=expected_rows),
    }
    for which, output in expected.items():
        name = cause.format(which).replace("no the ", "no ")
        assert name in right, f"{name} is not among {list(right)}"
        torch.testing.assert_close(right[name].output, output, msg=name)


def test_rows_that_are_alone_in_their_steps_show_nothing_from_row_to_row(of):
    alone = [(0, 6), (0, 7), (1, 4)]
    assert not any(cause.startswith("no ") for cause in by_cause(recurrence.wrong_state, of(places=alone)))


def test_a_first_row_may_begin_with_what_another_request_left(of):
    causes = by_cause(recurrence.wrong_state, of(places=[(0, 0)]))
    assert "the state begins with what request 1 left, instead of with zero" in causes


def rows(steps):
    return Rows(request=torch.zeros(len(steps), dtype=torch.int64), position=torch.arange(len(steps)),
                step=torch.tensor(steps))  # fmt: skip


@pytest.mark.parametrize(
    ("steps", "pieces"),
    [
        ([0, 0, 1, 2], [[0, 1], [2, 3]]), ([0, 0, 1, 1, 2], [[0, 1, 2, 3], [4]]), ([0, 1, 2], [[0, 1, 2]]),
        ([0, 0], [[0, 1]]), ([0, 1, 1, 2], [[0, 1, 2], [3]]),
    ],
)  # fmt: skip
def test_decode_begins_behind_the_last_step_of_several_rows(steps, pieces):
    assert [item.position.tolist() for item in recurrence._prefill_and_decode(rows(steps))] == pieces


# Parameters.


def test_a_model_is_as_it_was_afterwards(of):
    before = {name: tensor.clone() for name, tensor in RIGHT_MIXER.named_parameters()}
    by_cause(recurrence.wrong_state, of())
    assert all(torch.equal(tensor, before[name]) for name, tensor in RIGHT_MIXER.named_parameters())
