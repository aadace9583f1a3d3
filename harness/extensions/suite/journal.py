"""The journal of a suite: one line for each thing that is done, on disk before anything rests on it.

`--resume` reads it. A line that was cut off in the middle, by a machine that went down, does not count: what it said is
done again. The ledger writes each case's result once, with the case's own report beside it.
"""

import base64
import fcntl
import hashlib
import json
import os
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from harness.base.files import json_digest, parse_json, write_text, writing
from harness.base.files_read import file_digest
from harness.errors import Code, HarnessError
from harness.extensions.suite.preflight import fingerprint
from harness.extensions.suite.result import CaseResult, CaseVerdict
from harness.extensions.suite.task import StoredGolden, SuiteCase, TaskResult
from harness.report.page.html import REPORT_NAME

JOURNAL_NAME = "journal.jsonl"
SCHEMA_VERSION = 2
_RESULT = TypeAdapter(CaseResult)


@dataclass(slots=True)
class Journal:
    """The finished cases of a suite, kept in a file."""

    path: Path
    results: dict[str, CaseResult] = field(default_factory=dict)
    """By name: cases that ended, each with its last result."""
    goldens: dict[str, tuple[StoredGolden, ...]] = field(default_factory=dict)
    """By digest of what they are of: goldens that were made."""
    _digests: dict[str, str] = field(default_factory=dict)
    _read: dict[str, str] = field(default_factory=dict)
    """By name of a case: the digest of the list of files that it rests on."""
    _files: dict[str, Mapping[str, str]] = field(default_factory=dict)
    """By digest: lists of files, each with a digest by the path."""
    _unchanged: dict[str, bool] = field(default_factory=dict)
    _descriptor: int = -1
    _is_synced: bool = True

    @classmethod
    def begin(cls, folder: Path) -> "Journal":
        """Begin a suite's journal in a folder that has none."""
        journal = cls(folder / JOURNAL_NAME)
        journal._open(os.O_CREAT | os.O_EXCL)
        journal._write({"record": "suite", "schema_version": SCHEMA_VERSION, "versions": fingerprint()})
        return journal

    @classmethod
    def resume(cls, folder: Path) -> "Journal":
        """Go on with the journal of a suite that was interrupted.

        Raises:
            HarnessError: BAD_SUITE_RESULT: there is none, it is no journal, it is of other versions, or its suite
                still runs.
        """
        journal = cls(folder / JOURNAL_NAME)
        records = _read(journal.path)
        _check_head(journal.path, records)
        journal._open(0)
        for record in _read(journal.path)[1:]:  # until it was ours alone, another process may have written
            journal._remember(record)
        return journal

    def result_of(self, case: SuiteCase) -> CaseResult | None:
        """Return what came of a case; None if it was lost, the name was another case's, or a file is another now."""
        result = self.results.get(case.name)
        if result is None or result.verdict is CaseVerdict.LOST or self._digests[case.name] != case.digest():
            return None
        return result if self._is_unchanged(self._read[case.name]) else None

    def _is_unchanged(self, read: str) -> bool:
        """Whether all files of a list are as they were; looked at once, since many cases rest on one list."""
        if read not in self._unchanged:
            files = self._files.get(read)
            is_same = files is not None and all(file_digest(file) == digest for file, digest in files.items())
            self._unchanged[read] = is_same
        return self._unchanged[read]

    def add_case(self, case: SuiteCase, result: CaseResult, files_read: Mapping[str, str]) -> None:
        """Write down how a case ended, and the files that it rests on: the list once for all cases that share it."""
        read = json_digest(files_read)
        if read not in self._files:
            self._write({"record": "files", "digest": read, "files": files_read})
            self._files[read] = files_read
        self._write({"record": "case", "digest": case.digest(), "read": read, "result": asdict(result)})
        self.results[case.name], self._digests[case.name], self._read[case.name] = result, case.digest(), read

    def add_golden(self, digest: str, stored: Sequence[StoredGolden], seconds: float) -> None:
        """Write down that a golden was made."""
        files = [golden.model_dump() for golden in stored]
        self._write({"record": "golden", "digest": digest, "stored": files, "seconds": seconds})
        self.goldens[digest] = tuple(stored)

    def sync(self) -> None:
        """See that what was written is on disk: a machine that goes down takes nothing of it."""
        if not self._is_synced:
            with writing(self.path):
                os.fdatasync(self._descriptor)
            self._is_synced = True

    def close(self) -> None:
        """Close the file."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _open(self, flags: int) -> None:
        with writing(self.path):
            self._descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | flags, 0o644)
            self._lock()
            if not flags:
                os.write(self._descriptor, b"\n")  # ends a line that was cut off

    def _lock(self) -> None:
        """Hold the file for this process alone, as long as it lives."""
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self.close()
            what, hint = "another process runs the suite in this folder", "wait until it has ended, or end it"
            raise HarnessError(Code.BAD_SUITE_RESULT, what, where=self.path, hint=hint) from error
        except OSError:  # a file system without locks
            return

    def _write(self, record: Mapping[str, Any]) -> None:
        with writing(self.path):
            os.write(self._descriptor, json.dumps(record, allow_nan=False).encode() + b"\n")
        self._is_synced = False

    def _remember(self, record: Mapping[str, Any]) -> None:
        try:
            if record["record"] == "case":
                result = _RESULT.validate_python(record["result"])
                self.results[result.name], self._digests[result.name] = result, str(record["digest"])
                self._read[result.name] = str(record["read"])
            elif record["record"] == "files":
                self._files[str(record["digest"])] = TypeAdapter(dict[str, str]).validate_python(record["files"])
            elif record["record"] == "golden":
                stored = [StoredGolden.model_validate(item) for item in record["stored"]]
                self.goldens[str(record["digest"])] = tuple(stored)
        except (KeyError, ValidationError) as error:
            what = f"a line of the journal is damaged: {str(error).splitlines()[0]}"
            raise HarnessError(Code.BAD_SUITE_RESULT, what, where=self.path, hint="leave --resume out") from error


def _read(path: Path) -> list[dict[str, Any]]:
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        what = f"there is no suite to go on with: {error.strerror}"
        raise HarnessError(Code.BAD_SUITE_RESULT, what, where=path, hint="leave --resume out") from error
    records = []
    for line in lines:
        try:
            record = parse_json(line)
        except ValueError:  # cut off in the middle, or empty
            continue
        if isinstance(record, dict):
            records.append(record)
    return records


def _check_head(path: Path, records: Sequence[Mapping[str, Any]]) -> None:
    head = records[0] if records else {}
    if head.get("record") != "suite" or head.get("schema_version") != SCHEMA_VERSION:
        what, expected = "the file is no journal of a suite", f"schema_version {SCHEMA_VERSION}"
        raise HarnessError(Code.BAD_SUITE_RESULT, what, where=path, expected=expected, hint="leave --resume out")
    if head.get("versions") != fingerprint():
        raise HarnessError(
            Code.BAD_SUITE_RESULT,
            "the suite was begun with other versions: its results and new ones do not belong together",
            where=path,
            expected=fingerprint(),
            actual=head.get("versions"),
            hint="install the versions of before, or begin anew without --resume",
        )


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
        self.journal.add_case(case, result, answer.files_read)
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
