"""The tokens and operations of a golden or recording: pieces of text, and the likeliest next tokens by its logits."""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from harness.base.progress import quiet_transformers
from harness.errors import HarnessError
from harness.formats.checkpoint import Checkpoint, resolve
from harness.formats.recording import Recording, RequestInfo
from harness.formats.taps import Operation
from harness.formats.values import Row, open_source
from harness.oracle.golden import Golden

NUM_LIKELIEST = 5
MAX_TOKENS = 64
"""Tokens of each request that are listed."""


def with_contents(tables: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tables of a golden or recording (`recording_tables`) with its tokens.

    `tokens` are the first of each request: request, position, id and piece (null without the checkpoint's tokenizer),
    and for rows with logits the `likeliest` next tokens and the `log_prob` of the token that follows. The `taps` of a
    golden get their kind and inputs.

    Raises:
        HarnessError: as `Recording.open` and `Golden`.
    """
    path = Path(tables["path"])
    with Recording.open(path, verify=False) as recording:
        golden, requests, source = Golden(recording), recording.manifest.requests, open_source(path)
        pieces, tap = _Pieces(recording.manifest.model.id), golden.graph.logits
        logits, places = torch.empty(0), dict[Row, int]()
        if tap in source.names and tap not in golden.sketched and source.rows is not None:
            logits, places = source.tensor(tap), dict(source.rows(tap))
        operations = {} if golden.info is None else golden.graph.by_tap
        taps = [_with_operation(row, operations.get(row["name"])) for row in tables["taps"]]
        tokens = [row for request in requests for row in _tokens(request, pieces, logits, places)]
        left_out = sum(max(0, len(request.token_ids) - MAX_TOKENS) for request in requests)
        return {**tables, "taps": taps, "tokens": tokens, "num_tokens_left_out": left_out}


def _with_operation(row: Mapping[str, Any], operation: Operation | None) -> dict[str, Any]:
    if operation is None:
        return dict(row)
    return {"name": row["name"], "kind": operation.kind.value, "inputs": list(operation.inputs), **row}


def _tokens(
    request: RequestInfo, pieces: "_Pieces", logits: torch.Tensor, places: Mapping[Row, int]
) -> Iterator[dict[str, Any]]:
    for position, token in enumerate(request.token_ids[:MAX_TOKENS]):
        row: dict[str, Any] = {"request": request.id, "position": position, "id": token, "piece": pieces.of(token)}
        place = places.get((request.id, position))
        if place is not None:
            log_probs = logits[place].double().log_softmax(-1)
            best = log_probs.topk(min(NUM_LIKELIEST, len(log_probs)))
            following = request.token_ids[position + 1 : position + 2]
            row["likeliest"] = [
                {"id": index, "piece": pieces.of(index), "log_prob": value}
                for value, index in zip(best.values.tolist(), best.indices.tolist(), strict=True)
            ]
            row["log_prob"] = float(log_probs[following[0]]) if following and following[0] < len(log_probs) else None
        yield row


class _Pieces:
    """The vocabulary of a checkpoint that may be gone since, or have no tokenizer."""

    def __init__(self, model: str) -> None:
        self._hf: Any = None
        with suppress(HarnessError), quiet_transformers():  # without pieces, ids are shown
            self._hf = Checkpoint(resolve(model, local_files_only=True)).tokenizer.hf

    def of(self, token: int) -> str | None:
        """Return the piece of a token, as its vocabulary writes it."""
        if self._hf is None or not 0 <= token < len(self._hf):
            return None
        piece: str | None = self._hf.convert_ids_to_tokens(token)
        return piece
