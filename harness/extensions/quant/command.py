"""`harness quant`: what the types of a model cost."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from harness.base.files import read_text, scratch_folder, write_text
from harness.command import options as opt
from harness.command.forms import DOCUMENT, Forms
from harness.command.progress import progress_bar
from harness.errors import Code, ExitStatus, HarnessError

if TYPE_CHECKING:
    from harness.extensions.quant.forward import Sequences
    from harness.oracle.model import HFModel

QUANT = Forms(
    human="harness.extensions.quant.report:quant_text",
    markdown="harness.extensions.quant.report:quant_text",
    json=DOCUMENT,
)

DEFAULT_MODEL = "llama-tiny"
DEFAULT_TYPES = "F16,Q8_0,Q4_0"
PAGE_NAME, TABLE_NAME = "quant.html", "quant.md"


def quant(
    model: Annotated[
        str | None,
        typer.Option(metavar="PATH_OR_HUB_ID", help=f"Original checkpoint. [default: {DEFAULT_MODEL}, embedded]"),
    ] = None,
    types: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help="Types to quantise to, comma-separated: GGUF types (by llama.cpp), torchao-int8, ... "
            f"[default: {DEFAULT_TYPES}; none with --file, --caches or --engine]",
        ),
    ] = None,
    file: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            help="GGUF file, or folder of a checkpoint of the same model, quantised or not. Repeatable.",
        ),
    ] = None,
    caches: Annotated[
        str,
        typer.Option(
            metavar="NAMES",
            help="KV cache formats to measure, comma-separated: float8_e4m3fn, int8:head, nvfp4, Q8_0, ...",
        ),
    ] = "",
    engine: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Engine whose KV cache is also measured, with its options, for prefill and decode."
        ),
    ] = None,
    engine_option: opt.EngineOption = None,
    dtype: opt.Dtype = None,
    text_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Text to measure on. [default: text that the model generates, see --seed]"),
    ] = None,
    tokens: Annotated[int, typer.Option(min=2, metavar="N", help="Maximum number of tokens per sequence.")] = 256,
    sequences: Annotated[
        int, typer.Option(min=1, metavar="N", help="Number of sequences that the model generates.")
    ] = 4,
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="Random seed of the generated text.")] = 0,
    pad: Annotated[
        bool,
        typer.Option("--pad", help="Pad a small model with zeros to rows of 256; its results stay exactly the same."),
    ] = False,
    parts: Annotated[
        str,
        typer.Option(
            metavar="NAMES",
            help="Also measure the cost of each part alone, comma-separated: layers, kinds (q_proj of all layers, "
            "...), weights. Needs one forward per part.",
        ),
    ] = "",
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder for quant.md and quant.html, a page with plots.")
    ] = None,
    local_files_only: opt.LocalFilesOnly = False,
    format: Annotated[str, QUANT.option()] = "human",
) -> int:
    """Measure the quality that quantised formats of a model lose.

    Shows the perplexity of each type, and its KL divergence from the original in HuggingFace. The divergence is split
    into the cost of the format (the dequantised weights) and of the arithmetic of the engine: llama.cpp, or HuggingFace
    for the formats of torchao and compressed-tensors.
    """
    with progress_bar() as report:
        import torch

        from harness.extensions.llamacpp.engine.options import parse_llamacpp_options
        from harness.extensions.llamacpp.engine.tensor import llama
        from harness.extensions.llamacpp.gguf.header import PLAIN
        from harness.extensions.quant.caches import check_cache
        from harness.extensions.quant.files import check_type, pad_checkpoint
        from harness.extensions.quant.hf_types import HF_TYPES, check_package
        from harness.extensions.quant.parts import check_splits
        from harness.extensions.quant.report import quant_html, quant_text
        from harness.extensions.quant.run import measure_types
        from harness.formats.checkpoint import resolve
        from harness.oracle.model import load_model
        from harness.plan import plan_engine

        names = types.split(",") if types is not None else [] if file or caches or engine else DEFAULT_TYPES.split(",")
        wanted: list[str | Path] = [*(check_type(name) for name in names), *(file or [])]
        kept = [check_cache(name.strip()) for name in caches.split(",") if name.strip()]
        splits = check_splits(parts)
        engine_options = opt.parse_engine_options(engine_option)
        options = parse_llamacpp_options({} if engine else engine_options)
        if dtype is not None and engine is None:
            what, hint = "the dtype is that of --engine", "HuggingFace and llama.cpp run in float32"
            raise HarnessError(Code.BAD_OPTION, what, where="--dtype", actual=dtype, hint=hint)
        for item in wanted:  # what is missing is known before anything costs time
            if item in HF_TYPES:
                check_package(str(item))
            elif item not in PLAIN and not isinstance(item, Path):
                llama()
        folder = resolve(model or DEFAULT_MODEL, local_files_only=local_files_only)
        with scratch_folder("harness-") as made:
            original = pad_checkpoint(folder, made / "padded") if pad else folder
            hf = load_model(original, dtype=torch.float32, stays=True)
            plan = None
            if engine is not None:
                asked = {"engine": engine, "engine_options": engine_options, "dtype": dtype}
                plan = plan_engine(model=str(original), **asked, local_files_only=local_files_only)
            token_sequences, text = _sequences(hf, text_file, sequences, tokens, seed)
            name = model or DEFAULT_MODEL
            result = measure_types(
                hf,
                wanted,
                token_sequences,
                caches=kept,
                engine=plan,
                model=name,
                text=text,
                options=options,
                seed=seed,
                splits=splits,
                progress=report,
            )
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
            write_text(out / PAGE_NAME, quant_html(result))
            write_text(out / TABLE_NAME, quant_text(result, "github") + "\n")
    QUANT.show(result, format)
    return ExitStatus.PASS


def _sequences(
    hf: "HFModel", text_file: Path | None, num_sequences: int, num_tokens: int, seed: int
) -> "tuple[Sequences, str]":
    """Return the tokens, and where they come from."""
    from harness.extensions.quant.forward import sample_text, split_text
    from harness.plan import tokenize

    if text_file is None:
        said = sample_text(hf, num_sequences=num_sequences, num_tokens=num_tokens, seed=seed)
        return said, f"its own text, seed {seed}"
    token_ids = tokenize(_read(text_file), hf.checkpoint, where=str(text_file))
    return split_text(token_ids, hf, num_tokens), text_file.name


def _read(path: Path) -> str:
    try:
        return read_text(path)
    except (OSError, UnicodeDecodeError) as error:
        what = "the text cannot be read"
        raise HarnessError(Code.BAD_OPTION, what, where="--text-file", actual=f"{path}: {error}") from error
