"""The property suites as somebody else runs them: options, profiles, what is off, errors."""

import json
import sys
from pathlib import Path

import pytest

from harness.errors import Code, HarnessError
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


def test_a_leak_is_told_as_a_program_without_a_traceback(project: pytest.Pytester) -> None:
    result = run(project, "--block-manager", "my_blocks:Leaking")
    result.assert_outcomes(failed=1)
    text = result.stdout.str()
    assert "H092: " in text
    assert "invariant 6: When all requests are gone every block is free" in text
    assert "from my_blocks import Leaking\n\nmanager = Leaking(num_blocks=1, block_size=1)" in text
    assert "Traceback" not in text
    assert "hypothesis/" not in text


def test_workers_report_what_is_not_checked(project: pytest.Pytester) -> None:
    result = run(project, "-n1", "--block-manager", "my_blocks:Leaking")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["H092: *", "block manager: no fork (5, 16)"])


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


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        (
            "harness.properties.reference_attention:PagedAttention",
            "import harness.properties.reference.attention instead",
        ),
        ("old_adapter:Adapter", "import harness.properties.blocks.adapter instead"),
    ],
)
def test_an_adapter_that_imports_a_module_that_has_moved_is_told_where_it_is(
    path: str, hint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "old_adapter.py").write_text("from harness.properties.block_manager import BlockManagerAdapter\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(HarnessError) as caught:
        load_adapter(path, option="--attention")
    assert (caught.value.code, caught.value.hint) == (Code.BAD_ADAPTER, hint)


def test_an_adapter_may_stand_inside_a_class() -> None:
    assert load_adapter("json:JSONDecoder.decode", option="--engine") is json.JSONDecoder.decode


def test_an_unknown_profile_is_refused(project: pytest.Pytester) -> None:
    result = run(project, "--properties-profile", "endless")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*--properties-profile: invalid choice: 'endless'*"])


def test_without_hypothesis_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config
) -> None:
    monkeypatch.setitem(sys.modules, "hypothesis", None)
    monkeypatch.delitem(sys.modules, "harness.properties", raising=False)
    with pytest.raises(
        pytest.UsageError, match=r"H090: .*need Hypothesis(.|\n)*pip install 'inference-harness\[test\]'"
    ):
        pytest_configure(pytestconfig)


def test_other_sessions_keep_the_names_of_the_options(project: pytest.Pytester) -> None:
    """A conftest may declare `--engine` as it likes."""
    project.makeconftest("def pytest_addoption(parser):\n    parser.addoption('--engine')\n")
    project.makepyfile(test_own="def test_option(request):\n    assert request.config.getoption('engine') == 'mine'\n")
    project.runpytest_subprocess("--engine", "mine", "-p", "no:hypothesispytest").assert_outcomes(passed=1)
