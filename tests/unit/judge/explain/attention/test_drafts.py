"""Attention that reads what was given up, each context summed key by key."""

import pytest
import torch

from harness.formats.taps import Kind, Operation
from harness.judge.compare.align import Rows
from harness.judge.compare.evidence import AttentionContext
from harness.judge.explain.attention.slots import nothing_forgotten, rejected_drafts
from harness.judge.explain.cache.entries import other_row, replayed_reads
from harness.judge.explain.rotary.positions import _behind_given_up

from ..toys import ToyModel, by_cause, failure_of, random, recorded

K_HEADS, N, H, BLOCK = 1, 2, 4, 4
Q, KEY, VALUE, OUT, CACHE = (
    f"model.layers.0.{name}" for name in ("q_rope", "k_rope", "self_attn.v_proj", "attention", "k_cache")
)
TOKENS = ([1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 2, 3, 4, 5, 6, 90, 91, 9])
STEPS = (
    [(0, position) for position in range(5)],
    [(0, 5), (1, 6), (1, 7), (1, 8)],  # the drafts from position 6 on are rejected
    [(0, 6)],
    [(0, 7)],
    [(0, 8)],
)
PLACES = [(0, 6), (0, 7), (0, 8)]
CAUSE = "attends to a rejected draft, position 6, written in step 1"


def graph():
    return (
        Operation(tap=Q, kind=Kind.ROTARY),
        Operation(tap=KEY, kind=Kind.ROTARY, inputs=("model.layers.0.self_attn.k_norm",)),
        Operation(tap=VALUE, kind=Kind.LINEAR),
        Operation(tap=CACHE, kind=Kind.CACHE, inputs=(KEY,)),
        Operation(tap=OUT, kind=Kind.ATTENTION, inputs=(Q, KEY, VALUE)),
        Operation(tap="model.layers.0.self_attn.k_norm", kind=Kind.NORM),
    )


class Drafted:
    """A request whose draft was rejected once, recorded."""

    def __init__(self, folder, schedule="speculative", window=None):
        self.window = window
        places = [place for step in STEPS for place in step]
        self.tensors = {
            tap: dict(zip(places, random(len(places), heads, H, seed=heads + at), strict=True))
            for at, (tap, heads) in enumerate({Q: N, KEY: K_HEADS, VALUE: K_HEADS}.items())
        }
        steps = [
            {
                "request": [request for request, _ in step],
                "position": [position for _, position in step],
                "taps": {tap: torch.stack([values[item] for item in step]) for tap, values in self.tensors.items()},
                "slot_mapping": [BLOCK + position for _, position in step],
                "block_tables": {request: [1, 2, 3] for request, _ in step},
            }
            for step in STEPS
        ]
        steps.append({
            "phase": "readback", "request": [0] * 9, "position": range(9), "block_tables": {0: [1, 2, 3]},
            "taps": {CACHE: torch.zeros(9, K_HEADS, H, dtype=torch.float64)},
        })  # fmt: skip
        self.recording = recorded(
            folder, steps, lengths=((9, 5), (9, 6)), tokens=TOKENS, dtype="float64", drafts={1: 0}, schedule=schedule
        )

    def context(self, place, read, values=None):
        """Attend by hand; `read` are the places of the keys, `values` those of the values if they are others."""
        rows = []
        for head in range(N):
            scores = torch.stack([self.tensors[Q][place][head] @ self.tensors[KEY][item][0] for item in read])
            shares = scores.softmax(dim=0)
            rows.append(
                sum(share * self.tensors[VALUE][value][0] for share, value in zip(shares, values or read, strict=True))
            )
        return torch.cat(rows)

    def failure(self, read, values=None):
        history = [(0, position) for position in range(9)]
        view = AttentionContext(
            rows=Rows(
                request=torch.zeros(3, dtype=torch.int64),
                position=torch.tensor([6, 7, 8]),
                step=torch.tensor([2, 3, 4]),
            ),
            query=torch.stack([self.tensors[Q][place] for place in PLACES]),
            key=torch.stack([self.tensors[KEY][place] for place in history]),
            value=torch.stack([self.tensors[VALUE][place] for place in history]),
            key_step=torch.tensor([0] * 5 + [1, 2, 3, 4]),
            scale=1.0,
            window=self.window,
        )
        actual = [self.context(place, read(place), None if values is None else values(place)) for place in PLACES]
        return failure_of(
            graph()[4], torch.stack(actual), torch.stack([self.context(p, self.history(p)) for p in PLACES]),
            model=ToyModel(*graph(), head_dim=H), recording=self.recording, request=[0] * 3, position=[6, 7, 8],
            step=[2, 3, 4], views=(view,),
        )  # fmt: skip

    def history(self, place):
        first = 0 if self.window is None else max(0, place[1] - self.window + 1)
        return [(0, position) for position in range(first, place[1] + 1)]


def stale(first_only=False):
    """The history with what was rejected where the request's own rows were to be."""
    end = 7 if first_only else 9
    return lambda place: [(1 if 6 <= at < end else 0, at) for at in range(place[1] + 1)]


def fits(explain, failure):
    return [item.cause for item in explain(failure) if torch.allclose(item.output, failure.actual)]


@pytest.mark.parametrize(
    "read",
    [
        stale(),
        stale(first_only=True),
        lambda place: [*[(0, at) for at in range(place[1] + 1)], *[(1, at) for at in (6, 7, 8)]],
        lambda place: [*[(0, at) for at in range(place[1] + 1)], *[(1, at) for at in (6, 7, 8) if at > place[1]]],
    ],
)
def test_what_was_rejected_and_is_read_is_named(tmp_path, read):
    assert CAUSE in fits(rejected_drafts, Drafted(tmp_path / "r").failure(read))


def test_a_value_that_stays_is_named(tmp_path):
    drafted = Drafted(tmp_path / "r")
    assert fits(rejected_drafts, drafted.failure(drafted.history, values=stale())) == [CAUSE] * 2  # all, and the latest


def test_a_ring_that_was_not_rewound_is_named(tmp_path):
    """A window of four: position 6 took the place of position 2, 7 that of 3, 8 that of 4."""
    drafted = Drafted(tmp_path / "r", window=4)

    def ring(place):
        return [(1, at + 4) if 2 <= at <= 4 else (0, at) for _, at in drafted.history(place)]

    assert CAUSE in fits(rejected_drafts, drafted.failure(ring))


def test_a_cache_that_never_goes_back_is_named(tmp_path):
    for window in (None, 4):
        drafted = Drafted(tmp_path / str(window), "rewound", window)
        order = [place for step in STEPS for place in step]

        def all_so_far(place, order=order, window=window):
            read = order[: order.index(place) + 1]
            return read if window is None else read[-window:]

        name = "attends to a token that was taken back, position 6, written in step 1"
        assert fits(nothing_forgotten, drafted.failure(all_so_far)) == [name]


def test_positions_that_go_on_behind_what_was_rejected_are_named(tmp_path):
    failure = Drafted(tmp_path / "r").failure(stale())
    name = "positions go on behind a rejected draft, position 6, written in step 1: the request never went back"
    assert _behind_given_up(failure, torch.tensor([9, 10, 11])) == name
    assert _behind_given_up(failure, torch.tensor([7, 8, 9])) is None


def test_without_drafts_nothing_is_said(tmp_path):
    drafted = Drafted(tmp_path / "r")
    failure = drafted.failure(drafted.history)
    early = failure.select(failure.positions == 6)
    object.__setattr__(early, "views", tuple(view.select(torch.tensor([0])) for view in failure.views))
    early.views[0].rows.step[:] = 1  # before the draft was rejected
    assert not [item for item in rejected_drafts(early) if item.cause.startswith("attends")]
    assert not list(nothing_forgotten(early))


def test_a_slot_that_holds_what_was_rejected_is_named(tmp_path):
    drafted = Drafted(tmp_path / "r")
    kept = torch.stack([drafted.tensors[KEY][1, at].flatten() for at in (6, 7)])
    written = torch.stack([drafted.tensors[KEY][0, at].flatten() for at in (6, 7)])
    failure = failure_of(
        graph()[3], kept, written, model=ToyModel(*graph(), head_dim=H), recording=drafted.recording,
        request=[0, 0], position=[6, 7], step=[5, 5],
    )  # fmt: skip
    assert set(by_cause(other_row, failure)) == {"the slot holds a rejected draft, position 6, written in step 1"}
    assert not any("rejected" in cause for cause in by_cause(replayed_reads, failure))


def test_a_cache_that_is_shifted_by_what_was_rejected_is_named(tmp_path):
    drafted = Drafted(tmp_path / "r")
    kept = torch.stack([drafted.tensors[KEY][place].flatten() for place in ((0, 5), (1, 6), (1, 7))])
    written = torch.stack([drafted.tensors[KEY][0, at].flatten() for at in (6, 7, 8)])
    failure = failure_of(
        graph()[3], kept, written, model=ToyModel(*graph(), head_dim=H), recording=drafted.recording,
        request=[0] * 3, position=[6, 7, 8], step=[5] * 3,
    )  # fmt: skip
    name = "another position, or a rejected draft, position 6, written in step 1"
    assert set(by_cause(other_row, failure)) == {f"the slot holds {name}: what was given up is still in the cache"}
