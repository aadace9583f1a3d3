"""The servers of the tests of `check`."""

from ..check.conftest import folder, plan, server, spoiling

__all__ = ["folder", "plan", "server", "spoiling"]
