"""Products judged by random projections: every row is held to its result, and few rows are multiplied out.

A row y of a product has the error e = y - (W x + b). With k directions u_j of independent standard normal numbers, as
the columns of U, the estimate of its size is

    ||y U - x (W^T U) - b U|| / sqrt(k),

for which W^T U is computed once a checkpoint. The directions do not depend on e, so each <e, u_j> / ||e|| is standard
normal, whatever e is, and k times the square of estimate over ||e|| has the chi-squared distribution of k degrees of
freedom: exactly, which random signs have only nearly. Rows above `FAR` of their bound are multiplied out and judged by
that; above `FAR` of the least bound, a row's has its amplification in it (bounds.py), from the norms of the weight's
columns. A row at its bound escapes with the probability that chi-squared of 64 is below 64 * 0.6^2 = 23, which is
5.3e-7, a row at 1.2 times its bound with 1.4e-10, at twice its bound with 1.2e-22. A sound row at 0.45 of its bound is
multiplied out once in 7,800.

Effects below one rounding are sums over elements, which projections blur: over n rows of W channels they have the
weight of n k elements, and rows that are multiplied out have W each. So some rows always are: `EXACT_ROWS` of different
tokens. An effect of s roundings then has a statistic of about s sqrt(EXACT_ROWS W), and needs THRESHOLD: in 16 bits the
least effect, 0.05, reaches it from W = 534 on, and no narrower product is projected; in float32 it needs 2.

The same rows verify W^T U itself: if their exact results do not fit it, it is computed again.
"""

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import nn

from harness.base.files import scratch_folder
from harness.base.metrics import rounding_unit
from harness.formats.checkpoint import cache_dir
from harness.formats.recording import Recording
from harness.formats.recording.format import DTYPES
from harness.formats.taps import KINDS, Kind, Operation
from harness.judge.compare.batch import PaddedBatch, RowSample
from harness.judge.compare.bounds import Sensitivity, derived_bound
from harness.judge.compare.shapes import engine_dtype
from harness.oracle.golden import key_name
from harness.oracle.model import HFModel
from harness.oracle.precision import blocked_linear

NUM_DIRECTIONS = 64
FAR = 0.6
"""Share of the bound, by the estimate, above which a row is multiplied out."""
EXACT_ROWS = 48
"""Least number of rows of a batch that are multiplied out: effects need `MIN_ROWS`, 40."""
LEAST_WIDTH = 534
"""Narrowest product that is projected: (THRESHOLD / 0.05)^2 / EXACT_ROWS."""
VERIFYING_ROWS = 4
"""The same where fewer rows are judged than effects need: they verify the projected weights alone."""
_BLOCK_ROWS = 512
"""Rows that are projected at a time: products of fewer rows are slower."""
_WEIGHT_ROWS = 128
"""Outputs of a weight that are projected at a time."""
_BLOCK_ELEMENTS = 1 << 18
"""Elements of a weight that are squared at a time; they fit into the L2 cache."""
_NEAR = 0.6
"""Largest relative distance of the norm of a column from what its projections say, seven standard deviations."""
_SAME = 128
"""Largest distance of exact results from what the projected weights say, in roundings of the truth's arithmetic."""


def exact_places(batch: PaddedBatch, index: int, least: int = EXACT_ROWS) -> torch.Tensor:
    """Return the places, [n] int64 and ascending, at which the products of a batch are multiplied out.

    Rows of one token may be equal in the first layer, and count once; so tokens are taken until enough differ.
    """
    judged, tokens = batch.is_own.nonzero()[:, 0].tolist(), batch.token_ids.flatten().tolist()
    if len(judged) <= least:
        return torch.tensor(judged, dtype=torch.int64)
    places = set(RowSample(num_rows=least).drawn(judged, index))
    different = {tokens[at] for at in places}
    for at in judged:
        if len(different) >= least:
            break
        if tokens[at] not in different:
            places.add(at)
            different.add(tokens[at])
    return torch.tensor(sorted(places))


@dataclass(kw_only=True)
class Projections:
    """The projected weights of a model's products, kept in the cache by the checkpoint's weights."""

    hf: HFModel
    dtype: torch.dtype
    """Of the engine."""
    truth_dtype: torch.dtype
    taps: frozenset[str]
    """Recorded in the engine's dtype."""
    _weights: dict[str, torch.Tensor] = field(default_factory=dict)
    """By tap: [k + 1, in], the projected weight and the norms of its columns."""
    _directions: dict[int, torch.Tensor] = field(default_factory=dict)
    """By width: [k, out]: products of [k, out] are faster than those of [out, k]."""
    _is_new: bool = False

    def __post_init__(self) -> None:
        """Read what earlier checks left; a damaged file is as none."""
        with suppress(OSError, safetensors.SafetensorError):
            kept = safetensors.torch.load_file(self._path)
            # The file's tensors are not aligned, and products of those differ in bits.
            self._weights = {tap: wu.clone() for tap, wu in kept.items()}

    def fit(self, operation: Operation, num_rows: int, num_exact: int, num_judged: int) -> bool:
        """Whether a product of rows is projected, of which some are judged, and some of these multiplied out."""
        module = self.hf.module(operation.module) if operation.kind is Kind.LINEAR else None
        if type(module) is not nn.Linear or operation.tap not in self.taps:
            return False
        num_out, num_in = module.weight.shape
        saved = (num_rows - num_exact) * num_in * num_out
        return num_out >= LEAST_WIDTH and saved > 2 * num_judged * NUM_DIRECTIONS * (num_in + num_out)

    def estimates(
        self, operation: Operation, x: torch.Tensor, actual: torch.Tensor, exact: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the estimated error of each row in roundings, and its bound: [R] float64 each.

        The bound is the least that a row has, or where the error is above `FAR` of that, the row's own with what
        amplifies its rounding. Call it while the module's weight is there.

        Args:
            operation: a product that fits.
            x: [R, in] its inputs, in the truth's dtype.
            actual: [R, out] what the engine recorded.
            exact: inputs and results of some rows, in the truth's dtype: [n, in] and [n, out].
        """
        module = self.hf.module(operation.module)
        bias = getattr(module, "bias", None)
        u, wu, norms = self._of(operation, module, actual.device, bias, exact)
        model, unit = KINDS[operation.kind].error_model, rounding_unit(self.dtype)
        assert model is not None
        roundings, bounds = [], []
        for x_rows, y_rows in zip(x.split(_BLOCK_ROWS), actual.split(_BLOCK_ROWS), strict=True):
            y = y_rows.to(self.truth_dtype)
            norm = torch.linalg.vector_norm(y, dim=1)
            error = _projected(x_rows, y, u, wu, bias)
            roundings.append(torch.where(error == 0, 0.0, error / norm / unit).to("cpu", torch.float64))
            bounds.append(derived_bound(model, self.dtype, Sensitivity(), y))
            is_far = is_above(roundings[-1], bounds[-1])
            if bool(is_far.any()):
                at = is_far.to(x.device)
                scale = (x_rows[at].square() @ norms.square()).sqrt() / norm[at]
                amplified = Sensitivity(amplification=scale.to("cpu", torch.float64))
                bounds[-1][is_far] = derived_bound(model, self.dtype, amplified, y[at])
        return torch.cat(roundings), torch.cat(bounds)

    def multiplied(self, operation: Operation, x: torch.Tensor) -> torch.Tensor:
        """Return the product of some inputs [R, in] in the truth's dtype."""
        module = self.hf.module(operation.module)
        assert isinstance(module, nn.Linear)
        return blocked_linear(module, x, self.truth_dtype)

    def control(self, operation: Operation, x: torch.Tensor) -> torch.Tensor:
        """Return the product of some inputs [R, in] in the engine's dtype."""
        module = self.hf.module(operation.module)
        assert isinstance(module, nn.Linear)
        bias = None if module.bias is None else module.bias.to(self.dtype)
        return nn.functional.linear(x.to(self.dtype), module.weight.to(self.dtype), bias)

    def _of(
        self,
        operation: Operation,
        module: Any,
        device: torch.device,
        bias: torch.Tensor | None,
        exact: tuple[torch.Tensor, torch.Tensor],
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the directions, the projected weight, and the norm of what each input is multiplied with, [in].

        They are computed if they are not there or belong to another weight.
        """
        num_out, num_in = module.weight.shape
        u = self._directions.get(num_out)
        if u is None:
            generator = torch.Generator().manual_seed(num_out)
            u = torch.randn(NUM_DIRECTIONS, num_out, generator=generator, dtype=torch.float64)
            u = self._directions[num_out] = u.to(device, self.truth_dtype)
        kept = self._weights.get(operation.tap)
        if kept is not None and kept.shape == (NUM_DIRECTIONS + 1, num_in):
            kept = kept.to(device, self.truth_dtype)
            wu, norms = kept[:-1], kept[-1]
            distance = _projected(*exact, u, wu, bias)
            allowed = _SAME * torch.finfo(self.truth_dtype).eps * torch.linalg.vector_norm(exact[1], dim=1)
            if bool((distance <= allowed)[allowed.isfinite()].all()) and _are_norms(norms, wu):
                return u, wu, norms
        wu = _directed(module.weight, u)
        norms = column_norms2(module.weight, num_in).sqrt().to(device, self.truth_dtype)
        self._weights[operation.tap], self._is_new = torch.cat([wu, norms[None]]).cpu(), True
        return u, wu, norms

    def save(self) -> None:
        """Keep what was computed for the next check; a cache that cannot be written is none."""
        if not self._is_new:
            return
        with suppress(OSError, safetensors.SafetensorError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with scratch_folder(".making-", self._path.parent) as making:
                safetensors.torch.save_file(self._weights, making / "projections")
                (making / "projections").rename(self._path)
            self._is_new = False

    @property
    def _path(self) -> Path:
        key: Mapping[str, Any] = {
            "weights": self.hf.checkpoint.weights_hash,
            "dtype": str(self.hf.dtype),
            "truth": str(self.truth_dtype),
            "directions": NUM_DIRECTIONS + 1,
            "lora": self.hf.lora_hash,
        }
        return cache_dir() / "projections" / f"{key_name(key)}.safetensors"


def projections_of(recording: Recording, hf: HFModel, truth_dtype: torch.dtype) -> Projections:
    """Return the projections by which a recording is judged."""
    dtype = engine_dtype(recording)
    taps = frozenset(tap.name for tap in recording.taps if tap.dtype == DTYPES[recording.manifest.dtype])
    return Projections(hf=hf, dtype=dtype, truth_dtype=truth_dtype, taps=taps)


def is_above(roundings: torch.Tensor, bound: torch.Tensor) -> torch.Tensor:
    """[R] bool: rows that are to be multiplied out, by their estimates; also those that are not finite: bounds are."""
    return ~(roundings <= FAR * bound)


def column_norms2(weight: torch.Tensor, num_in: int) -> torch.Tensor:
    """Return the squared norm of the weights that each input is multiplied with: [in] float64."""
    if weight.shape[1] != num_in:  # HF's Conv1D keeps its weight as [in, out]
        weight = weight.T
    norms = torch.zeros(num_in, dtype=torch.float64, device=weight.device)
    for rows in weight.split(max(1, _BLOCK_ELEMENTS // num_in)):
        finer = rows if rows.dtype == torch.float64 else rows.to(torch.float32)
        norms += finer.square().sum(dim=0)
    return norms


def _are_norms(norms: torch.Tensor, wu: torch.Tensor) -> bool:
    """Whether norms [in] of the columns of a weight fit its projections [k, in], which estimate them to 9 %."""
    estimate = torch.linalg.vector_norm(wu, dim=0) / math.sqrt(NUM_DIRECTIONS)
    return bool(((norms - estimate).abs() <= _NEAR * norms).all())


def _directed(weight: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """Return U W, [k, in] in the dtype of U [k, out], for a weight [out, in] of any dtype."""
    total = u.new_zeros(len(u), weight.shape[1])
    for part, directions in zip(weight.split(_WEIGHT_ROWS), u.split(_WEIGHT_ROWS, dim=1), strict=True):
        total = torch.addmm(total, directions, part.to(u.dtype))
    return total


def _projected(
    x: torch.Tensor, y: torch.Tensor, u: torch.Tensor, wu: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Return the estimated distance of y from W x + b, [R]."""
    difference = torch.addmm(u @ y.T, wu, x.T, alpha=-1)
    if bias is not None:
        difference -= (u @ bias.to(u.dtype))[:, None]
    estimate: torch.Tensor = torch.linalg.vector_norm(difference, dim=0) / math.sqrt(NUM_DIRECTIONS)
    return estimate
