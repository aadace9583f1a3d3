"""A comparison of a trainer with a rollout engine, from a log and what else is at hand."""

import time
from collections.abc import Sequence

import torch

from harness.base.progress import Progress
from harness.errors import Code, HarnessError
from harness.extensions.rollout.causes import alignment_causes, all_causes, meaning_causes
from harness.extensions.rollout.format import Rollout, Rollouts
from harness.extensions.rollout.forward import Forwards
from harness.extensions.rollout.lanes import Places
from harness.extensions.rollout.operations import part_terms
from harness.extensions.rollout.request import Request
from harness.extensions.rollout.result import RolloutResult
from harness.extensions.rollout.setting import Setting, TermKind
from harness.extensions.rollout.side import explain, possible_meanings
from harness.extensions.rollout.sides import logged_experts, make_sides
from harness.extensions.rollout.summary import Explained, summarise
from harness.extensions.rollout.tensors import load_tensors, other_tensors
from harness.extensions.rollout.waterfall import waterfall
from harness.oracle.model import HFModel, load_model


def compare_rollouts(rollouts: Rollouts, request: Request, *, progress: Progress | None = None) -> RolloutResult:
    """Split the gap between trainer and engine in terms.

    Args:
        rollouts: the log.
        request: what is compared.
        progress: told what is being done.

    Raises:
        HarnessError: TOKEN_OUTSIDE_VOCABULARY, PROMPT_TOO_LONG, ROLLOUT_MISALIGNED, ORACLE_NOT_FINITE; or as a side at
            hand raises.
    """
    begin = time.perf_counter()
    explained = _explain(rollouts, request, progress) if rollouts.counts.compared else None
    return summarise(rollouts, request, explained, seconds=time.perf_counter() - begin)


def _explain(rollouts: Rollouts, request: Request, progress: Progress | None) -> Explained:
    dtype = getattr(torch, request.dtype)
    hf = load_model(request.checkpoint, dtype=dtype, device=request.device, stays=True)
    rows = list(rollouts.rows)
    _check_tokens(rows, hf, rollouts.name)
    head = None if request.head in (None, request.dtype) else getattr(torch, request.head)
    forwards = Forwards(hf, Places(rows), truth=request.truth, head=head)
    _check_finite(forwards)
    logged = logged_experts(rollouts, forwards)
    trainer, engine = make_sides(rollouts, request, forwards, logged)
    sides = [side for side in (trainer, engine) if side is not None]
    previous = None if request.previous is None else load_tensors(request.previous, hf, "--previous")
    stale = {} if previous is None else other_tensors(hf, previous)
    causes = [*alignment_causes(), *all_causes(hf, rows, stale, is_wide_head=head is not None)]
    meanings = list(meaning_causes(rows))
    for at, side in enumerate(sides):
        if progress is not None:
            progress(f"explaining the {side.name}", at, len(sides))
        # a head that is seen is an operation
        open_causes = [cause for cause in causes if side.values is None or cause.kind is not TermKind.HEAD]
        explain(side, forwards, open_causes, possible_meanings(side, forwards, meanings))
    parts = {side.name: part_terms(forwards, side, side.values) for side in sides if side.values is not None}
    terms, remedied = waterfall(trainer, engine, forwards, parts, expects_replay=logged is not None)
    return Explained(forwards=forwards, sides=sides, parts=parts, terms=terms, remedied=remedied)


def _check_tokens(rows: Sequence[Rollout], hf: HFModel, name: str) -> None:
    for row in rows:
        where = f"{name}: row {row.row}"
        outside = next((token for token in row.tokens if not 0 <= token < hf.vocab_size), None)
        if outside is not None:
            raise HarnessError(
                Code.TOKEN_OUTSIDE_VOCABULARY,
                "a token is outside of the model's vocabulary",
                where=where,
                expected=f"0 to {hf.vocab_size - 1}",
                actual=outside,
                hint="give --model the model that was trained",
            )
        if hf.max_positions is not None and len(row.tokens) > hf.max_positions:
            what, expected = "the row does not fit into the model's positions", f"at most {hf.max_positions} tokens"
            actual = f"{len(row.tokens)} tokens"
            raise HarnessError(Code.PROMPT_TOO_LONG, what, where=where, expected=expected, actual=actual)


def _check_finite(forwards: Forwards) -> None:
    """Refuse a model that computes NaN for these tokens: every comparison with it would be meaningless."""
    for name, run in (("high precision", forwards.truth), (str(forwards.hf.dtype), forwards.control)):
        odd = (~run(Setting()).isfinite()).nonzero()
        if len(odd):
            row, position = forwards.places.place(int(forwards.places.compared[int(odd[0])]))
            raise HarnessError(
                Code.ORACLE_NOT_FINITE,
                f"HF itself is not finite in {name}: no side can be judged",
                where=f"row {row.row}, token {position}",
                hint="give --dtype bfloat16; if that fails too, look for NaN in the weights",
            )
