"""The harness itself: one call for each kind of engine."""

from collections.abc import Mapping
from contextlib import redirect_stdout
from io import StringIO

import harness
from harness.errors import ExitStatus
from harness.extensions.faults.answer import ToolAnswer
from harness.extensions.faults.fault import EngineKind
from harness.extensions.faults.subject import ToolSubject
from harness.formats.case import RequestSpec
from harness.formats.taps import LOGITS
from harness.judge.jobs.check import run_check
from harness.plan import plan_request
from harness.results.check import CheckResult, Divergence, Finding, Outcome


class _Harness:
    names = ("harness",)
    kinds = frozenset(EngineKind)
    rules = frozenset[str]()

    def check(self, subject: ToolSubject) -> Mapping[str, ToolAnswer]:
        """See `Tool.check`."""
        if subject.suite is not None:
            subject.suite()
            return {"harness": ToolAnswer(is_sound=True)}
        return {"harness": served(subject) if subject.kind is EngineKind.SERVER else answer_of(check(subject))}


TOOL = _Harness()


def check(subject: ToolSubject) -> CheckResult:
    """Return the result of the check of an engine.

    Raises:
        HarnessError: the engine raised, or the check could not be made.
    """
    prompts = [list(prompt) for prompt in subject.prompts]
    if subject.plan is not None:
        return run_check(subject.plan)
    if subject.kind is EngineKind.DUMP:
        requests = [RequestSpec(token_ids=prompt) for prompt in prompts]
        model, dtype = str(subject.checkpoint), subject.dtype
        return run_check(plan_request(tensors=subject.engine, model=model, dtype=dtype, requests=requests))
    return harness.check(
        subject.engine, model=subject.checkpoint, prompts=prompts, max_new_tokens=subject.max_new_tokens,
        schedules=[subject.schedule],
    )  # fmt: skip


def served(subject: ToolSubject) -> ToolAnswer:
    """Return the verdict of `harness server check`: a server shows no operation before its logits."""
    from harness.cli.main import run

    prompts = [("--token-ids", ",".join(map(str, prompt))) for prompt in subject.prompts]
    options = ["--endpoint", subject.engine, "--model", str(subject.checkpoint), "--dtype", subject.dtype]
    options += ["--max-new-tokens", str(subject.max_new_tokens), "--again", "0", "--format", "json"]
    with redirect_stdout(StringIO()):
        status = run(["server", "check", *options, *(word for pair in prompts for word in pair)])
    if status not in (ExitStatus.PASS, ExitStatus.MISMATCH):
        raise RuntimeError(f"harness server check: exit status {status}")
    return ToolAnswer(is_sound=status == ExitStatus.PASS, operation=None if status == ExitStatus.PASS else LOGITS)


def answer_of(result: CheckResult) -> ToolAnswer:
    """Return the verdict: the first operation that is wrong, or the first finding about one."""
    (run,) = result.runs
    about = (finding for finding in run.findings if finding.tap is not None)
    first: Divergence | Finding | None = run.first_divergence or next(about, None)
    if first is None:
        return ToolAnswer(is_sound=result.outcome is Outcome.PASS)
    said, row = first.explanation, None
    if first.request is not None and first.position is not None:
        row = (first.request, first.position)
    cause = f"{said.cause}; {said.detail}" if said is not None and said.is_cause else None
    return ToolAnswer(is_sound=result.outcome is Outcome.PASS, operation=first.tap, row=row, cause=cause)
