"""The training run of docs/rollout-faults.md, its rollouts sampled by vLLM."""

import importlib
import re
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

pytestmark = pytest.mark.slow
PAGE = (Path(__file__).parents[2] / "docs" / "rollout-faults.md").read_text()
TERMS = {
    "sound": [],
    "stale layer": ["weights"],
    "temperature": ["meaning"],
    "top-p": ["meaning"],
    "packing": ["positions"],
    "no BOS": ["tokens"],
    "fp8 cache": ["cache"],
    "16-bit head": ["head"],
}


@pytest.fixture(scope="module")
def example(tmp_path_factory):
    folder = tmp_path_factory.mktemp("example")
    (program,) = re.findall(r"```python title=gap_example.py\n(.*?)```", PAGE, flags=re.DOTALL)
    (folder / "gap_example.py").write_text(program)
    patch = pytest.MonkeyPatch()
    patch.syspath_prepend(folder)
    yield importlib.import_module("gap_example")
    patch.undo()
    del sys.modules["gap_example"]


@pytest.mark.parametrize("name", TERMS)
def test_vllms_rollouts_have_the_gap_at_its_term(example, name):
    report = example.compare(name, example.vllm)
    assert [term.kind for term in report.terms if not term.is_rounding] == TERMS[name]
