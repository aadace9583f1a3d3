"""Find the smallest relative error of an operation that a check sees, by injecting gains of shrinking size.

    python -m tests.calibrations.detection_limits [--model qwen3-tiny] [--rows 96 256]
                                                [--out reports/cpu/detection-limits.md]

Every kind of operation of the reference engine is computed in float64 and multiplied by 1 + gain before it is rounded
to the engine's dtype. The smallest gain that is found is bracketed to a factor of 1.2, once with what the check as a
whole says and once with the bounds alone (a `bug`, where the statistics below one rounding do not count).
"""

import argparse
import datetime
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from tabulate import tabulate
from torch.nn.functional import linear, silu

import reference_engine.attention.paged
import reference_engine.model
from harness.base.environment import describe_machine
from harness.base.metrics import rounding_unit
from harness.extensions.faults.fault import FaultConfig
from harness.extensions.faults.subject import checkpoint, plan_of
from harness.judge.jobs.check import run_check
from harness.results.check import Outcome, Verdict
from reference_engine.layers import MLP, Linear, RMSNorm

ROOT = Path(__file__).parents[2]
DTYPES = ("bfloat16", "float16", "float32")
LARGEST, SMALLEST, FACTOR = 0.3, 1e-9, 1.2
Call = Callable[..., torch.Tensor]


def in_float64(original: Call, size: float) -> Call:
    """Compute on float64 inputs, so that the gain is there before the one rounding to the dtype of the input."""

    def called(x: torch.Tensor, *args: Any) -> torch.Tensor:
        wide = [a.to(torch.float64) if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in args]
        return (original(x.to(torch.float64), *wide) * (1 + size)).to(x.dtype)

    return called


def louder_linear(original: Call, size: float) -> Call:
    return lambda self, x: in_float64(linear, size)(x, self.weight_OI, self.bias_O)


def louder_norm(original: Call, size: float) -> Call:
    def normed(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return weight * x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps)

    return lambda self, x: in_float64(normed, size)(x, self.weight_X, self.eps)


def louder_mlp(original: Call, size: float) -> Call:
    def call(self: MLP, x: torch.Tensor, batch: Any, prefix: str) -> torch.Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        batch.tap(prefix, "mlp.gate_proj", gate)
        batch.tap(prefix, "mlp.up_proj", up)
        act = in_float64(lambda gate, up: silu(gate) * up, size)(gate, up)
        batch.tap(prefix, "mlp.act", act)
        out = self.down_proj(act)
        batch.tap(prefix, "mlp.down_proj", out)
        return out

    return call


SITES: dict[str, list[tuple[object, str, Callable[[Call, float], Call]]]] = {
    "linear": [(Linear, "__call__", louder_linear)],
    "norm": [(RMSNorm, "__call__", louder_norm)],
    "rotary": [(reference_engine.model, "apply_rotary", in_float64)],
    "attention": [
        (reference_engine.attention.paged, "attend_chunk", in_float64),
        (reference_engine.attention.paged, "attend_single", in_float64),
    ],
    "activation": [(MLP, "__call__", louder_mlp)],
}


@contextmanager
def gain(kind: str, size: float) -> Iterator[None]:
    with ExitStack() as stack:
        for owner, name, change in SITES[kind]:
            stack.enter_context(patch.object(owner, name, change(getattr(owner, name), size)))
        yield


def is_found(setting: FaultConfig, kind: str, size: float, *, bounds_only: bool) -> bool:
    with checkpoint(setting) as folder, gain(kind, size):
        result = run_check(plan_of(setting, folder))
    if bounds_only:
        return any(tap.verdict is Verdict.BUG for run in result.runs for tap in run.taps)
    return result.outcome is not Outcome.PASS


def limit(is_found: Callable[[float], bool]) -> float:
    """Return the smallest gain found, to a factor of FACTOR; infinite if not even the largest is."""
    if not is_found(LARGEST):
        return math.inf
    above, below = LARGEST, SMALLEST
    while above / below > FACTOR:
        middle = math.sqrt(above * below)
        above, below = (middle, below) if is_found(middle) else (above, middle)
    return above


def limits(model: str, num_rows: int) -> list[list[str]]:
    """Return the lines of the table of one number of rows."""
    generator = torch.Generator().manual_seed(1)
    lengths = (num_rows // 2, num_rows // 4, num_rows // 4)
    prompts = tuple(tuple(torch.randint(3, 256, (n,), generator=generator).tolist()) for n in lengths)
    table = []
    for dtype in DTYPES:
        setting = FaultConfig(model=model, dtype=dtype, prompts=prompts)
        unit = rounding_unit(getattr(torch, dtype))
        for kind in SITES:
            sound = is_found(setting, kind, 0.0, bounds_only=False)
            assert not sound, f"{kind} in {dtype} alarms without an error"
            bounds = limit(partial(is_found, setting, kind, bounds_only=True))
            whole = limit(partial(is_found, setting, kind, bounds_only=False))
            table.append([kind, dtype, f"{bounds:.2g}", f"{bounds / unit:.1f}", f"{whole:.2g}", f"{whole / unit:.2f}"])
    return table


def report(model: str, tables: dict[int, list[list[str]]]) -> str:
    """Return the report: a table for each number of rows."""
    machine = describe_machine("cpu")
    header = ["operation", "dtype", "by its bound", "roundings", "by the check", "roundings"]
    parts = [
        "# The smallest error that a check sees",
        f"`python -m tests.calibrations.detection_limits --rows {' '.join(map(str, tables))}`, "
        f"{datetime.date.today()}, "
        f"{machine.hardware}; {machine.software}.",
        f"{model}, prompts of three requests and what follows them. Every operation of one kind is computed in float64 "
        f"and multiplied by 1 + gain before its one rounding; the smallest gain found is bracketed to a factor of "
        f'{FACTOR}. "By its bound": some row is out of bounds. "By the check": anything alarms, the statistics below '
        "one rounding (`systematic`) included. Roundings are the gain over the RMS relative error of one rounding.",
        "In float32 the floor is the size of an effect (2 roundings), not its statistic: gains below it are made by "
        "sound operations too (docs/how-verdicts-work.md), and more rows do not lower it. The same holds for attention "
        "in the lower dtypes (half a rounding). The gain is put into all operations of a kind at once; which of them "
        "alarmed first is not distinguished.",
    ]
    for num_rows, table in tables.items():
        parts += [f"## {num_rows} rows of prompts", tabulate(table, header, tablefmt="github", disable_numparse=True)]
    return "\n\n".join(parts) + "\n"


def main() -> None:
    """Measure and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-tiny")
    parser.add_argument("--rows", type=int, nargs="+", default=[96, 256])
    parser.add_argument("--out", type=Path, default=ROOT / "reports" / "cpu" / "detection-limits.md")
    options = parser.parse_args()
    tables = {num_rows: limits(options.model, num_rows) for num_rows in options.rows}
    options.out.write_text(report(options.model, tables), encoding="utf-8")


if __name__ == "__main__":
    main()
