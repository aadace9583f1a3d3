"""Sampled speculation: each token that is drawn is held against the exact distribution of its row."""

import random
from dataclasses import replace

import pytest

pytest.importorskip("httpx", reason="the extra `serve` is not installed")
pytest.importorskip("fastapi", reason="the extra `serve` is not installed")

from harness.errors import Code
from harness.extensions.server.sampler import requests
from harness.extensions.server.sampler.requests import SamplerSetting
from harness.extensions.server.sampler.run import check_sampler
from harness.oracle.sampling import SamplingSettings
from harness.results.check import Outcome
from reference_engine import EngineConfig, LLMEngine, SamplingParams, model_runner

from .conftest import FOLDER, plan_of, served

NUM_DRAFTS = 3
VERY_HOT = SamplerSetting(name="very hot", settings=SamplingSettings(temperature=2.5))
"""Where nothing is sure a draw says most, and a draft is rejected as often as not."""


class Greedy:
    """Drafts what the model would choose greedily."""

    def __init__(self):
        self._engine = LLMEngine(FOLDER, EngineConfig(dtype="float32", max_num_seqs=1))
        self.num_drafted = 0

    def draft(self, sequence):
        (output,) = self._engine.generate(
            [sequence.token_ids], SamplingParams(max_new_tokens=NUM_DRAFTS, ignore_eos=True)
        )
        self.num_drafted += NUM_DRAFTS
        return output.token_ids


@pytest.fixture(autouse=True)
def _very_hot(monkeypatch):
    monkeypatch.setattr(requests, "SETTINGS", (VERY_HOT,))


@pytest.fixture(scope="module")
def speculating():
    """A server that speculates, and its drafter."""
    drafter = Greedy()
    with served(drafter=drafter) as address:
        yield address, drafter


def verifying(monkeypatch, change):
    """Change the choices of a verification: `change` gets the drafts, the choices, and a second draw of each."""
    by_chunk, sample, again = LLMEngine._by_chunk, model_runner.sample, []

    def sampling(logits, sequences):
        again[:] = sample(logits, [other_draw(sequence) for sequence in sequences]).token_ids
        return sample(logits, sequences)

    def chunks(scheduled, sampled):
        second = iter(again)
        for chunk, choices in by_chunk(scheduled, sampled):
            redrawn = [next(second) for _ in choices]
            drafts = chunk.sequence.token_ids[chunk.start + 1 : chunk.stop] if chunk.sequence.num_drafts else []
            tokens = change(drafts, [token for token, _ in choices], redrawn)
            yield chunk, [(token, rest) for token, (_, rest) in zip(tokens, choices, strict=True)]

    monkeypatch.setattr(model_runner, "sample", sampling)
    monkeypatch.setattr(
        LLMEngine, "_by_chunk", staticmethod(lambda scheduled, sampled: list(chunks(scheduled, sampled)))
    )


def other_draw(sequence):
    return replace(sequence, seed=sequence.seed + 1)


def accepted_unseen(monkeypatch):
    """Every draft is accepted."""
    verifying(monkeypatch, lambda drafts, choices, again: [*drafts, *choices[len(drafts) :]])


def accepted_sometimes(monkeypatch):
    """A draft that is not drawn is accepted in one of three cases."""
    generator = random.Random(0)

    def change(drafts, choices, again):
        taken = [
            draft if generator.random() < 1 / 3 else choice for draft, choice in zip(drafts, choices, strict=False)
        ]
        return [*taken, *choices[len(drafts) :]]

    verifying(monkeypatch, change)


def drawn_again(monkeypatch):
    """After a rejection the token is drawn again from all: the draft has had its chance already."""

    def change(drafts, choices, again):
        return [
            choice if draft == choice else second
            for draft, choice, second in zip([*drafts, choices[-1]], choices, again, strict=True)
        ]

    verifying(monkeypatch, change)


def with_rows(monkeypatch, change):
    """Change what rows are drawn from: `change` gets the logits, the requests, and places among their rows."""
    sample = model_runner.sample

    def sampling(logits, sequences):
        ids = [request_id.request_id for request_id in sequences]
        places = [at - ids.index(request_id) for at, request_id in enumerate(ids)]
        return sample(*change(logits, sequences, places))

    monkeypatch.setattr(model_runner, "sample", sampling)


def one_number_for_all_rows(monkeypatch):
    """All rows of a verification draw by the same random number."""

    def change(logits, sequences, places):
        firsts = [sequences[at - place].sampled_token_ids for at, place in enumerate(places)]
        pairs = zip(sequences, firsts, strict=True)
        return logits, [replace(row, sampled_token_ids=first) for row, first in pairs]

    with_rows(monkeypatch, change)


def rows_one_off(monkeypatch):
    """Each row of a draft is drawn from the logits of the row before."""
    with_rows(
        monkeypatch,
        lambda logits, sequences, places: (logits[[at - (place > 0) for at, place in enumerate(places)]], sequences),
    )


def without_temperature(monkeypatch):
    """Rows of drafts are drawn without the temperature."""

    def change(logits, sequences, places):
        plain = [replace(sequence, params=replace(sequence.params, temperature=1.0)) for sequence in sequences]
        return logits, [
            bare if place else sequence for sequence, bare, place in zip(sequences, plain, places, strict=True)
        ]

    with_rows(monkeypatch, change)


DRAWS = (accepted_unseen, accepted_sometimes, drawn_again, one_number_for_all_rows, without_temperature)


def findings(result):
    return [*result.findings, *(finding for setting in result.settings for finding in setting.findings)]


@pytest.mark.slow
def test_sound_draws_pass_and_tokens_were_drafted(speculating):
    address, drafter = speculating
    result = check_sampler(plan_of(), address, num_draws=100)
    assert findings(result) == []
    assert result.outcome is Outcome.PASS
    assert drafter.num_drafted > 100


@pytest.mark.slow
@pytest.mark.parametrize("plant", DRAWS, ids=lambda plant: plant.__name__)
def test_a_fault_of_sampled_speculation_is_found_in_the_draws(speculating, monkeypatch, plant):
    plant(monkeypatch)
    result = check_sampler(plan_of(), speculating[0], num_draws=1500)
    wrong = [finding.message for finding in findings(result) if finding.code is Code.SAMPLER_DIFFERS]
    assert any("the draws " in message for message in wrong), findings(result)


@pytest.mark.slow
def test_rows_that_are_one_off_are_found_in_the_log_probabilities(speculating, monkeypatch):
    rows_one_off(monkeypatch)
    result = check_sampler(plan_of(), speculating[0], num_draws=300)
    assert Code.ENDPOINT_LOGPROBS in {finding.code for finding in findings(result)}
