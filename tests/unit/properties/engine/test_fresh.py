"""Cases run once more in a process of their own: what it returns is compared, whatever its shape."""

import pytest

from harness.properties.core.falsify import NamedAdapter
from harness.properties.core.findings import PropertyError
from harness.properties.engine.case import EngineCase
from harness.properties.engine.fresh import run_again

ENGINE = """
class Engine:
    def generate(self, prompts, max_new_tokens):
        return {answer}
"""


@pytest.mark.parametrize(("answer", "told"), [("[[9]]", r"request 0: \[9\] in"), ("[]", "request 0: None in")])
def test_an_answer_that_is_another_or_missing_is_a_finding(tmp_path, monkeypatch, answer, told):
    (tmp_path / "keeps_answers.py").write_text(ENGINE.format(answer=answer))
    monkeypatch.syspath_prepend(str(tmp_path))
    adapter = NamedAdapter(None, ("import keeps_answers",), "keeps_answers.Engine")
    case = EngineCase(prompts=((1, 2),), max_new_tokens=(1,), order=(0,))
    with pytest.raises(PropertyError, match=told):
        run_again(adapter, [(case, [[5]], [[5]])], "tokens do not change")
