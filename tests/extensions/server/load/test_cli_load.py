"""`harness server load`: options, exit statuses and the forms of the report."""

import json
from pathlib import Path

import pytest

pytest.importorskip("httpx", reason="the extra `serve` is not installed")
pytest.importorskip("fastapi", reason="the extra `serve` is not installed")

from reference_engine import EngineConfig, LLMEngine
from reference_engine.server.app import build_app
from reference_engine.server.text import Text

from ....loopback import serving

FOLDER = Path(__file__).parents[4] / "cases" / "checkpoints" / "qwen3-tiny"
SIZES = ["--num-requests", 6, "--new-tokens", 4, "--prompt-tokens", "3..9"]


@pytest.fixture(scope="module")
def url():
    with (
        LLMEngine(FOLDER, EngineConfig(dtype="float32")) as engine,
        serving(build_app(engine, Text(FOLDER), model="tiny")) as address,
    ):
        yield address


@pytest.fixture
def load(harness, url):
    return lambda *options: harness(
        "server", "load", "--endpoint", url, "--model", "qwen3-tiny", "--dtype", "float32", *options
    )


def test_a_sound_server_passes(load):
    ran = load(*SIZES, "--rate", 100, "--burst", 3, "--judged", 4)
    assert ran.status == 0, ran.err
    assert "6 requests, 100 a second in bursts of 3" in ran.out
    assert "4 of 6 answers were held to HF's truth" in ran.out


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


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--rate", "0"], "--rate"),
        (["--prompt-tokens", "9..3"], "this is no distribution of lengths"),
        (["--limit", "itl=3"], "expected: ttft=MS, tpot=MS, e2e=MS"),
        (["--limit", "ttft=-1"], "this is no limit"),
        (["--requests", "nowhere.jsonl"], "the requests cannot be read"),
    ],
)
def test_options_that_make_no_sense(load, options, says):
    ran = load(*options)
    assert ran.status == 2
    assert says in ran.err


def test_no_server(harness):
    ran = harness("server", "load", "--endpoint", "http://127.0.0.1:9", "--model", "qwen3-tiny", *SIZES)
    assert ran.status == 2
    assert "the server cannot be reached" in ran.err
