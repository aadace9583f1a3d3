"""The cache stores and does not compute: whatever bit differs between what was written and what is read is an error."""

import pytest
import torch

from harness.errors import Code
from harness.judge.explain import explain_run
from harness.results.check import Verdict

from .judgements import tap

KEY, ROPE = "model.layers.1.k_cache", "model.layers.1.k_rope"
VALUE = "model.layers.1.v_cache"
ROW = (2, 3)


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def one(request, bench):
    return bench(dtype=request.param)


def wrong(result):
    return {tap.name for tap in result.taps if tap.verdict is Verdict.BUG}


def test_a_sound_cache_is_exact(one, tmp_path):
    result = one.measure(one.recorded().write(tmp_path / "r"))
    caches = [tap for tap in result.taps if tap.kind == "cache"]
    assert len(caches) == 6
    assert {(tap.verdict, tap.judged_by) for tap in caches} == {(Verdict.EXACT, "cache")}


@pytest.mark.parametrize("name", [KEY, VALUE])
def test_one_bit_of_one_element(one, actual, tmp_path, name):
    row = actual.at(name, *ROW)
    bits = row.view(torch.int16 if row.dtype == torch.bfloat16 else torch.int32)
    bits[0, 5] ^= 1
    result = one.measure(actual.write(tmp_path / "r"))
    assert wrong(result) == {name}
    assert result.first_divergence.tap == name
    assert result.first_divergence.code is Code.CACHE_DIFFERS
    assert result.first_divergence.phase == "readback"
    assert (result.first_divergence.request, result.first_divergence.position) == ROW
    assert tap(result, name).num_bad_rows == 1
    assert 0 < result.first_divergence.local_roundings < 10
    assert [finding.code for finding in result.findings] == [Code.CACHE_DIFFERS]


def test_two_requests_swapped(one, actual, tmp_path):
    ours, theirs = actual.at(KEY, 0, 2), actual.at(KEY, 2, 2)
    ours[:], theirs[:] = theirs.clone(), ours.clone()
    result = one.measure(actual.write(tmp_path / "r"))
    assert tap(result, KEY).num_bad_rows == 2
    assert (result.first_divergence.request, result.first_divergence.position) == (0, 2)


def test_a_cache_of_a_narrower_dtype_shows_as_its_rounding(bench, tmp_path):
    one = bench()
    actual = one.recorded()
    for step in actual.steps:
        if KEY in step.taps:
            step.taps[KEY] = step.taps[KEY].to(torch.bfloat16)
    result = one.measure(actual.write(tmp_path / "r"))
    assert tap(result, KEY).verdict is Verdict.BUG
    assert 0.5 < tap(result, KEY).local_roundings_median < 2, "in roundings of the cache's own dtype"


def without_the_writing_of_request_1(one):
    actual = one.recorded("plain")
    for step in actual.computing():
        if step.row(1, 0) is not None:
            del step.taps[ROPE]
    return actual


def test_rows_without_a_recorded_write_are_compared_with_the_golden(one, tmp_path):
    actual = without_the_writing_of_request_1(one)
    result = one.measure(actual.write(tmp_path / "r"))
    assert tap(result, KEY).num_rows == sum(len(request.token_ids) for request in actual.requests)
    assert tap(result, KEY).verdict is Verdict.NOISE
    assert {finding.code for finding in result.findings} == {Code.ROWS_MISSING}


def test_content_that_no_request_computed_is_found(one, tmp_path):
    actual = without_the_writing_of_request_1(one)
    actual.at(KEY, 1, 2)[:] = actual.at(KEY, 0, 2)
    result = one.measure(actual.write(tmp_path / "r"))
    assert result.first_divergence.tap == KEY
    assert (result.first_divergence.request, result.first_divergence.position) == (1, 2)
    assert tap(result, KEY).num_bad_rows == 1


def test_a_cache_of_another_shape_is_a_finding(one, actual, tmp_path):
    for step in actual.steps:
        if KEY in step.taps:
            step.taps[KEY] = step.taps[KEY][:, :1].contiguous()
    result = one.measure(actual.write(tmp_path / "r"))
    assert (Code.TAP_MISMATCH, KEY) in {(finding.code, finding.tap) for finding in result.findings}


def of_the_cache_alone(one, schedule="batched"):
    """What an engine shows that can show nothing else from inside: its cache, logits and tokens."""
    actual = one.recorded(schedule)
    shown = {KEY, VALUE, "lm_head"} | {
        name.replace("layers.1", f"layers.{at}") for name in (KEY, VALUE) for at in (0, 2)
    }
    for name in {name for step in actual.steps for name in step.taps} - shown:
        actual.drop(name)
    actual.steps = [step for step in actual.steps if step.taps or step.sampled is not None]
    return actual, sorted(shown)


def test_a_cache_without_recorded_writes_is_compared_with_the_golden(one, tmp_path):
    actual, shown = of_the_cache_alone(one)
    result = one.compare(actual.write(tmp_path / "r"), wanted=shown)
    assert result.findings == ()
    caches = [tap for tap in result.taps if tap.kind == "cache"]
    assert {(tap.judged_by, tap.num_rows) for tap in caches} == {
        ("cache", sum(len(r.token_ids) for r in actual.requests))
    }
    assert len(caches) == 6


def swap_positions(actual):
    first, second = actual.at(KEY, 2, 3), actual.at(KEY, 2, 4)
    first[:], second[:] = second.clone(), first.clone()


def other_request(actual):
    actual.at(KEY, 2, 3)[:] = actual.at(KEY, 0, 3)


def twenty_times_the_noise(actual):
    row = actual.at(KEY, 2, 3)
    row += row * (2e-5 if row.dtype == torch.float32 else 0.3)


@pytest.mark.parametrize("break_it", [swap_positions, other_request, twenty_times_the_noise])
def test_a_wrong_row_of_a_cache_whose_writing_was_not_recorded(one, tmp_path, break_it):
    actual, shown = of_the_cache_alone(one)
    break_it(actual)
    recording = actual.write(tmp_path / "r")
    comparison = one.comparison(recording, wanted=shown)
    (finding,) = [finding for finding in comparison.result.findings if finding.code is Code.CACHE_DIFFERS]
    assert (finding.tap, finding.request, finding.position) == (KEY, 2, 3)
    explained = explain_run(comparison, recording, one.golden, one.hf)
    assert "failed" not in explained.first_divergence.explanation.cause


def test_a_cache_without_a_reference_is_a_finding(bench, tmp_path):
    one = bench()
    actual, shown = of_the_cache_alone(one)
    expected = one.recorded()
    for name in (ROPE, KEY):
        expected.drop(name)
    result = one.measure(actual.write(tmp_path / "r"), expected=expected.write(tmp_path / "e"), wanted=shown)
    assert [(finding.code, finding.tap) for finding in result.findings] == [(Code.CACHE_NOT_JUDGED, KEY)]
