"""Each fault of a parser is found and named, at a short text; sound parsers have none."""

import pytest

pytest.importorskip("hypothesis", reason="the extra `test` is not installed")

import harness
from harness.results.check import Outcome

from .faults import FAULTS
from .parsers import PARSERS, streamed


@pytest.mark.sampled(1)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault.family}: {fault.name}")
def test_a_parser_with_a_fault(families, fault):
    result = harness.tool_calls(fault.parse, model=families[fault.family], stream=fault.stream, num_answers=60)
    assert result.differences[0].name == fault.name
    assert len(result.differences[0].data["text"]) < 250
    assert len(result.differences) <= 4


@pytest.mark.sampled(2)
@pytest.mark.parametrize("family", PARSERS)
def test_a_sound_parser(families, family):
    parse = PARSERS[family]
    result = harness.tool_calls(parse, model=families[family], stream=streamed(parse), num_answers=30)
    assert (result.outcome, result.differences) == (Outcome.PASS, [])
    assert result.counts["text"] > 150
    assert result.counts["stream"] > 150


@pytest.mark.slow
@pytest.mark.parametrize("family", PARSERS)
def test_a_sound_parser_with_any_seed(families, family):
    parse = PARSERS[family]
    for seed in range(1, 20):
        result = harness.tool_calls(parse, model=families[family], stream=streamed(parse), num_answers=100, seed=seed)
        assert result.differences == [], seed
