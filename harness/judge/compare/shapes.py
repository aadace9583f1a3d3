"""Check shapes and dtypes before any value."""

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Literal

import torch

from harness.base.metrics import rounding_unit
from harness.base.numerics import Numerics
from harness.errors import Code, HarnessError
from harness.formats.recording import Recording, Replicated, TapEntry
from harness.formats.recording.reader import TORCH_DTYPES
from harness.formats.taps import Graph, Kind
from harness.judge.compare.cache_format import BLOCK_SIZE, BLOCKS, FORMATS, GRIDS, CacheFormat
from harness.results.check import Finding


def engine_dtype(recording: Recording) -> torch.dtype:
    """Return the dtype that the engine computed in.

    Raises:
        HarnessError: BAD_MANIFEST: the manifest names no floating-point dtype of torch.
    """
    dtype = getattr(torch, recording.manifest.dtype, None)
    if isinstance(dtype, torch.dtype) and dtype.is_floating_point:
        return dtype
    raise HarnessError(
        Code.BAD_MANIFEST,
        "the manifest's dtype is none that an engine computes in",
        where=f"{recording.path}: dtype",
        expected="float32, bfloat16, float16, ...",
        actual=recording.manifest.dtype,
    )


def cache_format(recording: Recording, part: Literal["k", "v"], layer: str = "") -> CacheFormat | None:
    """Return the format that the engine declares for keys or values of a layer; None if it declares none.

    Raises:
        HarnessError: BAD_MANIFEST: the manifest names neither a floating-point dtype of torch nor a known format, or
        its
            scales are not positive, or not one for each KV head.
    """
    entry = next((tap for tap in recording.taps if tap.name == f"{layer}{part}_cache"), None)
    num_heads = 1 if entry is None or len(entry.shape) < 2 else entry.shape[0]
    declared = CacheFormat.declared(recording.manifest.numerics or Numerics(), part, layer, num_heads)
    if declared is None or declared.is_known:
        _check_scales(recording, declared, f"{layer}{part}_cache", entry)
        return declared
    raise HarnessError(
        Code.BAD_MANIFEST,
        "the declared dtype of the cache is none that this harness can round to",
        where=f"{recording.path}: numerics.cache",
        expected=f"float16, bfloat16, ..., {', '.join((*FORMATS, *BLOCKS))}; with scales {', '.join(GRIDS)} or nvfp4",
        actual=declared.name,
        hint="declare none, and declare k_cache and v_cache as lacking",
    )


def _check_scales(recording: Recording, declared: CacheFormat | None, tap: str, entry: TapEntry | None) -> None:
    """Refuse scales of a cache that are not positive, or that do not fit its heads; raises HarnessError."""
    if declared is None or not declared.has_scale:
        return
    is_by_head = len(declared.scales) > 1 or declared.scale_of == "head"
    if declared.name in BLOCKS and entry is not None and entry.shape[-1] % BLOCK_SIZE:
        raise HarnessError(
            Code.BAD_MANIFEST,
            "a cache in blocks has heads of whole blocks",
            where=f"{recording.path}: numerics, {tap}",
            expected=f"a head size that {BLOCK_SIZE} divides",
            actual=f"{declared.title}: rows {list(entry.shape)}",
        )
    has_heads = entry is None or (len(entry.shape) == 2 and len(declared.scales) in (0, 1, entry.shape[0]))
    if all(0 < scale < math.inf for scale in declared.scales) and (has_heads or not is_by_head):
        return
    raise HarnessError(
        Code.BAD_MANIFEST,
        "the declared scales of a cache do not fit it",
        where=f"{recording.path}: numerics, {tap}",
        expected="positive numbers: one, or one for each KV head of rows [heads, head size]",
        actual=f"{declared.title}: {list(declared.scales)[:8]}, rows {None if entry is None else list(entry.shape)}",
        hint="declare what the cache divides by, and record the cache by heads",
    )


def refuse_part(recording: Recording) -> None:
    """Refuse the recording of one rank of several: its rows are slices or addends of the taps.

    Raises:
        HarnessError: ONE_RANK_OF_SEVERAL.
    """
    manifest = recording.manifest
    if manifest.world_size > 1 and not all(isinstance(tap.shard, Replicated) for tap in manifest.taps):
        raise HarnessError(
            Code.ONE_RANK_OF_SEVERAL,
            "the recording is a part: what one rank of several holds",
            where=recording.path,
            expected="a recording of whole taps (world_size 1), or taps that are replicated on every rank",
            actual=f"rank {manifest.rank} of {manifest.world_size}",
            hint="join the ranks' parts while recording, and record them once",
        )


def refuse_other_dtype(expected: Recording, actual: Recording) -> None:
    """Refuse recordings of different dtypes: the rounding of the coarser one would excuse any error of the other.

    A golden's dtype is that of its noise.

    Raises:
        HarnessError: DIFFERENT_DTYPES.
    """
    theirs, ours = expected.manifest.dtype, actual.manifest.dtype
    if theirs != ours:
        raise HarnessError(
            Code.DIFFERENT_DTYPES,
            "the two recordings are of different dtypes, so that no rounding error can be told from a wrong result",
            where=f"dtype of {actual.path} against {expected.path}",
            expected=theirs,
            actual=ours,
            hint="record both in one dtype, or compare with a golden of that dtype (harness golden --dtype); without "
            "--model, harness diff measures two recordings of engines",
        )


def check_taps(
    actual: Recording, expected: Recording, graph: Graph, sketched: Mapping[str, Sequence[int]] = MappingProxyType({})
) -> tuple[list[Finding], set[str]]:
    """Compare the shapes and dtypes of taps; return the findings, and the names of the taps that can be used.

    `sketched` has the shapes of the rows that `expected` holds as sketches.
    """
    shapes = {entry.name: sketched.get(entry.name, entry.shape) for entry in expected.taps}
    caches = {operation.tap: operation.inputs[0] for operation in graph if operation.kind is Kind.CACHE}
    shapes |= {cache: shapes[written] for cache, written in caches.items() if written in shapes}
    states = {op.tap: [*op.shape] for op in graph if op.kind is Kind.STATE}
    shapes |= {tap: shape for tap, shape in states.items() if shape}
    shapes |= {entry.name: entry.shape for entry in actual.taps if keeps_one_less(graph, entry)}
    findings, usable = [], set[str]()
    for entry in actual.taps:
        # A cache of a coarser dtype shows its loss when it is read back.
        finest = None if entry.name in caches or entry.name in states else engine_dtype(actual)
        is_choice = entry.name in graph and graph[entry.name].kind is Kind.CHOICE
        message = _mismatch(entry, shapes.get(entry.name), finest, is_choice=is_choice)
        if message is None:
            usable.add(entry.name)
        else:
            findings.append(Finding(code=Code.TAP_MISMATCH, message=message, tap=entry.name))
    return findings, usable


def keeps_one_less(graph: Graph, entry: TapEntry) -> bool:
    """Whether a tap is a convolution's state with one column less than HF's: the columns that the next token needs."""
    if entry.name not in graph or graph[entry.name].kind is not Kind.STATE:
        return False
    shape = graph[entry.name].shape
    is_convolution = graph[entry.name].site.startswith("conv_state") and len(shape) > 1
    return is_convolution and tuple(entry.shape) == (*shape[:-1], shape[-1] - 1)


def _mismatch(
    entry: TapEntry, shape: Sequence[int] | None, engine: torch.dtype | None, *, is_choice: bool
) -> str | None:
    dtype = TORCH_DTYPES[entry.dtype]
    if is_choice:
        if dtype.is_floating_point:
            return f"dtype of {entry.name} is {entry.dtype}, expected indices"
    elif not dtype.is_floating_point:
        return f"dtype of {entry.name} is {entry.dtype}, expected a floating-point dtype"
    # A finer dtype is allowed (logits in float32); a coarser one has lost the bits to judge.
    if not is_choice and engine is not None and rounding_unit(dtype) > rounding_unit(engine) * 1.001:
        ours, theirs = (str(item).removeprefix("torch.") for item in (engine, dtype))
        hint = f": if it computes so, check it with --dtype {theirs}" if dtype.itemsize == 2 else ""
        return f"dtype of {entry.name} is {entry.dtype}, coarser than the engine's {ours}{hint}"
    if shape is not None and torch.Size(shape).numel() != torch.Size(entry.shape).numel():
        return f"shape of {entry.name} differs: expected {list(shape)}, actual {list(entry.shape)} per row"
    return None
