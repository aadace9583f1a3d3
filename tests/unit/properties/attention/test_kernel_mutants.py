"""Every mutant of the Triton kernels is killed, interpreted on the CPU, by the property that it breaks."""

import sys
from importlib import import_module

import pytest
from hypothesis import Phase, settings

from harness.properties.core import falsify
from harness.properties.core.findings import PropertyError
from harness.properties.core.search import PROFILES

from ...reference_engine.fast.kernels.launching import IGNORE_NUMPY, launch_on
from .kernel_mutants import MUTANTS, PACKAGE, SURVIVORS, Mutant

# Some mutants divide by 0 or overflow, of which numpy warns: what is judged is what comes out.
IGNORE_ARITHMETIC = pytest.mark.filterwarnings(
    "ignore:(invalid value|divide by zero|overflow) encountered:RuntimeWarning"
)
pytestmark = IGNORE_NUMPY
DEV = PROFILES["dev"].settings()


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    launch_on("cpu", monkeypatch)


@IGNORE_ARITHMETIC
@pytest.mark.sampled(3)
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_is_killed(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(falsify, "PHASES", (Phase.generate,))  # the first example will do
    with mutant.planted(), pytest.raises(PropertyError) as caught:
        mutant.suite(DEV)
    assert caught.value.property.startswith(mutant.killed_by)
    assert " raised " not in str(caught.value), "a kernel that does not run shows nothing"


@pytest.mark.slow
@pytest.mark.parametrize("mutant", SURVIVORS, ids=lambda mutant: mutant.name)
def test_these_survive(mutant: Mutant) -> None:
    with mutant.planted():
        mutant.suite(settings(DEV, max_examples=20))


def test_mutants_are_taken_back() -> None:
    for mutant in MUTANTS:
        path = f"{PACKAGE}.{mutant.module}"
        before = import_module(path)
        with mutant.planted():
            assert import_module(path) is not before
        assert import_module(path) is sys.modules[path] is getattr(import_module(PACKAGE), mutant.module) is before
