"""Taps of an HF model while it runs: hooks on modules, and an attention function of our own in HF's registry.

Nothing of the library is patched: hooks are removed, the registry entry and the model's attention setting are put
back, also when the forward raises.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from typing import Any

import torch
from torch import nn

from harness.oracle.decoder import Decoder
from harness.taps import EMBEDDING, FINAL_NORM, LOGITS, layer_prefix

Sink = Callable[[str, torch.Tensor], None]
"""Receives a tap's name and its tensor [batch * tokens, ...]; it must copy what it keeps."""

_CAPTURES = count()
"""Numbers the captures: one inside of another, of two models, are two entries of HF's registry."""
_BY_OUTPUT = (
    "input_layernorm", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.q_norm",
    "self_attn.k_norm", "self_attn.o_proj", "post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
)  # fmt: skip
_BY_INPUT = {"attention": "self_attn.o_proj", "attn_residual": "post_attention_layernorm", "mlp.act": "mlp.down_proj"}
"""Taps that no module produces, each the input of one that exists."""


@contextmanager
def capturing(decoder: Decoder, sink: Sink, *, attention: str = "sdpa") -> Iterator[None]:
    """Send every tap of the forwards run in this block to `sink`, in the order in which they are computed.

    Args:
        decoder: the model to listen to.
        sink: called with each tap; leading dimensions [batch, tokens] are flattened to rows.
        attention: HF's attention to run, `sdpa` or `eager`.
    """
    with ExitStack() as stack:
        stack.enter_context(attending(decoder, attention, sink))
        for name, module in ((EMBEDDING, decoder.module(EMBEDDING)), (FINAL_NORM, decoder.module(FINAL_NORM)),
                             (LOGITS, decoder.module(LOGITS))):  # fmt: skip
            stack.enter_context(_on_output(module, name, sink))
        for index, layer in enumerate(decoder.layers):
            _listen_to_layer(stack, layer, layer_prefix(index), sink)
        yield


def _listen_to_layer(stack: ExitStack, layer: nn.Module, prefix: str, sink: Sink) -> None:
    present = {name for name, _ in layer.named_modules()}
    for site in _BY_OUTPUT:
        if site in present:
            stack.enter_context(_on_output(layer.get_submodule(site), prefix + site, sink))
    for site, reader in _BY_INPUT.items():
        stack.enter_context(_on_input(layer.get_submodule(reader), prefix + site, sink))
    stack.enter_context(_on_output(layer, f"{prefix}output", sink))


@contextmanager
def _on_output(module: nn.Module, name: str, sink: Sink) -> Iterator[None]:
    def hook(_module: nn.Module, _args: Any, output: Any) -> None:
        sink(name, _rows(output[0] if isinstance(output, tuple) else output))

    handle = module.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def _on_input(module: nn.Module, name: str, sink: Sink) -> Iterator[None]:
    def hook(_module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        sink(name, _rows(args[0]))

    handle = module.register_forward_pre_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """[batch, tokens, ...] to [batch * tokens, ...]."""
    return tensor.detach().flatten(0, 1)


@contextmanager
def attending(decoder: Decoder, attention: str, sink: Sink | None = None) -> Iterator[None]:
    """Run the model's attention as `attention`, and send `q_rope` and `k_rope` of the new tokens to `sink`.

    The queries and keys exist only between two lines of HF's attention module; its registry of attention functions is
    the public way to see them.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    function = _attention_function(decoder, attention)

    def listen(module: nn.Module, query: torch.Tensor, key: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if sink is not None:
            prefix = layer_prefix(module.layer_idx)  # type: ignore[arg-type]
            sink(f"{prefix}q_rope", _rows(query.transpose(1, 2)))
            sink(f"{prefix}k_rope", _rows(key[:, :, -query.shape[2] :].transpose(1, 2)))
        return function(module, query, key, *args, **kwargs)

    before, registered = decoder.config._attn_implementation, f"harness_capture_{next(_CAPTURES)}"
    try:
        AttentionInterface.register(registered, listen)
        AttentionMaskInterface.register(registered, AttentionMaskInterface()[attention])
        decoder.model.set_attn_implementation(registered)
        yield
    finally:
        decoder.model.set_attn_implementation(before)
        AttentionInterface._global_mapping.pop(registered, None)
        AttentionMaskInterface._global_mapping.pop(registered, None)


def _attention_function(decoder: Decoder, attention: str) -> Callable[..., Any]:
    """Return HF's function of that name; `eager` is defined in each model's own file."""
    from transformers import AttentionInterface

    if attention == "eager":
        return decoder.library_function("eager_attention_forward")
    return AttentionInterface()[attention]  # type: ignore[no-any-return]
