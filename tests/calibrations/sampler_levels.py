"""How often a sound sampler alarms `harness server sampler`, at levels so loose that alarms can be counted.

    python -m tests.calibrations.sampler_levels [--runs 300] [--draws 80] [--noise 0.02]

Each run draws from random logits by the claimed chain, under four settings, and is judged by the tests of the command
on draws. The level of the command is one false alarm in 1,000 runs, of which few runs can see anything; at a level of
one half, and of a tenth, the share of runs that alarm must not be above the level either. `--noise` is the standard
deviation of the server's own rounding of the logits, and of HF's.
"""

import argparse
import random
from collections import Counter
from dataclasses import replace

import torch
from tabulate import tabulate

from harness.extensions.server.sampler.evidence import Draw, SamplerEvidence
from harness.extensions.server.sampler.judge import (
    FALSE_ALARM,
    Levels,
    judge_independence,
    judge_pooled,
    judge_setting,
    total_log_ratios,
)
from harness.extensions.server.sampler.requests import SETTINGS, TOKENS
from harness.oracle.sampling import Chain, Past

LEVELS = (0.5, 0.1, FALSE_ALARM)
NAMES = ("hot", "top_k", "top_p", "together")
VOCAB = 48


def main() -> None:
    """Run everything, and print the shares."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=300)
    parser.add_argument("--draws", type=int, default=80, help="of each setting")
    parser.add_argument("--noise", type=float, default=0.02, help="of the logits")
    arguments = parser.parse_args()
    alarms = Counter[float]()
    for seed in range(arguments.runs):
        evidence = {
            name: sound_draws(name, at, seed, num=arguments.draws, noise=arguments.noise)
            for at, name in enumerate(NAMES)
        }
        alarms.update(level for level in LEVELS if is_alarmed(evidence, level))
    rows = [(level, alarms[level], arguments.runs, f"{alarms[level] / arguments.runs:.3f}") for level in LEVELS]
    print(tabulate(rows, headers=("level", "runs that alarm", "runs", "share")))


def sound_draws(name: str, at: int, seed: int, *, num: int, noise: float) -> SamplerEvidence:
    """Return draws of one setting by the claimed chain; `at` numbers its requests apart from the others'."""
    settings = next(setting.settings for setting in SETTINGS if setting.name == name)
    draw, generator = random.Random(f"{seed}/{name}"), torch.Generator().manual_seed(seed * len(NAMES) + at)
    evidence = SamplerEvidence(chain=Chain(), eos=(0,), seed=seed)
    for step in range(num):
        logits = 1.5 * torch.randn(VOCAB, generator=generator, dtype=torch.float64)
        control, server = (
            logits + noise * torch.randn(VOCAB, generator=generator, dtype=torch.float64) for _ in range(2)
        )
        past = Past(prompt=[draw.randrange(VOCAB) for _ in range(6)], answer=[draw.randrange(VOCAB)] * (step % TOKENS))
        p = Chain().probabilities(server, settings, past)
        token_id = draw.choices(range(VOCAB), p.tolist())[0]
        request = step // TOKENS * len(NAMES) + at
        answered = Draw(request=request, step=step % TOKENS, settings=settings, past=past, token_ids=(token_id,))
        evidence.add(answered, logits, control)
    return evidence


def is_alarmed(evidence: dict[str, SamplerEvidence], level: float) -> bool:
    """Whether any test of the draws alarms where so many false alarms are allowed."""
    levels, totals = replace(Levels.of(evidence), false_alarm=level), total_log_ratios(evidence)
    results = {name: judge_setting(name, item, levels, totals) for name, item in evidence.items()}
    follows = {name: item.follows for name, item in results.items()}
    return (
        any(item.findings for item in results.values())
        or bool(judge_pooled(evidence, levels, is_named=False).findings)
        or any(judge_independence(evidence, levels, follows))
    )


if __name__ == "__main__":
    main()
