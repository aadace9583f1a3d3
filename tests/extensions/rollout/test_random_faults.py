"""Faults whose kinds, sides and sizes are drawn, alone and in pairs: the gap must go to their terms.

Figures stand in reports/cpu/rollouts.md. `ROLLOUT_FAULTS=60 ROLLOUT_SEED=1000` draws more of them, others.
"""

import json
import logging
import os
import random
from dataclasses import dataclass, replace

import pytest
import torch
from transformers import DynamicCache

import harness
from harness.formats.checkpoint import resolve
from harness.oracle.caches import cache_argument
from harness.oracle.model import load_model

from .planted import CoarseCache, EightBitCache, TruncatedCache, jittering_router, other_checkpoint
from .test_pairs import best_share
from .training import BOS, prompts, restarting, rollout, running_on

pytestmark = pytest.mark.slow
_log = logging.getLogger(__name__)
NUM_FAULTS = int(os.environ.get("ROLLOUT_FAULTS", "4"))
FIRST_SEED = int(os.environ.get("ROLLOUT_SEED", "0"))
MODELS = ("llama-tiny", "qwen3-tiny", "gemma3-tiny", "qwen3-moe-tiny")
CACHES = (EightBitCache, CoarseCache, TruncatedCache)
KINDS = ("meaning", "truncation", "tokens", "positions", "weights", "cache", "alignment", "head", "routing")
TERM = {"truncation": "meaning"}


@dataclass
class Way:
    """How a side computes its column."""

    temperature: float = 1.0
    truncates: bool = False
    first: int = 0
    """-1: the begin-of-text token is missing; 1: there are two."""
    packs: object = None
    leaks: bool = False
    cache: object = None
    weights: object = None
    has_narrow_head: bool = False
    shift: int = 0


def left(logits, sampling):
    """Return which tokens one position's sampling leaves, [vocabulary] bool."""
    chances = logits.softmax(dim=-1)
    ranked, order = chances.sort(descending=True)
    kept = (ranked.cumsum(0) - ranked < sampling.get("top_p", 1.0)) & (ranked >= sampling.get("min_p", 0) * ranked[0])
    kept[sampling.get("top_k") or len(kept) :] = False
    return torch.zeros_like(kept).scatter(0, order, kept)


def logits_of(module, rows, way):
    """Return logits of each row's response, [tokens, vocabulary] each."""
    changed = {-1: lambda ids: ids[1:], 0: lambda ids: ids, 1: lambda ids: [BOS, *ids]}[way.first]
    pair_setting = [(changed(row["prompt_ids"]), row["response_ids"]) for row in rows]
    with torch.no_grad():
        if way.cache is not None:
            return [torch.stack(list(decoded(module, *item, way.cache))) for item in pair_setting]
        tokens = [[*prompt, *response] for prompt, response in pair_setting]
        if way.packs is None:
            whole = [module(input_ids=torch.tensor([item])).logits[0] for item in tokens]
        else:
            positions, ends = way.packs(tokens)
            joined = torch.tensor([[token for item in tokens for token in item]])
            logits = module(input_ids=joined, position_ids=positions[None], use_cache=way.leaks).logits[0]
            whole = [logits[end - len(item) : end] for item, end in zip(tokens, ends, strict=True)]
    return [item[len(prompt) - 1 : -1] for item, (prompt, _) in zip(whole, pair_setting, strict=True)]


def decoded(module, prompt, response, cache):
    held = {cache_argument(module.forward): cache(config=module.config)}
    for ids in (prompt, *([token] for token in response[:-1])):
        yield module(input_ids=torch.tensor([ids]), **held).logits[0, -1]


def columns_of(module, rows, way):
    """Return what a side that computes so logs."""
    columns = []
    for logits, row in zip(logits_of(way.weights or module, rows, way), rows, strict=True):
        logits = (logits.bfloat16() if way.has_narrow_head else logits).float() / way.temperature
        tokens = torch.tensor(row["response_ids"])
        if way.truncates:
            kept = torch.stack([left(logit, row["sampling_params"]) for logit in logits])
            logits = logits.masked_fill(~kept.scatter(1, tokens[:, None], True), -torch.inf)
        column = logits.log_softmax(dim=-1).gather(1, tokens[:, None])[:, 0].tolist()
        late, early = [column[0], *column[:-1]], [*column[1:], column[-1]]
        columns.append({-1: early, 0: column, 1: late}[way.shift])
    return columns


def drawn(seed):
    """Return the configuration of one or two faults."""
    draw = random.Random(seed)
    model = MODELS[seed % 4]
    kinds = draw.sample([kind for kind in KINDS if kind != "routing" or "moe" in model], 1 if seed % 8 < 4 else 2)
    if {"cache", "head", "routing"} & set(kinds[:1]):  # what has the sides' dtype, or an engine of its own
        kinds = [kinds[0], *(kind for kind in kinds[1:] if kind in ("meaning", "tokens", "weights"))]
    kinds = [kind for at, kind in enumerate(kinds) if not at or kind not in ("cache", "head", "routing")]
    if set(kinds) == {"meaning", "truncation"}:
        kinds = kinds[:1]
    truncation = draw.choice([{"top_p": 0.7}, {"top_p": 0.85}, {"top_k": 12}, {"min_p": 0.05}])
    on_trainer = ("positions", "routing")
    return {
        "seed": seed,
        "model": model,
        "dtype": "float32" if "head" in kinds else "bfloat16",
        "kinds": kinds,
        "sides": {
            kind: "engine"
            if kind == "cache"
            else "trainer"
            if kind in on_trainer
            else draw.choice(["trainer", "engine"])
            for kind in kinds
        },
        "rows": draw.randint(6, 14),
        "tokens": draw.randint(8, 20),
        "temperature": draw.choice([0.55, 0.65, 0.75, 0.85, 1.15, 1.25, 1.5]),
        "sampling": truncation if "truncation" in kinds else {},
        "first": draw.choice([-1, 1]),
        "packs": draw.choice(["running", "leaking"]),
        "part": draw.choice(["layers.0.", "layers.1.", "layers.2.", "mlp.", "self_attn.", "embed_tokens"]),
        "size": draw.choice([0.04, 0.06, 0.09, 0.12]),
        "known": draw.choice(["previous", "engine_weights"]),
        "cache": draw.randrange(3),
        "shift": draw.choice([-1, 1]),
        "jitter": draw.choice([0.15, 0.25, 0.4]),
    }


def with_fault(way, kind, pair_setting, old):
    """Return the way with one fault more."""
    packs = running_on if pair_setting["packs"] == "running" else restarting
    changes = {
        "meaning": {"temperature": pair_setting["temperature"]},
        "truncation": {"truncates": True},
        "tokens": {"first": pair_setting["first"]},
        "positions": {"packs": packs, "leaks": pair_setting["packs"] == "leaking"},
        "weights": {"weights": old},
        "cache": {"cache": CACHES[pair_setting["cache"]]},
        "alignment": {"shift": pair_setting["shift"]},
        "head": {"has_narrow_head": True},
        "routing": {},
    }
    return replace(way, **changes[kind])


def pair(pair_setting, folder):
    """Return rows and the trainer's columns with the faults and without, and what else is at hand."""
    dtype = getattr(torch, pair_setting["dtype"])
    module = load_model(resolve(pair_setting["model"]), dtype=dtype, stays=True).model
    asked = prompts(pair_setting["rows"], seed=pair_setting["seed"])
    rows = rollout(
        pair_setting["model"],
        asked,
        dtype=pair_setting["dtype"],
        seed=pair_setting["seed"],
        num_tokens=pair_setting["tokens"],
        **pair_setting["sampling"],
    )
    old, options = None, {}
    if "weights" in pair_setting["kinds"]:
        path = other_checkpoint(pair_setting["model"], folder / "old", pair_setting["part"], size=pair_setting["size"])
        old = load_model(path, dtype=dtype, stays=True).model
        options = {pair_setting["known"] if pair_setting["sides"]["weights"] == "engine" else "previous": path}
    ways = {side: Way() for side in ("trainer", "engine")}
    for kind, side in pair_setting["sides"].items():
        ways[side] = with_fault(ways[side], kind, pair_setting, old)
    if "routing" in pair_setting["kinds"]:
        rows = [routed(row, module, pair_setting["jitter"]) for row in rows]
    sound = (
        [row["engine_logprobs"] for row in rows]
        if "routing" in pair_setting["kinds"]
        else columns_of(module, rows, Way())
    )
    if ways["engine"] != Way():
        cache = None if ways["engine"].cache is None else DynamicCache
        plain = with_columns(rows, columns_of(module, rows, Way(cache=cache)))
        rows = with_columns(rows, columns_of(module, rows, ways["engine"]))
    else:
        plain = rows
    return rows, columns_of(module, rows, ways["trainer"]), options, (plain, sound)


def with_columns(rows, columns):
    return [{**row, "engine_logprobs": column} for row, column in zip(rows, columns, strict=True)]


def routed(row, module, jitter):
    """Return the row of an engine whose router is a little off, with its experts."""
    seen = []
    with jittering_router(size=jitter, seen=seen):
        (column,) = columns_of(module, [row], Way())
    return {**row, "engine_logprobs": column, "routed_experts": torch.stack(seen, dim=1).tolist()}


@pytest.mark.parametrize("seed", range(FIRST_SEED, FIRST_SEED + NUM_FAULTS))
def test_a_drawn_fault_goes_to_its_term(seed, tmp_path):
    pair_setting = drawn(seed)
    rows, columns, options, sound = pair(pair_setting, tmp_path)
    log = [{**row, "trainer_logprobs": column} for row, column in zip(rows, columns, strict=True)]
    report = harness.rollout(log, model=pair_setting["model"], dtype=pair_setting["dtype"], **options)
    expected = {TERM.get(kind, kind) for kind in pair_setting["kinds"]}
    sizes = {term.kind: term.mean_abs for term in report.terms}
    named = {str(term.kind) for term in report.terms if not term.is_rounding} - {"rest"}
    figures = {
        "share": sum(size for kind, size in sizes.items() if kind in expected) / sum(sizes.values()),
        "best": best_share(rows, columns, sound),
        "gap": report.gap.mean_abs,
        "remedied": report.remedied,
        "named": sorted(named),
        "expected": sorted(expected),
        "terms": {str(kind): round(size, 4) for kind, size in sizes.items()},
        "details": [term.detail[:90] for term in report.terms if not term.is_rounding],
    }
    _log.info(json.dumps({**pair_setting, **figures}))
    assert named <= expected, f"{pair_setting}\n{report.text()}"
