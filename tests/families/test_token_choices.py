"""Choices among the tokens so far: judged by position, and really made where HF's model is watched."""

from collections.abc import Iterator

import pytest
import torch

from harness.extensions.faults.zoo.models import tokens
from harness.oracle.watch import Seeing, watching
from harness.results.check import Outcome

from .states import Subject, subject
from .token_choices import FAMILIES, FAULTS, SITE, fault_row, sound_rows


@pytest.fixture(scope="module")
def deepseek() -> Iterator[Subject]:
    with subject("deepseek_v32", "float32") as opened:
        yield opened


def test_attention_that_is_watched_is_as_sparse_as_without(deepseek: Subject) -> None:
    hf, ids = deepseek.oracle, tokens()
    expected = hf.run(input_ids=ids, use_cache=False).logits

    with watching(hf) as watch, watch.showing(Seeing(lambda _source, _value: None)):
        actual = hf.run(input_ids=ids, use_cache=False).logits

    assert torch.equal(actual, expected)
    assert hf.model.config._attn_implementation == "sdpa"
    assert type(hf.model.config._attn_implementation) is str


def test_a_choice_among_tokens_is_a_tap_by_position(deepseek: Subject) -> None:
    run = deepseek.check("chunked", explains=False)

    operation = deepseek.oracle.graph[f"model.layers.0.self_attn.{SITE}"]
    assert (operation.among_tokens, operation.shape) == (True, (16,))
    assert run.outcome is Outcome.PASS
    assert all(tap.num_rows == 79 for tap in run.taps if tap.name.endswith(SITE))


@pytest.mark.parametrize("name", ["one token fewer", "positions one late in chunks"])
def test_a_wrong_choice_is_found(deepseek: Subject, name: str) -> None:
    (fault,) = [item for item in FAULTS if item.name == name]

    *_, detected, tap, word, said = fault_row(deepseek, "deepseek_v32", "float32", fault)

    assert (detected, tap) == ("yes", f"model.layers.0.self_attn.{SITE}")
    assert word == ("named" if fault.says else "not named"), said


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_sound_runs_pass_and_faults_are_never_misnamed(family: str) -> None:
    with subject(family, "float32") as opened:
        rows = list(sound_rows(opened, family, "float32"))
        assert {row[3] for row in rows} == {"pass"}, rows
        for fault in FAULTS:
            *_, detected, _, word, said = fault_row(opened, family, "float32", fault)
            assert (detected, word != "wrong name") == ("yes", True), (fault.name, said)
