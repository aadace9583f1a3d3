"""`import harness` costs nothing, and names all that is public."""

import subprocess
import sys

import pytest

import harness

HEAVY = ("torch", "transformers", "rich", "pydantic", "numpy")


def loaded_by(code: str) -> list[str]:
    """Return which heavy packages are loaded by a program."""
    program = f"import sys\n{code}\nprint(*[name for name in {HEAVY!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=600)
    return done.stdout.split()


@pytest.mark.parametrize(
    "code",
    [
        "import harness",
        "import harness; harness.__version__; dir(harness)",
        "from harness import Code, HarnessError",
        "import harness.pytest_plugin",
    ],
)
def test_nothing_heavy_is_imported_before_it_is_needed(code: str):
    assert loaded_by(code) == []


def test_the_protocol_of_engines_needs_no_torch():
    assert "torch" not in loaded_by("from harness import Engine, Capabilities, Workload")


@pytest.mark.parametrize("name", harness.__all__)
def test_every_public_name_is_there(name: str):
    assert getattr(harness, name) is not None
    assert name in dir(harness)


@pytest.mark.slow
def test_a_function_stays_one_whatever_was_imported_before_it():
    """A module of the same name would take its place."""
    program = (
        "import harness.cli.check, harness.judge.jobs.check, harness.judge.jobs.diff; harness.check, harness.diff; "
    )
    assert loaded_by("import harness; " + program + "assert callable(harness.check) and callable(harness.diff)")


def test_what_is_not_public_is_not_there():
    with pytest.raises(AttributeError, match="no attribute 'chekc'"):
        harness.chekc  # noqa: B018
