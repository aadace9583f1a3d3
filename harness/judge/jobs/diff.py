"""Compare two recordings on disk, with or without the model that judges single operations."""

from collections.abc import Collection, Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

import torch

from harness.base.progress import Progress
from harness.errors import Code, HarnessError
from harness.formats.case import DTYPES, TAP_PRESETS
from harness.formats.checkpoint import Checkpoint, resolve
from harness.formats.recording import Manifest, Recording
from harness.formats.schedule import TRIGGERS
from harness.formats.taps import Graph, Kind
from harness.formats.values import open_source
from harness.judge.compare import TOKENS, Requirements, compare_run
from harness.judge.compare.coverage import LEAST_JUDGED
from harness.judge.explain import explain_run
from harness.judge.jobs.check import preset_taps
from harness.oracle.golden import Golden
from harness.oracle.lora import adapter_notes, load_adapted, read_adapter
from harness.oracle.model import HFModel
from harness.plan import check_device
from harness.results.check import CheckResult, RunResult

_ESTIMATED = (
    "EXPECTED has no error of HF's own: it is estimated from the number of operations, and an operation is wrong from "
    "ten times what those before it give; --model judges each by itself"
)


def run_diff(
    expected: Path,
    actual: Path,
    *,
    model: str | None = None,
    lora: Path | None = None,
    taps: Sequence[str] = ("*",),
    lacking: Sequence[str] = (),
    require: Sequence[str] = ("decode",),
    truth: str = "auto",
    device: str = "cpu",
    progress: Progress | None = None,
    local_files_only: bool = True,
) -> CheckResult:
    """Compare two recordings.

    Args:
        expected: a golden, or any recording of the same requests.
        actual: the recording under test.
        model: folder or hub id of the checkpoint; with it every operation is replayed on the inputs in `actual`.
        lora: folder of the adapter that ACTUAL's engine applied; it needs `model`.
        taps: globs, or `all`, `cache`, `logits`, `tokens` as a check has them; the taps of `expected` that match must
            be in `actual`, and the KV cache read back if it has one.
        lacking: sites (`k_cache`, `mlp.act`) that the engine of `actual` cannot record.
        require: triggers that `actual` must have reached.
        truth: precision in which operations are judged, `float64`, `float32` or `auto`.
        device: where to replay.
        progress: told what is being done.
        local_files_only: never ask the hub.

    Raises:
        HarnessError: a recording is missing or damaged, they hold different prompts, or an option makes no sense.
    """
    _refuse_unknown("--require", "unknown trigger {}", require, TRIGGERS)
    taps = tuple("*" if tap == "all" else tap for tap in taps)
    with Recording.open(expected) as theirs, Recording.open(actual) as ours:
        golden = Golden(theirs)
        hf, notes = _oracle(ours, model, lora, device, local_files_only=local_files_only, mtp=golden.graph.has_mtp)
        graph = golden.graph if hf is None else hf.graph
        caches = _caches(ours, graph)
        if not caches and any(operation.kind is Kind.CACHE for operation in graph):
            notes.append("no KV cache was read back: whether it holds what was written is not known")
        if hf is None and not golden.noise:
            notes.append(_ESTIMATED)
        wanted = wanted_taps(taps, lacking, [*(entry.name for entry in theirs.manifest.taps), *caches], graph)
        requirements = _requirements(ours, taps, lacking, wanted, require)
        comparison = compare_run(ours, golden, hf=hf, requirements=requirements, truth=truth, progress=progress)
        run = comparison.result if hf is None else explain_run(comparison, ours, golden, hf)
        return _result(ours.manifest, run, notes)


def _requirements(
    actual: Recording, taps: Sequence[str], lacking: Sequence[str], wanted: Sequence[str], require: Sequence[str]
) -> Requirements:
    """Return what `actual` must hold to pass, by the options for taps and for lacking sites."""
    chose_tokens = any(step.sampled is not None for step in actual.steps)
    asks_less = taps != ("*",) or bool(lacking)
    return Requirements(
        wanted=wanted,
        not_offered=(*lacking, *(() if chose_tokens else (TOKENS,))),
        accepts_tokens=taps == ("tokens",),
        least_compute=0.0 if asks_less else LEAST_JUDGED,
        require=require,
    )


def _result(manifest: Manifest, run: RunResult, notes: Sequence[str]) -> CheckResult:
    return CheckResult(
        engine=manifest.producer.name,
        model=manifest.model.id,
        dtype=manifest.dtype,
        device=manifest.device,
        num_requests=len(manifest.requests),
        runs=(run,),
        notes=tuple(notes),
    )


def _oracle(
    recording: Recording, model: str | None, lora: Path | None, device: str, *, local_files_only: bool, mtp: bool
) -> tuple[HFModel | None, list[str]]:
    """Load the model that judges single operations, if one is named; note if its weights are not the recording's."""
    if model is None:
        if lora is not None:
            what, hint = "an adapter changes a model, and none is named", "add --model BASE, or leave --lora out"
            raise HarnessError(Code.BAD_OPTION, what, where="--lora", hint=hint)
        return None, []
    check_device(device)
    checkpoint = Checkpoint(resolve(model, local_files_only=local_files_only))
    is_same = checkpoint.has_weights(recording.manifest.model.weights_hash)
    notes = [] if is_same else [f"ACTUAL was recorded from other weights than those of {model}, which judge it"]
    hf = load_adapted(checkpoint, dtype=_dtype(recording), device=device, lora=lora, mtp=mtp)
    if lora is not None and not is_same:
        notes += _another_base(checkpoint, recording.manifest, set(read_adapter(lora)))
    return hf, [*notes, *adapter_notes(hf)]


def _another_base(base: Checkpoint, recorded: Manifest, adapted: Collection[str]) -> Iterator[str]:
    """Yield a note if the recorded checkpoint, if there is one still, differs from the base outside the adapter."""
    try:
        merged = Checkpoint(resolve(recorded.model.id, local_files_only=True))
        if not merged.has_weights(recorded.model.weights_hash):
            return
        ours, theirs = open_source(base.folder), open_source(merged.folder)
    except HarnessError:
        return
    kept = [name for name in ours.names if name in theirs.names and name.removesuffix(".weight") not in adapted]
    different = [name for name in kept if not _is_same(ours.read(name), theirs.read(name))]
    if different:
        yield (
            f"{len(different)} of {len(kept)} tensors that the adapter does not change are other ones in "
            f"{recorded.model.id}, {different[0]} the first: the adapter was merged into another base"
        )


def _is_same(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two tensors are equal after both are rounded to the coarser of their dtypes."""
    coarser = min(first.dtype, second.dtype, key=lambda dtype: dtype.itemsize)
    return torch.equal(first.to(coarser), second.to(coarser))


def wanted_taps(taps: Sequence[str], lacking: Sequence[str], names: Sequence[str], graph: Graph) -> list[str]:
    """Return the taps of presets and those that match a glob, except the sites that the engine lacks."""
    globs = [tap for tap in taps if tap not in TAP_PRESETS]
    presets = [name for tap in taps if tap in TAP_PRESETS for name in preset_taps(tap, graph)]
    wanted = list(dict.fromkeys([*_matching(globs, list(dict.fromkeys(names))), *presets]))
    sites = [_site(tap, graph) for tap in wanted]
    _refuse_unknown("--lacking", "no tap that is asked for is a {}", lacking, sites)
    return [tap for tap in wanted if _site(tap, graph) not in lacking]


def _caches(recording: Recording, graph: Graph) -> list[str]:
    """Return the caches that the engine has, as the recording shows by a tap, or by slots and block tables."""
    recorded = {entry.name for entry in recording.taps}
    recorded |= {name for stored, name in graph.aliases.items() if stored in recorded}
    is_paged = any(step.slot_mapping is not None or step.block_tables for step in recording.steps)
    return [op.tap for op in graph if op.kind is Kind.CACHE and (is_paged or op.tap in recorded)]


def _site(tap: str, graph: Graph) -> str:
    return graph[tap].site if tap in graph else tap


def _refuse_unknown(option: str, what: str, names: Sequence[str], known: Sequence[str]) -> None:
    """Refuse a name that is not known; `what` is the message, with `{}` for the name."""
    for name in names:
        if name not in known:
            expected = ", ".join(dict.fromkeys(known))
            raise HarnessError(Code.BAD_OPTION, what.format(repr(name)), where=option, expected=expected, actual=name)


def _dtype(recording: Recording) -> torch.dtype:
    """Return the dtype the engine computed in; a manifest may name any."""
    name = recording.manifest.dtype
    if name not in DTYPES:
        raise HarnessError(
            Code.BAD_MANIFEST,
            f"there is no replay for an engine's dtype of {name!r}",
            where=f"{recording.path}: dtype",
            expected=", ".join(DTYPES),
            actual=name,
            hint="compare without --model",
        )
    return getattr(torch, name)  # type: ignore[no-any-return]


def _matching(globs: Sequence[str], names: Sequence[str]) -> list[str]:
    """Return the names that match a glob. Refuse a glob that matches none: the check would silently be smaller."""
    for glob in globs:
        if glob != "*" and not any(fnmatchcase(name, glob) for name in names):
            raise HarnessError(
                Code.BAD_OPTION,
                f"no tap of EXPECTED matches {glob!r}",
                where="--taps",
                expected=f"names such as {', '.join(names[:3])}",
                actual=glob,
            )
    return [name for name in names if any(fnmatchcase(name, glob) for glob in globs)]
