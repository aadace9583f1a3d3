"""When a comparison with a plain golden asks for the truth; what it says is what a comparison with the truth says."""

import pytest

from harness.oracle.golden import PLAIN
from harness.oracle.make_golden import make_golden
from harness.oracle.requests import Prompt
from harness.results.check import Reference

from .conftest import LENGTHS, NUM_NEW, compare

ROW = (2, LENGTHS[2] + 1)
LOGITS = "lm_head"


@pytest.fixture
def is_asked(one, tmp_path):
    """Compare a recording with a plain golden and with the truth; return whether the first asked for the second."""
    prompts = [
        Prompt(token_ids=tuple(request.token_ids[: request.prompt_length]), max_new_tokens=NUM_NEW)
        for request in one.golden.requests
    ]
    plain = make_golden(one.hf, prompts, tmp_path / "plain", truth=PLAIN, keeps_values=False)
    plain.make_truth = lambda: one.golden

    def asked(copy, **options):
        recording = copy.write(tmp_path / "recording")
        result, by_truth = compare(recording, plain, hf=one.hf, **options).result, one.compare(recording, **options)
        assert (result.outcome, result.first_divergence) == (by_truth.outcome, by_truth.first_divergence)
        assert result.findings == by_truth.findings
        assert [(tap.name, tap.verdict) for tap in result.taps] == [(tap.name, tap.verdict) for tap in by_truth.taps]
        assert result.tokens == by_truth.tokens
        assert by_truth.propagated_from is Reference.TRUTH
        assert result.propagated_from is (Reference.TRUTH if "truth" in vars(plain) else Reference.HF)
        return result.propagated_from is Reference.TRUTH

    return asked


def test_a_sound_run_asks_for_no_truth(is_asked, actual):
    assert not is_asked(actual)


def test_a_wrong_row_asks_for_it(is_asked, actual):
    actual.at("model.layers.1.self_attn.q_proj", *ROW).mul_(1.01)
    assert is_asked(actual)


def test_another_token_asks_for_it(is_asked, actual):
    """It may be a tie, which the noise decides."""
    step = next(step for step in actual.steps if step.row(*ROW) is not None)
    step.sampled[step.row(*ROW)] += 1
    assert is_asked(actual)


def test_what_was_not_judged_by_itself_asks_for_it(is_asked, actual, one):
    actual.drop("model.embed_tokens")
    assert is_asked(actual, wanted=[op.tap for op in one.hf.graph if op.tap != "model.embed_tokens"])


def test_a_cache_whose_writing_was_not_recorded_asks_for_it(is_asked, actual, one):
    actual.drop("model.layers.1.k_rope")
    assert is_asked(actual, wanted=[op.tap for op in one.hf.graph if op.tap != "model.layers.1.k_rope"])


def test_a_trigger_that_is_told_by_the_noise_asks_for_it(is_asked, actual):
    assert is_asked(actual, require=["near_tie"])
