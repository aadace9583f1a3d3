"""The fixture for tests in Python: it fails the test with the diagnosis, at the test's own line."""

import xml.etree.ElementTree as ElementTree

import pytest

from .conftest import INI

pytest_plugins = ["pytester"]

TESTS = """
import torch
from transformers import AutoModelForCausalLM

PROMPTS = [[1, 5, 6, 7]]


def loaded():
    return AutoModelForCausalLM.from_pretrained({folder!r}, dtype=torch.float32)


def test_sound(harness_check):
    report = harness_check(loaded(), prompts=PROMPTS, max_new_tokens=2)
    assert report.is_ok and report.runs


def test_broken(harness_check):
    model = loaded()
    model.model.layers[1].input_layernorm.variance_epsilon = 1e-3
    harness_check(model, prompts=PROMPTS, max_new_tokens=2)  # the line that is shown


def test_elsewhere(harness_check):
    harness_check("hf", model={folder!r}, prompts=PROMPTS, max_new_tokens=2, device="cuda:99")


def test_misused(harness_check):
    harness_check(None)


def test_raising(harness_check):
    model = loaded()
    model.model.norm.register_forward_hook(lambda *_args: 1 / 0)
    harness_check(model, prompts=PROMPTS, max_new_tokens=2)
"""


@pytest.fixture
def tests(pytester: pytest.Pytester, checkpoints) -> pytest.Pytester:
    pytester.makeini(INI)
    pytester.makepyfile(test_engine=TESTS.format(folder=str(checkpoints / "llama-tiny")))
    return pytester


def test_a_check_is_a_test(tests: pytest.Pytester) -> None:
    result = tests.runpytest_subprocess("-rs", "--junitxml=junit.xml", "-p", "no:cacheprovider")
    result.assert_outcomes(passed=1, failed=3, skipped=1)
    result.stdout.fnmatch_lines(
        [
            ">*harness_check(model, prompts=PROMPTS, max_new_tokens=2)  # the line that is shown",
            "E*CheckFailedError: MISMATCH  LlamaForCausalLM*",
            "E*First divergence: model.layers.1.input_layernorm",
            "E*Cause: wrong eps: 0.001 instead of 1e-05",
            "E*input_layernorm*bug in*",
        ]
    )
    result.stdout.fnmatch_lines(["E*H014: no engine was given"])
    result.stdout.fnmatch_lines([">*lambda *_args: 1 / 0)", "E*H017: the engine raised ZeroDivisionError*"])
    result.stdout.fnmatch_lines(["SKIPPED*H016*cuda:99*"])
    result.stdout.no_fnmatch_line("*def check(engine*")  # nothing of the harness in between
    cases = {case.get("name"): case for case in ElementTree.parse(tests.path / "junit.xml").iter("testcase")}
    properties = {
        name: {item.get("name"): item.get("value") for item in case.iter("property")} for name, case in cases.items()
    }
    assert properties["test_sound"]["verdict"] == "pass"
    assert properties["test_broken"]["verdict"] == "mismatch"
    assert properties["test_broken"]["first_divergence"].startswith("model.layers.1.input_layernorm")


def test_the_fixture_is_listed_with_what_it_does(pytester: pytest.Pytester) -> None:
    result = pytester.runpytest_subprocess("--fixtures", "-p", "no:cacheprovider")
    result.stdout.fnmatch_lines(["harness_check*", "*Return `harness.check`, made to fail the test*"])


def test_a_test_that_never_calls_it_is_a_warning(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("def test_nothing(harness_check): pass")
    result = pytester.runpytest("-W", "default")
    result.assert_outcomes(passed=1, warnings=1)
    result.stdout.fnmatch_lines(["*NothingCheckedWarning: *::test_nothing never calls harness_check"])


def test_a_test_that_ends_before_it_calls_it_has_no_warning(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        "import pytest\n"
        "def test_skipped(harness_check): pytest.skip('no engine here')\n"
        "def test_failed(harness_check): assert False\n"
    )
    pytester.runpytest("-W", "error").assert_outcomes(skipped=1, failed=1)


def test_a_test_that_catches_its_failure_is_a_warning(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        "def test_caught(harness_check):\n"
        "    try: harness_check(None, model='nowhere', prompts=['text'])\n"
        "    except Exception: pass\n"
    )
    result = pytester.runpytest("-W", "default")
    result.assert_outcomes(passed=1, warnings=1)
    what = "passes, though 1 of its 1 calls of harness_check did not pass"
    result.stdout.fnmatch_lines([f"*FailureCaughtWarning: *::test_caught {what}"])
