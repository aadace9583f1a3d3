"""Cases without a model, and worker processes that do what a case's name says."""

from collections.abc import Callable
from pathlib import Path

import pytest

from harness.extensions.suite.pool import CaseProcess
from harness.extensions.suite.task import Resources, SuiteCase
from harness.formats.case import Case, RequestSpec

WORKER = """
import os, signal, sys, time
from pathlib import Path
from harness.engines.worker import serve

FOLDER = Path(os.environ["SUITE_TEST_FOLDER"])

def answer(message):
    if "task" not in message:
        return {}
    task = message["task"]
    name = task["case"]["name"]
    with (FOLDER / "log").open("a") as log:
        log.write(f"{task['kind']} {name} {os.getpid()}\\n")
    if task["kind"] == "golden":
        if name.startswith("bad-prompt"):
            return {"found": {"verdict": "error", "code": "H012", "reason": "the prompt is too long"}}
        return {"found": {"verdict": "pass", "seconds": 0.5}}
    if name.startswith("crash"):
        os.kill(os.getpid(), signal.SIGSEGV)
    if name.startswith("exit"):
        os._exit(7)
    if name.startswith("hang"):
        time.sleep(600)
    first = not (FOLDER / name).exists()
    (FOLDER / name).touch()
    if name.startswith("killed") or (name.startswith("once-killed") and first):
        os.kill(os.getpid(), signal.SIGKILL)
    if name.startswith("gone") and first:
        return {"found": {"reason": "its golden did not arrive", "needs_golden": True}}
    if name.startswith("mismatch"):
        place = {"tap": "lm_head", "request": 0, "position": 3, "schedule": "plain", "step": 0, "phase": "prefill",
                 "code": "H040", "local_roundings": 99.0, "cause": "a cause"}
        return {"found": {"verdict": "mismatch", "code": "H040", "reason": "out of bounds", "seconds": 0.25,
                           "first_divergence": place}}
    return {"found": {"verdict": "pass", "seconds": 0.25, "figures": {"bound_share_max": 0.5}}}

def main():
    serve(answer)
"""


@pytest.fixture
def make_case() -> Callable[..., SuiteCase]:
    """Return a case that is never run; prompts of its own make a golden of its own."""

    def make(name: str, *, token: int = 1, limit_s: float = 600.0, **resources: float) -> SuiteCase:
        case = Case(schema_version=1, model="some/model", requests=[RequestSpec(token_ids=[token, 2])])
        labels = {"case": name, "model": "model", "engine": "reference", "dtype": "auto", "schedule": "default"}
        return SuiteCase(name=name, case=case, labels=labels, time_limit_s=limit_s, resources=Resources(**resources))

    return make


@pytest.fixture
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Have worker processes do what their case's name says; return the folder with their log."""
    (tmp_path / "suite_test_worker.py").write_text(WORKER)
    folder = tmp_path / "worker"
    folder.mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("SUITE_TEST_FOLDER", str(folder))
    monkeypatch.setattr(CaseProcess, "module", "suite_test_worker")
    return folder
