"""A comparison of weights as text and as JSON."""

from collections.abc import Iterator
from typing import Any

from tabulate import tabulate

from harness.errors import Code, printable
from harness.report.check.markdown import escaped
from harness.report.check.table import count, number
from harness.results.check import Outcome
from harness.results.weights import TensorDifference, WeightsResult

_HEADERS = ("tensor", "is", "different", "relative", "max", "arrived")
_MOST_ROWS = 30


def weights_text(result: WeightsResult, tablefmt: str = "simple") -> str:
    """Return a comparison as lines, for a terminal or as Markdown (`github`)."""
    shown = escaped if tablefmt == "github" else printable
    return "\n\n".join("\n".join(block) for block in _blocks(result, tablefmt, shown) if block)


def _blocks(result: WeightsResult, tablefmt: str, shown: Any) -> Iterator[list[str]]:
    words = {Outcome.PASS: "PASS", Outcome.MISMATCH: "MISMATCH", Outcome.NOTHING: "NOTHING CHECKED"}
    different = result.different
    yield [
        f"{words[result.outcome]}  {shown(result.first)} and {shown(result.second)}: {len(different):,} of "
        f"{count(len(result.tensors), 'tensor')} differ"
    ]
    if different:
        rows = [_row(tensor, shown) for tensor in different[:_MOST_ROWS]]
        yield tabulate(rows, _HEADERS, tablefmt=tablefmt, disable_numparse=True).splitlines()
    code = Code.WEIGHTS_DIFFER
    if different:
        first = different[0]
        yield [f"{code}: {shown(first.name)} is {number(first.relative)} apart (relative L2), the furthest of all"]
    if len(different) > _MOST_ROWS:
        yield [f"and {len(different) - _MOST_ROWS:,} more: --format json has all"]
    sides = (("first", result.only_first), ("second", result.only_second))
    yield [
        f"{code}: {count(len(names), 'tensor')} of the {side} weights without a counterpart, not compared: "
        + ", ".join(shown(name) for name in names[:5])
        for side, names in sides
        if names
    ]
    yield [f"{code}: {shown(setting)}" for setting in result.settings[:_MOST_ROWS]]
    if len(result.settings) > _MOST_ROWS:
        yield [f"and {len(result.settings) - _MOST_ROWS:,} more settings: --format json has all"]
    if result.not_compared:
        yield [f"not compared: {'; '.join(map(shown, result.not_compared))}"]
    if result.arrived is not None:
        yield [f"of the known update {100 * result.arrived:.2f} % arrived"]


def _row(tensor: TensorDifference, shown: Any) -> tuple[str, ...]:
    is_same = tensor.counterpart == tensor.name
    return (
        shown(tensor.name),
        "" if is_same else shown(tensor.counterpart),
        f"{tensor.num_different:,} of {tensor.num_values:,}",
        number(tensor.relative),
        number(tensor.max_abs),
        "" if tensor.arrived is None else f"{100 * tensor.arrived:.1f} %",
    )
