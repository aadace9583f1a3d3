from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from reference_engine import sampler
from reference_engine.requests.sampling import SamplingParams
from reference_engine.requests.sequence import Sequence
from reference_engine.sampler import allowed_tokens, sample, uniforms
from reference_engine.scores import penalise

V = 50


def make_sequence(seed: int = 0, token_ids: tuple[int, ...] = (1, 2), **params: Any) -> Sequence:
    return Sequence(
        request_id=0, token_ids=list(token_ids), num_prompt_tokens=1, params=SamplingParams(**params), seed=seed
    )


def logits_of(seed: int, num_rows: int = 1) -> torch.Tensor:
    return torch.randn(num_rows, V, generator=torch.Generator().manual_seed(seed)) * 3


def frequencies(logits_V: torch.Tensor, num_draws: int, **params: Any) -> torch.Tensor:
    sequences = [make_sequence(seed=seed, **params) for seed in range(num_draws)]
    drawn = sample(logits_V.expand(num_draws, -1), sequences).token_ids
    return torch.bincount(torch.tensor(drawn), minlength=len(logits_V)) / num_draws


SETTINGS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.3, 1.0, 2.5]),
        "top_k": st.sampled_from([0, 1, 5, V, 10 * V]),
        "top_p": st.sampled_from([1.0, 0.9, 0.4, 1e-9]),
        "min_p": st.sampled_from([0.0, 0.02, 0.3, 1.0]),
        "repetition_penalty": st.sampled_from([1.0, 1.7, 0.6]),
    }
)


@settings(max_examples=100, deadline=None)
@given(rows=st.lists(SETTINGS, min_size=1, max_size=4), seed=st.integers(0, 10**6))
def test_what_is_allowed_is_transformers_answer_row_by_row(rows: list[dict[str, Any]], seed: int) -> None:
    logits_RV = logits_of(seed, len(rows))
    sequences = [make_sequence(token_ids=(3, 7, 3), **row) for row in rows]
    scores_RV = penalise(logits_RV, sequences)
    scores_RV = scores_RV / torch.tensor([row["temperature"] for row in rows])[:, None]
    actual_RV = allowed_tokens(scores_RV, [sequence.params for sequence in sequences])
    for row, logits_V, scores_V, actual_V in zip(rows, logits_RV, scores_RV, actual_RV, strict=True):
        expected = RepetitionPenaltyLogitsProcessor(row["repetition_penalty"])(
            torch.tensor([[3, 7, 3]]), logits_V[None]
        )
        expected = TemperatureLogitsWarper(row["temperature"])(None, expected)
        torch.testing.assert_close(scores_V, expected[0])
        if row["top_k"]:
            expected = TopKLogitsWarper(row["top_k"])(None, expected)
        expected = TopPLogitsWarper(row["top_p"])(None, expected) if row["top_p"] < 1 else expected
        expected = MinPLogitsWarper(row["min_p"])(None, expected)
        assert actual_V.tolist() == expected[0].isfinite().tolist()


def test_bias_and_counted_penalties_are_of_their_own_row_and_of_the_continuation() -> None:
    logits_RV = torch.zeros(4, V).index_fill_(1, torch.tensor([1, 2, 3]), 1.0) + torch.arange(V) * -1e-3
    rows = [
        make_sequence(token_ids=(1, 2, 2)),
        make_sequence(token_ids=(1, 2, 2), logit_bias={9: 5.0, 1: -5.0}),
        make_sequence(token_ids=(1, 1, 2, 2), presence_penalty=0.5),
        make_sequence(token_ids=(3, 1, 2, 1), frequency_penalty=0.4),
    ]
    assert sample(logits_RV, rows).token_ids == [1, 9, 3, 3]
    assert not any(sequence.params.is_plain for sequence in rows[1:])


@pytest.mark.parametrize(
    "params", [{}, {"top_k": 7}, {"top_p": 0.8}, {"min_p": 0.1}, {"top_k": 9, "top_p": 0.9, "min_p": 0.01}]
)
def test_tokens_are_drawn_as_often_as_they_are_likely(params: dict[str, Any]) -> None:
    logits_V, num_draws = logits_of(1)[0], 4_000
    settings = SamplingParams(temperature=1.4, **params)
    scores_V = logits_V / 1.4
    expected = scores_V.masked_fill(~allowed_tokens(scores_V[None], [settings])[0], -torch.inf).softmax(dim=-1)
    actual = frequencies(logits_V, num_draws, temperature=1.4, **params)
    assert not actual[expected == 0].any()
    is_common = expected * num_draws > 5  # the statistic is not chi-square distributed below
    chi_square = (num_draws * (actual - expected) ** 2 / expected)[is_common].sum()
    num_free = int(is_common.sum())
    assert chi_square < num_free + 5 * (2 * num_free) ** 0.5


@settings(max_examples=60, deadline=None)
@given(rows=st.lists(st.tuples(SETTINGS, st.integers(0, 2**64)), min_size=2, max_size=5), seed=st.integers(0, 99))
def test_a_row_draws_the_same_whoever_is_beside_it(rows: list[tuple[dict[str, Any], int]], seed: int) -> None:
    logits_RV = logits_of(seed, len(rows) + 1)
    sequences = [make_sequence(seed=request_seed, **params) for params, request_seed in rows] + [make_sequence()]
    together = sample(logits_RV, sequences).token_ids
    alone = [sample(logits_RV[i : i + 1], [sequence]).token_ids[0] for i, sequence in enumerate(sequences)]
    assert together == alone
    assert together[-1] == int(logits_RV[-1].argmax())


def test_each_token_and_each_seed_has_its_own_number() -> None:
    numbers = uniforms([seed for seed in range(200) for _ in range(200)], [*range(200)] * 200)
    assert len(np.unique(numbers)) == 200 * 200
    assert ((numbers >= 0) & (numbers < 1)).all()
    assert abs(numbers.mean() - 0.5) < 0.01
    grid = numbers.reshape(200, 200)
    assert abs(np.corrcoef(grid[:, 0], grid[:, 1])[0, 1]) < 0.3
    assert abs(np.corrcoef(grid[0], grid[1])[0, 1]) < 0.3
    assert uniforms([5], [3]).tolist() == uniforms([2**64 + 5], [3]).tolist()


def test_every_token_of_a_request_is_drawn_anew() -> None:
    drawn = set()
    for num_sampled in range(30):
        sequence = make_sequence(seed=4, temperature=1.0)
        sequence.sampled_token_ids = [0] * num_sampled
        drawn |= set(sample(torch.zeros(1, V), [sequence]).token_ids)
    assert len(drawn) > 15


def test_temperature_near_zero_is_greedy() -> None:
    assert frequencies(logits_of(2)[0], 50, temperature=1e-3).argmax() == logits_of(2)[0].argmax()


def test_a_token_of_probability_zero_is_never_drawn() -> None:
    logits = torch.full((1, V), -torch.inf)
    logits[0, 20] = 0.0
    assert sample(logits, [make_sequence(seed=9, temperature=1.0)]).token_ids == [20]


def test_equally_likely_tokens_beyond_top_k_are_cut_by_id() -> None:
    assert frequencies(torch.zeros(V), 500, temperature=1.0, top_k=2)[:2].sum() == 1


def test_logprobs_are_those_of_the_raw_logits_and_the_token_that_continues() -> None:
    logits_RV = logits_of(4, 3).bfloat16()
    sequences = [
        make_sequence(num_logprobs=2, repetition_penalty=1.5, temperature=1.0),
        make_sequence(),
        make_sequence(num_logprobs=0, forced_token_ids=[11]),
    ]
    sampled = sample(logits_RV, sequences)
    expected_RV = logits_RV.float().log_softmax(dim=-1)
    first, second, third = sampled.logprobs
    assert second is None
    assert first is not None
    assert third is not None
    assert first.logprob == pytest.approx(float(expected_RV[0, sampled.token_ids[0]]))
    assert [token_id for token_id, _ in first.top] == expected_RV[0].topk(2).indices.tolist()
    assert third.logprob == pytest.approx(float(expected_RV[2, 11]))
    assert third.top == ()


def test_logits_that_are_nan_give_some_token_and_no_crash() -> None:
    assert 0 <= sample(torch.full((1, V), torch.nan), [make_sequence(temperature=1.0)]).token_ids[0] < V


def test_the_generator_is_the_published_one() -> None:
    """The first three numbers of SplitMix64 from the state 0, as its authors' own code gives them."""
    states = [step * 0x9E3779B97F4A7C15 % 2**64 for step in (1, 2, 3)]
    published = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert sampler._mix(np.array(states, np.uint64)).tolist() == published
