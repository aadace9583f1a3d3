"""What a case is checked with: a result is kept only while the content is the same, whatever the paths say."""

import os
import sys

import pytest

from harness.extensions.suite import preflight
from harness.extensions.suite.preflight import installed_digest, with_inputs
from harness.extensions.suite.task import Environment, SuiteCase
from harness.formats.case import Case, RequestSpec


@pytest.fixture(scope="module")
def installed():
    """Hash what is installed once: all its code is read."""
    return installed_digest()


@pytest.fixture
def digest(tmp_path, monkeypatch, installed):
    """Return the digests of a case and of its golden, with a model of a few files and an option that names one."""
    monkeypatch.setenv("HARNESS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(preflight, "installed_digest", lambda: installed)
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_bytes(b"weights")
    (tmp_path / "table.toml").write_text("a = 1")

    def of_case(environment=None, python=None):
        requests = [RequestSpec(token_ids=[1, 2])]
        options = {"table": str(tmp_path / "table.toml")}
        case = Case(schema_version=1, model=str(model), requests=requests, engine_options=options)
        planned = SuiteCase(name="a", case=case, labels={}, environment=environment)
        environments = {environment: Environment(python=python)} if environment else {}
        (case_with_inputs,) = with_inputs([planned], environments, {}, local_files_only=True)
        return case_with_inputs.digest(), case_with_inputs.golden_digest()

    return of_case


def replace_keeping_the_time(file, content):
    before = file.stat()
    file.write_bytes(content)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_the_same_content_has_the_same_digest(digest):
    assert digest() == digest()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_model_that_was_replaced_is_another(digest, tmp_path, name):
    before, golden = digest()
    (tmp_path / "model" / name).write_bytes(b"WEIGHTS")
    assert digest()[0] != before
    assert digest()[1] != golden


def test_weights_that_were_replaced_with_their_time_put_back_are_others(digest, tmp_path):
    before = digest()
    replace_keeping_the_time(tmp_path / "model" / "model.safetensors", b"WEIGHTS")
    assert digest() != before


def test_a_file_that_an_option_names_is_part_of_it(digest, tmp_path):
    before, golden = digest()
    (tmp_path / "table.toml").write_text("a = 2")
    assert digest()[0] != before
    assert digest()[1] == golden


def test_a_package_that_was_updated_makes_another_installation(tmp_path, monkeypatch):
    metadata = tmp_path / "some_engine-1.0.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: some_engine\nVersion: 1.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    before = installed_digest()
    assert installed_digest() == before
    metadata.write_text("Metadata-Version: 2.1\nName: some_engine\nVersion: 1.1\n")
    assert installed_digest() != before


def test_an_environment_that_is_not_here_is_never_the_same(digest, tmp_path):
    assert digest("there", str(tmp_path / "no-python")) != digest("there", str(tmp_path / "no-python"))


@pytest.mark.slow
def test_an_environment_is_asked_for_what_it_has(digest):
    here = digest("here", sys.executable)
    assert here == digest("here", sys.executable)
    assert here != digest()
