"""What a suite needs before its first task: versions, engines, environments, models, and their digests.

A check's numbers depend on the versions, so they must be equal on all machines. `--resume` keeps a result only while
the content that it was checked with is the same.
"""

import os
import platform
import re
import subprocess
import sys
import uuid
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, distributions, version
from importlib.util import find_spec
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from harness.base.files import json_digest
from harness.engines.adapter import engine_names
from harness.errors import Code, HarnessError
from harness.extensions.suite.task import Environment, SuiteCase
from harness.formats.checkpoint import Checkpoint, resolve
from harness.formats.checkpoint.cache import folder_digest
from harness.version import __version__

_PACKAGES = ("torch", "transformers", "safetensors")
_NOT_INSTALLED = "not installed"


class Installation(BaseModel):
    """The versions and engines of an interpreter."""

    model_config = ConfigDict(extra="forbid")

    versions: dict[str, str]
    """See `fingerprint`."""
    engines: list[str]
    """Names of the engines that are installed."""
    digest: str = ""
    """Tells the interpreter and the versions of all that is installed in it from any other."""

    @property
    def missing_packages(self) -> list[str]:
        """Return the packages without which it can check nothing."""
        return [name for name, version in self.versions.items() if version == _NOT_INSTALLED]


def installation() -> Installation:
    """Return what this interpreter has."""
    return Installation(versions=fingerprint(), engines=engine_names(), digest=installed_digest())


def installed_digest() -> str:
    """Return a digest of this interpreter, and of all packages in it with their versions.

    All packages, since an adapter does not say which of them its engine is. Nothing is imported for it.
    """
    packages = sorted(
        {(distribution.metadata["Name"] or "", distribution.version or "") for distribution in distributions()}
    )
    return json_digest([sys.executable, sys.version, packages])


def fingerprint() -> dict[str, str]:
    """Return name and version of what is installed here; nothing is imported for it."""
    versions = {"harness": __version__, "python": ".".join(map(str, sys.version_info[:2]))}
    return versions | {name: _version(name) for name in _PACKAGES}


def node_name() -> str:
    """Return this machine's name."""
    return platform.node() or "localhost"


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return _NOT_INSTALLED if find_spec(name) is None else "unknown"


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
    installations = {name: installed_in(environment) for name, environment in environments.items()}
    for name, installed in installations.items():
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
    return {name: installed for name, installed in installations.items() if installed is not None}


def installed_in(environment: Environment) -> Installation | None:
    """Return what an environment has; None if it has no harness, or no interpreter."""
    command = [environment.python or sys.executable, "-m", "harness.extensions.suite.preflight"]
    variables = {**os.environ, **environment.variables}
    try:
        done = subprocess.run(command, capture_output=True, check=True, timeout=_LOOK_LIMIT_S, env=variables)
        return Installation.model_validate_json(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError):
        return None


def with_inputs(
    cases: Sequence[SuiteCase],
    environments: Mapping[str, Environment],
    installed: Mapping[str, Installation],
    *,
    local_files_only: bool,
) -> list[SuiteCase]:
    """Return the cases with digests of what they name: the model, the files of their options, the interpreter.

    What this machine does not have (another machine's model or environment) has a digest that no other run gives: its
    cases are run again. `installed` is what some of the environments have, as far as it was looked for.
    """
    models = {(case.case.model, case.case.hf) for case in cases}
    contents = {named: _model_digest(*named, local_files_only) for named in models}
    installations = {name: installed.get(name) or installed_in(place) for name, place in environments.items()}
    places: dict[str | None, str] = {
        name: place.digest if place else _unknown() for name, place in installations.items()
    }
    places[None] = installed_digest()

    def changed(case: SuiteCase) -> SuiteCase:
        model, files = contents[case.case.model, case.case.hf], _files_of_options(case)
        told = [model, files, places.get(case.environment) or _unknown()]
        return case.model_copy(update={"model_digest": model, "inputs": json_digest(told)})

    return [changed(case) for case in cases]


def _model_digest(model: str, hf: str | None, local_files_only: bool) -> str:
    """Return a digest of all that lies in a model's folder: weights, config, tokenizer, how it generates."""
    try:
        folder = resolve(model, local_files_only=local_files_only, hf=hf)
        origin = resolve(hf, local_files_only=local_files_only) if hf else None
        return json_digest([folder_digest(folder), origin and folder_digest(origin)])
    except (HarnessError, OSError):
        return _unknown()


def _files_of_options(case: SuiteCase) -> list[tuple[str, str]]:
    """Return digests of the files and folders that options of the engine name, alone or in a list."""
    digests = []
    for value in case.case.engine_options.values():
        for text in dict.fromkeys([str(value), *re.split(r"[,=;]", str(value))]):
            try:
                if text and Path(text).exists():
                    digests.append((text, folder_digest(Path(text))))
            except (OSError, ValueError):
                digests.append((text, _unknown()))
    return digests


def _unknown() -> str:
    return uuid.uuid4().hex


if __name__ == "__main__":
    sys.stdout.write(installation().model_dump_json())
