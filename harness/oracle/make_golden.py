"""Makes goldens: HF's greedy continuation, the truth over all of it, and HF's own noise in the engine's dtype.

That of a check is plain at first (oracle/continuation.py); its truth is made where a verdict asks for it.
"""

import errno
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers

from harness.base.environment import environment
from harness.base.files import scratch_folder
from harness.base.metrics import row_errors
from harness.base.progress import Progress
from harness.base.threads import Workers, num_spare_threads
from harness.errors import Code, HarnessError
from harness.formats.checkpoint import cache_dir
from harness.formats.recording import ModelInfo, Producer, RecordingWriter, RequestInfo, RunInfo
from harness.formats.taps import Graph
from harness.oracle.continuation import is_shown_by_decode, record_continuation
from harness.oracle.decode import greedy_continuation
from harness.oracle.golden import (
    LOGIT_NOISE,
    PLAIN,
    Golden,
    key_name,
    open_golden,
    read_graph,
    write_golden_files,
    write_graph,
)
from harness.oracle.images import inputs_of
from harness.oracle.model import HFModel
from harness.oracle.paired import PartCall, Value, run_pair
from harness.oracle.precision import has_wide_products, truth_dtype
from harness.oracle.requests import Prompt, batch_requests, check_prompt, padded, sampled_positions
from harness.oracle.sketch_rows import is_wide, sketch_dtype, sketch_rows, sketched_taps
from harness.oracle.untraced import parts_kept
from harness.version import __version__

ORACLE_VERSION = 10
"""Part of a cached golden's key: raise it with every change of the oracle that moves its numbers."""


def golden_key(hf: HFModel, prompts: Sequence[Prompt], truth: str = "auto") -> dict[str, Any]:
    """Return all that the numbers of a golden depend on; `truth` may be `PLAIN`."""
    return {
        "harness": __version__,
        "oracle": ORACLE_VERSION,
        "weights": hf.checkpoint.weights_hash,
        "config": hf.checkpoint.config_hash,
        "settings": hf.checkpoint.settings_hash,
        "prompts": [_prompt_key(prompt) for prompt in prompts],
        "dtype": str(hf.dtype),
        "truth": PLAIN if truth == PLAIN else str(truth_dtype(truth, hf.dtype)),
        "device": hf.device.type,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        **({"products": "wide"} if _is_wide(hf, truth) else {}),
        **({} if hf.lora_hash is None else {"lora": hf.lora_hash}),
        **({} if hf.mtp is None else {"mtp": hf.mtp.num_depths}),
    }


def _is_wide(hf: HFModel, truth: str) -> bool:
    return truth != PLAIN and truth_dtype(truth, hf.dtype) == torch.float32 and has_wide_products(hf.device, hf.dtype)


def kept_graph(hf: HFModel) -> Graph | None:
    """Return the graph that was kept of a model of this configuration; None if there is none."""
    return read_graph(*_graph_file(hf))


def keep_graph(hf: HFModel) -> None:
    """Keep the graph of a model of which a golden was made: all of its values are finite."""
    write_graph(*_graph_file(hf), hf.graph)


def _graph_file(hf: HFModel) -> tuple[Path, dict[str, Any]]:
    """Return where the graph of a model is kept, and all that it depends on; its weights must only be finite."""
    key = {
        "harness": __version__,
        "oracle": ORACLE_VERSION,
        "config": hf.checkpoint.config_hash,
        "dtype": str(hf.dtype),
        "device": hf.device.type,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "images": hf.has_images,
        "lora": hf.lora_hash,
        "mtp": None if hf.mtp is None else hf.mtp.num_depths,
    }
    return cache_dir() / "graphs" / f"{key_name(key)}.json", key


def _prompt_key(prompt: Prompt) -> dict[str, Any]:
    fields = {name: value for name, value in asdict(prompt).items() if value is not None}
    return {**fields, "token_ids": list(prompt.token_ids)}


def cached_golden(
    hf: HFModel,
    prompts: Sequence[Prompt],
    *,
    truth: str = "auto",
    progress: Progress | None = None,
    keeps_values: bool = False,
    continued: Sequence[RequestInfo] = (),
) -> Golden:
    """Return the golden of `prompts` from the cache; made first if it is not there, is damaged, or is another one.

    A golden that had to be made again says so in its notes. With `keeps_values` it holds no sketches; else it may.
    `continued` are its requests if HF's continuation is known.
    """
    key = golden_key(hf, prompts, truth)
    notes: tuple[str, ...] = ()
    of_these = partial(_of_tokens, hf, prompts, continued, truth=truth, progress=progress, keeps_values=keeps_values)
    for folder in _cached_folders(key):
        try:
            golden = _open_cached(folder, key)
        except HarnessError as error:
            notes = (f"the golden in the cache was not used, and was made again: {error.what}",)
            _discard(folder)
        else:
            if not (keeps_values and golden.sketched):
                return of_these(golden)
    folder = _folder(key, keeps_values=keeps_values)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        golden = make_golden(
            hf, prompts, folder, truth=truth, progress=progress, keeps_values=keeps_values, continued=continued
        )
    except OSError as error:
        raise HarnessError(
            Code.CANNOT_WRITE, f"the golden cannot be cached: {error}", where=folder, hint="set HARNESS_CACHE"
        ) from error
    except HarnessError as error:
        if error.code is not Code.OUTPUT_EXISTS:
            raise
        golden = of_these(_open_cached(folder, key))  # another process was faster
    golden.notes = notes
    return golden


def _of_tokens(
    hf: HFModel, prompts: Sequence[Prompt], requests: Sequence[RequestInfo], golden: Golden, **options: Any
) -> Golden:
    """Return a golden if it is of these requests, or there are none; else that of their tokens, which are forced.

    The continuation is another where two tokens tie, and the golden may be in use by another process.
    """
    tokens = [tuple(request.token_ids) for request in requests]
    if not tokens or tokens == [tuple(request.token_ids) for request in golden.requests]:
        return golden
    forced = [
        replace(prompt, token_ids=ids, max_new_tokens=1, prompt_length=request.prompt_length)
        for prompt, request, ids in zip(prompts, requests, tokens, strict=True)
    ]
    return cached_golden(hf, forced, **options)


def checked_golden(
    hf: HFModel, prompts: Sequence[Prompt], *, truth: str = "auto", progress: Progress | None = None
) -> Golden:
    """Return the golden that a check begins with: the truth where it is cached, else a plain one, made if need be."""
    if _cached_folders(golden_key(hf, prompts, truth)) or not is_shown_by_decode(hf, prompts):
        return cached_golden(hf, prompts, truth=truth, progress=progress)
    golden = cached_golden(hf, prompts, truth=PLAIN, progress=progress)
    return _with_truth(golden, hf, prompts, truth, progress)


def open_cached_golden(hf: HFModel, prompts: Sequence[Prompt], *, truth: str = "auto") -> Golden | None:
    """Return what `checked_golden` does if it is in the cache; None if it is not there, or cannot be used."""
    for precision in (truth, PLAIN):
        key = golden_key(hf, prompts, precision)
        for folder in _cached_folders(key):
            with suppress(HarnessError):
                golden = _open_cached(folder, key)
                return golden if precision != PLAIN else _with_truth(golden, hf, prompts, truth, None)
    return None


def _with_truth(
    golden: Golden, hf: HFModel, prompts: Sequence[Prompt], truth: str, progress: Progress | None
) -> Golden:
    """Tell a plain golden how to get the truth of its tokens."""
    make = partial(cached_golden, hf, prompts, truth=truth, progress=progress, continued=golden.requests)
    golden.make_truth = make
    return golden


def _cached_folders(key: Mapping[str, Any]) -> list[Path]:
    """Return where a golden is, at most twice: with all values, and with sketches."""
    return [folder for folder in (_folder(key, keeps_values=whole) for whole in (True, False)) if folder.exists()]


def _folder(key: Mapping[str, Any], *, keeps_values: bool) -> Path:
    return cache_dir() / "goldens" / f"{key_name(key)}{'-values' if keeps_values else ''}"


def _open_cached(folder: Path, key: Mapping[str, Any]) -> Golden:
    """Open a cached golden, and verify that every byte of it is as it was written for this key.

    Raises:
        HarnessError: it is damaged, or another one.
    """
    golden = open_golden(folder)
    if golden.info is None or bool(golden.noise) == (key["truth"] == PLAIN):
        raise HarnessError(Code.BAD_MANIFEST, "a file of it is missing", where=folder)
    if golden.info.key != key:
        raise HarnessError(Code.BAD_MANIFEST, "it is the golden of something else", where=folder)
    golden.recording.verify_all()
    return golden


def _discard(folder: Path) -> None:
    """Remove a damaged golden, by a rename first: another process may already read the one that replaces it."""
    with suppress(OSError), scratch_folder(".damaged-", folder.parent) as aside:
        folder.rename(aside / "golden")


def make_golden(
    hf: HFModel,
    prompts: Sequence[Prompt],
    out: Path,
    *,
    truth: str = "auto",
    progress: Progress | None = None,
    keeps_values: bool = True,
    whole: Collection[str] = (),
    continued: Sequence[RequestInfo] = (),
) -> Golden:
    """Run the oracle over `prompts` and write the golden to the folder `out`, which must be new or empty.

    Without `keeps_values` wide taps are kept as sketches, where a distance is all that a comparison needs of them, and
    which are not among those to be `whole`. `continued` are the requests if HF's continuation is known.

    Raises:
        HarnessError: a prompt is empty, too long, or holds a token outside the vocabulary; `out` cannot be written;
            CHECKPOINT_CHANGED.
    """
    report = progress or (lambda _label, _done, _total: None)
    hf.has_images = any(prompt.inputs for prompt in prompts)
    for index, prompt in enumerate(prompts):
        check_prompt(hf, prompt, index)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        place = out.resolve()  # a link to an empty folder stays one
        with scratch_folder(".making-", place.parent) as making:
            folder = making / "golden"
            sketches = _Sketches(taps=frozenset() if keeps_values else sketched_taps(hf.graph).difference(whole))
            if truth == PLAIN:
                _make_plain(hf, prompts, folder, report, sketches)
            else:
                _make(hf, prompts, folder, truth, report, sketches, continued)
            folder.rename(place)  # replaces an empty folder, and no other
    except OSError as error:
        exists = error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR)
        code = Code.OUTPUT_EXISTS if exists else Code.CANNOT_WRITE
        raise HarnessError(code, f"the golden cannot be put in its place: {error}", where=out) from error
    return open_golden(out)


def _make(
    hf: HFModel,
    prompts: Sequence[Prompt],
    folder: Path,
    truth: str,
    report: Progress,
    sketches: "_Sketches",
    continued: Sequence[RequestInfo],
) -> None:
    requests = list(continued)
    with parts_kept(hf):
        for index, prompt in enumerate(() if requests else prompts):
            report("continuation", index, len(prompts))
            new = greedy_continuation(hf, prompt.token_ids, prompt.max_new_tokens, prompt.inputs)[:-1]
            requests.append(_request(index, prompt, new))
    noise: dict[str, list[torch.Tensor]] = defaultdict(list)
    with _writer(hf, requests, folder) as writer:
        groups = batch_requests(hf, requests)
        for index, batch in enumerate(groups):
            _record(hf, batch, writer, noise, sketches, truth, partial(report, f"truth {index + 1}/{len(groups)}"))
    joined = {tap: torch.cat(parts) for tap, parts in noise.items()}
    _check_finite(hf, joined)
    hf.checkpoint.refuse_changes()  # the key names the weights as they were
    write_golden_files(folder, golden_key(hf, prompts, truth), hf.graph, joined, sketches.shapes)


def _make_plain(hf: HFModel, prompts: Sequence[Prompt], folder: Path, report: Progress, sketches: "_Sketches") -> None:
    def stored(tap: str, rows: torch.Tensor) -> torch.Tensor:
        kept = sketches.stored(tap, rows.to(torch.float32) if rows.is_floating_point() else rows, hf.dtype)
        _check_finite(hf, {tap: kept})
        return kept

    requests = [_request(index, prompt, ()) for index, prompt in enumerate(prompts)]
    with parts_kept(hf), _writer(hf, requests, folder) as writer:
        for prompt, request in zip(prompts, requests, strict=True):
            report("continuation", request.id, len(prompts))
            record_continuation(hf, prompt, request, writer, stored)
    hf.checkpoint.refuse_changes()
    write_golden_files(folder, golden_key(hf, prompts, PLAIN), hf.graph, {}, sketches.shapes)


def _request(index: int, prompt: Prompt, new: Sequence[int]) -> RequestInfo:
    length, fed = prompt.prompt_length or len(prompt.token_ids), [*prompt.token_ids, *new]
    return RequestInfo(id=index, token_ids=fed, prompt_length=length, inputs=prompt.inputs)


def _check_finite(hf: HFModel, noise: Mapping[str, torch.Tensor]) -> None:
    for tap, errors in noise.items():
        if not bool(errors.isfinite().all()):
            dtype = str(hf.dtype).removeprefix("torch.")
            look = "look for NaN or Inf in the weights"
            raise HarnessError(
                Code.ORACLE_NOT_FINITE,
                f"HF itself is not finite in {dtype}: no engine can be judged there",
                where=tap,
                expected=f"numbers of at most {torch.finfo(hf.dtype).max:.3g}",
                hint=look
                if hf.dtype == torch.float32
                else f"check in float32 (--dtype float32); if that fails too, {look}",
            )


def _record(
    hf: HFModel,
    requests: Sequence[RequestInfo],
    writer: RecordingWriter,
    noise: dict[str, list[torch.Tensor]],
    sketches: "_Sketches",
    truth: str,
    report: Callable[[int, int], None],
) -> None:
    """Record one step with all rows of some requests, and measure HF's noise on them."""
    rows = _Rows.of(requests)
    writer.begin_step(
        phase="prefill",
        request=rows.request,
        position=rows.position,
        sampled_rows=rows.sampled,
        partial_rows={
            **dict.fromkeys(hf.graph.head, rows.sampled),
            **{op.tap: rows.followed(op.tokens_ahead) for op in hf.graph if op.tokens_ahead and not op.is_kept},
        },
    )
    dtype = truth_dtype(truth, hf.dtype)
    positions = sorted({position for request in requests for position in sampled_positions(request)})
    with Workers[None](min(1, num_spare_threads(hf.device))) as disk:  # one: the taps are written in their order
        observer = _Dump(hf, rows, writer, noise, disk, sketches)
        run_pair(
            hf,
            ids := padded(requests),
            observer,
            truth_dtype=dtype,
            logit_positions=positions,
            progress=report,
            inputs=inputs_of(hf, requests[0], ids.shape[1]),
        )
        observer.finish()
    writer.end_step(observer.choices)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rows:
    """The rows of one step: all tokens of some requests, one request after the other."""

    request: list[int]
    position: list[int]
    sampled: list[int]
    """Indices of the rows whose logits choose a token."""
    num_after: list[int]
    """Tokens of the request after each row's own."""
    places: torch.Tensor
    """[rows] where each row stands in the padded batch: request times tokens, plus token."""

    @classmethod
    def of(cls, requests: Sequence[RequestInfo]) -> "_Rows":
        longest = max(len(request.token_ids) for request in requests)
        pairs = [(at, position) for at, request in enumerate(requests) for position in range(len(request.token_ids))]
        is_sampled = [position in sampled_positions(requests[at]) for at, position in pairs]
        return cls(
            request=[requests[at].id for at, _ in pairs],
            position=[position for _, position in pairs],
            sampled=[row for row, holds in enumerate(is_sampled) if holds],
            num_after=[len(requests[at].token_ids) - 1 - position for at, position in pairs],
            places=torch.tensor([at * longest + position for at, position in pairs]),
        )

    def followed(self, num_tokens: int) -> list[int]:
        """Return the indices of rows that so many tokens follow."""
        return [row for row, num in enumerate(self.num_after) if num >= num_tokens]


@dataclass(slots=True)
class _Sketches:
    """The taps that are sketched where they are wide, and the shapes of their rows."""

    taps: frozenset[str] = frozenset()
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def stored(self, tap: str, rows: torch.Tensor, engine: torch.dtype) -> torch.Tensor:
        """Return what is written of a tap: its rows, or their sketches."""
        if tap not in self.taps or not is_wide(rows):
            return rows
        self.shapes[tap] = tuple(rows.shape[1:])
        return sketch_rows(rows, sketch_dtype(engine, rows.dtype))


@dataclass(slots=True)
class _Dump:
    """Writes the truth's rows, and keeps how far the control is from them."""

    hf: HFModel
    rows: _Rows
    writer: RecordingWriter
    noise: dict[str, list[torch.Tensor]]
    disk: Workers[None]
    sketches: _Sketches = field(default_factory=_Sketches)
    choices: list[int] = field(default_factory=list)
    _control: dict[str, torch.Tensor] = field(default_factory=dict)
    _num_new: int = 0
    """Taps since the last part was done."""

    def control(self, value: Value) -> None:
        """See `PairObserver.control`."""
        self._control[value.operation.tap] = self._kept_rows(value)

    def truth(self, value: Value) -> None:
        """See `PairObserver.truth`."""
        tap = value.operation.tap
        self.disk.submit(partial(self._write, tap, self._kept_rows(value), self._control.pop(tap, None)))
        self._num_new += 1

    def part_begins(self, call: PartCall) -> None:
        """See `PairObserver.part_begins`."""

    def part_done(self) -> None:
        """See `PairObserver.part_done`: what the part before gave is written while this one ran."""
        self.finish(all_but=self._num_new)
        self._num_new = 0

    def finish(self, *, all_but: int = 0) -> None:
        """Wait until all but the newest taps are written."""
        for _ in self.disk.finished(all_but=all_but):
            pass

    def _write(self, tap: str, rows: torch.Tensor, control: torch.Tensor | None) -> None:
        self.writer.tap(tap, self.sketches.stored(tap, rows, self.hf.dtype))
        if tap == self.hf.graph.logits:
            self.choices = rows.argmax(dim=-1).tolist()
            if control is not None:
                largest = (control.to(torch.float64) - rows).abs().amax(dim=-1)
                self.noise[LOGIT_NOISE].append(largest.cpu().to(torch.float64))
        if control is not None and rows.is_floating_point():
            self.noise[tap].append(row_errors(control, rows).cpu())

    def _kept_rows(self, value: Value) -> torch.Tensor:
        """Return a copy of the rows that are no padding, and of logits those that choose a token."""
        wanted = self.rows.places
        if value.operation.tap in self.hf.graph.head:
            wanted = wanted[self.rows.sampled]
        if value.operation.tokens_ahead:
            wanted = wanted[self.rows.followed(value.operation.tokens_ahead)]
        if value.places is not None:
            wanted = torch.searchsorted(value.places, wanted)
        return value.rows[wanted.to(value.rows.device)]


def _writer(hf: HFModel, requests: Sequence[RequestInfo], out: Path) -> RecordingWriter:
    return RecordingWriter(
        out,
        RunInfo(
            producer=Producer(name="harness.oracle", version=__version__),
            model=ModelInfo(
                id=str(hf.folder),
                revision=None,
                config_hash=hf.checkpoint.config_hash,
                weights_hash=hf.checkpoint.weights_hash,
            ),
            dtype=str(hf.dtype).removeprefix("torch."),
            device=hf.device.type,
            environment=environment(),
            schedule="oracle",
        ),
        requests,
        expected_taps=len(hf.graph),
    )
