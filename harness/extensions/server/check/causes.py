"""The change of HF's model under which the log probabilities of a server come out.

A row holds the log probabilities of one new token and of the likeliest ones in its place.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from harness.extensions.server.check.requests import ScheduledRequests
from harness.extensions.server.completion import Completion
from harness.extensions.server.logprobs import is_number
from harness.extensions.server.truth import Rows as TruthRows
from harness.extensions.server.truth import TruthRow
from harness.formats.recording import Manifest, ModelInfo, Producer, Recording, RequestInfo
from harness.judge.compare.align import Rows
from harness.judge.explain.core.rerun import Budget
from harness.judge.explain.whole_model import ModelTrials, RequestRows, model_held, those_to_run
from harness.oracle.model import HFModel
from harness.report.check.table import count
from harness.results.check import Explanation

_WRONG = 3.0
"""Times HF's own error from which a row takes part."""
_Values = tuple[TruthRow, dict[int, float]]
"""HF's row, and the server's log probabilities by token, the new token first."""


def explain_answers(
    hf: HFModel, run: ScheduledRequests, truth: Mapping[int, TruthRows], *, seconds: float
) -> Explanation | None:
    """Return the change that gives a server's log probabilities; None where most rows are right: it changes them all.

    Args:
        hf: the model in the server's dtype.
        run: what the server was sent, with the answers along which the truth goes.
        truth: HF's rows by the number of the request and the position.
        seconds: time for the trials.
    """
    answers = {sent.request: (sent.prompt, sent.result) for sent in run.sent if isinstance(sent.result, Completion)}
    values = {at: dict(_values(prompt, answer, truth[at])) for at, (prompt, answer) in answers.items()}
    all_rows = [row for rows in values.values() for row in rows.values()]
    width = min((len(logprobs) for _, logprobs in all_rows), default=0)
    compared = [
        _compared(at, [*prompt, *answer.token_ids], values[at], width)
        for at, (prompt, answer) in answers.items()
        if values[at]
    ]
    requests = [rows for item in compared if (rows := item.rows(item.is_wrong)) is not None]
    right = [rows for item in compared if (rows := item.rows(~item.is_wrong)) is not None]
    num_wrong = sum(len(item.rows) for item in requests)
    if not num_wrong or 2 * num_wrong < len(all_rows):
        return None
    chosen = those_to_run(requests)
    with model_held(hf):
        budget, dtype = Budget(seconds), str(hf.dtype).removeprefix("torch.")
        budget.begin_explanation()
        trials = ModelTrials.of(chosen, right, hf, _recording(chosen, dtype), hf.dtype, budget)
        where = f"{num_wrong:,} of {count(len(all_rows), 'row')}" if num_wrong < len(all_rows) else "every row"
        return None if trials is None else trials.explanation(where)


def _values(prompt: Sequence[int], answer: Completion, rows: TruthRows) -> Iterator[tuple[int, _Values]]:
    """Yield the rows that can be compared, by position."""
    for at, (token, logprobs) in enumerate(zip(answer.token_ids, answer.logprobs or (), strict=False)):
        row = rows.get(len(prompt) + at - 1)
        if row is None:
            return
        known = {item: value for item, value in logprobs.items() if is_number(value) and item in row.logprobs}
        if token in known:
            likeliest = sorted(known, key=lambda item: (item != token, -row.logprobs[item]))
            yield len(prompt) + at - 1, (row, {item: known[item] for item in likeliest})


@dataclass(frozen=True, slots=True, kw_only=True)
class _Compared:
    """The rows of one answer that can be compared, [R, W]."""

    number: int
    token_ids: Sequence[int]
    positions: torch.Tensor
    """[R] int64."""
    tokens: torch.Tensor
    """[R, W] int64: those whose log probabilities the rows hold."""
    actual: torch.Tensor
    noise: torch.Tensor
    """[R] HF's own error, relative to the row."""
    is_wrong: torch.Tensor
    """[R] bool: off by more than HF's own error."""

    def rows(self, chosen: torch.Tensor) -> RequestRows | None:
        """Return some of the rows; None for no row."""
        if not bool(chosen.any()):
            return None
        position, tokens = self.positions[chosen], self.tokens[chosen]
        return RequestRows(
            token_ids=self.token_ids[: int(position.max()) + 1],
            rows=Rows(
                request=torch.full_like(position, self.number), position=position, step=torch.zeros_like(position)
            ),
            actual=self.actual[chosen],
            noise=self.noise[chosen],
            shown=lambda logits: logits.log_softmax(dim=1).gather(1, tokens),
        )


def _compared(number: int, token_ids: Sequence[int], values: Mapping[int, _Values], width: int) -> _Compared:
    rows, tables = zip(*values.values(), strict=True)
    ids = [list(logprobs)[:width] for logprobs in tables]
    actual, exact = _picked(tables, ids), _picked([row.logprobs for row in rows], ids)
    floor = torch.tensor([row.resolution for row in rows], dtype=torch.float64)
    noise = torch.maximum((_picked([row.control for row in rows], ids) - exact).norm(dim=1), floor)
    noise = noise.clamp(min=float(noise.square().mean().sqrt()))
    return _Compared(
        number=number,
        token_ids=token_ids,
        positions=torch.tensor(list(values)),
        tokens=torch.tensor(ids),
        actual=actual,
        noise=noise / exact.norm(dim=1),
        is_wrong=(actual - exact).norm(dim=1) > _WRONG * noise,
    )


def _picked(tables: Sequence[Mapping[int, float]], ids: Sequence[Sequence[int]]) -> torch.Tensor:
    """Return the log probabilities of some tokens of each row, [n, W] float64."""
    picked = [[table[token] for token in tokens] for table, tokens in zip(tables, ids, strict=True)]
    return torch.tensor(picked, dtype=torch.float64)


def _recording(requests: Sequence[RequestRows], dtype: str) -> Recording:
    """Return a recording of the requests in which no tap was seen."""
    infos = [
        RequestInfo(id=int(item.rows.request[0]), token_ids=list(item.token_ids), prompt_length=1) for item in requests
    ]
    manifest = Manifest(
        schema_version=1, producer=Producer(name="server", version=""), model=ModelInfo(id=""), dtype=dtype,
        device="cpu", requests=infos, steps=[], taps=[],
    )  # fmt: skip
    return Recording(Path(), manifest, ())
