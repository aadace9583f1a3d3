"""`harness suite diff`: what changed from one run of a suite to another."""

from pathlib import Path
from typing import Annotated

import typer

from harness.cli import forms
from harness.errors import ExitStatus


def diff(
    old: Annotated[Path, typer.Argument(metavar="OLD", help="suite.json of before, or its folder.")],
    new: Annotated[Path, typer.Argument(metavar="NEW", help="suite.json of now, or its folder.")],
    format: Annotated[str, forms.SUITE_DIFF.option()] = "human",
) -> int:
    """Say what changed from one run of a suite to another.

    New failures, new passes, figures that moved beyond their noise, and slower cases. The exit status is 1 where a case
    fails that passed before or was not there, and 4 where cases have become slower and nothing else.
    """
    from harness.campaigns.suite.diff import diff_suites
    from harness.report.suite.json import load_suite

    found = diff_suites(load_suite(old), load_suite(new))
    forms.SUITE_DIFF.show(found, format)
    if found.new_failures or found.added_failures:
        return ExitStatus.MISMATCH
    return ExitStatus.REGRESSION if found.slower else ExitStatus.PASS
