"""The truth: one HF forward in float64 over the tokens of one request, a decoder layer at a time.

Peak memory is the checkpoint in its own dtype, plus one layer in float64, plus the activations in flight.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from harness.oracle.capture import Sink, capturing
from harness.oracle.decoder import Decoder
from harness.oracle.precision import TRUTH_DTYPE, keeping_double, linear_in_double, raised, without_tf32
from harness.taps import EMBEDDING, FINAL_NORM, LOGITS


@torch.no_grad()
def truth_forward(decoder: Decoder, token_ids: Sequence[int], sink: Sink, *, logit_rows: Sequence[int]) -> None:
    """Send every tap of a float64 forward over `token_ids` to `sink`, [tokens, ...] each.

    Args:
        decoder: the model, in the dtype whose weights are to be judged; its weights are raised, never rounded again.
        token_ids: prompt and continuation.
        sink: receives the taps in float64.
        logit_rows: the positions whose logits are wanted; all positions of a large vocabulary would not fit.
    """
    ids = torch.tensor([list(token_ids)], device=decoder.device)
    with ExitStack() as stack:
        stack.enter_context(without_tf32())
        mode = stack.enter_context(keeping_double())

        def listen(tap: str, tensor: torch.Tensor) -> None:
            with mode.paused():
                sink(tap, tensor)

        stack.enter_context(_embedding_raised(decoder.module(EMBEDDING)))
        for module in (*decoder.layers, decoder.module(FINAL_NORM)):
            stack.enter_context(_raised_while_running(module))
        stack.enter_context(capturing(decoder, listen))
        hidden = decoder.model.model(input_ids=ids, use_cache=False).last_hidden_state[0]
        rows = torch.tensor(list(logit_rows), device=decoder.device)
        listen(LOGITS, linear_in_double(decoder.module(LOGITS), hidden[rows]))


@contextmanager
def _embedding_raised(module: nn.Module) -> Iterator[None]:
    """Raise the embedding's output rather than its table: the same numbers for a fraction of the memory."""

    def hook(_module: nn.Module, _args: Any, output: torch.Tensor) -> torch.Tensor:
        return output.to(TRUTH_DTYPE)

    handle = module.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def _raised_while_running(module: nn.Module) -> Iterator[None]:
    """Hold the module in float64 during its own forward only."""
    with ExitStack() as while_running:

        def before(_module: nn.Module, _args: Any) -> None:
            while_running.enter_context(raised(module))

        def after(_module: nn.Module, _args: Any, _output: Any) -> None:
            while_running.close()

        handles = [module.register_forward_pre_hook(before), module.register_forward_hook(after)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
