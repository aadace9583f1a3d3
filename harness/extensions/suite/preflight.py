"""Mistakes that can be found before the first task: names of nothing that exists."""

import os
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence

from harness.errors import Code, HarnessError
from harness.extensions.suite.fingerprint import Installation, installation
from harness.extensions.suite.task import Environment, SuiteCase
from harness.formats.checkpoint import Checkpoint, resolve

_LOOK_LIMIT_S = 60.0
"""Longest time for an interpreter to say what it has."""


def check_engines(cases: Sequence[SuiteCase], installed: Mapping[str, Installation] | None = None) -> None:
    """Refuse engines that are not installed where their case runs: here, or in one of the environments `installed`.

    Cases of other environments are left to whoever has them.

    Raises:
        HarnessError: UNKNOWN_ENGINE, with the case that names it.
    """
    here = installation()
    for case in cases:
        place = here if case.environment is None else (installed or {}).get(case.environment)
        if place is not None and case.case.engine not in place.engines:
            raise unknown_engine(case, f"no engine is called {case.case.engine!r}", place.engines)


def unknown_engine(case: SuiteCase, what: str, known: Sequence[str]) -> HarnessError:
    """Return the error for a case whose engine is not among those that are `known`."""
    within = "" if case.environment is None else f" in the environment {case.environment!r}"
    return HarnessError(
        Code.UNKNOWN_ENGINE,
        f"{what}{within}",
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


def check_environments(environments: Mapping[str, Environment]) -> dict[str, Installation]:
    """Refuse environments that cannot run the harness; return what the others have.

    Raises:
        HarnessError: BAD_SUITE.
    """
    found = {name: installed_in(environment) for name, environment in environments.items()}
    for name, installed in found.items():
        if installed is None or installed.missing_packages:
            lack = "has no interpreter with the harness"
            if installed is not None:
                lack = f"lacks {', '.join(installed.missing_packages)}"
            raise HarnessError(
                Code.BAD_SUITE,
                f"the environment {name!r} {lack}",
                where=f"environments.{name}.python",
                expected="the path of a Python that can import harness",
                actual=environments[name].python or sys.executable,
                hint="install inference-harness with that Python",
            )
    return {name: installed for name, installed in found.items() if installed is not None}


def installed_in(environment: Environment) -> Installation | None:
    """Return what an environment has; None if it has no harness, or no interpreter."""
    command = [environment.python or sys.executable, "-m", "harness.extensions.suite.fingerprint"]
    variables = {**os.environ, **environment.variables}
    try:
        done = subprocess.run(command, capture_output=True, check=True, timeout=_LOOK_LIMIT_S, env=variables)
        return Installation.model_validate_json(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
