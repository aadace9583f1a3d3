"""Measure what it costs to capture every tap of an HF forward to disk, beside the plain forward in the same run.

The model has the shape of a small real one and seeded random weights. Printed: the ratio of the captured forward to the
plain one with its spread, and the same after the time that writing the same bytes to the same disk takes is taken off.

    python tests/benchmarks/capture_cost.py [--tokens 512] [--repeats 7] [--folder /tmp]
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from harness.formats.recording import ModelInfo, Producer, RecordingWriter, RequestInfo, RunInfo
from harness.oracle.model import HFModel, load_model
from harness.oracle.rows import as_rows
from harness.oracle.watch import Seeing, watching

SHAPE = {
    "vocab_size": 32000, "hidden_size": 768, "intermediate_size": 2304, "num_hidden_layers": 12,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}  # fmt: skip


def plain(hf: HFModel, ids: torch.Tensor) -> float:
    """Return the seconds of a forward."""
    begin = time.perf_counter()
    hf.model(input_ids=ids, use_cache=False, logits_to_keep=1)
    return time.perf_counter() - begin


def captured(hf: HFModel, ids: torch.Tensor, folder: Path) -> tuple[float, int]:
    """Return the seconds of a forward whose taps are streamed to disk, and the bytes written."""
    tokens = ids[0].tolist()
    writer = RecordingWriter(
        folder,
        RunInfo(
            producer=Producer(name="capture_cost", version="0"),
            model=ModelInfo(id="random", revision=None, config_hash=None, weights_hash=None),
            dtype=str(hf.dtype).removeprefix("torch."),
            device="cpu",
        ),
        [RequestInfo(id=0, token_ids=tokens, prompt_length=len(tokens))],
        expected_taps=len(hf.graph),
    )
    operations = hf.graph.by_source

    def write(source: str, value: torch.Tensor) -> None:
        operation = operations.get(source)
        if operation is not None:
            num_rows = 1 if operation.tap == hf.graph.logits else len(tokens)
            writer.tap(operation.tap, as_rows(value, operation.token_dim, 1, num_rows))

    begin = time.perf_counter()
    with writer:
        rows = range(len(tokens))
        writer.begin_step(
            phase="prefill", request=[0] * len(tokens), position=rows, partial_rows={"lm_head": [len(tokens) - 1]}
        )
        with watching(hf) as watch, watch.showing(Seeing(write)):
            hf.model(input_ids=ids, use_cache=False, logits_to_keep=1)
        writer.end_step()
    seconds = time.perf_counter() - begin
    return seconds, sum(file.stat().st_size for file in folder.iterdir())


def copied(folder: Path, target: Path) -> float:
    """Return the seconds that writing the same bytes once more takes: the disk's own speed."""
    data = [file.read_bytes() for file in folder.iterdir()]
    begin = time.perf_counter()
    with target.open("wb", buffering=0) as file:
        for block in data:
            file.write(block)
    return time.perf_counter() - begin


@torch.no_grad()
def main() -> None:
    """Measure in interleaved pairs and print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--folder", type=Path, default=None)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as root:
        checkpoint = Path(root) / "model"
        LlamaForCausalLM(LlamaConfig(**SHAPE)).save_pretrained(checkpoint)
        hf = load_model(checkpoint, dtype=torch.float32, stays=True)
        ids = torch.randint(0, SHAPE["vocab_size"], (1, arguments.tokens))
        plain(hf, ids)
        rows = []
        for repeat in range(arguments.repeats):
            folder = Path(root) / f"run{repeat}"
            before = plain(hf, ids)
            with_taps, num_bytes = captured(hf, ids, folder)
            disk = copied(folder, Path(root) / f"copy{repeat}")
            rows.append((with_taps / before, (with_taps - disk) / before, before, num_bytes, disk))
            for file in (*folder.iterdir(), Path(root) / f"copy{repeat}"):
                file.unlink()
    for name, at in (("captured / plain", 0), ("(captured - copy of the bytes) / plain", 1), ("plain forward, s", 2)):
        column = sorted(row[at] for row in rows)
        print(f"{name:42} min {column[0]:.2f}  median {statistics.median(column):.2f}  max {column[-1]:.2f}")
    disk = statistics.median(row[3] / row[4] for row in rows)
    print(f"bytes written {rows[0][3]:,}, copy of the bytes {disk / 1e9:.2f} GB/s, {arguments.tokens} tokens")


if __name__ == "__main__":
    main()
