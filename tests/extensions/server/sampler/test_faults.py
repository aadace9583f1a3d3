"""Each fault of a sampler is found and named; the sound one passes in every dtype."""

import pytest

pytest.importorskip("httpx", reason="the extra `serve` is not installed")
pytest.importorskip("fastapi", reason="the extra `serve` is not installed")

from harness.extensions.server.sampler.run import check_sampler
from harness.results.check import Outcome

from .conftest import plan_of, served
from .faults import FAULTS


def sentences(result):
    findings = [*result.findings, *(finding for setting in result.settings for finding in setting.findings)]
    by_code: dict[str, str] = {}
    for finding in findings:
        by_code[finding.code.value] = f"{by_code.get(finding.code.value, '')}{finding.message}; "
    return by_code


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_is_found_and_named(address, monkeypatch, fault):
    fault.plant(monkeypatch)
    result = check_sampler(plan_of(), address, num_draws=400, only=fault.settings.split(","))
    assert result.outcome is Outcome.MISMATCH
    assert fault.says in sentences(result)[fault.code], sentences(result)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_sound_server_passes(dtype):
    with served(dtype=dtype) as address:
        result = check_sampler(plan_of(dtype), address, num_draws=60, seed=3)
    assert not sentences(result)
    assert result.outcome is Outcome.PASS
    assert {setting.name: setting.num_draws >= 60 for setting in result.settings if setting.num_draws} == dict.fromkeys(
        [
            "defaults", "colder", "cold", "hot", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty",
            "frequency_penalty", "logit_bias", "together",
        ],
        True,
    )  # fmt: skip
    assert list(result.not_judged) == ["typical_p"]
    assert [definition.name for definition in result.definitions if definition.fits] == ["raw"]
    assert (result.seeds.num_alone, result.seeds.num_again) == (0, 0) or dtype != "float32"
