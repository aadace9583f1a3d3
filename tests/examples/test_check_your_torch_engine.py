"""The page on torch engines: its adapter records every tap of the engine, which passes, and its bug is found."""

import sys
from pathlib import Path

import pytest
import torch

from harness.engines import Engine
from harness.errors import Code, HarnessError
from harness.formats.recording import Recording
from harness.judge.compare import Requirements, compare_run
from harness.judge.explain import explain_run
from harness.oracle.make_golden import cached_golden
from harness.oracle.model import load_model
from harness.oracle.requests import Prompt
from harness.results.check import Outcome

from ..documentation import Page, imported
from ..recording_writer import record

PAGE = Page("check-your-torch-engine")
MOST_LINES = 60


@pytest.fixture(scope="module")
def adapter(tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapter")
    (code,) = PAGE.blocks("python")
    (folder / "my_adapter.py").write_text(code)
    with imported(Path(__file__).parent, "fused_engine"), imported(folder, "my_adapter") as module:
        yield module


class Checked:
    """What a check of the page's engine does, in this process."""

    def __init__(self, adapter, folder, dtype, path):
        self.adapter, self.folder, self.dtype, self.path = adapter, folder, dtype, path
        self.hf = load_model(folder, dtype=getattr(torch, dtype))
        prompts = [(5, 9, 14, 3, 8, 21, 4, 17, 6), tuple(range(3, 17))]
        self.golden = cached_golden(self.hf, [Prompt(token_ids=ids, max_new_tokens=5) for ids in prompts])

    def compare(self):
        engine = self.adapter.open_engine(self.folder, dtype=self.dtype, device="cpu", options={})
        assert isinstance(engine, Engine)
        record(engine, "plain", self.golden.requests, self.path, dtype=self.dtype)
        with Recording.open(self.path) as actual:
            comparison = compare_run(
                actual,
                self.golden,
                hf=self.hf,
                requirements=Requirements(wanted=engine.capabilities.wanted(self.hf.graph)),
            )
            return explain_run(comparison, actual, self.golden, self.hf)


@pytest.fixture
def checked(adapter, checkpoints, tmp_path):
    return lambda dtype: Checked(adapter, checkpoints / "qwen2-tiny", dtype, tmp_path / dtype)


def test_the_adapter_is_short(adapter):
    lines = Path(adapter.__file__).read_text().splitlines()
    assert sum(bool(line.strip()) for line in lines) <= MOST_LINES


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_engine_passes_with_every_tap_recorded(checked, dtype):
    run = checked(dtype).compare()
    assert run.findings == ()
    assert run.outcome is Outcome.PASS
    assert (run.coverage.missing, run.coverage.not_offered) == (0, ())
    assert {tap.judged_by for tap in run.taps} <= {"local", "cache"}


def test_the_bug_is_found_where_the_page_says(checked, adapter, monkeypatch):
    rotary = sys.modules["fused_engine"].Rotary
    forward = rotary.forward
    monkeypatch.setattr(rotary, "forward", lambda self, positions, q, k: forward(self, positions - 1, q, k))
    first = checked("float32").compare().first_divergence
    shown = PAGE.blocks("text")[-1]
    assert f"First divergence: {first.tap}" in shown
    assert f"request {first.request}, position {first.position}, step {first.step}, {first.phase}" in shown
    assert f"Cause: {first.explanation.cause}" in shown


def test_an_engine_that_feeds_its_own_tokens_is_found_out(checked, adapter, monkeypatch):
    engine = sys.modules["fused_engine"].FusedEngine
    step = engine.step
    monkeypatch.setattr(engine, "step", lambda self, work: step(self, [(r, [7] * len(t), at) for r, t, at in work]))
    with pytest.raises(HarnessError) as caught:
        checked("float32").compare()
    assert caught.value.code is Code.ENGINE_FAILED
    assert "other tokens" in str(caught.value)
