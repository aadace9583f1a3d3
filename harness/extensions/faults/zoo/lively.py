"""Random weights under which a model behaves as a trained one does: nothing vanishes, nothing saturates.

Libraries initialise with a spread of 0.02 everywhere and norms of exactly 1: activations vanish, attention is uniform,
and a norm that forgets its weight is no fault. Here a matrix keeps the size of what it multiplies (times 1.5), and what
is constant or designed by HF (norms, biases, sinks, gates) keeps its centre and gets a spread.
"""

import math
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

MATRIX_GAIN = 1.5  # scores of attention then have a standard deviation of about 2, logits of a router of 1.5
EMBEDDING_GAIN = 0.5  # small beside what the layers add, so that tied logits do not just repeat the token
STEP_GAIN = 0.5  # of the product that gives a scan its steps: they differ from token to token, by a factor of about 2
TOO_LARGE = 3.0  # RMS of a product's output; squares, scans and products of gates go beyond
SPREAD = 0.15
DECAY_RATES = (0.2, 2.0)  # of a state, before they are multiplied with the step
STEPS = (0.05, 0.5)  # of a scan: the state halves within 1 to 70 tokens


@torch.no_grad()
def make_lively(model: Any, seed: int) -> None:
    """Give every parameter of a model fresh from its constructor a plausible spread, in place.

    Tied parameters stay tied. Buffers stay, but for the biases and tables by which a router chooses experts.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        parameter.copy_(lively(name, parameter, model.get_submodule(name.rpartition(".")[0]), generator))
    for name, buffer in model.named_buffers():
        if name.endswith(("score_correction_bias", "expert_bias")):
            buffer.add_(normal(buffer, generator), alpha=SPREAD)
        elif name.endswith("tid2eid"):  # the experts of each token, by its number; all zero when fresh
            buffer.copy_(choices(buffer, model.config.num_local_experts, generator))
    tame(model, torch.randint(3, 250, (1, 48), generator=generator).to(next(model.parameters()).device))


def lively(path: str, fresh: torch.Tensor, owner: nn.Module, generator: torch.Generator) -> torch.Tensor:
    """Return new values for one parameter, from its path, its fresh values and the module that owns it."""
    if path.endswith("A_log"):
        return log_uniform(fresh, DECAY_RATES, generator)
    if path.endswith(("dt_bias", "dt_proj.bias", "dt_proj_bias")):
        return torch.log(torch.expm1(log_uniform(fresh, STEPS, generator).exp()))  # softplus turns it into the step
    if is_random_matrix(fresh):
        return fresh * (gain_of(path, owner) / math.sqrt(fan_in(fresh, owner)) / fresh.std())
    centre = fresh + 2 if path.endswith(".temp") else fresh  # a factor of the keys that is zero when fresh
    return centre + SPREAD * normal(fresh, generator)


def gain_of(path: str, owner: nn.Module) -> float:
    """Return the size of a product's output for inputs of size 1."""
    if isinstance(owner, nn.Embedding):
        return EMBEDDING_GAIN
    return STEP_GAIN if "dt_proj" in path else MATRIX_GAIN


def fan_in(matrix: torch.Tensor, owner: nn.Module) -> int:
    """Return the number of terms of each sum; an embedding counts as the matrix of logits that it may be tied to."""
    if isinstance(owner, nn.Conv1d):
        return matrix.shape[1] * matrix.shape[2]
    return matrix.shape[0] if isinstance(owner, Conv1D) else matrix.shape[-1]


def tame(model: Any, ids: torch.Tensor) -> None:
    """Run the model once and scale down each linear layer whose output is too large, before the next one sees it."""

    def scale_down(module: nn.Module, args: object, output: torch.Tensor) -> torch.Tensor:
        rms = float(output.float().pow(2).mean().sqrt())
        factor = MATRIX_GAIN / rms if rms > TOO_LARGE else 1.0
        for parameter in module.parameters():
            parameter.mul_(factor)
        return output * factor

    linears = [module for module in model.modules() if type(module) in (nn.Linear, Conv1D)]
    linears = [module for module in linears if module is not model.get_output_embeddings()]
    handles = [module.register_forward_hook(scale_down) for module in linears]
    try:
        model.eval()(input_ids=ids, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()


def is_random_matrix(fresh: torch.Tensor) -> bool:
    """Tell zero-mean noise in two dimensions or more from what has a value by design."""
    return fresh.dim() >= 2 and float(fresh.std()) > 0 and abs(float(fresh.mean())) < 0.2 * float(fresh.std())


def normal(like: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(like.shape, generator=generator).to(like)


def log_uniform(like: torch.Tensor, bounds: tuple[float, float], generator: torch.Generator) -> torch.Tensor:
    """Return logarithms that are uniform between those of two bounds."""
    low, high = (math.log(bound) for bound in bounds)
    return (low + (high - low) * torch.rand(like.shape, generator=generator)).to(like)


def choices(like: torch.Tensor, num_experts: int, generator: torch.Generator) -> torch.Tensor:
    """Return distinct experts for each row of a table [tokens, chosen]."""
    ranks = torch.rand(like.shape[0], num_experts, generator=generator).argsort(dim=-1)
    return ranks[:, : like.shape[1]].to(like)
