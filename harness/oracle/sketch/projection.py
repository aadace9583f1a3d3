"""Reduces a golden to a sketch: the tokens and, for every tap, the mean L2 norm of its rows and a few projections.

A projection weights the rows r_i of the tap with random signs and takes them along a direction of random signs,

    p_k = sum_i s_ik <r_i, u_k> / sqrt(rows),    s_ik and u_k of +1 and -1,

so that a change of any element of any row moves all of them, by about the change's share of the row norm (over
sqrt(rows) where it touches one row only). The signs come out of a hash: they depend on no library's generator.
"""

import hashlib
import math

import numpy as np
import torch
from numpy.typing import NDArray

from harness.errors import Code, HarnessError
from harness.formats.recording import Step
from harness.oracle.golden import Golden
from harness.oracle.sketch.file import NUM_PROJECTIONS, RequestSketch, Sketch, TapSketch
from harness.oracle.sketch.rows import is_wide, sketch_rows, sketched_taps

SIGNIFICANT_DIGITS = 12


def make_sketch(golden: Golden) -> Sketch:
    """Return the sketch of a golden; one tap of one step is held in float64 at a time.

    Raises:
        HarnessError: ORACLE_NOT_FINITE: the golden holds NaN or Inf.
    """
    manifest, sketched = golden.recording.manifest, sketched_taps(golden.graph)
    sums: dict[str, _Sums] = {}
    for step in golden.recording.steps:
        for name in step.tap_names:
            sums.setdefault(name, _Sums(name)).add(step, *_values(golden, step, name, sketched))
    return Sketch(
        made_with={name: str(manifest.environment[name]) for name in ("torch", "transformers")},
        requests=[RequestSketch(prompt_length=r.prompt_length, token_ids=r.token_ids) for r in manifest.requests],
        taps={name: tap.sketch() for name, tap in sums.items()},
    )


def _values(
    golden: Golden, step: Step, tap: str, sketched: frozenset[str]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return what is projected of each row of a tap, and the norms of the rows: [rows, W] and [rows].

    Of a wide tap that is its sketch (oracle/sketch/rows.py), also where the golden keeps all values.
    """
    rows, is_sketch = step.tap(tap), tap in golden.sketched
    if tap in sketched and not is_sketch and is_wide(rows):
        rows, is_sketch = sketch_rows(rows, torch.float64), True
    values = rows.flatten(1).to(torch.float64).cpu().numpy()
    return (values[:, :-1], values[:, -1]) if is_sketch else (values, np.linalg.norm(values, axis=1))


class _Sums:
    """Sums over the rows of one tap."""

    def __init__(self, tap: str) -> None:
        self.tap = tap
        self.num_rows = 0
        self.norm = 0.0
        self.projections = np.zeros(NUM_PROJECTIONS)

    def add(self, step: Step, values: NDArray[np.float64], norms: NDArray[np.float64]) -> None:
        """Add the rows of one step, [rows, W] and [rows]."""
        self.num_rows += len(values)
        self.norm += float(norms.sum())
        directions = _signs(self.tap, values.shape[1])
        covered = step.rows_of(self.tap)
        requests = step.request if covered is None else step.request[covered]
        weights = _weights(requests.tolist())
        self.projections += (weights * (values @ directions)).sum(axis=0)

    def sketch(self) -> TapSketch:
        """Return the means."""
        figures = [self.norm / self.num_rows, *(self.projections / math.sqrt(self.num_rows)).tolist()]
        if not all(map(math.isfinite, figures)):
            raise HarnessError(Code.ORACLE_NOT_FINITE, "the golden holds NaN or Inf", where=self.tap)
        norm, *projections = (float(f"{figure:.{SIGNIFICANT_DIGITS}g}") for figure in figures)
        return TapSketch(num_rows=self.num_rows, norm=norm, projections=projections)


def _weights(requests: list[int]) -> NDArray[np.float64]:
    """Return the signs of some rows, given by their requests: [rows, NUM_PROJECTIONS].

    They are a request's own, so that it does not matter which requests were computed together.
    """
    signs = np.empty((len(requests), NUM_PROJECTIONS))
    for request in dict.fromkeys(requests):
        here = [row for row, item in enumerate(requests) if item == request]
        signs[here] = _signs(f"step {request}", len(here))
    return signs


def _signs(label: str, num: int) -> NDArray[np.float64]:
    """Return +1 and -1 that depend on the label alone: [num, NUM_PROJECTIONS]."""
    digest = hashlib.shake_256(label.encode()).digest((num * NUM_PROJECTIONS + 7) // 8)
    bits = np.unpackbits(np.frombuffer(digest, np.uint8), count=num * NUM_PROJECTIONS)
    return 1.0 - 2.0 * bits.reshape(num, NUM_PROJECTIONS).astype(np.float64)
