"""Names of a decoder's intermediate tensors, and the graph of operations that produces them.

A *tap* is named by HF's dotted module path where a module produces it (`model.layers.3.self_attn.q_proj`) and by a name
of its own under the layer where none does: `.q_rope`, `.k_rope`, `.k_cache`, `.v_cache`, `.attention` (the context
before `o_proj`), `.attn_residual`, `.mlp.act` (act(gate) * up), `.output`. The graph says for every tap which taps it
is computed from, so that one operation can be replayed, and judged, by itself.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum

EMBEDDING = "model.embed_tokens"
FINAL_NORM = "model.norm"
LOGITS = "lm_head"


class Kind(StrEnum):
    """Kinds of operation; each has noise of its own (docs/how-verdicts-work.md)."""

    EMBEDDING = "embedding"
    NORM = "norm"
    LINEAR = "linear"
    ROTARY = "rotary"
    CACHE = "cache"
    ATTENTION = "attention"
    ADD = "add"
    ACTIVATION = "activation"


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One operation of the graph, named by the tap it produces."""

    tap: str
    """Full name of the tap it produces."""
    kind: Kind
    inputs: tuple[str, ...]
    """Taps it reads at the same row; attention also reads its inputs after the first at every earlier row. Empty for
    the embedding, which reads the token."""
    layer: int | None = None
    """Decoder layer it belongs to; None for the embedding, the final norm and the head."""
    sampled_only: bool = False
    """Whether an engine may compute it only for the rows it samples from."""

    @property
    def site(self) -> str:
        """Name without the layer, the same for every layer: `self_attn.q_proj`, `q_rope`, `lm_head`."""
        return self.tap if self.layer is None else self.tap.removeprefix(layer_prefix(self.layer))


@dataclass(frozen=True, slots=True)
class DecoderGraph:
    """Operations of one decoder in the order in which they are computed."""

    operations: tuple[Operation, ...]

    def __iter__(self) -> Iterator[Operation]:
        return iter(self.operations)

    def __len__(self) -> int:
        return len(self.operations)

    def __getitem__(self, tap: str) -> Operation:
        return self.by_tap()[tap]

    def by_tap(self) -> dict[str, Operation]:
        """Return the operations by the name of their tap."""
        return {operation.tap: operation for operation in self.operations}

    def of_layer(self, layer: int | None) -> tuple[Operation, ...]:
        """Return the operations of one decoder layer, or those outside of all layers for None."""
        return tuple(operation for operation in self.operations if operation.layer == layer)


def layer_prefix(layer: int) -> str:
    """Return the prefix of the taps of a decoder layer, with its final dot."""
    return f"model.layers.{layer}."


def decoder_graph(*, num_layers: int, has_qk_norm: bool) -> DecoderGraph:
    """Build the graph of a pre-norm decoder with rotary attention and a gated MLP (Llama, Qwen2, Qwen3, Mistral)."""
    operations = [Operation(tap=EMBEDDING, kind=Kind.EMBEDDING, inputs=())]
    for layer in range(num_layers):
        operations += _layer_operations(layer, has_qk_norm)
    last = f"{layer_prefix(num_layers - 1)}output"
    operations.append(Operation(tap=FINAL_NORM, kind=Kind.NORM, inputs=(last,), sampled_only=True))
    operations.append(Operation(tap=LOGITS, kind=Kind.LINEAR, inputs=(FINAL_NORM,), sampled_only=True))
    return DecoderGraph(tuple(operations))


def _layer_operations(layer: int, has_qk_norm: bool) -> Iterator[Operation]:
    prefix = layer_prefix(layer)
    hidden = EMBEDDING if layer == 0 else f"{layer_prefix(layer - 1)}output"

    def operation(site: str, kind: Kind, *inputs: str) -> Operation:
        full = tuple(tap if tap == hidden else prefix + tap for tap in inputs)
        return Operation(tap=prefix + site, kind=kind, inputs=full, layer=layer)

    yield operation("input_layernorm", Kind.NORM, hidden)
    for name in "qkv":
        yield operation(f"self_attn.{name}_proj", Kind.LINEAR, "input_layernorm")
    for name in "qk":
        if has_qk_norm:
            yield operation(f"self_attn.{name}_norm", Kind.NORM, f"self_attn.{name}_proj")
    rotated = "norm" if has_qk_norm else "proj"
    for name in "qk":
        yield operation(f"{name}_rope", Kind.ROTARY, f"self_attn.{name}_{rotated}")
    yield operation("k_cache", Kind.CACHE, "k_rope")
    yield operation("v_cache", Kind.CACHE, "self_attn.v_proj")
    yield operation("attention", Kind.ATTENTION, "q_rope", "k_rope", "self_attn.v_proj")
    yield operation("self_attn.o_proj", Kind.LINEAR, "attention")
    yield operation("attn_residual", Kind.ADD, hidden, "self_attn.o_proj")
    yield operation("post_attention_layernorm", Kind.NORM, "attn_residual")
    yield operation("mlp.gate_proj", Kind.LINEAR, "post_attention_layernorm")
    yield operation("mlp.up_proj", Kind.LINEAR, "post_attention_layernorm")
    yield operation("mlp.act", Kind.ACTIVATION, "mlp.gate_proj", "mlp.up_proj")
    yield operation("mlp.down_proj", Kind.LINEAR, "mlp.act")
    yield operation("output", Kind.ADD, "attn_residual", "mlp.down_proj")


def graph_of_taps(names: Iterable[str]) -> DecoderGraph:
    """Build the graph of the decoder that taps of these names come from, where there is no model to ask."""
    names = set(names)
    layers = {int(parts[2]) for parts in (name.split(".") for name in names) if _names_a_layer(parts)}
    has_qk_norm = any(name.endswith(".self_attn.q_norm") for name in names)
    return decoder_graph(num_layers=max(layers, default=0) + 1, has_qk_norm=has_qk_norm)


def _names_a_layer(parts: list[str]) -> bool:
    return parts[:2] == ["model", "layers"] and len(parts) > 3 and parts[2].isdecimal() and len(parts[2]) < 5
