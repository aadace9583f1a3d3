"""HF itself as an engine under test: prefill and decode through its own KV cache, eager or sdpa.

HF as an engine shows what a sound engine scores, and checks HF's own decode against HF's own forward.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from harness.engines.adapter import Engine, Offer, Workload, refuse_unknown_options
from harness.engines.hf_session import HFSession
from harness.errors import Code, HarnessError
from harness.oracle.capture import capturing
from harness.oracle.decoder import Decoder, load_decoder
from harness.recording import RecordingWriter, RequestInfo
from harness.taps import LOGITS, layer_prefix

_ATTENTIONS = ("sdpa", "eager")


def open_engine(folder: Path, *, dtype: str, device: str, options: Mapping[str, str]) -> Engine:
    """Open HF on a checkpoint; the option `attention` is `sdpa` (default) or `eager`."""
    refuse_unknown_options("hf", options, ("attention",))
    attention = options.get("attention", "sdpa")
    if attention not in _ATTENTIONS:
        raise HarnessError(
            Code.BAD_OPTION,
            f"unknown attention {attention!r}",
            where="--engine-option attention",
            expected=" or ".join(_ATTENTIONS),
            actual=attention,
        )
    return HFEngine(load_decoder(folder, dtype=getattr(torch, dtype), device=device), attention)


@dataclass(slots=True)
class _Lane:
    """One request as a row of a left-padded batch."""

    request: RequestInfo
    num_padding: int
    num_fed: int = 0

    def next_tokens(self, count: int) -> list[int]:
        """Return the next tokens to feed; a request that is done is fed zeros, which nobody looks at."""
        tokens = self.request.token_ids[self.num_fed : self.num_fed + count]
        return tokens + [0] * (count - len(tokens))


@dataclass(slots=True)
class _Forward:
    """One forward of a batch: its input, and which of its rows are real."""

    ids: list[list[int]]
    positions: list[list[int]]
    kept: list[int] = field(default_factory=list)
    """Indices of real rows into batch * tokens."""
    request: list[int] = field(default_factory=list)
    position: list[int] = field(default_factory=list)
    sampled: list[int] = field(default_factory=list)
    """Indices into the kept rows."""
    lanes: list[int] = field(default_factory=list)
    """Rows of the batch whose last logits are wanted."""


class HFEngine:
    """Adapter of a transformers model."""

    name = "hf"
    offer = Offer(schedules=("plain", "chunked", "batched"))

    def __init__(self, decoder: Decoder, attention: str) -> None:
        self._decoder, self._attention = decoder, attention

    @torch.no_grad()
    def run(self, workload: Workload, writer: RecordingWriter) -> None:
        """Run the workload through HF's own cache; see `Engine.run`."""
        together = workload.schedule.is_batched
        groups = [list(workload.requests)] if together else [[request] for request in workload.requests]
        for group in groups:
            _Batch(self._decoder, self._attention, group, writer).run(workload.schedule.chunk_size)

    def open_session(self, *, max_num_tokens: int, max_num_seqs: int) -> HFSession:
        """See `Steppable.open_session`; HF takes steps of any size."""
        return HFSession(self._decoder, self._attention)


class _Batch:
    """Some requests computed together, the shorter ones padded on the left."""

    def __init__(
        self, decoder: Decoder, attention: str, requests: Sequence[RequestInfo], writer: RecordingWriter
    ) -> None:
        from transformers import DynamicCache  # seconds to import

        self._decoder, self._attention, self._writer = decoder, attention, writer
        self._longest = max(request.prompt_length for request in requests)
        self._lanes = [_Lane(request, self._longest - request.prompt_length) for request in requests]
        self._cache: Any = DynamicCache(config=decoder.config)
        self._mask: list[list[int]] = [[] for _ in requests]

    def run(self, chunk_size: int | None) -> None:
        for columns in self._columns(chunk_size):
            self._forward(columns)
        for index, lane in enumerate(self._lanes):
            self._read_back(index, lane)

    def _columns(self, chunk_size: int | None) -> Iterator[int]:
        """Yield the width of each forward: the padded prompts, whole or in chunks, then one column at a time."""
        size = chunk_size or self._longest
        for at in range(0, self._longest, size):
            yield min(size, self._longest - at)
        for _ in range(max(len(lane.request.token_ids) - lane.request.prompt_length for lane in self._lanes)):
            yield 1

    def _forward(self, columns: int) -> None:
        forward = self._next_forward(columns)
        prompts = {lane.request.id: lane.request.prompt_length for lane in self._lanes}
        in_prompt = {
            position < prompts[request] for request, position in zip(forward.request, forward.position, strict=True)
        }
        self._writer.begin_step(
            phase="mixed" if len(in_prompt) > 1 else "prefill" if True in in_prompt else "decode",
            request=forward.request,
            position=forward.position,
            sampled_rows=forward.sampled,
            partial_rows={LOGITS: forward.sampled} if forward.sampled else None,
        )
        logits = self._compute(forward)
        self._writer.end_step(logits[forward.lanes, -1].argmax(dim=-1).tolist())

    def _compute(self, forward: _Forward) -> torch.Tensor:
        device = self._decoder.device
        kept = torch.tensor(forward.kept, device=device)

        def record(tap: str, tensor: torch.Tensor) -> None:
            if tap != LOGITS:
                self._writer.tap(tap, tensor[kept])
            elif forward.lanes:
                self._writer.tap(tap, tensor[forward.lanes])

        is_padded = any(lane.num_padding for lane in self._lanes)
        with capturing(self._decoder, record, attention=self._attention):
            output = self._decoder.model(
                input_ids=torch.tensor(forward.ids, device=device),
                position_ids=torch.tensor(forward.positions, device=device),
                attention_mask=torch.tensor(self._mask, device=device) if is_padded else None,
                past_key_values=self._cache,
                use_cache=True,
                logits_to_keep=1,
            )
        logits: torch.Tensor = output.logits
        return logits

    def _next_forward(self, columns: int) -> _Forward:
        forward = _Forward(ids=[], positions=[])
        for index, lane in enumerate(self._lanes):
            start = len(self._mask[index])
            num_padding = min(max(lane.num_padding - start, 0), columns)
            tokens = lane.next_tokens(columns - num_padding)
            positions = range(lane.num_fed, lane.num_fed + len(tokens))
            forward.ids.append([0] * num_padding + tokens)
            forward.positions.append([0] * num_padding + list(positions))
            self._mask[index] += [0] * num_padding + [1] * len(tokens)
            self._keep_rows(forward, lane, positions, index * columns + num_padding)
            if lane.request.prompt_length - 1 <= positions.stop - 1 < len(lane.request.token_ids):
                forward.sampled.append(len(forward.kept) - 1)
                forward.lanes.append(index)
            lane.num_fed = positions.stop
        return forward

    @staticmethod
    def _keep_rows(forward: _Forward, lane: _Lane, positions: range, first_row: int) -> None:
        """Note the rows of tokens that are the request's own."""
        num_real = max(0, min(positions.stop, len(lane.request.token_ids)) - positions.start)
        forward.kept += range(first_row, first_row + num_real)
        forward.request += [lane.request.id] * num_real
        forward.position += positions[:num_real]

    def _read_back(self, index: int, lane: _Lane) -> None:
        """Write what the cache holds of a request at the end."""
        num_rows = len(lane.request.token_ids)
        columns = slice(lane.num_padding, lane.num_padding + num_rows)
        self._writer.begin_step(phase="readback", request=[lane.request.id] * num_rows, position=range(num_rows))
        for layer, cached in enumerate(self._cache.layers):
            for name, states in (("k_cache", cached.keys), ("v_cache", cached.values)):
                self._writer.tap(f"{layer_prefix(layer)}{name}", states[index, :, columns].transpose(0, 1))
        self._writer.end_step()
