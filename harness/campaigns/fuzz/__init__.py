"""Schedules that are searched: workloads for a live engine, each judged as a check judges (docs/fuzz.md).

Raises:
    HarnessError: Hypothesis, which draws them, is not installed.
"""

from importlib.util import find_spec

from harness.errors import Code, HarnessError

if find_spec("hypothesis") is None:
    raise HarnessError(
        Code.NO_HYPOTHESIS,
        "searching workloads needs Hypothesis",
        where="harness.campaigns.fuzz",
        hint="pip install -e '.[test]' in the harness's checkout",
    )
