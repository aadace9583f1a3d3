"""Packages that a part of the harness needs and that may be missing."""

from importlib.util import find_spec

from harness.errors import Code, HarnessError


def require_hypothesis(what: str, where: str) -> None:
    """Refuse to go on without Hypothesis; `what` needs it, at `where`.

    Raises:
        HarnessError: NO_HYPOTHESIS.
    """
    if find_spec("hypothesis") is None:
        hint = "pip install -e '.[test]' in the harness's checkout"
        raise HarnessError(Code.NO_HYPOTHESIS, f"{what} needs Hypothesis", where=where, hint=hint)
