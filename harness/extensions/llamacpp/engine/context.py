"""A context of llama.cpp: a KV cache, and batches of requests' rows that are computed into it and watched."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from harness.errors import Code, HarnessError
from harness.extensions.llamacpp.engine.cache import CachedRows, SavedRows, parse_saved, parse_state
from harness.extensions.llamacpp.engine.graph import GraphWatcher
from harness.extensions.llamacpp.engine.options import FLASH_ATTENTION, LlamaCppOptions
from harness.extensions.llamacpp.engine.tensor import llama
from harness.formats.recording import RequestInfo


class LlamaBatch:
    """Room for some rows, and the logits of those that were computed last; freed with the object."""

    def __init__(self, num_rows: int, vocab_size: int) -> None:
        self._llama, self._vocab_size = llama(), vocab_size
        self._batch = self._llama.llama_batch_init(num_rows, 0, 1)

    def decode(self, context: Any, rows: Sequence[tuple[int, int, int, bool]]) -> None:
        """Compute rows of (token, position, sequence, whether its logits are wanted) in a context.

        Raises:
            HarnessError: ENGINE_FAILED.
        """
        batch = self._batch
        batch.n_tokens = len(rows)
        for i, (token, position, sequence, is_sampled) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position, is_sampled
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
        status = self._llama.llama_decode(context, batch)
        if status != 0:
            hint = "status 1: the cache has no room for so many tokens"
            what = "llama_decode fails"
            raise HarnessError(Code.ENGINE_FAILED, what, where="llamacpp", actual=f"status {status}", hint=hint)

    def logits(self, context: Any, row: int) -> Any:
        """Return the logits of a row that was computed last: [vocabulary] float32, valid until the next rows."""
        pointer = self._llama.llama_get_logits_ith(context, row)
        return np.ctypeslib.as_array(pointer, shape=(self._vocab_size,))

    def __del__(self) -> None:
        if hasattr(self, "_batch"):
            self._llama.llama_batch_free(self._batch)


@dataclass(slots=True)
class LlamaSequence:
    """One request; llama.cpp calls its number the sequence id."""

    request: RequestInfo
    number: int
    num_computed: int = 0
    """Tokens in the cache."""

    @property
    def is_finished(self) -> bool:
        """Whether all tokens have been fed."""
        return self.num_computed == len(self.request.token_ids)

    @property
    def is_in_prompt(self) -> bool:
        """Whether tokens of the prompt are left."""
        return self.num_computed < self.request.prompt_length


@dataclass(frozen=True, slots=True)
class SequencePiece:
    """Tokens of one sequence in a batch."""

    sequence: LlamaSequence
    positions: range

    def rows(self) -> Iterator[tuple[int, int, int, bool]]:
        """Yield (token, position, sequence, whether its logits are wanted)."""
        request = self.sequence.request
        for position in self.positions:
            is_sampled = position >= request.prompt_length - 1
            yield request.token_ids[position], position, self.sequence.number, is_sampled


def next_batch(sequences: Sequence[LlamaSequence], *, chunk_size: int | None, num_batch: int) -> list[SequencePiece]:
    """Return what the next batch holds: a token of each sequence after its prompt, then pieces of prompts.

    Args:
        sequences: those that are not finished, in the order of their arrival.
        chunk_size: most tokens of prompts; None for no limit.
        num_batch: most tokens of all.
    """
    pieces = [
        SequencePiece(sequence, range(sequence.num_computed, sequence.num_computed + 1))
        for sequence in sequences
        if not sequence.is_in_prompt
    ][:num_batch]
    room = num_batch - len(pieces) if chunk_size is None else min(chunk_size, num_batch - len(pieces))
    for sequence in sequences:
        if sequence.is_in_prompt and room > 0:
            end = min(sequence.request.prompt_length, sequence.num_computed + room)
            pieces.append(SequencePiece(sequence, range(sequence.num_computed, end)))
            room -= end - sequence.num_computed
    return pieces


_PADDING = 256
"""llama.cpp rounds the cells of a cache up to a multiple of this."""


class Model:
    """A loaded model; freed with the object."""

    def __init__(self, path: Path, *, repack: bool = True, mtp: bool = False) -> None:
        self._llama = llama()
        self.adapters: list[Any] = []
        """LoRA adapters that contexts apply, at their own scale."""
        params = self._llama.llama_model_default_params()
        params.n_gpu_layers = 0
        params.use_extra_bufts = repack
        if mtp:
            params.load_mtp = True
        self.pointer = self._llama.llama_model_load_from_file(str(path).encode(), params)
        if not self.pointer:
            raise HarnessError(
                Code.ENGINE_CANNOT_SERVE,
                "llama.cpp does not load the model",
                where=path,
                hint=f"harness inspect {path}",
            )

    @property
    def vocab_size(self) -> int:
        """Tokens that there are."""
        return int(self._llama.llama_vocab_n_tokens(self._llama.llama_model_get_vocab(self.pointer)))

    @property
    def num_layers(self) -> int:
        """Layers of the decoder."""
        return int(self._llama.llama_model_n_layer(self.pointer))

    def load_adapter(self, path: Path) -> None:
        """Load a LoRA adapter, which every context then applies; it is freed with the model.

        Raises:
            HarnessError: ENGINE_CANNOT_SERVE.
        """
        adapter = self._llama.llama_adapter_lora_init(self.pointer, str(path).encode())
        if not adapter:
            what, hint = "llama.cpp does not load the adapter", "is it an adapter of this model?"
            raise HarnessError(Code.ENGINE_CANNOT_SERVE, what, where=path, hint=hint)
        self.adapters.append(adapter)

    def __del__(self) -> None:
        if getattr(self, "pointer", None):
            self._llama.llama_model_free(self.pointer)


def _parameters(options: LlamaCppOptions, *, num_seqs: int, num_cells: int) -> Any:
    """Return llama.cpp's parameters of a context with these options."""
    params = llama().llama_context_default_params()
    params.n_ctx = -(-num_cells // _PADDING) * _PADDING
    params.n_batch = max(options.batch_size, num_seqs)
    params.n_ubatch = min(options.ubatch_size, params.n_batch)
    params.n_seq_max = num_seqs
    params.n_threads = params.n_threads_batch = options.threads
    params.flash_attn_type = FLASH_ATTENTION[options.flash_attention]
    params.type_k, params.type_v = options.cache_types
    params.rope_freq_base = options.rope_freq_base
    params.kv_unified = True  # batches keep the order of their rows
    params.no_perf = False
    return params


class Context:
    """A cache for some sequences, freed at the end of the block."""

    def __init__(
        self,
        model: Model,
        options: LlamaCppOptions,
        watcher: GraphWatcher | None,
        *,
        num_seqs: int,
        num_cells: int,
        kind: int = 0,
    ):
        """Make a context.

        Args:
            model: the weights.
            options: types of the cache, flash attention, sizes of batches.
            watcher: what sees its graph; None for nothing.
            num_seqs: sequences that are in the cache at once.
            num_cells: tokens of all of them.
            kind: llama.cpp's type of a context: 0 for that of the decoder.
        """
        self._llama, self._model = llama(), model
        params = _parameters(options, num_seqs=num_seqs, num_cells=num_cells)
        if kind:  # older versions have no types
            params.ctx_type = kind
        if watcher is not None:
            params.cb_eval = watcher.callback
        self.pointer = self._llama.llama_init_from_model(model.pointer, params)
        if not self.pointer:
            raise HarnessError(
                Code.ENGINE_CANNOT_SERVE,
                "llama.cpp does not make a context of these options",
                where="--engine-option",
                actual=", ".join((*options.cache_names, f"flash attention {options.flash_attention}")),
                hint="a quantised cache of values needs flash attention and rows of whole blocks",
            )
        self._apply_adapters()
        self.num_cells = int(params.n_ctx)
        self.num_batch = int(params.n_batch)
        self.vocab_size = model.vocab_size
        self._batch = LlamaBatch(self.num_batch, self.vocab_size)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Free it; nothing else may be called afterwards."""
        self._llama.llama_free(self.pointer)

    def _apply_adapters(self) -> None:
        library, adapters = self._llama, self._model.adapters
        if not adapters:
            return
        pointers = (library.llama_adapter_lora_p_ctypes * len(adapters))(*adapters)
        scales = (library.ctypes.c_float * len(adapters))(*[1.0] * len(adapters))
        status = library.llama_set_adapters_lora(self.pointer, pointers, len(adapters), scales)
        if status != 0:
            what = "llama_set_adapters_lora fails"
            raise HarnessError(Code.ENGINE_FAILED, what, where="llamacpp", actual=f"status {status}")

    @property
    def _memory(self) -> Any:
        return self._llama.llama_get_memory(self.pointer)

    def decode(self, rows: Sequence[tuple[int, int, int, bool]]) -> None:
        """Compute rows of (token, position, sequence, whether its logits are wanted).

        Raises:
            HarnessError: ENGINE_FAILED.
        """
        self._batch.decode(self.pointer, rows)

    def logits(self, row: int) -> Any:
        """Return the logits of a row of the last batch: [vocabulary] float32, valid until the next batch."""
        return self._batch.logits(self.pointer, row)

    def forget(self, sequence: int | None = None) -> None:
        """Free the cells of a sequence, or of all."""
        if sequence is None:
            self._llama.llama_memory_clear(self._memory, False)
        else:
            self._llama.llama_memory_seq_rm(self._memory, sequence, -1, -1)

    def cut_off(self, sequence: int, num_positions: int) -> None:
        """Forget what a sequence has computed from a position on.

        Raises:
            HarnessError: ENGINE_CANNOT_SERVE: its memory does not go back.
        """
        if not self._llama.llama_memory_seq_rm(self._memory, sequence, num_positions, -1):
            raise HarnessError(
                Code.ENGINE_CANNOT_SERVE,
                "llama.cpp does not go back: llama_memory_seq_rm refuses it",
                where="llamacpp",
                actual=f"from position {num_positions} on",
                hint="a recurrent state has no earlier one",
            )

    @property
    def counters(self) -> Any:
        """llama.cpp's own counters: `llama_perf_context_data`."""
        return self._llama.llama_perf_context(self.pointer)

    def share(self, source: int, target: int, num_positions: int) -> None:
        """Let a sequence have the first positions of another's cache."""
        self._llama.llama_memory_seq_cp(self._memory, source, target, 0, num_positions)

    def read_back(self, sequence: int) -> CachedRows:
        """Return what the cache holds of a sequence, by llama.cpp's own function that saves it."""
        return parse_state(self._data(sequence))

    def saved(self, sequence: int) -> SavedRows:
        """Return the cache and the states of a sequence, of any architecture: see `parse_saved`."""
        model, library = self._model.pointer, self._llama
        has_states = library.llama_model_is_recurrent(model) or library.llama_model_is_hybrid(model)
        has_cache = not library.llama_model_is_recurrent(model)
        return parse_saved(self._data(sequence), has_cache=has_cache, has_states=has_states)

    def _data(self, sequence: int) -> memoryview:
        size = self._llama.llama_state_seq_get_size(self.pointer, sequence)
        data = np.zeros(size, dtype=np.uint8)
        pointer = data.ctypes.data_as(self._llama.ctypes.POINTER(self._llama.ctypes.c_uint8))
        written = self._llama.llama_state_seq_get_data(self.pointer, pointer, size, sequence)
        return memoryview(data.tobytes())[:written]
