"""What a worker process does with a task: every way in which it can end is an answer or a loss."""

import base64
import json
import zlib
from pathlib import Path

import pytest

from harness.errors import Code, HarnessError
from harness.extensions.suite import worker
from harness.extensions.suite.store import DamagedBlobError
from harness.extensions.suite.task import Loss, SuiteCase, Task, TaskResult
from harness.formats.case import Case, RequestSpec


@pytest.fixture
def task(checkpoints: Path, tmp_path: Path):
    """Return a task on the smallest checkpoint."""

    def make(kind: str = "case", *, token_ids=(1, 4, 5), max_new_tokens=2, **more) -> Task:
        requests = [RequestSpec(token_ids=list(token_ids))]
        case = Case(
            schema_version=1, model=str(checkpoints / "llama-tiny"), dtype="float32", schedules=["plain"],
            requests=requests, max_new_tokens=max_new_tokens,
        )  # fmt: skip
        return Task(kind=kind, case=SuiteCase(name="c", case=case, labels={}), **more)

    return make


def test_a_golden_that_was_made_elsewhere_judges_a_case_here(task, tmp_path, monkeypatch):
    store = str(tmp_path / "store")
    monkeypatch.setenv("HARNESS_CACHE", str(tmp_path / "one"))
    made = worker.run_task(task("golden", store=store))
    assert made.verdict == "pass"
    monkeypatch.setenv("HARNESS_CACHE", str(tmp_path / "other"))
    monkeypatch.setattr("harness.oracle.make_golden.make_golden", None)
    outcome = worker.run_task(task(store=store, goldens=made.goldens))
    assert (outcome.verdict, outcome.reason) == ("pass", None)
    assert outcome.figures["tokens_equal_share"] == 1.0
    assert 0 < outcome.figures["bound_share_max"] < 1
    assert outcome.seconds > 0


def test_a_task_that_the_harness_refuses_is_an_error_with_its_code(task):
    outcome = worker.run_task(task(token_ids=[999_999]))
    assert (outcome.verdict, outcome.code) == ("error", Code.TOKEN_OUTSIDE_VOCABULARY)
    assert "999999" in outcome.reason


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (DamagedBlobError("cut off"), Loss(reason="its golden did not arrive: cut off", needs_golden=True)),
        (HarnessError(Code.STORE_FAILED, "away"), Loss(reason="H131: away")),
        (HarnessError(Code.ENGINE_FAILED, "raised"), TaskResult(verdict="error", code="H017", reason="raised")),
    ],
)
def test_what_a_task_raises_is_an_answer_or_a_loss(task, monkeypatch, raised, expected):
    monkeypatch.setattr(worker, "_check", lambda *_: (_ for _ in ()).throw(raised))
    outcome = worker.run_task(task())
    assert outcome == (
        expected
        if isinstance(outcome, Loss)
        else expected.model_copy(update={"seconds": outcome.seconds, "files_read": outcome.files_read})
    )


def test_a_bug_of_our_own_is_an_error_that_says_where(task, monkeypatch):
    monkeypatch.setattr(worker, "_check", lambda *_: [][0])
    outcome = worker.run_task(task())
    assert (outcome.verdict, outcome.code) == ("error", Code.INTERNAL)
    assert outcome.reason.startswith("IndexError: list index out of range (test_worker.py, line ")


def test_a_mismatch_brings_its_report(task, monkeypatch):
    import torch

    from reference_engine import model

    rotary = model.apply_rotary
    monkeypatch.setattr(model, "apply_rotary", lambda x, cos, sin: rotary(x, cos, torch.zeros_like(sin)))
    outcome = worker.run_task(task(token_ids=[1, 4, 5, 6]))
    assert (outcome.verdict, outcome.code) == ("mismatch", "H040")
    assert outcome.first_divergence["tap"].startswith("model.layers.0.")
    assert {"request", "position", "schedule", "cause"} <= outcome.first_divergence.keys()
    unpacked = {name: zlib.decompress(base64.b64decode(text)).decode() for name, text in outcome.files.items()}
    assert unpacked["report.html"].startswith("<!doctype html>")
    assert json.loads(unpacked["check.json"])["verdict"] == "mismatch"
