"""The harness from Python: one call for a notebook, a script, or a test (docs/python-api.md).

The functions resolve their arguments into the same plans as the command line, and run the same jobs.
"""

from harness.api.calls import check, diff, golden, profile, weights
from harness.api.reports import CheckFailedError, CheckReport, ProfileReport
from harness.formats.values import read_values as tensor

__all__ = [
    "CheckFailedError",
    "CheckReport",
    "ProfileReport",
    "check",
    "diff",
    "golden",
    "profile",
    "tensor",
    "weights",
]
