"""The graph of a decoder: names, order and inputs exactly as the contract has them, and back from names."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.taps import DecoderGraph, Kind, Operation, decoder_graph, graph_of_taps, layer_prefix

LAYER = """
input_layernorm           norm        <hidden>
self_attn.q_proj          linear      input_layernorm
self_attn.k_proj          linear      input_layernorm
self_attn.v_proj          linear      input_layernorm
self_attn.q_norm          norm        self_attn.q_proj
self_attn.k_norm          norm        self_attn.k_proj
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
"""Site, kind and inputs of one layer with norms of q and k, in the order of computation (docs/recording-format.md)."""


def expected_operations(num_layers, has_qk_norm):
    expected = [("model.embed_tokens", "embedding", ())]
    for layer in range(num_layers):
        hidden = "model.embed_tokens" if layer == 0 else f"model.layers.{layer - 1}.output"
        for site, kind, *inputs in (line.split() for line in LAYER.strip().splitlines()):
            if site.endswith(("q_norm", "k_norm")) and not has_qk_norm:
                continue
            if not has_qk_norm:
                inputs = [name.replace("_norm", "_proj") if name.startswith("self_attn") else name for name in inputs]
            names = tuple(hidden if name == "<hidden>" else f"model.layers.{layer}.{name}" for name in inputs)
            expected.append((f"model.layers.{layer}.{site}", kind, names))
    expected.append(("model.norm", "norm", (f"model.layers.{num_layers - 1}.output",)))
    expected.append(("lm_head", "linear", ("model.norm",)))
    return expected


@pytest.mark.parametrize("has_qk_norm", [True, False])
@pytest.mark.parametrize("num_layers", [1, 3, 12])
def test_the_graph_is_the_contract(num_layers, has_qk_norm):
    graph = decoder_graph(num_layers=num_layers, has_qk_norm=has_qk_norm)
    assert [(op.tap, op.kind.value, op.inputs) for op in graph] == expected_operations(num_layers, has_qk_norm)


def test_every_input_is_computed_before_it_is_read():
    seen = set()
    for operation in decoder_graph(num_layers=4, has_qk_norm=True):
        assert set(operation.inputs) <= seen
        assert operation.tap not in seen
        seen.add(operation.tap)


def test_layers_and_sites():
    graph = decoder_graph(num_layers=12, has_qk_norm=False)
    assert {op.tap for op in graph.of_layer(None)} == {"model.embed_tokens", "model.norm", "lm_head"}
    assert {op.site for op in graph.of_layer(11)} == {op.site for op in graph.of_layer(1)}
    assert all(op.tap == layer_prefix(11) + op.site for op in graph.of_layer(11))
    assert all(op.site == op.tap for op in graph.of_layer(None))
    assert [op.tap for op in graph if op.sampled_only] == ["model.norm", "lm_head"]
    assert len(graph) == 3 + 12 * 17


def test_lookup_by_tap():
    graph = decoder_graph(num_layers=2, has_qk_norm=True)
    assert graph["model.layers.1.attention"].kind is Kind.ATTENTION
    assert list(graph.by_tap().values()) == list(graph)
    with pytest.raises(KeyError):
        graph["model.layers.2.attention"]


@given(num_layers=st.integers(1, 30), has_qk_norm=st.booleans(), data=st.data())
def test_names_give_the_graph_back(num_layers, has_qk_norm, data):
    graph = decoder_graph(num_layers=num_layers, has_qk_norm=has_qk_norm)
    names = [op.tap for op in graph]
    assert graph_of_taps(data.draw(st.permutations(names))) == graph


def test_the_graph_of_some_taps_holds_at_least_those():
    names = ["model.layers.2.mlp.act", "lm_head"]
    graph = graph_of_taps(names)
    assert graph == decoder_graph(num_layers=3, has_qk_norm=False)
    assert set(names) <= set(graph.by_tap())


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "...",
        "model.layers",
        "model.layers.",
        "model.layers.7",
        "model.layers.-1.output",
        "model.layers.1e3.output",
        "model.layers.99999999999999999999.output",  # a graph of as many layers would not end
        "model.layers.٣٣٣٣٣.output",
        "model.layers..output",
        "vision.layers.7.output",
        "model.layers.x.self_attn.k_norm",
    ],
)
def test_hostile_names_add_no_layers(name):
    assert graph_of_taps([name]) == decoder_graph(num_layers=1, has_qk_norm=False)
    assert graph_of_taps([name, "model.layers.1.output"]) == decoder_graph(num_layers=2, has_qk_norm=False)


@given(st.lists(st.text(alphabet="model.layers.0123456789_qk²", max_size=40), max_size=5))
def test_any_names_give_some_graph(names):
    assert 4 <= len(graph_of_taps(names)) < 200_000


def test_an_empty_graph_has_no_layer():
    graph = DecoderGraph((Operation(tap="lm_head", kind=Kind.LINEAR, inputs=()),))
    assert graph.of_layer(0) == ()
