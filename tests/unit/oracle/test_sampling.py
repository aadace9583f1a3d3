"""The distribution of a drawn token: transformers' own processors say the same, and each order is another chain."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import generation

from harness.errors import HarnessError
from harness.oracle.sampling import ORDERS, STEPS, Chain, Over, Past, SamplingSettings, parse_order

LOGITS = torch.tensor([2.0, 1.0, 0.5, -0.5, -1.0, -3.0], dtype=torch.float64)


def by_transformers(logits, asked, past):
    seen = torch.tensor([[*past.prompt, *past.answer]])
    scores = logits[None].clone()
    if asked.logit_bias:
        for token_id, value in asked.logit_bias:
            scores[0, token_id] += value
    if asked.repetition_penalty != 1:
        scores = generation.RepetitionPenaltyLogitsProcessor(asked.repetition_penalty)(seen, scores)
    scores = generation.TemperatureLogitsWarper(asked.temperature)(seen, scores)
    if asked.top_k:
        scores = generation.TopKLogitsWarper(asked.top_k)(seen, scores)
    if asked.top_p != 1:
        scores = generation.TopPLogitsWarper(asked.top_p)(seen, scores)
    if asked.min_p:
        scores = generation.MinPLogitsWarper(asked.min_p)(seen, scores)
    if asked.typical_p != 1:
        scores = generation.TypicalLogitsWarper(asked.typical_p)(seen, scores)
    return scores[0].softmax(dim=-1)


@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    asked=st.builds(
        SamplingSettings,
        temperature=st.sampled_from((1.0, 0.5, 1.7)),
        top_k=st.sampled_from((0, 1, 3, 20)),
        top_p=st.sampled_from((1.0, 0.9, 0.4)),
        min_p=st.sampled_from((0.0, 0.05, 0.5)),
        typical_p=st.sampled_from((1.0, 0.8, 0.3)),
        repetition_penalty=st.sampled_from((1.0, 1.3, 0.8)),
        logit_bias=st.sampled_from(((), ((3, 2.5), (0, -4.0)))),
    ),
)
def test_it_is_what_transformers_draws_with(seed, asked):
    logits = torch.randn(12, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 2
    past = Past(prompt=[1, 2, 3, 3], answer=[5, 2])
    torch.testing.assert_close(Chain().probabilities(logits, asked, past), by_transformers(logits, asked, past))


def test_the_order_of_temperature_and_top_p_is_another_set():
    hot = SamplingSettings(temperature=3.0, top_p=0.7)
    after, before = (
        Chain(steps=parse_order(order)).probabilities(LOGITS, hot).count_nonzero()
        for order in ("transformers", "llamacpp")
    )
    assert (int(after), int(before)) == (3, 2)


@pytest.mark.parametrize(("over", "lowered"), [(Over.BOTH, {0, 1, 4}), (Over.PROMPT, {0, 4}), (Over.ANSWER, {1, 4})])
def test_penalties_count_the_tokens_that_they_are_over(over, lowered):
    past, plain = Past(prompt=[0, 4], answer=[1, 4]), LOGITS.softmax(dim=-1)
    for penalties, chain in (
        (SamplingSettings(repetition_penalty=2.0), Chain(repetition_over=over)),
        (SamplingSettings(presence_penalty=1.0), Chain(presence_over=over)),
    ):
        ratio = chain.probabilities(LOGITS, penalties, past) / plain
        assert {at for at in range(6) if ratio[at] < ratio.max() - 1e-9} == lowered


def test_frequency_counts_each_time_and_presence_once():
    past, plain = Past(answer=[0, 0, 0, 1]), LOGITS.softmax(dim=-1)
    frequency, presence = SamplingSettings(frequency_penalty=0.5), SamplingSettings(presence_penalty=0.5)
    for penalties, expected in ((frequency, 1.0), (presence, 0)):
        logs = (Chain().probabilities(LOGITS, penalties, past) / plain).log()
        assert float(logs[1] - logs[0]) == pytest.approx(expected)


def test_no_temperature_leaves_the_likeliest_token_after_the_penalties():
    greedy = SamplingSettings(temperature=0.0, logit_bias=((5, 10.0),))
    assert Chain().probabilities(LOGITS, greedy).tolist() == [0, 0, 0, 0, 0, 1]


@pytest.mark.parametrize(
    "cut",
    [
        SamplingSettings(top_k=2),
        SamplingSettings(top_p=0.7),
        SamplingSettings(min_p=math.exp(-1.45)),
        SamplingSettings(typical_p=0.3),
    ],
    ids=lambda cut: next(iter(cut.changed)),
)
def test_slack_lets_in_tokens_at_the_edge(cut):
    none, some = (
        set(Chain().probabilities(LOGITS, cut, slack=slack).nonzero().flatten().tolist()) for slack in (0, 0.26)
    )
    assert none < some


def test_every_step_of_an_order_is_known_and_other_words_are_refused():
    assert all(step in STEPS for order in ORDERS.values() for step in order)
    assert parse_order("top_p, temperature") == ("top_p", "temperature")
    for text in ("greedy", "top_p", "temperature,temperature"):
        with pytest.raises(HarnessError, match="H013: this is no order of the steps of a sampler"):
            parse_order(text)
