"""What a side may have computed with, and the known causes of a gap, each a change to that setting."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

import torch

from harness.extensions.rollout.format import Rollout, Sampling
from harness.oracle.model import HFModel


class TermKind(StrEnum):
    """Terms of the gap, in the order in which they are applied to the truth."""

    TOKENS = "tokens"
    POSITIONS = "positions"
    WEIGHTS = "weights"
    ROUTING = "routing"
    CACHE = "cache"
    HEAD = "head"
    OPERATIONS = "operations"
    MEANING = "meaning"
    ALIGNMENT = "alignment"
    REST = "rest"


@dataclass(frozen=True, slots=True, kw_only=True)
class Meaning:
    """The distribution that a log probability is of."""

    temperature: float | None = None
    """None for the one that the row was sampled with."""
    is_truncated: bool = False
    """Whether it is normalised over the tokens that top-p, top-k and min-p of the row leave."""

    def __str__(self) -> str:
        """Name it, as the field does."""
        name = "the row's temperature" if self.temperature is None else f"temperature {self.temperature:g}"
        if self.temperature == 1 and not self.is_truncated:
            return "raw (temperature 1, no truncation)"
        return f"{name}, {'renormalised over the truncated distribution' if self.is_truncated else 'no truncation'}"


@dataclass(frozen=True, slots=True, eq=False)
class OtherWeights:
    """Tensors in the place of the model's, by HF's names."""

    name: str
    tensors: Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class ForcedExperts:
    """Routed experts of all tokens, row after row; -1 where none are known: the truth chooses by itself there."""

    name: str
    ids: torch.Tensor
    """[tokens, layers * k] int64."""


@dataclass(frozen=True, slots=True, eq=False)
class PutBack:
    """Recorded values that are put back: those of the leading operations of the graph."""

    values: Mapping[str, torch.Tensor]
    """[tokens, ...] by source; NaN, or -1 for a choice, where nothing was recorded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """How the truth is run. Two runs with the same setting give the same values."""

    drops_first: bool = False
    """The first token, a begin-of-text token, is not there."""
    added_first: int | None = None
    """A token before the first one."""
    is_packed: bool = False
    """Rows follow one another in one sequence, and each sees those before it."""
    restarts: bool = False
    """Of packed rows: positions begin at 0 in each row, though it sees those before it."""
    weights: OtherWeights | None = None
    experts: ForcedExperts | None = None
    cache: torch.dtype | None = None
    """Keys and values are rounded to it."""
    truncates: bool = False
    """Whether they are rounded towards zero: vLLM's CPU kernels write eight bits so."""
    caches_prompt: bool = True
    """Whether the prompt's own rows read rounded keys and values, too."""
    head: torch.dtype | None = None
    """Logits are rounded to it; None for what the run's dtype gives."""
    cut: PutBack | None = field(default=None)
    meaning: Meaning = Meaning()
    shift: int = 0
    """A token's value stands so many tokens later in the column."""

    @property
    def runs_plainly(self) -> bool:
        """Whether the model's operations are run as they are, on whatever tokens and weights."""
        return self.experts is None and self.cache is None and self.head is None and self.cut is None


def token_logprobs(
    logits: torch.Tensor, tokens: torch.Tensor, sampling: Sequence[Sampling], meaning: Meaning
) -> torch.Tensor:
    """Return the log probability of each row's token, [rows] float64.

    Args:
        logits: [rows, vocabulary] float64.
        tokens: [rows] int64.
        sampling: of each row.
        meaning: of the log probability.
    """
    temperatures = [item.temperature if meaning.temperature is None else meaning.temperature for item in sampling]
    scaled = logits / torch.tensor(temperatures, dtype=logits.dtype, device=logits.device)[:, None]
    if meaning.is_truncated:
        scaled = scaled.masked_fill(~_left(scaled, tokens, sampling), -torch.inf)
    return scaled.log_softmax(dim=-1).gather(1, tokens[:, None])[:, 0]


def _left(logits: torch.Tensor, tokens: torch.Tensor, sampling: Sequence[Sampling]) -> torch.Tensor:
    """[rows, vocabulary] bool: what can be chosen. The token that was chosen is there, if only by a rounding."""

    def column(values: Sequence[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=logits.dtype, device=logits.device)[:, None]

    order = logits.argsort(dim=-1, descending=True)
    ranked = logits.gather(1, order)
    least = column([item.min_p for item in sampling]).log() + ranked[:, :1]
    most = column([item.top_k or logits.shape[1] for item in sampling])
    kept = (ranked >= least) & (torch.arange(logits.shape[1], device=logits.device)[None] < most)
    chances = ranked.masked_fill(~kept, -torch.inf).softmax(dim=-1)
    before = chances.cumsum(dim=-1) - chances
    kept &= before < column([item.top_p for item in sampling])
    kept[:, 0] = True
    left = torch.zeros_like(kept).scatter(1, order, kept)
    return left.scatter(1, tokens[:, None], True)


_TEMPERATURES = tuple(round(0.05 * step, 2) for step in range(2, 41))
"""What people sample with; a temperature that a row names is tried besides."""
_CACHES = {"fp8 (e4m3)": torch.float8_e4m3fn, "fp8 (e5m2)": torch.float8_e5m2, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True, kw_only=True)
class GapCause:
    """One known cause."""

    kind: TermKind
    detail: str
    """What the side did, as a predicate: `no begin-of-text token`."""
    remedy: str
    change: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the setting with the cause."""
    is_fitted: bool = False
    """Whether it has a number that was chosen among many."""

    def added_to(self, setting: Setting) -> Setting:
        """Return the setting with this cause, too; tensors of two causes are both replaced."""
        change = dict(self.change)
        new, old = change.get("weights"), setting.weights
        if new is not None and old is not None:
            change["weights"] = OtherWeights(f"{old.name}, {new.name}", {**old.tensors, **new.tensors})
        return replace(setting, **change)


def weights_cause(hf: HFModel, tensors: Mapping[str, torch.Tensor], name: str) -> GapCause:
    """Return the cause that these tensors are in the place of the model's."""
    parameters = dict(hf.model.named_parameters())
    off = {tensor: _off(parameters[tensor], tensors[tensor]) for tensor in list(tensors)[:3]}
    more = f" and {len(tensors) - 3} more" if len(tensors) > 3 else ""
    shown = ", ".join(f"{key} ({share:.2g} % off)" for key, share in off.items()) + more
    return GapCause(
        kind=TermKind.WEIGHTS,
        detail=f"{name}: {shown}",
        remedy=f"send these tensors again: {', '.join(off)}{more}",
        change={"weights": OtherWeights(name, tensors)},
    )


def _off(expected: torch.Tensor, actual: torch.Tensor) -> float:
    """Return by how much a tensor differs, as percents of its norm."""
    x = expected.detach().float()
    return 100 * float((actual.to(x.device, x.dtype) - x).norm() / x.norm().clamp(min=1e-30))


def routing_cause(experts: ForcedExperts | None) -> GapCause:
    """Return the cause that a side chose these experts; None: it chose by itself, and what is not known."""
    return GapCause(
        kind=TermKind.ROUTING,
        detail=f"experts: {'its own, not those of the log' if experts is None else experts.name}",
        remedy="replay the engine's experts in the trainer",
        change={"experts": experts},
    )


def all_causes(
    hf: HFModel, rows: list[Rollout], stale: Mapping[str, torch.Tensor], *, is_wide_head: bool
) -> Iterator[GapCause]:
    """Yield the causes that can be tried for these rows, but for meanings.

    Args:
        hf: the named model.
        rows: the rollouts.
        stale: tensors of earlier weights that differ from the model's.
        is_wide_head: whether both sides mean to compute their head in float32.
    """
    yield from _tokens(hf, rows)
    if len(rows) > 1:
        for restarts in (False, True):
            where = "restart, attention does not" if restarts else "do not restart"
            yield GapCause(
                kind=TermKind.POSITIONS,
                detail=f"rows of a packed batch see the rows before them: positions {where}",
                remedy="restart position ids at each row of a pack, and keep rows apart in attention (position_ids or "
                "cu_seqlens, no cache)",
                change={"is_packed": True, "restarts": restarts},
            )
    yield from _stale(hf, stale)
    for name, dtype in _CACHES.items():
        if torch.finfo(dtype).eps <= torch.finfo(hf.dtype).eps:
            continue
        ways = [("", True, False), (", read by the response alone", False, False)]
        ways += [(", rounded towards zero", True, True)] if dtype.itemsize == 1 else []
        for how, reads, truncates in ways:
            yield GapCause(
                kind=TermKind.CACHE,
                detail=f"keys and values in {name}{how}",
                remedy="keep the cache in the model's dtype (kv_cache_dtype auto)",
                change={"cache": dtype, "caches_prompt": reads, "truncates": truncates},
            )
    if is_wide_head or hf.dtype == torch.float32:
        yield GapCause(
            kind=TermKind.HEAD,
            detail="logits in bfloat16",
            remedy="compute the head in float32",
            change={"head": torch.bfloat16},
        )


def alignment_causes() -> Iterator[GapCause]:
    """Yield columns that stand one token too late or too early."""
    for shift, name in ((1, "late"), (-1, "early")):
        yield GapCause(
            kind=TermKind.ALIGNMENT,
            detail=f"the column stands one token too {name}",
            remedy="log each token's own value: logits of a position belong to the next token",
            change={"shift": shift},
        )


def meaning_causes(rows: list[Rollout]) -> Iterator[GapCause]:
    """Yield the distributions that log probabilities may be of."""
    is_truncated = any(row.sampling.is_truncated for row in rows)
    temperatures = {row.sampling.temperature for row in rows}
    for temperature in (None, 1.0, *_TEMPERATURES):
        for truncated in (False, True) if is_truncated else (False,):
            if temperature is not None and {temperature} == temperatures:
                continue
            meaning = Meaning(temperature=temperature, is_truncated=truncated)
            yield GapCause(
                kind=TermKind.MEANING,
                detail=f"log probabilities are {meaning}",
                remedy="log the same distribution on both sides: the same temperature, and a truncated distribution "
                "renormalised on both or on neither",
                change={"meaning": meaning},
                is_fitted=temperature not in (None, 1.0),
            )


def _tokens(hf: HFModel, rows: list[Rollout]) -> Iterator[GapCause]:
    bos = getattr(hf.config, "bos_token_id", None)
    remedy = "send token ids and not text, or add the begin-of-text token once on both sides"
    if all(row.tokens[0] == bos and len(row.tokens) > 2 for row in rows):
        yield GapCause(
            kind=TermKind.TOKENS, detail="no begin-of-text token", remedy=remedy, change={"drops_first": True}
        )
    if isinstance(bos, int):
        yield GapCause(
            kind=TermKind.TOKENS, detail="one more begin-of-text token", remedy=remedy, change={"added_first": bos}
        )


def _stale(hf: HFModel, tensors: Mapping[str, torch.Tensor]) -> Iterator[GapCause]:
    """Yield earlier weights as a whole, and part by part."""
    parts: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        parts.setdefault(hf.part_of(name), {})[name] = tensor
    if len(parts) > 1:
        yield weights_cause(hf, tensors, "all weights are the earlier ones")
    for part, stale_values in parts.items():
        yield weights_cause(hf, stale_values, f"{part} is the earlier one")
