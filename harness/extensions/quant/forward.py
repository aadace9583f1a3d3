"""Distributions over the next token, of HF and of llama.cpp: on which tokens, how far apart, and what a type says."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from harness.errors import Code, HarnessError
from harness.extensions.llamacpp.engine.context import Context, Model
from harness.extensions.llamacpp.engine.options import LlamaCppOptions
from harness.oracle.model import HFModel


def hf_distributions(hf: HFModel, sequences: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """Return the logarithms of HF's probabilities: [tokens, vocabulary] float32 of each sequence."""
    return [log_probabilities(hf, ids) for ids in sequences]


@torch.no_grad()
def log_probabilities(hf: HFModel, token_ids: Sequence[int]) -> torch.Tensor:
    """Return the logarithms of HF's probabilities after each token: [tokens, vocabulary] float32."""
    return _log_softmax(hf.run(input_ids=torch.tensor([list(token_ids)])).logits[0])


def llamacpp_distributions(
    path: Path, sequences: Sequence[Sequence[int]], options: LlamaCppOptions
) -> list[torch.Tensor]:
    """Return the logarithms of llama.cpp's probabilities: [tokens, vocabulary] float32 of each sequence."""
    model = Model(path, repack=options.repack)
    distributions = []
    for ids in sequences:
        with Context(model, options, None, num_seqs=1, num_cells=len(ids)) as context:
            rows = []
            for at in range(0, len(ids), context.num_batch):
                part = ids[at : at + context.num_batch]
                context.decode([(token, at + offset, 0, True) for offset, token in enumerate(part)])
                rows.append(np.stack([context.logits(row) for row in range(len(part))]))
        distributions.append(_log_softmax(torch.from_numpy(np.concatenate(rows))))
    return distributions


def _log_softmax(logits: torch.Tensor) -> torch.Tensor:
    return logits.double().log_softmax(dim=-1).float()


@dataclass(frozen=True, slots=True, kw_only=True)
class Distance:
    """Of one set of distributions from another, over all rows."""

    mean: float
    median: float
    p99: float
    max: float
    same_top: float


def distance(truth: Sequence[torch.Tensor], actual: Sequence[torch.Tensor]) -> Distance:
    """Return the KL from the truth, in nats.

    Both are logarithms of probabilities, [tokens, vocabulary] of each sequence.
    """
    rows = torch.cat([kl(ours, theirs) for ours, theirs in zip(truth, actual, strict=True)])
    pairs = zip(truth, actual, strict=True)
    same = torch.cat([ours.argmax(dim=1) == theirs.argmax(dim=1) for ours, theirs in pairs])
    return Distance(
        mean=float(rows.mean()),
        median=float(rows.median()),
        p99=float(rows.quantile(0.99)),
        max=float(rows.max()),
        same_top=float(same.double().mean()),
    )


def kl(truth: torch.Tensor, actual: torch.Tensor) -> torch.Tensor:
    """Return the KL of each row, [rows] float64; rounding may make a sum of zero slightly negative."""
    log_p, log_q = truth.double(), actual.double()
    terms = log_p.exp() * (log_p - log_q)
    return terms.nan_to_num(nan=math.inf).sum(dim=1).clamp(min=0)


def perplexity(distributions: Sequence[torch.Tensor], sequences: Sequence[Sequence[int]]) -> float:
    """Return exp of the mean negative logarithm of each next token's probability."""
    losses = [
        -rows[:-1].double().gather(1, torch.tensor(ids[1:])[:, None])
        for rows, ids in zip(distributions, sequences, strict=True)
    ]
    return float(torch.cat(losses).mean().exp())


Sequences = list[list[int]]


def split_text(token_ids: Sequence[int], hf: HFModel, num_tokens: int) -> Sequences:
    """Cut a text's tokens into sequences of at most `num_tokens` and of what the model takes.

    Raises:
        HarnessError: EMPTY_PROMPT: there is nothing to predict.
    """
    size = min(num_tokens, hf.max_positions or num_tokens)
    parts = [list(token_ids[at : at + size]) for at in range(0, len(token_ids), size)]
    parts = [part for part in parts if len(part) > 1]
    if not parts:
        what, hint = "the text has too few tokens", "give more text, or leave it out"
        raise HarnessError(Code.EMPTY_PROMPT, what, where="quant", actual=len(token_ids), hint=hint)
    return parts


@torch.no_grad()
def sample_text(hf: HFModel, *, num_sequences: int, num_tokens: int, seed: int) -> Sequences:
    """Let the model say something: its own distribution, without cut or temperature.

    The seed is of the choices, and of the first tokens where the model has none of its own.
    """
    num_tokens = min(num_tokens, hf.max_positions or num_tokens)
    generator = torch.Generator().manual_seed(seed)
    begin = getattr(hf.config, "bos_token_id", None)
    first = torch.randint(hf.vocab_size, (num_sequences, 1), generator=generator)
    ids = torch.full_like(first, begin) if isinstance(begin, int) else first
    while ids.shape[1] < num_tokens:
        probabilities = hf.run(input_ids=ids).logits[:, -1].double().softmax(dim=-1)
        chosen = torch.multinomial(probabilities, 1, generator=generator)
        ids = torch.cat((ids, chosen), dim=1)
    rows: Sequences = ids.tolist()
    return rows


@dataclass(frozen=True, slots=True, kw_only=True)
class TypeRun:
    """A type's size, and the distributions of which its costs are the distances: each [tokens, vocabulary]."""

    name: str
    size_bytes: int
    bits_per_weight: float
    tensor_types: Mapping[str, float]
    """See `shares`."""
    note: str = ""
    exact: HFModel
    """HF with the dequantised weights."""
    dequantised: list[torch.Tensor]
    """Of that."""
    engine: list[torch.Tensor] | None
    """Of the engine that the type is for; None: it is not installed."""
    prompt_lengths: Sequence[int] = ()
    """Tokens of each sequence that the engine computed as a prompt, where the rest came token by token."""


def shares(tensors: Iterable[tuple[str, int]]) -> dict[str, float]:
    """Return each type's share of all bytes, the largest first, from the types and bytes of tensors."""
    num_bytes: Counter[str] = Counter()
    for name, size in tensors:
        num_bytes[name] += size
    return {name: size / max(1, num_bytes.total()) for name, size in num_bytes.most_common()}
