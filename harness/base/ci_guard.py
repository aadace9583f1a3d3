"""Continuous integration checks expectations and never updates them: nobody would review the change there."""

import os

from harness.errors import Code, HarnessError


def refuse_update(option: str) -> None:
    """Refuse an option that rewrites expectations where the environment variable `CI` is set.

    Raises:
        HarnessError: UPDATE_REFUSED.
    """
    value = os.environ.get("CI", "")
    if value.lower() not in ("", "0", "false"):
        raise HarnessError(
            Code.UPDATE_REFUSED,
            f"{option} is refused where CI is set",
            where="environment variable CI",
            actual=value,
            hint="update on your machine and commit the change",
        )
