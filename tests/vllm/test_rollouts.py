"""The training run of docs/rollout-faults.md, its rollouts sampled by vLLM."""

import pytest

from ..documentation import Page, imported

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

pytestmark = pytest.mark.slow
PAGE = Page("rollout-faults")
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
    with imported(PAGE.write_files(tmp_path_factory.mktemp("example")), "gap_example") as module:
        yield module


@pytest.mark.parametrize("name", TERMS)
def test_vllms_rollouts_have_the_gap_at_its_term(example, name):
    report = example.compare(name, example.vllm)
    assert [term.kind for term in report.terms if not term.is_rounding] == TERMS[name]
