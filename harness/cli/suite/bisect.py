"""`harness suite bisect`: the commit that broke an engine."""

from pathlib import Path
from typing import Annotated

import typer

from harness.cli import forms
from harness.errors import Code, ExitStatus, HarnessError


def bisect(
    case: Annotated[Path, typer.Option(metavar="FILE", help="Case (TOML) that judges.")],
    good: Annotated[str | None, typer.Option(metavar="REV", help="Revision at which the case passes.")] = None,
    bad: Annotated[str | None, typer.Option(metavar="REV", help="Revision at which it fails.")] = None,
    history: Annotated[
        list[Path] | None,
        typer.Option(metavar="RUNS", help="Runs of a suite that were labelled with revisions: what was good and bad."),
    ] = None,
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
    if history:
        from harness.campaigns.suite.history import read_history, revisions_around

        passed, failed = revisions_around(read_history(history), case.stem)
        good, bad = good or passed, bad or failed
    if good is None or bad is None:
        what, hint = "a bisection begins with a good and a bad revision", "name --good and --bad, or --history RUNS"
        raise HarnessError(Code.BAD_OPTION, what, where="--good" if good is None else "--bad", hint=hint)
    with progress_bar() as report:
        bisector = Bisector(
            case=case, build=build, import_from=import_from, limit_s=time_limit, report=lambda what: report(what, 0, 1)
        )
        found = bisector.run(repo, good=good, bad=bad)
    forms.BISECTION.show(found, format)
    return ExitStatus.PASS
