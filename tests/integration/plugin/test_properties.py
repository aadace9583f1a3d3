"""The property suites as somebody else runs them: options, profiles, what is off, errors."""

import json
import sys
from xml.etree import ElementTree

import pytest

from harness.errors import Code, HarnessError
from harness.properties.core.findings import Invariant
from harness.pytest_plugin.properties import load_adapter, pytest_configure

pytest_plugins = ["pytester"]

MANAGER = """\
class Adapter:
    def __init__(self, *, num_blocks, block_size):
        self.block_size, self.free_blocks, self.tables = block_size, list(range(num_blocks)), {}
        self.num_tokens = {}

    def allocate(self, request_id, token_ids):
        if self._needed(len(token_ids)) > len(self.free_blocks):
            return None
        self.tables[request_id] = [self.free_blocks.pop() for _ in range(self._needed(len(token_ids)))]
        self.num_tokens[request_id] = len(token_ids)
        return 0

    def append(self, request_id, token_id):
        if self._needed(self.num_tokens[request_id] + 1) > len(self.tables[request_id]):
            if not self.free_blocks:
                return False
            self.tables[request_id].append(self.free_blocks.pop())
        self.num_tokens[request_id] += 1
        return True

    def free(self, request_id):
        self.free_blocks += self.tables.pop(request_id)

    def block_table(self, request_id):
        return self.tables[request_id]

    def _needed(self, num_tokens):
        return -(-num_tokens // self.block_size)


class Leaking(Adapter):
    def free(self, request_id):
        self.free_blocks += self.tables.pop(request_id)[1:]


class TwoBugs(Leaking):
    def append(self, request_id, token_id):
        return len(self.tables[request_id]) < 2 and super().append(request_id, token_id)

    def can_append(self, request_id):
        return True


class Picky(Adapter):
    def __init__(self, *, num_blocks, block_size):
        if block_size == 3:
            raise NotImplementedError("blocks of 3 tokens")
        super().__init__(num_blocks=num_blocks, block_size=block_size)


class Incomplete:
    def __init__(self, *, num_blocks, block_size):
        pass

    def allocate(self, request_id, token_ids):
        return None
"""


@pytest.fixture
def project(pytester: pytest.Pytester) -> pytest.Pytester:
    pytester.makeini("[pytest]\nfilterwarnings = error\naddopts = -p no:cacheprovider\n")
    pytester.makepyfile(my_blocks=MANAGER)
    return pytester


def run(project: pytest.Pytester, *args: str) -> pytest.RunResult:
    return project.runpytest_subprocess("--pyargs", "harness.properties.blocks.test_blocks", *args)


def test_a_correct_manager_passes_and_what_it_does_not_offer_is_said(project: pytest.Pytester) -> None:
    result = project.runpytest_subprocess("--pyargs", "harness.properties", "--block-manager", "my_blocks:Adapter")
    assert result.parseoutcomes()["passed"] == 1  # the suites of others are deselected
    result.stdout.fnmatch_lines(["*= not checked =*", "block manager: no cached_blocks (8, 9, 11, 18)"])
    result.stdout.no_fnmatch_line("scheduler: *")


def test_a_leak_is_reported_as_a_program_without_a_traceback(project: pytest.Pytester) -> None:
    result = run(project, "--block-manager", "my_blocks:Leaking")
    result.assert_outcomes(failed=1)
    text = result.stdout.str()
    assert "H092: " in text
    assert "invariant 6: When all requests are gone every block is free" in text
    assert "from my_blocks import Leaking\n\nmanager = Leaking(num_blocks=1, block_size=1)" in text
    assert "Traceback" not in text
    assert "hypothesis/" not in text


@pytest.mark.slow
def test_workers_report_what_is_not_checked(project: pytest.Pytester) -> None:
    result = run(project, "-n1", "--block-manager", "my_blocks:Leaking")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["H092: *", "block manager: no fork (5, 16)"])


ALLOWED = ("--allow", "6: it restarts every night", "--allow", " 12 , 18 :asked once")


@pytest.mark.slow
def test_every_finding_is_shown_the_worst_first(project: pytest.Pytester) -> None:
    result = run(project, "--block-manager", "my_blocks:TwoBugs")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["1 of 2, stops serving", "H092: *", "2 of 2, stops serving", "H092: *"])
    result.stdout.fnmatch_lines(["FAILED *H092: after all requests are gone*"])


@pytest.mark.slow
def test_accepted_findings_are_shown_with_their_reasons_and_do_not_fail(project: pytest.Pytester) -> None:
    result = run(project, "--block-manager", "my_blocks:TwoBugs", *ALLOWED)
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines_random(
        [
            "*= accepted =*",
            "invariant 6: after all requests are gone*(it restarts every night)",
            "invariant 12: *(asked once)",
            "invariant 18 is accepted and not broken (asked once)",
        ]
    )


@pytest.mark.slow
@pytest.mark.parametrize("workers", [(), ("-n1",)])
def test_findings_are_written_as_json(project: pytest.Pytester, workers: tuple[str, ...]) -> None:
    arguments = ("--block-manager", "my_blocks:TwoBugs", "--allow", "6: known", "--properties-json", "out/found.json")
    run(project, *arguments, *workers).assert_outcomes(failed=1)
    document = json.loads((project.path / "out" / "found.json").read_text())
    (suite,) = document["suites"]
    assert (document["schema_version"], document["profile"]) == (1, "dev")
    assert document["adapters"] == {"block_manager": "my_blocks:TwoBugs"}
    assert suite["outcome"] == "failed"
    assert suite["num_examples"] >= 100
    assert "block manager: no fork (5, 16)" in suite["not_checked"]
    assert [(finding["invariant"], finding["severity"], finding["accepted"]) for finding in suite["findings"]] == [
        (6, "stops serving", "known"),
        (12, "stops serving", None),
    ]
    for finding in suite["findings"]:
        assert finding["program"].startswith("from my_blocks import TwoBugs\n")
        assert finding["property"].startswith(f"invariant {finding['invariant']}: ")


@pytest.mark.slow
def test_a_junit_file_has_each_finding_and_what_was_not_checked(project: pytest.Pytester) -> None:
    run(project, "--block-manager", "my_blocks:TwoBugs", "--allow", "6: known", "--junitxml=junit.xml")
    (case,) = ElementTree.parse(project.path / "junit.xml").iter("testcase")
    properties = [(entry.get("name"), str(entry.get("value"))) for entry in case.iter("property")]
    assert [name for name, _ in properties if name != "not checked"] == ["accepted", "finding"]
    assert dict(properties)["finding"].startswith("invariant 12: ")
    assert dict(properties)["accepted"].endswith("(accepted: known)")
    failure = case.find("failure")
    assert failure is not None
    assert str(failure.get("message")).startswith("H092: ")


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("allowed", "message"),
    [
        ("6", "*--allow '6' gives no reason; expected numbers and a reason*"),
        ("6:", "*--allow '6:' gives no reason*"),
        ("6,99: known", f"*'99' is no invariant (1 to {max(Invariant)})*"),
        ("leaks: known", "*'leaks' is no invariant*"),
    ],
)
def test_what_is_accepted_needs_a_number_and_a_reason(project: pytest.Pytester, allowed: str, message: str) -> None:
    result = run(project, "--allow", allowed)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([message])


@pytest.mark.slow
def test_examples_that_an_adapter_rejects_are_said_not_to_be_checked(project: pytest.Pytester) -> None:
    result = run(project, "--block-manager", "my_blocks:Picky")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["block manager: * examples: NotImplementedError: blocks of 3 tokens"])


def test_an_incomplete_adapter_is_an_error_of_one_glance(project: pytest.Pytester) -> None:
    text = run(project, "--block-manager", "my_blocks:Incomplete").stdout.str()
    assert "H091: the adapter lacks append, free, block_table" in text
    assert "Traceback" not in text


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("nowhere:Adapter", "No module named 'nowhere'"),
        ("json:Nothing", "has no attribute 'Nothing'"),
        ("json", "it is not of the form module:name"),
        (":loads", "it is not of the form module:name"),
    ],
)
def test_an_adapter_that_cannot_be_imported_is_an_error_with_its_path(path: str, message: str) -> None:
    with pytest.raises(HarnessError, match=message) as caught:
        load_adapter(path, option="--scheduler")
    assert (caught.value.code, caught.value.where, caught.value.actual) == (Code.BAD_ADAPTER, "--scheduler", path)


def test_an_adapter_may_stand_inside_a_class() -> None:
    assert load_adapter("json:JSONDecoder.decode", option="--engine") is json.JSONDecoder.decode


@pytest.mark.slow
def test_an_engine_that_is_not_installed_is_an_error_with_the_names_there_are(project: pytest.Pytester) -> None:
    suite = ("--pyargs", "harness.properties.engine.test_engine", "-k", "order")
    result = project.runpytest_subprocess(*suite, "--engine", "nobody")
    result.assert_outcomes(errors=1, deselected=11)
    result.stdout.fnmatch_lines(["*H014: no engine is called 'nobody'*"])


def test_an_unknown_profile_is_refused(project: pytest.Pytester) -> None:
    result = run(project, "--properties-profile", "endless")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*--properties-profile: invalid choice: 'endless'*"])


def test_without_hypothesis_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config
) -> None:
    monkeypatch.setitem(sys.modules, "hypothesis", None)
    monkeypatch.delitem(sys.modules, "harness.properties", raising=False)
    with pytest.raises(pytest.UsageError, match=r"H090: .*need Hypothesis(.|\n)*pip install -e '\.\[test\]'"):
        pytest_configure(pytestconfig)


def test_other_sessions_keep_the_names_of_the_options(project: pytest.Pytester) -> None:
    """A conftest may declare `--engine` as it likes."""
    project.makeconftest("def pytest_addoption(parser):\n    parser.addoption('--engine')\n")
    project.makepyfile(test_own="def test_option(request):\n    assert request.config.getoption('engine') == 'mine'\n")
    project.runpytest_subprocess("--engine", "mine", "-p", "no:hypothesispytest").assert_outcomes(passed=1)


@pytest.mark.parametrize(
    "option", ["--engine", "--engine-model", "--block-manager", "--state-cache", "--ops", "--captures"]
)
def test_an_option_given_empty_is_an_error(pytester, option):
    """The reference engine's adapter would be tested in its place."""
    result = pytester.runpytest_inprocess("--pyargs", "harness.properties.ops", option, "")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"ERROR: {option} names no *"])
