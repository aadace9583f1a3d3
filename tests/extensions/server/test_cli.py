"""What the commands of `harness server` have in common: a server that is missing, and options that make no sense."""

import sys

import pytest

pytest.importorskip("httpx", reason="the extra `serve` is not installed")
pytest.importorskip("fastapi", reason="the extra `serve` is not installed")

REQUIRED = {"check": [], "sampler": [], "chat": [], "audit": ["--hypotheses", "bf16,fp8"], "load": []}
"""Options without which a command does not run."""
NO_SENSE = [
    ("check", ["--engine", "hf"], "--engine"),
    ("check", ["--concurrency", 0], "must be positive"),
    ("check", ["--request-timeout", "nan"], "must be positive"),
    ("check", ["--again", -1], "--again"),
    ("check", ["--endpoint", "not a url"], "no URL"),
    ("check", ["--endpoint", ""], "given empty"),
    ("sampler", ["--order", "alphabet"], "this is no order of the steps of a sampler"),
    ("sampler", ["--only", "greedy"], "there is no such setting"),
    ("sampler", ["--draws", 0], "--draws"),
    ("sampler", ["--concurrency", 0], "must be positive"),
    ("audit", ["--hypotheses", "bf16"], "at least two different hypotheses are needed"),
    ("audit", ["--hypotheses", "bf16,bf16"], "at least two different hypotheses are needed"),
    ("audit", ["--hypotheses", "bf16,bf16+warmth=2"], "this is no parameter of a sampler"),
    ("audit", ["--hypotheses", "bf16,bf16+kv=int3"], "this is no cache that can be supposed"),
    ("audit", ["--hypotheses", "bf16,q4", "--ask", "top_k=x"], "this is no parameter"),
    ("audit", ["--hypotheses", "bf16,bf16+grammar=3"], "this is no parameter of a sampler"),
    ("load", ["--rate", "0"], "--rate"),
    ("load", ["--prompt-tokens", "9..3"], "this is no distribution of lengths"),
    ("load", ["--limit", "itl=3"], "expected: ttft=MS, tpot=MS, e2e=MS"),
    ("load", ["--limit", "ttft=-1"], "this is no limit"),
    ("load", ["--requests", "nowhere.jsonl"], "the requests cannot be read"),
]


@pytest.mark.parametrize(("command", "options", "says"), NO_SENSE)
def test_options_that_make_no_sense(harness, command, options, says):
    endpoint = [] if "--endpoint" in options else ["--endpoint", "http://h"]
    ran = harness("server", command, *endpoint, *options)
    assert (ran.status, ran.out) == (2, "")
    assert says in ran.err


@pytest.mark.parametrize("command", REQUIRED)
def test_an_endpoint_is_needed(harness, command):
    ran = harness("server", command, *REQUIRED[command])
    assert (ran.status, ran.out) == (2, "")
    assert "no server is named" in ran.err


@pytest.mark.parametrize("command", REQUIRED)
def test_a_missing_client_is_named(harness, monkeypatch, command):
    monkeypatch.setitem(sys.modules, "httpx", None)
    ran = harness("server", command, "--endpoint", "http://h", *REQUIRED[command])
    assert ran.status == 2
    assert "pip install -e '.[serve]' in the harness's checkout" in ran.err


@pytest.mark.parametrize("command", [command for command in REQUIRED if command != "chat"])  # which needs a template
def test_a_server_that_is_not_there_is_status_2(harness, command):
    options = [*REQUIRED[command], "--format", "json"]
    ran = harness("server", command, "--endpoint", "http://127.0.0.1:9", *options)
    assert (ran.status, ran.json["error"]["code"]) == (2, "H110")
