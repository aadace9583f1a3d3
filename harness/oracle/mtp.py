"""Layers that predict further tokens (MTP, multi-token prediction), as parts of HF's model.

transformers keeps them in a model of their own (`transformers.modeling_layers.MtpModel`), which
`generate(use_mtp=True)` runs beside the main one. Here every forward of the main model runs them after its final norm,
by the code of that class, so that they are traced, recorded and judged as all layers are. The first of them follows the
last decoder layer by its number, as in DeepSeek's checkpoints: `model.layers.61.eh_proj`.

Row p of depth k (0 for the first) is computed from the hidden state at position p and from the token at p + k + 1,
which is `Operation.tokens_ahead` tokens after the row's own. The draft's logits are the main model's head on the output
of these layers: that head is judged where the main model runs it.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch
from torch import nn

from harness.base.progress import quiet_transformers


class MtpPart(nn.Module):
    """One depth: its own embedding of the tokens ahead, and HF's `MtpLayer`, whose modules stand here by HF's names."""

    def __init__(self, mtp: Any, depth: int, embedding: nn.Module) -> None:
        super().__init__()
        self._model, self._depth = (mtp,), depth  # in a tuple: no module of this one
        self.embed_tokens = _with_its_weights(embedding)
        for name, module in mtp.layers[depth].named_children():
            self.add_module(name, module)
        if mtp.rotary_emb is not None:
            self.rotary_emb = deepcopy(mtp.rotary_emb)  # the main model's is a part by itself

    def forward(self, ids: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor, cache: Any) -> torch.Tensor:
        """Return the hidden states of this depth.

        Args:
            ids: [requests, tokens] int64, the tokens ahead.
            hidden: [requests, tokens, hidden size] of the depth before, or of the main model after its final norm.
            positions: [requests, tokens] int64 of the tokens ahead.
            cache: HF's `MtpCache`, or None.
        """
        (mtp,) = self._model
        mtp.rotary_emb = getattr(self, "rotary_emb", None)
        result: torch.Tensor = mtp.forward_layer(
            self._depth, hidden, positions, cache, inputs_embeds=self.embed_tokens(ids)
        )
        return result


class MtpLayers:
    """The layers of a model, run by a hook on its decoder."""

    def __init__(self, model: Any, device: torch.device) -> None:
        """Load the layers of a model of HF's from its checkpoint and put them after its own layers.

        Raises what transformers raises.
        """
        from transformers.modeling_layers import MtpModel

        with quiet_transformers():
            self.model = MtpModel.from_pretrained(model, device_map={"": device}).eval().requires_grad_(False)
        if self.model.use_shared_post_norm:
            raise ValueError("a norm that all depths share is not served")
        decoder = model.get_decoder()
        self.first = len(decoder.layers)
        """Number of the first of them among the layers."""
        if self.first != model.config.get_text_config().num_hidden_layers:
            raise ValueError("the decoder's layers are not those of its configuration")
        self._parts = [MtpPart(self.model, depth, self.model.embed_tokens) for depth in range(len(self.model.layers))]
        self._path = next(path for path, module in model.named_modules() if module is decoder.layers)
        layers = list(self.model.layers)
        del self.model.layers
        self.model.layers = layers  # no modules of the class's own: each is in the main model now
        self.following: Sequence[Sequence[int]] = ()
        """Of each request the tokens after those of a forward, as far as they are known."""
        decoder.layers.extend(self._parts)
        decoder.register_forward_hook(self._run, with_kwargs=True)

    @property
    def num_depths(self) -> int:
        """Tokens that are predicted beside the next one."""
        return len(self._parts)

    def tokens_ahead(self, path: str) -> int:
        """Return how many tokens after its own a row of what stands at a path is computed from."""
        for depth in range(self.num_depths):
            if f"{path}.".startswith(f"{self._path}.{self.first + depth}."):
                return depth + 1
        return 0

    @contextmanager
    def followed_by(self, following: Sequence[Sequence[int]]) -> Iterator[None]:
        """Say which tokens follow those that forwards in the block are given, as many of each request as there are."""
        before, self.following = self.following, following
        try:
            yield
        finally:
            self.following = before

    def new_cache(self) -> Any:
        """Return an empty cache of HF's for these layers."""
        from transformers.cache_utils import MtpCache

        return MtpCache(config=self.model.config)

    def _run(self, _decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        ids = kwargs["input_ids"] if kwargs.get("input_ids") is not None else args[0]
        (num_requests, num_tokens), hidden = ids.shape, output.last_hidden_state
        ahead = torch.zeros(num_requests, self.num_depths, dtype=ids.dtype, device=ids.device)
        for line, tokens in zip(ahead, self.following, strict=False):
            known = list(tokens)[: self.num_depths]
            line[: len(known)] = torch.tensor(known, dtype=ids.dtype)
        ids = torch.cat([ids, ahead], dim=1)
        cache = getattr(kwargs.get("cache", kwargs.get("past_key_values")), "mtp", None)
        positions = kwargs.get("position_ids")
        if positions is None:
            begin = 0 if cache is None else cache.get_seq_length()
            positions = torch.arange(begin, begin + num_tokens, device=ids.device).expand(num_requests, -1)
        for depth, part in enumerate(self._parts, start=1):
            hidden = part(ids[:, depth : depth + num_tokens], hidden, positions + depth, cache)


def _with_its_weights(module: nn.Module) -> nn.Module:
    """Return a copy of a module with the same parameters."""
    return deepcopy(module, {id(parameter): parameter for parameter in module.parameters()})
