"""HF's model token by token through the cache that it makes for itself, whatever the family calls it."""

import inspect
from collections.abc import Sequence
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import torch
from transformers import Cache

from harness.formats.recording import RequestInfo
from harness.oracle.caches import cache_argument, caches_of, held_states, keeps_states, new_cache
from harness.oracle.images import inputs_of
from harness.oracle.model import HFModel
from harness.oracle.untraced import all_parts_held


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What a decoder goes on from."""

    cache: dict[str, Any]
    ids: list[list[int]]


class HFDecoder:
    """Feeds a batch of requests to the model, piece after piece. Use it as a context manager.

    A model without a cache is fed all tokens so far each time; what is new are the last rows.
    """

    def __init__(self, hf: HFModel) -> None:
        self._hf = hf
        self._stack = ExitStack()
        self._ids: list[list[int]] = []
        """All tokens so far, where the model has no cache; else empty."""
        self.cache: dict[str, Any] = {}
        """The cache by the name that the family gives it; empty before the first piece."""
        self.logits: torch.Tensor | None = None
        """All that the latest piece has made: [requests, tokens, vocabulary]."""

    def __enter__(self) -> Self:
        self._stack.enter_context(all_parts_held(self._hf))
        for module in self._hf.model.modules():
            if getattr(module, "rope_deltas", None) is not None:  # HF keeps those of the latest request with an image
                module.rope_deltas = None
        cache = new_cache(self._hf)
        name = cache_argument(self._hf.model.forward)
        self.cache = {} if cache is None or name is None else {name: cache}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    @torch.no_grad()
    def feed(self, ids: Sequence[Sequence[int]], **options: Any) -> torch.Tensor:
        """Feed the next tokens of every request and return the logits after the last ones: [requests, vocabulary].

        Args:
            ids: [requests, tokens].
            options: of HF's forward, `attention_mask` and `position_ids` where requests are padded.
        """
        rows = [list(row) for row in ids]
        if self._ids:
            rows = [before + row for before, row in zip(self._ids, rows, strict=True)]
            options.pop("position_ids", None)
        token_ids = torch.tensor(rows, device=self._hf.device)
        output = self._hf.run(input_ids=token_ids, use_cache=True, **self.cache, **options)
        returned = caches_of(output)
        self.cache = returned or {name: cache for name, cache in self.cache.items() if cache.get_seq_length()}
        self._ids = [] if self.cache else rows
        self.logits = output.logits
        logits: torch.Tensor = output.logits[:, -1]
        return logits

    def keep_past(self) -> None:
        """Let the cache keep what `rewind` needs: that of a sliding window forgets what no later token sees."""
        for cache in self.cache.values():
            cache.activate_past_recording()

    @property
    def states(self) -> dict[tuple[int, str], torch.Tensor]:
        """See `held_states`: of the cache as it is now."""
        return {key: state for cache in self.cache.values() for key, state in held_states(cache).items()}

    def snapshot(self) -> "Snapshot":
        """Return a copy of all that the next piece goes on from.

        Raises:
            ValueError: the family keeps states in its modules.
        """
        if not self._hf.graph.states and keeps_states(self._hf) and new_cache(self._hf):
            raise ValueError(f"{type(self._hf.model).__name__} keeps states in its modules, and not in its cache")
        return Snapshot(deepcopy(self.cache), [list(row) for row in self._ids])

    def restore(self, snapshot: "Snapshot") -> None:
        """Go on from a snapshot, which stays as it is."""
        self.cache, self._ids = deepcopy(snapshot.cache), [list(row) for row in snapshot.ids]

    def take_lanes(self, lanes: Sequence[int]) -> None:
        """Go on with the requests of these lanes, some of them more than once, each with a copy of what was cached.

        Raises:
            ValueError: the family's cache is none of HF's own kind.
        """
        self._ids = [list(self._ids[lane]) for lane in lanes] if self._ids else []
        for cache in self.cache.values():
            if not isinstance(cache, Cache):
                raise ValueError(f"{type(cache).__name__} cannot be copied by request")
            cache.reorder_cache(torch.tensor(lanes, device=self._hf.device))

    def rewind(self, num_tokens: int) -> None:
        """Forget the latest tokens of every request.

        Raises:
            ValueError: the family's cache holds states of which only the latest is there.
        """
        self._ids = [row[:-num_tokens] for row in self._ids]
        for cache in self.cache.values():
            layers = getattr(cache, "layers", None)
            if layers is None or not all(getattr(layer, "is_croppable", True) for layer in layers):
                raise ValueError(f"{type(cache).__name__} holds states that cannot go back")
            cache.crop(-num_tokens)


def greedy_continuation(hf: HFModel, token_ids: Sequence[int], num_tokens: int, inputs: str | None = None) -> list[int]:
    """Return so many greedy tokens of HF in the engine's dtype; an end-of-text token does not end it.

    After a prompt with images each token takes a forward over all of them: HF's decode then has the truth's positions.
    """
    feed, tokens = list(token_ids), list[int]()
    if inputs is not None:
        with all_parts_held(hf), torch.no_grad():
            for _ in range(num_tokens):
                request = RequestInfo(id=0, token_ids=[*feed, *tokens], prompt_length=len(feed), inputs=inputs)
                ids = torch.tensor([request.token_ids], device=hf.device)
                logits = hf.run(input_ids=ids, use_cache=False, **inputs_of(hf, request, ids.shape[1])).logits
                tokens.append(int(logits[0, -1].argmax()))
        return tokens
    # Of a long prompt the head would take longer than some layers, and only the last row's logits are read.
    last = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(hf.model.forward).parameters else {}
    with HFDecoder(hf) as decoder:
        for _ in range(num_tokens):
            feed = [int(decoder.feed([feed], **last)[0].argmax())]
            tokens += feed
    return tokens
