"""HF's own run in the engine's dtype, recorded while it continues the prompts: a golden without the truth.

It has the tokens, and rows that an engine's are near to. That is enough for a check in which every operation is judged
by itself and every token is HF's. What it does not have is the truth, and how far HF is from it: both are made when a
verdict asks for them.
"""

import inspect
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from harness.formats.recording import RecordingWriter, RequestInfo
from harness.formats.taps import Kind, Operation
from harness.oracle.caches import new_cache
from harness.oracle.decode import HFDecoder
from harness.oracle.model import HFModel
from harness.oracle.precision import eager_experts
from harness.oracle.requests import Prompt
from harness.oracle.untraced import frequencies_follow_length
from harness.oracle.watch import AttentionCall, as_rows, run_attention, watching

_DECODE_ROWS = 64
"""Rows of new tokens that are held in memory: to write them one by one would take as long as to compute them."""
Store = Callable[[str, torch.Tensor], torch.Tensor]
"""Returns what is written of the rows of a tap."""


def is_shown_by_decode(hf: HFModel, prompts: Sequence[Prompt]) -> bool:
    """Whether HF's decode through its cache computes the rows of one forward, one operation after the other."""
    has_own_rows = any(op.kind is Kind.STATE or op.among_tokens or op.tokens_ahead for op in hf.graph)
    has_images = any(prompt.inputs for prompt in prompts)
    return not has_own_rows and not has_images and not frequencies_follow_length(hf.config) and bool(new_cache(hf))


def record_continuation(
    hf: HFModel, prompt: Prompt, request: RequestInfo, writer: RecordingWriter, store: Store
) -> None:
    """Continue a prompt greedily, and record every row: a step for the prompt, and one for each 64 new tokens.

    Args:
        hf: the model.
        prompt: what to continue.
        request: of the recording; it has the prompt's tokens, and the continuation without its last token afterwards.
        writer: of the recording.
        store: what to write of the rows of a tap, [rows, ...] in the engine's dtype.
    """
    takes_positions = "logits_to_keep" in inspect.signature(hf.model.forward).parameters

    def fed(ids: list[int], sampled: Sequence[int], sink: Callable[[str, torch.Tensor], None]) -> list[int]:
        """Feed some tokens, show what they give to `sink`, and return the choices at the sampled rows."""
        seen = _Piece(hf, len(ids), torch.tensor(sampled, device=hf.device), sink)
        with watch.showing(seen):
            decoder.feed([ids], **({"logits_to_keep": seen.sampled} if takes_positions else {}))
        assert decoder.logits is not None
        seen.see("logits", decoder.logits)
        return seen.choices

    with ExitStack() as stack:
        stack.enter_context(eager_experts(*hf.configs))
        watch = stack.enter_context(watching(hf))
        decoder = stack.enter_context(HFDecoder(hf))
        length, sampled = len(prompt.token_ids), range(request.prompt_length - 1, len(prompt.token_ids))
        _begin(writer, hf, request, "prefill", range(length), sampled)
        choices = fed(list(prompt.token_ids), sampled, lambda tap, rows: writer.tap(tap, store(tap, rows)))
        writer.end_step(choices)
        for num_before in range(0, prompt.max_new_tokens - 1, _DECODE_ROWS):
            kept, tokens = defaultdict[str, list[torch.Tensor]](list), choices[-1:]
            num_rows = min(_DECODE_ROWS, prompt.max_new_tokens - 1 - num_before)
            for at in range(num_rows):
                tokens += fed(tokens[at:], [0], partial(_keep, kept))
            writer.extend_request(request.id, tokens[:-1])
            first, choices = length + num_before, tokens[1:]
            _begin(writer, hf, request, "decode", range(first, first + num_rows), range(num_rows))
            for tap, parts in kept.items():
                if len(parts) == num_rows:
                    writer.tap(tap, store(tap, torch.cat(parts)))
            writer.end_step(choices)


def _keep(kept: dict[str, list[torch.Tensor]], tap: str, rows: torch.Tensor) -> None:
    kept[tap].append(rows.clone())  # the model may change its tensor


def _begin(
    writer: RecordingWriter, hf: HFModel, request: RequestInfo, phase: str, positions: range, sampled: Sequence[int]
) -> None:
    partial_rows = dict.fromkeys(hf.graph.head, sampled)
    ids = [request.id] * len(positions)
    writer.begin_step(phase=phase, request=ids, position=positions, sampled_rows=sampled, partial_rows=partial_rows)


@dataclass(slots=True)
class _Piece:
    """Watches one piece of the run, and shows its new rows to `sink`."""

    hf: HFModel
    num_tokens: int
    sampled: torch.Tensor
    """[n] indices of the rows whose logits choose a token."""
    sink: Callable[[str, torch.Tensor], None]
    choices: list[int] = field(default_factory=list)

    def see(self, source: str, value: torch.Tensor) -> None:
        """See `Watcher.see`."""
        operation = self.hf.graph.by_source.get(source)
        rows = None if operation is None else self._rows(operation, value)
        if operation is not None and rows is not None:
            if operation.tap == self.hf.graph.logits:
                self.choices = rows.argmax(dim=-1).tolist()
            self.sink(operation.tap, rows)

    def attend(self, call: AttentionCall, function: Callable[..., Any]) -> Any:
        """See `Watcher.attend`."""
        return run_attention(call, function)

    def choose(self, source: str, scores: torch.Tensor, chosen: torch.Tensor) -> None:
        """See `Watcher.choose`."""
        self.see(source, chosen)

    def _rows(self, operation: Operation, value: torch.Tensor) -> torch.Tensor | None:
        """Return the new rows, of the head those that are sampled; None if the value does not have them."""
        dim, is_head = operation.token_dim, operation.tap in self.hf.graph.head
        size, num_rows = value.shape[dim], len(self.sampled) if is_head else self.num_tokens
        if dim == 2 and size > self.num_tokens:  # keys and values of the whole history: the newest are the last
            value = value.narrow(dim, size - self.num_tokens, self.num_tokens)
        elif is_head and size == self.num_tokens:
            value = value.index_select(dim, self.sampled)
        if value.shape[dim] != num_rows or (value.dim() > 2 and dim and value.shape[0] != 1):
            return None
        rows = as_rows(value, dim, 1, num_rows)
        return rows if tuple(rows.shape[1:]) == operation.shape else None
