"""Many pairs: sound ones without an alarm, planted faults with the gap at their terms; both are logged.

Figures stand in reports/cpu/rollouts.md.
"""

import json
import logging
import os
from pathlib import Path
from statistics import median

import pytest
import torch
from transformers import DynamicCache

from harness.formats.checkpoint import resolve
from harness.oracle.model import load_model
from harness.results.check import Outcome

from .fresh import fresh
from .planted import EightBitCache, decoded, jittering_router, other_checkpoint, renormalised
from .test_faults import with_engine
from .training import prompts, restarting, rollout, running_on, train_column

pytestmark = pytest.mark.slow
_log = logging.getLogger(__name__)

MODELS = ("llama-tiny", "qwen3-tiny", "gemma3-tiny", "qwen3-moe-tiny")
NUM_SEEDS = int(os.environ.get("ROLLOUT_SEEDS", "10"))


@pytest.fixture(scope="module", params=MODELS)
def model(request):
    return request.param


@pytest.fixture(scope="module")
def trainer(model):
    return load_model(Path(resolve(model)), dtype=torch.bfloat16, stays=True).model


def sampled(model, seed, **params):
    arguments = prompts(8 + 4 * (seed % 3), seed=seed)
    return rollout(model, arguments, seed=seed, num_tokens=8 + 4 * (seed % 4), **params)


def replayed(trainer, rows):
    """Return rows of an engine whose router is a little off, with its experts, and a trainer that replays them."""
    arguments = []
    for row in rows:
        seen = []
        with jittering_router(size=0.3, seen=seen):
            (column,) = train_column(trainer, [row])
        arguments.append({**row, "engine_logprobs": column, "routed_experts": torch.stack(seen, dim=1).tolist()})
    return arguments, [row["engine_logprobs"] for row in arguments]


def sound_pairs(model, trainer):
    """Yield rows, the trainer's columns, and what else is at hand."""
    for seed in range(NUM_SEEDS):
        rows = sampled(model, seed)
        columns = train_column(trainer, rows)
        yield "recorded", rows, columns, {}
        yield "packed", rows, train_column(trainer, rows, packs=restarting), {}
        yield "cache", with_engine(rows, decoded(trainer, rows, DynamicCache)), columns, {}
        yield "at hand", rows, None, {"trainer": trainer, "layout": ("packed", "left", "right")[seed % 3]}
        warm = sampled(model, seed, temperature=0.8, top_p=0.9)
        trainer_column = renormalised(trainer, warm, 1.0)
        yield "same meaning", with_engine(warm, trainer_column), train_column(trainer, warm), {}
        if model == "qwen3-moe-tiny":
            yield "replayed", *replayed(trainer, rows), {}


def test_sound_pairs_have_no_alarm(model, trainer, compare):
    alarms, num_pairs = [], 0
    for name, rows, columns, arguments in sound_pairs(model, trainer):
        result = compare(rows, columns, model=model, **arguments)
        num_pairs += 1
        if result.outcome is not Outcome.PASS:
            alarms.append((name, [finding.message for finding in result.findings]))
    _log.info(json.dumps({"model": model, "sound pairs": num_pairs, "alarms": alarms}))
    assert alarms == []


def planted(model, trainer, folder):
    """Yield the terms that are wrong, rows, the trainer's columns, what else is at hand, and the sound pair."""
    for seed in range(max(1, NUM_SEEDS // 4)):
        rows = sampled(model, seed)
        columns = train_column(trainer, rows)
        sound = (rows, columns)
        cut = [{**row, "prompt_ids": row["prompt_ids"][1:]} for row in rows]
        yield {"meaning"}, rows, train_column(trainer, rows, temperature=(0.5, 0.7, 1.4)[seed % 3]), {}, sound
        yield {"positions"}, rows, train_column(trainer, rows, packs=running_on), {}, sound
        yield {"positions"}, rows, train_column(trainer, rows, packs=restarting, use_cache=True), {}, sound
        yield {"tokens"}, rows, train_column(trainer, cut), {}, sound
        yield {"tokens", "meaning"}, rows, train_column(trainer, cut, temperature=0.6), {}, sound
        yield {"positions", "meaning"}, rows, train_column(trainer, rows, packs=running_on, temperature=0.6), {}, sound
        eight = decoded(trainer, rows, EightBitCache)
        yield {"cache"}, with_engine(rows, eight), columns, {}, sound
        yield {"cache", "meaning"}, with_engine(rows, eight), train_column(trainer, rows, temperature=0.6), {}, sound
        cool = sampled(model, seed, top_p=0.8)
        trainer_column = train_column(trainer, cool)
        yield (
            {"meaning"},
            with_engine(cool, renormalised(trainer, cool, 0.8)),
            trainer_column,
            {},
            (cool, trainer_column),
        )
        old = other_checkpoint(model, folder / f"old-{seed}", f"layers.{seed % 3}.", size=0.1)
        module = load_model(old, dtype=torch.bfloat16, stays=True).model
        yield {"weights"}, rows, train_column(module, rows), {"previous": old}, sound
        yield {"weights"}, rows, None, {"trainer": module}, sound
        stale = train_column(module, rows, temperature=0.6)
        yield {"weights", "meaning"}, rows, stale, {"previous": old}, sound
        if model == "qwen3-moe-tiny":
            arguments, _ = replayed(trainer, rows)
            yield {"routing"}, arguments, columns, {}, (arguments, [row["engine_logprobs"] for row in arguments])


def gap(rows, columns):
    recorded = [value for row in rows for value in row["engine_logprobs"]]
    return torch.tensor([value for column in columns for value in column]) - torch.tensor(recorded)


def best_share(rows, columns, sound):
    """Return the share of the fault itself in a split of the gap into what the fault does, and the sound pair's gap."""
    rounding = gap(*sound)
    fault = (gap(rows, columns) - rounding).abs().mean()
    return float(fault / (fault + rounding.abs().mean()))


def error_of_remedies(result, sound):
    """Return how far the gap with all remedies is from that of the sound pair, as a share of the gap with the fault."""
    left = result.gap.mean_abs if result.remedied is None else result.remedied
    return abs(left - float(gap(*sound).abs().mean())) / result.gap.mean_abs


@pytest.mark.parametrize("faults", [planted, fresh])
def test_planted_faults_are_attributed(model, trainer, compare, tmp_path, faults):
    right = wrong = missed = total = best = 0.0
    lines, errors = [], {}
    for expected, rows, columns, arguments, sound in faults(model, trainer, tmp_path):
        result = compare(rows, columns, model=model, **arguments)
        terms = {term.kind: term.mean_abs for term in result.terms}
        shares = {kind: value / sum(terms.values()) for kind, value in terms.items()}
        named = {str(term.kind) for term in result.terms if not term.is_rounding} - {"rest"}
        right += sum(share for kind, share in shares.items() if kind in expected)
        wrong += bool(named - expected)
        missed += bool(expected - named)
        total += 1
        if columns is not None:  # of a trainer at hand the gap is not known here
            best += best_share(rows, columns, sound)
            errors.setdefault("+".join(sorted(expected)), []).append(error_of_remedies(result, sound))
        lines.append((sorted(expected), sorted(named), {str(kind): round(value, 3) for kind, value in shares.items()}))
    figures = {
        "model": model,
        "faults": total,
        "share": right / total,
        "best": best / sum(len(error) for error in errors.values()),
        "remedies off by, share of the gap": {name: [median(error), max(error)] for name, error in errors.items()},
        "wrong": wrong,
        "missed": missed,
    }
    _log.info(json.dumps({**figures, "off": [line for line in lines if line[0] != line[1]]}))
    assert wrong == 0
    assert right / total > 0.7
