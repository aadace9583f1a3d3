"""Adapter of single operations of the reference engine for their suites.

Shapes: T rows, N heads, H head dim, X channels, R sampled rows, V vocab.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from harness.formats.checkpoint import embedded_cases
from reference_engine.checkpoint.load import load_weights
from reference_engine.checkpoint.model_config import ModelConfig, RopeConfig
from reference_engine.errors import EngineError
from reference_engine.layers import RMSNorm
from reference_engine.requests.detokenizer import Detokenizer
from reference_engine.requests.sampling import SamplingParams
from reference_engine.requests.sequence import Sequence as EngineSequence
from reference_engine.requests.stopping import finish_reason
from reference_engine.requests.tokenizer import Tokenizer
from reference_engine.rotary import RotaryEmbedding, apply_rotary
from reference_engine.sampler import sample


class Ops:
    """All operations of the engine; it has no LayerNorm, and only half-split rotary."""

    alphabet = " abcdefghiklmnoprstuvwz|"
    """Characters in the vocabulary of the embedded tokenizer, which drops all others."""
    load_errors = (EngineError,)

    def __init__(self) -> None:
        checkpoints = embedded_cases() / "checkpoints"
        self.checkpoint = checkpoints / "llama-tiny"
        self._tokenizer = Tokenizer(checkpoints / "qwen2-tiny")

    def rotary(self, x_TNH: torch.Tensor, positions_T: torch.Tensor, theta: float) -> torch.Tensor:
        """Rotate with the default frequencies."""
        rope = RopeConfig(rope_type="default", theta=theta, parameters={})
        config: Any = SimpleNamespace(rope=rope, rotary_dim=x_TNH.shape[-1])
        return apply_rotary(x_TNH, *RotaryEmbedding(config, x_TNH.device, x_TNH.dtype)(positions_T))

    def rms_norm(self, x_TX: torch.Tensor, weight_X: torch.Tensor, eps: float) -> torch.Tensor:
        """Normalise."""
        return RMSNorm(weight_X, eps)(x_TX)

    def sample(
        self,
        logits_RV: torch.Tensor,
        *,
        temperatures: Sequence[float],
        top_ks: Sequence[int],
        top_ps: Sequence[float],
        min_ps: Sequence[float],
        seeds: Sequence[int],
    ) -> list[int]:
        """Sample the first token of requests."""
        sequences = [
            EngineSequence(
                request_id=row,
                token_ids=[0],
                num_prompt_tokens=1,
                params=SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p),
                seed=seed,
            )
            for row, (temperature, top_k, top_p, min_p, seed) in enumerate(
                zip(temperatures, top_ks, top_ps, min_ps, seeds, strict=True)
            )
        ]
        return sample(logits_RV, sequences).token_ids

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text."""
        return self._tokenizer.encode(text)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens."""
        return self._tokenizer.decode(token_ids)

    def detokenize(self, token_ids: Sequence[int]) -> list[str]:
        """Return the text as it comes."""
        detokenizer = Detokenizer(self._tokenizer.decode)
        return [*(detokenizer.add(token_id) for token_id in token_ids), detokenizer.finish()]

    def num_generated(self, folder: Path, token_ids: Sequence[int]) -> int:
        """Count the tokens up to the one that ends a request."""
        eos_token_ids = ModelConfig.from_folder(folder).eos_token_ids
        params = SamplingParams(max_new_tokens=len(token_ids))
        sequence = EngineSequence(request_id=0, token_ids=[0], num_prompt_tokens=1, params=params, seed=0)
        for token_id in token_ids:
            sequence.append(token_id)
            if finish_reason(sequence, eos_token_ids, self.decode):
                break
        return len(sequence.sampled_token_ids)

    def load(self, folder: Path) -> Mapping[str, torch.Tensor]:
        """Load the weights in float32."""
        return load_weights(folder, ModelConfig.from_folder(folder), torch.float32, torch.device("cpu"))
