"""The versions that a check's numbers depend on: all machines of a suite have the same ones."""

import json
import platform
import sys
from importlib.metadata import PackageNotFoundError, version

from harness.version import __version__

_PACKAGES = ("torch", "transformers", "safetensors")


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
        return "not installed"


if __name__ == "__main__":
    sys.stdout.write(json.dumps(fingerprint()))
