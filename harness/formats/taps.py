"""Intermediate tensors of a model: their names, what computes them, and how each kind of operation is judged.

The oracle traces the forward of HF to build the graph (harness/oracle/graph.py). The graph is plain data: for every
tap, the operation that computes it and the taps that this operation reads. So each operation can be judged separately,
and its mistakes can be explained. To add a kind, or to judge one differently, change the table `KINDS`; its numbers
were measured (docs/how-verdicts-work.md and reports/cpu/noise-floors.md).

A tap is named by the path of the HF module whose output it is (`model.layers.3.self_attn.q_proj`), or by `PATH.input`
for a value computed between modules. Some taps of a decoder layer have the same special names in every family:
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
"""Output of the head after a soft cap or a scale, if the model has one."""

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
    """Return the prefix of the taps of a decoder layer in most model families of HF, with its final dot."""
    return f"model.layers.{layer}."


class Kind(StrEnum):
    """The kind of an operation, determined from the torch operators that HF runs."""

    EMBEDDING = "embedding"
    COPY = "copy"
    """All or part of another tap, moved without computation."""
    NORM = "norm"
    LINEAR = "linear"
    ROTARY = "rotary"
    CACHE = "cache"
    STATE = "state"
    """State of a recurrence or convolution, as the cache holds it after a position."""
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
    """Number of roundings of the whole row to the engine's dtype, added up as in the worst case."""
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
    """Error model for a derived bound; None if only the control bounds the error."""
    least_effect: float = 0.05
    """Smallest gain or trend, in roundings to a 16-bit dtype, that counts as a mistake."""
    has_heads: bool = False
    """Whether a row consists of heads, and a single head may be wrong."""
    repeats_by_position: bool = False
    """Whether errors repeat at equal positions, rather than for equal content."""


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
    # For example: a linear layer with an adapter, the experts of a layer, a scan.
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
    """Taps it is computed from, in the order of use; attention also reads its inputs after the first at every earlier
    row. Empty for what is computed from the tokens alone."""
    source: str = ""
    """Where it appears in the run of HF: a module's dotted path for its output, `PATH:input` for its first input,
    `PATH:query`, `:key`, `:value` and `:context` at the attention interface, `PATH:linear` and `PATH:topk` for
    functions that a router calls, `PATH:1` for a second output. Empty for what only an engine has (a cache)."""
    shape: tuple[int, ...] = ()
    """Dimensions of a row; empty if they are not known."""
    token_dim: int = 1
    """Token dimension of the tensor in HF: 1 in [batch, tokens, ...], 2 in [batch, heads, tokens, ...], 0
    where batch and tokens are flattened."""
    sampled_only: bool = False
    """Whether an engine may compute it only for the rows it samples from."""
    is_head: bool = False
    """Whether HF computes it only for the positions whose logits it is asked for."""
    among_tokens: bool = False
    """Whether it is a choice among the previous tokens, by position; -1 pads where there are too few."""
    window: int | None = None
    """Sliding window of attention: number of latest tokens that a query sees; None for all."""
    tokens_ahead: int = 0
    """For MTP layers: number of tokens after its own from which a row is computed."""

    @property
    def positions_ahead(self) -> int:
        """Offset of the rotary position from the position of the row, in MTP layers."""
        return self.tokens_ahead if self.kind is Kind.ROTARY else 0

    @property
    def layer(self) -> int | None:
        """Decoder layer it belongs to; None for a tap outside of the layers."""
        return layer_of(self.tap)

    @property
    def site(self) -> str:
        """Name without the layer, the same for every layer: `self_attn.q_proj`, `q_rope`, `lm_head`."""
        return site_of(self.tap)

    def is_like(self, operation: "Operation") -> bool:
        """Whether two operations are the same in two layers: at one site, with heads of one size."""
        return self.site == operation.site and self.shape == operation.shape

    @property
    def is_kept(self) -> bool:
        """Whether it is content of a cache, not a value of a forward."""
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
    """Alternative names of taps: values that HF computes twice, and names of schema 1."""

    def to_json(self) -> dict[str, Any]:
        """Return the graph as JSON-able data."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Return the graph from the data of `to_json`."""
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
        """The operations by their `source`."""
        return {operation.source: operation for operation in self.operations if operation.source}

    @cached_property
    def states(self) -> Mapping[tuple[int | None, str], str]:
        """Taps of the states that a cache holds, by layer and name: `conv_state`, `recurrent_state`, `conv_state.1`."""
        kept = (op for op in self.operations if op.kind is Kind.STATE)
        return {(op.layer, op.source.partition(":")[2]): op.tap for op in kept}

    def canonical(self, name: str) -> str:
        """Return the name of a tap in the graph; an unknown name is returned unchanged."""
        return self.aliases.get(name, name)

    def of_layer(self, layer: int | None) -> tuple[Operation, ...]:
        """Return the operations of one decoder layer, or those outside of all layers for None."""
        return tuple(operation for operation in self.operations if operation.layer == layer)

    def attention_of(self, layer: int | None) -> Operation | None:
        """Return the attention of a layer; None if it has none that uses the attention interface of HF."""
        return next((op for op in self.of_layer(layer) if op.kind is Kind.ATTENTION), None)

    @cached_property
    def prunable(self) -> frozenset[str]:
        """Taps that an engine may compute only for sampled rows, because no later row reads them.

        These are the attention of the last layer and all operations after it; the whole layer if it has no attention.
        """
        last = [at for at, op in enumerate(self.operations) if self.layers and op.layer == self.layers[-1]]
        reading = [at for at in last if self.operations[at].kind in (Kind.ATTENTION, Kind.CACHE, Kind.STATE)]
        first = max(reading, default=min(last, default=len(self)))
        return frozenset(
            op.tap for at, op in enumerate(self.operations) if at >= first or op.sampled_only or op.is_head
        )

    @cached_property
    def drafted_from(self) -> Mapping[int, str]:
        """Taps from which MTP layers predict further tokens, by the number of tokens ahead; empty without MTP."""
        return {op.tokens_ahead: op.tap for op in self.operations if op.tokens_ahead and not op.is_kept}

    @property
    def has_mtp(self) -> bool:
        """Whether the graph has MTP layers."""
        return bool(self.drafted_from)

    @cached_property
    def layers(self) -> tuple[int, ...]:
        """Numbers of the decoder layers."""
        return tuple(sorted({op.layer for op in self.operations if op.layer is not None}))

    @cached_property
    def head(self) -> frozenset[str]:
        """Taps that HF and the oracle compute only for sampled rows."""
        return frozenset(op.tap for op in self.operations if op.is_head)

    def not_shown(self, shown: Collection[str], *, caches: bool = False) -> tuple[str, ...]:
        """Return the taps that are not in `shown`: as sites, or as single taps if another layer shows the site."""
        sites = {op.site for op in self.operations if op.tap in shown}
        lost = (op for op in self.operations if op.is_kept is caches and op.tap not in shown)
        return tuple(dict.fromkeys(op.tap if op.site in sites else op.site for op in lost))

    @cached_property
    def logits(self) -> str:
        """Name of the tap from which tokens are chosen: the head, or the logits after a soft cap or scale."""
        last = self.canonical(FINAL_LOGITS)
        return last if last in self else LOGITS


def graph_of_taps(names: Iterable[str]) -> Graph:
    """Return the graph that can be derived from names of taps, for recordings without a model."""
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
