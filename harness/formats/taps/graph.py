"""The operations of one model in the order of its run, each named by the tap it produces.

No graph is written by hand: the oracle traces HF's own forward (harness/oracle/graph.py). Here is what it finds, as
plain data: for every tap what computes it and which taps it is computed from, so that one operation can be judged by
itself and its causes can be looked for.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, Self

from harness.formats.taps.kinds import Kind
from harness.formats.taps.names import FINAL_LOGITS, FINAL_NORM, LOGITS, layer_of, site_of

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
        """Decoder layer it belongs to; None for what stands outside of the layers."""
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
