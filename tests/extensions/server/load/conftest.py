"""The servers of the endpoint's tests."""

from ..check.conftest import folder, plan, server, spoiling

__all__ = ["folder", "plan", "server", "spoiling"]
