"""`harness quant`: what the types of a model cost."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from harness.base.files import read_text, scratch_folder, write_text
from harness.command import options as opt
from harness.command.forms import DOCUMENT, Forms
from harness.command.grouped import grouped
from harness.command.progress import progress_bar
from harness.errors import Code, ExitStatus, HarnessError

if TYPE_CHECKING:
    from harness.extensions.llamacpp.engine.options import LlamaCppOptions
    from harness.extensions.quant.forward import Sequences
    from harness.extensions.quant.result import QuantResult
    from harness.oracle.model import HFModel
    from harness.plan import Plan

QUANT = Forms(
    human="harness.extensions.quant.report:quant_text",
    markdown="harness.extensions.quant.report:quant_text",
    json=DOCUMENT,
)

DEFAULT_MODEL = "llama-tiny"
DEFAULT_TYPES = "F16,Q8_0,Q4_0"
PAGE_NAME, TABLE_NAME = "quant.html", "quant.md"


@dataclass(frozen=True, slots=True)
class SubjectOptions:
    """Options that choose what is measured."""

    types: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help="Types to quantise to, comma-separated: GGUF types (by llama.cpp), torchao-int8, ... "
            f"[default: {DEFAULT_TYPES}; none with --file, --caches or --engine]",
        ),
    ] = None
    file: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            help="GGUF file, or folder of a checkpoint of the same model, quantised or not. Repeatable.",
        ),
    ] = None
    caches: Annotated[
        str,
        typer.Option(
            metavar="NAMES",
            help="KV cache formats to measure, comma-separated: float8_e4m3fn, int8:head, nvfp4, Q8_0, ...",
        ),
    ] = ""
    engine: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Engine whose KV cache is also measured, with its options, for prefill and decode."
        ),
    ] = None
    engine_option: opt.EngineOption = None
    dtype: opt.Dtype = None

    def check(self) -> None:
        """Refuse a dtype without an engine; raises HarnessError (BAD_OPTION)."""
        if self.dtype is not None and self.engine is None:
            what, hint = "the dtype is that of --engine", "HuggingFace and llama.cpp run in float32"
            raise HarnessError(Code.BAD_OPTION, what, where="--dtype", actual=self.dtype, hint=hint)

    def kinds(self) -> list[str | Path]:
        """Return the types and files to measure, if their packages are installed.

        Raises:
            HarnessError: as `check_type`, `check_package` and `llama`.
        """
        from harness.extensions.llamacpp.engine.tensor import llama
        from harness.extensions.llamacpp.gguf.header import PLAIN
        from harness.extensions.quant.files import check_type
        from harness.extensions.quant.hf_types import HF_TYPES, check_package

        default = [] if self.file or self.caches or self.engine else DEFAULT_TYPES.split(",")
        names = [check_type(name) for name in (default if self.types is None else self.types.split(","))]
        for name in names:
            if name in HF_TYPES:
                check_package(name)
            elif name not in PLAIN:
                llama()
        return [*names, *(self.file or [])]

    def cache_formats(self) -> list[str]:
        """Return the KV cache formats to measure; raises HarnessError as `check_cache`."""
        from harness.extensions.quant.caches import check_cache

        return [check_cache(name.strip()) for name in self.caches.split(",") if name.strip()]

    def llamacpp_options(self) -> "LlamaCppOptions":
        """Return the options of llama.cpp, which has those of `--engine-option` if no engine is named.

        Raises:
            HarnessError: BAD_OPTION.
        """
        from harness.extensions.llamacpp.engine.options import parse_llamacpp_options

        return parse_llamacpp_options({} if self.engine else opt.parse_engine_options(self.engine_option))

    def plan(self, folder: Path, *, local_files_only: bool) -> "Plan | None":
        """Return the plan of the engine whose cache is measured; None if no engine is named."""
        from harness.plan import plan_engine

        if self.engine is None:
            return None
        return plan_engine(
            model=str(folder),
            engine=self.engine,
            engine_options=opt.parse_engine_options(self.engine_option),
            dtype=self.dtype,
            local_files_only=local_files_only,
        )


@dataclass(frozen=True, slots=True)
class TextOptions:
    """Options of the text that the types are measured on."""

    text_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Text to measure on. [default: text that the model generates, see --seed]"),
    ] = None
    tokens: Annotated[int, typer.Option(min=2, metavar="N", help="Maximum number of tokens per sequence.")] = 256
    sequences: Annotated[
        int, typer.Option(min=1, metavar="N", help="Number of sequences that the model generates.")
    ] = 4
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="Random seed of the generated text.")] = 0

    def token_sequences(self, hf: "HFModel") -> "tuple[Sequences, str]":
        """Return the tokens, and where they come from; raises HarnessError (BAD_OPTION)."""
        from harness.extensions.quant.forward import sample_text, split_text
        from harness.plan import tokenize

        if self.text_file is None:
            said = sample_text(hf, num_sequences=self.sequences, num_tokens=self.tokens, seed=self.seed)
            return said, f"its own text, seed {self.seed}"
        token_ids = tokenize(_read(self.text_file), hf.checkpoint, where=str(self.text_file))
        return split_text(token_ids, hf, self.tokens), self.text_file.name


@grouped
def quant(
    *,
    model: Annotated[
        str | None,
        typer.Option(metavar="PATH_OR_HUB_ID", help=f"Original checkpoint. [default: {DEFAULT_MODEL}, embedded]"),
    ] = None,
    subject: SubjectOptions,
    text: TextOptions,
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

        from harness.extensions.quant.files import pad_checkpoint
        from harness.extensions.quant.parts import check_splits
        from harness.extensions.quant.run import measure_types
        from harness.formats.checkpoint import resolve
        from harness.oracle.model import load_model

        subject.check()  # what is wrong or missing is known before anything costs time
        options = subject.llamacpp_options()
        kinds, caches, splits = subject.kinds(), subject.cache_formats(), check_splits(parts)
        folder = resolve(model or DEFAULT_MODEL, local_files_only=local_files_only)
        with scratch_folder("harness-") as made:
            original = pad_checkpoint(folder, made / "padded") if pad else folder
            hf = load_model(original, dtype=torch.float32, stays=True)
            sequences, source = text.token_sequences(hf)
            result = measure_types(
                hf,
                kinds,
                sequences,
                caches=caches,
                engine=subject.plan(original, local_files_only=local_files_only),
                model=model or DEFAULT_MODEL,
                text=source,
                options=options,
                seed=text.seed,
                splits=splits,
                progress=report,
            )
    if out is not None:
        _write_pages(result, out)
    QUANT.show(result, format)
    return ExitStatus.PASS


def _write_pages(result: "QuantResult", out: Path) -> None:
    from harness.extensions.quant.report import quant_html, quant_text

    out.mkdir(parents=True, exist_ok=True)
    write_text(out / PAGE_NAME, quant_html(result))
    write_text(out / TABLE_NAME, quant_text(result, "github") + "\n")


def _read(path: Path) -> str:
    try:
        return read_text(path)
    except (OSError, UnicodeDecodeError) as error:
        what = "the text cannot be read"
        raise HarnessError(Code.BAD_OPTION, what, where="--text-file", actual=f"{path}: {error}") from error
