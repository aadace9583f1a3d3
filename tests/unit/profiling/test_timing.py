"""Latencies: what is counted as which, and percentiles."""

import pytest

from harness.profiling.load import CaptureSchedule, ProfileRequests, dry_run, window
from harness.profiling.timing import measure, percentiles_ms


def test_each_request_and_each_gap_is_a_sample(session, load):
    latencies = measure(session, load, num_runs=3, device="cpu")
    assert (len(latencies.ttft_s), len(latencies.tpot_s), len(latencies.inter_token_s)) == (3 * 2, 3 * 2, 3 * 2 * 5)
    assert latencies.num_tokens == 3 * 2 * 6
    assert latencies.tokens_per_second == pytest.approx(36 / sum(latencies.run_s))
    assert sum(map(sum, latencies.step_s)) == pytest.approx(sum(latencies.run_s))
    assert all(ttft < run for ttft, run in zip(latencies.ttft_s[::2], latencies.run_s, strict=True))


def test_phases_share_out_the_time(reference, load):
    latencies = measure(reference, load, num_runs=1, device="cpu")
    steps = dry_run(reference, load)
    everything = CaptureSchedule(wait=0, warmup=0, active=100)
    walls = [latencies.wall_s(window(phase, load, steps, everything)) for phase in ("prefill", "decode")]
    assert sum(walls) == pytest.approx(sum(latencies.run_s))


def test_one_token_has_no_time_per_output_token(reference):
    latencies = measure(reference, ProfileRequests(prompts=((1, 2),), max_new_tokens=(1,)), num_runs=2, device="cpu")
    assert (len(latencies.ttft_s), latencies.tpot_s, latencies.inter_token_s) == (2, [], [])


def test_percentiles_are_interpolated():
    percentiles = percentiles_ms([value / 1000 for value in range(101)])
    assert (percentiles.median, percentiles.p90, percentiles.p99, percentiles.num_samples) == pytest.approx(
        (50, 90, 99, 101)
    )
    assert percentiles_ms([0.004]).p99 == pytest.approx(4)
