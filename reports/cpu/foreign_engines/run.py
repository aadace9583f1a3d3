"""Check engines that nobody here wrote, sound and with six mistakes: `python reports/cpu/foreign_engines/run.py ENGINE`.

From the repository's root, in an environment that has the engine beside the harness (its file says how to get it).
`--dtype`, `--fault` and `--text` choose. A line for each check: taps read of those that there are, taps whose rows are
not what such an engine holds (truth.py), the verdict, whether the first operation and row are right, the cause, seconds,
and the share of them in which taps are found.

An engine's file has `DTYPES`, and `SETTINGS` of the checkpoint where the engine has fixed ones; and one of
`open_engine(folder, dtype, fault)`, which returns what `harness.check` takes, and `dump(folder, dtype, fault, ids, out)`,
which writes a folder. What a user would write ends with the line `# mistakes`.
"""

import argparse
import importlib
import re
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[3])]

from transformers import LlamaConfig, LlamaForCausalLM
from truth import FAULTS, PROMPT, taps_of

import harness
from harness.engines.by_content import StepEngine
from harness.engines.tensor_folder import FolderEngine
from harness.extensions.faults.zoo.lively import make_lively
from harness.extensions.faults.zoo.quiet import quiet
from harness.formats.checkpoint import Checkpoint
from tests.benchmarks.engines_by_content import Rows

NUM_NEW = 5
FALSE = {"float32": 1e-2, "float16": 0.03, "bfloat16": 0.2}
"""Relative error of a row that is another value; roundings have grown to some per cent behind three layers of bfloat16."""


def checkpoint(folder: Path, settings: dict[str, Any], dtype: str) -> Path:
    """Write a random Llama of three layers with two heads of queries for each of keys."""
    torch.manual_seed(0)
    config = LlamaConfig(**{
        "vocab_size": 256, "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2, **settings,
    })  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    make_lively(model, 3)
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    return folder


class Watch:
    """Keeps the rows that engines record, and the seconds in which taps are found."""

    def __init__(self) -> None:
        self.rows: dict[tuple[str, int, int], torch.Tensor] = {}
        self.seconds = 0.0

    @contextmanager
    def watching(self) -> Any:
        def timed(match: Any) -> Any:
            def matched(engine: Any, graph: Any) -> None:
                begin = time.process_time()
                match(engine, graph)
                self.seconds += time.process_time() - begin

            return matched

        def kept(run: Any) -> Any:
            return lambda engine, workload, writer: run(engine, workload, Rows(writer, self.rows))

        try:
            for engine in (StepEngine, FolderEngine):
                patch.object(engine, "match_taps", timed(engine.match_taps)).start()
                patch.object(engine, "run", kept(engine.run)).start()
            yield
        finally:
            patch.stopall()

    def false(self, truth: dict[str, torch.Tensor], limit: float) -> list[str]:
        """Return taps of which a row of the prompt is another value than in an engine with the fault."""
        return sorted({
            tap
            for (tap, _, position), row in self.rows.items()
            if tap in truth
            and position < len(PROMPT)
            and float((row.double() - truth[tap][position]).norm()) > limit * float(truth[tap][position].norm())
        })  # fmt: skip


def check(engine: Any, folder: Path, dtype: str, fault: str, scratch: Path) -> Any:
    if hasattr(engine, "dump"):
        out = scratch / f"dump-{fault}"
        engine.dump(folder, dtype, fault, PROMPT, out)
        dumped = FolderEngine(out, Checkpoint(folder), dtype=dtype, token_ids=PROMPT)
        return harness.check(dumped, model=folder, prompts=[PROMPT], dtype=dtype, max_new_tokens=1)
    return harness.check(
        engine.open_engine(folder, dtype, fault), model=folder, prompts=[PROMPT], max_new_tokens=NUM_NEW
    )


def line(name: str, dtype: str, fault: str, text: bool) -> str:
    engine = importlib.import_module(name)
    with tempfile.TemporaryDirectory() as made, quiet():
        scratch, watch = Path(made), Watch()
        folder = checkpoint(scratch / "model", getattr(engine, "SETTINGS", {}), dtype)
        begin = time.process_time()
        with watch.watching():
            report = check(engine, folder, dtype, fault, scratch)
        seconds = time.process_time() - begin
        if text:
            print(report.text())
        num_prompt = 1 if getattr(engine, "ONE_TOKEN_A_STEP", False) else len(PROMPT)
        truth = taps_of(folder, PROMPT, num_prompt, fault)
        read, false = {tap for tap, *_ in watch.rows} & truth.keys(), watch.false(truth, FALSE[dtype])
        parts = [name, dtype, fault or "none", f"{len(read)} of {len(truth)}", ", ".join(false) or "0"]
        parts += [*verdict(report, fault, num_prompt), f"{seconds:.1f}", f"{watch.seconds / seconds:.0%}"]
        return f"| {' | '.join(parts)} |"


def verdict(report: Any, fault: str, num_prompt: int) -> tuple[str, str, str]:
    """Return what was said first, whether it is right, and whether the cause is, and is named."""
    first = report.first_divergence
    if first is None:
        return f"{report.outcome.value}", "", ""
    cause = "" if first.explanation is None else f"{first.explanation.cause}; {first.explanation.detail}"
    where = f"{first.tap} at {first.position}"
    if not fault:
        return f"{first.code.value} {where}", "ALARM", cause
    expected = FAULTS[fault]
    row = 1 if num_prompt == 1 and fault == "cache" else expected.first
    row -= first.tap.endswith("k_cache")  # the slot that is overwritten
    shown = {first.tap, None if first.explanation is None else first.explanation.tap}  # the latter was not recorded
    is_right = bool(shown & {*expected.taps}) and first.position == row
    is_named = first.explanation is not None and first.explanation.is_cause and re.search(expected.cause, cause)
    return where, "right" if is_right else "WRONG", ("" if is_named else "NOT NAMED: ") + cause


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine")
    parser.add_argument("--dtype", action="append")
    parser.add_argument("--fault", action="append")
    parser.add_argument("--text", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    engine = importlib.import_module(options.engine)
    source = Path(engine.__file__).read_text().partition("# mistakes")[0]
    code = [
        item for item in source.partition('"""\n')[2].splitlines() if item.strip() and not item.strip().startswith("#")
    ]
    print(f"{options.engine}: {len(code)} lines of a user")
    for dtype in options.dtype or engine.DTYPES:
        for fault in options.fault or ["", *FAULTS]:
            if fault not in getattr(engine, "LACKS", ()):
                print(line(options.engine, dtype, "" if fault == "none" else fault, options.text), flush=True)


if __name__ == "__main__":
    main()
