"""`harness new-adapter`: the adapter of the page, as a package of its own with a test."""

import re
import tomllib
from pathlib import Path

import pytest

from harness.errors import Code

PAGE = Path(__file__).parents[2] / "docs" / "write-an-adapter.md"


@pytest.fixture
def written(harness, tmp_path):
    assert harness("new-adapter", "my-engine", "--out", tmp_path / "made").status == 0
    return tmp_path / "made"


def test_it_is_the_adapter_of_the_page(written):
    (code,) = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), flags=re.DOTALL | re.MULTILINE)
    assert (written / "harness_my_engine" / "adapter.py").read_text() == code.replace('"mine"', '"my-engine"')


def test_the_package_names_what_is_in_it(written):
    project = tomllib.loads((written / "pyproject.toml").read_text())
    opener = project["project"]["entry-points"]["inference_harness.engines"]["my-engine"]
    module, _, function = opener.partition(":")
    assert f"def {function}(" in (written / f"{module.replace('.', '/')}.py").read_text()
    assert project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"] == ["harness_my_engine"]
    assert sorted(str(path.relative_to(written)) for path in written.rglob("*.py")) == [
        "harness_my_engine/__init__.py",
        "harness_my_engine/adapter.py",
        "tests/test_adapter.py",
    ]


@pytest.mark.slow
def test_its_test_passes(written, install, monkeypatch):
    install((written / "harness_my_engine" / "adapter.py").read_text(), name="my-engine")
    names = {}
    exec((written / "tests" / "test_adapter.py").read_text(), names)
    names["test_every_operation_is_right"]()


@pytest.mark.parametrize(
    ("name", "code"),
    [("hf", Code.BAD_OPTION), ("../x", Code.BAD_OPTION), ("My", Code.BAD_OPTION), ("a--b", Code.BAD_OPTION)],
)
def test_a_name_that_is_none_writes_nothing(harness, tmp_path, name, code):
    ran = harness("new-adapter", name, "--out", tmp_path / "made")
    assert (ran.status, ran.err[:4]) == (2, code)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_there_stays(harness, tmp_path):
    (tmp_path / "mine.txt").write_text("kept")
    ran = harness("new-adapter", "my-engine", "--out", tmp_path)
    assert (ran.status, ran.err[:4]) == (2, Code.OUTPUT_EXISTS)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
