"""The graph of a Llama-like decoder as the contract has it (docs/recording-format.md), by hand and without torch."""

from harness.formats.taps import Graph, Kind, Operation, layer_prefix

LAYER = """
input_layernorm           norm        <hidden>
self_attn.q_proj          linear      input_layernorm
self_attn.q_norm          norm        self_attn.q_proj
self_attn.k_proj          linear      input_layernorm
self_attn.k_norm          norm        self_attn.k_proj
self_attn.v_proj          linear      input_layernorm
q_rope                    rotary      self_attn.q_norm
k_rope                    rotary      self_attn.k_norm
k_cache                   cache       k_rope
v_cache                   cache       self_attn.v_proj
attention                 attention   q_rope k_rope self_attn.v_proj
self_attn.o_proj          linear      attention
attn_residual             add         <hidden> self_attn.o_proj
post_attention_layernorm  norm        attn_residual
mlp.gate_proj             linear      post_attention_layernorm
mlp.up_proj               linear      post_attention_layernorm
mlp.act                   activation  mlp.gate_proj mlp.up_proj
mlp.down_proj             linear      mlp.act
output                    add         attn_residual mlp.down_proj
"""
"""Site, kind and inputs of one layer with norms of q and k, in the order of HF's run."""


def decoder_graph(*, num_layers: int, has_qk_norm: bool) -> Graph:
    """Return the graph of a decoder; of its operations, what they are and what they are computed from."""
    operations = [Operation(tap="model.embed_tokens", kind=Kind.EMBEDDING)]
    for layer in range(num_layers):
        hidden = "model.embed_tokens" if layer == 0 else f"{layer_prefix(layer - 1)}output"
        for site, kind, *inputs in (line.split() for line in LAYER.strip().splitlines()):
            if site.endswith(("q_norm", "k_norm")) and not has_qk_norm:
                continue
            if not has_qk_norm:
                inputs = [name.replace("_norm", "_proj") if name.startswith("self_attn") else name for name in inputs]
            names = tuple(hidden if name == "<hidden>" else f"{layer_prefix(layer)}{name}" for name in inputs)
            operations.append(Operation(tap=f"{layer_prefix(layer)}{site}", kind=Kind(kind), inputs=names))
    last = f"{layer_prefix(num_layers - 1)}output"
    operations.append(Operation(tap="model.norm", kind=Kind.NORM, inputs=(last,), sampled_only=True))
    operations.append(Operation(tap="lm_head", kind=Kind.LINEAR, inputs=("model.norm",), sampled_only=True))
    return Graph(tuple(operations))
