"""Versions and engines of an interpreter: a check's numbers depend on them, so they must be equal on all machines."""

import platform
import sys
from importlib.metadata import PackageNotFoundError, distributions, version
from importlib.util import find_spec
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from harness.base.files import json_digest
from harness.engines.adapter import engine_module, engine_names
from harness.errors import HarnessError
from harness.formats.checkpoint.digest import folder_digest
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
        return [name for name, found in self.versions.items() if found == _NOT_INSTALLED]


def installation() -> Installation:
    """Return what this interpreter has."""
    return Installation(versions=fingerprint(), engines=engine_names(), digest=installed_digest())


def installed_digest() -> str:
    """Return a digest of this interpreter, of all packages in it with their versions, and of the engines' code.

    All packages, since an adapter does not say which of them its engine is; the code, since a package that is installed
    in editable form keeps its version. Nothing is imported for it.
    """
    packages = sorted(
        {(distribution.metadata["Name"] or "", distribution.version or "") for distribution in distributions()}
    )
    engines = {name: _code_digest(name) for name in engine_names()}
    told = [sys.executable, sys.version, packages, engines]
    return json_digest(told)


def _code_digest(engine: str) -> str:
    """Return a digest of the package that opens an engine, or why there is none."""
    try:
        spec = find_spec(engine_module(engine).partition(".")[0])
        if spec is None or spec.origin is None:
            return "no file"
        file = Path(spec.origin)
        return folder_digest(file.parent if file.name == "__init__.py" else file, (".py", ".so"))
    except (HarnessError, ImportError, OSError, ValueError) as error:
        return str(error)


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


if __name__ == "__main__":
    sys.stdout.write(installation().model_dump_json())
