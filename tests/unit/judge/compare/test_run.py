"""The whole comparison: what is sound passes, what is wrong is found where it was made, and only there."""

import math

import pytest
import torch

from harness.base.metrics import rounding_unit
from harness.errors import Code, HarnessError
from harness.judge.compare import systematic
from harness.judge.compare.run import _outcome, _own_logits_decide, _rows_not_judged, _ties
from harness.results.check import Coverage, Finding, LogitResult, Outcome, Verdict

from .conftest import LENGTHS, NUM_NEW
from .judgements import ROWS, errors_of, judgement, propagated_of, tap
from .recordings import Copy

SOUND = {Verdict.EXACT, Verdict.NOISE, Verdict.CONVENTION}
SITES = (
    "model.embed_tokens",
    "model.layers.1.input_layernorm",
    "model.layers.1.self_attn.q_proj",
    "model.layers.1.self_attn.k_norm",
    "model.layers.1.k_rope",
    "model.layers.1.self_attn.v_proj",
    "model.layers.1.attention",
    "model.layers.1.attn_residual",
    "model.layers.1.mlp.gate_proj",
    "model.layers.1.mlp.act",
    "model.norm",
    "lm_head",
)
ROW = (2, LENGTHS[2] + 1)
"""A decoded row of the last request."""


def wrong(result):
    return [tap.name for tap in result.taps if tap.verdict is Verdict.BUG]


def consumers(one, name):
    return {op.tap for op in one.hf.graph if name in op.inputs and op.kind != "cache"}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["llama-tiny", "qwen2-tiny", "qwen3-tiny"])
def test_hf_itself_is_sound(bench, tmp_path, name, dtype):
    one, schedule = bench(name, dtype), "chunked:3" if dtype == torch.float16 else "batched"
    wanted = [op.tap for op in one.hf.graph]
    result = one.compare(one.recorded(schedule).write(tmp_path / "r"), wanted=wanted)
    assert result.findings == ()
    assert result.outcome is Outcome.PASS
    assert result.first_divergence is None
    assert [tap.name for tap in result.taps] == wanted
    assert {tap.verdict for tap in result.taps} <= SOUND
    assert {tap.judged_by for tap in result.taps} == {"local", "cache"}
    for item in result.taps:
        everywhere = sum(LENGTHS) + len(LENGTHS) * (NUM_NEW - 1)
        assert item.num_rows == (len(LENGTHS) * NUM_NEW if item.name == "lm_head" else everywhere)


def test_the_truth_judged_by_replay_is_exact_to_float64(one):
    """No error model is asked: on the golden's own rows the replay differs by float64's rounding alone."""
    result = one.compare(one.golden.recording)
    assert max(tap.local_roundings_max for tap in result.taps) < 1e-5
    assert result.first_divergence is None


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", SITES)
def test_a_row_that_is_off_is_found_at_its_operation(one, actual, tmp_path, name):
    """The output is off and so are the consumers' inputs, but those still do what they are given to do wrongly."""
    row = actual.at(name, *ROW)
    row *= 1.01
    result = one.compare(actual.write(tmp_path / "r"))
    first = result.first_divergence
    assert (first.tap, first.request, first.position, first.code) == (name, *ROW, Code.LOCAL_ERROR)
    assert first.local_roundings > first.bound_roundings
    assert first.phase == "decode"
    assert tap(result, name).num_bad_rows == 1
    # What was recorded of the consumers was computed from the sound row.
    assert set(wrong(result)) - {name} <= consumers(one, name) | {name.replace("k_rope", "k_cache")} | {
        "model.layers.1.v_cache"
    }


def test_the_first_divergence_is_the_first_in_graph_order_then_in_row_order(one, actual, tmp_path):
    for name, row in (
        ("model.layers.2.mlp.act", (0, 0)),
        ("model.layers.0.mlp.up_proj", (2, 4)),
        ("model.layers.0.mlp.up_proj", (1, 6)),
        ("model.layers.0.mlp.up_proj", (1, 5)),
        ("model.layers.1.self_attn.q_proj", (0, 1)),
    ):
        actual.at(name, *row).mul_(2)
    first = one.compare(actual.write(tmp_path / "r")).first_divergence
    assert (first.tap, first.request, first.position) == ("model.layers.0.mlp.up_proj", 1, 5)


def test_a_check_that_stops_early_finds_the_same_first_divergence(one, actual, tmp_path):
    actual.at("model.layers.1.self_attn.q_proj", 1, 5).mul_(2)
    recording = actual.write(tmp_path / "r")
    whole, early = (one.compare(recording, stops_early=stops_early) for stops_early in (False, True))
    assert early.first_divergence == whole.first_divergence
    assert early.first_divergence.tap == "model.layers.1.self_attn.q_proj"
    order = [op.tap for op in one.hf.graph if op.kind != "cache"]
    last = max(order.index(item.name) for item in early.taps if item.judged_by == "local")
    assert order[last].startswith("model.layers.1.")
    assert {item.verdict for item in early.taps} <= {*SOUND, Verdict.BUG}


def test_what_is_wrong_ends_the_replay_that_has_no_control(one, actual, tmp_path):
    actual.at("model.layers.1.self_attn.q_proj", 1, 5).mul_(2)
    done = []
    result = one.compare(actual.write(tmp_path / "r"), progress=lambda _label, num_done, _num: done.append(num_done))
    num_alone = done.index(1, 1)
    assert done == [*range(1, num_alone + 1), *range(1, len(one.hf.parts) + 1)]
    assert num_alone < sum(not path.startswith(("model.layers.1", "model.layers.2")) for path in one.hf.parts)
    assert {item.name for item in result.taps if item.judged_by == "local"} >= {"model.layers.2.mlp.down_proj"}


def test_a_check_that_stops_early_judges_all_of_a_sound_run(one, tmp_path):
    result = one.compare(one.recorded().write(tmp_path / "r"), stops_early=True)
    assert len(result.taps) == len(one.hf.graph)


def test_independent_faults_are_all_found(one, actual, tmp_path):
    faults = {"model.layers.0.self_attn.o_proj": (0, 3), "model.layers.1.mlp.gate_proj": (1, 4), "lm_head": (2, 6)}
    for name, row in faults.items():
        actual.at(name, *row).mul_(1.5)
    result = one.compare(actual.write(tmp_path / "r"))
    measured = {(f.tap, f.request, f.position) for f in result.findings if f.code is Code.LOCAL_ERROR}
    assert {(name, *row) for name, row in faults.items()} <= measured
    downstream = set().union(*(consumers(one, name) for name in faults))
    assert set(wrong(result)) - set(faults) <= downstream


def poison(one, actual, name, row):
    """Put a NaN where an operation makes it, and let it run through all that is computed from it."""
    spoilt = {name: {row}}
    for operation in one.hf.graph:
        rows = set().union(*(spoilt.get(tap, set()) for tap in operation.inputs))
        if operation.kind == "attention":
            history = set().union(*(spoilt.get(tap, set()) for tap in operation.inputs[1:]))
            later = {(r, p) for step in actual.computing() for r, p in zip(step.request, step.position, strict=True)}
            rows |= {at for at in later for r, p in history if at[0] == r and at[1] >= p}
        if operation.tap != name and rows:
            spoilt[operation.tap] = rows
    copies = {name} | {op.tap for op in one.hf.graph if op.kind == "cache" and op.inputs == (name,)}
    for tap_name, rows in spoilt.items():
        for step in actual.steps:
            covered = step.rows_of.get(tap_name)
            for at in rows:
                place = step.row(*at)
                if tap_name in step.taps and place is not None and (covered is None or place in covered):
                    whole = step.taps[tap_name][place if covered is None else covered.index(place)]
                    (whole.view(-1)[3:4] if tap_name in copies else whole).fill_(math.nan)
    return spoilt


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "name",
    [
        "model.norm",
        "lm_head",
        "model.layers.2.mlp.act",
        "model.layers.1.mlp.act",
        "model.layers.1.attention",
        "model.layers.0.self_attn.q_proj",
        "model.layers.1.self_attn.v_proj",
        "model.layers.0.k_rope",
    ],
)
def test_a_nan_is_blamed_on_the_operation_that_made_it(one, tmp_path, name):
    """And on none of its consumers, which hand on what they are given."""
    actual, row = one.recorded(), (0, 4)
    if name in ("model.norm", "lm_head"):
        row = (0, LENGTHS[0])
    poison(one, actual, name, row)
    result = one.compare(actual.write(tmp_path / "r"))
    assert wrong(result) == [name]
    assert (result.first_divergence.tap, result.first_divergence.code) == (name, Code.NOT_FINITE)
    assert (result.first_divergence.request, result.first_divergence.position) == row
    assert [f.tap for f in result.findings if f.code is Code.NOT_FINITE] == [name]
    assert tap(result, name).num_nan == 1


def test_an_infinity_is_counted_and_found(one, actual, tmp_path):
    actual.at("model.layers.1.mlp.up_proj", *ROW)[7] = math.inf
    result = one.compare(actual.write(tmp_path / "r"))
    assert result.first_divergence.tap == "model.layers.1.mlp.up_proj"
    assert result.first_divergence.code is Code.NOT_FINITE
    assert tap(result, "model.layers.1.mlp.up_proj").num_inf == 1


def test_a_nan_where_only_propagation_can_judge(one, actual, tmp_path):
    actual.at("model.layers.1.mlp.up_proj", *ROW)[7] = math.nan
    result = one.measure(actual.write(tmp_path / "r"))
    assert wrong(result) == ["model.layers.1.mlp.up_proj"]
    assert result.first_divergence.code is Code.NOT_FINITE


def test_an_operation_whose_way_leads_back_to_the_tokens_is_judged_by_propagation(one, tmp_path):
    actual, first = one.recorded(), "model.layers.0.input_layernorm"
    actual.drop("model.embed_tokens")
    wanted = [op.tap for op in one.hf.graph if op.tap != "model.embed_tokens"]
    sound = one.compare(actual.write(tmp_path / "a"), wanted=wanted)
    assert sound.findings == ()
    assert tap(sound, first).judged_by == "propagated"
    actual.at(first, *ROW).mul_(1.01)
    result = one.compare(actual.write(tmp_path / "b"), wanted=wanted)
    assert result.first_divergence.tap == first
    assert result.first_divergence.code is Code.PROPAGATED_ERROR


def test_the_cache_of_an_engine_that_computes_wrong_keys_is_sound(one, actual, tmp_path):
    """What was written is what is read: the rotation is to blame, not the cache."""
    for name in ("k_rope", "k_cache"):
        actual.at(f"model.layers.1.{name}", *ROW).mul_(1.5)
    result = one.compare(actual.write(tmp_path / "r"))
    assert result.first_divergence.tap == "model.layers.1.k_rope"
    assert "model.layers.1.k_cache" not in wrong(result)


def test_tokens_are_those_of_the_request_not_what_the_engine_claims(one, actual, tmp_path):
    """An engine that embeds another token than it was fed."""
    actual.at("model.embed_tokens", *ROW).copy_(one.hf.model.model.embed_tokens.weight[9])
    result = one.compare(actual.write(tmp_path / "r"))
    assert result.first_divergence.tap == "model.embed_tokens"


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("model.layers.1.mlp.act", ROW),
        ("model.layers.0.attention", (0, LENGTHS[0])),
    ],
)
def test_the_worst_element_of_a_row(one, tmp_path, name, row):
    actual = one.recorded("batched")
    actual.at(name, *row).view(-1)[41] += 50
    worst = tap(one.compare(actual.write(tmp_path / "r")), name).worst
    assert (worst.request, worst.position) == row
    assert worst.index == 41


def flat(actual, names):
    for step in actual.steps:
        for name in names:
            if name in step.taps:
                step.taps[name] = step.taps[name].flatten(1)


@pytest.mark.parametrize(
    "sites",
    [
        ("self_attn.q_norm", "self_attn.k_norm"),
        ("k_cache", "v_cache"),
        ("q_rope",),
        ("k_rope",),
        ("attention",),
    ],
)
def test_heads_recorded_as_one_dimension_make_no_difference(one, actual, tmp_path, sites):
    """As docs/recording-format.md promises."""
    flat(actual, [f"model.layers.{layer}.{site}" for layer in range(3) for site in sites])
    result = one.compare(actual.write(tmp_path / "r"))
    assert result.findings == ()
    assert tap(result, "model.layers.0.attention").judged_by == "local"


def test_projections_recorded_as_heads_make_no_difference(one, tmp_path):
    actual, head_dim = one.recorded(), one.hf.head_dim
    for step in actual.computing():
        for name in [name for name in step.taps if name.endswith((".q_proj", ".v_proj", ".attention"))]:
            step.taps[name] = step.taps[name].flatten(1).unflatten(1, (-1, head_dim))
    assert one.compare(actual.write(tmp_path / "r")).findings == ()


@pytest.mark.parametrize("dtype", ["banana", "nn"])
def test_a_dtype_that_torch_does_not_know(one, actual, tmp_path, dtype):
    actual.dtype = dtype
    with pytest.raises(HarnessError):
        one.measure(actual.write(tmp_path / "r"))


@pytest.mark.parametrize("against_golden", [False, True])
def test_noise_under_the_name_of_a_coarser_dtype_is_no_pass(one, tmp_path, against_golden):
    copy = one.recorded()
    for step in copy.steps:
        for name, tensor in step.taps.items():
            step.taps[name] = tensor * (1 + 0.1 * torch.randn(tensor.shape, generator=torch.Generator().manual_seed(0)))
    copy.dtype = "float8_e4m3fn"
    noise = None if against_golden else {}
    actual, expected = copy.write(tmp_path / "a"), one.recorded().write(tmp_path / "e")
    with pytest.raises(HarnessError) as caught:
        one.measure(actual, expected=None if against_golden else expected, noise=noise)
    assert caught.value.code is Code.DIFFERENT_DTYPES
    assert (caught.value.expected, caught.value.actual) == ("float32", "float8_e4m3fn")
    assert str(tmp_path / "a") in str(caught.value)


def test_taps_that_no_graph_knows_are_measured_and_not_judged(one, tmp_path):
    extra = "model.layers.0.self_attn.gate"
    actual, expected = Copy.of(one.golden.recording), Copy.of(one.golden.recording)
    for copy, value in ((actual, 1.0), (expected, 2.0)):
        for step in copy.computing():
            step.taps[extra] = torch.full((len(step.request), 3), value)
    result = one.measure(actual.write(tmp_path / "a"), expected=expected.write(tmp_path / "e"), require=())
    assert tap(result, extra).verdict is Verdict.UNJUDGED
    assert tap(result, extra).max_abs == 1
    assert result.findings == ()


def test_other_names_of_taps_are_those_of_the_graph(one, tmp_path):
    """HF's own paths, and those that a recording of an engine with hooks on modules has."""
    actual, prefix = one.recorded(), "model.layers.1."
    names = {
        f"{prefix}q_rope": f"{prefix}self_attn.query",
        f"{prefix}attention": f"{prefix}self_attn.o_proj.input",
        f"{prefix}attn_residual": f"{prefix}post_attention_layernorm.input",
        f"{prefix}mlp.act": f"{prefix}mlp.down_proj.input",
        f"{prefix}output": "model.layers.1",
        "model.embed_tokens": "model.layers.0.input",
        "lm_head": "logits",
    }
    for step in actual.steps:
        step.taps = {names.get(name, name): tensor for name, tensor in step.taps.items()}
        step.rows_of = {names.get(name, name): rows for name, rows in step.rows_of.items()}
    actual.at(f"{prefix}mlp.down_proj.input", *ROW).mul_(1.5)
    result = one.compare(actual.write(tmp_path / "r"))
    assert {tap.name for tap in result.taps} == {op.tap for op in one.hf.graph}
    assert result.first_divergence.tap == f"{prefix}mlp.act"
    assert set(wrong(result)) == {f"{prefix}mlp.act", f"{prefix}mlp.down_proj"}
    assert not [finding for finding in result.findings if finding.code is Code.TAP_MISSING]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_two_engines_against_each_other(bench, tmp_path, dtype):
    """No golden and no replay: nothing but the distance, and the roundings that may add up on the way."""
    one = bench("qwen3-tiny", dtype)
    actual, expected = one.recorded("batched"), one.recorded("plain")
    result = one.measure(actual.write(tmp_path / "a"), expected=expected.write(tmp_path / "e"), noise={})
    assert result.outcome is Outcome.PASS
    assert {tap.judged_by for tap in result.taps} == {"propagated", "cache"}
    actual.at("model.layers.1.mlp.gate_proj", *ROW).mul_(1.3)
    result = one.measure(actual.write(tmp_path / "b"), expected=expected.write(tmp_path / "f"), noise={})
    assert result.first_divergence.tap == "model.layers.1.mlp.gate_proj"


def test_an_eager_engine_is_judged_under_its_convention(bench, tmp_path):
    """Scores rounded to bfloat16 are legitimate, and no wider bound for whoever does not round them."""
    one = bench("llama-tiny", torch.bfloat16)
    actual = one.recorded("batched", attention="eager")
    result = one.compare(actual.write(tmp_path / "a"))
    assert result.findings == ()
    actual.at("model.layers.1.attention", *ROW).mul_(1.1)
    result = one.compare(actual.write(tmp_path / "b"))
    assert tap(result, "model.layers.1.attention").verdict is Verdict.BUG
    assert tap(result, "model.layers.1.attention").num_rows == sum(LENGTHS) + len(LENGTHS) * (NUM_NEW - 1)
    assert tap(result, "model.layers.1.attention").num_bad_rows == 1


def test_the_first_divergence_is_the_earliest_whether_a_bug_or_systematic(bench, tmp_path, monkeypatch):
    """A later bug must not hide what is off in all rows before it."""
    monkeypatch.setattr(systematic, "MIN_ROWS", 20)  # the recordings of these tests hold 31 rows
    one = bench("qwen3-tiny", torch.bfloat16)
    actual = one.recorded()
    gain, tap_name = 1.2 * rounding_unit(torch.bfloat16), "model.layers.2.mlp.gate_proj"
    for step in actual.computing():
        x = step.taps["model.layers.2.post_attention_layernorm"].double()
        step.taps[tap_name] = (x @ one.hf.module(tap_name).weight.double().T * (1 + gain)).bfloat16()
        up = step.taps["model.layers.2.mlp.up_proj"]
        step.taps["model.layers.2.mlp.act"] = torch.nn.functional.silu(step.taps[tap_name]) * up
    actual.at("lm_head", *ROW).mul_(2)
    result = one.compare(actual.write(tmp_path / "a"))
    assert tap(result, tap_name).verdict is Verdict.SYSTEMATIC
    assert tap(result, "lm_head").verdict is Verdict.BUG
    first = result.first_divergence
    assert (first.tap, first.verdict, first.code) == (tap_name, Verdict.SYSTEMATIC, Code.SYSTEMATIC_ERROR)
    actual.at("model.layers.0.mlp.up_proj", *ROW).mul_(2)
    first = one.compare(actual.write(tmp_path / "b")).first_divergence
    assert (first.tap, first.verdict, first.code) == ("model.layers.0.mlp.up_proj", Verdict.BUG, Code.LOCAL_ERROR)


SOUND_ROWS, BAD_ROWS = (0.5, 1.0, 2.0, 0.1), (0.5, 9.0, 2.0, 0.1)


@pytest.mark.parametrize(
    ("judged", "follows"),
    [
        ([judgement(errors_of(SOUND_ROWS, convention="some"), tap="lm_head")], True),
        ([judgement(errors_of(SOUND_ROWS), tap="lm_head"), judgement(errors_of(SOUND_ROWS, convention="some"))], True),
        (
            [
                judgement(errors_of(SOUND_ROWS), tap="lm_head"),
                judgement(cache=errors_of(SOUND_ROWS, convention="some")),
            ],
            True,
        ),
        ([judgement(errors_of(SOUND_ROWS), tap="lm_head"), judgement(errors_of(SOUND_ROWS))], False),
        ([judgement(errors_of(SOUND_ROWS), tap="lm_head"), judgement(errors_of(BAD_ROWS, convention="some"))], False),
        ([judgement(errors_of(BAD_ROWS), tap="lm_head"), judgement(errors_of(SOUND_ROWS, convention="some"))], False),
        ([judgement(errors_of(SOUND_ROWS, convention="some"))], False),
        ([judgement(cache=errors_of(SOUND_ROWS, convention="some"), tap="lm_head")], False),
        ([judgement(errors_of(SOUND_ROWS), tap="lm_head"), judgement(propagated=propagated_of([1.0] * 4))], False),
        ([], False),
    ],
)
def test_a_sound_engine_that_follows_a_convention(judged, follows):
    assert _own_logits_decide(judged, "lm_head") == follows


@pytest.mark.parametrize("errors", [SOUND_ROWS, BAD_ROWS])
def test_other_experts_let_the_engine_s_logits_decide_if_all_is_sound(errors):
    judged = [judgement(errors_of(errors), tap="lm_head"), judgement(errors_of(SOUND_ROWS))]
    assert _own_logits_decide(judged, "lm_head", has_other_choices=True) == (errors is SOUND_ROWS)
    assert not _own_logits_decide(judged[1:], "lm_head", has_other_choices=True)


@pytest.mark.parametrize("is_by_golden", [True, False])
def test_rows_that_neither_replay_nor_the_golden_judges_are_counted(is_by_golden):
    partly = judgement(errors_of(SOUND_ROWS[:3], rows=ROWS[:3]), propagated=propagated_of([1.0] * 4))
    tap_name = partly.operation.tap
    counted = _rows_not_judged([partly], {tap_name} if is_by_golden else ())
    assert counted == ({} if is_by_golden else {tap_name: 1})


@pytest.mark.parametrize(("margin", "is_tie"), [(0.0, True), (1.0, True), (1.01, False), (0.7, True)])
def test_near_ties_are_within_two_errors_of_hfs_own(margin, is_tie):
    logits = LogitResult(num_rows=1, top1_agreement=1.0, kl_max=0.0, margin_min=margin)
    assert _ties(logits, torch.tensor([0.1, 0.5, 0.2])) == (("near_tie",) if is_tie else ())
    assert _ties(logits, None) == _ties(logits, torch.zeros(0)) == _ties(None, torch.ones(1)) == ()


@pytest.mark.parametrize(
    ("judged", "num_tokens", "outcome"),
    [
        ([judgement(errors_of(SOUND_ROWS))], 0, Outcome.PASS),
        ([judgement(errors_of(SOUND_ROWS), is_in_graph=False)], 0, Outcome.NOTHING),
        ([judgement(errors_of((), rows=()))], 0, Outcome.NOTHING),
        ([judgement(errors_of((), rows=())), judgement(errors_of(SOUND_ROWS))], 0, Outcome.PASS),
        ([], 0, Outcome.NOTHING),
        ([], 1, Outcome.PASS),
    ],
)
def test_what_passes(judged, num_tokens, outcome):
    assert _outcome(judged, Coverage(), num_tokens, [], 0.5) is outcome
    assert _outcome(judged, Coverage(), num_tokens, [Finding(code=Code.NO_DECODE, message="")], 0.5) is Outcome.MISMATCH
