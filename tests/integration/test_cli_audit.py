"""`harness audit` and `harness.audit`: what is claimed of a server that serves float32, and what is not."""

import pytest

pytest.importorskip("httpx", reason="the extra `serve` is not installed")
pytest.importorskip("fastapi", reason="the extra `serve` is not installed")


def test_what_is_served_is_claimed(harness, url):
    pytest.importorskip("gguf", reason="the extra `gguf` is not installed")
    options = ["--dtype", "float32", "--tokens", 400, "--hypotheses", "fp32,fp8,q4"]
    ran = harness("audit", "--endpoint", url, *options)
    assert ran.status == 0, ran.out
    assert ran.out.startswith(f"PASS  reference_engine at {url} · qwen3-tiny · float32 · 400 tokens\n")
    assert "  served      fp32; every other hypothesis is excluded\n" in ran.out
    assert "a claim is wrong in less than 1 of 1,000 audits" in ran.out


def test_another_first_hypothesis_is_a_mismatch(harness, url):
    options = ["--dtype", "float32", "--tokens", 400, "--hypotheses", "fp8,fp32", "--format", "json"]
    ran = harness("audit", "--endpoint", url, *options)
    assert (ran.status, ran.json["verdict"]) == (1, "mismatch")
    assert (ran.json["claim"], ran.json["remaining"]) == ("fp32", ["fp32"])
    fp8, fp32 = ran.json["hypotheses"]
    assert fp8["is_excluded_by_logprobs"]
    assert not fp8["fits"]
    assert 0 < fp32["needed"]["fp8"] < 2000


def test_nothing_is_claimed_where_two_cannot_be_told(url):
    import harness

    found = harness.audit(url, ["fp32", "fp32+top_k=100"], dtype="float32", tokens=50)
    assert not found
    assert (found.claim, found.remaining) == (None, ("fp32", "fp32+top_k=100"))
    needed = found.hypotheses[0].needed["fp32+top_k=100"]
    assert needed is None or needed > 50
    assert "no claim: fp32, fp32+top_k=100 cannot be told with so many tokens" in str(found)


def test_none_is_claimed_where_another_is_served(harness, url):
    """The server's are none of these weights: what is nearest is said, and not claimed."""
    pytest.importorskip("gguf", reason="the extra `gguf` is not installed")
    options = ["--dtype", "float32", "--tokens", 400, "--hypotheses", "fp8,q4"]
    ran = harness("audit", "--endpoint", url, *options)
    assert ran.status == 5, ran.out
    assert "no claim: nearest is fp8; every other hypothesis is excluded, but its log prob" in " ".join(ran.out.split())


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--hypotheses", "bf16,fp8"], "no server is named"),
        (["--endpoint", "http://h", "--hypotheses", "bf16"], "at least two different hypotheses are needed"),
        (["--endpoint", "http://h", "--hypotheses", "bf16,bf16"], "at least two different hypotheses are needed"),
        (["--endpoint", "http://h", "--hypotheses", "bf16,bf16+warmth=2"], "this is no parameter of a sampler"),
        (["--endpoint", "http://h", "--hypotheses", "bf16,q4", "--ask", "top_k=x"], "this is no parameter"),
        (["--endpoint", "http://h", "--hypotheses", "bf16,bf16+grammar=3"], "this is no parameter of a sampler"),
    ],
)
def test_options_that_make_no_sense(harness, options, says):
    ran = harness("audit", *options)
    assert (ran.status, ran.out) == (2, "")
    assert says in ran.err
