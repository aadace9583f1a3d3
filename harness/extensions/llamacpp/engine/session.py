"""llama.cpp step by step: requests are batched as they come, and nodes of its graph are the ends of operations.

The FLOPs and bytes of a node come from the shapes and types of its tensors.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod

import torch

from harness.engines.stepping import (
    COMMIT,
    PREPARE,
    SAMPLE,
    ModelShape,
    OperationWatcher,
    OperatorCost,
    OperatorWatcher,
)
from harness.errors import Code, HarnessError
from harness.extensions.llamacpp.engine.context import Context, LlamaSequence, Model, SequencePiece, next_batch
from harness.extensions.llamacpp.engine.graph import GraphWatcher
from harness.extensions.llamacpp.engine.options import LlamaCppOptions
from harness.extensions.llamacpp.engine.tensor import Tensor
from harness.extensions.llamacpp.gguf import GGUFModel
from harness.extensions.llamacpp.gguf.header import BY_NAME
from harness.formats.recording import RequestInfo
from harness.results.profile import StepShape

_MOST_SEQUENCES = 256
"""LLAMA_MAX_SEQ of llama.cpp's src/llama-cparams.h."""
_NOTES = (
    "llama.cpp plans its memory before the first step, and not through torch: there is no memory snapshot, no peak and "
    "no table of torch's operators, and the trace shows steps, layers and operations without kernels",
    "operations are timed between two calls of llama.cpp's evaluation callback: it computes up to each tap and waits, "
    "and fuses nothing across; `trace` among the costs of the passes is how much slower the steps are",
    "counts are of the nodes of ggml's graph; attention counts all cells that its kernel is given (a multiple of 256, "
    "of all requests), also those that the mask hides",
)


class LlamaCppSession:
    """A loaded model, and a cache for the requests at hand; see `Session`."""

    phases = ("prefill", "decode", "mixed")
    shows_memory = False

    def __init__(
        self,
        model: Model,
        options: LlamaCppOptions,
        shape: ModelShape,
        name_of: Callable[[Tensor], str | None],
        *,
        max_num_seqs: int,
    ) -> None:
        """Prepare to serve up to so many requests at once; `name_of` returns the tap that a node computes."""
        self._llama_model, self._options, self.model = model, options, shape
        self._max_num_seqs = min(max_num_seqs, _MOST_SEQUENCES)
        self._boundaries = _Boundaries(name_of)
        self._contexts: dict[bool, Context] = {}
        """By whether its graph is watched: llama.cpp takes a callback only when a context is made."""
        self._num_added = 0
        self._lengths: dict[int, int] = {}
        """Tokens that each request has in the cache at its end."""
        self._waiting: deque[RequestInfo] = deque()
        self._running: list[LlamaSequence] = []

    @property
    def notes(self) -> tuple[str, ...]:
        """See `Session`; the last one is of llama.cpp's own counters."""
        threads = f"llama.cpp computes with --engine-option threads={self._options.threads}, torch's roofs are of "
        threads += f"{torch.get_num_threads()}"
        if False not in self._contexts:
            return (*_NOTES, threads)
        measured = self._contexts[False].counters
        counted = (
            ("prompt", measured.n_p_eval, measured.t_p_eval_ms),
            ("generation", measured.n_eval, measured.t_eval_ms),
        )
        shown = [
            f"{name} {number / ms * 1e3:.1f} tok/s ({number:,} in {ms:.1f} ms)" for name, number, ms in counted if ms
        ]
        counters = f"llama.cpp's own counters, of all steps that nothing watched: {', '.join(shown)}; it counts every "
        counters += "step of several rows as prompt, also a decode of several requests"
        return (*_NOTES, threads, counters)

    def add(self, prompt: Sequence[int], max_new_tokens: int) -> int:
        """See `TokenSession.add`."""
        key, self._num_added = self._num_added, self._num_added + 1
        self._waiting.append(RequestInfo(id=key, token_ids=list(prompt), prompt_length=len(prompt)))
        self._lengths[key] = len(prompt) + max_new_tokens - 1
        return key

    def step(self) -> Mapping[int, int]:
        """See `TokenSession.step`."""
        context = self._context()
        self._admit(context)
        pieces = next_batch(self._running, chunk_size=None, num_batch=context.num_batch)
        if not pieces:
            return {}
        self._boundaries.begin_step(_step_shape(pieces))
        rows = [row for piece in pieces for row in piece.rows()]
        self._boundaries.reached(PREPARE)
        context.decode(rows)
        self._boundaries.raise_error()
        chosen = {row[2]: int(context.logits(at).argmax()) for at, row in enumerate(rows) if row[3]}
        self._boundaries.reached(SAMPLE)
        tokens = {piece.sequence.request.id: chosen[number] for piece in pieces
                  if (number := piece.sequence.number) in chosen}  # fmt: skip
        for piece in pieces:
            self._commit(piece, tokens.get(piece.sequence.request.id), context)
        self._boundaries.reached(COMMIT)
        return tokens

    @contextmanager
    def watching(self, watcher: OperationWatcher) -> Iterator[None]:
        """See `Session.watching`."""
        if self._running:
            what = "llama.cpp cannot be watched from the middle of a request: its callback is that of a context"
            raise HarnessError(Code.ENGINE_CANNOT_SERVE, what, where="watching", hint="stop() first")
        self._boundaries.watch(watcher)
        try:
            yield
        finally:
            self._boundaries.watch(None)

    def stop(self) -> None:
        """See `TokenSession.stop`."""
        for requests in (self._waiting, self._running, self._lengths):
            requests.clear()
        for context in self._contexts.values():
            context.forget()

    def close(self) -> None:
        """Free the caches."""
        for context in self._contexts.values():
            context.close()
        self._contexts.clear()

    def weights(self) -> Mapping[str, torch.Tensor]:
        """See `Session.weights`: none is torch's."""
        return {}

    def cache_tensors(self) -> Sequence[torch.Tensor]:
        """See `Session.cache_tensors`: none is torch's."""
        return ()

    def _context(self) -> Context:
        """Return the context of now; while no request runs, one with cells for all that wait, and one more of them."""
        is_watched = self._boundaries.is_watched
        context = self._contexts.get(is_watched)
        lengths = [(item.prompt_length, self._lengths[item.id]) for item in self._waiting] or [(1, 1)]
        longest = max(prompt for prompt, _ in lengths) + max(length - prompt + 1 for prompt, length in lengths)
        num_cells = sum(length for _, length in lengths) + longest
        if context is None or (not self._running and context.num_cells < num_cells):
            if context is not None:
                context.close()
            self._contexts[is_watched] = context = Context(
                self._llama_model,
                self._options,
                self._boundaries if is_watched else None,
                num_seqs=self._max_num_seqs,
                num_cells=num_cells,
            )
        return context

    def _admit(self, context: Context) -> None:
        """Let requests begin, in their order, while there are a sequence and cells for all of their tokens."""
        while self._waiting and len(self._running) < self._max_num_seqs:
            held = [*(sequence.request for sequence in self._running), self._waiting[0]]
            if sum(self._lengths[request.id] for request in held) > context.num_cells:
                return
            taken = {sequence.number for sequence in self._running}
            number = next(number for number in range(self._max_num_seqs) if number not in taken)
            self._running.append(LlamaSequence(self._waiting.popleft(), number))

    def _commit(self, piece: SequencePiece, token: int | None, context: Context) -> None:
        """Note what a step has computed; a sequence that has its last token ends."""
        sequence = piece.sequence
        sequence.num_computed = piece.positions.stop
        if token is not None and sequence.num_computed == self._lengths[sequence.request.id]:
            self._running.remove(sequence)
            context.forget(sequence.number)
        elif token is not None:
            sequence.request.token_ids.append(token)


class _Boundaries(GraphWatcher):
    """A tap's node is where an operation ends; nodes that are asked about before it are part of that operation."""

    def __init__(self, name_of: Callable[[Tensor], str | None]) -> None:
        super().__init__()
        self._name_of = name_of
        self._name = ""
        self._watcher: OperationWatcher | None = None
        self._counter: OperatorWatcher | None = None

    @property
    def is_watched(self) -> bool:
        return self._watcher is not None

    def watch(self, watcher: OperationWatcher | None) -> None:
        self._watcher, self._counter = watcher, watcher if isinstance(watcher, OperatorWatcher) else None

    def begin_step(self, shape: StepShape) -> None:
        if self._watcher is not None:
            self._watcher.begin_step(shape)

    def reached(self, name: str) -> None:
        if self._watcher is not None:
            self._watcher.reached(name)

    def wants(self, node: Tensor) -> bool:
        """See `GraphWatcher`."""
        if self._counter is not None and (cost := node_cost(node)) is not None:
            self._counter.computed(cost)
        name = self._name_of(node)
        self._name = name or ""
        return name is not None

    def computed(self, node: Tensor) -> None:
        """See `GraphWatcher`."""
        self.reached(self._name)


def _step_shape(pieces: Sequence[SequencePiece]) -> StepShape:
    kinds = {"prefill" if piece.sequence.is_in_prompt else "decode" for piece in pieces}
    return StepShape(
        phase=kinds.pop() if len(kinds) == 1 else "mixed",
        query_lens=tuple(len(piece.positions) for piece in pieces),
        context_lens=tuple(piece.positions.stop for piece in pieces),
        num_sampled=sum(row[3] for piece in pieces for row in piece.rows()),
    )


def model_shape(file: GGUFModel, options: LlamaCppOptions, vocab_size: int, head_dim: int) -> ModelShape:
    """Return the sizes that decide what a step costs."""
    metadata, num_layers = file.metadata, file.metadata.count("block_count")
    cache_bits = [BY_NAME[name][1].bits_per_weight for name in options.cache_names]
    num_heads = metadata.count("attention.head_count")
    return ModelShape(
        num_layers=num_layers,
        hidden_size=metadata.count("embedding_length"),
        intermediate_size=metadata.count("feed_forward_length"),
        vocab_size=vocab_size,
        num_heads=num_heads,
        num_kv_heads=metadata.count("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        has_qk_norm="blk.0.attn_q_norm.weight" in file.tensors,
        itemsize=4,
        weight_itemsize=file.bits_per_weight / 8,
        kv_itemsize=sum(cache_bits) / 16,
        windows=(None,) * num_layers,
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        o_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_gate.bias" in file.tensors,
    )


_FREE = frozenset({"NONE", "VIEW", "RESHAPE", "PERMUTE", "TRANSPOSE"})
_COPIES = frozenset({"CPY", "CONT", "DUP", "GET_ROWS", "SET_ROWS"})


def node_cost(node: Tensor) -> OperatorCost | None:
    """Return what a node computes and moves; None for one that computes nothing.

    Attention is over all cells that the kernel is given, which are a multiple of 256, masked ones included.
    """
    operation = node.op
    if operation in _FREE:
        return None
    flops = _flops(node, operation)
    stored = _row_bytes(node, node.sources[0]) if operation == "SET_ROWS" else 0
    return OperatorCost(
        name=f"ggml::{operation}",
        flops=flops,
        elementwise_flops=0 if flops or operation in _COPIES else prod(node.shape),
        bytes_moved=_bytes_moved(node, operation),
        kv_bytes=stored,
    )


def _flops(node: Tensor, operation: str) -> int:
    if operation in ("MUL_MAT", "MUL_MAT_ID"):
        return 2 * prod(node.shape) * node.sources[0].shape[-1]
    if operation == "FLASH_ATTN_EXT":
        query, key = node.sources[:2]
        return 4 * prod(query.shape) * key.shape[-2]
    return 0


def _bytes_moved(node: Tensor, operation: str) -> int:
    first, *others = node.sources or [node]
    if operation == "GET_ROWS":  # of the table only the rows that are picked
        return _row_bytes(first, node) + node.num_bytes + sum(item.num_bytes for item in others)
    if operation == "SET_ROWS":  # the result is the whole cache, of which only some rows are written
        return first.num_bytes + _row_bytes(node, first) + others[0].num_bytes
    return node.num_bytes + sum(source.num_bytes for source in node.sources)


def _row_bytes(table: Tensor, rows: Tensor) -> int:
    """Bytes that `rows` occupy in the type of `table`."""
    return round(prod(rows.shape) * table.itemsize)
