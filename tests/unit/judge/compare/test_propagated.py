"""Distance to the golden as a ratio to HF's own: what can be said where an operation cannot be replayed."""

import math
import re
from dataclasses import replace

import pytest
import torch

from harness.base.metrics import rounding_unit
from harness.errors import Code
from harness.judge.compare.propagated import RATIO_BOUND, what_logits_show
from harness.results.check import Verdict

from ....closeness import near
from .conftest import LENGTHS, NUM_NEW
from .recordings import Copy

TAP = "model.layers.1.mlp.down_proj"
ROW = (2, 5)


def tap(result, name=TAP):
    (found,) = [tap for tap in result.taps if tap.name == name]
    return found


def noise_at(one, request, position, name=TAP):
    """The golden's noise of a row: its steps are its requests, in order."""
    before = sum(length + NUM_NEW - 1 for length in LENGTHS[:request])
    return float(one.golden.noise[name][before + position])


def displaced(one, distance, name=TAP, at=ROW):
    """A recording that is the golden but for one row, which is off by a relative `distance`."""
    actual = Copy.of(one.golden.recording)
    row = actual.at(name, *at)
    direction = torch.randn(row.shape, generator=torch.Generator().manual_seed(1), dtype=row.dtype)
    row += direction / direction.norm() * row.norm() * distance
    return actual


def test_the_golden_is_no_distance_from_itself(one):
    result = one.measure(one.golden.recording)
    assert {tap.propagated_ratio_max for tap in result.taps} == {0}
    assert {tap.verdict for tap in result.taps} == {Verdict.EXACT}
    assert result.logits.top1_agreement == 1
    assert result.logits.kl_max == 0


@pytest.mark.parametrize("ratio", [0.5, 3.0, 300.0])
def test_the_ratio_is_the_error_over_the_noise_of_the_same_row(one, tmp_path, ratio):
    noise = max(noise_at(one, *ROW), float(one.golden.noise[TAP].median()))
    result = one.measure(displaced(one, ratio * noise).write(tmp_path / "r"))
    assert tap(result).propagated_ratio_max == pytest.approx(ratio, rel=1e-3)
    assert tap(result).propagated_relative_l2_max == pytest.approx(ratio * noise, rel=1e-3)
    assert (tap(result).worst.request, tap(result).worst.position) == ROW
    assert (tap(result).verdict is Verdict.BUG) == (ratio > RATIO_BOUND)
    assert tap(result).judged_by == "propagated"


def test_a_bad_row_is_the_first_divergence(one, tmp_path):
    result = one.measure(displaced(one, 0.1).write(tmp_path / "r"), require=())
    first = result.first_divergence
    assert (first.tap, first.request, first.position, first.code) == (TAP, *ROW, Code.PROPAGATED_ERROR)
    assert first.local_roundings is None
    assert first.propagated_ratio == pytest.approx(tap(result).propagated_ratio_max)
    assert [finding.code for finding in result.findings] == [Code.PROPAGATED_ERROR]


def test_a_row_without_noise_is_held_to_the_taps_median(one, tmp_path):
    """Where HF happened to be exact another engine need not be."""
    noise = dict(one.golden.noise)
    noise[TAP] = noise[TAP].clone()
    noise[TAP][:] = 1e-7
    noise[TAP][sum(length + NUM_NEW - 1 for length in LENGTHS[:2]) + ROW[1]] = 0
    result = one.measure(displaced(one, 3e-7).write(tmp_path / "r"), noise=noise)
    assert tap(result).propagated_ratio_max == pytest.approx(3, rel=1e-3)


def test_a_noisier_row_is_given_its_own_room(one, tmp_path):
    noise = dict(one.golden.noise)
    noise[TAP] = torch.full_like(noise[TAP], 1e-7)
    noise[TAP][sum(length + NUM_NEW - 1 for length in LENGTHS[:2]) + ROW[1]] = 1e-5
    result = one.measure(displaced(one, 3e-5).write(tmp_path / "r"), noise=noise)
    assert tap(result).propagated_ratio_max == pytest.approx(3, rel=1e-3)


def test_without_noise_roundings_add_up_on_the_way(one, tmp_path):
    depth = 1 + [op.tap for op in one.hf.graph].index(TAP)
    allowance = rounding_unit(torch.float32) * math.sqrt(depth)
    result = one.measure(displaced(one, 5 * allowance).write(tmp_path / "r"), noise={})
    assert tap(result).propagated_ratio_max == pytest.approx(5, rel=0.1)  # the depth counts taps that were recorded


def test_noise_of_no_size_at_all(one, tmp_path):
    """The embedding: HF makes no error, so any error is infinitely large."""
    actual = Copy.of(one.golden.recording)
    actual.at("model.embed_tokens", *ROW)[3] *= 1 + 1e-6
    result = one.measure(actual.write(tmp_path / "r"))
    assert tap(result, "model.embed_tokens").propagated_ratio_max == math.inf
    assert result.first_divergence.tap == "model.embed_tokens"


def test_figures_are_of_the_rows_whatever_the_schedule(one, tmp_path):
    """Every tap's figures from recordings of three schedules agree within the noise, and none is exact by chance."""
    results = [one.measure(one.recorded(name).write(tmp_path / name)) for name in ("plain", "chunked", "batched")]
    for name in (TAP, "lm_head", "model.layers.2.attention"):
        ratios = [tap(result, name).propagated_ratio_max for result in results]
        assert all(0.1 < ratio < 4 for ratio in ratios), ratios
        assert len({tap(result, name).num_rows for result in results}) == 1


def test_rows_in_another_order_give_the_same_figures(one, tmp_path):
    actual = Copy.of(one.golden.recording)
    scrambled = Copy.of(one.golden.recording)
    generator = torch.Generator().manual_seed(2)
    for copy in (actual, scrambled):
        copy.at(TAP, *ROW).mul_(1.01)
    scrambled.steps = [
        step.select(torch.randperm(len(step.request), generator=generator).tolist())
        for step in reversed(scrambled.steps)
    ]
    first, second = (one.measure(copy.write(tmp_path / name)) for name, copy in (("a", actual), ("b", scrambled)))
    for here, there in zip(first.taps, second.taps, strict=True):
        assert replace(there, worst=None) == near(replace(here, worst=None)), "rows are summed in other blocks"
    assert tap(first).worst == tap(second).worst
    assert second.first_divergence.tap == TAP
    assert (second.first_divergence.request, second.first_divergence.position) == ROW


@pytest.mark.parametrize("name", ["model.layers.0.mlp.up_proj", "lm_head"])
def test_another_shape_is_a_finding(one, tmp_path, name):
    actual = Copy.of(one.golden.recording)
    for step in actual.steps:
        step.taps[name] = step.taps[name][:, :-1].contiguous()
    result = one.compare(actual.write(tmp_path / "r"))
    mismatches = [finding for finding in result.findings if finding.code is Code.TAP_MISMATCH]
    width = actual.steps[0].taps[name].shape[1]
    assert [finding.tap for finding in mismatches] == [name]
    assert f"expected [{width + 1}], actual [{width}]" in mismatches[0].message


def test_the_same_elements_in_two_dimensions_are_no_finding(one, actual, tmp_path):
    for step in actual.computing():
        step.taps[TAP] = step.taps[TAP].unflatten(1, (4, -1))
    assert one.compare(actual.write(tmp_path / "r")).findings == ()


def test_another_dtype_than_the_engines(one, actual, tmp_path):
    for step in actual.computing():
        step.taps[TAP] = step.taps[TAP].to(torch.bfloat16)
    result = one.compare(actual.write(tmp_path / "r"))
    (finding,) = [finding for finding in result.findings if finding.code is Code.TAP_MISMATCH]
    assert "BF16, coarser than the engine's float32" in finding.message


def test_integers_are_no_tap(one, actual, tmp_path):
    for step in actual.computing():
        step.taps[TAP] = step.taps[TAP].to(torch.int32)
    result = one.compare(actual.write(tmp_path / "r"))
    assert (Code.TAP_MISMATCH, TAP) in {(finding.code, finding.tap) for finding in result.findings}


def test_a_golden_that_is_not_finite(one, tmp_path):
    expected = Copy.of(one.golden.recording)
    expected.at(TAP, *ROW)[0] = math.nan
    result = one.measure(one.recorded().write(tmp_path / "a"), expected=expected.write(tmp_path / "e"))
    found = [(f.code, f.tap, f.request, f.position) for f in result.findings]
    assert (Code.ORACLE_NOT_FINITE, TAP, *ROW) in found


def test_logits(one, tmp_path):
    actual = Copy.of(one.golden.recording)
    row = actual.at("lm_head", *ROW[:1], LENGTHS[ROW[0]])
    p = row.softmax(0)
    best = int(row.argmax())
    row[best] -= 100
    q = row.softmax(0)
    result = one.measure(actual.write(tmp_path / "r"))
    num_rows = len(LENGTHS) * NUM_NEW
    assert result.logits.num_rows == num_rows
    assert result.logits.top1_agreement == pytest.approx(1 - 1 / num_rows)
    assert result.logits.kl_max == pytest.approx(float((p * (p / q).log()).sum()), rel=1e-6)
    margins = [step.tap("lm_head").topk(2).values.diff(dim=1).neg().min() for step in one.golden.recording.steps]
    assert result.logits.margin_min == pytest.approx(float(min(margins)))


@pytest.mark.parametrize(("dtype", "least"), [("bfloat16", 1e-2), ("float32", 1e-7)])
def test_what_logits_show(bench, dtype, least):
    """A change of all weights is found where the note says so, and a quarter of it is not."""
    one = bench("llama-tiny", getattr(torch, dtype))
    noise, logits = one.golden.noise[one.hf.graph.logits], one.hf.graph.logits
    said = what_logits_show(noise, one.hf.graph)
    found = re.search(r"change of all weights from about (\S+) % on", said)
    change = float(found[1]) / 100
    assert least < change < 100 * least
    for share, is_found in ((1.0, True), (0.25, False)):
        ratio = _ratio_after(one, share * change, logits)
        assert (ratio > RATIO_BOUND) == is_found


def _ratio_after(one, change, logits):
    """Change each weight by its own amount, run HF, and return the largest error of its logits over HF's own."""
    weights = [weight for weight in one.hf.model.parameters() if weight.dim() > 1]
    before, generator = [weight.clone() for weight in weights], torch.Generator().manual_seed(0)
    model = one.hf.model
    ids = [request.token_ids for request in one.golden.requests]
    with torch.no_grad():
        sound = [model(torch.tensor([tokens])).logits[0].double() for tokens in ids]
        for weight in weights:
            weight.mul_(1 + change * torch.randn(weight.shape, generator=generator).to(weight.dtype))
        other = [model(torch.tensor([tokens])).logits[0].double() for tokens in ids]
        for weight, own in zip(weights, before, strict=True):
            weight.copy_(own)
    own = float(one.golden.noise[logits].nanmedian())
    return max(float(((a - b).norm(dim=1) / b.norm(dim=1)).max()) for a, b in zip(other, sound, strict=True)) / own
