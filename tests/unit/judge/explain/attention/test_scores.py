"""Every cause of attention against sums that are written out key by key (toy_attention.py)."""

import math
from types import SimpleNamespace

import pytest
import torch

from harness.judge.explain.attention import masks, softmax

from ....tiny_models import WINDOW
from ..conftest import BLOCK_SIZE
from ..planted import planted
from ..toy_attention import BLOCK, KEY, PLACES, STEPS, N, Q, Toy, step_of
from ..toys import by_cause, outputs


@pytest.fixture(scope="module")
def windowed(tmp_path_factory):
    return Toy(tmp_path_factory.mktemp("toy") / "r", window=3)


def first_of_step(place):
    return STEPS[step_of(place)][place[0]][0]


def masked(toy, sees, places=PLACES):
    """Rows that see the positions of their request of which `sees` of row, position and its step holds."""
    right = {request: [p for r, p in places if r == request] for request in (0, 1)}

    def row(place):
        request, _ = place
        seen = [(request, p) for p in range(max(right[request]) + 1) if sees(place, p, step_of((request, p)))]
        return toy.context(place, seen)

    return toy.contexts(places, row)


def test_the_definition(toy):
    failure = toy.failure()
    assert torch.allclose(torch.cat([view.attend() for view in failure.views]), failure.expected)


def test_windows(windowed):
    def seen(size):
        return lambda row, p, s: row[1] - size < p <= row[1]

    failure = windowed.failure(
        expected=lambda row: windowed.context(row, [(row[0], p) for p in range(row[1] + 1)][-3:])
    )
    causes = {c: h.output for c, h in by_cause(masks.wrong_window, failure).items() if not h.num_fitted}
    expected = {
        "sliding window off by one (too narrow): 2 instead of 3": masked(windowed, seen(2)),
        "sliding window off by one (too wide): 4 instead of 3": masked(windowed, seen(4)),
        "the sliding window of all rows of a step is that of its first row": masked(
            windowed, lambda row, p, s: first_of_step(row) - 3 < p <= row[1]
        ),
        "the sliding window is ignored": masked(windowed, lambda row, p, s: p <= row[1]),
    }
    assert set(causes) == set(expected)
    for cause, output in expected.items():
        torch.testing.assert_close(causes[cause], output, msg=cause)


SPANS = {
    "a row sees only the last {} tokens": lambda n: lambda row, p, s: row[1] - n < p <= row[1],
    "a row sees only the first {} tokens": lambda n: lambda row, p, s: p <= row[1] and p < n,
    "the first {} tokens are not seen": lambda n: lambda row, p, s: n <= p <= row[1],
    "a row does not see its last {} tokens": lambda n: lambda row, p, s: p <= row[1] - n,
}


@pytest.mark.parametrize("number", [1, 2, 5, 8])
@pytest.mark.parametrize("cause", SPANS)
def test_spans_are_fitted_to_the_row_that_has_most_to_see(toy, cause, number):
    actual = masked(toy, SPANS[cause](number))
    hypotheses = by_cause(masks.wrong_window, toy.failure(actual))
    hypothesis = hypotheses[cause.format(number)]
    torch.testing.assert_close(hypothesis.output, actual)
    assert (hypothesis.num_fitted, hypothesis.is_vague) == (1, False)
    assert len(hypotheses) == len(SPANS)


def test_a_window_says_more_than_a_span(windowed):
    hypotheses = by_cause(masks.wrong_window, windowed.failure())
    assert {h.is_vague for h in hypotheses.values() if h.num_fitted} == {True}


def test_one_row_of_one_token_has_no_span(toy):
    assert by_cause(masks.wrong_window, toy.failure(places=[(0, 0)])) == {}


# Keys of zeros.

PADDING = "padding is attended to"
PADDED = f"{PADDING}: keys are padded with zeros to a multiple of"


def padded(toy, number):
    return lambda place: toy.context(place, [*((place[0], p) for p in range(place[1] + 1)), *[None] * number(place)])


def own_length(place):
    """Tokens that the request has by the end of the row's step."""
    return STEPS[step_of(place)][place[0]][-1] + 1


def longest(place):
    return max(positions[-1] for positions in STEPS[step_of(place)].values()) + 1


@pytest.mark.parametrize(
    ("number", "cause", "num_fitted", "is_cause"),
    [
        (lambda place: 3, f"{PADDING}: keys of zeros take part", 1, True),
        (lambda place: longest(place) - own_length(place), f"{PADDING} in a ragged batch", 0, True),
        (lambda place: -own_length(place) % 4, f"{PADDING}: keys are padded with zeros to a multiple of 4", 0, True),
        (lambda place: -own_length(place) % 16, f"{PADDING}: keys are padded with zeros to a multiple of 16", 0, True),
        (
            lambda place: -own_length(place) % 256,
            f"{PADDING}: keys are padded with zeros to a multiple of 256",
            0,
            True,
        ),
        (lambda place: place[1] % 3, f"{PADDING}: keys of zeros take part", len(PLACES), False),
    ],
)
def test_keys_of_zeros(toy, number, cause, num_fitted, is_cause):
    failure = toy.failure(padded(toy, number))
    (hypothesis,) = masks.padding_attended(failure)
    assert (hypothesis.cause, hypothesis.num_fitted, hypothesis.is_cause) == (cause, num_fitted, is_cause)
    torch.testing.assert_close(hypothesis.output, failure.actual)
    shown = ", ".join(str(number(place)) for place in PLACES[:6])
    assert hypothesis.detail == f"number of them, row by row: {shown}"


def test_two_rows_have_a_number_in_common(toy):
    (hypothesis,) = masks.padding_attended(toy.failure(padded(toy, lambda place: 3), [(0, 7), (0, 8)]))
    assert (hypothesis.is_cause, hypothesis.num_fitted) == (True, 1)


def test_one_row_alone_has_no_number_in_common_with_others(toy):
    failure = toy.failure(padded(toy, lambda place: 3), [(0, 7)])
    (hypothesis,) = masks.padding_attended(failure)
    assert (hypothesis.is_cause, hypothesis.num_fitted) == (False, 1)


def test_no_keys_of_zeros_where_a_row_points_the_other_way(toy):
    actual = toy.contexts(PLACES)
    actual[5] *= -1
    assert by_cause(masks.padding_attended, toy.failure(actual)) == {}


def test_rows_that_grew_have_no_keys_of_zeros(toy):
    (hypothesis,) = masks.padding_attended(toy.failure(1.5 * toy.contexts(PLACES)))
    assert hypothesis.detail == "number of them, row by row: 0, 0, 0, 0, 0, 0"


# Scales.


def scales(right=0.4, head_dim=4, hidden=20, heads=6, kv=8):
    return {
        "missing": 1.0,
        "taken from the hidden size": 1 / math.sqrt(hidden),
        "applied twice": right * right,
        "the head size without its root": 1 / head_dim,
        "the root itself, not its inverse": math.sqrt(head_dim),
        "in base 2 without log2(e)": right / math.log2(math.e),
        "with log2(e) though the base is e": right * math.log2(math.e),
        "taken from the number of heads": 1 / math.sqrt(heads),
        "taken from the KV heads' total size": 1 / math.sqrt(kv),
        "that of a head size padded to 64": 1 / 8,
        "that of a head size padded to 128": 1 / math.sqrt(128),
        "that of a head size padded to 256": 1 / 16,
    }


def test_known_scales(toy):
    hypotheses = {c: h for c, h in by_cause(softmax.wrong_scale, toy.failure()).items() if not h.num_fitted}
    expected = {f"the softmax scale is {name}: {scale:.4g} instead of 0.4": scale for name, scale in scales().items()}
    assert set(hypotheses) == set(expected)
    for cause, scale in expected.items():
        output = toy.contexts(PLACES, lambda place, scale=scale: toy.context(place, scale=scale))
        torch.testing.assert_close(hypotheses[cause].output, output, msg=cause)


def test_the_models_sizes_are_no_reason_where_another_layer_is_right(toy):
    causes = by_cause(softmax.wrong_scale, toy.failure(sound=frozenset({"model.layers.0.attention"})))
    assert "the softmax scale is missing: 1 instead of 0.4" in causes
    assert not any(word in cause for cause in causes for word in ("taken from", "padded"))


def test_a_scale_that_has_two_names_has_one_of_them(tmp_path):
    usual = Toy(tmp_path / "r", scale=0.5)  # the root of 1/4: twice is 1/4
    causes = by_cause(softmax.wrong_scale, usual.failure())
    assert "the softmax scale is applied twice: 0.25 instead of 0.5" in causes
    assert not any("without its root" in cause for cause in causes)


@pytest.mark.parametrize("scale", [0.05, 0.3, 0.77, 4.0])
def test_a_scale_is_fitted(toy, scale):
    failure = toy.failure(lambda place: toy.context(place, scale=scale))
    (hypothesis,) = (item for item in by_cause(softmax.wrong_scale, failure).values() if item.num_fitted)
    assert hypothesis.cause == f"the softmax scale is {scale:g} instead of 0.4"
    torch.testing.assert_close(hypothesis.output, failure.actual, rtol=1e-4, atol=1e-5)


def test_a_scale_is_fitted_to_the_first_four_rows(toy):
    places = [(0, p) for p in range(1, 9)]
    actual = toy.contexts(places, lambda place: toy.context(place, scale=0.9 if place[1] <= 4 else 0.1))
    (hypothesis,) = (h for h in by_cause(softmax.wrong_scale, toy.failure(actual, places)).values() if h.num_fitted)
    assert hypothesis.cause == "the softmax scale is 0.9 instead of 0.4"


# Softmax in 16 bits.


def coarse(toy, dtype, part):
    def low(x):
        return x.to(dtype).double()

    def row(place):
        request, position = place
        heads = []
        for head in range(N):
            keys = torch.stack([toy.tensors[KEY][request, p][head // 3] for p in range(position + 1)])
            values = torch.stack(
                [toy.tensors["model.layers.1.self_attn.v_proj"][request, p][head // 3] for p in range(position + 1)]
            )
            scores = keys @ toy.tensors[Q][place][head] * 0.4
            softmax = {
                "its result": lambda s: low(s.softmax(0)),
                "its input": lambda s: low(s).softmax(0),
                "input and result": lambda s: low(low(s).softmax(0)),
                "all of it": lambda s: s.to(dtype).softmax(0).double(),
            }[part]
            heads.append(softmax(scores) @ values)
        return torch.cat(heads)

    return row


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_softmax_in_16_bits(toy, dtype):
    places = [(0, 3), (0, 8), (1, 6)]
    name = str(dtype).removeprefix("torch.")
    hypotheses = [
        h for h in softmax.coarse_softmax(toy.failure(places=places)) if h.cause == f"the softmax is in {name}"
    ]
    assert [h.detail for h in hypotheses] == ["its result", "its input", "input and result", "all of it"]
    exact = toy.contexts(places)
    for hypothesis in hypotheses:
        output = toy.contexts(places, coarse(toy, dtype, hypothesis.detail))
        # A number at the limit between two may go to either: all but a few of the elements are the same.
        same = (hypothesis.output - output).abs() <= 1e-3 * (exact - output).abs().max()
        assert same.double().mean() > 0.6, hypothesis.detail


# Split KV.

MERGES = {
    "split KV: natural log-sum-exp is merged in base 2": lambda lse, top: [2**s for s in lse],
    "split KV: log-sum-exp in base 2 is merged in base e": lambda lse, top: [math.exp(s / math.log(2)) for s in lse],
    "split KV: the pieces are not rescaled to a common maximum": lambda lse, top: [
        math.exp(s - m) for s, m in zip(lse, top, strict=True)
    ],
    "split KV: the pieces are averaged": lambda lse, top: [1.0] * len(lse),
}
UNWEIGHTED = {
    "split KV: the pieces are summed without weights": lambda count: [1.0] * count,
    "split KV: only the last piece counts": lambda count: [0.0] * (count - 1) + [1.0],
}


def merged(toy, place, pieces, cause):
    """One row whose history is cut into pieces [positions, ...]: each by itself, and put together by weights."""
    request, _ = place
    pieces = [piece for piece in pieces if piece]
    outputs = [toy.context(place, [(request, p) for p in piece]).view(N, -1) for piece in pieces]
    rows = []
    for head in range(N):
        scores = [
            [float(toy.tensors[Q][place][head] @ toy.tensors[KEY][request, p][head // 3]) * 0.4 for p in piece]
            for piece in pieces
        ]
        if cause in MERGES:
            lse = [math.log(sum(math.exp(s) for s in score)) for score in scores]
            weights = MERGES[cause](lse, [max(score) for score in scores])
            weights = [weight / sum(weights) for weight in weights]
        else:
            weights = UNWEIGHTED[cause](len(pieces))
        rows.append(sum(weight * output[head] for weight, output in zip(weights, outputs, strict=True)))
    return torch.cat(rows)


def in_sizes(size):
    return lambda place: [list(range(place[1] + 1))[at : at + size] for at in range(0, place[1] + 1, size)]


def in_pieces(count):
    return lambda place: in_sizes(-(-(place[1] + 1) // count))(place)


def old_and_own(place):
    first = max(1, first_of_step(place))
    return [list(range(min(first, place[1] + 1))), list(range(first, place[1] + 1))]


def test_pieces_that_are_merged_wrongly(toy):
    places = [(0, 0), (0, 3), (0, 5), (0, 8), (1, 4), (1, 6)]
    cuts = {f"pieces of {size} tokens": in_sizes(size) for size in (2, 3, 4, 6, 8)}
    cuts |= {f"{count} pieces": in_pieces(count) for count in range(2, 9)}
    cuts["keys of earlier steps, and those of the step itself"] = old_and_own
    failure = toy.failure(places=places)
    hypotheses = {(h.cause, h.detail): h.output for h in softmax.splits_merged_wrongly(failure)}
    wanted = {(cause, cut) for cause in (*MERGES, *UNWEIGHTED) for cut in cuts}
    wanted.remove(("split KV: only the last piece counts", "keys of earlier steps, and those of the step itself"))
    assert set(hypotheses) == wanted
    for cause, cut in wanted:
        output = toy.contexts(places, lambda place, cause=cause, cut=cut: merged(toy, place, cuts[cut](place), cause))
        torch.testing.assert_close(hypotheses[cause, cut], output, msg=f"{cause}, {cut}")


def test_pieces_shorter_than_the_longest_history_are_tried(toy):
    assert softmax._split_sizes(toy.failure()) == [2, BLOCK, 4, 2 * BLOCK, 8]
    assert softmax._split_sizes(toy.failure(places=[(1, 6)])) == [2, BLOCK, 4, 2 * BLOCK]


@pytest.mark.parametrize(("block_size", "multiple"), [(12, 12), (None, 16)])
def test_splits_are_tried_at_powers_of_two_and_at_multiples_of_the_block_size(block_size, multiple):
    failure = SimpleNamespace(
        views=[SimpleNamespace(key=torch.zeros(100, 1))], slot_history=SimpleNamespace(block_size=block_size)
    )
    blocks = {multiple * number for number in range(1, 9)}
    sizes = {2, 4, 8, 16, 32, 64} | blocks
    assert softmax._split_sizes(failure) == sorted(size for size in sizes if size < 100)


def test_outputs_of_all_explanations_have_the_rows_shape(toy):
    for explain in (
        masks.causal_mask_off,
        masks.mask_misaligned,
        masks.wrong_window,
        masks.padding_attended,
        softmax.wrong_scale,
        softmax.bias_added,
        softmax.coarse_softmax,
    ):
        assert outputs(explain, toy.failure(places=[(1, 6), (0, 4)]))


# The same causes planted in recordings of the reference engine and of HF.

TAP = "model.layers.1.attention"
RECORDED_Q, K, V = "model.layers.1.q_rope", "model.layers.1.k_rope", "model.layers.1.self_attn.v_proj"


def attended(
    bench, *, visible=None, scale=None, heads=None, values_of=None, softmax=None, key=None, value=None, merge=None
):
    """Attention of every row in float64; each part can be replaced. `visible` gets own and key's (position, step)."""
    rows, head_dim = bench.rows(), bench.head_dim
    q, k, v = (bench.tap(name).unflatten(1, (-1, head_dim)) for name in (RECORDED_Q, K, V))
    k, v = k if key is None else key.view_as(k), v if value is None else value.view_as(v)
    groups = q.shape[1] // k.shape[1]
    heads = torch.arange(q.shape[1]) // groups if heads is None else heads
    values_of = heads if values_of is None else values_of
    output = torch.empty_like(q)
    for request in rows.request.unique():
        right = (rows.request == request).nonzero()[:, 0]
        right = right[rows.position[right].argsort()]
        position, step = rows.position[right], rows.step[right]
        scores = torch.einsum("tnh,snh->nts", q[right], k[right][:, heads]) * (scale or head_dim**-0.5)
        mask = position[None, :] <= position[:, None]
        if visible is not None:
            mask = visible(position[:, None], step[:, None], position[None, :], step[None, :])
        scores = scores.masked_fill(~mask, -torch.inf)
        if merge is not None:
            output[right] = merge(scores, v[right][:, values_of])
            continue
        p = (softmax or (lambda s: s.softmax(-1)))(scores)
        output[right] = torch.einsum("nts,snh->tnh", p.nan_to_num(0.0), v[right][:, values_of])
    return output.flatten(1)


def chunks(bench):
    """Return the first position of each row's request in the row's step, by request and step."""
    rows = bench.rows()
    places = zip(rows.request.tolist(), rows.step.tolist(), strict=True)
    return {
        (request, step): int(rows.position[(rows.request == request) & (rows.step == step)].min())
        for request, step in places
    }


def in_chunks(sees):
    """Return attention whose rows see keys by row's and key's position, and where the row's chunk begins."""

    def wrong(bench):
        first, output = chunks(bench), torch.empty_like(bench.tap(TAP))
        for request in (0, 1):

            def visible(p, s, q, t, request=request):
                begin = torch.tensor([first.get((request, step), 0) for step in s[:, 0].tolist()])[:, None]
                return sees(p, q, begin)

            of_request = bench.rows().request == request
            output[of_request] = attended(bench, visible=visible)[of_request]
        return output

    return wrong


def with_padding(number):
    """Return attention with keys of zeros in its sums: `number` of the bench and a row's index."""

    def wrong(bench):
        rows, output = bench.rows(), attended(bench).unflatten(1, (6, -1)).clone()
        q, k = (bench.tap(name).unflatten(1, (-1, bench.head_dim)) for name in (RECORDED_Q, K))
        for at in range(len(rows)):
            history = (rows.request == rows.request[at]) & (rows.position <= rows.position[at])
            keys = k[history].repeat_interleave(3, dim=1)
            total = (torch.einsum("nh,snh->ns", q[at], keys) * bench.head_dim**-0.5).exp().sum(1)
            output[at] *= (total / (total + number(bench, at)))[:, None]
        return output.flatten(1)

    return wrong


def up_to_a_multiple(multiple):
    def number(bench, at):
        rows = bench.rows()
        return (
            -(int(rows.position[(rows.request == rows.request[at]) & (rows.step == rows.step[at])].max()) + 1)
            % multiple
        )

    return number


def of_decode_rows(bench, at):
    rows = bench.rows()
    return 7 if rows.request[at] == 1 and rows.position[at] >= 11 else 0


def split(weigh, size=16):
    def merge(scores, v):
        pieces = [scores[..., at : at + size] for at in range(0, scores.shape[-1], size)]
        outputs = torch.stack(
            [
                torch.einsum("nts,snh->nth", piece.softmax(-1).nan_to_num(0.0), v[at * size : (at + 1) * size])
                for at, piece in enumerate(pieces)
            ]
        )
        weights = weigh(torch.stack([p.logsumexp(-1) for p in pieces]), torch.stack([p.amax(-1) for p in pieces]))
        return (weights[..., None] * outputs).sum(0).transpose(0, 1)

    return merge


def biased(slopes):
    def softmax(scores):
        at = torch.arange(scores.shape[-1])
        return (scores - slopes[:, None, None] * (at[:, None] - at)).softmax(dim=-1)

    return softmax


def capped(cap):
    return lambda scores: torch.where(scores == -torch.inf, scores, cap * torch.tanh(scores / cap)).softmax(-1)


def with_sinks(logits):
    def softmax(scores):
        column = logits[:, None, None].expand(*scores.shape[:2], 1)
        return torch.cat((scores, column), dim=-1).softmax(-1)[..., :-1]

    return softmax


def rounded(dtype):
    return lambda scores: scores.softmax(-1).to(dtype).double()


def attention(cause, *bench, expected=None, **parts):
    return planted(cause, TAP, lambda item: attended(item, **parts), *bench, **(expected or {}))


CHUNKED = ("qwen3-tiny", torch.float32, "chunked")
HEAD_DIM, HIDDEN = 32, 96
SCALE = HEAD_DIM**-0.5
SCALES = {
    "missing": 1.0, "taken from the hidden size": HIDDEN**-0.5, "in base 2 without log2(e)": SCALE * math.log(2),
    "applied twice": SCALE * SCALE, "with log2(e) though the base is e": SCALE / math.log(2),
    "taken from the number of heads": 6**-0.5,
}  # fmt: skip
FITTED_SCALES = (0.2, SCALE * math.exp(-2.5), SCALE * math.exp(1.5))
VISIBLE = {
    "causal mask off by one: a row does not see itself": lambda p, s, q, t: q < p,
    "causal mask off by one: a row sees the next token": lambda p, s, q, t: (q <= p + 1) & (t <= s),
    "no causal mask: a row sees all tokens of its step": lambda p, s, q, t: t <= s,
    "a row sees only the tokens of its own step: the cache is not read": lambda p, s, q, t: (q <= p) & (t == s),
    "a row does not see the tokens of its own step": lambda p, s, q, t: (q <= p) & (t != s),
    "a row sees only the last 9 tokens": lambda p, s, q, t: (q <= p) & (q > p - 9),
    "the first 2 tokens are not seen": lambda p, s, q, t: (q <= p) & (q >= 2),
}
WINDOWS = {
    f"sliding window off by one (too wide): {WINDOW + 1} instead of {WINDOW}": WINDOW + 1,
    f"sliding window off by one (too narrow): {WINDOW - 1} instead of {WINDOW}": WINDOW - 1,
    "the sliding window is ignored": 1 << 20,
}
MERGED = {
    "split KV: natural log-sum-exp is merged in base 2": lambda s, m: (s * math.log(2)).softmax(0),
    "split KV: the pieces are not rescaled to a common maximum": lambda s, m: (s - m).nan_to_num(-torch.inf).softmax(0),
    "split KV: the pieces are averaged": lambda s, m: s.isfinite() / s.isfinite().sum(0),
    "split KV: the pieces are summed without weights": lambda s, m: s.isfinite().double(),
}
OF_BLOCK_2 = "pieces of 16 tokens; the first bad row is at position 16 of request 0, where block 2 begins"
PADDED_TO = "padding is attended to: keys are padded with zeros to a multiple of"
RIGHT_HEADS, OTHER_HEADS = [0, 0, 0, 1, 1, 1], [1, 1, 1, 0, 0, 0]
MISTAKES = [
    *(attention(cause, *CHUNKED, visible=visible) for cause, visible in VISIBLE.items()),
    planted(
        "causal mask aligned top-left instead of bottom-right", TAP, in_chunks(lambda p, q, begin: q <= p - begin),
        *CHUNKED, scope="rows that are not in their request's first step",
    ),
    planted(
        "a row does not see the last token of the step before", TAP,
        in_chunks(lambda p, q, begin: (q <= p) & (q != begin - 1)), *CHUNKED,
    ),
    *(attention(cause, "mistral", visible=lambda p, s, q, t, size=size: (q <= p) & (q > p - size))
      for cause, size in WINDOWS.items()),
    *(attention(f"the softmax scale is {name}: {scale:.4g} instead of {SCALE:.4g}", scale=scale)
      for name, scale in SCALES.items()),
    *(attention(f"the softmax scale is {scale:.6g} instead of {SCALE:.6g}", scale=scale, expected={"num_fitted": 1})
      for scale in FITTED_SCALES),
    planted(
        f"the softmax scale is missing: 1 instead of {SCALE:.4g}", TAP,
        lambda bench: torch.where((bench.rows().request == 0)[:, None], attended(bench, scale=1.0), attended(bench)),
    ),
    attention(
        "ALiBi is added to the scores, which the model does not have",
        softmax=biased(torch.exp2(-8 * torch.arange(1, 7, dtype=torch.float64) / 6)),
    ),
    attention("the scores fall by 0.07 with each position", softmax=biased(torch.full((6,), 0.07).double())),
    *(attention(f"the softmax is in {str(dtype)[6:]}", softmax=rounded(dtype))
      for dtype in (torch.bfloat16, torch.float16)),
    *(attention(f"the probabilities are rounded to {str(dtype)[6:]}", softmax=rounded(dtype))
      for dtype in (torch.float8_e4m3fn, torch.float8_e5m2)),
    *(attention(f"a soft cap of {cap:g} is applied to the scores, which the model does not have", softmax=capped(cap),
                expected={"num_fitted": num_fitted}) for cap, num_fitted in ((1.5, 1), (15.0, 0))),
    attention(
        "attention sinks take part in the softmax, which the model does not have",
        softmax=with_sinks(torch.linspace(-1, 2, 6, dtype=torch.float64)), expected={"num_fitted": 6},
    ),
    attention(
        "...one is added to the sum of the exponentials: a key of zeros, or a sink whose logit is 0...",
        softmax=with_sinks(torch.zeros(6, dtype=torch.float64)), expected={"num_fitted": 0},
    ),
    *(attention(cause, merge=split(weigh), expected={"detail": OF_BLOCK_2}) for cause, weigh in MERGED.items()),
    planted(
        "padding is attended to: keys of zeros take part", TAP, with_padding(of_decode_rows),
        scope="decode rows of request 1",
    ),
    planted(
        f"reads past the context length, or {PADDED_TO} {BLOCK_SIZE}", TAP, with_padding(up_to_a_multiple(BLOCK_SIZE))
    ),  # what is after a request's end in its block is zeros, too
    *(planted(f"{PADDED_TO} {multiple}", TAP, with_padding(up_to_a_multiple(multiple))) for multiple in (16, 32)),
    attention(
        "KV heads are tiled instead of repeated", heads=torch.tensor([0, 1, 0, 1, 0, 1]),
        expected={"detail": "...[0, 1, 0, 1, 0, 1]"},
    ),
    attention(
        "query heads read the wrong KV heads", heads=torch.tensor(OTHER_HEADS),
        expected={"detail": f"KV head of each query head: {OTHER_HEADS}"},
    ),
    attention(
        "query heads read the values of the wrong KV heads, and the right keys", values_of=torch.tensor(OTHER_HEADS),
        expected={"detail": f"KV head of each query head: {OTHER_HEADS}"},
    ),
    attention(
        "query heads read the keys of the wrong KV heads, and the right values",
        heads=torch.tensor(OTHER_HEADS), values_of=torch.tensor(RIGHT_HEADS),
    ),
]  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_named(bench_of, mistake):
    mistake.check(bench_of)


def test_what_is_planted_is_the_engines_where_nothing_is_wrong(bench_of):
    bench, windowed = bench_of(), bench_of("mistral")
    assert torch.allclose(attended(bench), bench.tap(TAP), atol=1e-5)
    right = attended(windowed, visible=lambda p, s, q, t: (q <= p) & (q > p - WINDOW))
    assert torch.allclose(right, windowed.tap(TAP), atol=1e-4)
    assert (bench.head_dim, bench.config.hidden_size, bench.config.num_attention_heads) == (HEAD_DIM, HIDDEN, 6)
    assert bench.config.num_key_value_heads == 2
