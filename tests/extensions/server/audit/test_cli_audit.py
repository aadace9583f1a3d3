"""`harness server audit` and `harness.audit`: what is claimed of a server that serves float32, and what is not."""

import pytest

pytest.importorskip("httpx", reason="the extra `serve` is not installed")
pytest.importorskip("fastapi", reason="the extra `serve` is not installed")

from ..served import serve


def test_what_is_served_is_claimed(harness, url):
    pytest.importorskip("gguf", reason="the extra `gguf` is not installed")
    options = ["--dtype", "float32", "--tokens", 400, "--hypotheses", "fp32,fp8,q4"]
    ran = harness("server", "audit", "--endpoint", url, *options)
    assert ran.status == 0, ran.out
    assert ran.out.startswith(f"PASS  reference_engine at {url} · qwen3-tiny · float32 · 400 tokens\n")
    assert "  served      fp32; every other hypothesis is excluded\n" in ran.out
    assert "a claim is wrong in less than 1 of 1,000 audits" in ran.out


def test_another_first_hypothesis_is_a_mismatch(harness, url):
    options = ["--dtype", "float32", "--tokens", 400, "--hypotheses", "fp8,fp32", "--format", "json"]
    ran = harness("server", "audit", "--endpoint", url, *options)
    assert (ran.status, ran.json["verdict"]) == (1, "mismatch")
    assert (ran.json["claim"], ran.json["remaining"]) == ("fp32", ["fp32"])
    fp8, fp32 = ran.json["hypotheses"]
    assert fp8["is_excluded_by_logprobs"]
    assert not fp8["fits"]
    assert 0 < fp32["needed"]["fp8"] < 2000


def test_nothing_is_claimed_where_two_cannot_be_told(url):
    import harness

    report = harness.audit(url, ["fp32", "fp32+top_k=100"], dtype="float32", tokens=50)
    assert not report
    assert (report.claim, report.remaining) == (None, ("fp32", "fp32+top_k=100"))
    needed = report.hypotheses[0].needed["fp32+top_k=100"]
    assert needed is None or needed > 50
    assert "no claim: fp32, fp32+top_k=100 cannot be told apart with so many tokens" in str(report)


def test_a_cache_in_float8_is_not_claimed_of_one_that_is_not(harness, url):
    options = ["--dtype", "float32", "--tokens", 200, "--hypotheses", "fp32,fp32+kv=fp8"]
    ran = harness("server", "audit", "--endpoint", url, *options)
    assert ran.status == 0, ran.out
    assert "  served      fp32; every other hypothesis is excluded\n" in ran.out


def test_none_is_claimed_where_another_is_served(harness, url):
    """The server's are none of these weights: what is nearest is said, and not claimed."""
    pytest.importorskip("gguf", reason="the extra `gguf` is not installed")
    options = ["--dtype", "float32", "--tokens", 400, "--hypotheses", "fp8,q4"]
    ran = harness("server", "audit", "--endpoint", url, *options)
    assert ran.status == 5, ran.out
    assert "no claim: nearest is fp8; every other hypothesis is excluded, but its log prob" in " ".join(ran.out.split())


@pytest.fixture
def served_from_float8(monkeypatch):
    """The address of a server whose cache keeps keys and values in float8 (e4m3)."""
    import torch

    from reference_engine.kv_cache import KVCache

    store = KVCache.store

    def coarse_store(self, layer, k, v, slots):
        store(self, layer, *(item.to(torch.float8_e4m3fn).to(item.dtype) for item in (k, v)), slots)

    monkeypatch.setattr(KVCache, "store", coarse_store)
    with serve() as server:
        yield server.url


def test_a_cache_in_float8_is_claimed(harness, served_from_float8):
    options = ["--dtype", "float32", "--tokens", 200, "--hypotheses", "fp32,fp32+kv=fp8,fp32+kv=fp8_e5m2,fp8"]
    ran = harness("server", "audit", "--endpoint", served_from_float8, *options)
    assert ran.status == 1, ran.out
    assert "  served      fp32+kv=fp8; every other hypothesis is excluded\n" in ran.out
