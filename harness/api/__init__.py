"""The harness from Python: one call for a notebook, a script, or a test (docs/python-api.md).

The functions resolve their arguments into the same plans as the command line, and run the same jobs.
"""

from harness.api.audit import AuditReport, audit
from harness.api.calls import check, diff, golden, profile
from harness.api.chats import FunctionReport, structured_output, tool_calls
from harness.api.monitor import RolloutMonitor
from harness.api.reports import CheckFailedError, CheckReport, ProfileReport
from harness.api.training import GapError, RolloutReport, rollout, weights
from harness.formats.inspect.values import read_values as tensor

__all__ = [
    "AuditReport",
    "CheckFailedError",
    "CheckReport",
    "FunctionReport",
    "GapError",
    "ProfileReport",
    "RolloutMonitor",
    "RolloutReport",
    "audit",
    "check",
    "diff",
    "golden",
    "profile",
    "rollout",
    "structured_output",
    "tensor",
    "tool_calls",
    "weights",
]
