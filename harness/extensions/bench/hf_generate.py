"""HuggingFace's `generate`: one padded batch, as long as its longest request."""

from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, StoppingCriteria, StoppingCriteriaList

from harness.extensions.bench.peer import BenchConfig, Generation
from harness.extensions.bench.workload import BenchWorkload

PAD_TOKEN = 0


def load_hf_model(setting: BenchConfig, dtype: str | None = None) -> Any:
    """Return HuggingFace's model of the checkpoint, with sdpa attention."""
    model = AutoModelForCausalLM.from_pretrained(
        setting.folder,
        dtype=getattr(torch, dtype or setting.dtype),
        attn_implementation="sdpa",
        local_files_only=True,
        trust_remote_code=False,
    )
    model.generation_config = GenerationConfig()  # nothing of the checkpoint's own: no end of text, no penalty
    return model.to(setting.device).eval()


class HfGeneratePeer:
    """`model.generate`, padded on the left."""

    name = "hf-generate"
    shows_steps = True

    def __init__(self, setting: BenchConfig) -> None:
        self._model = load_hf_model(setting)
        self._device = setting.device

    def generate(self, workload: BenchWorkload) -> Generation:
        """See `Peer.generate`."""
        generation = Generation()
        width = max(map(len, workload.prompts))
        rows = [[PAD_TOKEN] * (width - len(prompt)) + list(prompt) for prompt in workload.prompts]
        mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in workload.prompts]
        with torch.no_grad():
            tokens = self._model.generate(
                input_ids=torch.tensor(rows, device=self._device),
                attention_mask=torch.tensor(mask, device=self._device),
                max_new_tokens=max(workload.output_lens),
                do_sample=False,
                pad_token_id=PAD_TOKEN,
                stopping_criteria=StoppingCriteriaList([_Clock(generation)]),
            )
        continued = tokens[:, width:].tolist()
        generation.token_ids = [row[:length] for row, length in zip(continued, workload.output_lens, strict=True)]
        return generation

    def close(self) -> None:
        """See `Peer.close`."""
        del self._model


class _Clock(StoppingCriteria):  # type: ignore[misc]
    """Stops nothing, but is asked after every step."""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        if input_ids.is_cuda:
            torch.cuda.synchronize(input_ids.device)
        self._generation.end_step()
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)
