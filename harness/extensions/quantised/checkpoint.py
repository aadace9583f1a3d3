"""A quantised checkpoint: which of its modules are quantised, and their weights, one at a time.

Everything that the headers can tell is checked when it is opened: missing tensors, shapes, dtypes. What needs the
numbers, scales that are zero or not finite, is checked when a weight is read.
"""

import math
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import NoReturn

import torch

from harness.base.memory import available_bytes
from harness.errors import Code, HarnessError
from harness.extensions.quantised.codes import Codes
from harness.extensions.quantised.config import Scheme, Schemes, misfit, read_schemes, refuse
from harness.extensions.quantised.formats import FORMATS, Format, Part, Sizes, shape_of, shapes_of
from harness.extensions.quantised.inputs import InputRounding, by_rows, ways_to_round
from harness.formats.checkpoint.checkpoint import CONFIG_NAME, Checkpoint, read_shard
from harness.formats.safetensors_header import DTYPE_BITS, TensorEntry
from harness.formats.taps import prefix_of

_PLAIN = ("F64", "F32", "F16", "BF16")
_BYTES_PER_WEIGHT = 24
"""Of memory while a weight is unpacked: its codes as integers and as floats, its scales spread out, their product."""
_CACHE_PARTS = {"k": (".k_scale", ".k_proj.output_scale"), "v": (".v_scale", ".v_proj.output_scale")}
_CACHE_SCALES = (*_CACHE_PARTS["k"], *_CACHE_PARTS["v"], ".q_scale")
"""Scales of a quantised KV cache: an engine uses them if its cache is quantised."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantisedWeight:
    """One quantised weight, and where its tensors lie."""

    name: str
    """HF's name of the parameter."""
    module: str
    scheme: Scheme
    parts: Mapping[str, str]
    """Name of the tensor of each part."""
    sizes: Sizes
    inputs: str | None = None
    """Name of the tensor with the scale of static inputs."""

    @property
    def format(self) -> Format:
        """Where the format is declared."""
        return FORMATS[self.scheme.format]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of HF's parameter."""
        return shape_of(self.format, self.sizes)


class QuantisedCheckpoint:
    """The weights of a quantised checkpoint."""

    def __init__(self, folder: Path) -> None:
        """Open a checkpoint, and check all that its headers tell.

        Raises:
            HarnessError: UNKNOWN_QUANTISATION, QUANTISED_MISFIT, QUANTISED_PART_MISSING; as `Checkpoint`.
        """
        self.checkpoint = Checkpoint(folder)
        self.where = f"{folder / CONFIG_NAME}: quantization_config"
        table = self.checkpoint.config.get("quantization_config")
        if not isinstance(table, dict):
            refuse("the quantisation is not described by a table", self.where, actual=str(table)[:100])
        self.schemes: Schemes = read_schemes(table, self.where)
        self._headers = self.checkpoint.tensors
        self._used: set[str] = set()
        self._middles: dict[str, tuple[float, float]] = {}
        """By weight that is said to be symmetric: the mean of its zero points, and of its codes."""
        self.weights: Mapping[str, QuantisedWeight] = {weight.name: weight for weight in self._weights()}
        """By HF's name of the parameter."""
        self._check_others()

    @cached_property
    def formats(self) -> tuple[str, ...]:
        """Titles of the formats that occur."""
        return tuple(dict.fromkeys(weight.format.title for weight in self.weights.values()))

    @property
    def entries(self) -> dict[str, TensorEntry]:
        """The tensors that a dequantised checkpoint has."""
        entries = {name: entry for name, (entry, _) in self._headers.items() if name not in self._used}
        for weight in self.weights.values():
            entries[weight.name] = TensorEntry(name=weight.name, dtype="F32", shape=weight.shape, begin=0, end=0)
        return entries

    def check_room(self) -> None:
        """Refuse a weight that the memory does not hold while it is unpacked.

        Raises:
            HarnessError: TOO_LARGE_TO_DEQUANTISE.
        """
        available = available_bytes()
        for weight in self.weights.values():
            needed = _BYTES_PER_WEIGHT * torch.Size(weight.shape).numel()
            if needed > available:
                what = "the weight does not fit into the memory while it is unpacked"
                too_large(what, f"{self.checkpoint.folder}: {weight.name}", needed, available)

    def _weights(self) -> Iterator[QuantisedWeight]:
        suffixes = {suffix for scheme in self.schemes.all for suffix in _suffixes(FORMATS[scheme.format])}
        modules: dict[str, dict[str, str]] = {}
        for name in self._headers:
            suffix = max((item for item in suffixes if name.endswith(item)), key=len, default=None)
            if suffix is not None:
                modules.setdefault(name.removesuffix(suffix), {})[suffix] = name
        for module, tensors in modules.items():
            scheme = self.schemes.of(module)
            if self._is_quantised(tensors, FORMATS[scheme.format]):
                yield self._weight(module, scheme, tensors)
        if self.schemes.all and not modules:
            refuse("no tensor of the checkpoint is quantised as it says", self.where, actual=self.schemes.method)

    def _is_quantised(self, tensors: Mapping[str, str], format: Format) -> bool:
        codes = format.parts[0]
        present = set(tensors) & {suffix for part in format.parts for suffix in part.suffixes}
        if present - {".weight"}:
            return True
        packed = [dtype for dtype in codes.dtypes if dtype not in _PLAIN]
        return any(self._headers[tensors[suffix]][0].dtype in packed for suffix in present)

    def _weight(self, module: str, scheme: Scheme, tensors: Mapping[str, str]) -> QuantisedWeight:
        format = FORMATS[scheme.format]
        if self.schemes.leaves_out(module):
            misfit("a module that is said not to be quantised has quantised tensors", self._at(module), expected="a weight", actual=", ".join(tensors.values()))  # fmt: skip  # noqa: E501
        parts = {part.name: name for part in format.parts if (name := self._part(module, part, scheme, tensors))}
        entries = {part: self._headers[name][0] for part, name in parts.items()}
        sizes = format.sizes(entries, scheme, lambda part: self._read(parts[part]))
        for part in format.parts:
            if part.name in parts:
                self._check_shape(part, shapes_of(part, scheme, sizes), entries[part.name])
        static = f"{module}.input_scale"
        self._used |= {*parts.values(), *(tensors[item] for item in format.aside if item in tensors)}
        return QuantisedWeight(
            name=module + format.target,
            module=module,
            scheme=scheme,
            parts=parts,
            sizes=sizes,
            inputs=static if static in self._headers else None,
        )

    def _part(self, module: str, part: Part, scheme: Scheme, tensors: Mapping[str, str]) -> str | None:
        name = next((tensors[suffix] for suffix in part.suffixes if suffix in tensors), None)
        if name is None:
            if part.is_needed(scheme):
                self._missing(f"{module}{part.suffixes[0]}")
            return None
        entry = self._headers[name][0]
        if entry.dtype not in part.dtypes:
            expected = " or ".join(part.dtypes)
            misfit(
                "the tensor has another dtype than its format", self._at(name), expected=expected, actual=entry.dtype
            )
        return name

    def _check_shape(self, part: Part, shapes: list[tuple[int, ...]], entry: TensorEntry) -> None:
        if entry.shape not in shapes:
            expected = " or ".join(str(list(shape)) for shape in shapes)
            what = f"the {part.name} of a quantised weight has another shape than its format"
            misfit(what, self._at(entry.name), expected=expected, actual=list(entry.shape))

    def _check_others(self) -> None:
        """Refuse tensors that stay over and are no floats: codes that nothing explains."""
        self._used |= {name for name in self._headers if name.endswith(_CACHE_SCALES)}
        for name, (entry, _) in self._headers.items():
            if name not in self._used and entry.dtype not in _PLAIN:
                if name.endswith(".weight"):
                    self._missing(name.removesuffix(".weight") + ".weight_scale")
                misfit(
                    "the tensor has no place in the format", self._at(name), actual=f"{entry.dtype} {list(entry.shape)}"
                )

    def _missing(self, name: str) -> NoReturn:
        raise HarnessError(
            Code.QUANTISED_PART_MISSING,
            "a tensor of a quantised weight is missing",
            where=self._at(name),
            expected=", ".join(sorted({FORMATS[item.format].title for item in self.schemes.all})),
            actual="no such tensor in any shard",
            hint="download the checkpoint again: a shard may be of another version",
        )

    def _at(self, name: str) -> str:
        return f"{self.checkpoint.folder}: {name}"

    def _read(self, name: str) -> torch.Tensor:
        return read_shard(self._headers[name][1], name)

    def codes(self, name: str) -> Codes:
        """Return a quantised weight, unpacked.

        The name is HF's.

        Raises:
            HarnessError: BAD_SCALE: a scale is zero or not finite, or an input has no group.
        """
        weight = self.weights[name]
        tensors = {part: self._read(tensor) for part, tensor in weight.parts.items()}
        self._check_groups(weight, tensors)
        codes = weight.format.unpack(tensors, weight.scheme, weight.sizes)
        self._check_scales(weight, codes)
        return codes

    def _check_groups(self, weight: QuantisedWeight, tensors: Mapping[str, torch.Tensor]) -> None:
        group = tensors.get("group")
        if group is None:
            return
        num_groups = weight.sizes.get("groups", 1)
        outside = (group < 0) | (group >= num_groups)
        if bool(outside.any()):
            at = int(outside.nonzero()[0])
            what = f"input {at} belongs to a group that there is not"
            expected = f"0 to {num_groups - 1}"
            self._bad_scale(what, weight.parts["group"], expected, int(group[at]))

    def _check_scales(self, weight: QuantisedWeight, codes: Codes) -> None:
        scale = codes.scale if codes.divisor is None else codes.scale / codes.divisor
        name = weight.parts["scale"]
        if not bool(codes.values.isfinite().all()):
            num = int((~codes.values.isfinite()).sum())
            what = f"{num} of {codes.values.numel()} codes stand for no finite number"
            self._bad_scale(what, weight.parts["codes"], "numbers", "NaN or infinity")
        if codes.divisor is not None and not bool((codes.divisor.isfinite() & (codes.divisor != 0)).all()):
            self._bad_scale(
                "the global scale is not a number to divide by",
                weight.parts["global"],
                "a number",
                codes.divisor.tolist(),
            )
        if not bool(scale.isfinite().all()):
            num, first = int((~scale.isfinite()).sum()), (~scale.isfinite()).nonzero()[0].tolist()
            what = f"{num} of {scale.numel()} scales are not finite, the first at {first}"
            self._bad_scale(what, name, "numbers", str(float(scale[tuple(first)])))
        empty = scale == 0
        if weight.format.may_be_zero or not bool(empty.any()):
            return
        values = codes.values if codes.zero is None else codes.values - codes.spread(codes.zero)
        lost = (values != 0) & (codes.spread(empty.to(torch.float32)) != 0)
        if bool(lost.any()):
            what = f"{int(empty.sum())} of {scale.numel()} scales are zero, and weights that are not are lost"
            self._bad_scale(what, name, "scales that are not zero", f"0 at {empty.nonzero()[0].tolist()}")

    def _bad_scale(self, what: str, tensor: str, expected: object, actual: object) -> NoReturn:
        hint = "quantise the model again; a calibration without data for a module leaves such scales"
        raise HarnessError(Code.BAD_SCALE, what, where=self._at(tensor), expected=expected, actual=actual, hint=hint)

    def input_scale(self, weight: QuantisedWeight) -> torch.Tensor | None:
        """Return the scale of a module's static inputs, float32; None if it has none."""
        return None if weight.inputs is None else self._read(weight.inputs).to(torch.float32)

    @cached_property
    def cache_scales(self) -> dict[str, tuple[float, ...]]:
        """Scales of a quantised KV cache, by its tap (`model.layers.0.k_cache`): one, or one for each KV head.

        Raises:
            HarnessError: BAD_SCALE.
        """
        scales_by_tap = {}
        for name in self._headers:
            part = next((part for part, ends in _CACHE_PARTS.items() if name.endswith(ends)), None)
            if part is not None:
                scales = tuple(self._read(name).to(torch.float32).flatten().tolist())
                if not scales or not all(0 < scale < math.inf for scale in scales):
                    self._bad_scale("a scale of the KV cache is none to divide by", name, "positive", str(scales[:8]))
                scales_by_tap[f"{prefix_of(name)}{part}_cache"] = scales
        return scales_by_tap

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every tensor of the dequantised checkpoint by HF's name.

        Raises:
            HarnessError: as `codes`.
        """
        for name in self.entries:
            if name not in self.weights:
                yield name, self._read(name)
                continue
            codes = self.codes(name)
            if self.weights[name].scheme.has_middle_zero and codes.zero is not None:
                self._middles[name] = float(codes.zero.mean()), float(codes.values.mean())
            yield name, codes.dequantised()

    def contradictions(self) -> tuple[str, ...]:
        """Say where the checkpoint contradicts itself, once all tensors were read: zero points that are not symmetric.

        The codes of weights lie around their zero point, so their mean tells which reading is likelier.
        """
        half = next((2 ** (self.weights[name].scheme.bits - 1) for name in self._middles), 0)
        odd = [name for name, (zero, _) in self._middles.items() if zero != half]
        if not odd:
            return ()
        zero, mean = (fmean(values) for values in zip(*(self._middles[name] for name in odd), strict=True))
        reading = f"{half}, stored as it is (gptq_v2)" if abs(mean - half) < abs(mean - zero) else f"{zero:.4g}"
        return (
            f"the checkpoint contradicts itself: sym=true means zero points of {half}, and those of {len(odd)} of "
            f"{len(self._middles)} modules ({odd[0]}, ...) are read as {zero:.4g}. The codes' mean of {mean:.4g} fits "
            f"{reading}: an engine that reads them otherwise is not wrong by this check alone",
        )

    @property
    def has_declared_inputs(self) -> bool:
        """See `OpenedQuantised`."""
        return any(weight.scheme.inputs for weight in self.weights.values())

    def input_roundings(self, weight: QuantisedWeight, width: int, dtype: torch.dtype) -> Iterator[InputRounding]:
        """Yield the ways to quantise the inputs of a weight's product as declared, in the engine's dtype."""
        scheme = weight.scheme.inputs
        if scheme is None or scheme.dtype not in ("int8", "float8_e4m3fn") or width % (scheme.group or 1):
            return
        scheme = by_rows(scheme)
        static = self.input_scale(weight) if scheme.is_static else None
        if scheme.is_static and (static is None or static.numel() != 1):
            return
        yield from ways_to_round(scheme, None if static is None else float(static), dtype)

    def input_ways(
        self, module: str, width: int, dtype: torch.dtype
    ) -> Iterator[Callable[[torch.Tensor], torch.Tensor]]:
        """See `OpenedQuantised`."""
        weight = self.weights.get(f"{module}.weight")
        if weight is not None:
            yield from (way.rounded for way in self.input_roundings(weight, width, dtype))


def check_disk(source: QuantisedCheckpoint, folder: Path) -> None:
    """Refuse a checkpoint whose dequantised weights the disk of a folder does not hold.

    Raises:
        HarnessError: TOO_LARGE_TO_DEQUANTISE.
    """
    bits = sum(DTYPE_BITS[entry.dtype] * entry.num_elements for entry in source.entries.values())
    free = shutil.disk_usage(folder).free
    if bits // 8 > free:
        too_large("the dequantised weights do not fit onto the disk of the cache", folder.parent, bits // 8, free)


def too_large(what: str, where: object, needed: int, available: int) -> NoReturn:
    """Raise TOO_LARGE_TO_DEQUANTISE."""
    raise HarnessError(
        Code.TOO_LARGE_TO_DEQUANTISE,
        what,
        where=where,
        expected=f"{needed / 1e9:,.1f} GB",
        actual=f"{available / 1e9:,.1f} GB are free",
        hint="run it on a larger machine; HARNESS_CACHE names the folder where dequantised weights are kept",
    )


def _suffixes(format: Format) -> Iterator[str]:
    yield from format.aside
    for part in format.parts:
        yield from part.suffixes
