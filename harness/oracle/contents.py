"""The tokens and operations of a golden or recording: pieces of text, and the likeliest next tokens by its logits."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from harness.base.progress import quiet_transformers
from harness.errors import HarnessError
from harness.formats.checkpoint import Checkpoint, resolve
from harness.formats.recording import Recording, RequestInfo
from harness.formats.values import Row, open_source
from harness.oracle.golden import Golden

NUM_LIKELIEST, MAX_TOKENS = 5, 64
"""Likeliest tokens at each position, and positions of each request, that are listed."""


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
        tap, logits = golden.graph.logits, dict[Row, torch.Tensor]()
        is_vector = {entry.name: len(entry.shape) == 1 for entry in recording.manifest.taps}.get(tap, False)
        if is_vector and tap not in golden.sketched and source.rows is not None:  # other producers write any shape
            rows = source.tensor(tap)
            logits = {row: rows[place] for row, place in source.rows(tap).items()}
        piece = _pieces(recording.manifest.model.id)
        known = {} if golden.info is None else golden.graph.by_tap
        kinds = {tap: {"kind": op.kind.value, "inputs": list(op.inputs)} for tap, op in known.items()}
        return {
            **tables,
            "taps": [{"name": row["name"], **kinds.get(row["name"], {}), **row} for row in tables["taps"]],
            "tokens": [row for request in requests for row in _tokens(request, piece, logits)],
            "num_tokens_left_out": sum(max(0, len(request.token_ids) - MAX_TOKENS) for request in requests),
        }


def _tokens(
    request: RequestInfo, piece: Callable[[int], str | None], logits: Mapping[Row, torch.Tensor]
) -> Iterator[dict[str, Any]]:
    following = [*request.token_ids[1:], None]
    for position, token in enumerate(request.token_ids[:MAX_TOKENS]):
        row: dict[str, Any] = {"request": request.id, "position": position, "id": token, "piece": piece(token)}
        if (request.id, position) in logits:
            log_probs = logits[request.id, position].double().log_softmax(-1)
            best, after = log_probs.topk(min(NUM_LIKELIEST, len(log_probs))), following[position]
            pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
            row["likeliest"] = [{"id": index, "piece": piece(index), "log_prob": value} for index, value in pairs]
            row["log_prob"] = None if after is None or after >= len(log_probs) else float(log_probs[after])
        yield row


def _pieces(model: str) -> Callable[[int], str | None]:
    """Return what gives the entry of a token in the vocabulary; None for all where the checkpoint is gone."""
    with suppress(HarnessError), quiet_transformers():
        hf: Any = Checkpoint(resolve(model, local_files_only=True)).tokenizer.hf
        return lambda token: hf.convert_ids_to_tokens(token) if 0 <= token < len(hf) else None
    return lambda _token: None
