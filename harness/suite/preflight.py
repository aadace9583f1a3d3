"""What can be known to be wrong before the first task: a name that stands for nothing."""

import json
import subprocess
from collections.abc import Iterable, Sequence

from harness.checkpoint import read_config, resolve
from harness.engines import engine_names
from harness.errors import Code, HarnessError
from harness.suite.task import SuiteCase

_LOOK_LIMIT_S = 60.0
"""Longest time for an interpreter to say what it has."""


def check_engines(cases: Sequence[SuiteCase]) -> None:
    """Refuse engines that are not installed here; those of another environment are looked for there.

    Raises:
        HarnessError: UNKNOWN_ENGINE, with the case that names it.
    """
    known = engine_names()
    for case in cases:
        if case.environment is None and case.case.engine not in known:
            raise HarnessError(
                Code.UNKNOWN_ENGINE,
                f"no engine is called {case.case.engine!r}",
                where=case.name,
                expected=", ".join(known),
                actual=case.case.engine,
                hint="install the package that provides it, or name an environment that has it",
            )


def check_models(cases: Sequence[SuiteCase], *, local_files_only: bool) -> None:
    """Refuse models that are not there; hub ids are downloaded now, and not by each worker.

    Raises:
        HarnessError: as `resolve`, with the case that names it.
    """
    for model, case in {case.case.model: case for case in reversed(cases)}.items():
        try:
            read_config(resolve(model, local_files_only=local_files_only))
        except HarnessError as error:
            where = f"{case.name}: {error.where}"
            raise HarnessError(
                error.code, error.what, where=where, expected=error.expected, actual=error.actual, hint=error.hint
            ) from error


def missing_models(models: Iterable[str]) -> list[str]:
    """Return the models that this machine does not have."""
    return [model for model in models if not _is_here(model)]


def _is_here(model: str) -> bool:
    try:
        return bool(resolve(model, local_files_only=True))
    except HarnessError:
        return False


def check_pythons(pythons: Iterable[tuple[str, str]]) -> None:
    """Refuse environments, each a name and the path of its interpreter, that cannot run the harness.

    Raises:
        HarnessError: BAD_SUITE.
    """
    for name, python in pythons:
        if python_versions(python) is None:
            raise HarnessError(
                Code.BAD_SUITE,
                f"the environment {name!r} has no interpreter with the harness",
                where=f"environments.{name}.python",
                expected="the path of a Python that can import harness",
                actual=python,
                hint=f"{python} -m pip install inference-harness",
            )


def python_versions(python: str) -> dict[str, str] | None:
    """Return what an interpreter's `fingerprint` is; None where it has no harness, or is not there."""
    command = [python, "-m", "harness.suite.fingerprint"]
    try:
        said = subprocess.run(command, capture_output=True, check=True, timeout=_LOOK_LIMIT_S).stdout
        versions: dict[str, str] = json.loads(said)
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
    return versions
