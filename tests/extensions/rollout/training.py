"""A small training run: an engine samples rollouts, a plain loop in bfloat16 computes the trainer's log probabilities.

One fault at a time can be planted in either side.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from harness.formats.checkpoint import resolve
from reference_engine import EngineConfig, LLMEngine, SamplingParams

BOS, SEPARATOR = 1, 3


def prompts(num_rows: int = 12, *, seed: int = 0) -> list[list[int]]:
    """Return prompts that begin with a begin-of-text token, half of which are recited."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for at in range(num_rows):
        words = torch.randint(8, 250, (8 + at % 5,), generator=generator).tolist()
        made.append([BOS, *words, SEPARATOR, *words[: at % 4]] if at % 2 else [BOS, *words])
    return made


def rollout(
    model: str | Path, inputs: Sequence[Sequence[int]], *, dtype: str = "bfloat16", num_tokens: int = 12, **params: Any
) -> list[dict[str, Any]]:
    """Return rows as the reference engine samples them, with its own log probabilities (raw)."""
    engine = LLMEngine(Path(resolve(str(model))), EngineConfig(dtype=dtype, num_blocks=64))
    sampling = SamplingParams(
        max_new_tokens=num_tokens, num_logprobs=0, ignore_eos=True, **{"temperature": 1.0, "seed": 5, **params}
    )
    settings = {name: value for name, value in params.items() if name != "seed"}
    return [{**row, "sampling_params": settings} for row in sampled_rows(engine, inputs, sampling)]


def sampled_rows(engine: LLMEngine, inputs: Sequence[Sequence[int]], sampling: SamplingParams) -> list[dict[str, Any]]:
    """Return rows with the tokens that an engine samples, and its log probabilities."""
    outputs = engine.generate([list(item) for item in inputs], sampling)
    return [
        {
            "prompt_ids": list(prompt),
            "response_ids": list(output.token_ids),
            "engine_logprobs": [logprob.logprob for logprob in output.logprobs],
        }
        for prompt, output in zip(inputs, outputs, strict=True)
    ]


def train_column(
    module: Any,
    rows: Sequence[dict[str, Any]],
    *,
    temperature: float = 1.0,
    packs: Callable[[list[list[int]]], tuple[torch.Tensor, list[int]]] | None = None,
    use_cache: bool = False,
) -> list[list[float]]:
    """Return what a plain loop computes of each row's response: one row at a time, or all as one sequence.

    With a cache, HF does not keep packed rows apart.
    """
    tokens = [[*row["prompt_ids"], *row["response_ids"]] for row in rows]
    with torch.no_grad():
        if packs is None:
            logits = [module(input_ids=torch.tensor([item])).logits[0] for item in tokens]
        else:
            positions, ends = packs(tokens)
            ids = torch.tensor([[token for item in tokens for token in item]])
            whole = module(input_ids=ids, position_ids=positions[None], use_cache=use_cache).logits[0]
            logits = [whole[end - len(item) : end] for item, end in zip(tokens, ends, strict=True)]
    columns = []
    for settings, item, row in zip(logits, tokens, rows, strict=True):
        logprobs = (settings.float() / temperature).log_softmax(dim=-1)
        begin = len(row["prompt_ids"])
        columns.append([float(logprobs[at - 1, item[at]]) for at in range(begin, len(item))])
    return columns


def restarting(tokens: list[list[int]]) -> tuple[torch.Tensor, list[int]]:
    """Return the positions of a sound packed batch, and where each row ends."""
    ends = torch.tensor([len(token) for token in tokens]).cumsum(0).tolist()
    return torch.cat([torch.arange(len(token)) for token in tokens]), ends


def running_on(tokens: list[list[int]]) -> tuple[torch.Tensor, list[int]]:
    """Return positions that do not restart."""
    positions, ends = restarting(tokens)
    return torch.arange(len(positions)), ends


def write_rows(path: Path, rows: Sequence[dict[str, Any]], columns: Sequence[Sequence[float]] | None = None) -> Path:
    """Write rows as JSON lines, with the trainer's log probabilities if there are any."""
    added = [{} for _ in rows] if columns is None else [{"trainer_logprobs": list(column)} for column in columns]
    lines = [json.dumps({**row, **more}) for row, more in zip(rows, added, strict=True)]
    path.write_text("".join(f"{line}\n" for line in lines))
    return path
