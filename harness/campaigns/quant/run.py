"""Types of one model, each split into what its format costs and what the engine's arithmetic costs."""

from collections.abc import Sequence
from pathlib import Path

import torch

from harness.base.progress import Progress
from harness.base.scratch import scratch_folder
from harness.campaigns.quant.files import make_file
from harness.campaigns.quant.forward import hf_distributions, llamacpp_distributions
from harness.campaigns.quant.hf.run import run_hf_type
from harness.campaigns.quant.hf.types import HF_TYPES
from harness.campaigns.quant.measure import distance, perplexity
from harness.campaigns.quant.text import Sequences
from harness.campaigns.quant.type_run import TypeRun
from harness.engines.llamacpp.options import LlamaCppOptions
from harness.formats.checkpoint import cache_dir
from harness.formats.checkpoint.gguf import checkpoint_of_gguf, open_gguf
from harness.oracle.model import HFModel, load_model
from harness.results.quant import QuantResult, QuantRow


def measure_types(
    hf: HFModel,
    types: Sequence[str | Path],
    sequences: Sequences,
    *,
    model: str,
    text: str,
    options: LlamaCppOptions,
    progress: Progress,
) -> QuantResult:
    """Measure each type against the original.

    Args:
        hf: the original, in float32.
        types: names of types, which are made here, and GGUF files.
        sequences: the tokens.
        model: how the user named it.
        text: where the tokens come from.
        options: of llama.cpp.
        progress: told what is being done.
    """
    progress("HuggingFace", 0, len(types))
    truth = hf_distributions(hf, sequences)
    rows = []
    with scratch_folder("harness-quant-") as folder:
        for at, each in enumerate(types):
            progress(str(each), at, len(types))
            rows.append(_row(_run(each, hf, sequences, options, folder), truth, sequences))
    progress("done", len(types), len(types))
    return QuantResult(
        model=model,
        text=text,
        num_rows=sum(map(len, sequences)),
        perplexity=perplexity(truth, sequences),
        types=tuple(rows),
    )


def _run(each: str | Path, hf: HFModel, sequences: Sequences, options: LlamaCppOptions, scratch: Path) -> TypeRun:
    if isinstance(each, Path):
        return _run_file(each.stem, each, hf, sequences, options)
    if each in HF_TYPES:
        return run_hf_type(each, hf, sequences, scratch)
    return _run_file(each, make_file(hf.folder, each, scratch), hf, sequences, options)


def _run_file(name: str, path: Path, hf: HFModel, sequences: Sequences, options: LlamaCppOptions) -> TypeRun:
    file = open_gguf(path)
    dequantised = load_model(checkpoint_of_gguf(path, cache_dir() / "gguf", hf=hf.checkpoint), dtype=torch.float32)
    return TypeRun(
        name=name,
        size_bytes=file.num_bytes,
        bits_per_weight=file.bits_per_weight,
        dequantised=hf_distributions(dequantised, sequences),
        engine=llamacpp_distributions(path, sequences, options),
    )


def _row(run: TypeRun, truth: Sequence[torch.Tensor], sequences: Sequences) -> QuantRow:
    whole = distance(truth, run.engine)
    return QuantRow(
        name=run.name,
        size_bytes=run.size_bytes,
        bits_per_weight=run.bits_per_weight,
        perplexity=perplexity(run.engine, sequences),
        kl_mean=whole.mean,
        kl_median=whole.median,
        kl_p99=whole.p99,
        kl_max=whole.max,
        same_top=whole.same_top,
        kl_mean_format=distance(truth, run.dequantised).mean,
        kl_mean_arithmetic=distance(run.dequantised, run.engine).mean,
    )
