"""Mistakes that are planted in a recording of the reference engine, and what the report has to say of them."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import pytest
import torch

from .conftest import Bench


@dataclass(frozen=True, slots=True)
class Planted:
    """One mistake: the wrong rows of a tap, and the explanation that names it."""

    tap: str
    wrong: Callable[[Bench], torch.Tensor]
    bench: tuple[object, ...]
    """Checkpoint, dtype and schedule, as `bench_of` takes them."""
    expected: Mapping[str, object]
    """Fields of the explanation; in text, `...` stands for anything."""

    def check(self, bench_of: Callable[..., Bench]) -> None:
        """Plant the mistake, and compare the explanation with what is expected of it."""
        bench = bench_of(*self.bench)
        explanation = bench.explain(self.tap, self.wrong(bench))
        for name, value in self.expected.items():
            actual = getattr(explanation, name)
            assert _fits(actual, value), f"{name} is {actual!r} and not {value!r}: {explanation}"


def planted(
    cause: str,
    tap: str,
    wrong: Callable[[Bench], torch.Tensor],
    *bench: object,
    is_cause: bool = True,
    **expected: object,
) -> object:
    """Return a row of a table of mistakes, for `pytest.mark.parametrize`."""
    return pytest.param(Planted(tap, wrong, bench, {"cause": cause, "is_cause": is_cause, **expected}), id=cause)


def _fits(actual: object, expected: object) -> bool:
    if isinstance(actual, str) and isinstance(expected, str):
        return re.fullmatch(".*".join(map(re.escape, expected.split("..."))), actual) is not None
    return actual == expected
