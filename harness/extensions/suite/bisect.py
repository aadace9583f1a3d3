"""Which commit broke an engine: git bisect, with a check of one case as the judge.

The harness that judges is the one that runs, at every revision, and so is the golden, which is made once. Of the case's
schedules only the one is run that failed first at the bad revision, and a check ends at the first operation that is
wrong.
"""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.errors import Code, HarnessError
from harness.extensions.suite.checkout import Checkout, checkout
from harness.extensions.suite.result import Bisection, CaseVerdict, Revision

_CHECK = [sys.executable, "-c", "from harness.cli import main; main()", "check", "--format", "json"]
_FIRST_BAD = "is the first bad commit"
_ALL_SKIPPED = 2
"""Exit status of git bisect where only revisions are left that cannot be tested."""


@dataclass(slots=True, kw_only=True)
class Bisector:
    """Looks for the first commit at which a case fails."""

    case: Path
    build: str | None = None
    """Shell command, run in the checkout of each revision."""
    import_from: str = "."
    """Folder of the checkout that the engine is imported from."""
    limit_s: float = 3600.0
    report: Callable[[str], None] = lambda _sentence: None
    _checkout: Checkout = field(init=False)
    _schedule: str | None = None
    _seen: list[Revision] = field(default_factory=list)

    def run(self, repository: Path, *, good: str, bad: str) -> Bisection:
        """Return the first bad commit.

        Raises:
            HarnessError: BAD_BISECTION: the case does not pass at `good` or does not fail at `bad`, one of the two does
                not build, or too many revisions between them do not.
        """
        with checkout(repository) as self._checkout:
            first, last = self._checkout.commit(good), self._checkout.commit(bad)
            broken = self._at(last)
            if broken.verdict not in ("mismatch", "error"):
                raise self._refusal("the case does not fail at the bad revision", bad, "mismatch", broken)
            self._schedule = broken.schedule
            sound = self._at(first)
            if sound.verdict != "pass":
                raise self._refusal("the case does not pass at the good revision", good, "pass", sound)
            return Bisection(first_bad=self._search(first, last, broken), revisions=tuple(self._seen))

    def _search(self, good: str, bad: str, broken: Revision) -> Revision:
        self._checkout.git("bisect", "start", "--no-checkout", bad, good)
        said = ""
        while _FIRST_BAD not in said:
            commit = self._checkout.git("rev-parse", "BISECT_HEAD")
            found = self._at(commit)
            said = self._tell(_term(found, broken), commit)
        first = said.partition(" ")[0]
        return next(item for item in self._seen if item.commit == first)

    def _tell(self, term: str, commit: str) -> str:
        """Tell git what a revision is; return what it says."""
        command = ["git", "-C", str(self._checkout.folder), "bisect", term, commit]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return done.stdout
        if done.returncode != _ALL_SKIPPED:
            what = f"git cannot go on with the bisection: {' '.join(done.stderr.split())}"
            raise HarnessError(Code.BAD_BISECTION, what, where=commit)
        candidates = [line for line in done.stdout.splitlines() if re.fullmatch("[0-9a-f]{40,64}", line)]
        raise HarnessError(
            Code.BAD_BISECTION,
            "the first bad commit is one of several, since some of them cannot be tested",
            actual="; ".join(map(self._described, candidates)),
            hint="give a --build that works at these revisions",
        )

    def _described(self, commit: str) -> str:
        seen = next((item for item in self._seen if item.commit == commit), None)
        verdict = f" ({seen.verdict}: {seen.what})" if seen else ""
        return f"{commit[:12]} {self._checkout.subject(commit)}{verdict}"

    def _at(self, commit: str) -> Revision:
        """Build and check one revision."""
        subject = self._checkout.subject(commit)
        self.report(f"{commit[:12]} {subject}")
        begin = time.perf_counter()
        self._checkout.at(commit)
        problem = None if self.build is None else self._checkout.build(self.build)
        told = {"verdict": "unbuilt", "what": problem} if problem is not None else self._check()
        found = Revision(commit=commit, subject=subject, seconds=time.perf_counter() - begin, **told)
        self._seen.append(found)
        return found

    def _check(self) -> dict[str, Any]:
        path = os.pathsep.join([str(self._checkout.importable(self.import_from)), *filter(None, sys.path)])
        command = [*_CHECK, "--case", str(self.case.absolute()), "--stop-early"]
        command += ["--schedule", self._schedule] if self._schedule else []
        try:
            done = subprocess.run(
                command,
                cwd=self._checkout.folder.parent,
                env={**os.environ, "PYTHONPATH": path},
                capture_output=True,
                timeout=self.limit_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            what = f"not done in {self.limit_s:g} s"
            return {"verdict": "error", "code": Code.CASE_TIMED_OUT.value, "what": what}
        return _told(done)

    def _refusal(self, what: str, revision: str, expected: str, found: Revision) -> HarnessError:
        actual = f"{found.verdict}: {found.what}" if found.what else found.verdict
        return HarnessError(Code.BAD_BISECTION, what, where=revision, expected=expected, actual=actual)


def _told(done: "subprocess.CompletedProcess[bytes]") -> dict[str, Any]:
    """Return what a check said."""
    try:
        document = json.loads(done.stdout)
    except ValueError:
        how = f"exit status {done.returncode}" if done.returncode >= 0 else f"signal {-done.returncode}"
        return {"verdict": "error", "code": Code.CASE_CRASHED.value, "what": f"the check ended with {how}"}
    if "error" in document:
        return {"verdict": "error", "code": document["error"]["code"], "what": document["error"]["message"]}
    if document["verdict"] == CaseVerdict.PASS:
        return {"verdict": "pass", "what": None}
    place, finding = document["first_divergence"], next(iter(document["findings"]), None)
    told = place or finding or {"schedule": None, "code": Code.NOTHING_CHECKED.value}
    what = f"{place['tap']}, request {place['request']}, position {place['position']}" if place else None
    what = what or (finding["message"] if finding else "nothing was checked")
    verdict = "mismatch" if document["verdict"] == CaseVerdict.MISMATCH else "error"
    return {"verdict": verdict, "code": told["code"], "schedule": told["schedule"], "what": what}


def _term(found: Revision, broken: Revision) -> str:
    """Return git's hash of a revision: an error is bad only if it is the one that is looked for."""
    if found.verdict == "pass":
        return "good"
    is_bad = found.verdict == "mismatch" or (found.verdict == broken.verdict and found.code == broken.code)
    return "bad" if is_bad else "skip"
