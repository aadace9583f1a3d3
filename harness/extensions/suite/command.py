"""`harness suite`: many checks as one, on this machine or on a cluster, and what changed since."""

import os
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext, redirect_stdout
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
import typer.core

from harness.command import options as opt
from harness.command.forms import Forms
from harness.command.progress import progress_bar
from harness.errors import Code, ExitStatus, HarnessError
from harness.extensions.suite.result import CaseVerdict

if TYPE_CHECKING:
    from harness.extensions.suite.journal import Journal
    from harness.extensions.suite.matrix import Matrix
    from harness.extensions.suite.pool import Pool
    from harness.extensions.suite.preflight import Installation
    from harness.extensions.suite.result import SuiteResult
    from harness.extensions.suite.task import SuiteCase

from typing import Any

import typer
import typer.core

from harness.command.output import refuse_existing
from harness.command.strict import StrictCommand

SUITE = Forms(
    human="harness.extensions.suite.report:suite_text",
    markdown="harness.extensions.suite.report:suite_markdown",
    json="harness.extensions.suite.report:suite_json",
)

STATUS = {
    CaseVerdict.PASS: ExitStatus.PASS,
    CaseVerdict.MISMATCH: ExitStatus.MISMATCH,
    CaseVerdict.ERROR: ExitStatus.BAD_INPUT,
    CaseVerdict.LOST: ExitStatus.NOTHING_CHECKED,
}
RAY_LOG_NAME = "ray.log"
"""File in a suite's folder with what Ray prints."""


def run(
    cases: Annotated[
        list[Path] | None, typer.Argument(metavar="CASES...", help="Case files (TOML), or folders of case files.")
    ] = None,
    matrix: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Matrix file: models, engines, dtypes, schedules and prompts; every case runs with each combination.",
        ),
    ] = None,
    jobs: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Number of processes on this machine. [default: one per CPU]")
    ] = None,
    ray: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", help="Ray cluster to run on: HOST:PORT, or auto for a running local one."),
    ] = None,
    store: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Folder or fsspec URL (s3://, gs://) where nodes share goldens. [default: in --out]",
        ),
    ] = None,
    store_patience: Annotated[
        float,
        typer.Option(metavar="SECONDS", min=0, help="Time in seconds to retry a failing store before a case is lost."),
    ] = 60.0,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="New folder for the journal, suite.json, suite.html and junit.xml."),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the suite in --out; finished cases do not run again.")
    ] = False,
    label: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="Label of this run in `harness suite history`, for example a commit."),
    ] = None,
    local_files_only: opt.LocalFilesOnly = False,
    format: Annotated[str, SUITE.option()] = "human",
) -> int:
    """Run all cases, here or on a Ray cluster.

    Goldens are made first, once for all cases. The verdict on a case is pass, mismatch, error (the case could not be
    checked), or lost (a worker, a node or the store failed three times).
    """
    _refuse_contradictions(cases, matrix, jobs, ray, store, out, resume)
    begun_at = datetime.now(UTC).isoformat(timespec="seconds")
    from harness.extensions.suite.journal import Ledger
    from harness.extensions.suite.matrix import Matrix, expand, load_matrix
    from harness.extensions.suite.preflight import with_inputs
    from harness.extensions.suite.run import Driver
    from harness.extensions.suite.task import case_tasks

    chosen = Matrix() if matrix is None else load_matrix(matrix)
    planned = expand(cases or [], chosen, where=matrix)
    installed = _preflight(planned, chosen, is_local=ray is None, local_files_only=local_files_only)
    planned = with_inputs(planned, chosen.environments, installed, local_files_only=local_files_only)
    with _folder(out, resume) as folder, progress_bar() as report:
        place = store or (None if ray is None else str((folder / "store").absolute()))
        with _journal(folder, resume) as journal, _pool(planned, chosen, jobs, ray, place, folder) as pool:
            tasks = case_tasks(planned, chosen.environments, store=place, store_patience_s=store_patience)
            ended = Driver(tasks, pool, Ledger(journal, folder), progress=report).run()
        result = replace(ended, label=label, begun_at=begun_at)
        if out is not None:
            _keep(result, folder)
    SUITE.show(result, format)
    return STATUS[result.verdict]


def _refuse_contradictions(
    cases: list[Path] | None,
    matrix: Path | None,
    jobs: int | None,
    ray: str | None,
    store: str | None,
    out: Path | None,
    resume: bool,
) -> None:
    problem = None
    if not cases and matrix is None:
        problem = ("there is nothing to run", "CASES", "name case files or a folder of them")
    elif jobs is not None and ray is not None:
        problem = ("a suite runs on this machine or on a cluster", "--jobs", "leave --jobs or --ray out")
    elif store is not None and ray is None:
        problem = ("processes of one machine share its cache", "--store", "leave --store out, or add --ray ADDRESS")
    elif resume and out is None:
        problem = ("a suite goes on in the folder that it was begun in", "--resume", "add --out DIR")
    if problem is not None:
        what, where, hint = problem
        raise HarnessError(Code.BAD_OPTION, what, where=where, hint=hint)


def _preflight(
    cases: "list[SuiteCase]", matrix: "Matrix", *, is_local: bool, local_files_only: bool
) -> "dict[str, Installation]":
    """Refuse what can be known to be wrong before anything is started; return what the environments here have."""
    from harness.extensions.suite.preflight import check_engines, check_environments, check_models

    check_engines(cases)
    if not is_local:
        return {}
    check_models(cases, local_files_only=local_files_only)
    installed = check_environments(matrix.environments)
    check_engines(cases, installed)
    return installed


@contextmanager
def _folder(out: Path | None, resume: bool) -> Iterator[Path]:
    """Yield the suite's folder: a new one, the one that is resumed, or one that is gone afterwards."""
    from harness.base.files import scratch_folder
    from harness.judge.jobs.opened import new_output_dir

    if out is None:
        with scratch_folder("harness-") as folder:
            yield folder
        return
    with nullcontext() if resume else new_output_dir(out):
        yield out


@contextmanager
def _journal(folder: Path, resume: bool) -> "Iterator[Journal]":
    from harness.extensions.suite.journal import Journal

    journal = Journal.resume(folder) if resume else Journal.begin(folder)
    try:
        yield journal
    finally:
        journal.close()


@contextmanager
def _pool(
    cases: "list[SuiteCase]", matrix: "Matrix", jobs: int | None, ray: str | None, store: str | None, folder: Path
) -> "Iterator[Pool]":
    if ray is None:
        from harness.extensions.suite.pool import LocalPool

        with closing(LocalPool(jobs or os.cpu_count() or 1, num_gpus=_num_gpus(cases))) as here:
            yield here
        return
    from harness.extensions.suite.ray_pool import RayPool

    assert store is not None
    # Of a lost node Ray prints pages to standard output, which carries our result.
    with (
        (folder / RAY_LOG_NAME).open("a") as log,
        redirect_stdout(log),
        closing(RayPool(ray, cases, matrix.environments, store)) as there,
    ):
        yield there


def _num_gpus(cases: "list[SuiteCase]") -> int:
    """Count this machine's GPUs; torch is imported for it only where a case asks for one."""
    if not any(case.resources.gpus for case in cases):
        return 0
    import torch

    return torch.cuda.device_count()


def _keep(result: "SuiteResult", folder: Path) -> None:
    import json

    from harness.base.files import write_text
    from harness.extensions.suite.report import JUNIT_NAME, PAGE_NAME, SUITE_NAME, suite_html, suite_json, suite_junit

    write_text(folder / SUITE_NAME, json.dumps(suite_json(result), allow_nan=False, indent=1))
    write_text(folder / PAGE_NAME, suite_html(result))
    write_text(folder / JUNIT_NAME, suite_junit(result))


SUITE_DIFF = Forms(
    human="harness.extensions.suite.history_report:diff_text", json="harness.extensions.suite.history_report:diff_json"
)
SUITE_HISTORY = Forms(
    human="harness.extensions.suite.history_report:history_text",
    json="harness.extensions.suite.history_report:history_json",
    is_fenced=True,
)

_RUN = "run"


class _Group(typer.core.TyperGroup):
    """Takes `harness suite CASES...` for `harness suite run CASES...`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] != "--help":
            args = [_RUN, *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    name="suite",
    cls=_Group,
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Run many checks, on this machine or on a Ray cluster: `harness suite CASES...` (docs/scale.md).",
)
app.command(_RUN, cls=StrictCommand)(run)


@app.command(cls=StrictCommand)
def diff(
    old: Annotated[Path, typer.Argument(metavar="OLD", help="suite.json of the earlier run, or its folder.")],
    new: Annotated[Path, typer.Argument(metavar="NEW", help="suite.json of the later run, or its folder.")],
    format: Annotated[str, SUITE_DIFF.option()] = "human",
) -> int:
    """Compare two runs of a suite.

    Shows new failures, new passes, metrics that changed by more than their noise, and slower cases. The exit status is
    1 if a case fails that passed before or is new, and 4 if cases became slower and nothing else changed.
    """
    from harness.extensions.suite.history import diff_suites
    from harness.extensions.suite.report import load_suite

    changes = diff_suites(load_suite(old), load_suite(new))
    SUITE_DIFF.show(changes, format)
    if changes.new_failures or changes.added_failures:
        return ExitStatus.MISMATCH
    return ExitStatus.REGRESSION if changes.slower else ExitStatus.PASS


@app.command(cls=StrictCommand)
def history(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUNS...", help="Output folders of `harness suite --out`, or folders that contain them."
        ),
    ],
    out: Annotated[Path | None, typer.Option(metavar="HTML", help="New HTML file.")] = None,
    format: Annotated[str, SUITE_HISTORY.option()] = "human",
) -> int:
    """Show the history of a suite.

    Shows when cases began to fail, the runs in which the results of the engine changed, and the cost of each check. The
    exit status is 1 if a case of the latest run does not pass.
    """
    from harness.base.files import write_text
    from harness.extensions.suite.history import read_history
    from harness.extensions.suite.report import history_html

    refuse_existing(out)
    suites = read_history(runs)
    if out is not None:
        write_text(out, history_html(suites))
    SUITE_HISTORY.show(suites, format)
    is_failing = any(trend.first_failure is not None for trend in suites.trends)
    return ExitStatus.MISMATCH if is_failing else ExitStatus.PASS
