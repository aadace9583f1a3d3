"""Mistakes of a rotation, made by turning pairs one by one in plain numbers: the trial names each.

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
from harness.judge.explain.rotary import frequencies as of_frequencies
from harness.judge.explain.rotary import positions as of_positions
from harness.judge.explain.rotary import rotation

from ..toys import ToyModel, by_cause, failure_of, named, random

TAP = "model.layers.1.q_rope"
OPERATION = Operation(tap=TAP, kind=Kind.ROTARY, inputs=("x",), source=TAP)
R, N, H, THETA = 11, 2, 16, 10_000.0
X = random(R, N * H, seed=1)
PLAIN = {"rope_type": "default", "rope_theta": THETA}
LINEAR = {"rope_type": "linear", "rope_theta": THETA, "factor": 4.0}
LLAMA3 = {"rope_type": "llama3", "rope_theta": THETA, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": THETA, "factor": 4.0, "original_max_position_embeddings": 64}
UNROUNDED = {**YARN, "truncate": False}


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


FAR = range(10, 10 + 20 * R, 20)
"""Positions at which the slow pairs turn by enough to be seen."""
BOUND = 200.0
"""Roundings to float32 that angles in float32 make of the rows."""
FACTORS, THETAS = (0.5, 2, 3, 4, 8, 16, 32, 40, 64), (1e5, 2.5e5, 5e5, 1e6, 5e6, 1e7)
STILL, ORDER = (
    "some pairs of a head do not turn: their frequencies are zero",
    "the frequencies of the pairs are in another order",
)
FOREIGN = "rope scaling: {} with factor {:g}, which config.json does not ask for"


def low(value, dtype):
    return float(torch.tensor(value, dtype=torch.float64).to(dtype))


def coarse(name, **parts):
    """Return rows whose table is rounded to a dtype; `parts` are other than the tables."""
    dtype = getattr(torch, name)
    right = [single(frequency) for frequency in frequencies()]
    table = {"cos": lambda angle: low(math.cos(angle), dtype), "sin": lambda angle: low(math.sin(angle), dtype)}

    def exact(at, position):
        return single(position * right[at])

    def rounded(at, position):
        return float(torch.tensor(position).to(dtype) * torch.tensor(right[at]).to(dtype))

    return {
        f"cos/sin table in {name}": lambda at: turned(exact, at, **table),
        f"rotary frequencies in {name}": lambda at: by([low(item, dtype) for item in right], at),
        f"cos/sin table in {name}, its angles too": lambda at: turned(rounded, at, **table),
        f"rotary angles in {name}": lambda at: turned(rounded, at),
    }


def still(pairs, turns=None):
    return [0.0 if at in pairs else item for at, item in enumerate(turns or frequencies())]


def of_base(theta):
    """Return the frequencies of Llama 3's scaling for another base, with the factors of the right one."""
    return [s / p * o for s, p, o in zip(scaled(LLAMA3)[0], frequencies(), frequencies(theta), strict=True)]


def foreign_yarn(factor):
    return {"rope_type": "yarn", "rope_theta": THETA, "factor": float(factor), "original_max_position_embeddings": 256}


TURNED = [  # what yields it, the cause, how the rows are turned
    (rotation.other_pairs, "rotary over neighbouring pairs (interleaved) instead of half-split ones",
     {"is_interleaved": True}),
    (rotation.backwards, "rotary turns backwards (sign of the sine)", {"sin": lambda angle: -math.sin(angle)}),
]  # fmt: skip
IGNORED, SCALING = of_frequencies.scaling_ignored, of_frequencies.other_scaling
SCALED = [  # what yields it, the cause, the model's parameters, those that are used, how the rows are turned besides
    (IGNORED, "rope scaling (llama3) is ignored", LLAMA3, PLAIN, {}),
    (IGNORED, "rope scaling (linear) is ignored", LINEAR, PLAIN, {}),
    (IGNORED, "rope scaling (yarn) is ignored but for its factor of cos and sin", YARN, PLAIN,
     {"scaling": scaled(YARN)[1]}),
    (SCALING, "rope scaling: the ends of yarn's ramp are not rounded to whole dimensions", YARN, UNROUNDED, {}),
    (SCALING, "rope scaling: the ends of yarn's ramp are rounded to whole dimensions", UNROUNDED, YARN, {}),
    (SCALING, "rope scaling: factor is 32 instead of 8", LLAMA3, {**LLAMA3, "factor": 32.0}, {}),
    *((SCALING, FOREIGN.format("yarn", factor), PLAIN, foreign_yarn(factor), {}) for factor in FACTORS),
]  # fmt: skip
BASE, PARTIAL = of_frequencies.wrong_theta, of_frequencies.partial_rotary


def slower(factor):
    return [item / factor for item in frequencies()]


FREQUENCIES = [  # what yields it, the cause, the frequencies that are used, numbers that are fitted
    *((SCALING, FOREIGN.format("linear", factor), slower(factor), 0) for factor in FACTORS),
    *((SCALING, FOREIGN.format("linear", factor), slower(factor), 1) for factor in (1.5, 6.0, 0.1)),
    *((BASE, f"wrong rope theta: {theta:g} instead of 10000", frequencies(theta), 0) for theta in THETAS),
    *((BASE, f"wrong rope theta: {x:g} instead of 10000", frequencies(x), 1) for x in (130.0, 3400.0, 7.3e7)),
    *((PARTIAL, f"partial rotary: the first {dim} of 16 elements turn", frequencies(dim=dim), 0) for dim in (4, 8, 12)),
    *((rotation.stretched, f"rotary frequencies are off by a factor of {x:.7g}", slower(1 / x), 1)
      for x in (1.004, 0.991, 1.0001)),
    (rotation.frequencies_of_other_pairs, STILL, still([0, 1]), 1),
    (rotation.frequencies_of_other_pairs, ORDER, [frequencies()[at] for at in (2, 0, 1, 3, 4, 5, 6, 7)], 3),
]  # fmt: skip
MISTAKES = {  # by cause: what yields it, the model's parameters, the rows at positions, numbers that are fitted
    "rotary is not applied": (rotation.not_rotated, PLAIN, lambda at: X, 0),
    **{cause: (explain, PLAIN, lambda at, x=parts: by(frequencies(), at, **x), 0) for explain, cause, parts in TURNED},
    **{
        cause: (rotation.coarse_table, PLAIN, rows, 0)
        for name in ("bfloat16", "float16")
        for cause, rows in coarse(name).items()
    },
    **{
        cause: (explain, right, lambda at, used=used, parts=parts: by(used, at, **parts), 0)
        for explain, cause, right, used, parts in SCALED
    },
    **{
        cause: (explain, PLAIN, lambda at, used=used: by(used, at), num_fitted)
        for explain, cause, used, num_fitted in FREQUENCIES
    },
}


def mistaken(cause):
    explain, parameters, turn, num_fitted = MISTAKES[cause]
    return explain, of(turn(FAR), parameters, positions=FAR, bound=BOUND), num_fitted


@pytest.mark.parametrize("cause", MISTAKES)
def test_a_mistake_is_yielded(cause):
    explain, failure, num_fitted = mistaken(cause)
    hypotheses = [item for item in explain(failure) if item.cause == cause]
    errors = [float((item.output - failure.actual).norm(dim=1).max()) for item in hypotheses]
    assert min(errors) < 1e-4
    assert {item.num_fitted for item in hypotheses} == {num_fitted}


@pytest.mark.parametrize("cause", MISTAKES)
def test_a_mistake_is_named(cause):
    _, failure, num_fitted = mistaken(cause)
    explanation = named(failure)
    assert cause in explanation.cause
    assert (explanation.num_fitted, explanation.is_cause) == (num_fitted, True)
    assert explanation.num_explained == explanation.num_rows


def test_the_models_own():
    failure = of()
    assert not failure.rotation.is_interleaved
    torch.testing.assert_close(failure.rotation.turn(X, failure.positions), failure.expected)


def test_half_split_pairs_in_place_of_interleaved_ones_and_rows_that_are_only_scaled():
    interleaved = by(frequencies(), is_interleaved=True)
    failure = type(of())(**{**vars(of()), "expected": interleaved})
    cause = "rotary over half-split pairs instead of neighbouring pairs (interleaved)"
    check(rotation.other_pairs, failure, {cause: (by(frequencies()), 0)})
    factors = torch.linspace(1, 2, R, dtype=torch.float64)[:, None]
    scaled_rows = type(of())(**{**vars(of()), "expected": X * factors})
    cause = "the rows' factors, which grow with the position, are not applied"
    check(rotation.not_rotated, scaled_rows, {cause: (X, 0)})


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
    modules = (of_frequencies.__name__, rotation.__name__)
    of_rotation = [explain for explain in causes_of(Kind.ROTARY) if explain.__module__ in modules]
    assert len(of_rotation) == 11
    strange = type(failure)(**{**vars(failure), "expected": failure.expected + 1})
    for explain in (*of_rotation, of_positions.other_positions):
        assert set(by_cause(explain, strange)) <= {"rotary is not applied"}


# Scalings and bases.


def test_what_is_right_or_has_another_name_is_not_said():
    assert by_cause(of_frequencies.scaling_ignored, of()) == {}
    assert len(by_cause(of_frequencies.scaling_ignored, of(parameters=LINEAR))) == 1
    names = {FOREIGN.format(name, factor) for name in ("linear", "yarn") for factor in FACTORS}
    assert set(by_cause(of_frequencies.other_scaling, of())) == names
    of_two = by([frequency / 2 for frequency in frequencies()])
    assert set(by_cause(of_frequencies.other_scaling, of(of_two))) == names, "2 is a usual factor"
    kept = by(frequencies(), scaling=scaled(YARN)[1])
    for hypothesis in of_frequencies.other_scaling(of(kept, YARN)):  # a parameter without effect would give the same
        assert not torch.allclose(hypothesis.output, kept, rtol=1e-6, atol=0), hypothesis.cause
    usual = {cause: item for cause, item in by_cause(of_frequencies.wrong_theta, of()).items() if not item.num_fitted}
    assert set(usual) == {f"wrong rope theta: {theta:g} instead of 10000" for theta in THETAS}
    assert not any(item.is_vague for item in usual.values())


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
        hypotheses = list(of_frequencies.other_scaling(of(actual, parameters)))
        assert [h.cause for h in hypotheses if torch.allclose(h.output, actual, atol=1e-6)] == [cause]


def test_values_of_the_scaling_that_are_others():
    values = {
        "factor": (1.0, *FACTORS), "low_freq_factor": (1, 2, 4, 8), "high_freq_factor": (1, 2, 4, 8, 16),
        "original_max_position_embeddings": (2048, 4096, 8192, 16384, 32768, 65536, 131072),
    }  # fmt: skip
    plain = by(PLAIN)
    hypotheses = by_cause(of_frequencies.other_scaling, of(parameters=LLAMA3))
    seen = 0
    for name, value in ((name, value) for name, usual in values.items() for value in usual):
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


@pytest.mark.parametrize(
    ("parameters", "pair"),
    [
        (LLAMA3, ("low_freq_factor", "high_freq_factor")),
        ({**YARN, "beta_fast": 32.0, "beta_slow": 1.0}, ("beta_fast", "beta_slow")),
    ],
)
def test_values_of_the_scaling_that_are_exchanged(parameters, pair):
    first, second = pair
    output = by({**parameters, first: parameters[second], second: parameters[first]})
    hypotheses = by_cause(of_frequencies.other_scaling, of(parameters=parameters))
    torch.testing.assert_close(hypotheses[f"rope scaling: {first} and {second} are exchanged"].output, output)


def test_linear_is_not_tried_in_its_own_place():
    hypotheses = by_cause(of_frequencies.other_scaling, of(parameters=LINEAR))
    assert "rope scaling: factor is 8 instead of 4" in hypotheses
    assert not any("linear with factor 8" in cause for cause in hypotheses)
    assert any("yarn with factor 8, instead of linear" in cause for cause in hypotheses)
    assert "rope scaling: factor is 1 instead of 4" not in hypotheses, "no scaling at all has a name of its own"


def test_a_config_without_parameters_says_nothing_of_them():
    bare = copy.deepcopy(of().hf.config)
    bare.rope_parameters = {"full_attention": PLAIN}
    for explain in (of_frequencies.scaling_ignored, of_frequencies.other_scaling, of_frequencies.wrong_theta):
        assert by_cause(explain, of(model_config=bare)) == {}


@pytest.mark.parametrize("theta", [130.0, 3456.0, 7.3e7])
def test_a_base_is_fitted_to_two_digits_and_to_six(theta):
    positions = range(40, 40 + R)
    actual = by(frequencies(theta), positions)
    fitted = [item for item in of_frequencies.wrong_theta(of(actual, positions=positions)) if item.num_fitted]
    rough, fine = (float(item.cause.split()[3]) for item in (fitted[0], fitted[-1]))
    assert rough == float(f"{theta:.2g}")
    assert math.isclose(fine, theta, rel_tol=2e-3)
    assert [item.is_vague for item in fitted] == [False, True][-len(fitted) :]
    torch.testing.assert_close(fitted[-1].output, actual, rtol=2e-3, atol=2e-3)


def test_the_factors_of_a_scaling_may_be_kept():
    hypotheses = [h for h in of_frequencies.wrong_theta(of(parameters=LLAMA3)) if not h.num_fitted]
    anew = {h.cause: h.output for h in hypotheses if not h.detail}
    kept = {h.cause: h.output for h in hypotheses if h.detail == "the factors of the rope scaling are kept"}
    for theta in THETAS:
        cause = f"wrong rope theta: {theta:g} instead of 10000"
        torch.testing.assert_close(kept[cause], by(of_base(theta)), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(anew[cause], by({**LLAMA3, "rope_theta": theta}), rtol=1e-5, atol=1e-6)
    assert not any(h.detail for h in of_frequencies.wrong_theta(of()))
    explanation = named(of(by(of_base(31_000.0), FAR), LLAMA3, positions=FAR, bound=BOUND))
    assert explanation.cause == "wrong rope theta: 31000 instead of 10000"
    assert explanation.detail.startswith("the factors of the rope scaling are kept")


# Angles, elements and pairs.


def test_angles_that_are_right_or_far_too_large_are_not_stretched():
    assert by_cause(rotation.stretched, of(by([1.02 * frequency for frequency in frequencies()]))) == {}
    assert by_cause(rotation.stretched, of(positions=[0] * R)) == {}


def test_some_elements_turn_by_the_first_frequencies_of_the_whole_head_or_by_their_own():
    hypotheses = list(of_frequencies.partial_rotary(of()))
    assert len(hypotheses) == 6  # not all of them, who turn as they should
    cut = [item.output for item in hypotheses if "the first 8 of" in item.cause][1]
    torch.testing.assert_close(cut, by(frequencies()[:4]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("pairs", "detail", "num_fitted"),
    [
        ([0], "pairs 0 of 8", 1), ([2], "pairs 2 of 8", 2), ([1, 2], "pairs 1 to 2 of 8", 2),
        ([0, 2, 3], "pairs 0, 2 to 3 of 8", 3), ([6, 7], "pairs 6 to 7 of 8", 1),
    ],
)  # fmt: skip
def test_pairs_that_do_not_turn(pairs, detail, num_fitted):
    positions = range(3000, 3000 + 40 * R, 40)
    hypotheses = by_cause(rotation.frequencies_of_other_pairs, of(by(still(pairs), positions), positions=positions))
    assert set(hypotheses) == {STILL}
    assert (hypotheses[STILL].detail, hypotheses[STILL].num_fitted) == (detail, num_fitted)


@pytest.mark.parametrize("order", [[1, 0, 2, 3, 4, 5, 6, 7], [0, 2, 1, 3, 4, 5, 6, 7]])
def test_frequencies_in_another_order(order):
    failure = of(by([frequencies()[at] for at in order], FAR), positions=FAR)
    moved = [at for at, to in enumerate(order) if at != to]
    (hypothesis,) = by_cause(rotation.frequencies_of_other_pairs, failure).values()
    assert (hypothesis.cause, hypothesis.detail) == (ORDER, f"pairs {moved[0]} to {moved[-1]} of 8")
    assert hypothesis.num_fitted == len(moved)


@pytest.mark.parametrize("pair", [2, 5])
def test_tables_with_a_factor_turn_pairs_as_well(pair):
    """YaRN's cosine and sine are multiplied by a number besides."""
    right, scaling = scaled(YARN)
    failure = of(by(still([pair], right), FAR, scaling=scaling), YARN, positions=FAR)
    (hypothesis,) = by_cause(rotation.frequencies_of_other_pairs, failure).values()
    assert (hypothesis.cause, hypothesis.detail, hypothesis.num_fitted) == (STILL, f"pairs {pair} of 8", 2)
    torch.testing.assert_close(hypothesis.output, failure.actual, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "turns", [frequencies(), [0.0] * 8, [item * (1 + 0.5 * (at == 2)) for at, item in enumerate(frequencies())]]
)
def test_pairs_that_turn_as_they_should_none_that_turns_or_a_frequency_of_its_own(turns):
    assert by_cause(rotation.frequencies_of_other_pairs, of(by(turns, FAR), positions=FAR)) == {}
