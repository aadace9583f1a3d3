"""Cases run once more in a process of their own: what it returns is compared, whatever its shape."""

import time

import pytest

from harness.errors import Code, HarnessError
from harness.properties.core.falsify import NamedAdapter
from harness.properties.core.findings import PropertyError
from harness.properties.engine.case import EngineCase
from harness.properties.engine.fresh import run_again

ENGINE = """
class Engine:
    def generate(self, prompts, max_new_tokens):
        {does}
"""
CASE = EngineCase(prompts=((1, 2),), max_new_tokens=(1,), order=(0,))


@pytest.fixture
def engine(tmp_path, monkeypatch):
    """Return the adapter of an engine that does what a line says, in a module of its own."""

    def write(does):
        (tmp_path / "keeps_answers.py").write_text(ENGINE.format(does=does))
        monkeypatch.syspath_prepend(str(tmp_path))
        return NamedAdapter(None, ("import keeps_answers",), "keeps_answers.Engine")

    return write


@pytest.mark.parametrize(("answer", "told"), [("[[9]]", r"request 0: \[9\] in"), ("[]", "request 0: None in")])
def test_an_answer_that_is_another_or_missing_is_a_finding(engine, answer, told):
    with pytest.raises(PropertyError, match=told):
        run_again(engine(f"return {answer}"), [(CASE, [[5]], [[5]])], "tokens do not change", limit_s=600)


@pytest.mark.parametrize(
    ("does", "why"), [("raise ValueError('no')", "ValueError: no"), ("import os; os._exit(3)", "with exit status 3")]
)
def test_a_process_that_gives_no_answer_says_why(engine, does, why):
    assert why in run_again(engine(does), [(CASE, [[5]], [[5]])], "tokens do not change", limit_s=600)


def test_an_engine_that_hangs_there_ends_with_a_code(engine, tmp_path):
    begin, does = time.monotonic(), "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()'])"
    with pytest.raises(HarnessError, match="at most 5 s") as caught:
        run_again(engine(f"import time; {does}; time.sleep(3600)"), [(CASE, [[5]], [[5]])], "", limit_s=5)
    assert caught.value.code is Code.ENGINE_TIMED_OUT
    assert time.monotonic() - begin < 600
