"""The tests of draws by themselves: what a sound sampler does not reach, and what each alternative is found by."""

import random
from dataclasses import replace

import pytest
import torch

pytest.importorskip("httpx", reason="the extra `serve` is not installed")

from harness.extensions.server.sampler.evidence import Draw, SamplerEvidence, alternatives
from harness.extensions.server.sampler.judge import (
    Levels,
    judge_independence,
    judge_pooled,
    judge_seeds,
    judge_setting,
    kolmogorov_distance,
    total_log_ratios,
)
from harness.extensions.server.sampler.logprobs import LogprobEvidence
from harness.oracle.sampling import Chain, Past, SamplingSettings

SETTINGS = SamplingSettings(temperature=1.5, top_p=0.7, repetition_penalty=1.4)
EOS = (3,)


def evidence_of(chain, settings, *, asked=SETTINGS, seed=0, num=300, noise=0.0):
    """Draw from a chain, and hold the draws against the chain of transformers with the settings that were asked for."""
    draw, evidence = random.Random(seed), SamplerEvidence(chain=Chain(), eos=EOS, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    for at in range(num):
        logits = torch.randn(24, generator=generator, dtype=torch.float64) * 1.5
        control = logits + noise * torch.randn(24, generator=generator, dtype=torch.float64)
        past = Past(prompt=[draw.randrange(24) for _ in range(4)], answer=[draw.randrange(24) for _ in range(at % 8)])
        server = logits + noise * torch.randn(24, generator=generator, dtype=torch.float64)
        p = chain.probabilities(server, settings, past)
        token_id = draw.choices(range(24), p.tolist())[0]
        drawn = Draw(request=at // 8, step=at % 8, settings=asked, past=past, token_ids=(token_id,))
        evidence.add(drawn, logits, control)
    return evidence


def judged(evidence):
    levels, totals = Levels.of({"x": evidence}), total_log_ratios({"x": evidence})
    judgement = judge_setting("x", evidence, levels, totals)
    pooled = judge_pooled({"x": evidence}, levels, is_named=bool(judgement.findings))
    return (
        judgement,
        [*judgement.findings, *pooled.findings, *judge_independence({"x": evidence}, levels, {"x": judgement.follows})],
        pooled,
    )


@pytest.mark.sampled(1)
@pytest.mark.parametrize("noise", [0.0, 0.02])
def test_sound_draws_alarm_nobody(noise):
    for seed in range(3):
        judgement, findings, _ = judged(evidence_of(Chain(), SETTINGS, seed=seed, num=100, noise=noise))
        assert (judgement.follows, judgement.num_outside, findings) == ("as asked", 0, [])


@pytest.mark.slow
def test_what_so_many_draws_find_is_found_and_what_they_may_miss_is_said():
    _, _, pooled = judged(evidence_of(Chain(), SETTINGS, num=250))
    others = {alternative.name: alternative for alternative in alternatives(Chain(), SETTINGS, EOS)}
    assert set(pooled.would_find) | set(pooled.could_miss) <= others.keys()
    assert {"top_p ignored", "repetition_penalty the wrong way round"} <= set(pooled.would_find)
    for name in pooled.would_find[::6]:
        judgement, findings, _ = judged(evidence_of(others[name].chain, others[name].settings, seed=1, num=250))
        assert findings, name
        assert name in (judgement.follows or findings[0].message), (name, judgement.follows)


def test_what_a_sampler_does_for_some_values_alone_is_said_where_the_draws_may_miss_it():
    """top_k ends at 8: two of three settings are served without it, and no draw of theirs shows that."""
    settings = {name: SamplingSettings(temperature=0.6, top_k=int(name)) for name in ("3", "18", "24")}
    served = {name: replace(asked, top_k=asked.top_k if asked.top_k <= 8 else 0) for name, asked in settings.items()}
    evidence = {name: evidence_of(Chain(), served[name], asked=settings[name], num=60) for name in settings}
    levels, totals = Levels.of(evidence), total_log_ratios(evidence)
    pooled = judge_pooled(evidence, levels, is_named=False)
    assert not any(judge_setting(name, evidence[name], levels, totals).findings for name in settings)
    assert not pooled.findings
    assert "top_k ignored" in pooled.would_find
    assert "top_k ignored (in 18 alone)" in pooled.could_miss
    assert "top_k ignored (in 24 alone)" in pooled.no_change
    assert not any("which was not asked for (in" in name for name in (*pooled.could_miss, *pooled.no_change))


def test_a_draw_that_is_hidden_is_one_of_the_end_tokens():
    evidence = SamplerEvidence(chain=Chain(), eos=(0, 1), seed=0)
    logits = torch.tensor([5.0, -40.0, 0.0], dtype=torch.float64)
    evidence.add(Draw(request=0, step=0, settings=SamplingSettings(), past=Past(), token_ids=(0, 1)), logits, logits)
    assert evidence.draws[0].token_id == 0


def test_distances_and_what_rounding_explains_of_seeds():
    assert kolmogorov_distance([0.125, 0.375, 0.625, 0.875]) == pytest.approx(0.125)
    assert kolmogorov_distance([0.5] * 9) == pytest.approx(0.5)
    levels = Levels(num_tests=100)
    assert levels.shift(400, 0.01) == pytest.approx(0.1435, abs=1e-3)
    assert judge_seeds({"alone": 2}, [1e-7] * 8, levels)[0] == 0
    assert judge_seeds({"alone": 2}, [0.6] * 8, levels)[0] == 8
    assert judge_seeds({"alone": 2}, [0.1] * 16, levels)[0] == 11  # 12 of 16 at 0.2 have a chance of 3e-6
    excused, findings = judge_seeds({"alone": 2, "again": 1}, [1e-5] * 8, levels)
    assert excused == 1
    assert [finding.message for finding in findings] == [
        "2 requests drew other tokens with the same seed alone; rounding explains 1"
    ]


def test_rounding_flips_more_draws_than_the_total_variation_where_sums_are_inverted():
    logits = torch.zeros(64, dtype=torch.float64)
    control = logits.clone()
    control[0] += 0.1  # all later sums move
    evidence = SamplerEvidence(chain=Chain(), eos=(), seed=0)
    evidence.add(Draw(request=0, step=0, settings=SamplingSettings(), past=Past(), token_ids=(5,)), logits, control)
    (draw,) = evidence.draws
    uniforms = torch.linspace(0, 1, 100_001, dtype=torch.float64)[:-1]
    drawn = [
        torch.searchsorted(item.softmax(dim=-1).cumsum(dim=-1), uniforms, right=True) for item in (logits, control)
    ]
    assert draw.flips == pytest.approx(float((drawn[0] != drawn[1]).double().mean()), abs=1e-3)
    assert draw.flips > 10 * draw.noise


def test_deviations_that_change_nothing_are_said():
    evidence = SamplerEvidence(chain=Chain(), eos=(), seed=0)
    logits = torch.tensor([60.0, 0.0, -1.0], dtype=torch.float64)
    settings = SamplingSettings(temperature=0.6, top_k=2)
    for at in range(20):
        evidence.add(Draw(request=at, step=0, settings=settings, past=Past(), token_ids=(0,)), logits, logits)
    pooled = judge_pooled({"x": evidence}, Levels.of({"x": evidence}), is_named=False)
    assert (pooled.would_find, pooled.could_miss) == ((), ())
    assert {"temperature ignored", "top_k ignored"} <= set(pooled.no_change)


def test_log_probabilities_that_are_all_null_fit_nothing():
    evidence = LogprobEvidence(chain=Chain())
    logits = torch.zeros(4, dtype=torch.float64)
    draw = Draw(request=0, step=0, settings=SamplingSettings(), past=Past(), token_ids=(1,))
    evidence.add(draw, {1: None, 2: None}, logits, logits, 0)
    assert [(result.num_values, result.num_misfits, result.fits) for result in evidence.results()] == [
        (0, 2, False)
    ] * 4


def test_draws_of_one_random_number_are_told_where_one_token_is_nearly_certain():
    logits = torch.tensor([2.0, 0.0, -1.0], dtype=torch.float64)
    p = logits.softmax(dim=-1)
    for num_numbers, is_found in ((1, True), (4, False)):
        numbers, evidence = random.Random(1), SamplerEvidence(chain=Chain(), eos=(), seed=0)
        for request in range(100):
            uniforms = [numbers.random() for _ in range(num_numbers)]
            for step in range(4):
                token_id = int(torch.searchsorted(p.cumsum(dim=-1), uniforms[step % num_numbers]))
                draw = Draw(request=request, step=step, settings=SamplingSettings(), past=Past(), token_ids=(token_id,))
                evidence.add(draw, logits, logits)
        findings = list(judge_independence({"x": evidence}, Levels.of({"x": evidence}), {"x": "as asked"}))
        assert [finding.message.split(",")[0] for finding in findings] == (
            ["the draws of one request depend on each other"] if is_found else []
        )
