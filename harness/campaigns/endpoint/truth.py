"""HF's truth for the tokens that a server chose, and HF's own noise in the server's dtype.

The truth is forced along the server's own tokens, so a near-tie that fell the other way costs one token and no more.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from harness.formats.recording import RequestInfo
from harness.oracle.batching import batch_requests, padded
from harness.oracle.model import HFModel
from harness.oracle.paired import PartCall, Value, run_pair
from harness.oracle.precision import truth_dtype

_BLOCK_ROWS = 32
"""Rows whose logits are in memory in float64 at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Walk:
    """One request as the server went through it, and what is asked of the truth along the way."""

    token_ids: tuple[int, ...]
    """Prompt and continuation."""
    wanted: Mapping[int, frozenset[int]]
    """Token ids by the position whose logits give their probability: the one before theirs."""
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


def walk_truth(
    hf: HFModel,
    walks: Sequence[Walk],
    *,
    truth: str = "auto",
    check: Callable[[], None] | None = None,
) -> list[Rows]:
    """Run truth and control over all walks.

    Args:
        hf: the model in the server's dtype.
        walks: at least one.
        truth: `float64`, `float32` or `auto`.
        check: called at every operation; what it raises ends the run.
    """
    found: list[Rows] = [{} for _ in walks]
    requests = [
        RequestInfo(id=at, token_ids=list(walk.token_ids), prompt_length=len(walk.token_ids))
        for at, walk in enumerate(walks)
        if walk.wanted
    ]
    requests.sort(key=lambda request: len(request.token_ids))  # the less is padded
    for group in batch_requests(hf, requests):
        positions = sorted({position for request in group for position in walks[request.id].wanted})
        reader = _Reader(hf, walks, [request.id for request in group], found, check or (lambda: None))
        ids = padded(group)
        run_pair(hf, ids, reader, truth_dtype=truth_dtype(truth, hf.dtype), logit_positions=positions)
    return found


@dataclass(slots=True)
class _Reader:
    """Keeps what is wanted of the logits of a group of walks."""

    hf: HFModel
    walks: Sequence[Walk]
    members: Sequence[int]
    found: list[Rows]
    check: Callable[[], None]
    _control: torch.Tensor | None = field(default=None)

    def control(self, value: Value) -> None:
        """See `PairObserver.control`."""
        self.check()
        if value.operation.tap == self.hf.graph.logits:
            self._control = value.rows.clone()

    def truth(self, value: Value) -> None:
        """See `PairObserver.truth`."""
        self.check()
        if value.operation.tap != self.hf.graph.logits:
            return
        assert self._control is not None, "of each part the control runs first"
        rows = self._wanted_rows(value)
        for begin in range(0, len(rows), _BLOCK_ROWS):
            self._read(rows[begin : begin + _BLOCK_ROWS], value.rows, self._control)
        self._control = None

    def part_begins(self, call: PartCall) -> None:
        """See `PairObserver.part_begins`."""

    def part_done(self) -> None:
        """See `PairObserver.part_done`: nothing here needs weights."""

    def _wanted_rows(self, value: Value) -> list[tuple[int, int, int]]:
        """Return (row, walk, position) of all rows that are wanted."""
        longest = max(len(self.walks[walk].token_ids) for walk in self.members)
        places = range(len(value.rows)) if value.places is None else value.places.tolist()
        rows = []
        for row, place in enumerate(places):
            member, position = divmod(place, longest)
            if position in self.walks[self.members[member]].wanted:
                rows.append((row, self.members[member], position))
        return rows

    def _read(self, rows: Sequence[tuple[int, int, int]], truth: torch.Tensor, control: torch.Tensor) -> None:
        index = torch.tensor([row for row, _, _ in rows], device=truth.device)
        logits, own = truth[index].to(torch.float64), control[index].to(torch.float64)
        noise = (own - logits).abs().amax(dim=-1).tolist()
        resolution = (torch.finfo(torch.float32).eps * logits.abs().amax(dim=-1)).tolist()
        num_top = max(self.walks[member].num_top for member in self.members)
        top = logits.topk(min(num_top, logits.shape[-1]), dim=-1).indices.tolist()
        logprobs, controls = logits.log_softmax(dim=-1), own.log_softmax(dim=-1)
        for at, (_, walk, position) in enumerate(rows):
            ids = sorted(self.walks[walk].wanted[position].union(top[at]))
            columns = torch.tensor(ids, device=truth.device)
            self.found[walk][position] = TruthRow(
                top=tuple(top[at]),
                logprobs=dict(zip(ids, logprobs[at, columns].tolist(), strict=True)),
                control=dict(zip(ids, controls[at, columns].tolist(), strict=True)),
                logit_noise=noise[at],
                resolution=resolution[at],
            )
