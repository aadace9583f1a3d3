"""A second list of faults, written after the rules were, and before any of it was run."""

import torch

from harness.oracle.model import load_model

from .planted import CoarseCache, EightBitCache, decoded, jittering_router, other_checkpoint, renormalised
from .test_faults import with_engine
from .training import BOS, prompts, restarting, rollout, running_on, train_column


def fresh(model, trainer, folder):
    """Yield the terms that are wrong, rows, the trainer's columns, what else is at hand, and the sound pair."""
    for seed, num_rows, num_tokens in ((201, 10, 10), (202, 14, 12)):
        rows = rollout(model, prompts(num_rows, seed=seed), seed=seed, num_tokens=num_tokens)
        columns = train_column(trainer, rows)
        sound = (rows, columns)
        more = [{**row, "prompt_ids": [BOS, *row["prompt_ids"]]} for row in rows]
        cut = [{**row, "prompt_ids": row["prompt_ids"][1:]} for row in rows]
        late = [[column[0], *column[:-1]] for column in columns]
        old = other_checkpoint(model, folder / f"fresh-{seed}", "layers.2." if seed % 2 else "mlp", size=0.07)
        module = load_model(old, dtype=torch.bfloat16, stays=True).model
        stale = train_column(module, rows)
        yield {"meaning"}, rows, train_column(trainer, rows, temperature=0.9), {}, sound
        yield {"meaning"}, with_engine(rows, train_column(trainer, rows, temperature=1.3)), columns, {}, sound
        yield {"tokens"}, with_engine(rows, train_column(trainer, more)), columns, {}, sound
        yield {"alignment"}, rows, late, {}, sound
        yield {"weights"}, with_engine(rows, stale), columns, {"previous": old}, sound
        yield {"weights"}, with_engine(rows, stale), columns, {"engine_weights": old}, sound
        eight = with_engine(rows, decoded(trainer, rows, EightBitCache))
        yield {"cache"}, with_engine(rows, decoded(trainer, rows, CoarseCache)), columns, {}, sound
        yield {"cache", "weights"}, eight, stale, {"previous": old}, sound
        leaking = train_column(trainer, rows, packs=restarting, use_cache=True, temperature=0.8)
        yield {"positions", "meaning"}, rows, leaking, {}, sound
        yield {"tokens", "weights"}, with_engine(rows, train_column(trainer, cut)), stale, {"previous": old}, sound
        running = train_column(trainer, rows, packs=running_on)
        yield {"positions", "cache"}, eight, running, {}, sound
        warm = rollout(model, prompts(num_rows, seed=seed), seed=seed, num_tokens=num_tokens, top_p=0.7)
        trainer_column = train_column(trainer, warm)
        yield (
            {"meaning"},
            with_engine(warm, renormalised(trainer, warm, 0.7)),
            trainer_column,
            {},
            (warm, trainer_column),
        )

    if model == "qwen3-moe-tiny":
        yield from _routing(model, trainer)


def _routing(model, trainer):
    """Yield the same of a router that is not replayed."""
    for seed, temperature in ((203, 1.0), (204, 0.8), (205, 1.0)):
        inputs = []
        for row in rollout(model, prompts(12, seed=seed), seed=seed, num_tokens=12):
            seen = []
            with jittering_router(size=0.2, seen=seen):
                (column,) = train_column(trainer, [row])
            inputs.append({**row, "engine_logprobs": column, "routed_experts": torch.stack(seen, dim=1).tolist()})
        expected = {"routing"} if temperature == 1 else {"routing", "meaning"}
        columns = train_column(trainer, inputs, temperature=temperature)
        yield expected, inputs, columns, {}, (inputs, [row["engine_logprobs"] for row in inputs])
