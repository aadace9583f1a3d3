"""Case files and cases as pytest sees them: a file with one item, named `check`; and the folders of their profiles."""

import os
import tomllib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from harness.base.files import scratch_folder, writing
from harness.errors import Code, HarnessError
from harness.pytest_plugin.failure import GateFailedError, failure_text

if TYPE_CHECKING:
    from harness.formats.case import Case, ProfileSection
    from harness.plan import Plan
    from harness.results.check import CheckResult


_FOLDER = "captures"


def captures_folder(path: Path, config: pytest.Config) -> Path | None:
    """Return the folder of the captures of a case file; None if the session keeps none."""
    chosen, junit = config.getoption("captures"), config.getoption("xmlpath", None)
    if not chosen and not junit:
        return None
    # As pytest itself reads the path of the JUnit file.
    junit_file = os.path.expandvars(os.path.expanduser(junit or ""))  # noqa: PTH111  # a variable may hold a `~`
    folder = Path(chosen) if chosen else Path(junit_file).parent / _FOLDER
    root = config.rootpath
    name = path.relative_to(root) if path.is_relative_to(root) else Path(path.name)
    return folder.absolute() / name.with_suffix("")


@contextmanager
def making(kept: Path | None) -> Iterator[Path]:
    """Yield an empty folder to fill; it is gone afterwards, unless `settle` has moved it.

    Raises:
        HarnessError: CANNOT_WRITE.
    """
    if kept is not None:
        with writing(kept):
            kept.parent.mkdir(parents=True, exist_ok=True)
    with scratch_folder(".captures-", kept and kept.parent) as parent:
        folder = parent / "new"
        folder.mkdir()
        yield folder


def settle(folder: Path, kept: Path | None) -> Path:
    """Move a folder of `making` to its final place, instead of an older one, and return the place.

    Raises:
        HarnessError: CANNOT_WRITE.
    """
    if kept is None:
        return folder
    with writing(kept):
        if kept.exists():
            kept.rename(folder.with_name("old"))
        return folder.rename(kept)


SECTIONS = GOLDEN_UPDATE, BASELINE_UPDATE, NOT_COMPARED = "golden update", "baseline update", "not compared"
"""Keys of the report sections: the effects of --golden-update and --baseline-update, and profiles without baseline."""

_MARKS_OF_A_CASE = {"schema_version", "requests"}
"""Keys that every case has."""


class CaseNotCollectedWarning(pytest.PytestWarning):
    """A file looks like a case, and is not checked."""


class CaseFile(pytest.File):
    """A TOML file with one case."""

    def __init__(self, *, is_declared: bool, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.is_declared = is_declared
        """Whether the configuration names this file as a case, instead of the name of its folder."""

    def collect(self) -> Iterable["CaseItem"]:
        """Yield the case; nothing for a file in a folder `cases` that is not a case."""
        from harness.formats.case import Case, load_case

        if not self.is_declared and not _looks_like_a_case(self.path):
            shared = Case.model_fields.keys() & _keys(self.path)
            if shared:
                what = f"{self.path} has keys of a case ({', '.join(sorted(shared))}), and is not collected"
                self.warn(CaseNotCollectedWarning(f"{what}: it has neither {' nor '.join(sorted(_MARKS_OF_A_CASE))}"))
            return
        try:
            case = load_case(self.path)
        except HarnessError as error:
            raise self.CollectError(str(error)) from error
        yield CaseItem.from_parent(self, name="check", case=case)


def _looks_like_a_case(path: Path) -> bool:
    """Whether the file has a key that every case has, or contains the key's name and is no valid TOML."""
    try:
        content = path.read_bytes()
    except OSError:
        return True  # loading it reports the error
    try:
        return not _MARKS_OF_A_CASE.isdisjoint(tomllib.loads(content.decode()))
    except (UnicodeDecodeError, tomllib.TOMLDecodeError):
        text = content.replace(b"\0", b"")  # UTF-16 is no TOML, and an editor may have written it
        return any(mark.encode() in text for mark in _MARKS_OF_A_CASE)


def has_marks_of_a_case(path: Path) -> bool:
    """Whether a TOML file has all keys that every case has."""
    return _keys(path) >= _MARKS_OF_A_CASE


def _keys(path: Path) -> set[str]:
    """Return the keys of a TOML file; none if it is no such file."""
    try:
        return set(tomllib.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return set()


class CaseItem(pytest.Item):
    """A case: the golden against its sketch, the engine against the golden, and its profile against its baseline."""

    def __init__(self, *, case: "Case", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.case = case
        self.extra_keyword_matches |= {case.engine, case.dtype, case.device}

    def runtest(self) -> None:
        """Run the case."""
        from harness.api import CheckReport
        from harness.judge.jobs.check import run_check
        from harness.plan import plan_case
        from harness.report.check.json import check_properties

        try:
            plan = plan_case(self.case)
        except HarnessError as error:
            if error.code is Code.NO_DEVICE:
                pytest.skip(f"{self.where}: {error.code}: {error.what} ({self.case.device})")
            raise
        if plan.case.truth == "auto":
            plan = plan.changed(truth="float64")  # sketches are of it, and one golden serves both
        self._check_sketch(plan)
        result = run_check(plan)
        self.user_properties += check_properties(result)
        CheckReport.of(result).assert_ok()
        if plan.case.profile is not None:
            self._profile(plan, plan.case.profile, result)

    def _profile(self, plan: "Plan", section: "ProfileSection", result: "CheckResult") -> None:
        """Profile the engine, keep the captures, and compare them with the case's baseline."""
        from harness.profiling.profile import keep_profile, planned_profile
        from harness.report.check.json import profile_properties

        kept = captures_folder(self.path, self.config)
        with making(kept) as folder:
            profile = keep_profile(planned_profile(plan), folder, check=result)
            self.user_properties += profile_properties(profile, kept)
            folder = settle(folder, kept)
            if section.baseline is not None:
                self._gate(folder, self.path.parent / section.baseline)
            else:
                text = f"{self.where}: its profile was compared with nothing: [profile] names no baseline"
                self.add_report_section("call", NOT_COMPARED, text)

    def _gate(self, profile: Path, baseline: Path) -> None:
        from harness.profiling.gate.baseline import run_gate
        from harness.report.gate import gate_text
        from harness.results.gate import GateVerdict

        accept = bool(self.config.getoption("baseline_update"))
        command = f"pytest {self.where} --baseline-update"
        result = run_gate(profile, baseline, accept=accept, command=command)
        if accept:
            self.add_report_section("call", BASELINE_UPDATE, f"{self.where}: {gate_text(result)}")
        elif result.verdict is GateVerdict.REGRESSION:
            raise GateFailedError(result, command)

    def _check_sketch(self, plan: "Plan") -> None:
        from harness.judge.jobs.opened import run_golden
        from harness.oracle import sketch

        golden = run_golden(plan, keeps_values=False)
        if self.config.getoption("golden_update"):
            self.add_report_section("call", GOLDEN_UPDATE, f"{self.where}: {sketch.update(self.path, golden)}")
        else:
            sketch.check(self.path, golden, command=f"pytest {self.where} --golden-update")

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """Return the report of the check or the message of the error; a traceback only for a bug of the harness."""
        failure = failure_text(excinfo.value, self.config)
        if failure:
            return failure
        excinfo.traceback = excinfo.traceback.cut(path=__file__)  # begins with pytest's own frames
        chosen = self.config.getoption("tbstyle", "auto")
        return super().repr_failure(excinfo, style or ("short" if chosen == "auto" else chosen))

    def reportinfo(self) -> tuple[Path, int | None, str]:
        """Return what the headline of a failure says."""
        return self.path, None, self.where

    @property
    def where(self) -> str:
        """Path of the case file as on the command line."""
        return self.nodeid.removesuffix(f"::{self.name}")
