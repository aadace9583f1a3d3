"""What a profile's figures depend on besides the engine: written into every trace, and compared before any gate."""

from __future__ import annotations

import platform
import subprocess

from harness.oracle.environment import environment
from harness.version import __version__


def describe_environment() -> dict[str, str]:
    """Return versions, threads, machine and revision, as text."""
    found = {name: str(value) for name, value in environment().items()}
    found |= {"python": platform.python_version(), "machine": platform.machine(), "harness": __version__}
    return found | {"revision": _revision()}


def _revision() -> str:
    """Return the commit of the working folder, where it is a checkout: that of the engine under test, as a rule."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return ran.stdout.strip()
