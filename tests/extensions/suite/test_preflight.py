"""What an environment lacks is said before the first task: its harness, its packages, its engines."""

import json
import os
import sys

import pytest

from harness.errors import Code, HarnessError
from harness.extensions.suite import preflight
from harness.extensions.suite.preflight import (
    Installation,
    check_engines,
    check_environments,
    fingerprint,
    installation,
)
from harness.extensions.suite.task import Environment


@pytest.mark.slow
def test_this_interpreter_is_an_environment():
    assert check_environments({"own": Environment()}) == {"own": installation()}


@pytest.mark.slow
def test_an_environment_s_own_packages_are_seen(tmp_path):
    """An engine that the variables of the environment lead to is one of its engines."""
    metadata = tmp_path / "mine-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[inference_harness.engines]\nmine = mine:open_engine\n")
    paths = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    installed = check_environments({"e": Environment(variables={"PYTHONPATH": paths})})
    assert "mine" in installed["e"].engines


def test_an_environment_without_torch_is_refused(tmp_path):
    """One that has the harness, but not what the harness needs."""
    python = tmp_path / "python"
    installed = Installation(versions={**fingerprint(), "torch": "not installed"}, engines=["reference"])
    python.write_text(f"#!/bin/sh\necho '{installed.model_dump_json()}'\n")
    python.chmod(0o755)
    with pytest.raises(HarnessError, match="the environment 'bare' lacks torch") as caught:
        check_environments({"bare": Environment(python=str(python))})
    assert (caught.value.code, caught.value.actual) == (Code.BAD_SUITE, str(python))


def test_what_is_not_installed_is_told_from_what_has_no_version(monkeypatch):
    monkeypatch.setattr("harness.extensions.suite.preflight._PACKAGES", ("json", "no_such_package"))
    installed = json.loads(installation().model_dump_json())["versions"]
    assert (installed["json"], installed["no_such_package"]) == ("unknown", "not installed")
    assert installation().missing_packages == ["no_such_package"]


@pytest.mark.slow
def test_an_engine_is_looked_for_where_its_case_runs(make_case):
    here, there = make_case("here"), make_case("there").model_copy(update={"environment": "old"})
    check_engines([here, there])
    check_engines([here, there], {"old": installation()})
    with pytest.raises(HarnessError, match="no engine is called 'reference' in the environment 'old'") as caught:
        check_engines([here, there], {"old": Installation(versions={}, engines=["hf"])})
    assert (caught.value.code, caught.value.where, caught.value.expected) == (Code.UNKNOWN_ENGINE, "there", "hf")


def test_no_answer_is_no_interpreter(monkeypatch):
    monkeypatch.setattr(preflight, "_LOOK_LIMIT_S", 0.001)
    with pytest.raises(HarnessError, match="has no interpreter with the harness"):
        check_environments({"own": Environment()})
