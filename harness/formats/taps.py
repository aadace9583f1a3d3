"""Intermediate tensors of a model: their names, what computes them, and how each kind of operation is judged.

No graph is written by hand: the oracle traces HF's own forward (harness/oracle/graph.py). What it finds is plain data
here: for every tap what computes it and which taps it is computed from, so that one operation can be judged by itself
and its causes can be looked for. `KINDS` is the one table to change when a kind is added or judged otherwise; its
numbers were measured (docs/how-verdicts-work.md and reports/cpu/noise-floors.md).

Names of taps are HF's dotted module paths, and the shorter names of schema 1 for what has no module of its own.

A tap is named by the path of the module whose output it is (`model.layers.3.self_attn.q_proj`), or by `PATH.input` for
what is computed between modules. Under a decoder layer some have a name of their own, in every family where they occur:
`.q_rope`, `.k_rope`, `.attention` (the context before the output projection), `.attn_residual`, `.mlp.act`
(act(gate) * up), `.output`, and the cache read back, `.k_cache` and `.v_cache`. The head is always `lm_head`.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import Any, Self

EMBEDDING = "model.embed_tokens"
FINAL_NORM = "model.norm"
LOGITS = "lm_head"
FINAL_LOGITS = "logits"
"""The head's output after a soft cap or a scale, if the model has one."""

_IN_LAYER = re.compile(r"(?P<prefix>[A-Za-z_][\w.]*?\.(?P<layer>\d{1,4})\.)(?P<site>.+)", re.DOTALL | re.ASCII)


def layer_of(tap: str) -> int | None:
    """Return the number of the decoder layer that a tap belongs to; None outside of the layers."""
    match = _IN_LAYER.fullmatch(tap)
    return int(match["layer"]) if match else None


def site_of(tap: str) -> str:
    """Return the tap's name without its layer: `self_attn.q_proj` of `model.layers.3.self_attn.q_proj`."""
    match = _IN_LAYER.fullmatch(tap)
    return match["site"] if match else tap


def prefix_of(tap: str) -> str:
    """Return the prefix of the tap's layer, with its final dot; empty outside of the layers."""
    match = _IN_LAYER.fullmatch(tap)
    return match["prefix"] if match else ""


def layer_prefix(layer: int) -> str:
    """Return the prefix of the taps of a decoder layer in most of HF's families, with its final dot."""
    return f"model.layers.{layer}."


class Kind(StrEnum):
    """The kind of an operation, as far as the operators that HF's code ran tell it."""

    EMBEDDING = "embedding"
    COPY = "copy"
    """Part of another tap, or all of it, moved and not computed with."""
    NORM = "norm"
    LINEAR = "linear"
    ROTARY = "rotary"
    CACHE = "cache"
    STATE = "state"
    """What a recurrence or a convolution goes on from, as a cache holds it after a position."""
    ATTENTION = "attention"
    ADD = "add"
    ACTIVATION = "activation"
    CHOICE = "choice"
    """Indices that a router chose."""
    OTHER = "other"
    """Anything else: a scan, a block of experts, several operations in one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorModel:
    """The roundings in an operation of one kind (harness/judge/compare/bounds.py)."""

    roundings: float
    """Roundings of the whole row to the engine's dtype, the worst case adding up."""
    accumulation: float = 0.0
    """Errors of a float32 sum, in roundings of the accumulator."""
    products: float = 0.0
    """Roundings of the summed products to the engine's dtype (attention's probabilities)."""
    scores: float = 0.0
    """Errors of the attention scores, in roundings of the accumulator."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KindTraits:
    """The properties of one kind."""

    error_model: ErrorModel | None
    """Its derived bound; None if the control alone says what rounding may do."""
    least_effect: float = 0.05
    """Smallest gain or trend, in roundings to a 16-bit dtype, that counts as a mistake of an engine."""
    has_heads: bool = False
    """Whether a row is made of heads, each of which may be off by itself."""
    repeats_by_position: bool = False
    """Whether errors repeat for rows of one position, rather than for rows of one content."""


KINDS: Mapping[Kind, KindTraits] = {
    Kind.EMBEDDING: KindTraits(error_model=ErrorModel(roundings=0)),
    Kind.COPY: KindTraits(error_model=ErrorModel(roundings=0)),
    Kind.NORM: KindTraits(error_model=ErrorModel(roundings=2, accumulation=8)),
    Kind.LINEAR: KindTraits(error_model=ErrorModel(roundings=1, accumulation=25)),
    Kind.ROTARY: KindTraits(
        error_model=ErrorModel(roundings=3),
        has_heads=True,
        repeats_by_position=True,
    ),
    Kind.ADD: KindTraits(error_model=ErrorModel(roundings=1)),
    Kind.ACTIVATION: KindTraits(error_model=ErrorModel(roundings=2, accumulation=4)),
    Kind.ATTENTION: KindTraits(
        error_model=ErrorModel(roundings=1, accumulation=25, products=4, scores=6),
        # Flash kernels round the probabilities and not their sum, which is a gain of up to 0.2 roundings in float16.
        least_effect=0.5,
        has_heads=True,
    ),
    Kind.CACHE: KindTraits(error_model=ErrorModel(roundings=0)),
    Kind.STATE: KindTraits(error_model=None),
    Kind.CHOICE: KindTraits(error_model=None),
    # A linear layer with an adapter is one; the experts of a layer are, and scans.
    Kind.OTHER: KindTraits(error_model=None),
}


_STATE = re.compile(r"(conv|recurrent)_state(\.\d+)?", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One operation of the graph."""

    tap: str
    """Full name of the tap it produces."""
    kind: Kind
    inputs: tuple[str, ...] = ()
    """Taps it is computed from, in the order in which they are used; attention also reads its inputs after the first at
    every earlier row. Empty for what is computed from the tokens alone."""
    source: str = ""
    """Where HF's run shows it: a module's dotted path for its output, `PATH:input` for its first input, `PATH:query`,
    `:key`, `:value` and `:context` at the attention interface, `PATH:linear` and `PATH:topk` for what a router calls
    itself, `PATH:1` for a second output. Empty for what only an engine has (a cache)."""
    shape: tuple[int, ...] = ()
    """Dimensions of a row; empty if they are not known."""
    token_dim: int = 1
    """Dimension of HF's tensor that counts the tokens: 1 in [batch, tokens, ...], 2 in [batch, heads, tokens, ...], 0
    where batch and tokens are one."""
    sampled_only: bool = False
    """Whether an engine may compute it only for the rows it samples from."""
    is_head: bool = False
    """Whether HF computes it only for the positions whose logits it is asked for."""
    among_tokens: bool = False
    """Whether it is a choice among the tokens so far, by their positions; -1 stands where there are too few."""
    window: int | None = None
    """Of attention: latest tokens that a query sees; None for all of them."""
    tokens_ahead: int = 0
    """How many tokens after its own a row is computed from: of layers that predict further tokens (MTP)."""

    @property
    def positions_ahead(self) -> int:
        """How many positions after its row's own rotary turns for: those of the tokens that the row sees."""
        return self.tokens_ahead if self.kind is Kind.ROTARY else 0

    @property
    def layer(self) -> int | None:
        """Decoder layer it belongs to; None for a tap outside of the layers."""
        return layer_of(self.tap)

    @property
    def site(self) -> str:
        """Name without the layer, the same for every layer: `self_attn.q_proj`, `q_rope`, `lm_head`."""
        return site_of(self.tap)

    @property
    def is_kept(self) -> bool:
        """Whether it is what a cache holds, and no value of a forward."""
        return self.kind in (Kind.CACHE, Kind.STATE)

    @property
    def module(self) -> str:
        """Path of the HF module that shows the tap."""
        return self.source.partition(":")[0].partition("@")[0]


@dataclass(frozen=True)
class Graph:
    """Operations of one model in the order in which they are computed."""

    operations: tuple[Operation, ...]
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Other names of taps: what HF shows twice, and what schema 1 calls otherwise."""

    def to_json(self) -> dict[str, Any]:
        """Return the graph as what JSON can hold, for another process."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Return the graph of `to_json`."""
        parts = {"kind": Kind, "inputs": tuple, "shape": tuple}
        operations = (
            Operation(**{name: parts.get(name, lambda value: value)(value) for name, value in operation.items()})
            for operation in data["operations"]
        )
        return cls(tuple(operations), dict(data["aliases"]))

    def __iter__(self) -> Iterator[Operation]:
        return iter(self.operations)

    def __len__(self) -> int:
        return len(self.operations)

    def __contains__(self, tap: str) -> bool:
        return tap in self.by_tap

    def __getitem__(self, tap: str) -> Operation:
        return self.by_tap[tap]

    @cached_property
    def by_tap(self) -> Mapping[str, Operation]:
        """The operations by the name of their tap."""
        return {operation.tap: operation for operation in self.operations}

    @cached_property
    def by_source(self) -> Mapping[str, Operation]:
        """The operations by where HF's run shows them."""
        return {operation.source: operation for operation in self.operations if operation.source}

    @cached_property
    def states(self) -> Mapping[tuple[int | None, str], str]:
        """Taps of the states that a cache holds, by layer and name: `conv_state`, `recurrent_state`, `conv_state.1`."""
        kept = (op for op in self.operations if op.kind is Kind.STATE)
        return {(op.layer, op.source.partition(":")[2]): op.tap for op in kept}

    def canonical(self, name: str) -> str:
        """Return the name under which a tap stands in the graph; a name that is not known is returned as it is."""
        return self.aliases.get(name, name)

    def of_layer(self, layer: int | None) -> tuple[Operation, ...]:
        """Return the operations of one decoder layer, or those outside of all layers for None."""
        return tuple(operation for operation in self.operations if operation.layer == layer)

    def attention_of(self, layer: int | None) -> Operation | None:
        """Return the attention of a layer if it has one that HF's interface shows."""
        return next((op for op in self.of_layer(layer) if op.kind is Kind.ATTENTION), None)

    @cached_property
    def prunable(self) -> frozenset[str]:
        """Taps that an engine may compute for those rows alone that choose a token: no later row reads them.

        They are the last layer's attention and what follows it: of a layer in which HF shows none, all of it.
        """
        last = [at for at, op in enumerate(self.operations) if self.layers and op.layer == self.layers[-1]]
        reading = [at for at in last if self.operations[at].kind in (Kind.ATTENTION, Kind.CACHE, Kind.STATE)]
        first = max(reading, default=min(last, default=len(self)))
        return frozenset(
            op.tap for at, op in enumerate(self.operations) if at >= first or op.sampled_only or op.is_head
        )

    @cached_property
    def drafted_from(self) -> Mapping[int, str]:
        """Taps that further tokens are predicted from, by how many tokens ahead their rows look; empty without MTP."""
        return {op.tokens_ahead: op.tap for op in self.operations if op.tokens_ahead and not op.is_kept}

    @property
    def has_mtp(self) -> bool:
        """Whether layers are in it that predict further tokens."""
        return bool(self.drafted_from)

    @cached_property
    def layers(self) -> tuple[int, ...]:
        """Numbers of the decoder layers."""
        return tuple(sorted({op.layer for op in self.operations if op.layer is not None}))

    @cached_property
    def head(self) -> frozenset[str]:
        """Taps that HF, and the oracle, compute only for the rows that a token is chosen from."""
        return frozenset(op.tap for op in self.operations if op.is_head)

    def not_shown(self, shown: Collection[str], *, caches: bool = False) -> tuple[str, ...]:
        """Return what an engine that shows some taps does not: sites; or taps where another layer has the site."""
        sites = {op.site for op in self.operations if op.tap in shown}
        lost = (op for op in self.operations if op.is_kept is caches and op.tap not in shown)
        return tuple(dict.fromkeys(op.tap if op.site in sites else op.site for op in lost))

    @cached_property
    def logits(self) -> str:
        """Name of the tap that tokens are chosen from: the head's, or what the model makes of it (a soft cap)."""
        last = self.canonical(FINAL_LOGITS)
        return last if last in self else LOGITS


def graph_of_taps(names: Iterable[str]) -> Graph:
    """Return the graph as far as names of taps tell it, in their order: for recordings without a model."""
    operations = [_unknown(name) for name in names]
    known = {operation.tap for operation in operations}
    return Graph(tuple(op for op in operations if op.kind is not Kind.CACHE or set(op.inputs) <= known))


def _unknown(name: str) -> Operation:
    prefix = name.removesuffix(site_of(name))
    site = site_of(name)
    if site == "k_cache":
        return Operation(tap=name, kind=Kind.CACHE, inputs=(f"{prefix}k_rope",))
    if site == "v_cache":
        return Operation(tap=name, kind=Kind.CACHE, inputs=(f"{prefix}self_attn.v_proj",))
    if _STATE.fullmatch(site):
        return Operation(tap=name, kind=Kind.STATE, source=f":{site}")
    if site.endswith(".topk"):
        return Operation(tap=name, kind=Kind.CHOICE)
    return Operation(tap=name, kind=Kind.OTHER, sampled_only=name in (FINAL_NORM, LOGITS))


__all__ = [
    "EMBEDDING",
    "FINAL_NORM",
    "KINDS",
    "LOGITS",
    "ErrorModel",
    "Graph",
    "Kind",
    "KindTraits",
    "Operation",
    "graph_of_taps",
    "layer_of",
    "layer_prefix",
    "prefix_of",
    "site_of",
]
