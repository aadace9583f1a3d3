"""`harness server sampler`: options, exit statuses and the forms of the report."""

from pathlib import Path

import pytest

pytest.importorskip("httpx", reason="the extra `serve` is not installed")
pytest.importorskip("fastapi", reason="the extra `serve` is not installed")

FOLDER = Path(__file__).parents[4] / "cases" / "checkpoints" / "qwen3-tiny"


def test_a_sound_server_passes_and_what_was_not_judged_is_said(harness, url):
    options = ["--dtype", "float32", "--draws", 60, "--only", "top_k", "--only", "typical_p"]
    ran = harness("server", "sampler", "--endpoint", url, *options)
    assert (ran.status, ran.err) == (0, ""), ran.out
    assert ran.out.startswith(
        f"PASS  reference_engine at {url} · qwen3-tiny · float32 · 60 draws\n  not judged  typical_p"
    )
    assert "  errors      a sound server alarms in less than 1 of 1,000 runs, over " in ran.out
    assert "  logprobs    raw or after penalties and bias\n" in ran.out


def test_json_and_the_status_of_a_mismatch(harness, url):
    # The server's temperature comes first: an order that has it last is not this server's.
    options = ["--dtype", "float32", "--only", "top_p", "--draws", 400, "--order", "llamacpp", "--format", "json"]
    ran = harness("server", "sampler", "--endpoint", url, *options)
    assert (ran.status, ran.json["verdict"]) == (1, "mismatch")
    (setting,) = ran.json["settings"]
    assert setting["num_outside"] > 0
    assert setting["follows"] == "temperature before top_p"
    assert {finding["code"] for finding in setting["findings"]} == {"H210"}
    assert setting["body"]["top_p"] == 0.7


def test_nothing_judged_is_status_5(harness, url):
    ran = harness("server", "sampler", "--endpoint", url, "--dtype", "float32", "--only", "typical_p", "--draws", 10)
    assert ran.status == 5
    assert ran.out.startswith("NOTHING CHECKED  ")
