"""Rows that llama.cpp computes at once."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from harness.errors import Code, HarnessError
from harness.extensions.llamacpp.engine.tensor import llama


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
