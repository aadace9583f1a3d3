"""`harness server load`: options, exit statuses and the forms of the report."""

import json

import pytest

pytest.importorskip("httpx", reason="the extra `serve` is not installed")
pytest.importorskip("fastapi", reason="the extra `serve` is not installed")

SIZES = ["--num-requests", 6, "--new-tokens", 4, "--prompt-tokens", "3..9"]


@pytest.fixture
def load(harness, url):
    return lambda *options: harness(
        "server", "load", "--endpoint", url, "--model", "qwen3-tiny", "--dtype", "float32", *options
    )


def test_a_sound_server_passes(load):
    ran = load(*SIZES, "--rate", 100, "--burst", 3, "--judged", 4)
    assert ran.status == 0, ran.err
    assert "6 requests, 100 a second in bursts of 3" in ran.out
    assert "4 of 6 answers were checked against HF's truth" in ran.out


def test_too_few_good_requests_are_status_4(load):
    ran = load(*SIZES, "--rate", "inf", "--limit", "e2e=0.001", "--at-least", 0.5, "--format", "json")
    assert ran.status == 4
    assert (ran.json["verdict"], ran.json["good_share"], ran.json["arrivals"]) == ("pass", 0, "all at once")


def test_requests_of_a_file(load, tmp_path):
    path = tmp_path / "requests.jsonl"
    lines = [{"prompt": "hu rin pun | hu", "max_tokens": 3}, {"prompt_tokens": 5, "at": 0.05}]
    path.write_text("\n".join(map(json.dumps, lines)))
    ran = load("--requests", path, "--new-tokens", 2, "--format", "json")
    assert ran.status == 0, ran.err
    assert (ran.json["num_requests"], ran.json["num_new_tokens"]) == (2, 5)
