"""A comparison of two folders of tensors as text."""

import math
import shlex
from collections import Counter
from collections.abc import Iterator, Sequence

from harness.errors import Code, printable
from harness.report.check.table import count, number
from harness.report.terminal import VERDICTS, blocks_text, fact_lines, headline, table_lines
from harness.results.check import Outcome
from harness.results.dumps import DumpsResult, Likeness, TensorPair

_HEADERS = ("tensor", "is", "worst row", "bound", "median row", "relative L2", "matched by")
_MOST_ROWS, _MOST_NAMES = 12, 4
_MANY_QUIET = 8
"""Tensors without a difference after one that differs, from which on that is said."""
_INDENT = 20


def dumps_text(result: DumpsResult, width: int = 100) -> str:
    """Return a comparison as lines for a terminal."""
    shares = [
        f"{item.num_compared:,} of {count(item.num_tensors, 'tensor')} "
        f"({100 * item.num_elements_compared / item.num_elements:.3g} % of the elements)"
        for item in result.folders
    ]
    paths = " and ".join(item.path for item in result.folders)
    difference = () if result.first_difference is None else _difference(result, result.first_difference)
    blocks = [[headline(VERDICTS[result.outcome], f"{paths}: compared {' and '.join(shares)}")]]
    blocks.append(list(fact_lines(difference, width, indent=_INDENT)))
    if result.pairs:
        legend = ["worst row, bound and median row in roundings of the coarser dtype"]
        align = ("left", "left", "right", "right", "right", "right", "left")
        blocks.append(table_lines([*map(_row, _shown(result))], _HEADERS, align, legend=legend))
    blocks.append(list(fact_lines(_facts(result), width, indent=_INDENT)))
    return blocks_text(blocks)


def _difference(result: DumpsResult, pair: TensorPair) -> Iterator[tuple[str, str]]:
    """Yield what is known of the first difference."""
    code = Code.TENSORS_DIFFER if pair.same_not_finite else Code.NOT_FINITE
    first, second = pair.values
    yield "first difference", f"{code}: {_names(pair)}"
    yield "", f"row {pair.row}, column {pair.column}: {first:.6g} and {second:.6g}"
    yield "", " and ".join(map(_kind, pair.shapes, pair.dtypes, pair.precisions, pair.layouts))
    if not pair.same_not_finite:
        yield "", "not finite: {:,} and {:,} elements, not the same ones".format(*pair.num_not_finite)
    yield "", f"{pair.num_different:,} of {count(pair.num_elements, 'element')} differ"
    at = result.pairs.index(pair)
    before = result.pairs[:at]
    if before:
        furthest = max(before, key=lambda item: item.roundings)
        yield "before it", f"{_counts(before)}; at most {number(furthest.roundings)} roundings, in {furthest.names[0]}"
    else:
        yield "before it", "nothing was compared: are both folders of the same tokens?"
    after = result.pairs[at + 1 :]
    quiet = next((at for at, item in enumerate(after) if item.likeness is Likeness.DIFFERENT), len(after))
    if quiet >= _MANY_QUIET:
        following = f"; the next difference: {_names(after[quiet])}" if quiet < len(after) else ""
        what = f"the next {quiet} are the same or close: they may not depend on it, or it is two quantities of one name"
        yield "after it", what + following


def _kind(shape: Sequence[int], dtype: str, precision: str, layout: str) -> str:
    holding = "" if precision == dtype else f" that holds {precision}"
    return f"{dtype}{holding} {list(shape)}" + (f" ({layout})" if layout else "")


def _names(pair: TensorPair) -> str:
    first, second = pair.names
    return first if first == second else f"{first} = {second}"


def _counts(pairs: Sequence[TensorPair]) -> str:
    counts = Counter(pair.likeness for pair in pairs)
    return ", ".join(f"{counts[kind]:,} {kind}" for kind in Likeness)


def _shown(result: DumpsResult) -> list[TensorPair]:
    """Return pairs of the table: jumps, and some of those from the one before the first difference, or change, on."""
    first = result.first_difference or next((pair for pair in result.pairs if pair.num_different), result.pairs[0])
    pairs = result.pairs[max(0, result.pairs.index(first) - 1) :]
    jumps = [at for at, pair in enumerate(pairs) if pair.is_jump][:_MOST_NAMES]
    spread = (at * (len(pairs) - 1) // (_MOST_ROWS - 1) for at in range(_MOST_ROWS))
    return [pairs[at] for at in sorted({*jumps, *spread, min(1, len(pairs) - 1)})]


def _row(pair: TensorPair) -> tuple[str, ...]:
    likeness = f"{pair.likeness}, jump" if pair.is_jump else pair.likeness
    figures = (pair.roundings, pair.bound, pair.roundings_median, pair.relative_l2)
    return (printable(_names(pair)), likeness, *map(number, figures), pair.evidence)


def _facts(result: DumpsResult) -> Iterator[tuple[str, str]]:
    yield "in all", _counts(result.pairs)
    precisions = Counter(" and ".join(pair.precisions) for pair in result.pairs)
    yield "dtypes", "; ".join(f"{count(total, 'tensor')} of {names}" for names, total in precisions.items())
    yield "order", result.order
    yield (
        "close",
        (
            f"at most {result.close:g} times the difference of the tensors before, or of one rounding; "
            "without a model, no bound is derived"
        ),
    )
    both = sum(any(pair.num_not_finite) and pair.same_not_finite for pair in result.pairs)
    if both:
        yield "not finite", f"{count(both, 'tensor')} with NaN or infinities, the same ones in both folders"
    if exchanged := sum("exchanged" in "".join(pair.layouts) for pair in result.pairs):
        yield "layout", f"{count(exchanged, 'tensor')} compared with two dimensions exchanged"
    if in_part := sum(pair.num_elements < max(map(math.prod, pair.shapes)) for pair in result.pairs):
        yield (
            "in part",
            f"{count(in_part, 'tensor')}: the rest of the larger one, padding or more tokens, was not compared",
        )
    for folder in result.folders:
        for label, names in (("without partner", folder.without_partner), ("left out", folder.left_out)):
            if names:
                yield label, f"{count(len(names), 'tensor')} of {folder.path}: {_some(names)}"
    if result.ambiguous:
        yield "ambiguous", f"not compared, since each may be several of the other folder: {_some(result.ambiguous)}"
    if result.unproven:
        what = f"{Code.TENSORS_DIFFER}: nothing after these was compared, and they may be each other with wrong values"
        yield "unproven", f"{what}: {_some(result.unproven)}"
    if result.outcome is Outcome.NOTHING:
        least = f"{100 * result.LEAST_SHARE:g} %"
        yield (
            "not enough",
            f"{Code.NOTHING_CHECKED}: less than {least} of the tensors or elements of either folder were compared",
        )
    if result.outcome is not Outcome.PASS:
        commands = [
            f"harness check --tensors {shlex.quote(folder.path)} --model PATH --token-ids IDS --dtype {dtype}"
            for folder, dtype in zip(result.folders, _dtypes(result), strict=True)
        ]
        yield "which is right", f"a model tells: {'; '.join(commands)}"


def _dtypes(result: DumpsResult) -> list[str]:
    """Return the usual precision of each folder."""
    sides = zip(*(pair.precisions for pair in result.pairs), strict=True)
    return [Counter(side).most_common(1)[0][0] for side in sides]


def _some(names: Sequence[str]) -> str:
    more = f"; and {len(names) - _MOST_NAMES} more (--format json)" if len(names) > _MOST_NAMES else ""
    return "; ".join(names[:_MOST_NAMES]) + more
