"""HF's truth for the tokens that a server chose, and HF's own noise in the server's dtype.

The truth is forced along the server's own tokens, so a near-tie that fell the other way costs one token and no more.
"""

import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

import torch

from harness.base.threads import limit_threads, one_thread
from harness.formats.recording import RequestInfo
from harness.formats.taps import Kind
from harness.oracle.model import HFModel
from harness.oracle.paired import PartCall, Value, run_pair
from harness.oracle.precision import truth_dtype
from harness.oracle.requests import batch_requests, padded

_BLOCK_ROWS = 32
"""Rows whose logits are in memory in float64 at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Walk:
    """The tokens of one request and its answer, and the log probabilities to compute along them."""

    token_ids: tuple[int, ...]
    """Prompt and continuation."""
    wanted: Mapping[int, frozenset[int]]
    """Token ids by the position whose logits give their probability: the position before theirs."""
    num_top: int = 1
    """Likeliest tokens to keep of each row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TruthRow:
    """HF's distribution after one position."""

    top: tuple[int, ...]
    """Likeliest tokens, the likeliest first."""
    logprobs: Mapping[int, float]
    """Truth, of the wanted tokens and of the likeliest ones."""
    control: Mapping[int, float]
    """The same tokens by HF in the server's dtype."""
    logit_noise: float
    """Largest error of HF's logits in the server's dtype, over the vocabulary."""
    resolution: float
    """The effect of rounding the row's largest logit to float32: servers take the logarithm of a softmax in float32."""

    def margin(self, token_id: int) -> float:
        """Return how far below the likeliest token's logit that of a wanted token is."""
        return self.logprobs[self.top[0]] - self.logprobs[token_id]


Rows = dict[int, TruthRow]
"""HF's rows along one walk, by position."""
WalkRows = Sequence[tuple[int, int]]
"""Rows as pairs of a walk's number and a position."""
ReadRows = Callable[[WalkRows, torch.Tensor, torch.Tensor], None]
Rounding = Callable[[torch.Tensor], torch.Tensor]
"""What a cache gives back of a tensor: of the same shape and dtype."""


def walk_truth(
    hf: HFModel,
    walks: Sequence[Walk],
    *,
    truth: str = "auto",
    check: Callable[[], None] | None = None,
) -> list[Rows]:
    """Run truth and control over all walks.

    There is at least one walk. `truth` and `check` are those of `walk_logits`.
    """
    rows_of_walks: list[Rows] = [{} for _ in walks]

    def read(rows: WalkRows, logits: torch.Tensor, control: torch.Tensor) -> None:
        _keep_rows(walks, rows_of_walks, rows, logits, control)

    walk_logits(
        hf, {at: (walk.token_ids, walk.wanted) for at, walk in enumerate(walks)}, read, truth=truth, check=check
    )
    return rows_of_walks


def walk_logits(
    hf: HFModel,
    walks: Mapping[int, tuple[Sequence[int], Collection[int]]],
    read: ReadRows,
    *,
    truth: str = "auto",
    check: Callable[[], None] | None = None,
    cache: Rounding | None = None,
) -> None:
    """Run truth and control over all walks, and show the logits of some positions of each.

    Args:
        hf: the model in the server's dtype.
        walks: token ids and positions by a number.
        read: is given rows as pairs of a walk's number and a position, their logits [R, V] float64 by truth, and
            by control; a few rows at a time.
        truth: `float64`, `float32` or `auto`.
        check: called at every operation; what it raises ends the run.
        cache: what becomes of keys and values before attention reads them; None: nothing.
    """
    operations = hf.graph.operations if cache is not None else ()
    requests = [
        RequestInfo(id=at, token_ids=list(token_ids), prompt_length=len(token_ids))
        for at, (token_ids, positions) in walks.items()
        if positions
    ]
    requests.sort(key=lambda request: len(request.token_ids))  # the less is padded
    for group in batch_requests(hf, requests):
        positions = {request.id: walks[request.id][1] for request in group}
        reader = _Reader(
            tap=hf.graph.logits,
            longest=max(len(request.token_ids) for request in group),
            members=[(number, frozenset(wanted)) for number, wanted in positions.items()],
            read=read,
            check=check or (lambda: None),
            cached=frozenset(operation.inputs[0] for operation in operations if operation.kind is Kind.CACHE),
            cache=cache,
        )
        wanted = sorted(set().union(*positions.values()))
        run_pair(hf, padded(group), reader, truth_dtype=truth_dtype(truth, hf.dtype), logit_positions=wanted)


@dataclass(slots=True, kw_only=True)
class _Reader:
    """Shows what is wanted of the logits of a group of walks."""

    tap: str
    longest: int
    members: Sequence[tuple[int, frozenset[int]]]
    """Number and wanted positions of each walk of the group."""
    read: ReadRows
    check: Callable[[], None]
    cached: Collection[str]
    """Taps whose values attention reads from the cache."""
    cache: Rounding | None
    _control: torch.Tensor | None = field(default=None)

    def control(self, value: Value) -> torch.Tensor | None:
        """See `PairObserver.control`."""
        self.check()
        if value.operation.tap == self.tap:
            self._control = value.rows.clone()
        return self._as_cached(value)

    def truth(self, value: Value) -> torch.Tensor | None:
        """See `PairObserver.truth`."""
        self.check()
        if value.operation.tap == self.tap:
            self._show(value)
        return self._as_cached(value)

    def _as_cached(self, value: Value) -> torch.Tensor | None:
        return self.cache(value.rows) if self.cache is not None and value.operation.tap in self.cached else None

    def _show(self, value: Value) -> None:
        assert self._control is not None, "of each part the control runs first"
        wanted = self._wanted_rows(value)
        for begin in range(0, len(wanted), _BLOCK_ROWS):
            block = wanted[begin : begin + _BLOCK_ROWS]
            index = torch.tensor([row for row, _, _ in block], device=value.rows.device)
            rows = [(walk, position) for _, walk, position in block]
            self.read(rows, value.rows[index].to(torch.float64), self._control[index].to(torch.float64))
        self._control = None

    def part_begins(self, call: PartCall) -> None:
        """See `PairObserver.part_begins`."""

    def part_done(self) -> None:
        """See `PairObserver.part_done`: nothing here needs weights."""

    def _wanted_rows(self, value: Value) -> list[tuple[int, int, int]]:
        """Return (row, walk, position) of all rows that are wanted."""
        places = range(len(value.rows)) if value.places is None else value.places.tolist()
        rows = []
        for row, place in enumerate(places):
            at, position = divmod(place, self.longest)
            number, wanted = self.members[at]
            if position in wanted:
                rows.append((row, number, position))
        return rows


def _keep_rows(
    walks: Sequence[Walk], rows_of_walks: list[Rows], rows: WalkRows, logits: torch.Tensor, control: torch.Tensor
) -> None:
    noise = (control - logits).abs().amax(dim=-1).tolist()
    resolution = (torch.finfo(torch.float32).eps * logits.abs().amax(dim=-1)).tolist()
    num_top = max(walks[walk].num_top for walk, _ in rows)
    top = logits.topk(min(num_top, logits.shape[-1]), dim=-1).indices.tolist()
    logprobs, controls = logits.log_softmax(dim=-1), control.log_softmax(dim=-1)
    for at, (walk, position) in enumerate(rows):
        ids = sorted(walks[walk].wanted[position].union(top[at]))
        columns = torch.tensor(ids, device=logits.device)
        rows_of_walks[walk][position] = TruthRow(
            top=tuple(top[at]),
            logprobs=dict(zip(ids, logprobs[at, columns].tolist(), strict=True)),
            control=dict(zip(ids, controls[at, columns].tolist(), strict=True)),
            logit_noise=noise[at],
            resolution=resolution[at],
        )


def eos_of(hf: HFModel) -> frozenset[int]:
    """Return the tokens that end a text of a model; see `eos_ids`."""
    return eos_ids(hf.folder, getattr(hf.config, "eos_token_id", None))


def eos_ids(folder: Path, config: object) -> frozenset[int]:
    """Return the tokens that end a text: those of generation_config.json, else those of the model's config.

    `config` is the `eos_token_id` of the model's config: a number, a list, or None.
    """
    from transformers import GenerationConfig

    try:
        token_ids = GenerationConfig.from_pretrained(folder, local_files_only=True).eos_token_id
    except (OSError, ValueError):
        token_ids = None
    token_ids = config if token_ids is None else token_ids
    return frozenset(token_ids if isinstance(token_ids, list) else [] if token_ids is None else [token_ids])


def plain_ids(hf: HFModel, eos: Set[int]) -> list[int]:
    """Return the tokens to make prompts of: no special ones, which servers may treat differently."""
    special, size = set(eos), hf.vocab_size
    if hf.checkpoint.has_tokenizer:
        tokenizer = hf.checkpoint.tokenizer.hf
        special, size = special | set(tokenizer.all_special_ids), min(size, len(tokenizer))
    return [token_id for token_id in range(size) if token_id not in special]


Progress = Callable[[int, int], None]


class BackgroundTruth:
    """Runs truth and control along walks in the order in which they are added. Use it as a context manager."""

    def __init__(self, hf: HFModel, *, truth: str, is_server_here: bool) -> None:
        """Prepare the thread.

        Args:
            hf: the model in the server's dtype.
            truth: `float64`, `float32` or `auto`.
            is_server_here: whether the server may want this machine's cores: the forwards get one of them then, until
                the server is done.
        """
        self._hf, self._truth, self._is_server_here = hf, truth, is_server_here
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="truth")
        self._blocks: list[Future[dict[int, Rows]]] = []
        self._is_cancelled, self._is_alone = threading.Event(), threading.Event()
        self._num_added = 0
        self.seconds = 0.0
        """In forwards, until now."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_cancelled.set()
        self._pool.shutdown(cancel_futures=True)

    def add(self, walks: Mapping[int, Walk]) -> None:
        """Add walks by the number of their prompt; they are run as one batch. Raises what a forward raised before."""
        for block in self._blocks:
            if block.done():
                block.result()
        self._num_added += len(walks)
        self._blocks.append(self._pool.submit(self._run, walks))

    def finish(self, progress: Progress | None = None) -> dict[int, Rows]:
        """Wait for all that was added, and return the rows by prompt and position; raises what a forward raised."""
        self._is_alone.set()
        rows: dict[int, Rows] = {}
        for block in self._blocks:
            rows |= block.result()
            if progress is not None:
                progress(len(rows), self._num_added)
        return rows

    def _run(self, walks: Mapping[int, Walk]) -> dict[int, Rows]:
        begin = time.perf_counter()
        try:
            with self._threads():
                rows = walk_truth(self._hf, list(walks.values()), truth=self._truth, check=self._check)
        except _CancelledError:
            return {}
        self.seconds += time.perf_counter() - begin
        return dict(zip(walks, rows, strict=True))

    def _threads(self) -> AbstractContextManager[None]:
        if self._is_server_here and not self._is_alone.is_set():
            return one_thread()
        return limit_threads(int(getattr(self._hf.config, "hidden_size", 0)))

    def _check(self) -> None:
        """End the forward at its next operation if nobody needs its result any more."""
        if self._is_cancelled.is_set():
            raise _CancelledError


class _CancelledError(BaseException):
    """Ends a forward. The model's code does not catch it: it is no Exception."""
