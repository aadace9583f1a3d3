"""What tokens and log probabilities exclude, on draws whose distribution is known."""

import math
from dataclasses import replace

import pytest
import torch

from harness.extensions.server.audit import evidence
from harness.extensions.server.audit.evidence import View
from harness.extensions.server.sampler.evidence import Draw
from harness.extensions.server.sampler.logprobs import Definition
from harness.oracle.sampling import Chain, Past, SamplingSettings

ALPHA = 5e-4
SIZE, DRAWS = 12, 400


def _views(seed, distances, *, noise=0.0, settings=(), draws=DRAWS, served=0):
    """Draw from one of several hypotheses, whose logits are so far from the first one's; return views and table."""
    generator = torch.Generator().manual_seed(seed)

    def normal():
        return torch.randn(draws, SIZE, generator=generator).double()

    base, way = 1.5 * normal(), normal()
    all_logits = [base + distance * way for distance in distances] + [base] * len(settings)
    all_settings = [SamplingSettings()] * len(distances) + list(settings)
    views = [View(settings_of_view, draws, every=1) for settings_of_view in all_settings]
    chain, values = Chain(), []
    for at in range(draws):
        p = chain.probabilities(all_logits[served][at], all_settings[served])
        token = int(torch.multinomial(p, 1, generator=generator))
        rounding = noise * torch.randn(SIZE, generator=generator).double()
        said = (all_logits[served][at] + rounding).log_softmax(dim=-1)
        said_of_row = {item: float(said[item]) for item in {token, int(p.argmax())}}
        values += [(said_of_row[item], at, at // 10) for item in sorted(said_of_row)]
        draw = Draw(request=at // 10, step=at % 10, settings=SamplingSettings(), past=Past(), token_ids=(token,))
        for view, logits in zip(views, all_logits, strict=True):
            control = logits[at] + noise * torch.randn(SIZE, generator=generator).double()
            view.add(at, draw, said_of_row, logits[at], control)
    numbers, rows, requests = zip(*values, strict=True)
    table = evidence.ServerLogprobs(
        values=torch.tensor(numbers).double(), rows=torch.tensor(rows), requests=torch.tensor(requests)
    )
    return views, table


def _excluded(views, table):
    readings = evidence.readings_of(views)
    return [
        evidence.is_excluded(
            judged_reading, [reading for reading in readings if reading.at != judged_reading.at], table, ALPHA
        )
        for judged_reading in readings
        if judged_reading.name == Definition.RAW
    ]


def test_the_far_hypothesis_is_excluded_by_tokens_and_the_true_one_is_not():
    views, _ = _views(0, [0.0, 1.0])
    true, far = evidence.excluded_after(views, ALPHA)
    assert true is None
    assert far is not None
    needed = evidence.num_draws_needed(views[0], views[1], ALPHA, 2)
    assert far <= needed < DRAWS


def test_a_temperature_and_a_cut_are_excluded_by_tokens():
    settings = [SamplingSettings(temperature=0.5), SamplingSettings(top_k=2)]
    views, _ = _views(1, [0.0], settings=settings)
    true, *others = evidence.excluded_after(views, ALPHA)
    assert true is None
    assert all(others)


def test_all_are_excluded_where_a_temperature_is_served_that_is_not_among_them():
    views, _ = _views(2, [0.0, 0.5], settings=[SamplingSettings(temperature=0.4)], served=2)
    assert all(evidence.excluded_after(views[:2], ALPHA))


def test_what_is_within_rounding_is_never_told_by_tokens():
    views, _ = _views(3, [0.0, 0.01], noise=0.3)
    assert not evidence.is_distinguishable(views[0], views[1])
    assert evidence.num_draws_needed(views[0], views[1], ALPHA, 2) is None
    assert evidence.excluded_after(views, ALPHA) == [None, None]


def test_log_probabilities_tell_below_the_noise():
    views, table = _views(4, [0.0, 0.15], noise=0.1)
    assert evidence.excluded_after(views, ALPHA) == [None, None], "it is for the tokens to tell nothing here"
    assert _excluded(views, table) == [False, True]
    assert all(evidence.fit_of(reading, table).rms_ratio < 2 for reading in evidence.readings_of(views))
    needed = evidence.num_requests_needed(*evidence.readings_of(views), table, ALPHA, 1)
    assert 0 < needed * 10 < 2 * DRAWS


def test_log_probabilities_tell_nothing_of_what_is_nowhere_near():
    views, table = _views(5, [0.0, 1e-4], noise=0.1)
    assert _excluded(views, table) == [False, False]


def test_a_systematic_error_excludes_nothing_while_the_true_one_is_nearer():
    views, table = _views(6, [0.0, 0.3], draws=300)
    first, second = evidence.readings_of(views)
    leaning = replace(table, values=first.exact + 0.3 * (second.exact - first.exact))
    assert _excluded(views, leaning) == [False, True]


@pytest.mark.slow
def test_the_true_one_is_excluded_more_seldom_than_is_stated():
    """At a level of one in twenty, over 200 audits each of close and far hypotheses."""
    num = 0
    for seed in range(200):
        views, table = _views(seed, [0.0, (0.05, 0.3)[seed % 2]], noise=0.02, draws=80)
        readings = evidence.readings_of(views)
        num += evidence.excluded_after(views, 0.05)[0] is not None
        num += evidence.is_excluded(readings[0], readings[1:], table, 0.05)
    assert num <= 400 * 0.05 + 3 * math.sqrt(400 * 0.05)
