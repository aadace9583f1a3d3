"""Every mutant of the reference engine's attention and operations is killed, by the property that it breaks."""

import inspect

import pytest
from hypothesis import Phase, settings

from harness.properties.core import falsify
from harness.properties.core.findings import PropertyError
from harness.properties.core.search import PROFILES

from .model_mutants import MUTANTS, SURVIVORS, Mutant

DEV = PROFILES["dev"].settings()


@pytest.mark.sampled(4)
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_is_killed(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(falsify, "PHASES", (Phase.generate,))  # the first example will do
    with mutant.planted(), pytest.raises(PropertyError) as caught:
        mutant.suite(DEV)
    assert caught.value.property.startswith(mutant.killed_by)


@pytest.mark.slow
@pytest.mark.parametrize("mutant", SURVIVORS, ids=lambda mutant: mutant.name)
def test_these_survive(mutant: Mutant) -> None:
    with mutant.planted():
        mutant.suite(settings(DEV, max_examples=20))


def test_mutants_are_taken_back() -> None:
    for mutant in MUTANTS:
        holder = mutant.holders[0]
        before = inspect.getattr_static(holder, mutant.function)
        with mutant.planted():
            assert inspect.getattr_static(holder, mutant.function) is not before
        assert inspect.getattr_static(holder, mutant.function) is before
