"""Faults planted in one side of a small training run, by code that shares nothing with what looks for them."""

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional
from transformers import DynamicCache
from transformers.models.qwen3_moe import modeling_qwen3_moe

from harness.formats.checkpoint import resolve
from harness.oracle.caches import cache_argument


def other_checkpoint(model: str, folder: Path, part: str, *, size: float = 0.05) -> Path:
    """Return a checkpoint in which the tensors of one part are others, as before an update."""
    shutil.copytree(resolve(model), folder)
    tensors = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(1)
    for name, tensor in tensors.items():
        if part in name and tensor.dim() == 2:
            step = torch.randn(tensor.shape, generator=generator) * tensor.float().std() * size
            tensors[name] = (tensor.float() + step).to(tensor.dtype)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def renormalised(module: Any, rows: Sequence[dict[str, Any]], top_p: float) -> list[list[float]]:
    """Return log probabilities under the distribution that top-p leaves."""
    columns = []
    for row in rows:
        ids = torch.tensor([[*row["prompt_ids"], *row["response_ids"]]])
        with torch.no_grad():
            chances = module(input_ids=ids).logits[0].float().softmax(dim=-1)
        begin, values = len(row["prompt_ids"]), []
        for at in range(begin, ids.shape[1]):
            ranked, order = chances[at - 1].sort(descending=True)
            kept = int((ranked.cumsum(0) - ranked < top_p).sum())
            left = {int(token) for token in order[:kept]} | {int(ids[0, at])}
            total = float(chances[at - 1, sorted(left)].sum())
            values.append(float((chances[at - 1, ids[0, at]] / total).log()))
        columns.append(values)
    return columns


class EightBitCache(DynamicCache):
    """Keeps what the prompt and earlier tokens left in eight bits."""

    dtype = torch.float8_e4m3fn

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Store rounded keys and values; a prompt reads its own as they are."""
        most = torch.finfo(self.dtype).max
        rounded = [x.clamp(-most, most).to(self.dtype).to(x.dtype) for x in (key_states, value_states)]
        stored = super().update(*rounded, *args, **kwargs)
        return (key_states, value_states) if key_states.shape[2] > 1 else stored


class TruncatedCache(DynamicCache):
    """Keeps three bits of mantissa of what it is given, cut off; a prompt reads them, too."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Store truncated keys and values: bfloat16 has seven bits of mantissa, the last four are cleared."""
        cut = [(x.view(torch.int16) & ~0xF).view(torch.bfloat16) for x in (key_states, value_states)]
        return super().update(*cut, *args, **kwargs)


class CoarseCache(EightBitCache):
    """The same with two bits of mantissa."""

    dtype = torch.float8_e5m2


def decoded(module: Any, rows: Sequence[dict[str, Any]], cache: type[DynamicCache]) -> list[list[float]]:
    """Return log probabilities of each response, token by token through a cache."""
    columns = []
    for row in rows:
        held, values = {cache_argument(module.forward): cache(config=module.config)}, []
        with torch.no_grad():
            logits = module(input_ids=torch.tensor([row["prompt_ids"]]), **held).logits[0, -1]
            for token in row["response_ids"]:
                values.append(float(logits.float().log_softmax(dim=-1)[token]))
                logits = module(input_ids=torch.tensor([[token]]), **held).logits[0, -1]
        columns.append(values)
    return columns


@contextmanager
def jittering_router(*, size: float, seen: list[torch.Tensor]) -> Iterator[None]:
    """Let the router of Qwen3-MoE choose by scores that are off by `size`, and keep what it chose in `seen`."""
    router = modeling_qwen3_moe.Qwen3MoeTopKRouter
    plain = router.forward
    generator = torch.Generator().manual_seed(2)

    def forward(self: Any, hidden_states: torch.Tensor) -> Any:
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        logits = functional.linear(rows, self.weight)
        noise = size * torch.randn(logits.shape, generator=generator).to(logits)
        chosen = (logits + noise).topk(self.top_k, dim=-1).indices
        scores = logits.float().softmax(dim=-1).gather(-1, chosen)
        if self.norm_topk_prob:
            scores = scores / scores.sum(dim=-1, keepdim=True)
        seen.append(chosen)
        return logits, scores.to(logits.dtype), chosen

    router.forward = forward
    try:
        yield
    finally:
        router.forward = plain


@contextmanager
def float32_head(module: Any) -> Iterator[None]:
    """Let the head compute in float32."""
    head = module.get_output_embeddings()
    head.forward = lambda x: functional.linear(x.float(), head.weight.float())
    try:
        yield
    finally:
        del head.forward
