"""Paired ratios: what is found, what is not, and what cannot be told."""

import random

import pytest

from harness.profiling.gate.against import paired_ratio, time_pairs
from harness.results.gate import PairedRatio, TimeVerdict


def blocks(factor: float, *, spread: float = 0.005, drift: float = 0.0, num_blocks: int = 30) -> PairedRatio:
    """Return the ratio of a step that takes `factor` times 1 s, on a machine whose speed varies and drifts."""
    draw = random.Random(0)
    now = iter(range(4 * num_blocks))
    runs = [
        tuple(base * draw.gauss(1, spread) * (1 + drift * next(now)) for base in (1, factor, factor, 1))
        for _ in range(num_blocks)
    ]
    return paired_ratio(runs, tolerance=0.03)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("factor", "verdict"), [(1.0, TimeVerdict.SAME), (1.05, TimeVerdict.SLOWER), (0.9, TimeVerdict.FASTER)]
)
def test_a_change_beyond_the_tolerance_is_found(factor: float, verdict: TimeVerdict) -> None:
    time = blocks(factor)
    assert time.verdict is verdict
    assert time.ratio.low <= factor <= time.ratio.high
    assert time.noise.low <= 1 <= time.noise.high


def test_a_machine_that_slows_down_slows_both() -> None:
    assert blocks(1.0, drift=0.001).verdict is TimeVerdict.SAME
    assert blocks(1.05, drift=0.001).verdict is TimeVerdict.SLOWER


def test_a_step_that_the_other_one_slows_down_is_no_noise() -> None:
    """Each is slower right after the other one, whose data is in the caches."""
    time = paired_ratio([(1.0, 1.3, 1.0, 1.3)] * 10)
    assert (time.ratio.median, time.noise.median) == (1, 1)
    assert time.verdict is TimeVerdict.SAME


def test_a_machine_that_jumps_between_blocks_is_inconclusive() -> None:
    time = paired_ratio([(speed,) * 4 for speed in (1.0, 1.1, 1.25, 1.4, 1.55, 1.7, 1.9)])
    assert time.ratio.median == 1
    assert time.noise.high < 0.97
    assert time.verdict is TimeVerdict.INCONCLUSIVE


def test_a_noisy_machine_is_inconclusive() -> None:
    assert blocks(1.02, spread=0.2).verdict is TimeVerdict.INCONCLUSIVE


def test_what_is_beyond_doubt_is_found_on_a_restless_machine() -> None:
    assert blocks(2.0, spread=0.2).verdict is TimeVerdict.SLOWER


def test_steps_alternate() -> None:
    order: list[str] = []

    def step(name: str) -> float:
        order.append(name)
        return 1.0

    time_pairs(lambda: step("A"), lambda: step("B"), num_blocks=5)
    assert "".join(order) == "AB" + "ABBA" * 5


def test_too_few_blocks_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 5"):
        paired_ratio([(1.0, 1.0, 1.0, 1.0)] * 4)
