"""Two servers under the same load: what is compared, and when one is called slower."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

pytest.importorskip("httpx", reason="the extra `serve` is not installed")
pytest.importorskip("fastapi", reason="the extra `serve` is not installed")

from harness.extensions.server.address import Address
from harness.extensions.server.load import against
from harness.extensions.server.load.against import compare_loads, comparison_text
from harness.extensions.server.load.run import LoadOptions
from harness.results.check import Outcome

ADDRESSES = Address(url="http://127.0.0.1:8000"), Address(url="http://127.0.0.1:8001")
OPTIONS = LoadOptions(arrivals="8 a second", limits_ms={})


def compared(monkeypatch, slowdown, *, wrong_run=None, new_tokens_per_s=None, noise_ms=0.0):
    """Compare servers of which the second is so much slower; return the order of the loads, too."""
    runs = []

    def run_load(_plan, _hf, address, requests, options, *, progress):
        runs.append((address.url[-1], requests, options.seed))
        progress("server", 1, 1)
        time_ms = (100.0 + len(runs) % 3 + noise_ms * (len(runs) % 5)) * (
            slowdown if address.url.endswith("1") else 1.0
        )
        return SimpleNamespace(
            times_ms={name: SimpleNamespace(p50=time_ms) for name in ("ttft", "tpot", "itl", "e2e")},
            new_tokens_per_s=1e3 / time_ms if new_tokens_per_s is None else new_tokens_per_s,
            requests_per_s=10 / time_ms,
            outcome=Outcome.MISMATCH if len(runs) == wrong_run else Outcome.PASS,
            url=address.url, server="", num_requests=3, arrivals="8 a second",
        )  # fmt: skip

    monkeypatch.setattr(against, "run_load", run_load)
    said = []
    result = compare_loads(
        None, None, ADDRESSES, lambda block: f"requests {block}", replace(OPTIONS, seed=7), num_blocks=5,
        progress=lambda *report: said.append(report),
    )  # fmt: skip
    assert [label for label, *_ in said] == [f"load {number + 1} of 20: server" for number in range(len(runs))]
    return result, runs


@pytest.mark.parametrize(("slowdown", "is_slower"), [(1.0, False), (1.2, True), (0.8, False)])
def test_two_servers_are_compared_in_turns(monkeypatch, slowdown, is_slower):
    result, runs = compared(monkeypatch, slowdown)
    assert "".join(name for name, *_ in runs) == "0110" * 5
    assert [seed for *_, seed in runs] == [7 + block for block in range(5) for _ in range(4)]
    assert all(requests == f"requests {seed - 7}" for _, requests, seed in runs)
    assert set(result.ratios) == {"ttft", "tpot", "e2e", "a request", "a new token"}
    assert all(pair.ratio.median == pytest.approx(slowdown, rel=0.02) for pair in result.ratios.values())
    assert (result.outcome, result.is_slower) == (Outcome.PASS, is_slower)
    assert comparison_text(result, width=100).startswith("SLOWER  B in ttft, tpot" if is_slower else "NOT SLOWER")


def test_answers_without_a_token_have_no_time_of_one(monkeypatch):
    result, _ = compared(monkeypatch, 1.2, new_tokens_per_s=0.0)
    assert set(result.ratios) == {"ttft", "tpot", "e2e", "a request"}


def test_noise_that_hides_every_time_is_no_pass(monkeypatch):
    result, _ = compared(monkeypatch, 1.0, noise_ms=60.0)
    assert (result.outcome, result.is_slower, result.is_conclusive) == (Outcome.PASS, False, False)
    assert comparison_text(result, width=100).startswith("INCONCLUSIVE")


def test_a_wrong_answer_ends_the_comparison(monkeypatch):
    result, runs = compared(monkeypatch, 1.2, wrong_run=6)
    assert (len(runs), result.outcome, result.ratios, result.is_slower) == (6, Outcome.MISMATCH, {}, False)
    monkeypatch.setattr(against, "load_text", lambda run, *, width: f"the load of {run.url}")
    assert comparison_text(result, width=100) == "the load of http://127.0.0.1:8001"


def test_the_command_compares_a_server_with_itself(harness, url):
    options = ["--num-requests", 2, "--new-tokens", 2, "--prompt-tokens", "3", "--rate", "inf", "--format", "json"]
    ran = harness("server", "load", "--endpoint", url, "--against", url, "--model", "qwen3-tiny", *options)
    assert ran.status in (0, 4, 5), ran.err  # with two requests a load the noise may decide
    assert (ran.status == 5) == (not ran.json["is_conclusive"] and not ran.json["is_slower"])
    assert (ran.json["verdict"], len(ran.json["runs"])) == ("pass", 20)
    assert json.dumps(ran.json["ratios"]["tpot"]["noise"])


def test_a_share_of_good_requests_is_refused_in_a_comparison(harness):
    url = "http://127.0.0.1:9"
    ran = harness("server", "load", "--endpoint", url, "--against", url, "--model", "x", "--at-least", 0.5)
    assert (ran.status, "leave out --at-least or --against" in ran.err) == (2, True)
