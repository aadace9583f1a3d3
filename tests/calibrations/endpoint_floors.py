"""Measure how far the log probabilities of sound engines, and of wrong ones, are off, in units of HF's own noise.

The bounds of `harness.extensions.server.logprobs` were chosen from this table.
Engines run in this process, without HTTP.

    python -m tests.calibrations.endpoint_floors [--stories ../shared/models/stories260k] [--out FILE]

With --model, other models, and --seed, other prompts, the bounds are tried on what they were not chosen from: the last
columns count the groups of rows that are beyond them, false alarms of sound engines and detections of wrong ones.
"""

import argparse
import json
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from transformers import AutoModelForCausalLM

from harness.base.files import scratch_folder
from harness.base.threads import one_thread
from harness.extensions.server.logprobs import bounds
from harness.extensions.server.truth import TruthRow, Walk, walk_truth
from harness.oracle.model import load_model
from reference_engine import EngineConfig, LLMEngine, SamplingParams

ROOT = Path(__file__).parents[2]
NUM_PROMPTS, NEW_TOKENS, TOP = 16, 32, 5
ROWS = (8, 32, 128)
Served = list[tuple[list[int], list[dict[int, float]]]]
"""For each prompt the new tokens, and the log probabilities of each."""


def by_reference(folder: Path, dtype: str, prompts: Sequence[list[int]], **options: Any) -> Served:
    """Return what the reference engine answers."""
    with LLMEngine(folder, EngineConfig(dtype=dtype, **options)) as engine:
        params = SamplingParams(max_new_tokens=NEW_TOKENS, num_logprobs=TOP, ignore_eos=True)
        outputs = engine.generate(prompts, params)
    return [
        (
            list(output.token_ids),
            [
                dict(token_logprobs.top) | {token: token_logprobs.logprob}
                for token, token_logprobs in zip(output.token_ids, output.logprobs, strict=True)
            ],
        )
        for output in outputs
    ]


def by_hf(folder: Path, dtype: str, prompts: Sequence[list[int]], attention: str) -> Served:
    """Return what HF's generate answers, through its cache."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype), attn_implementation=attention)
    served = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        output = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS,
            do_sample=False, output_logits=True, return_dict_in_generate=True, pad_token_id=0,
        )  # fmt: skip
        tokens = output.sequences[0, len(prompt) :].tolist()
        rows = [logits[0].float().log_softmax(-1) for logits in output.logits]
        tops = [row.topk(TOP) for row in rows]
        logprobs = [
            dict(zip(top.indices.tolist(), top.values.tolist(), strict=True)) | {token: float(row[token])}
            for row, top, token in zip(rows, tops, tokens, strict=True)
        ]
        served.append((tokens, logprobs))
    return served


def engines(folder: Path, dtype: str, prompts: Sequence[list[int]]) -> Iterator[tuple[str, Callable[[], Served]]]:
    """Yield sound engines, then wrong ones."""
    yield "reference, paged", lambda: by_reference(folder, dtype, prompts)
    yield "reference, contiguous", lambda: by_reference(folder, dtype, prompts, attention_backend="contiguous")
    yield "reference, recompute", lambda: by_reference(folder, dtype, prompts, attention_backend="recompute")
    yield "reference, chunks of 5", lambda: by_reference(folder, dtype, prompts, max_num_batched_tokens=5)
    yield "hf sdpa", lambda: by_hf(folder, dtype, prompts, "sdpa")
    yield "hf eager", lambda: by_hf(folder, dtype, prompts, "eager")
    for factor in (2.0, 1.2):
        yield f"WRONG: rope base x {factor}", partial(with_rope, folder, dtype, prompts, factor)


def with_rope(folder: Path, dtype: str, prompts: Sequence[list[int]], factor: float) -> Served:
    """Return what the reference engine answers with another rope base."""
    with scratch_folder("harness-") as scratch:
        copy = shutil.copytree(folder, scratch / "model")
        config = json.loads((copy / "config.json").read_text())
        place = config.get("rope_parameters") or config
        by_layer = [item for item in place.values() if isinstance(item, dict) and "rope_theta" in item]
        for item in by_layer or [place]:  # Gemma 3 has one for each type of layer
            item["rope_theta"] = item.get("rope_theta", 10_000.0) * factor
        (copy / "config.json").write_text(json.dumps(config))
        return by_reference(copy, dtype, prompts)


def figures(folder: Path, dtype: str, prompts: Sequence[list[int]], served: Served) -> list[str]:
    """Return RMS and maximum over all rows, and the largest RMS and maximum over groups of a few rows."""
    hf = load_model(folder, dtype=getattr(torch, dtype))
    walks = [
        Walk(
            token_ids=(*prompt, *tokens),
            wanted={len(prompt) - 1 + at: frozenset(row) for at, row in enumerate(logprobs)},
        )
        for prompt, (tokens, logprobs) in zip(prompts, served, strict=True)
    ]
    truth = walk_truth(hf, walks)
    pairs = [
        errors(truth[walk][len(prompt) - 1 + at], row)
        for walk, (prompt, (_, logprobs)) in enumerate(zip(prompts, served, strict=True))
        for at, row in enumerate(logprobs)
    ]
    cells = [f"{rms(pairs):.2f}", f"{largest(pairs):.2f}"]
    counts = [str(is_beyond(pairs))]
    for size in ROWS:
        groups = [pairs[at : at + size] for at in range(0, len(pairs) - size + 1, size)]
        cells += [f"{max(map(rms, groups)):.2f}", f"{max(map(largest, groups)):.2f}"]
        counts += [f"{sum(map(is_beyond, groups))} of {len(groups)}"]
    return [*cells, *counts]


def is_beyond(pairs: Sequence[tuple[list[float], list[float]]]) -> bool:
    """Whether a check of so many rows would end in a finding."""
    rms_bound, max_bound = bounds(len(pairs))
    return rms(pairs) > rms_bound or largest(pairs) > max_bound


def errors(row: TruthRow, logprobs: dict[int, float]) -> tuple[list[float], list[float]]:
    """Return errors and noise of a row, as the judge takes them."""
    noise = [max(abs(row.control[token] - row.logprobs[token]), row.resolution) for token in logprobs]
    return [value - row.logprobs[token] for token, value in logprobs.items()], noise


def rms(pairs: Sequence[tuple[list[float], list[float]]]) -> float:
    """Return the ratio of root mean squares over some rows."""
    errors_of_server, noise = (torch.tensor([value for pair in pairs for value in pair[part]]) for part in (0, 1))
    return float(errors_of_server.double().square().mean().sqrt() / noise.double().square().mean().sqrt())


def largest(pairs: Sequence[tuple[list[float], list[float]]]) -> float:
    """Return the ratio of maxima over some rows."""
    error_of_server, noise = (max(abs(value) for pair in pairs for value in pair[part]) for part in (0, 1))
    return error_of_server / noise


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stories", type=Path)
    parser.add_argument("--model", type=Path, action="append")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    folders = [ROOT / "cases" / "checkpoints" / name for name in ("qwen3-tiny", "llama-tiny", "qwen2-tiny")]
    folders = options.model or [*folders, *([options.stories] if options.stories else [])]
    draw, rows = random.Random(options.seed), []
    for folder in folders:
        vocabulary = json.loads((folder / "config.json").read_text())["vocab_size"]
        prompts = [[draw.randrange(4, vocabulary) for _ in range(draw.randrange(4, 40))] for _ in range(NUM_PROMPTS)]
        for dtype in ("bfloat16", "float16", "float32"):
            for name, serve in engines(folder, dtype, prompts):
                rows.append([folder.name, dtype, name, *figures(folder, dtype, prompts, serve())])
                print(*rows[-1], flush=True)
    headers = ["model", "dtype", "engine", "rms", "max"]
    headers += [f"{kind}, {size} rows" for size in ROWS for kind in ("rms", "max")]
    headers += ["beyond, all", *(f"beyond, {size} rows" for size in ROWS)]
    table = tabulate(rows, headers, tablefmt="github", disable_numparse=True)
    print(table) if options.out is None else options.out.write_text(table + "\n")


if __name__ == "__main__":
    with one_thread():
        main()
