"""llama.cpp under test, through llama-cpp-python."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from harness.base.files import scratch_folder
from harness.base.numerics import Numerics
from harness.engines.adapter import Capabilities, Engine, Workload
from harness.errors import Code, HarnessError
from harness.extensions.llamacpp.engine.by_content import open_by_content
from harness.extensions.llamacpp.engine.cache import CachedRows, rotations, turned_back
from harness.extensions.llamacpp.engine.context import Context, LlamaSequence, Model, SequencePiece, next_batch
from harness.extensions.llamacpp.engine.graph import Capture, UBatch, halves_of_pairs, pruned_taps, tap_of
from harness.extensions.llamacpp.engine.options import LlamaCppOptions, parse_llamacpp_options
from harness.extensions.llamacpp.engine.session import LlamaCppSession, model_shape
from harness.extensions.llamacpp.engine.tensor import llama
from harness.extensions.llamacpp.gguf import open_gguf, read_source
from harness.extensions.llamacpp.gguf.architecture import FAMILIES, Metadata
from harness.extensions.llamacpp.gguf.model import GGUFModel
from harness.extensions.llamacpp.gguf.writer import write_adapter_file, write_gguf
from harness.formats.recording import RecordingWriter, RequestInfo
from harness.formats.taps import layer_prefix

_SCHEDULES = ("plain", "chunked", "batched", "mixed", "prefix-hit", "forked")


def open_engine(folder: Path, *, dtype: str, device: str, options: Mapping[str, str]) -> Engine:
    """Open llama.cpp on the GGUF file that a checkpoint folder was made of; of another checkpoint one is made.

    Where the option `gguf` names a file of an architecture whose graph is not known, taps are found by content.

    Raises:
        HarnessError: PACKAGE_MISSING, BAD_OPTION, ENGINE_CANNOT_SERVE.
    """
    llama()
    parsed = parse_llamacpp_options(options)
    if dtype != "float32" or device != "cpu":
        raise HarnessError(
            Code.ENGINE_CANNOT_SERVE,
            "llama.cpp computes in float32, and is checked on the CPU",
            where="--dtype" if dtype != "float32" else "--device",
            expected="--dtype float32 --device cpu",
            actual=f"{dtype}, {device}",
            hint="the types of weights and cache are the file's, and options of the engine",
        )
    source = read_source(folder)
    if parsed.gguf is not None or source is not None:
        file = open_gguf(parsed.gguf or source.path)  # type: ignore[union-attr]
        if _has_table(file.metadata):
            return LlamaCppEngine(file, parsed)
        return open_by_content(file, folder, parsed, source=None if source is None else open_gguf(source.path))
    with scratch_folder("harness-") as made:
        return LlamaCppEngine(open_gguf(write_gguf(folder, made / "model.gguf", parsed.type)), parsed)


def _has_table(metadata: Metadata) -> bool:
    """Whether the nodes of a file's graph are known: Mixtral is a Llama with experts, which have no table."""
    return metadata.architecture in FAMILIES and not metadata.get("expert_count")


class LlamaCppEngine:
    """Adapter of llama.cpp."""

    name = "llamacpp"

    def __init__(self, file: GGUFModel, options: LlamaCppOptions) -> None:
        """Load a GGUF file."""
        metadata = file.metadata
        self._file, self._weights, self._options = file, frozenset(file.tensors), options
        self._interleaves = metadata.family.permutes_heads
        self._head_dim = metadata.count(
            "attention.key_length", metadata.count("embedding_length") // metadata.count("attention.head_count")
        )
        self._model = Model(file.path, repack=options.repack)
        self._rotations = rotations(options, self._head_dim)
        if options.lora is not None or options.lora_gguf is not None:
            self._load_adapter(options, metadata)
        self.capabilities = Capabilities(
            schedules=_SCHEDULES,
            not_served="llama.cpp shows its logits through the callback of its graph alone",
            sampled_only=pruned_taps(metadata.count("block_count")),
            numerics=Numerics(weights=file.formats, **self._declared_cache()),
        )

    def _load_adapter(self, options: LlamaCppOptions, metadata: Metadata) -> None:
        with scratch_folder("harness-") as made:
            path = options.lora_gguf
            if path is None and options.lora is not None:
                path = write_adapter_file(options.lora, metadata, made / "adapter.gguf")
            if path is not None:
                self._model.load_adapter(path)

    def _declared_cache(self) -> dict[str, Any]:
        """Return what the cache does to keys and values, as `Numerics` says it."""
        declared = self._options.declared_cache
        if declared["cache"] is None:
            return declared
        return declared | {
            "cache_rotations": self._rotations,
            "interleaved_heads": self._head_dim if self._interleaves else 0,
        }

    @torch.no_grad()
    def run(self, workload: Workload, writer: RecordingWriter) -> None:
        """Run the workload in a fresh context; see `Engine.run`."""
        requests = [*workload.requests, *workload.copies]
        capture = Capture(
            self._weights,
            head_dim=self._head_dim,
            interleaves=self._interleaves,
            turns_values=self._rotations[1] > 0,
        )
        num_cells = sum(len(request.token_ids) for request in requests)
        with Context(self._model, self._options, capture, num_seqs=len(requests), num_cells=num_cells) as context:
            _Run(self, context, capture, workload, writer).run()

    def open_session(self, *, max_num_tokens: int, max_num_seqs: int) -> LlamaCppSession:
        """See `Steppable.open_session`; explicit options win."""
        options = self._options
        if "batch_size" not in options.model_fields_set:
            options = options.model_copy(update={"batch_size": max(options.batch_size, max_num_tokens)})
        name_of = partial(tap_of, weights=self._weights, turns_values=self._rotations[1] > 0)
        shape = model_shape(self._file, options, self._model.vocab_size, self._head_dim)
        return LlamaCppSession(self._model, options, shape, name_of, max_num_seqs=max_num_seqs)

    def cached(self, rows: CachedRows) -> dict[str, torch.Tensor]:
        """Return the taps of what was read back."""
        taps = {}
        for layer, (keys, values) in enumerate(zip(rows.keys, rows.values, strict=True)):
            keys, values = (turned_back(x, size) for x, size in zip((keys, values), self._rotations, strict=True))
            ordered = halves_of_pairs(keys, self._head_dim) if self._interleaves else keys
            taps[f"{layer_prefix(layer)}k_cache"], taps[f"{layer_prefix(layer)}v_cache"] = ordered, values
        return taps


class _Run:
    """One workload."""

    def __init__(
        self, engine: LlamaCppEngine, context: Context, capture: Capture, workload: Workload, writer: RecordingWriter
    ) -> None:
        self._engine, self._context, self._capture = engine, context, capture
        self._workload, self._writer = workload, writer
        self._numbers = {request.id: at for at, request in enumerate([*workload.requests, *workload.copies])}
        copies = zip((request.id for request in workload.requests), workload.copies, strict=False)
        self._forks = dict(copies) if workload.schedule.trigger == "forked" else {}

    def run(self) -> None:
        requests, copies = self._workload.requests, self._workload.copies
        groups = [list(requests)] if self._workload.schedule.is_batched else [[request] for request in requests]
        for group in groups:
            self._run_group([self._sequence(request) for request in group])
        if not self._forks:
            for request, copy in zip(requests, copies, strict=False):
                self._run_group([self._hit(request, copy)])

    def _sequence(self, request: RequestInfo, num_computed: int = 0) -> LlamaSequence:
        return LlamaSequence(request, self._numbers[request.id], num_computed)

    def _hit(self, request: RequestInfo, copy: RequestInfo) -> LlamaSequence:
        """Begin a copy with what the first one's prompt left in the cache; its last token is computed again."""
        shared = copy.prompt_length - 1
        self._context.share(self._numbers[request.id], self._numbers[copy.id], shared)
        return self._sequence(copy, shared)

    def _run_group(self, sequences: list[LlamaSequence]) -> None:
        """Run sequences to their end, all at once."""
        while running := [sequence for sequence in sequences if not sequence.is_finished]:
            pieces = next_batch(
                running, chunk_size=self._workload.schedule.chunk_size, num_batch=self._context.num_batch
            )
            self._compute(pieces)
            for piece in pieces:
                piece.sequence.num_computed = piece.positions.stop
                sequences += self._forked(piece.sequence)
                if piece.sequence.is_finished:
                    self._read_back(piece.sequence)

    def _forked(self, sequence: LlamaSequence) -> list[LlamaSequence]:
        """Fork a sequence that has just made its first token if it is to be."""
        request = sequence.request
        if sequence.num_computed != request.prompt_length or request.id not in self._forks:
            return []
        fork = self._forks[request.id]
        if len(fork.token_ids) <= request.prompt_length:
            return []
        self._context.share(sequence.number, self._numbers[fork.id], request.prompt_length)
        return [self._sequence(fork, request.prompt_length)]

    def _compute(self, pieces: Sequence[SequencePiece]) -> None:
        rows = [row for piece in pieces for row in piece.rows()]
        self._context.decode(rows)
        ids = [piece.sequence.request.id for piece in pieces for _ in piece.positions]
        begin = 0
        for ubatch in self._capture.take():
            size = len(ubatch.taps["model.embed_tokens"])
            span = slice(begin, begin + size)
            self._record(ubatch, ids[span], [row[1] for row in rows[span]], [row[3] for row in rows[span]])
            begin += size
        if begin != len(rows):
            raise _disagreement("rows of a batch", expected=len(rows), actual=begin)

    def _record(self, ubatch: UBatch, ids: list[int], positions: list[int], is_sampled: list[bool]) -> None:
        sampled = [row for row, holds in enumerate(is_sampled) if holds]
        shown = [] if ubatch.positions is None else ubatch.positions.tolist()
        if shown != positions:
            raise _disagreement("positions of a batch", expected=positions[:8], actual=shown[:8])
        kept = list(range(len(ids))) if ubatch.outputs is None else ubatch.outputs.tolist()
        if kept != sampled:
            raise _disagreement("rows kept for the head", expected=sampled[:8], actual=kept[:8])
        pruned = set(self._engine.capabilities.sampled_only)
        self._writer.begin_step(
            phase=self._phase(ids, positions),
            request=ids,
            position=positions,
            sampled_rows=sampled,
            partial_rows={tap: sampled for tap in ubatch.taps if tap in pruned} if sampled else None,
        )
        for tap, values in ubatch.taps.items():
            if sampled or tap not in pruned:
                self._writer.tap(tap, values)
        self._writer.end_step(ubatch.taps["lm_head"].argmax(dim=-1).tolist() if sampled else [])

    def _phase(self, ids: Sequence[int], positions: Sequence[int]) -> str:
        lengths = {r.id: r.prompt_length for r in [*self._workload.requests, *self._workload.copies]}
        in_prompt = {position < lengths[request] for request, position in zip(ids, positions, strict=True)}
        return "mixed" if len(in_prompt) == 2 else "prefill" if True in in_prompt else "decode"

    def _read_back(self, sequence: LlamaSequence) -> None:
        rows = self._context.read_back(sequence.number)
        positions = rows.positions.tolist()
        self._writer.begin_step(phase="readback", request=[sequence.request.id] * len(positions), position=positions)
        for tap, values in self._engine.cached(rows).items():
            self._writer.tap(tap, values)
        self._writer.end_step()


def _disagreement(what: str, *, expected: object, actual: object) -> HarnessError:
    return HarnessError(
        Code.ENGINE_FAILED,
        f"llama.cpp's graph shows other {what} than it was given",
        where="llamacpp",
        expected=expected,
        actual=actual,
    )
