"""Versions and engines of an interpreter: a check's numbers depend on them, so they must be equal on all machines."""

import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from pydantic import BaseModel, ConfigDict

from harness.engines import engine_names
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

    @property
    def missing_packages(self) -> list[str]:
        """Return the packages without which it can check nothing."""
        return [name for name, found in self.versions.items() if found == _NOT_INSTALLED]


def installation() -> Installation:
    """Return what this interpreter has."""
    return Installation(versions=fingerprint(), engines=engine_names())


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
