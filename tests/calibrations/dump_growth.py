"""How much more two sound dumps differ from one tensor to the next, for the factor of `harness diff A B`.

    python -m tests.calibrations.dump_growth [--prompts 2]

HF's eager attention against its sdpa, in each embedded checkpoint and three dtypes. A line for each: the first
difference of the worst and of the median row in roundings, and the largest ratio of either to that of all tensors
before. A router that chooses another expert at a tie gives a mismatch.
"""

import argparse
import random
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from harness.base.files import scratch_folder
from harness.base.metrics import rounding_unit
from harness.judge.dumps import compare_dumps
from harness.results.dumps import TensorPair

CHECKPOINTS = Path(__file__).parents[2] / "cases" / "checkpoints"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NUM_TOKENS = 40


def main() -> None:
    """Print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=2)
    arguments = parser.parse_args()
    for folder in sorted(path.parent for path in CHECKPOINTS.glob("*/config.json")):
        for dtype in DTYPES:
            for seed in range(arguments.prompts):
                ids = random.Random(seed).choices(range(3, 250), k=NUM_TOKENS)
                print(folder.name, str(dtype).removeprefix("torch."), seed, _growth(folder, dtype, ids), flush=True)


def _growth(folder: Path, dtype: torch.dtype, ids: Sequence[int]) -> str:
    with scratch_folder("growth") as scratch:
        for attention in ("sdpa", "eager"):
            (scratch / attention).mkdir()
            torch.save(_dump(folder, dtype, ids, attention), scratch / attention / "all.pt")
        result = compare_dumps(scratch / "sdpa", scratch / "eager")
    changed = [pair for pair in result.pairs if pair.num_different]
    if not changed:
        return "all the same"
    first, worst, median = changed[0], _largest(changed, "roundings"), _largest(changed, "roundings_median")
    begin = f"{first.roundings:.1f} {first.roundings_median:.1f} roundings at first"
    return f"{result.outcome}: {begin}, then up to {worst:.1f} and {median:.1f} times as much"


def _largest(pairs: Iterable[TensorPair], figure: str) -> float:
    largest, ratio = 0.0, 0.0
    for pair in pairs:
        unit = max(rounding_unit(getattr(torch, name)) for name in pair.precisions)
        value = getattr(pair, figure) * unit
        ratio = max(ratio, value / max(unit, largest) if largest else 0.0)
        largest = max(largest, value)
    return ratio


def _dump(folder: Path, dtype: torch.dtype, ids: Sequence[int], attention: str) -> dict[str, torch.Tensor]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation=attention).eval()
    shown: dict[str, torch.Tensor] = {}

    def look(name: str, out: object) -> None:
        tensor = out[0] if isinstance(out, tuple) else out
        if isinstance(tensor, torch.Tensor):
            shown[name] = tensor.clone()

    for name, module in model.named_modules():
        module.register_forward_hook(lambda _module, _args, out, name=name: look(name, out))
    with torch.no_grad():
        model(input_ids=torch.tensor([ids]), use_cache=False)
    return shown


if __name__ == "__main__":
    main()
