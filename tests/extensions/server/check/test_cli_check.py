"""`harness server check`: options, exit statuses and both forms of the report."""

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
    llama = FOLDER.parent / "llama-tiny"
    ran = harness("server", "check", "--endpoint", url, "--dtype", "float32", "--model", llama, *options[2:])
    assert ran.status == 1
    assert {finding["code"] for finding in ran.json["findings"]} >= {"H117"}
