"""The share of many similar tests that the default suite runs; `.ci/run` and `make test-slow` take the others."""

import random
from collections.abc import Sequence
from typing import Any

import pytest


def sampled(cases: Sequence[Any], num: int) -> list[Any]:
    """Return parameters, all but `num` of them marked as slow: which ones follows from a fixed seed."""
    chosen = random.Random(0).sample(range(len(cases)), num)
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=[] if i in chosen else pytest.mark.slow)
        for i, case in enumerate(cases)
    ]
