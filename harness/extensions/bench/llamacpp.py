"""llama.cpp through llama-cpp-python's low-level interface if it is installed."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.errors import Code, HarnessError
from harness.extensions.bench.peer import BenchConfig, BenchWorkload, Generation, PeerMissingError
from harness.extensions.llamacpp.engine.context import LlamaBatch, Model
from harness.extensions.llamacpp.engine.tensor import llama
from harness.extensions.llamacpp.gguf.header import PLAIN
from harness.extensions.llamacpp.gguf.writer import write_gguf

BATCH_TOKENS = 2048
_TYPES = {dtype: name for name, dtype in PLAIN.items()}


@dataclass(slots=True)
class _Request:
    """One request on its way; llama.cpp calls its number the sequence id."""

    prompt: Sequence[int]
    num_wanted: int
    tokens: list[int] = field(default_factory=list)

    @property
    def pending(self) -> Sequence[int]:
        """Tokens that are not in the cache."""
        return self.tokens[-1:] or self.prompt

    @property
    def num_computed(self) -> int:
        """Tokens in the cache."""
        return len(self.prompt) + len(self.tokens) - 1 if self.tokens else 0

    @property
    def is_finished(self) -> bool:
        """Whether nothing is left to generate."""
        return len(self.tokens) == self.num_wanted


class LlamaCppPeer:
    """All requests at once: each step decodes one token of every request that goes on, as its `batched` example does.

    Raises:
        PeerMissingError: llama-cpp-python or gguf is not installed, or the device is no CPU.
    """

    name = "llamacpp"
    shows_steps = True

    def __init__(self, setting: BenchConfig) -> None:
        if setting.device != "cpu":
            raise PeerMissingError("it is timed on the CPU only")
        with _missing_packages():
            self._llama = llama()
        self._model = Model(write_model(setting))
        self._context = self._llama.llama_init_from_model(self._model.pointer, self._context_params(setting))
        if not self._context:
            raise HarnessError(Code.ENGINE_FAILED, "llama_init_from_model fails", where=self.name)
        self._batch = LlamaBatch(BATCH_TOKENS, self._model.vocab_size)

    def close(self) -> None:
        """See `Peer.close`; the library's memory is the process's until it ends."""

    def generate(self, workload: BenchWorkload) -> Generation:
        """See `Peer.generate`."""
        requests = [_Request(*pair) for pair in zip(workload.prompts, workload.output_lens, strict=True)]
        generation = Generation()
        self._llama.llama_memory_clear(self._llama.llama_get_memory(self._context), True)
        while not all(request.is_finished for request in requests):
            self._step({i: request for i, request in enumerate(requests) if not request.is_finished})
            generation.end_step()
        generation.token_ids = [request.tokens for request in requests]
        return generation

    def _step(self, requests: Mapping[int, _Request]) -> None:
        """Compute all pending tokens, and append the likeliest next one to each request."""
        rows = [
            (token, request.num_computed + offset, sequence, offset == len(request.pending) - 1)
            for sequence, request in requests.items()
            for offset, token in enumerate(request.pending)
        ]
        for start in range(0, len(rows), BATCH_TOKENS):
            for sequence, token in self._decode(rows[start : start + BATCH_TOKENS]):
                requests[sequence].tokens.append(token)

    def _decode(self, rows: Sequence[tuple[int, int, int, bool]]) -> list[tuple[int, int]]:
        """Compute rows of (token, position, sequence, is sampled); return sequence and next token of sampled ones."""
        self._batch.decode(self._context, rows)
        return [(row[2], int(self._batch.logits(self._context, i).argmax())) for i, row in enumerate(rows) if row[3]]

    def _context_params(self, setting: BenchConfig) -> Any:
        params = self._llama.llama_context_default_params()
        params.n_ctx = setting.max_requests * setting.max_request_len
        params.n_batch = BATCH_TOKENS
        params.n_seq_max = setting.max_requests
        params.n_threads = params.n_threads_batch = setting.num_threads
        return params


def write_model(setting: BenchConfig) -> Path:
    """Write the checkpoint's weights as GGUF bit for bit; norms become float32, as llama.cpp wants them.

    Raises:
        PeerMissingError: the package gguf is not installed.
    """
    with _missing_packages():
        return write_gguf(setting.folder, setting.scratch / "model.gguf", _TYPES[setting.dtype])


@contextmanager
def _missing_packages() -> Iterator[None]:
    """Leave the peer out where a package is not installed."""
    try:
        yield
    except HarnessError as error:
        if error.code is not Code.PACKAGE_MISSING:
            raise
        raise PeerMissingError(str(error)) from error
