"""What is refused before llama.cpp is asked: options that make no sense, and a package that is not there."""

import sys

import pytest

from harness.errors import Code


def test_without_the_package(harness, monkeypatch):
    from harness.extensions.llamacpp.engine import tensor

    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    tensor.llama.cache_clear()
    try:
        ran = harness(
            "check", "--engine", "llamacpp", "--engine-timeout", "0", "--model", "llama-tiny", "--token-ids", "5"
        )
    finally:
        tensor.llama.cache_clear()
    assert ran.status == 2
    assert ran.err.startswith(f"{Code.PACKAGE_MISSING}: the package llama-cpp-python is not installed")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--types", "Q9"], "there is no type 'Q9' to quantise to"),
        (["--engine-option", "nobody=1"], "has no option 'nobody'"),
    ],
)
def test_quant_refuses_what_makes_no_sense(harness, options, said):
    ran = harness("quant", *options)
    assert ran.status == 2
    assert said in ran.err
