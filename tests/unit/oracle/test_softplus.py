"""Softplus as log(1 + exp(x)), on the thread that asks for it alone; and an engine that computes it so."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from torch.nn import functional

import harness
from harness.base.numerics import Numerics
from harness.engines import open_engine
from harness.oracle.precision import SoftplusByLog

X = torch.linspace(-9, 9, 50)


def test_small_values_lose_their_digits():
    with SoftplusByLog():
        coarse, again, untouched = functional.softplus(X), functional.softplus(input=X), functional.silu(X)
    assert torch.equal(coarse, torch.log(1 + torch.exp(X)))
    assert torch.equal(coarse, again)
    assert torch.equal(untouched, functional.silu(X))
    exact = functional.softplus(X.double())
    assert (
        float(((coarse - exact) / exact).abs().max())
        > 1e-5
        > float(((functional.softplus(X) - exact) / exact).abs().max())
    )


def test_other_threads_keep_theirs():
    plain = functional.softplus(X)
    with SoftplusByLog(), ThreadPoolExecutor(1) as pool:
        assert torch.equal(pool.submit(functional.softplus, X).result(), plain)
        assert not torch.equal(functional.softplus(X), plain)


@pytest.mark.parametrize("is_declared", [True, False])
def test_an_engine_is_held_to_what_it_declares(tiny_folder, is_declared):
    """The time steps of the tiny Mamba are small."""
    folder = tiny_folder("mamba")
    engine = open_engine("hf", folder, dtype="float32", device="cpu", options={})
    run = engine.run

    def by_log(workload, writer):
        with SoftplusByLog():
            run(workload, writer)

    engine.run = by_log
    engine.capabilities = replace(engine.capabilities, numerics=Numerics(softplus_by_log=is_declared))
    report = harness.check(
        engine, model=folder, dtype="float32", prompts=[[*range(3, 39)]], max_new_tokens=3, schedules=["plain"]
    )
    assert bool(report) == is_declared, report.text()
    if not is_declared:
        assert "out_proj.input" in report.runs[0].first_divergence.tap
