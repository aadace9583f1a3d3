import pytest
import torch

from harness.base.metrics import rounding_unit
from harness.errors import Code
from harness.formats.taps import Kind
from harness.judge.compare import systematic
from harness.judge.compare.systematic import MIN_ROWS, Effects, beyond_control
from harness.results.check import Outcome, Verdict

HEAD_DIM = 32


def effects(actual, expected, *, kind=Kind.LINEAR, dtype=torch.bfloat16, positions=None):
    sums = Effects(kind, dtype, num_heads=expected.shape[1] // HEAD_DIM)
    positions = torch.arange(len(expected)) if positions is None else positions
    for chunk in range(0, len(expected), 100):  # as the comparison hands them over
        here = slice(chunk, chunk + 100)
        finite = actual[here].isfinite().all(dim=1)
        sums.add(positions[here], actual[here], expected[here], finite)
    return sums


def rows(num_rows=400, width=128, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, width, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("seed", range(5))
def test_rounding_has_no_effect(dtype, seed):
    truth = rows(seed=seed)
    assert effects(truth.to(dtype), truth, dtype=dtype).strongest() is None
    assert effects(truth.to(dtype), truth, dtype=dtype, kind=Kind.ATTENTION).strongest() is None


def test_a_gain_of_a_quarter_of_a_rounding():
    truth = rows()
    gain = rounding_unit(torch.bfloat16) / 4
    effect = effects((truth * (1 + gain)).bfloat16(), truth).strongest()
    assert effect.kind == "gain"
    assert effect.low < gain < effect.high
    assert effect.roundings == pytest.approx(0.25, abs=0.05)
    assert 398 <= effect.num_rows <= 400, "rows are told apart by six digits of their norm"


def test_the_head_that_has_a_gain():
    truth = rows()
    wrong = truth.clone()
    wrong[:, HEAD_DIM : 2 * HEAD_DIM] *= 1 + 2 * rounding_unit(torch.bfloat16)
    effect = effects(wrong.bfloat16(), truth, kind=Kind.ROTARY).strongest()
    assert (effect.kind, effect.which) == ("gain of head", "1")


def test_a_gain_that_grows_with_the_position():
    truth = rows()
    growth = torch.linspace(-1, 1, len(truth), dtype=torch.float64)[:, None] * rounding_unit(torch.bfloat16)
    effect = effects((truth * (1 + growth)).bfloat16(), truth).strongest()
    assert effect.kind == "trend"
    assert effect.size == pytest.approx(2 * rounding_unit(torch.bfloat16), rel=0.2)


def test_an_offset_of_one_channel():
    truth = rows(width=512)
    wrong = truth.clone()
    wrong[:, 77] += 8 * rounding_unit(torch.bfloat16)
    effect = effects(wrong.bfloat16(), truth).strongest()
    assert (effect.kind, effect.which) == ("offset", "77")
    assert effect.roundings == pytest.approx(8, rel=0.1)
    assert effect.low < effect.size < effect.high


def test_a_channel_that_never_varies_is_rounded_the_same_way_in_every_row():
    truth = rows()
    truth[:, 3] = 37.2  # a massive activation: its rounding is a gain of the whole row
    assert effects(truth.bfloat16(), truth).strongest() is None


@pytest.mark.parametrize("place", [(slice(None), 3), (5, slice(None))], ids=["channel", "row"])
def test_what_one_channel_or_one_row_does_is_no_gain_of_all(place):
    """Rows and channels both are samples: what one of them adds to the sum is not seen in the others."""
    truth = rows()
    wrong = truth.clone()
    wrong[place] *= 1.5
    (gain,) = [effect for effect in effects(wrong, truth).all() if effect.kind == "gain"]
    assert gain.size > 0
    assert gain.statistic < 2


def test_rows_of_the_same_content_count_once():
    truth = rows(num_rows=MIN_ROWS - 1)
    many = truth.repeat(50, 1)
    assert effects((many * 1.01).bfloat16(), many).all() == []


def test_a_rotation_counts_once_for_each_position():
    truth = rows()
    positions = torch.arange(len(truth)) % (MIN_ROWS - 1)
    assert effects((truth * 1.01).bfloat16(), truth, kind=Kind.ROTARY, positions=positions).all() == []


def test_rows_that_are_not_finite_are_left_out():
    truth = rows()
    actual = truth.bfloat16()
    actual[::7] = torch.nan
    measured = effects(actual, truth)
    assert measured.strongest() is None
    num_finite = 400 - len(range(0, 400, 7))
    assert num_finite - 2 <= measured.all()[0].num_rows <= num_finite


# What HF's own module does on the same rows is no alarm.

UNIT = rounding_unit(torch.bfloat16)


def with_gain(truth, roundings):
    return effects((truth * (1 + roundings * UNIT)).bfloat16(), truth)


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("control_gain", [1.0, -1.0])
def test_an_effect_between_none_and_the_controls_is_no_alarm(control_gain, share):
    truth = rows()
    actual, control = with_gain(truth, share * control_gain), with_gain(truth, control_gain)
    assert control.strongest() is not None
    assert beyond_control(actual, control) is None


@pytest.mark.parametrize("gain", [3.0, -1.0])
def test_an_effect_outside_of_truth_and_control_is_one(gain):
    """Twice as much as HF's, or the other way."""
    truth = rows()
    effect = beyond_control(with_gain(truth, gain), with_gain(truth, 1.0))
    assert effect.kind == "gain"
    assert effect.roundings == pytest.approx(gain, abs=0.1), "said as it is, not as what is left of it"


def test_a_little_more_than_the_control_is_not_enough():
    """What is left must be as large as any effect that alarms."""
    truth = rows()
    assert beyond_control(with_gain(truth, 1.02), with_gain(truth, 1.0)) is None


def test_an_effect_whose_control_is_sound_is_one():
    truth = rows()
    assert beyond_control(with_gain(truth, 1.0), with_gain(truth, 0.0)).kind == "gain"


@pytest.mark.parametrize("control", [None, Effects(Kind.LINEAR, torch.bfloat16)])
def test_an_effect_without_a_control_is_one(control):
    assert beyond_control(with_gain(rows(), 1.0), control).kind == "gain"


def test_nothing_is_beyond_where_nothing_was_measured():
    assert beyond_control(None, None) is None
    assert beyond_control(Effects(Kind.LINEAR, torch.bfloat16), None) is None


def test_an_offset_is_compared_with_that_of_the_same_channel():
    truth = rows(width=512)

    def offset(*channels):
        wrong = truth.clone()
        for channel in channels:
            wrong[:, channel] += 8 * UNIT
        return effects(wrong.bfloat16(), truth)

    assert beyond_control(offset(77), offset(77)) is None
    effect = beyond_control(offset(77), offset(78))
    assert (effect.kind, effect.which) == ("offset", "77")


def test_a_gain_of_a_head_is_compared_with_that_of_the_same_head():
    truth = rows()

    def gain(head):
        wrong = truth.clone()
        wrong[:, HEAD_DIM * head : HEAD_DIM * (head + 1)] *= 1 + 2 * UNIT
        return effects(wrong.bfloat16(), truth, kind=Kind.ROTARY)

    assert beyond_control(gain(1), gain(1)) is None
    assert beyond_control(gain(1), gain(2)).which == "1"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_value_that_was_computed_anew_is_in_every_row_that_reads_it(dtype):
    """Attention over a value with another rounding than the one that was recorded, in a channel of small numbers."""
    unit, truth = rounding_unit(dtype), rows(num_rows=60, width=128).double()
    truth[:, 7] *= 0.15
    recorded = truth.clone()
    recorded[:, 7] += (9 if dtype is torch.float32 else 2) * unit
    actual = effects(recorded.to(dtype), truth, kind=Kind.ATTENTION, dtype=dtype)
    assert actual.strongest() is None
    recorded[:, 7] += 100 * unit
    actual = effects(recorded.to(dtype), truth, kind=Kind.ATTENTION, dtype=dtype)
    assert (actual.strongest().kind, actual.strongest().which) == ("offset", "7")


def test_silu_on_a_grid_has_a_gain_and_is_right():
    """silu of a small bfloat16 number is half of it, exactly, and a square that is lost: every time the same way."""
    gate = (rows(width=256).abs() * 2e-3).bfloat16()
    up = rows(width=256, seed=1).bfloat16()
    truth = torch.nn.functional.silu(gate.double()) * up.double()
    hf = effects(torch.nn.functional.silu(gate) * up, truth, kind=Kind.ACTIVATION)
    fused = effects(truth.bfloat16(), truth, kind=Kind.ACTIVATION)
    assert hf.strongest().kind == "gain", "held against nothing but the truth it would alarm"
    assert beyond_control(hf, hf) is None
    assert beyond_control(fused, hf) is None


@pytest.mark.sampled(1)
@pytest.mark.parametrize("num_batches", [1, 3])
def test_what_hf_does_too_is_no_alarm_in_a_recording(bench, tmp_path, monkeypatch, num_batches):
    monkeypatch.setattr(systematic, "MIN_ROWS", 20)
    if num_batches > 1:  # channels are scaled by what the first batch holds, a third of the rows here
        monkeypatch.setattr(systematic, "THRESHOLD", 3.5)
        monkeypatch.setattr("harness.judge.compare.local.batch_tokens", lambda _hf: 1)
    one, prefix = bench("qwen3-tiny", torch.bfloat16), "model.layers.1.mlp."
    copy = one.recorded()
    for step in copy.computing():
        gate = step.taps[f"{prefix}gate_proj"] = step.taps[f"{prefix}gate_proj"].abs() * 2**-9
        step.taps[f"{prefix}act"] = torch.nn.functional.silu(gate) * step.taps[f"{prefix}up_proj"]
        x = step.taps[f"{prefix}act"].double() @ one.hf.module(f"{prefix}down_proj").weight.double().T
        step.taps[f"{prefix}down_proj"] = x.detach().bfloat16()
    recording = copy.write(tmp_path / "r")
    verdict = {tap.name: tap.verdict for tap in one.compare(recording).taps}
    assert verdict[f"{prefix}act"] in (Verdict.NOISE, Verdict.EXACT)
    assert verdict[f"{prefix}gate_proj"] is Verdict.BUG
    monkeypatch.setattr(
        "harness.judge.compare.local.beyond_control", lambda effects, _control, allowance=0.0: effects.strongest()
    )
    verdict = {tap.name: tap.verdict for tap in one.compare(recording).taps}
    assert verdict[f"{prefix}act"] is Verdict.SYSTEMATIC, "and would be one but for its control"


def test_a_gain_in_a_recording_is_a_mismatch_that_no_row_shows(bench, tmp_path, monkeypatch):
    """A tap of the last layer is scaled, and what reads it is computed from the scaled one."""
    monkeypatch.setattr(systematic, "MIN_ROWS", 20)  # the recordings of these tests hold 31 rows
    bench, head = bench("qwen3-tiny", torch.bfloat16), "model.layers.2."
    sound = bench.compare(bench.recorded().write(tmp_path / "sound"))
    assert (sound.outcome, sound.first_divergence) == (Outcome.PASS, None)

    copy, tap, gain = bench.recorded(), f"{head}mlp.gate_proj", 1.2 * rounding_unit(torch.bfloat16)
    for step in copy.computing():
        x = step.taps[f"{head}post_attention_layernorm"].double()
        step.taps[tap] = (x @ bench.hf.module(tap).weight.double().T * (1 + gain)).bfloat16()
        gate, up = step.taps[tap], step.taps[f"{head}mlp.up_proj"]
        step.taps[f"{head}mlp.act"] = torch.nn.functional.silu(gate) * up
    run = bench.compare(copy.write(tmp_path / "gain"))
    actual = next(item for item in run.taps if item.name == tap)
    assert (actual.verdict, actual.num_bad_rows) == (Verdict.SYSTEMATIC, 0)
    assert actual.effect.low < gain < actual.effect.high
    finding = next(item for item in run.findings if item.tap == tap)
    assert finding.code is Code.SYSTEMATIC_ERROR
    assert f"{tap} has a gain of +0.00" in finding.message
    assert run.outcome is Outcome.MISMATCH


def truncated_attention(q, k, v):
    """Attention in float32 whose sums lose what does not fit into 24 bits, as a GPU's matrix units do.

    As in kernels, eight terms are a step, and the sums of 64 keys are added with rounding.
    """

    def towards_zero(x):
        nearest = x.to(torch.float32)
        return torch.where(nearest.double().abs() > x.abs(), nearest.nextafter(torch.zeros(())), nearest).double()

    def product(a, b):
        total = torch.zeros(len(a), b.shape[1], dtype=torch.float64)
        for tile in range(0, a.shape[1], 64):
            partial = torch.zeros_like(total)
            for at in range(tile, min(tile + 64, a.shape[1]), 8):
                partial = towards_zero(partial + a[:, at : at + 8] @ b[at : at + 8])
            total = (total + partial).float().double()
        return total

    scores = product(q, k.T) * q.shape[1] ** -0.5
    weights = (scores - scores.amax(dim=1, keepdim=True)).exp().float().double()
    return product(weights, v) / weights.sum(dim=1, keepdim=True)


@pytest.mark.parametrize("num_keys", [128, 512])
def test_only_a_gpu_may_truncate_its_sums(num_keys):
    q, k, v = (rows(num_rows, 64, seed).float().double() for num_rows, seed in ((300, 1), (num_keys, 2), (num_keys, 3)))
    truth = (q @ k.T * 64**-0.5).softmax(dim=1) @ v
    actual, everything = truncated_attention(q, k, v).float(), torch.ones(300, dtype=torch.bool)
    on_cpu, on_gpu = (
        Effects(Kind.ATTENTION, torch.float32, num_heads=2, may_truncate=may_truncate) for may_truncate in (False, True)
    )
    for effects_ in (on_cpu, on_gpu):
        effects_.add(torch.arange(300), actual, truth, everything)
    assert on_cpu.strongest().kind == "gain"
    assert on_cpu.strongest().size < 0
    assert 2 < -on_cpu.strongest().roundings < 40, "the H200's has 1 to 22"
    assert on_gpu.strongest() is None
    on_gpu = Effects(Kind.ATTENTION, torch.float32, num_heads=2, may_truncate=True)
    on_gpu.add(torch.arange(300), actual * (1 - 5e-6), truth, everything)
    assert on_gpu.strongest().kind == "gain", "what is lost in earnest is found on a GPU, too"
