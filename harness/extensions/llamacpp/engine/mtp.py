"""llama.cpp's layers that predict further tokens: a context of their own, fed with the main one's hidden states."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from harness.errors import Code, HarnessError
from harness.extensions.llamacpp.engine.capture import GraphWatcher
from harness.extensions.llamacpp.engine.context import Context, Model
from harness.extensions.llamacpp.engine.options import LlamaCppOptions
from harness.extensions.llamacpp.engine.tensor import llama

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
        found = getattr(self._llama.llama_cpp._lib, name, None)
        if found is None:
            what = "this llama.cpp does not export what the main model gives these layers"
            raise HarnessError(Code.ENGINE_CANNOT_SERVE, what, where="llamacpp", expected=name)
        found.argtypes, found.restype = None, result
        pointer = self._llama.ctypes.c_void_p
        return lambda context, *flags: found(pointer(context), *map(self._llama.ctypes.c_bool, flags))

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
