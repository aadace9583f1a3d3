"""Types of one model, each split into what its format costs and what the engine's arithmetic costs."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch

from harness.base.files import scratch_folder
from harness.base.progress import Progress
from harness.engines.hf import quantising, served_model
from harness.errors import Code, HarnessError
from harness.extensions.exports.checkpoint import is_export
from harness.extensions.llamacpp.engine.options import LlamaCppOptions
from harness.extensions.llamacpp.engine.tensor import is_installed
from harness.extensions.llamacpp.gguf import checkpoint_of_gguf, is_gguf, open_gguf
from harness.extensions.quant.caches import run_cache, run_engine_cache
from harness.extensions.quant.files import Importance, importance_of, make_file, note_on
from harness.extensions.quant.forward import (
    Sequences,
    TypeRun,
    distance,
    hf_distributions,
    llamacpp_distributions,
    perplexity,
    sample_text,
    shares,
)
from harness.extensions.quant.hf_types import HF_TYPES, run_hf_type
from harness.extensions.quant.parts import part_costs
from harness.extensions.quant.result import ENGINE_FIGURES, PartCost, PhaseDivergence, QuantResult, QuantRow
from harness.formats.checkpoint import Checkpoint, cache_dir, resolve
from harness.formats.checkpoint.quantised import read_quantised_source, served_folder
from harness.oracle.model import HFModel, load_model
from harness.plan import Plan


def measure_types(
    hf: HFModel,
    types: Sequence[str | Path],
    sequences: Sequences,
    *,
    caches: Sequence[str] = (),
    engine: Plan | None = None,
    model: str,
    text: str,
    options: LlamaCppOptions,
    seed: int,
    splits: Sequence[str] = (),
    progress: Progress,
) -> QuantResult:
    """Measure each type against the original.

    The original is in float32. Types are names, GGUF files, and folders with a checkpoint of transformers. `model` and
    `text` say where model and tokens come from; `seed` is that of the text, and an importance matrix is made on the
    text of the next one. `splits` says by which parts each type's cost is told, too: names of `SPLITS`. `caches` are
    formats of the KV cache, each a row of its own; `engine` is one whose cache is measured.

    Raises:
        HarnessError: as `make_file`, `checkpoint_of_gguf` and `load_model`; BAD_OPTION: another vocabulary.
    """
    total = len(types) + len(caches) + (engine is not None)
    progress("HuggingFace", 0, total)
    truth = hf_distributions(hf, sequences)
    with scratch_folder("harness-quant-") as folder:
        bench = _Bench(hf=hf, sequences=sequences, options=options, scratch=folder, seed=seed, stays=bool(splits))

        def measured(at: int, kind: str | Path) -> QuantRow:
            progress(str(kind), at, total)
            run = bench.run(kind)

            def tell(part: str) -> None:
                progress(f"{run.name}, {part}", at, total)

            return _row(run, truth, sequences, part_costs(hf, run.exact, sequences, truth, splits, tell))

        rows = [measured(*item) for item in enumerate(types)]
        if engine is not None:
            progress(engine.case.engine, len(types), total)
            rows.append(_row(run_engine_cache(engine, hf, sequences, folder), truth, sequences, ()))
    for at, name in enumerate(caches, start=len(rows)):
        progress(f"cache {name}", at, total)
        # No engine was run: what it says is the format's own cost.
        rows.append(replace(_row(run_cache(name, hf, sequences), truth, sequences, ()), kl_mean_arithmetic=None))
    progress("done", total, total)
    return QuantResult(
        model=model,
        text=text,
        num_rows=sum(map(len, sequences)),
        perplexity=perplexity(truth, sequences),
        types=tuple(rows),
    )


@dataclass(frozen=True, kw_only=True)
class _Bench:
    """What every type is measured with."""

    hf: HFModel
    sequences: Sequences
    options: LlamaCppOptions
    scratch: Path
    seed: int
    stays: bool
    """Whether dequantised weights stay in memory, however large: parts of them are run more than once."""

    def run(self, kind: str | Path) -> TypeRun:
        if isinstance(kind, Path):
            return self._gguf(kind.stem, kind) if is_gguf(kind) else self._folder(kind)
        if kind in HF_TYPES:
            return run_hf_type(kind, self.hf, self.sequences, self.scratch)
        return self._gguf(kind, make_file(self.hf, kind, self.scratch, lambda: self._importance), is_made_here=True)

    @cached_property
    def _importance(self) -> Importance:
        """Of a text that is not the one that the cost is measured on."""
        sizes = {"num_sequences": len(self.sequences), "num_tokens": max(map(len, self.sequences))}
        return importance_of(self.hf, sample_text(self.hf, **sizes, seed=self.seed + 1))

    def _gguf(self, name: str, path: Path, *, is_made_here: bool = False) -> TypeRun:
        """Run a file: one that was made here in the type of its name, or one that is held against the original."""
        file = open_gguf(path)
        tensors = [tensor for tensor, _ in file.tensors.values()]
        folder = checkpoint_of_gguf(path, cache_dir() / "gguf", hf=None if is_made_here else self.hf.checkpoint)
        exact = load_model(folder, dtype=torch.float32, stays=self.stays)
        return TypeRun(
            name=name,
            size_bytes=file.num_bytes,
            bits_per_weight=file.bits_per_weight,
            tensor_types=shares((tensor.type.name, tensor.num_bytes) for tensor in tensors),
            note=note_on(name, tensors) if is_made_here else "",
            exact=exact,
            dequantised=hf_distributions(exact, self.sequences),
            engine=llamacpp_distributions(path, self.sequences, self.options) if is_installed() else None,
        )

    def _folder(self, path: Path) -> TypeRun:
        """Run a checkpoint as transformers does, and with the weights that our own reader finds in it."""
        checkpoint = Checkpoint(resolve(str(path), hf=str(self.hf.folder) if is_export(path) else None))
        source = read_quantised_source(checkpoint.folder)
        exact = load_model(checkpoint, dtype=torch.float32, stays=self.stays)
        self._check_vocabulary(exact, path)
        held = Checkpoint(served_folder(checkpoint.folder))
        dequantised = hf_distributions(exact, self.sequences)
        engine, note = (dequantised, "") if source is None else self._served(checkpoint.folder)
        return TypeRun(
            name=path.name,
            size_bytes=held.num_bytes,
            bits_per_weight=8 * held.num_bytes / sum(item.num_elements for item, _ in checkpoint.tensors.values()),
            tensor_types=shares((entry.dtype, entry.num_bytes) for entry, _ in held.tensors.values()),
            note="" if source is None else ", ".join(filter(None, [*source.formats, note])),
            exact=exact,
            dequantised=dequantised,
            engine=engine,
        )

    def _served(self, folder: Path) -> tuple[list[torch.Tensor] | None, str]:
        """Return what transformers says with the packed weights, or None and why it does not load them."""
        try:
            with quantising(str(folder)):  # packages unpack weights, and draw bars, at the first forward
                return hf_distributions(served_model(folder, torch.float32, "cpu"), self.sequences), ""
        except HarnessError as error:
            if error.code is not Code.QUANTISER_REFUSED:
                raise
            return None, f"not measured as transformers runs it: {error.what}"

    def _check_vocabulary(self, reference: HFModel, path: Path) -> None:
        if reference.vocab_size != self.hf.vocab_size:
            raise HarnessError(
                Code.BAD_OPTION,
                "the checkpoint has another vocabulary than the model",
                where=f"--file {path}",
                expected=f"{self.hf.vocab_size} tokens, as {self.hf.folder} has",
                actual=f"{reference.vocab_size} tokens",
                hint="name the model that it was made from as --model",
            )


def _row(run: TypeRun, truth: Sequence[torch.Tensor], sequences: Sequences, parts: tuple[PartCost, ...]) -> QuantRow:
    return QuantRow(
        parts=parts,
        name=run.name,
        size_bytes=run.size_bytes,
        bits_per_weight=run.bits_per_weight,
        tensor_types=run.tensor_types,
        note=run.note,
        kl_mean_format=distance(truth, run.dequantised).mean,
        phases=tuple(_phase_costs(run, truth)),
        **_figures_of_the_engine(run, truth, sequences),
    )


def _phase_costs(run: TypeRun, truth: Sequence[torch.Tensor]) -> Iterator[PhaseDivergence]:
    """Yield the cost in the rows of prompts, and in those of tokens that came one by one."""
    if not run.prompt_lengths or run.engine is None:
        return
    for phase in ("prefill", "decode"):
        exact, form, engine = (
            [
                rows[:end] if phase == "prefill" else rows[end:]
                for rows, end in zip(item, run.prompt_lengths, strict=True)
            ]
            for item in (truth, run.dequantised, run.engine)
        )
        yield PhaseDivergence(
            phase=phase,
            num_rows=sum(map(len, exact)),
            kl_mean=distance(exact, engine).mean,
            kl_mean_format=distance(exact, form).mean,
            kl_mean_arithmetic=distance(form, engine).mean,
        )


def _figures_of_the_engine(
    run: TypeRun, truth: Sequence[torch.Tensor], sequences: Sequences
) -> dict[str, float | None]:
    if run.engine is None:
        return dict.fromkeys(ENGINE_FIGURES)
    whole = distance(truth, run.engine)
    return {
        "perplexity": perplexity(run.engine, sequences),
        "kl_mean": whole.mean,
        "kl_median": whole.median,
        "kl_p99": whole.p99,
        "kl_max": whole.max,
        "same_top": whole.same_top,
        "kl_mean_arithmetic": distance(run.dequantised, run.engine).mean,
    }
