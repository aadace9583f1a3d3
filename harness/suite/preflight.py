"""Mistakes that can be found before the first task: names of nothing that exists."""

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence

from harness.checkpoint import Checkpoint, resolve
from harness.engines import engine_names
from harness.errors import Code, HarnessError
from harness.suite.task import Environment, SuiteCase

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
            _ = Checkpoint(resolve(model, local_files_only=local_files_only)).config
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


def check_environments(environments: Mapping[str, Environment]) -> None:
    """Refuse environments that cannot run the harness.

    Raises:
        HarnessError: BAD_SUITE.
    """
    for name, environment in environments.items():
        if versions_in(environment) is None:
            raise HarnessError(
                Code.BAD_SUITE,
                f"the environment {name!r} has no interpreter with the harness",
                where=f"environments.{name}.python",
                expected="the path of a Python that can import harness",
                actual=environment.python or sys.executable,
                hint="install inference-harness with that Python",
            )


def versions_in(environment: Environment) -> dict[str, str] | None:
    """Return the `fingerprint` of an environment; None if it has no harness, or no interpreter."""
    command = [environment.python or sys.executable, "-m", "harness.suite.fingerprint"]
    variables = {**os.environ, **environment.variables}
    try:
        done = subprocess.run(command, capture_output=True, check=True, timeout=_LOOK_LIMIT_S, env=variables)
        versions: dict[str, str] = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
    return versions
