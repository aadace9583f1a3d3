import pytest
import torch

from harness.compare import systematic
from harness.compare.systematic import MIN_ROWS, Effects
from harness.errors import Code
from harness.metrics import rounding_unit
from harness.results import Outcome, Verdict
from harness.taps import Kind

HEAD_DIM = 32


def effects(actual, expected, *, kind=Kind.LINEAR, dtype=torch.bfloat16, positions=None):
    found = Effects(kind, dtype, num_heads=expected.shape[1] // HEAD_DIM)
    positions = torch.arange(len(expected)) if positions is None else positions
    for chunk in range(0, len(expected), 100):  # as the comparison hands them over
        here = slice(chunk, chunk + 100)
        finite = actual[here].isfinite().all(dim=1)
        found.add(positions[here], actual[here], expected[here], finite)
    return found


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
    found = effects(actual, truth)
    assert found.strongest() is None
    num_finite = 400 - len(range(0, 400, 7))
    assert num_finite - 2 <= found.all()[0].num_rows <= num_finite


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
    found = next(each for each in run.taps if each.name == tap)
    assert (found.verdict, found.num_bad_rows) == (Verdict.SYSTEMATIC, 0)
    assert found.effect.low < gain < found.effect.high
    finding = next(each for each in run.findings if each.tap == tap)
    assert finding.code is Code.SYSTEMATIC_ERROR
    assert f"{tap} has a gain of +0.00" in finding.message
    assert run.outcome is Outcome.MISMATCH
