"""The share of many similar bugs that the default suite looks for; `.ci/run` and `make test-slow` take the others."""

import random
from collections.abc import Sequence
from typing import Any

import pytest


def sampled(bugs: Sequence[Any], num: int) -> list[Any]:
    """Return parameters, all but `num` of them marked as slow: which ones follows from a fixed seed."""
    chosen = random.Random(0).sample(range(len(bugs)), num)
    return [
        pytest.param(*(bug if isinstance(bug, tuple) else (bug,)), marks=[] if i in chosen else pytest.mark.slow)
        for i, bug in enumerate(bugs)
    ]
