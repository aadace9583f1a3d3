"""The comparison of two folders of tensors: pairs, their differences in the order of the run, and what is left."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch

from harness.base.metrics import largest_rounding, rounding_unit
from harness.base.progress import Progress, no_progress
from harness.errors import Code, HarnessError
from harness.formats.tensors import TensorFolder
from harness.judge.dumps.fingerprint import AS_IT_IS, Fingerprint, fingerprint
from harness.judge.dumps.match import Edge, Matcher, Side
from harness.judge.dumps.names import NameHints, plain_names, run_order
from harness.results.dumps import DumpsResult, FolderShare, Likeness, PairEvidence, TensorPair

CLOSE = 10.0
"""As `compare.propagated.RATIO_BOUND`; measured by tests/calibrations/dump_growth.py (docs/compare-two-dumps.md)."""
_MOST_CARRIED, _MOST_ROUNDINGS = 0.05, 1000
"""Largest difference, relative and in roundings, that raises the bounds of later tensors."""
_LEAST_ROWS = 8
"""Rows of which the median is judged."""
_BLOCK_ELEMENTS = 1 << 20


def compare_dumps(first: Path, second: Path, *, close: float = CLOSE, progress: Progress = no_progress) -> DumpsResult:
    """Compare two folders of tensors of one prompt and one model.

    Args:
        first: the folder that differences are relative to.
        second: the folder under test.
        close: how many times as much as the tensors before it, or as one rounding, a close tensor may differ.
        progress: told what is being done.

    Raises:
        HarnessError: as `TensorFolder`; BAD_TENSOR_FILE: a file changed meanwhile; TENSORS_OF_OTHER_TOKENS: no tensor
            is near to one of the other folder; BAD_OPTION: both are the same folder.
    """
    if first.resolve() == second.resolve():
        what, hint = "both are the same folder", "name the folders of two runs"
        raise HarnessError(Code.BAD_OPTION, what, where=second, hint=hint)
    folders = TensorFolder(first), TensorFolder(second)
    sides, orders = zip(*(_in_order(folder, progress) for folder in folders), strict=True)
    matcher = Matcher(sides, NameHints(*map(plain_names, folders)))
    matcher.run(folders)
    by_content = [edge for edge in matcher.pairs if edge.evidence is PairEvidence.CONTENT]
    if all(edge.tensors[0].is_of_positions for edge in by_content):
        raise _nothing_in_common(folders, sides)
    leading = int(orders[1][0] > orders[0][0])
    places = {name: at for at, name in enumerate(sides[leading])}
    edges = sorted(matcher.pairs, key=lambda edge: places[edge.names[leading]])
    pairs = []
    for at, edge in enumerate(edges):
        progress("comparing", at, len(edges))
        pairs.append(_pair(edge, folders))
    for folder in folders:
        folder.check_unchanged()
    return DumpsResult(
        folders=(_share(folders[0], matcher, 0, pairs), _share(folders[1], matcher, 1, pairs)),
        order=orders[leading][1],
        close=close,
        pairs=tuple(_judged(edges, pairs, close)),
        ambiguous=tuple(matcher.ambiguous()),
        unproven=tuple(dict.fromkeys(_unproven(matcher, by_content))),
    )


def _nothing_in_common(folders: Sequence[TensorFolder], sides: Sequence[Side]) -> HarnessError:
    return HarnessError(
        Code.TENSORS_OF_OTHER_TOKENS,
        "no tensor of one folder is near to a tensor of the other",
        where=" and ".join(str(folder.path) for folder in folders),
        expected="two runs of the same tokens through the same weights",
        actual=f"{len(sides[0]):,} and {len(sides[1]):,} tensors without a value in common",
        hint="dump the same prompt of the same model on both sides, one request alone, from the embedding on",
    )


def _in_order(folder: TensorFolder, progress: Progress) -> tuple[Side, tuple[int, str]]:
    """Return the fingerprints of a folder in the order of the run, how much the order is worth, and what tells it."""
    taken: dict[str, Fingerprint] = {}
    for tensor in folder.tensors():
        progress(f"reading {folder.path.name}", len(taken), 0)
        taken[tensor.name] = fingerprint(tensor.name, tensor.tensor)
    for dtype in {item.dtype for item in taken.values()}:
        is_coarser = [item.precision is not dtype for item in taken.values() if item.dtype is dtype and item.is_telling]
        if 2 * sum(is_coarser) <= len(is_coarser):  # an embedding in float32 holds numbers of weights in bfloat16
            taken |= {name: replace(item, precision=dtype) for name, item in taken.items() if item.dtype is dtype}
    worth, names, order = run_order(folder)
    return {name: taken[name] for name in names}, (worth, order)


def _pair(edge: Edge, folders: Sequence[TensorFolder]) -> TensorPair:
    """Measure a pair, block by block."""
    one, two = edge.tensors
    views = [layout.of(f.read(name)) for layout, f, name in zip(edge.layouts, folders, edge.names, strict=True)]
    shape = views[0 if edge.layouts[0] == AS_IT_IS else 1].shape
    width = next((size for size in reversed(shape) if size > 1), 1)
    rows = [view.reshape(-1, width) for view in views]
    coarser = max(one.precision, two.precision, key=rounding_unit)
    blocks = zip(*(tensor.split(max(1, _BLOCK_ELEMENTS // width)) for tensor in rows), strict=True)
    parts = zip(*(_block(ours, theirs, coarser) for ours, theirs in blocks), strict=True)
    different, not_finite, is_other, error, norm = map(torch.cat, parts)
    relative = torch.where(error == 0, 0.0, error / norm).masked_fill(is_other, torch.inf)
    row = int(relative.argmax() if bool(relative.any()) else different.argmax())
    a, b = (tensor[row].double() for tensor in rows)
    column = int(torch.where(_are_equal(a, b), 0.0, (a - b).abs()).nan_to_num(nan=torch.inf).argmax())
    return TensorPair(
        names=edge.names,
        evidence=edge.evidence,
        shapes=(tuple(one.shape), tuple(two.shape)),
        dtypes=(_name(one.dtype), _name(two.dtype)),
        precisions=(_name(one.precision), _name(two.precision)),
        layouts=(str(edge.layouts[0]), str(edge.layouts[1])),
        num_elements=rows[0].numel(),
        num_different=int(different.sum()),
        roundings=float(relative.max()) / edge.unit,
        roundings_median=float(relative.median()) / edge.unit if len(relative) >= _LEAST_ROWS else 0.0,
        relative_l2=float(error.norm() / norm.norm()) if bool(error.any()) else 0.0,
        row=row,
        column=column,
        values=(float(a[column]), float(b[column])),
        num_not_finite=(int(not_finite[:, 0].sum()), int(not_finite[:, 1].sum())),
        same_not_finite=not bool(is_other.any()),
    )


def _block(one: torch.Tensor, two: torch.Tensor, coarser: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Return for each row: elements that differ, elements that are not finite [rows, 2], whether those differ, norms.

    The norms are those of the difference and of the first tensor, without elements that are not finite. A difference
    of subnormal numbers is no error.
    """
    finite = torch.stack([one.isfinite(), two.isfinite()], dim=-1)
    both = finite.all(dim=-1)
    is_different = ~_are_equal(one.to(coarser), two.to(coarser)) | (finite[..., 0] != finite[..., 1])
    a, b = (torch.where(both, tensor, 0.0).double() for tensor in (one, two))
    step = torch.finfo(coarser).smallest_normal * torch.finfo(coarser).eps * math.sqrt(one.shape[1])
    error = ((a - b).norm(dim=1) - step).clamp_min(0.0)
    return is_different.sum(dim=1), (~finite).sum(dim=1), (is_different & ~both).any(dim=1), error, a.norm(dim=1)


def _are_equal(one: torch.Tensor, two: torch.Tensor) -> torch.Tensor:
    return (one == two) | (one.isnan() & two.isnan())


def _judged(edges: Sequence[Edge], pairs: Sequence[TensorPair], close: float) -> Iterator[TensorPair]:
    """Yield the pairs with their bounds, which those before them give."""
    usual = median(edge.unit for edge in edges)
    carried = largest = torch.zeros(2, dtype=torch.float64)
    for edge, pair in zip(edges, pairs, strict=True):
        errors = torch.tensor([pair.roundings, pair.roundings_median], dtype=torch.float64) * edge.unit
        unit = max(edge.unit, usual)
        least = torch.tensor([largest_rounding(torch.float32), 1.0], dtype=torch.float64) * unit
        bounds = close * torch.maximum(least, carried)
        is_close = bool((errors <= bounds).all()) and pair.same_not_finite
        is_jump = not is_close and bool((errors > close * torch.maximum(least, largest)).any())
        likeness = Likeness.CLOSE if is_close else Likeness.DIFFERENT
        bound, bound_median = (bounds / edge.unit).tolist()
        yield replace(
            pair,
            likeness=likeness if pair.num_different else Likeness.SAME,
            bound=bound,
            bound_median=bound_median,
            is_jump=is_jump,
        )
        if is_close:
            carried = torch.maximum(carried, errors.clamp(max=min(_MOST_CARRIED, _MOST_ROUNDINGS * unit)))
        largest = torch.maximum(largest, errors.nan_to_num(posinf=0.0))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _share(folder: TensorFolder, matcher: Matcher, side: int, pairs: Sequence[TensorPair]) -> FolderShare:
    """Return how much of a folder was compared; a copy of a tensor that was compared was compared as much."""
    tensors = matcher.sides[side]
    compared = {tensors[pair.names[side]].digest: pair.num_elements for pair in pairs}
    rest = [item.name for item in tensors.values() if item.digest not in compared]
    return FolderShare(
        path=str(folder.path),
        num_tensors=len(tensors),
        num_compared=len(tensors) - len(rest),
        num_elements=sum(item.shape.numel() for item in tensors.values()),
        num_elements_compared=sum(compared.get(item.digest, 0) for item in tensors.values()),
        without_partner=tuple(rest),
        left_out=tuple(folder.left_out),
    )


def _unproven(matcher: Matcher, by_content: Sequence[Edge]) -> Iterator[str]:
    """Yield the tensors after all pairs that may be those of the other folder with wrong values."""
    proofs = [edge for edge in by_content if not edge.tensors[0].is_of_positions]
    compared = [{edge.tensors[side].digest for edge in matcher.pairs} for side in (0, 1)]
    ones, twos = (
        [item for item in rest if item.digest not in compared[side]]
        for side, rest in enumerate(matcher.after(proofs) or (matcher.left(0), matcher.left(1)))
    )
    for one in ones:
        for two in twos:
            is_alike = one.shape.numel() == two.shape.numel() or one.shape[-1:] == two.shape[-1:]
            if is_alike and one.digest != two.digest:
                yield from (one.name, two.name)
