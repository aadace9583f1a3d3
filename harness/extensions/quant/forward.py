"""Distributions over the next token: of HF, and of llama.cpp."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

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
    found = []
    for ids in sequences:
        with Context(model, options, None, num_seqs=1, num_cells=len(ids)) as context:
            rows = []
            for at in range(0, len(ids), context.num_batch):
                part = ids[at : at + context.num_batch]
                context.decode([(token, at + offset, 0, True) for offset, token in enumerate(part)])
                rows.append(np.stack([context.logits(row) for row in range(len(part))]))
        found.append(_log_softmax(torch.from_numpy(np.concatenate(rows))))
    return found


def _log_softmax(logits: torch.Tensor) -> torch.Tensor:
    return logits.double().log_softmax(dim=-1).float()
