"""Every cause of a rotation against pairs that are turned one by one, in plain numbers.

`R` rows, `N` heads, `H` elements of a head.
"""

import copy
import math

import pytest
import torch
from torch import nn
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from harness.formats.taps import Kind, Operation
from harness.judge.explain.causes import causes_of
from harness.judge.explain.rotary import frequencies as frequencies_module
from harness.judge.explain.rotary import positions as rotary_positions
from harness.judge.explain.rotary import rotation

from ..planted import planted
from ..toys import ToyModel, by_cause, failure_of, random, recorded

TAP = "model.layers.1.q_rope"
OPERATION = Operation(tap=TAP, kind=Kind.ROTARY, inputs=("x",), source=TAP)
R, N, H, THETA = 11, 2, 16, 10_000.0
X = random(R, N * H, seed=1)
PLAIN = {"rope_type": "default", "rope_theta": THETA}
LINEAR = {"rope_type": "linear", "rope_theta": THETA, "factor": 4.0}
LLAMA3 = {"rope_type": "llama3", "rope_theta": THETA, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": THETA, "factor": 4.0, "original_max_position_embeddings": 64}


def frequencies(theta=THETA, dim=H):
    return [theta ** (-2 * at / dim) for at in range(dim // 2)]


def turned(
    angle, positions=range(R), *, x=X, is_interleaved=False, count=H // 2, cos=math.cos, sin=math.sin, scaling=1.0
):
    """Turn `count` pairs of every head; `angle` gives that of a pair at a position, in radians."""
    rows = []
    for row, position in zip(x.tolist(), positions, strict=True):
        for head in range(N):
            elements = row[head * H : head * H + H]
            out = list(elements)
            for at in range(count):
                first, second = (2 * at, 2 * at + 1) if is_interleaved else (at, at + count)
                c, s = (scaling * f(angle(at, position)) for f in (cos, sin))
                out[first], out[second] = (
                    elements[first] * c - elements[second] * s,
                    elements[second] * c + elements[first] * s,
                )
            row[head * H : head * H + H] = out
        rows.append(row)
    return torch.tensor(rows, dtype=torch.float64)


def scaled(parameters):
    """Return frequencies and factor of the table as HF's own functions have them."""
    if parameters["rope_type"] == "default":
        return frequencies(parameters["rope_theta"]), 1.0
    right, scaling = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config_of(parameters), "cpu")
    return right.tolist(), scaling


def single(value):
    """Round to float32, in which HF has its angles."""
    return float(torch.tensor(value, dtype=torch.float32))


def by(turns, positions=range(R), **others):
    """Turn pairs by frequencies of their own, or those of other rope parameters."""
    if isinstance(turns, dict):
        turns, scaling = scaled(turns)
        others = {"scaling": scaling, **others}
    turns = [single(item) for item in turns]
    return turned(lambda at, position: single(single(position) * turns[at]), positions, count=len(turns), **others)


def config_of(parameters):
    return LlamaConfig(
        hidden_size=N * H,
        num_attention_heads=N,
        head_dim=H,
        max_position_embeddings=256,
        rope_parameters=dict(parameters),
    )


def of(actual=None, parameters=PLAIN, *, positions=range(R), x=X, dtype=torch.float32, model_config=None, **others):
    module = LlamaRotaryEmbedding(config_of(parameters))
    model = ToyModel(OPERATION, modules={TAP: nn.Identity()}, head_dim=H)
    model.config = model_config or config_of(parameters)
    model.model.rotary_emb = module
    right, scaling = module.inv_freq.tolist(), module.attention_scaling
    expected = by(right, positions, x=x, scaling=scaling)
    return failure_of(
        OPERATION, expected if actual is None else actual, expected, x, random(len(x), 5), model=model, dtype=dtype,
        position=list(positions), **others,
    )  # fmt: skip


def check(explain, failure, expected):
    hypotheses = by_cause(explain, failure)
    for cause, (output, num_fitted) in expected.items():
        assert cause in hypotheses, f"{cause} is not among {list(hypotheses)}"
        torch.testing.assert_close(hypotheses[cause].output, output, rtol=1e-5, atol=1e-6, msg=cause)
        assert hypotheses[cause].num_fitted == num_fitted, cause
    return hypotheses


def test_the_models_own():
    failure = of()
    assert failure.rotation is not None
    assert not failure.rotation.is_interleaved
    torch.testing.assert_close(failure.rotation.turn(X, failure.positions), failure.expected)


def test_pairs_directions_and_no_rotation():
    right = frequencies()
    check(rotation.other_pairs, of(), {
        "rotary over neighbouring pairs (interleaved) instead of half-split ones": (by(right, is_interleaved=True), 0),
    })  # fmt: skip
    interleaved = by(right, is_interleaved=True)
    failure = type(of())(**{**vars(of()), "expected": interleaved})
    check(rotation.other_pairs, failure, {
        "rotary over half-split pairs instead of neighbouring pairs (interleaved)": (by(right), 0),
    })  # fmt: skip
    check(rotation.not_rotated, of(), {"rotary is not applied": (X, 0)})
    factors = torch.linspace(1, 2, R, dtype=torch.float64)[:, None]
    scaled = type(of())(**{**vars(of()), "expected": X * factors})
    check(rotation.not_rotated, scaled, {"the rows' factors, which grow with the position, are not applied": (X, 0)})
    backwards = by(right, sin=lambda angle: -math.sin(angle))
    check(rotation.backwards, of(), {"rotary turns backwards (sign of the sine)": (backwards, 0)})


def test_rows_of_another_rotation_stay():
    """LongRoPE: requests beyond the original length have other frequencies, and those of two requests are wrong."""
    right, long = by(frequencies()), by([frequency / 4 for frequency in frequencies()])
    backwards = by(frequencies(), sin=lambda angle: -math.sin(angle))
    for count in (8, 4):
        here = torch.tensor(range(R))[:, None] < count
        failure = type(of())(**{**vars(of()), "expected": torch.where(here, right, long)})
        if count == 4:  # of the most rows, nothing is known
            assert by_cause(rotation.backwards, failure) == {}
        else:
            expected = {"rotary turns backwards (sign of the sine)": (torch.where(here, backwards, long), 0)}
            check(rotation.backwards, failure, expected)


def test_a_rotation_that_is_not_known_says_nothing():
    failure = of()
    modules = (frequencies_module.__name__, rotation.__name__)
    of_rotation = [explain for explain in causes_of(Kind.ROTARY) if explain.__module__ in modules]
    assert len(of_rotation) == 12
    strange = type(failure)(**{**vars(failure), "expected": failure.expected + 1})
    for explain in (*of_rotation, rotary_positions.other_positions):
        assert set(by_cause(explain, strange)) <= {"rotary is not applied"}


# Scalings.


def test_a_scaling_that_is_ignored():
    assert by_cause(frequencies_module.scaling_ignored, of()) == {}
    for parameters in (LINEAR, LLAMA3):
        cause = f"rope scaling ({parameters['rope_type']}) is ignored"
        check(frequencies_module.scaling_ignored, of(parameters=parameters), {cause: (by(PLAIN), 0)})
        assert len(by_cause(frequencies_module.scaling_ignored, of(parameters=parameters))) == 1


def test_factors_of_the_other_length():
    """LongRoPE has two lists of factors; that no original length is exceeded would give the same."""
    length = {"original_max_position_embeddings": 64, "factor": 4.0}  # of 256 positions: the long ones belong
    factors = {
        "short_factor": [1.0 + 0.1 * at for at in range(H // 2)],
        "long_factor": [2.0 + at for at in range(H // 2)],
    }
    parameters = {"rope_type": "longrope", "rope_theta": THETA, **length, **factors}
    failure = of(parameters=parameters)
    for used, unused in (("short", "long"), ("long", "short")):
        actual = by({**parameters, f"{unused}_factor": parameters[f"{used}_factor"]})
        if torch.allclose(actual, failure.expected):
            continue
        cause = f"rope scaling: the {used} factors are used where the {unused} ones belong"
        check(frequencies_module.other_scaling, of(actual, parameters), {cause: (actual, 0)})
        fits = [
            item.cause
            for item in frequencies_module.other_scaling(failure)
            if torch.allclose(item.output, actual, atol=1e-6)
        ]
        assert fits == [cause]


def test_a_scaling_of_which_the_factor_alone_is_kept():
    """No parameter of it is said to be another, though one that has no effect would give the same."""
    actual = by(frequencies(), scaling=scaled(YARN)[1])
    cause = "rope scaling (yarn) is ignored but for its factor of cos and sin"
    check(frequencies_module.scaling_ignored, of(actual, YARN), {cause: (actual, 0)})
    for hypothesis in frequencies_module.other_scaling(of(actual, YARN)):
        assert not torch.allclose(hypothesis.output, actual, rtol=1e-6, atol=0), hypothesis.cause


@pytest.mark.parametrize("truncate", [True, False])
def test_the_ends_of_yarns_ramp(truncate):
    """As HF's own function makes them: rounded, or as they are (gpt-oss)."""
    yarn = {**YARN, "truncate": truncate}
    actual = by({**YARN, "truncate": not truncate})
    cause = f"rope scaling: the ends of yarn's ramp are {'not ' * truncate}rounded to whole dimensions"
    check(frequencies_module.other_scaling, of(actual, yarn), {cause: (actual, 0)})


FACTORS = (0.5, 2, 3, 4, 8, 16, 32, 40, 64)


def test_scalings_that_config_json_does_not_ask_for():
    expected = {}
    for factor in FACTORS:
        right = [frequency / factor for frequency in frequencies()]
        cause = f"rope scaling: linear with factor {factor:g}, which config.json does not ask for"
        expected[cause] = by(right), 0
        yarn = {
            "rope_type": "yarn",
            "rope_theta": THETA,
            "factor": float(factor),
            "original_max_position_embeddings": 256,
        }
        expected[cause.replace("linear", "yarn")] = by(yarn), 0
    # No angle is larger under these factors than float32 would tell.
    hypotheses = check(frequencies_module.other_scaling, of(), expected)
    assert set(hypotheses) == set(expected)


@pytest.mark.parametrize("factor", [1.5, 6.0, 0.1])
def test_a_factor_of_all_frequencies_is_fitted(factor):
    actual = by([frequency / factor for frequency in frequencies()])
    cause = f"rope scaling: linear with factor {factor:g}, which config.json does not ask for"
    check(frequencies_module.other_scaling, of(actual), {cause: (actual, 1)})


def test_frequencies_that_are_right_have_no_factor():
    assert not any(item.num_fitted for item in by_cause(frequencies_module.other_scaling, of()).values())
    of_two = by([frequency / 2 for frequency in frequencies()])
    assert not any(item.num_fitted for item in by_cause(frequencies_module.other_scaling, of(of_two)).values()), (
        "which is a usual one"
    )


def test_values_of_the_scaling_that_are_others():
    values = {
        "factor": (1.0, *FACTORS), "low_freq_factor": (1, 2, 4, 8), "high_freq_factor": (1, 2, 4, 8, 16),
        "original_max_position_embeddings": (2048, 4096, 8192, 16384, 32768, 65536, 131072),
    }  # fmt: skip
    plain = by(PLAIN)
    failure = of(parameters=LLAMA3)
    hypotheses = by_cause(frequencies_module.other_scaling, failure)
    seen = 0
    for name, usual in values.items():
        for value in usual:
            cause = f"rope scaling: {name} is {value:g} instead of {LLAMA3[name]:g}"
            try:
                output = by({**LLAMA3, name: value})
            except ZeroDivisionError:
                continue
            if value == LLAMA3[name] or torch.allclose(output, plain, rtol=1e-6, atol=1e-9):
                assert cause not in hypotheses, cause
            elif cause in hypotheses:
                torch.testing.assert_close(hypotheses[cause].output, output, rtol=1e-5, atol=1e-6, msg=cause)
                assert hypotheses[cause].num_fitted == 0
                seen += 1
    assert seen >= 15
    assert any(cause.endswith("instead of llama3") and "linear with factor 2," in cause for cause in hypotheses)
    assert not any("attention_factor" in cause for cause in hypotheses)


def test_linear_is_not_tried_in_its_own_place():
    hypotheses = by_cause(frequencies_module.other_scaling, of(parameters=LINEAR))
    assert "rope scaling: factor is 8 instead of 4" in hypotheses
    assert not any("linear with factor 8" in cause for cause in hypotheses)
    assert any("yarn with factor 8, instead of linear" in cause for cause in hypotheses)
    assert "rope scaling: factor is 1 instead of 4" not in hypotheses, "no scaling at all has a name of its own"


def test_a_config_without_parameters_says_nothing_of_them():
    failure = of()
    bare = copy.deepcopy(failure.hf.config)
    bare.rope_parameters = {"full_attention": PLAIN}
    for explain in (
        frequencies_module.scaling_ignored,
        frequencies_module.other_scaling,
        frequencies_module.wrong_theta,
    ):
        assert by_cause(explain, of(model_config=bare)) == {}


# The base.


THETAS = (1e5, 2.5e5, 5e5, 1e6, 5e6, 1e7)


def test_usual_bases():
    hypotheses = {c: h for c, h in by_cause(frequencies_module.wrong_theta, of()).items() if not h.num_fitted}
    expected = {f"wrong rope theta: {theta:g} instead of 10000": by(frequencies(theta)) for theta in THETAS}
    assert set(hypotheses) == set(expected)
    for cause, output in expected.items():
        torch.testing.assert_close(hypotheses[cause].output, output, rtol=1e-5, atol=1e-6, msg=cause)
        assert not hypotheses[cause].is_vague


@pytest.mark.parametrize("theta", [130.0, 3456.0, 7.3e7])
def test_a_base_is_fitted_to_two_digits_and_to_six(theta):
    positions = range(40, 40 + R)  # far enough for the slow pairs to turn
    actual = by(frequencies(theta), positions)
    fitted = [item for item in frequencies_module.wrong_theta(of(actual, positions=positions)) if item.num_fitted]
    rough, fine = (float(item.cause.split()[3]) for item in (fitted[0], fitted[-1]))
    assert rough == float(f"{theta:.2g}")
    assert math.isclose(fine, theta, rel_tol=2e-3)
    assert [item.is_vague for item in fitted] == [False, True][-len(fitted) :]
    assert {item.num_fitted for item in fitted} == {1}
    torch.testing.assert_close(fitted[-1].output, actual, rtol=2e-3, atol=2e-3)


def test_the_factors_of_a_scaling_may_be_kept():
    plain, changed = (scaled(parameters)[0] for parameters in (PLAIN, LLAMA3))
    hypotheses = list(frequencies_module.wrong_theta(of(parameters=LLAMA3)))
    anew = {h.cause: h.output for h in hypotheses if not h.detail and not h.num_fitted}
    kept = {
        h.cause: h.output
        for h in hypotheses
        if h.detail == "the factors of the rope scaling are kept" and not h.num_fitted
    }
    for theta in THETAS:
        cause = f"wrong rope theta: {theta:g} instead of 10000"
        right = [s / p * o for s, p, o in zip(changed, plain, frequencies(theta), strict=True)]
        torch.testing.assert_close(kept[cause], by(right), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(anew[cause], by({**LLAMA3, "rope_theta": theta}), rtol=1e-5, atol=1e-6)
    assert not any(h.detail for h in frequencies_module.wrong_theta(of()))


# Other angles of all pairs.


@pytest.mark.parametrize("share", [0.004, -0.009, 1e-4])
def test_angles_that_are_a_little_too_large_or_too_small(share):
    actual = by([frequency * (1 + share) for frequency in frequencies()])
    (hypothesis,) = by_cause(rotation.stretched, of(actual)).values()
    assert math.isclose(float(hypothesis.cause.split()[-1]), 1 + share, abs_tol=0.02 * abs(share))
    torch.testing.assert_close(hypothesis.output, actual, rtol=1e-3, atol=20 * abs(share) * 0.02)
    assert hypothesis.num_fitted == 1


def test_angles_that_are_right_or_far_too_large_are_not_stretched():
    assert by_cause(rotation.stretched, of(by([1.02 * frequency for frequency in frequencies()]))) == {}
    assert by_cause(rotation.stretched, of(positions=[0] * R)) == {}


def test_some_elements_turn():
    """By the first frequencies of the whole head, or by those of the part."""
    hypotheses = list(frequencies_module.partial_rotary(of()))
    for share in (0.25, 0.5, 0.75):  # all of them turn as they should
        dim = int(H * share)
        cause = f"partial rotary: the first {dim} of 16 elements turn"
        right, cut = [item.output for item in hypotheses if item.cause == cause]
        torch.testing.assert_close(right, by(frequencies(dim=dim)), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(cut, by(frequencies()[: dim // 2]), rtol=1e-5, atol=1e-6)
    assert len(hypotheses) == 6


def low(value, dtype):
    return float(torch.tensor(value, dtype=torch.float64).to(dtype))


@pytest.mark.parametrize("name", ["bfloat16", "float16"])
def test_coarse_tables(name):
    dtype = getattr(torch, name)
    right = [single(frequency) for frequency in frequencies()]

    def exact(at, position):
        return single(position * right[at])

    def coarse(at, position):
        return float(torch.tensor(position).to(dtype) * torch.tensor(right[at]).to(dtype))

    table = {"cos": lambda angle: low(math.cos(angle), dtype), "sin": lambda angle: low(math.sin(angle), dtype)}
    expected = [
        (f"cos/sin table in {name}", turned(exact, **table)),
        (f"cos/sin table in {name}", turned(exact, **table)),
        (f"rotary frequencies in {name}", by([low(item, dtype) for item in right])),
        (f"cos/sin table in {name}, its angles too", turned(coarse, **table)),
        (f"rotary angles in {name}", turned(coarse)),
    ]
    causes = {cause for cause, _ in expected}
    hypotheses = [item for item in rotation.coarse_table(of()) if item.cause in causes]
    assert [item.cause for item in hypotheses] == [cause for cause, _ in expected]
    for item, (cause, output) in zip(hypotheses, expected, strict=True):
        torch.testing.assert_close(item.output, output, rtol=1e-6, atol=1e-6, msg=cause)


# Some pairs.


def causes_of_pairs(turns, positions=range(1, R + 1)):
    actual = by(turns, positions)
    return actual, by_cause(rotation.frequencies_of_other_pairs, of(actual, positions=positions))


STILL, ORDER = (
    "some pairs of a head do not turn: their frequencies are zero",
    "the frequencies of the pairs are in another order",
)


@pytest.mark.parametrize(
    ("still", "detail", "num_fitted"),
    [
        ([0], "pairs 0 of 8", 1), ([2], "pairs 2 of 8", 2), ([0, 1], "pairs 0 to 1 of 8", 1),
        ([1, 2], "pairs 1 to 2 of 8", 2), ([0, 2, 3], "pairs 0, 2 to 3 of 8", 3),
    ],
)  # fmt: skip
def test_pairs_that_do_not_turn(still, detail, num_fitted):
    actual, hypotheses = causes_of_pairs(
        [0.0 if at in still else frequency for at, frequency in enumerate(frequencies())]
    )
    assert set(hypotheses) == {STILL}
    assert (hypotheses[STILL].detail, hypotheses[STILL].num_fitted) == (detail, num_fitted)
    torch.testing.assert_close(hypotheses[STILL].output, actual, rtol=1e-5, atol=1e-6)


def test_the_last_pairs_that_do_not_turn():
    """Where they turn by enough to be seen."""
    right = [0.0 if at in (6, 7) else frequency for at, frequency in enumerate(frequencies())]
    _, hypotheses = causes_of_pairs(right, range(3000, 3000 + 40 * R, 40))
    assert (hypotheses[STILL].detail, hypotheses[STILL].num_fitted) == ("pairs 6 to 7 of 8", 1)


@pytest.mark.parametrize("order", [[1, 0, 2, 3, 4, 5, 6, 7], [2, 0, 1, 3, 4, 5, 6, 7], [0, 2, 1, 3, 4, 5, 6, 7]])
def test_frequencies_in_another_order(order):
    actual, hypotheses = causes_of_pairs([frequencies()[at] for at in order])
    moved = [at for at, to in enumerate(order) if at != to]
    assert set(hypotheses) == {ORDER}
    assert (hypotheses[ORDER].detail, hypotheses[ORDER].num_fitted) == (
        f"pairs {moved[0]} to {moved[-1]} of 8",
        len(moved),
    )
    torch.testing.assert_close(hypotheses[ORDER].output, actual, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("still", [2, 5])
def test_tables_with_a_factor_turn_pairs_as_well(still):
    """YaRN's cosine and sine are multiplied by a number besides."""
    yarn = {**PLAIN, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    positions = range(100, 100 + 40 * R, 40)
    right, scaling = scaled(yarn)
    actual = by([0.0 if at == still else item for at, item in enumerate(right)], positions, scaling=scaling)
    hypotheses = by_cause(rotation.frequencies_of_other_pairs, of(actual, yarn, positions=positions))
    assert (hypotheses[STILL].detail, hypotheses[STILL].num_fitted) == (f"pairs {still} of 8", 2)
    torch.testing.assert_close(hypotheses[STILL].output, actual, rtol=1e-4, atol=1e-5)


def test_pairs_that_turn_as_they_should_or_none_that_turns():
    assert causes_of_pairs(frequencies())[1] == {}
    assert causes_of_pairs([0.0] * 8)[1] == {}


def test_other_tables():
    right = frequencies()
    check(rotation.other_tables, of(), {
        "cosine and sine of the rotary table are exchanged": (by(right, cos=math.sin, sin=math.cos), 0),
        "the rotary table's sine is left out: only the cosine is applied": (by(right, sin=lambda angle: 0.0), 0),
        "the rotary table's cosine is left out: only the sine is applied": (by(right, cos=lambda angle: 0.0), 0),
    })  # fmt: skip


# Positions. Two requests in chunks: the rows of a step stand one after the other.

STEPS = (
    [(0, p) for p in range(4)] + [(1, p) for p in range(3)],
    [(0, 4), (0, 5), (1, 3), (1, 4)],
    [(0, 6), (1, 5)],
    [(1, 6), (0, 7)],
)
PROMPTS = (6, 4)
PLACES = [(*place, step) for step, places in enumerate(STEPS) for place in places]
INPUT = random(len(PLACES), N * H, seed=4)


@pytest.fixture(scope="module")
def recording(tmp_path_factory):
    steps = [{"request": [r for r, _ in places], "position": [p for _, p in places],
              "taps": {"x": torch.zeros(len(places), 1)}} for places in STEPS]  # fmt: skip
    steps.append({"phase": "readback", "request": [0, 1], "position": [0, 0], "taps": {"x": torch.zeros(2, 1)}})
    lengths = tuple(zip((9, 8), PROMPTS, strict=True))
    return recorded(tmp_path_factory.mktemp("rotary") / "r", steps, lengths=lengths)


def at(recording, position, places=PLACES):
    """Rows that are rotated for the position that `position` gives of request, position and step."""
    numbers = [PLACES.index(place) for place in places]
    used = [position(*place) for place in places]
    x = INPUT[numbers]
    return of(
        by(frequencies(), used, x=x), x=x, positions=[place[1] for place in places], recording=recording,
        request=[place[0] for place in places], step=[place[2] for place in places],
    ), used  # fmt: skip


def index(request, position, step):
    return STEPS[step].index((request, position))


def within(request, position, step):
    """Rows of the request before the row in its step."""
    return sum(r == request for r, _ in STEPS[step][: index(request, position, step)])


@pytest.mark.parametrize(
    ("position", "cause"),
    [
        (lambda r, p, s: p + 1, "rotary at a position off by one (+1)"),
        (lambda r, p, s: p - 1, "rotary at a position off by one (-1)"),
        (within, "positions restart at 0 in every step: the chunk's offset is forgotten"),
        (lambda *place: within(*place) + 1, "positions restart at 1 in every step: the chunk's offset is forgotten"),
        (index, "positions run on through the batch instead of restarting for each request"),
        (lambda r, p, s: p - PROMPTS[r], "positions restart at 0 after the prompt"),
        (
            lambda r, p, s: p + index(r, p, s) - within(r, p, s),
            "the rows of other requests before it in the step are added to the position",
        ),
        (lambda r, p, s: p + 3, "rotary at a position off by +3"),
        (lambda r, p, s: p - 2, "rotary at a position off by -2"),
        (lambda r, p, s: p + (4, -2)[r], "rotary at positions off by a number that each request has for itself: "
         "+4 in request 0, -2 in request 1"),
    ],
)  # fmt: skip
def test_positions_that_have_something_in_common(recording, position, cause):
    failure, used = at(recording, position)
    (hypothesis,) = by_cause(rotary_positions.other_positions, failure).values()
    assert hypothesis.cause == cause
    assert (hypothesis.num_fitted, hypothesis.is_cause, hypothesis.is_vague) == (0, True, False)
    torch.testing.assert_close(hypothesis.output, failure.actual, rtol=1e-5, atol=1e-6)
    pairs = sorted({(place[1], fitted) for place, fitted in zip(PLACES, used, strict=True)})
    assert hypothesis.detail == "positions: " + ", ".join(f"{right} as {fitted}" for right, fitted in pairs[:6])


def test_position_0_for_every_row_is_no_rotation(recording):
    failure, _ = at(recording, lambda r, p, s: 0)
    (hypothesis,) = by_cause(rotary_positions.other_positions, failure).values()
    assert (hypothesis.cause, hypothesis.is_vague) == ("rotary at position 0 for every row", True)


def test_positions_that_have_nothing_in_common(recording):
    failure, _ = at(recording, lambda r, p, s: (p * p + 3 * r) % 11)
    (hypothesis,) = by_cause(rotary_positions.other_positions, failure).values()
    assert (hypothesis.cause, hypothesis.is_cause) == ("rotary at wrong positions", False)
    assert hypothesis.num_fitted == len(PLACES)
    torch.testing.assert_close(hypothesis.output, failure.actual, rtol=1e-5, atol=1e-6)


BEHIND = [place for place in PLACES if place[1] >= 4]


@pytest.mark.parametrize(
    ("position", "places", "cause"),
    [
        (lambda r, p, s: 3, BEHIND, "positions stop at 3: rows after it are all rotated for it"),
        (lambda r, p, s: p % 4, BEHIND, "positions begin at 0 again after 3: they are taken modulo 4"),
        (lambda r, p, s: 2, BEHIND, None),  # it would have stopped before
        (lambda r, p, s: p % 5, BEHIND, None),
        (lambda r, p, s: 0, [place for place in PLACES if place[1] >= 1], "rotary at position 0 for every row"),
    ],
)
def test_positions_that_stop_or_begin_again(recording, position, places, cause):
    failure, _ = at(recording, position, places)
    (hypothesis,) = by_cause(rotary_positions.other_positions, failure).values()
    assert hypothesis.cause == (cause or "rotary at wrong positions")
    assert hypothesis.is_cause == (cause is not None)


@pytest.mark.parametrize(("places", "is_named"), [([(0, 4, 1), (0, 5, 1), (1, 3, 1), (1, 4, 1)], True),
                                                  ([(0, 4, 1), (0, 5, 1), (1, 3, 1)], False)])  # fmt: skip
def test_a_number_of_each_request_shows_in_two_rows_of_it(recording, places, is_named):
    failure, _ = at(recording, lambda r, p, s: p + (4, -2)[r], places)
    (hypothesis,) = by_cause(rotary_positions.other_positions, failure).values()
    assert ("each request has for itself" in hypothesis.cause) == is_named


def test_positions_are_looked_for_as_far_as_the_largest_step_reaches(recording, monkeypatch):
    """Seven rows in the largest step, and one too far: up to 7 + 8 from the highest position, 7."""
    failure, _ = at(recording, lambda r, p, s: p + 8)
    (hypothesis,) = by_cause(rotary_positions.other_positions, failure).values()
    assert hypothesis.cause == "rotary at a position off by +8"
    failure, _ = at(recording, lambda r, p, s: p + 9)
    (hypothesis,) = by_cause(rotary_positions.other_positions, failure).values()
    assert hypothesis.cause != "rotary at a position off by +9"
    for most, is_tried in ((16, True), (15, False)):
        monkeypatch.setattr(rotary_positions, "_MAX_POSITIONS", most)
        assert bool(by_cause(rotary_positions.other_positions, failure)) == is_tried


def test_the_position_of_the_row_before(recording):
    failure, _ = at(recording, lambda r, p, s: STEPS[s][index(r, p, s) - 1][1])
    check(rotary_positions.positions_of_batch_mate, failure, {
        "rotary at the position of the row before it in the batch": (failure.actual, 0),
    })  # fmt: skip


def test_rows_that_were_read_back_have_no_row_before(recording):
    failure, _ = at(recording, lambda r, p, s: p, [(0, 0, 0), (1, 0, 0)])
    failure.rows.step[:] = len(STEPS)
    assert by_cause(rotary_positions.positions_of_batch_mate, failure) == {}


# The same causes planted in recordings of the reference engine and of HF.

RECORDED_TAP, SOURCE = "model.layers.1.k_rope", "model.layers.1.self_attn.k_norm"
WITHOUT_NORM = "model.layers.1.self_attn.k_proj"
"""What is rotated where a model has no norm of keys."""


def rotated(bench, positions=None, *, frequencies=None, tables=None, source=SOURCE, is_interleaved=False):
    """Rotation in float64, angles in float32 as HF has them; `tables` gives cosine and sine of the angles."""
    x = bench.tap(source).unflatten(1, (-1, bench.head_dim))
    positions = bench.rows().position if positions is None else positions
    frequencies = right_frequencies(bench) if frequencies is None else frequencies
    angles = (positions[:, None].float() * frequencies.float())[:, None].double()
    cos, sin = (angles.cos(), angles.sin()) if tables is None else tables(angles)
    if is_interleaved:
        a, b = x[..., ::2], x[..., 1::2]
        return torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(1)
    dim = 2 * len(frequencies)
    a, b = x[..., :dim].chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin, x[..., dim:]), dim=-1).flatten(1)


def right_frequencies(bench):
    """The frequencies of HF's model, scaled as its config asks."""
    return bench.hf.model.model.rotary_emb.inv_freq.clone()


def unscaled_frequencies(bench, *, theta=None, share=1.0):
    dim = int(bench.head_dim * share)
    theta = theta or bench.config.rope_parameters["rope_theta"]
    return 1.0 / (theta ** (torch.arange(0, dim, 2, dtype=torch.float) / dim))


def is_decode(bench):
    rows = bench.rows()
    return rows.position >= torch.tensor([request.prompt_length for request in bench.golden.requests])[rows.request]


def at_positions(change):
    """Return rows that are rotated for what `change` makes of a bench and its rows' positions."""
    return lambda bench: rotated(bench, change(bench, bench.rows().position))


def at_frequencies(change, source=SOURCE):
    """Return rows that are rotated by what `change` makes of a bench and the model's frequencies."""
    return lambda bench: rotated(bench, frequencies=change(bench, right_frequencies(bench)), source=source)


def with_tables(tables):
    return lambda bench: rotated(bench, tables=tables)


def coarse(dtype):
    return with_tables(lambda angles: (table.to(dtype).double() for table in (angles.cos(), angles.sin())))


def without_chunk_offset(bench, positions):
    rows = bench.rows()
    keys = rows.step * 100 + rows.request
    first = torch.stack([positions[keys == key].min() for key in keys])
    return torch.where(is_decode(bench), positions, positions - first)


def of_the_row_before(bench, positions):
    shifted, step = positions.clone(), bench.rows().step
    for number in step.unique():
        shifted[step == number] = positions[step == number].roll(1)
    return shifted


def through_the_batch(bench, positions):
    step = bench.rows().step
    return torch.where(step == step.min(), torch.arange(len(step)), positions)


def with_base(theta):
    """Return frequencies of another base, scaled by the factors of the right one."""

    def change(bench, frequencies):
        exponents = torch.arange(len(frequencies)).double() / len(frequencies)
        return frequencies * (bench.config.rope_parameters["rope_theta"] / theta) ** exponents

    return change


def with_factor(factor):
    """Return frequencies as HF's own module makes them of another factor of the scaling."""

    def change(bench, _):
        config = copy.deepcopy(bench.config)
        config.rope_parameters = {**bench.config.rope_parameters, "factor": factor}
        return type(bench.hf.model.model.rotary_emb)(config).inv_freq

    return change


def still_from(first):
    return lambda _, frequencies: torch.where(torch.arange(len(frequencies)) < first, frequencies, 0)


def rotary(cause, wrong, *bench, **expected):
    return planted(cause, RECORDED_TAP, wrong, *bench, **expected)


def theta(number):
    return at_frequencies(lambda bench, _: unscaled_frequencies(bench, theta=number))


LLAMA, CHUNKED, IN_16_BITS = "llama-tiny", ("qwen3-tiny", torch.float32, "chunked"), ("qwen3-tiny", torch.bfloat16)
PLUS, MINUS = "rotary at a position off by one (+1)", "rotary at a position off by one (-1)"
KEPT = "the factors of the rope scaling are kept"
INTERLEAVED = "rotary over neighbouring pairs (interleaved) instead of half-split ones"
BEGUN_AGAIN = "positions begin at 0 again after {}: they are taken modulo {}"
LINEAR_FACTOR = "rope scaling: linear with factor {}, which config.json does not ask for"
MISTAKES = [
    rotary(INTERLEAVED, lambda bench: rotated(bench, is_interleaved=True), scope="every row but those at position 0"),
    rotary("rotary is not applied", lambda bench: bench.tap(SOURCE)),
    rotary("rotary turns backwards (sign of the sine)", at_positions(lambda _, at: -at)),
    rotary(PLUS, at_positions(lambda bench, at: at + is_decode(bench)), scope="decode rows"),
    rotary(MINUS, at_positions(lambda bench, at: at - 1 * is_decode(bench)), scope="decode rows"),
    rotary(PLUS, at_positions(lambda _, at: at + 1), scope="every row"),
    rotary(
        "positions restart at 0 in every step: the chunk's offset is forgotten",
        at_positions(without_chunk_offset), *CHUNKED, scope="rows of a prompt after its first chunk",
    ),
    rotary(
        "positions run on through the batch instead of restarting for each request",
        at_positions(through_the_batch), scope="...request 1...",
    ),
    rotary("rotary at the position of the row before it in the batch", at_positions(of_the_row_before)),
    rotary(
        "...each request has for itself: +3 in request 0, +29 in request 1",
        at_positions(lambda bench, at: at + torch.where(bench.rows().request == 0, 3, 29)),
    ),
    rotary("rotary at wrong positions", at_positions(lambda _, at: (at * 7 + 3) % 40), is_cause=False),
    rotary("positions stop at 20: rows after it are all rotated for it", at_positions(lambda _, at: at.clamp(max=20))),
    rotary(BEGUN_AGAIN.format(15, 16), at_positions(lambda _, at: at % 16)),
    rotary(BEGUN_AGAIN.format(29, 30), at_positions(lambda _, at: at % 30)),
    rotary(LINEAR_FACTOR.format("4"), at_positions(lambda _, at: at / 4), num_fitted=0),
    rotary(LINEAR_FACTOR.format("0.5"), at_positions(lambda _, at: at / 0.5), num_fitted=0),
    rotary(LINEAR_FACTOR.format("5.7"), at_positions(lambda _, at: at / 5.7), num_fitted=1),
    rotary("wrong rope theta: 10000 instead of 1e+06", theta(10_000.0)),
    rotary("wrong rope theta: 31000 instead of 1e+06", theta(31_000.0)),
    rotary(
        "wrong rope theta: 20000 instead of 10000", at_frequencies(with_base(20_000), WITHOUT_NORM), LLAMA, detail=KEPT
    ),
    rotary(
        "wrong rope theta: 31000 instead of 10000", at_frequencies(with_base(31_000), WITHOUT_NORM), LLAMA, detail=KEPT
    ),
    rotary(
        "rope scaling (llama3) is ignored",
        at_frequencies(lambda bench, _: unscaled_frequencies(bench), WITHOUT_NORM), LLAMA,
    ),
    rotary("rope scaling: factor is 32 instead of 8", at_frequencies(with_factor(32.0), WITHOUT_NORM), LLAMA),
    rotary(
        "partial rotary: the first 16 of 32 elements turn",
        at_frequencies(lambda bench, _: unscaled_frequencies(bench, share=0.5)),
    ),
    rotary(STILL, at_frequencies(still_from(3)), detail="pairs 3 to ...", num_fitted=1),
    rotary(STILL, at_frequencies(still_from(3)), *IN_16_BITS, detail="pairs 3 to ..."),
    rotary(ORDER, at_frequencies(lambda _, item: item.flip(0))),
    rotary(ORDER, at_frequencies(lambda _, item: item.roll(1))),
    rotary("cos/sin table in bfloat16", coarse(torch.bfloat16)),
    rotary("cos/sin table in float16", coarse(torch.float16)),
    rotary("cosine and sine of the rotary table are exchanged", with_tables(lambda x: (x.sin(), x.cos()))),
    rotary("the rotary table's sine is left out: only the cosine is applied", with_tables(lambda x: (x.cos(), 0 * x))),
    rotary("the rotary table's cosine is left out: only the sine is applied", with_tables(lambda x: (0 * x, x.sin()))),
]  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_named(bench_of, mistake):
    mistake.check(bench_of)


def test_the_rows_that_are_planted_are_the_engines_where_nothing_is_wrong(bench):
    sound = rotated(bench, frequencies=unscaled_frequencies(bench))
    assert torch.allclose(sound, bench.tap(RECORDED_TAP), atol=1e-5)
    wrong = bench.explain(RECORDED_TAP, rotated(bench, is_interleaved=True))
    assert wrong.residual_before > 1e6
    assert wrong.residual_after < 3
    assert wrong.num_explained == wrong.num_rows


def test_a_pair_of_its_own_frequency_is_none_of_the_others(bench):
    frequencies = right_frequencies(bench)
    frequencies[2] *= 1.5
    assert "pairs" not in bench.explain(RECORDED_TAP, rotated(bench, frequencies=frequencies)).cause
