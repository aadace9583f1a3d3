"""The results of a suite's cases: each is written down once, with the case's own report beside it."""

import base64
import hashlib
import re
import zlib
from pathlib import Path

from harness.base.files import write_text
from harness.extensions.suite.journal import Journal
from harness.extensions.suite.result import CaseResult, CaseVerdict
from harness.extensions.suite.task import SuiteCase, TaskResult
from harness.report.page.html import REPORT_NAME


class Ledger:
    """The results so far, by name of the case: those of the journal, and those of this run.

    The folder keeps the cases' own reports.
    """

    def __init__(self, journal: Journal, folder: Path) -> None:
        self.journal = journal
        self.results: dict[str, CaseResult] = {}
        self.num_resumed = 0
        self._folder = folder

    @property
    def num_ended(self) -> int:
        """Cases that have ended in this run."""
        return len(self.results) - self.num_resumed

    @property
    def num_failed(self) -> int:
        """Cases that did not pass."""
        return sum(result.verdict is not CaseVerdict.PASS for result in self.results.values())

    def resume(self, case: SuiteCase) -> bool:
        """Take over the result of a case that has ended before; return whether there is one."""
        known = self.journal.result_of(case)
        if known is not None:
            self.results[case.name] = known
            self.num_resumed += 1
        return known is not None

    def end(
        self,
        case: SuiteCase,
        verdict: CaseVerdict,
        answer: TaskResult,
        *,
        node: str | None,
        losses: tuple[str, ...],
        handed_over_s: float | None,
    ) -> None:
        """Write down how a case ended; it does so once.

        `losses` say why attempts came to nothing, `handed_over_s` how long ago the last one was handed over.
        """
        assert case.name not in self.results
        result = CaseResult(
            name=case.name,
            verdict=verdict,
            labels=case.labels,
            code=answer.code,
            reason=answer.reason,
            first_divergence=answer.first_divergence,
            figures=answer.figures,
            bits=answer.bits,
            node=node,
            seconds=answer.seconds or None,
            handed_over_s=handed_over_s if answer.seconds else None,
            attempts=len(losses) + (verdict is not CaseVerdict.LOST),
            losses=losses,
            report=self._keep(case, answer),
        )
        self.journal.add_case(case, result)
        self.results[case.name] = result

    def _keep(self, case: SuiteCase, answer: TaskResult) -> str | None:
        """Write a case's own report; return its place in the suite's folder."""
        place = Path("cases") / _folder_name(case.name)
        for name, packed in answer.files.items():
            write_text(self._folder / place / name, zlib.decompress(base64.b64decode(packed)).decode())
        return str(place / REPORT_NAME) if REPORT_NAME in answer.files else None


def _folder_name(case: str) -> str:
    """Return a name for a case's folder: readable, and of that case alone."""
    readable = re.sub(r"[^A-Za-z0-9._-]+", "-", case).strip("-.")[:80]
    return f"{readable}-{hashlib.sha256(case.encode()).hexdigest()[:8]}"
