"""A server with adapters: each model's name is judged by its own merged weights, in a mixed batch too."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Event

import pytest

httpx = pytest.importorskip("httpx", reason="the extra `serve` is not installed")
pytest.importorskip("fastapi", reason="the extra `serve` is not installed")

from harness.extensions.server.address import Address  # noqa: E402
from harness.extensions.server.check.run import check_endpoint  # noqa: E402
from harness.results.check import Outcome  # noqa: E402

from ....unit.lora_adapter import FOLDER, write_adapter  # noqa: E402
from ..served import serve  # noqa: E402
from .conftest import make_plan  # noqa: E402


@pytest.fixture(scope="module")
def adapters(tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters")
    return {
        "one": write_adapter(folder / "one", seed=1),
        "two": write_adapter(folder / "two", seed=2, rank=2, modules=("q_proj", "v_proj")),
    }


@pytest.fixture(scope="module")
def url(adapters):
    options = {"dtype": "bfloat16", "max_num_seqs": 32, "enable_prefix_caching": True}
    with serve(FOLDER, model="base", adapters=adapters, **options) as server:
        yield server.url


def check(url, model, lora):
    plan = make_plan(FOLDER, dtype="bfloat16", max_new_tokens=12).changed(lora=lora)
    return check_endpoint(plan, Address(url=url, served_model=model), num_again=2)


@contextmanager
def busy(url, models):
    """Keep the server busy with other models, so that batches hold rows of all."""
    is_done = Event()

    def send(model):
        body = {"model": model, "prompt": [1, 64, 155], "max_tokens": 40, "ignore_eos": True}
        num_sent = 0
        while not is_done.is_set():
            httpx.post(f"{url}/v1/completions", json=body, timeout=600).raise_for_status()
            num_sent += 1
        return num_sent

    with ThreadPoolExecutor(len(models)) as pool:
        jobs = [pool.submit(send, model) for model in models]
        try:
            yield
        finally:
            is_done.set()
        assert all(job.result() for job in jobs)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["base", "one", "two"])
def test_base_and_adapters_in_the_same_batches(url, adapters, model):
    with busy(url, [name for name in ("base", "one", "two") if name != model]):
        result = check(url, model, adapters.get(model))
    assert result.served_model == model
    assert [run.findings for run in result.runs if run.findings] == []


@pytest.mark.slow
@pytest.mark.parametrize(("served", "judged_as"), [("base", "one"), ("one", None), ("one", "two")])
def test_another_adapter_is_found(url, adapters, served, judged_as):
    result = check(url, served, adapters.get(judged_as))
    assert result.outcome is Outcome.MISMATCH
    assert {"H048", "H117"} & {finding.code.value for finding in result.runs[0].findings}


def test_another_scale_is_found(url, adapters, tmp_path):
    adapter = write_adapter(tmp_path / "other", seed=1, alpha=6.0)
    result = check(url, "one", adapter)
    assert any(finding.code == "H117" for finding in result.runs[0].findings)
