"""`harness server check`: options, exit statuses and both forms of the report."""

import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("httpx", reason="the extra `serve` is not installed")
pytest.importorskip("fastapi", reason="the extra `serve` is not installed")

FOLDER = Path(__file__).parents[4] / "cases" / "checkpoints" / "qwen3-tiny"


def test_the_embedded_model_is_checked_without_more_options(harness, url):
    ran = harness(
        "server", "check", "--endpoint", f"{url}/v1", "--max-new-tokens", 4, "--again", 1, "--dtype", "float32"
    )
    assert (ran.status, ran.err) == (0, ""), ran.out
    assert ran.out.startswith(f"PASS  reference_engine at {url} · qwen3-tiny · float32 · 4 prompts\n")


def test_json_and_the_status_of_a_mismatch(harness, url):
    options = ["--model", FOLDER, "--token-ids", "1,5,6,7", "--max-new-tokens", 4, "--again", 0, "--format", "json"]
    ran = harness("server", "check", "--endpoint", url, "--dtype", "float32", *options)
    assert (ran.status, ran.json["verdict"], ran.json["schedules"]) == (0, "pass", ["together"])
    other = FOLDER.parent / "llama-tiny"
    ran = harness("server", "check", "--endpoint", url, "--dtype", "float32", "--model", other, *options[2:])
    assert ran.status == 1
    assert {finding["code"] for finding in ran.json["findings"]} >= {"H117"}


def test_a_server_that_is_not_there_is_status_2(harness):
    ran = harness("server", "check", "--endpoint", "http://127.0.0.1:9", "--format", "json")
    assert (ran.status, json.loads(ran.out)["error"]["code"]) == (2, "H110")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--concurrency", 4], "no server is named"),
        (["--endpoint", "http://h", "--engine", "hf"], "--engine"),
        (["--endpoint", "http://h", "--concurrency", 0], "must be positive"),
        (["--endpoint", "http://h", "--request-timeout", "nan"], "must be positive"),
        (["--endpoint", "http://h", "--again", -1], "--again"),
        (["--endpoint", "not a url"], "no URL"),
        (["--endpoint", ""], "given empty"),
        (["--endpoint", "http://h", "--model", FOLDER], "needs a prompt"),
    ],
)
def test_options_that_make_no_sense(harness, options, says):
    ran = harness("server", "check", *options)
    assert (ran.status, ran.out) == (2, "")
    assert says in ran.err


def test_a_missing_client_is_named(harness, monkeypatch):
    monkeypatch.setitem(sys.modules, "httpx", None)
    ran = harness("server", "check", "--endpoint", "http://h")
    assert ran.status == 2
    assert "pip install -e '.[serve]' in the harness's checkout" in ran.err
