"""`harness suite bisect`: the commit that broke an engine."""

from pathlib import Path
from typing import Annotated

import typer

from harness.cli import forms
from harness.errors import ExitStatus


def bisect(
    good: Annotated[str, typer.Option(metavar="REV", help="Revision at which the case passes.")],
    bad: Annotated[str, typer.Option(metavar="REV", help="Revision at which it fails.")],
    case: Annotated[Path, typer.Option(metavar="FILE", help="Case (TOML) that judges.")],
    repo: Annotated[
        Path, typer.Option(metavar="DIR", help="Git repository of the engine; it is not touched.")
    ] = Path(),
    build: Annotated[
        str | None, typer.Option(metavar="COMMAND", help="Builds the engine, run in a checkout of each revision.")
    ] = None,
    import_from: Annotated[
        str, typer.Option(metavar="FOLDER", help="Folder of the checkout that the engine is imported from.")
    ] = ".",
    time_limit: Annotated[float, typer.Option(metavar="SECONDS", help="Longest time for one check.")] = 3600.0,
    format: Annotated[str, forms.BISECTION.option()] = "human",
) -> int:
    """Find the commit that broke an engine.

    Git bisects; each revision is built, and judged by the harness that runs now on a golden that is made once. A
    revision that cannot be built or checked is skipped.
    """
    from harness.campaigns.suite.bisect import Bisector
    from harness.cli.progress import progress_bar
    from harness.formats.case import load_case

    load_case(case)
    with progress_bar() as report:
        bisector = Bisector(
            case=case, build=build, import_from=import_from, limit_s=time_limit, report=lambda what: report(what, 0, 1)
        )
        found = bisector.run(repo, good=good, bad=bad)
    forms.BISECTION.show(found, format)
    return ExitStatus.PASS
