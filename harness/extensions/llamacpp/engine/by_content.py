"""llama.cpp without a table of its graph: which node is which tap is found by what it holds, in any architecture.

Layers that predict further tokens (MTP) have a context of their own, fed with the main one's hidden states.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch

from harness.base.files import scratch_folder
from harness.base.numerics import Numerics
from harness.engines.by_content import StepEngine
from harness.engines.by_content.steps import RETURNED, See, Site, Work, with_following
from harness.errors import Code, HarnessError
from harness.extensions.llamacpp.engine.cache import SavedRows
from harness.extensions.llamacpp.engine.context import Context, Model
from harness.extensions.llamacpp.engine.graph import GraphWatcher
from harness.extensions.llamacpp.engine.options import LlamaCppOptions
from harness.extensions.llamacpp.engine.tensor import Tensor, llama
from harness.extensions.llamacpp.gguf.header import PLAIN
from harness.extensions.llamacpp.gguf.model import GGUFModel
from harness.extensions.llamacpp.gguf.writer import write_plain_file
from harness.formats.checkpoint import Checkpoint
from harness.formats.taps import Graph, Kind
from harness.judge.compare.conventions.linear import INPUT_TYPES

_NO_VALUES = ("NONE", "VIEW", "RESHAPE", "PERMUTE", "TRANSPOSE", "SET_ROWS", "CPY")
"""Operators that make no values, or that write into the memory of sequences."""
_NUM_SEQUENCES = 96
"""A map is learned from up to 67 requests of one token."""
_NUM_CELLS = 1 << 13
_MOST_ROWS = 4096
"""Of a step: what is more would be computed in parts, each with nodes of its own."""
_CACHE, _STATES = attrgetter("cache"), attrgetter("states")
_SOFTPLUS = (
    "the engine's softplus is log(1 + exp(x)), which loses the digits of small steps: recurrences are held to that"
)


def open_by_content(
    file: GGUFModel, folder: Path, options: LlamaCppOptions, *, source: GGUFModel | None = None
) -> StepEngine:
    """Open a GGUF file of any architecture; the truth is HF's checkpoint in `folder`, which was made of `source`.

    Raises:
        HarnessError: ENGINE_CANNOT_SERVE: llama.cpp does not load it, its cache is to be quantised, or what it does to
            the inputs of products is not replayed for a type of its tensors.
    """
    known = {name for weights in INPUT_TYPES.values() for name in weights}
    unknown = set(file.formats) - PLAIN.keys() - known
    if unknown:
        raise HarnessError(
            Code.ENGINE_CANNOT_SERVE,
            "products with weights of this type are not replayed",
            where=file.path,
            expected=", ".join(sorted(known)),
            actual=", ".join(sorted(unknown)),
            hint="quantise the model to another type",
        )
    if not set(options.cache_names) <= PLAIN.keys():
        raise HarnessError(
            Code.ENGINE_CANNOT_SERVE,
            "a quantised cache is judged in architectures alone whose graph is known",
            where="--engine-option cache_type",
            expected=", ".join(PLAIN),
            actual=", ".join(options.cache_names),
        )
    kv_heads = file.metadata.get("attention.head_count_kv")
    stepper = LlamaCppStepper(file.path, options, kv_heads)
    numerics = Numerics(gelu="float16", softplus_by_log=True, weights=file.formats, **options.declared_cache)

    def in_float32() -> LlamaCppStepper:
        with scratch_folder("harness-") as made:
            return LlamaCppStepper(write_plain_file(source or file, made / "model.gguf"), options, kv_heads)

    return _ByContent(
        lambda: stepper,
        name="llamacpp",
        folder=folder,
        dtype="float32",
        numerics=numerics,
        open_first=in_float32 if file.formats or source is not None else None,
    )


class _ByContent(StepEngine):
    """llama.cpp, where attention is what HF's interface shows: a cache in 16 bits is not replayed elsewhere."""

    def match_taps(self, graph: Graph) -> None:
        """See `StepEngine.match_taps`.

        Raises:
            HarnessError: ENGINE_CANNOT_SERVE: HF computes attention within its modules; or a product was not found,
                whose quantised inputs are not replayed for what is computed from it.
        """
        super().match_taps(graph)
        numerics, taps = self._numerics or Numerics(), {} if self.map is None else self.map.taps
        lost = next((op.tap for op in graph if op.kind is Kind.LINEAR and op.tap not in taps), None)
        lost = lost or next(_products_within(graph, Checkpoint(self._folder)), None)
        if set(numerics.weights) - PLAIN.keys() and lost is not None:
            raise HarnessError(
                Code.ENGINE_CANNOT_SERVE,
                f"no tensor is {lost}, whose inputs are quantised: what follows from it is not known",
                where="llamacpp",
                actual=", ".join(numerics.weights),
                hint="llama.cpp computes something else there, or in one product with others; a file in float32 tells",
            )
        is_rounded = numerics.cache is not None or numerics.attention_inputs is not None
        is_seen = any(op.kind is Kind.ATTENTION for op in graph)
        if is_rounded and not is_seen and hasattr(self._open(), "cached"):
            raise HarnessError(
                Code.ENGINE_CANNOT_SERVE,
                "HF computes attention within its modules, where a cache in 16 bits is not replayed",
                where="--engine-option cache_type",
                expected="cache_type=F32 and flash_attention=off",
                actual=numerics.cache or f"attention in {numerics.attention_inputs}",
                hint="--engine-option cache_type=F32 --engine-option flash_attention=off",
            )


def _products_within(graph: Graph, checkpoint: Checkpoint) -> Iterator[str]:
    """Yield matrices that HF multiplies by within an operation of another kind, experts apart: Mamba's `dt_proj`."""
    shown = {op.module for op in graph if op.kind is Kind.LINEAR or not op.inputs}  # without inputs: of tokens
    experts = tuple(f"{op.module}." for op in graph if op.module.endswith("experts"))
    for name, (entry, _) in checkpoint.tensors.items():
        module = name.removesuffix(".weight")
        if module != name and len(entry.shape) == 2 and module not in shown and not module.startswith(experts):
            yield module


class NumberedNodes(GraphWatcher):
    """Shows the results of a step's nodes, each by its name, and its number among those of that name and operator."""

    def __init__(self) -> None:
        """Show nothing yet."""
        super().__init__()
        self._see: See | None = None
        self._only: Collection[Site] | None = None
        self._calls = Counter[tuple[str, str]]()
        self._sites: dict[int, Site] = {}

    def watching(self, see: See, only: Collection[Site] | None) -> Self:
        """Show the nodes of the next step."""
        self._see, self._only, self._calls, self._sites = see, only, Counter(), {}
        return self

    def wants(self, node: Tensor) -> bool:
        """See `GraphWatcher`."""
        if self._see is None or node.op in _NO_VALUES:
            return False
        name = "" if node.name.startswith("node_") else node.name
        site = Site(name, self._calls[name, node.op], node.op)
        self._calls[name, node.op] += 1
        self._sites[node.address] = site
        return self._only is None or site in self._only

    def computed(self, node: Tensor) -> None:
        """See `GraphWatcher`."""
        if self._see is not None and node.address in self._sites:
            values = node.values()
            if values.is_floating_point():
                self._see(self._sites[node.address], values[0])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self._see = None
        self.raise_error()

    def returned(self, value: torch.Tensor) -> None:
        """See `Watching`."""
        if self._see is not None:
            self._see(Site("", 0, RETURNED), value)


class LlamaCppStepper:
    """A context of llama.cpp, driven by steps. It has `cached` and `states` where they are told layer by layer."""

    rewinds = True

    def __init__(self, path: Path, options: LlamaCppOptions, kv_heads: object) -> None:
        """Load a GGUF file.

        Args:
            path: of the file.
            options: of the context.
            kv_heads: as the file says it; a list for layers of two kinds: those without any have a state.
        """
        self._nodes = NumberedNodes()
        self._model = Model(path, repack=options.repack, mtp=options.mtp)
        sizes = {"num_seqs": _NUM_SEQUENCES, "num_cells": _NUM_CELLS}
        options = options.model_copy(update={"batch_size": _MOST_ROWS, "ubatch_size": _MOST_ROWS})
        self._context = Context(self._model, options, self._nodes, **sizes)
        self.tokens_ahead = int(options.mtp)
        """Layers that predict further tokens; the first of them is run."""
        self._mtp = MtpContext(self._model, self._context, options, self._nodes, **sizes) if options.mtp else None
        self.watching = self._nodes.watching
        self._sequences: dict[int, int] = {}
        self._num_computed: dict[int, int] = {}
        self.step(with_following(self, [(0, [0], 0)]))
        saved, layers = self._saved(0), range(self._model.num_layers)
        kinds = kv_heads if isinstance(kv_heads, list) and len(kv_heads) == len(layers) else None
        of_cache = [at for at in layers if kinds is None or kinds[at]]
        of_states = [at for at in layers if kinds is None or not kinds[at]]
        for name, part, numbers in (("cached", _CACHE, of_cache), ("states", _STATES, of_states)):
            if part(saved) and len(part(saved)) == len(numbers):
                setattr(self, name, partial(self._by_layer, part, numbers))
        self.notes = (_SOFTPLUS,) if saved.states else ()
        self.finish(0)

    def step(self, work: Work) -> torch.Tensor:
        """See `Stepper.step`; where several tokens of one request go on, the logits of all of them verify a draft.

        Raises:
            HarnessError: ENGINE_CANNOT_SERVE: there are too many rows, or the memory does not go back; ENGINE_FAILED.
        """
        rows, ahead, verifies = [], list[tuple[int, int, int]](), len(work) == 1 and work[0][2] > 0
        for entry in work:
            request, tokens, first = entry[:3]
            sequence, last = self._sequence(request), len(tokens) - 1
            if first < self._num_computed.get(request, 0):
                self._context.cut_off(sequence, first)
                if self._mtp is not None:
                    self._mtp.cut_off(sequence, first)
            self._num_computed[request] = first + len(tokens)
            rows += [(token, first + at, sequence, verifies or at == last) for at, token in enumerate(tokens)]
            following = list[int](*entry[3:])  # of the layers that predict further tokens
            after = [*tokens[1:], *(following[:1] or [0])]
            ahead += [(token, first + at + 1, sequence) for at, token in enumerate(after)]
        if len(rows) > _MOST_ROWS:
            raise HarnessError(
                Code.ENGINE_CANNOT_SERVE,
                "llama.cpp would compute a step in several parts",
                where="llamacpp",
                expected=f"at most {_MOST_ROWS} tokens",
                actual=len(rows),
                hint="--schedule chunked:1024",
            )
        self._context.decode(rows)
        logits = torch.stack([torch.tensor(self._context.logits(at)) for at, row in enumerate(rows) if row[3]])
        if self._mtp is not None:
            self._mtp.decode(ahead)
        return logits

    def _sequence(self, request: int) -> int:
        """Return the number of a request's sequence: a free one where it is new."""
        free = set(range(_NUM_SEQUENCES)) - set(self._sequences.values())
        if request not in self._sequences and not free:
            raise HarnessError(
                Code.ENGINE_CANNOT_SERVE,
                "there are more requests at once than sequences",
                where="llamacpp",
                expected=f"at most {_NUM_SEQUENCES}",
                hint="--schedule plain runs them one after the other",
            )
        return self._sequences.setdefault(request, min(free, default=0))

    def finish(self, request: int) -> None:
        """Free a request's cells."""
        sequence = self._sequences.pop(request)
        self._context.forget(sequence)
        if self._mtp is not None:
            self._mtp.forget(sequence)
        self._num_computed.pop(request, None)

    def _saved(self, request: int) -> SavedRows:
        return self._context.saved(self._sequences[request])

    def _by_layer(self, part: Callable[[SavedRows], list[Any]], layers: list[int], request: int) -> dict[int, Any]:
        return dict(zip(layers, part(self._saved(request)), strict=True))


_SHOW = "_Z26llama_set_embeddings_nextnP13llama_contextbb"
_SHOWN = "_Z26llama_get_embeddings_nextnP13llama_context"
"""Functions of src/llama-ext.h, in C++'s names: what the main context gives these layers, of each row."""


class MtpContext:
    """The cache of a model's first such layer, and rows that are computed into it."""

    def __init__(
        self,
        model: Model,
        main: Context,
        options: LlamaCppOptions,
        watcher: GraphWatcher,
        *,
        num_seqs: int,
        num_cells: int,
    ) -> None:
        """Let the main context keep what this one reads.

        Raises:
            HarnessError: ENGINE_CANNOT_SERVE: the file has no such layers, or llama.cpp has no graph for them.
        """
        self._llama, self._main = llama(), main
        if not self._llama.llama_model_n_layer_nextn(model.pointer):
            raise HarnessError(
                Code.ENGINE_CANNOT_SERVE,
                "the file has no layers that predict further tokens",
                where="--engine-option mtp",
                expected="nextn_predict_layers in its metadata",
                hint="convert the checkpoint with its MTP layers",
            )
        self._context = Context(
            model, options, watcher, num_seqs=num_seqs, num_cells=num_cells, kind=self._llama.LLAMA_CONTEXT_TYPE_MTP
        )
        self._width = int(self._llama.llama_model_n_embd_out(model.pointer))
        self._shown = self._function(_SHOWN, self._llama.ctypes.POINTER(self._llama.ctypes.c_float))
        self._function(_SHOW, None)(main.pointer, True, False)
        self._batch = self._llama.llama_batch_ext_init(self._context.pointer)

    def _function(self, name: str, result: Any) -> Any:
        function = getattr(self._llama.llama_cpp._lib, name, None)
        if function is None:
            what = "this llama.cpp does not export what the main model gives these layers"
            raise HarnessError(Code.ENGINE_CANNOT_SERVE, what, where="llamacpp", expected=name)
        function.argtypes, function.restype = None, result
        pointer = self._llama.ctypes.c_void_p
        return lambda context, *flags: function(pointer(context), *map(self._llama.ctypes.c_bool, flags))

    def decode(self, rows: Sequence[tuple[int, int, int]]) -> None:
        """Compute a row for each of the main context's last batch.

        Args:
            rows: token, position, sequence: of the token ahead of each row.

        Raises:
            HarnessError: ENGINE_FAILED.
        """
        library, ctypes = self._llama, self._llama.ctypes
        hidden = np.ctypeslib.as_array(self._shown(self._main.pointer), shape=(len(rows), self._width)).copy()
        library.llama_batch_ext_clear(self._batch)
        for row, (token, position, sequence) in enumerate(rows):
            at = library.llama_batch_ext_add_token(self._batch, sequence, token)
            state = library.llama_embd(
                data=hidden[row].ctypes.data_as(ctypes.POINTER(ctypes.c_float)), n_rows=1, n_embd=self._width
            )
            is_set = (
                library.llama_batch_ext_set_embd_token(self._batch, at, state),  # `..._embd_state` does nothing yet
                library.llama_batch_ext_set_pos(self._batch, at, ctypes.byref(ctypes.c_int32(position))),
                library.llama_batch_ext_set_output_logits(self._batch, at, True),
            )
            if not all(is_set):
                what = "llama.cpp does not take a row for the layers that predict further tokens"
                raise HarnessError(Code.ENGINE_FAILED, what, where="llamacpp", actual=f"row {row}: {is_set}")
        status = library.llama_process(self._context.pointer, library.LLAMA_PROCESS_TYPE_DECODE, self._batch)
        if status != 0:
            what = "llama_process fails for the layers that predict further tokens"
            raise HarnessError(Code.ENGINE_FAILED, what, where="llamacpp", actual=f"status {status}")

    def cut_off(self, sequence: int, num_positions: int) -> None:
        """Forget the rows of a sequence from a position of the main context on, which stand one further here."""
        self._context.cut_off(sequence, num_positions + 1)

    def forget(self, sequence: int) -> None:
        """Free the cells of a sequence."""
        self._context.forget(sequence)

    def __del__(self) -> None:
        if hasattr(self, "_batch"):
            self._llama.llama_batch_ext_free(self._batch)
