"""Mistakes of scores and softmax, made key by key: the explanation yields each, and the trial names it."""

import math
from dataclasses import dataclass

import pytest
import torch

from harness.judge.explain.attention import masks, softmax

from ..toy_attention import KEY, PLACES, STEPS, VALUE, N, Q, Toy, step_of
from ..toys import by_cause, named

SCALE, WINDOW, CAP = 0.4, 3, 20.0
SINKS = torch.tensor([0.5, -1.0, 2.0, 0.0, 1.0, -0.25], dtype=torch.float64)
PARTS = {"plain": {}, "windowed": {"window": WINDOW}, "capped": {"softcap": CAP}, "sunk": {"sinks": SINKS}}


@pytest.fixture(scope="module")
def toys(tmp_path_factory):
    return {name: Toy(tmp_path_factory.mktemp("toy") / "r", **parts) for name, parts in PARTS.items()}


@pytest.fixture(scope="module")
def toy(toys):
    return toys["plain"]


@dataclass(frozen=True)
class Row:
    """One row of one head, and the keys that it sees."""

    place: tuple[int, int]
    head: int
    keys: list[tuple[int, int]]

    @property
    def distance(self):
        return self.place[1] - torch.tensor([position for _, position in self.keys])


def begin_of(place):
    """The first position of the row's request in its step."""
    return STEPS[step_of(place)][place[0]][0]


def causal(p, q, begin, is_now):
    return q <= p


def plain_softmax(scores, row):
    return scores.softmax(0)


def attended(toy, sees=causal, weigh=plain_softmax, scale=SCALE, places=PLACES):
    """Return the rows whose heads weigh the values of the keys that are seen by what `weigh` makes of their scores.

    `sees` is asked with the positions of row and key, the first of the row's step, and whether the key is of it.
    """

    def row(place):
        now, begin = step_of(place), begin_of(place)
        computed = [key for key in PLACES if key[0] == place[0] and step_of(key) <= now]
        keys = [key for key in computed if sees(place[1], key[1], begin, step_of(key) == now)]
        if not keys:
            return torch.zeros(N * toy.value_size, dtype=torch.float64)
        heads = []
        for head in range(N):
            weights = weigh(scale * scores_of(toy, place, head, keys), Row(place, head, keys))
            heads.append(weights @ torch.stack([toy.tensors[VALUE][key][head // 3] for key in keys]))
        return torch.cat(heads)

    return toy.contexts(places, row)


def scores_of(toy, place, head, keys):
    return torch.stack([toy.tensors[KEY][key][head // 3] for key in keys]) @ toy.tensors[Q][place][head]


RIGHT = {
    "plain": {}, "windowed": {"sees": lambda p, q, *_: p - WINDOW < q <= p},
    "capped": {"weigh": lambda s, row: (CAP * (s / CAP).tanh()).softmax(0)},
    "sunk": {"weigh": lambda s, row: s.exp() / (s.exp().sum() + SINKS[row.head].exp())},
}  # fmt: skip


def failure_of(toys, name, **parts):
    """Return the failure of rows of a toy that were computed by other parts than its own."""
    right = attended(toys[name], **RIGHT[name])
    return toys[name].failure(attended(toys[name], **parts), expected=lambda place: right[PLACES.index(place)])


def everything(*_):
    return True


def masked(change):
    """Return the parts under which masked keys take part, with the scores that `change` gives them."""
    return {
        "sees": everything, "weigh": lambda s, row: torch.where(row.distance < 0, change(s), s).softmax(0),
    }  # fmt: skip


def biased(slope):
    """Return the parts under which scores fall with the distance by the slope of a head."""
    return {"weigh": lambda s, row: (s - slope(row.head) * row.distance).softmax(0)}


def capped(cap):
    return {"weigh": lambda s, row: (cap * (s / cap).tanh()).softmax(0)}


def plus(number):
    """Return the parts under which the sum of exponentials has something besides, by row."""
    return {"weigh": lambda s, row: s.exp() / (s.exp().sum() + number(row))}


def rounded(dtype):
    return {"weigh": lambda s, row: s.softmax(0).to(dtype).double()}


def end_of(place):
    """Tokens that the request has by the end of the row's step."""
    return STEPS[step_of(place)][place[0]][-1] + 1


def longest(place):
    return max(positions[-1] for positions in STEPS[step_of(place)].values()) + 1


SCALES = {
    "missing": 1.0, "taken from the hidden size": 1 / math.sqrt(20), "applied twice": SCALE * SCALE,
    "the head size without its root": 1 / 4, "the root itself, not its inverse": 2.0,
    "in base 2 without log2(e)": SCALE / math.log2(math.e),
    "with log2(e) though the base is e": SCALE * math.log2(math.e),
    "taken from the number of heads": 1 / math.sqrt(6), "taken from the KV heads' total size": 1 / math.sqrt(8),
    "that of a head size padded to 64": 1 / 8, "that of a head size padded to 128": 1 / math.sqrt(128),
    "that of a head size padded to 256": 1 / 16,
}  # fmt: skip
PADDING, PADDED = "padding is attended to", "padding is attended to: keys are padded with zeros to a multiple of"
ADDED = "attention sinks take part in the softmax, which the model does not have"
OTHERS = "the attention sinks are others than the model's"
ONE = "one is added to the sum of the exponentials: a key of zeros, or a sink whose logit is 0"
FOREIGN_CAP = "a soft cap of {} is applied to the scores, which the model does not have"
MASKS = {
    "causal mask off by one: a row does not see itself": lambda p, q, *_: q < p,
    "causal mask off by one: a row sees the next token": lambda p, q, *_: q <= p + 1,
    "no causal mask: a row sees all tokens of its step": everything,
    "causal mask aligned top-left instead of bottom-right": lambda p, q, begin, _: q <= p - begin,
    "a row sees only the tokens of its own step: the cache is not read": lambda p, q, _, is_now: q <= p and is_now,
    "a row does not see the last token of the step before": lambda p, q, begin, _: q <= p and q != begin - 1,
    "a row does not see the tokens of its own step": lambda p, q, _, is_now: not is_now,
}
WINDOWS = {
    "sliding window off by one (too narrow): 2 instead of 3": lambda p, q, *_: p - 2 < q <= p,
    "sliding window off by one (too wide): 4 instead of 3": lambda p, q, *_: p - 4 < q <= p,
    "the sliding window of all rows of a step is that of its first row": lambda p, q, begin, _: begin - 3 < q <= p,
    "the sliding window is aligned top-left instead of bottom-right": lambda p, q, begin, _: p - begin - 3 < q <= p,
    "the band of the sliding window is aligned top-left instead of bottom-right": (
        lambda p, q, begin, _: q <= p and abs(p - begin - q) < 3
    ),
    "the sliding window is ignored": causal,
}
SPANS = {
    "a row sees only the last {} tokens": lambda n: lambda p, q, *_: p - n < q <= p,
    "a row sees only the first {} tokens": lambda n: lambda p, q, *_: q <= p and q < n,
    "the first {} tokens are not seen": lambda n: lambda p, q, *_: n <= q <= p,
    "a row does not see its last {} tokens": lambda n: lambda p, q, *_: q <= p - n,
}


def of(explain, mistakes, toy="plain", num_fitted=0):
    """Return mistakes by cause: the explanation that yields it, the toy, the parts, how many numbers are fitted."""
    return {cause: (explain, toy, parts, num_fitted) for cause, parts in mistakes.items()}


MISTAKES = {
    **of(masks.causal_mask_off, {cause: {"sees": sees} for cause, sees in list(MASKS.items())[:3]}),
    **of(masks.mask_misaligned, {cause: {"sees": sees} for cause, sees in list(MASKS.items())[3:]}),
    **of(masks.wrong_window, {cause: {"sees": sees} for cause, sees in WINDOWS.items()}, "windowed"),
    **of(
        masks.wrong_window,
        {cause.format(n): {"sees": span(n)} for cause, span in SPANS.items() for n in (2, 5)}, num_fitted=1,
    ),
    **of(masks.mask_otherwise, {
        "the mask is applied after the softmax": {
            "sees": everything, "weigh": lambda s, row: s.softmax(0) * (row.distance >= 0),
        },
        "masked scores are set to 0 instead of left out": masked(torch.zeros_like),
        "masked scores are lowered by 1 instead of left out": masked(lambda s: s - 1),
        "masked scores are lowered by 10 instead of left out": masked(lambda s: s - 10),
    }),
    **of(masks.padding_attended, {
        f"{PADDING} in a ragged batch": plus(lambda row: longest(row.place) - end_of(row.place)),
        f"{PADDED} 4": plus(lambda row: -end_of(row.place) % 4),
        f"{PADDED} 16": plus(lambda row: -end_of(row.place) % 16),
        f"{PADDED} 256": plus(lambda row: -end_of(row.place) % 256),
    }),
    **of(masks.padding_attended, {f"{PADDING}: keys of zeros take part": plus(lambda row: 3)}, num_fitted=1),
    **of(softmax.wrong_scale, {
        f"the softmax scale is {name}: {scale:.4g} instead of 0.4": {"scale": scale} for name, scale in SCALES.items()
    }),
    **of(
        softmax.wrong_scale,
        {f"the softmax scale is {scale:g} instead of 0.4": {"scale": scale} for scale in (0.05, 0.3, 0.77, 4.0)},
        num_fitted=1,
    ),
    **of(softmax.scaled_after, {
        "the softmax scale is applied after the softmax": {"scale": 1.0, "weigh": lambda s, row: SCALE * s.softmax(0)},
    }),
    **of(softmax.bias_added, {
        "ALiBi is added to the scores, which the model does not have": biased(lambda head: 2 ** (-8 * (head + 1) / 6)),
    }),
    **of(softmax.bias_added, {"the scores fall by 0.07 with each position": biased(lambda head: 0.07)}, num_fitted=1),
    **of(softmax.coarse_softmax, {
        "the probabilities are rounded to float8_e4m3fn": rounded(torch.float8_e4m3fn),
        "the probabilities are rounded to float8_e5m2": rounded(torch.float8_e5m2),
    }),
    **of(softmax.left_out, {"the soft cap of the scores is left out": {}}, "capped"),
    **of(softmax.left_out, {"the attention sinks are left out": {}}, "sunk"),
    **of(softmax.other_cap, {FOREIGN_CAP.format(cap): capped(cap) for cap in (15, 20, 30, 50, 100)}),
    **of(softmax.other_cap, {FOREIGN_CAP.format(cap): capped(cap) for cap in (0.3, 1.5, 7.25)}, num_fitted=1),
    **of(softmax.other_cap, {"the soft cap of the scores is 15 instead of 20": capped(15)}, "capped"),
    **of(softmax.other_cap, {"the soft cap of the scores is 0.8 instead of 20": capped(0.8)}, "capped", 1),
    **of(softmax.other_sinks, {ONE: plus(lambda row: 1)}),
    **of(softmax.other_sinks, {ADDED: plus(lambda row: SINKS[row.head].exp())}, num_fitted=N),
    **of(softmax.other_sinks, {
        "the logits of the attention sinks are off by +0.7": plus(lambda row: (SINKS[row.head] + 0.7).exp()),
        "the logits of the attention sinks are off by -1.25": plus(lambda row: (SINKS[row.head] - 1.25).exp()),
    }, "sunk", 1),
    **of(softmax.other_sinks, {OTHERS: plus(lambda row: (2 * SINKS[row.head] + 1).exp())}, "sunk", N),
}  # fmt: skip


@pytest.mark.parametrize("cause", MISTAKES)
def test_a_mistake_is_yielded(toys, cause):
    explain, toy, parts, num_fitted = MISTAKES[cause]
    failure = failure_of(toys, toy, **parts)
    hypothesis = by_cause(explain, failure)[cause]
    torch.testing.assert_close(hypothesis.output, failure.actual, rtol=1e-4, atol=1e-5)
    assert (hypothesis.num_fitted, hypothesis.is_cause, hypothesis.is_vague) == (num_fitted, True, False)


@pytest.mark.parametrize("cause", MISTAKES)
def test_a_mistake_is_named(toys, cause):
    _, toy, parts, _ = MISTAKES[cause]
    explanation = named(failure_of(toys, toy, **parts))
    assert cause in explanation.cause
    assert explanation.is_cause


@pytest.mark.parametrize("part", PARTS)
def test_sums_between_ends_give_the_context_of_each_span(toys, part):
    view = max(toys[part].failure({}).views, key=lambda context: len(context.key))
    probe = view.select(torch.tensor([len(view.query) - 1]))
    for visible in (probe.visible()[0], probe.distance[0] >= 0):
        for step in (1, 4):
            ends = torch.arange(1, len(view.key), step)
            before, after = masks.context_before_and_from(probe, visible, ends)
            at = torch.arange(len(view.key))
            for row, end in enumerate(ends):
                for summed, seen in ((before, at < end), (after, at >= end)):
                    attended = probe.attend(visible=(visible & seen)[None])[0]
                    assert torch.allclose(summed[row], attended, rtol=1e-12, atol=1e-14), (part, end)
