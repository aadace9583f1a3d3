"""Whether the peers generate the same tokens: two engines that compute different things cannot be compared.

Random weights leave many near ties, and rounding decides those. So where two engines part, the logits of both tokens
are looked up in float32, once for each request, at the first token that differs: what follows has another past.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from harness.errors import Code, HarnessError
from harness.extensions.bench.peer import OURS, BenchWorkload

TIE_STDS = {"float32": 0.01, "bfloat16": 0.2, "float16": 0.05}
"""Largest distance from the likeliest token, in standard deviations of the row's logits, that rounding may hide."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenDivergence:
    """The first token at which a peer differs from the engine, in one request."""

    peer: str
    workload: str
    request: int
    token: int
    """Index among the generated tokens."""
    ours: int
    theirs: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """The agreement of one peer with the engine."""

    peer: str
    num_requests: int
    num_ties: int
    """Requests that part at a tie."""
    worst_tie_stds: float
    """Distance from the likeliest token of the farther of the two, in standard deviations of the logits; 0: no tie."""


def find_divergences(
    workload: BenchWorkload, tokens: Mapping[str, Sequence[Sequence[int]]], engine: str = OURS
) -> list[TokenDivergence]:
    """Return the first difference of each request and peer from the engine; `tokens` has one list a request for each.

    Raises:
        HarnessError: PEER_TOKENS_DIFFER: a peer has another number of tokens than was asked for.
    """
    for peer, lists in tokens.items():
        actual = [len(token_ids) for token_ids in lists]
        if actual != list(workload.output_lens):
            raise HarnessError(
                Code.PEER_TOKENS_DIFFER, f"{peer} generates another number of tokens than it was asked for",
                where=workload.name, expected=list(workload.output_lens), actual=actual,
            )  # fmt: skip
    return [
        TokenDivergence(
            peer=peer, workload=workload.name, request=request, token=token, ours=ours[token], theirs=theirs[token]
        )
        for peer, lists in tokens.items()
        for request, (ours, theirs) in enumerate(zip(tokens[engine], lists, strict=True))
        for token in _first_difference(ours, theirs)
    ]


def _first_difference(ours: Sequence[int], theirs: Sequence[int]) -> Iterable[int]:
    pairs = enumerate(zip(ours, theirs, strict=True))
    return [index for index, (our_token, their_token) in pairs if our_token != their_token][:1]


@torch.no_grad()
def judge_divergences(
    divergences: Sequence[TokenDivergence],
    workload: BenchWorkload,
    ours: Sequence[Sequence[int]],
    model: Any,
    *,
    dtype: str,
    engine: str = OURS,
) -> dict[str, list[float]]:
    """Return for each peer the distances of its ties; `model` is HuggingFace's in float32, `ours` our tokens.

    Raises:
        HarnessError: PEER_TOKENS_DIFFER: two tokens are too far apart for a tie.
    """
    ties: dict[str, list[float]] = {}
    for divergence in divergences:
        past = [*workload.prompts[divergence.request], *ours[divergence.request][: divergence.token]]
        logits_V = model(torch.tensor([past], device=model.device), logits_to_keep=1).logits[0, -1].double()
        distances = [
            float((logits_V.max() - logits_V[token]) / logits_V.std()) for token in (divergence.ours, divergence.theirs)
        ]
        if max(distances) > TIE_STDS[dtype]:
            _refuse(divergence, distances, TIE_STDS[dtype], engine)
        ties.setdefault(divergence.peer, []).append(max(distances))
    return ties


def _refuse(divergence: TokenDivergence, distances: list[float], limit: float, engine: str) -> None:
    ours, theirs = distances
    name = "the reference engine" if engine == OURS else engine
    here, there = (
        f"{size:.3g} for token {token}" for size, token in ((ours, divergence.ours), (theirs, divergence.theirs))
    )
    raise HarnessError(
        Code.PEER_TOKENS_DIFFER,
        f"{divergence.peer} and {name} generate different tokens",
        where=f"{divergence.workload}, request {divergence.request}, token {divergence.token}",
        expected=f"logits within {limit} standard deviations of the largest",
        actual=f"{divergence.peer} {there}, {engine} {here}",
        hint="harness check" if engine == OURS else f"harness check --engine {engine}",
    )
