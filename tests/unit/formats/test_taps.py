"""Graphs of models as their own forward shows them: names, order and inputs; and what names alone tell."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import BertConfig, BertLMHeadModel

from harness.errors import Code, HarnessError
from harness.formats.checkpoint import Checkpoint
from harness.formats.taps import (
    KINDS,
    Graph,
    Kind,
    Operation,
    graph_of_taps,
    layer_of,
    layer_prefix,
    prefix_of,
    site_of,
)
from harness.oracle.model import HFModel, load_model

from ..decoder_graph import decoder_graph
from ..tiny_models import WINDOW, tiny_model


def in_brief(graph):
    return [(op.tap, op.kind.value, op.inputs) for op in graph]


def contract(num_layers, has_qk_norm):
    return in_brief(decoder_graph(num_layers=num_layers, has_qk_norm=has_qk_norm))


@pytest.mark.parametrize(("name", "has_qk_norm"), [("llama-tiny", False), ("qwen2-tiny", False), ("qwen3-tiny", True)])
def test_the_graph_is_the_contract(checkpoints, name, has_qk_norm):
    graph = load_model(checkpoints / name, dtype=torch.float32).graph
    assert in_brief(graph) == contract(3, has_qk_norm)


@pytest.mark.parametrize("num_layers", [1, 12])
def test_the_graph_is_the_contract_whatever_the_number_of_layers(num_layers):
    model = tiny_model("llama", num_hidden_layers=num_layers)
    hf = HFModel(model=model, checkpoint=Checkpoint(Path()), dtype=torch.float32, device=torch.device("cpu"))
    assert in_brief(hf.graph) == contract(num_layers, has_qk_norm=False)


def test_the_graph_does_not_depend_on_the_dtype_of_the_weights(tiny):
    assert in_brief(tiny("qwen3_moe", torch.bfloat16).graph) == in_brief(tiny("qwen3_moe").graph)


def test_the_graph_does_not_depend_on_what_overflows():
    graphs = []
    for scale in (1, 1e6):
        model = tiny_model("llama").to(torch.float16)
        model.model.layers[0].mlp.down_proj.weight.data.mul_(scale)
        hf = HFModel(model=model, checkpoint=Checkpoint(Path()), dtype=torch.float16, device=torch.device("cpu"))
        graphs.append(in_brief(hf.graph))
    assert graphs[0] == graphs[1]


class Masked(torch.nn.Module):
    """Hands a mask on beside what it computes."""

    def __init__(self, layer, low):
        super().__init__()
        self.layer, self.low = layer, low

    def forward(self, x):
        y = self.layer(x)
        return y, torch.where(y[..., :4] > 0, 0.0, self.low)


class First(torch.nn.Sequential):
    """Goes on without the mask."""

    def forward(self, x):
        return super().forward(x)[0]


@pytest.mark.parametrize(
    ("low", "is_tap"), [(-torch.inf, False), (torch.finfo(torch.float32).min, False), (-1.0, True)]
)
def test_a_mask_is_no_tap(low, is_tap):
    model = tiny_model("llama")
    mlp = model.model.layers[0].mlp
    mlp.down_proj = First(Masked(mlp.down_proj, low))
    hf = HFModel(model=model, checkpoint=Checkpoint(Path()), dtype=torch.float32, device=torch.device("cpu"))
    assert any(op.source.endswith("down_proj.0:1") for op in hf.graph) is is_tap


TRACED = (
    "mistral", "gemma2", "gemma3_text", "gpt2", "gpt_neox", "gpt_oss", "llama4_text", "mamba", "mixtral", "phi3",
    "qwen3_moe",
)  # fmt: skip


@pytest.mark.parametrize("family", TRACED)
def test_every_input_is_computed_before_it_is_read(tiny, family):
    seen = set()
    for operation in tiny(family).graph:
        assert set(operation.inputs) <= seen, operation.tap
        assert operation.tap not in seen
        seen.add(operation.tap)


@pytest.mark.parametrize("family", TRACED)
def test_a_traced_graph_is_whole(tiny, family):
    """It begins at the tokens, ends at the logits, and nothing that was found on the way leads nowhere."""
    graph = tiny(family).graph
    first, *others = graph.operations
    assert first.inputs == ()
    assert [op.tap for op in others if not op.inputs] == []
    assert graph.operations[-1].tap == graph.logits
    read = {tap for op in graph for tap in op.inputs}
    unread = {op.tap for op in graph if op.tap not in read and not op.is_kept}
    assert unread - {graph.logits} == {op.tap for op in graph if op.source.endswith("feed_forward.router:1")}
    assert graph.layers == (0, 1)
    for layer in graph.layers:
        assert graph[f"{prefix_of(graph.of_layer(layer)[0].tap)}output"].layer == layer
    assert {op.kind for op in graph} <= set(KINDS)


def brief_layer(hf, prefix):
    """Site, kind and inputs of a layer, without its prefix."""
    layer = hf.graph.of_layer(layer_of(f"{prefix}x"))
    return {
        op.tap.removeprefix(prefix): (op.kind.value, *(tap.removeprefix(prefix) for tap in op.inputs)) for op in layer
    }


def test_gemma_3_has_norms_behind_its_branches_and_a_window_in_some_layers(tiny):
    """Its embedding is scaled, its norms of q and k see heads before tokens."""
    hf = tiny("gemma3_text")
    layer = brief_layer(hf, "model.layers.1.")
    assert hf.graph["model.embed_tokens"].kind is Kind.OTHER
    assert layer["post_attention_layernorm"] == ("norm", "self_attn.o_proj")
    assert layer["attn_residual"] == ("add", "model.layers.0.output", "post_attention_layernorm")
    assert layer["mlp.act"] == ("activation", "mlp.gate_proj", "mlp.up_proj")
    assert layer["output"] == ("add", "attn_residual", "post_feedforward_layernorm")
    assert layer["q_rope"] == ("rotary", "self_attn.q_norm")
    assert {op.token_dim for op in hf.graph if op.site.endswith(("q_norm", "k_norm"))} == {2}
    windows = {op.tap: op.window for op in hf.graph if op.window is not None}
    assert windows == dict.fromkeys((f"model.layers.0.{site}" for site in ("k_cache", "v_cache", "attention")), WINDOW)


def test_gemma_2_caps_its_logits(tiny):
    graph = tiny("gemma2").graph
    assert (graph.logits, graph["logits"].inputs) == ("logits", ("lm_head",))
    assert {op.tap for op in graph if op.sampled_only} == {"model.norm", "lm_head", "logits"}


def test_gpt_2_splits_one_projection_and_adds_positions(tiny):
    """Parts of a projection are taps where attention reads them; the activation has one input."""
    hf = tiny("gpt2")
    layer = brief_layer(hf, "transformer.h.1.")
    for part in ("query", "key", "value"):
        assert layer[f"attn.{part}"] == ("copy", "attn.c_attn")
    assert layer["attention"] == ("attention", "attn.query", "attn.key", "attn.value")
    assert layer["k_cache"] == ("cache", "attn.key")
    assert layer["attn.c_attn"] == ("linear", "ln_1")
    assert layer["mlp.c_proj.input"] == ("activation", "mlp.c_fc")
    assert layer["ln_2"] == ("norm", "attn_residual")
    assert hf.graph["transformer.h.0.input"].inputs == ("transformer.wte",)
    assert hf.graph["lm_head"].inputs == ("transformer.ln_f",)


def test_a_module_that_is_called_attention_keeps_its_name(tiny):
    """GPT-NeoX: `attention` is the module, so that the context gets another name."""
    hf = tiny("gpt_neox")
    layer = brief_layer(hf, "gpt_neox.layers.0.")
    assert "attention" not in layer
    assert layer["attention.context"] == ("attention", "q_rope", "k_rope", "attention.value")
    assert layer["attention.dense"] == ("linear", "attention.context")
    assert hf.graph.attention_of(0).tap == "gpt_neox.layers.0.attention.context"
    assert layer["output"] == (
        "other",
        "mlp.dense_4h_to_h",
        "attention.dense",
        "gpt_neox.embed_in",
    )  # added in parallel


def test_a_router_shows_its_product_and_its_choice(tiny):
    hf = tiny("qwen3_moe")
    layer = brief_layer(hf, "model.layers.1.")
    assert layer["mlp.gate"] == ("linear", "post_attention_layernorm")
    assert layer["mlp.gate.topk"] == ("choice", "mlp.gate")
    assert layer["mlp.experts"] == ("other", "post_attention_layernorm", "mlp.gate.topk", "mlp.gate.1")
    assert layer["output"] == ("add", "attn_residual", "mlp.experts")
    router = hf.graph["model.layers.1.mlp.gate"]
    assert (router.source, router.token_dim) == ("model.layers.1.mlp.gate:linear", 0)


def test_a_scan_has_neither_attention_nor_cache(tiny):
    hf = tiny("mamba")
    layer = brief_layer(hf, "backbone.layers.1.")
    assert layer["mixer.x_proj.input"] == ("other", "mixer.in_proj")
    assert layer["mixer.out_proj.input"] == ("other", "mixer.x_proj", "mixer.x_proj.input", "mixer.in_proj")
    assert layer["output"] == ("add", "backbone.layers.0.output", "mixer.out_proj")
    assert hf.graph.attention_of(1) is None
    assert not [op for op in hf.graph if op.kind in (Kind.CACHE, Kind.ATTENTION)]


def test_rows_that_are_no_tokens_are_left_out(tiny):
    """Llama 4 computes every expert for every token: its rows are experts times tokens, and no token is found in them.

    What reads them was computed from what they were computed from.
    """
    hf = tiny("llama4_text")
    layer = brief_layer(hf, "model.layers.0.")
    assert not [site for site in layer if ".experts" in site]
    assert layer["feed_forward"][1:] == (
        "feed_forward.shared_expert.down_proj",
        "post_attention_layernorm",
        "feed_forward.router",
    )
    assert layer["feed_forward.router.topk"][0] == "choice"


def test_a_module_that_runs_twice_is_two_taps(tiny):
    """Llama 4 has one norm for queries and keys."""
    layer = brief_layer(tiny("llama4_text"), "model.layers.0.")
    assert layer["self_attn.qk_norm"] == ("norm", "self_attn.qk_norm.input")
    assert layer["self_attn.qk_norm@2"] == ("norm", "self_attn.qk_norm.input@2")
    assert layer["attention"] == ("attention", "self_attn.qk_norm", "self_attn.qk_norm@2", "self_attn.v_proj")


def test_one_product_that_is_split_is_read_as_a_whole(tiny):
    """Phi 3: gate and up are halves of one tensor, which no module shows."""
    layer = brief_layer(tiny("phi3"), "model.layers.0.")
    assert layer["mlp.act"] == ("activation", "mlp.gate_up_proj")
    assert layer["q_rope"] == ("rotary", "self_attn.qkv_proj")
    assert layer["v_cache"] == ("cache", "self_attn.value")


def test_what_hf_shows_twice_is_one_tap_with_several_names(checkpoints):
    graph = load_model(checkpoints / "llama-tiny", dtype=torch.float32).graph
    prefix = "model.layers.1."
    aliases = {
        f"{prefix}self_attn:query": f"{prefix}q_rope",
        f"{prefix}self_attn.query": f"{prefix}q_rope",
        f"{prefix}self_attn.value": f"{prefix}self_attn.v_proj",
        f"{prefix}self_attn.context": f"{prefix}attention",
        f"{prefix}self_attn": f"{prefix}self_attn.o_proj",
        f"{prefix}mlp.down_proj.input": f"{prefix}mlp.act",
        f"{prefix}mlp": f"{prefix}mlp.down_proj",
        f"{prefix}post_attention_layernorm.input": f"{prefix}attn_residual",
        f"{prefix}input_layernorm.input": "model.layers.0.output",
        "model.layers.0": "model.layers.0.output",
        "model.norm.input": "model.layers.2.output",
        "lm_head.input": "model.norm",
        "logits": "lm_head",
    }
    assert {alias: graph.canonical(alias) for alias in aliases} == aliases
    assert all(graph.canonical(op.tap) == op.tap for op in graph), "no tap is hidden behind the name of another"
    assert set(graph.aliases.values()) <= set(graph.by_tap)
    assert graph.canonical("no.such.tap") == "no.such.tap"


@pytest.mark.parametrize("family", TRACED)
def test_no_alias_is_a_tap(tiny, family):
    graph = tiny(family).graph
    assert not set(graph.aliases) & set(graph.by_tap)
    assert set(graph.aliases.values()) <= set(graph.by_tap)
    assert all(not name.endswith(".") for name in graph.aliases)


@pytest.mark.parametrize(
    "spread",
    [6, 1],
)
def test_a_model_whose_rows_see_later_tokens_is_refused(spread):
    """An encoder; with HF's own initial weights its rows hardly depend on each other, and still they do."""
    torch.manual_seed(0)
    sizes = {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16}
    model = BertLMHeadModel(BertConfig(**sizes, vocab_size=32)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(spread if parameter.dim() > 1 else 1)
    hf = HFModel(model=model, checkpoint=Checkpoint(Path("bert")), dtype=torch.float32, device=torch.device("cpu"))
    with pytest.raises(HarnessError) as caught:
        assert hf.graph
    assert caught.value.code is Code.UNSUPPORTED_ARCHITECTURE
    assert "actual:   BertLMHeadModel" in str(caught.value)


def test_layers_and_sites(tiny):
    graph = tiny("llama").graph
    assert {op.tap for op in graph.of_layer(None)} == {"model.embed_tokens", "model.norm", "lm_head"}
    assert [op.site for op in graph.of_layer(0)] == [op.site for op in graph.of_layer(1)]
    assert all(op.tap == layer_prefix(1) + op.site for op in graph.of_layer(1))
    assert all(op.site == op.tap for op in graph.of_layer(None))
    assert [op.tap for op in graph if op.sampled_only] == ["model.norm", "lm_head"]
    assert len(graph) == 3 + 2 * 17


def test_lookup_by_tap_and_by_source(tiny):
    graph = tiny("llama").graph
    attention = graph["model.layers.1.attention"]
    assert attention.kind is Kind.ATTENTION
    assert graph.by_source["model.layers.1.self_attn:context"] is attention
    assert attention.module == "model.layers.1.self_attn"
    assert graph.attention_of(1) is attention
    assert list(graph.by_tap.values()) == list(graph)
    assert "model.layers.1.attention" in graph
    assert "model.layers.2.attention" not in graph
    with pytest.raises(KeyError):
        graph["model.layers.2.attention"]


# What names alone tell.


def test_what_no_later_row_reads_may_be_computed_for_few_rows(checkpoints):
    last = [
        "attention", "self_attn.o_proj", "attn_residual", "post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj",
        "mlp.act", "mlp.down_proj", "output",
    ]  # fmt: skip
    graph = load_model(checkpoints / "qwen2-tiny", dtype=torch.float32).graph
    assert graph.prunable == {*(f"model.layers.2.{site}" for site in last), "model.norm", "lm_head"}


def test_of_a_layer_without_an_attention_of_hfs_interface_all_may_be():
    """Bloom computes attention by operators of its own, which are no tap."""
    kinds = {
        "model.layers.0.qkv": Kind.LINEAR, "model.layers.0.attention": Kind.ATTENTION,
        "model.layers.1.qkv": Kind.LINEAR, "model.layers.1.dense": Kind.OTHER, "model.norm": Kind.NORM,
    }  # fmt: skip
    operations = [Operation(tap=tap, kind=kind, sampled_only=tap == "model.norm") for tap, kind in kinds.items()]
    assert Graph(tuple(operations)).prunable == {"model.layers.1.qkv", "model.layers.1.dense", "model.norm"}
    assert Graph(tuple(operations[:2])).prunable == {"model.layers.0.attention"}
    assert Graph(()).prunable == frozenset()


def test_what_comes_before_the_last_state_is_computed_for_all_rows(checkpoints):
    """In Qwen3-Next the last layer has attention, those before it a recurrence."""
    graph = load_model(checkpoints / "qwen3-next-tiny", dtype=torch.float32).graph
    states = {op.tap for op in graph if op.kind in (Kind.STATE, Kind.CACHE)}
    last = max(graph.layers)
    assert graph.prunable.isdisjoint(states)
    assert {layer for tap in graph.prunable if (layer := layer_of(tap)) is not None} == {last}


@given(st.data())
def test_names_of_a_recording_are_its_graph_in_their_order(data):
    names = data.draw(st.permutations([tap for tap, _, _ in contract(3, has_qk_norm=True)]))
    graph = graph_of_taps(names)
    assert [op.tap for op in graph] == names
    kinds = {op.tap: op.kind for op in graph}
    assert {tap for tap, kind in kinds.items() if kind is Kind.CACHE} == {n for n in names if n.endswith("_cache")}
    assert graph["model.layers.2.k_cache"].inputs == ("model.layers.2.k_rope",)
    assert graph["model.layers.2.v_cache"].inputs == ("model.layers.2.self_attn.v_proj",)
    assert {op.tap for op in graph if op.sampled_only} == {"model.norm", "lm_head"}
    assert graph.layers == (0, 1, 2)


def test_a_cache_whose_writer_was_not_recorded_is_no_operation():
    graph = graph_of_taps(["model.layers.0.k_rope", "model.layers.0.k_cache", "model.layers.0.v_cache"])
    assert [op.tap for op in graph] == ["model.layers.0.k_rope", "model.layers.0.k_cache"]


@pytest.mark.parametrize(
    ("name", "layer", "site"),
    [
        ("model.layers.3.self_attn.q_proj", 3, "self_attn.q_proj"),
        ("transformer.h.11.attn.c_attn", 11, "attn.c_attn"),
        ("backbone.layers.0.mixer.out_proj.input", 0, "mixer.out_proj.input"),
        ("model.layers.2.mlp.experts.7.up_proj", 2, "mlp.experts.7.up_proj"),
        ("model.layers.1.self_attn.qk_norm@2", 1, "self_attn.qk_norm@2"),
        ("lm_head", None, "lm_head"),
    ],
)
def test_layer_and_site_of_a_name(name, layer, site):
    assert (layer_of(name), site_of(name)) == (layer, site)
    assert prefix_of(name) + site_of(name) == name


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "...",
        "model.layers",
        "model.layers.",
        "model.layers.7",
        "model.layers.7.",
        "model.layers.-1.output",
        "model.layers.1e3.output",
        "model.layers.99999999999999999999.output",  # a table with as many layers would not end
        "model.layers.٣٣٣٣٣.output",
        "model.layers.٣.output",
        "model.layers.².output",
        "model.layers..output",
        "7.output",
        "model.layers.x.self_attn.k_norm",
    ],
)
def test_hostile_names_belong_to_no_layer(name):
    assert (layer_of(name), site_of(name), prefix_of(name)) == (None, name, "")
    graph = graph_of_taps([name, "model.layers.1.output"])
    assert graph.layers == (1,)
    assert [op.tap for op in graph] == [name, "model.layers.1.output"]


@given(st.lists(st.text(alphabet="model.layers.0123456789_qk²\n", max_size=40), max_size=5))
def test_any_names_give_some_graph(names):
    graph = graph_of_taps(names)
    assert len(graph) <= len(names)
    assert all(0 <= layer < 10_000 for layer in graph.layers)
    assert all(prefix_of(op.tap) + op.site == op.tap for op in graph)


def test_an_empty_graph_has_no_layer():
    graph = Graph((Operation(tap="lm_head", kind=Kind.LINEAR),))
    assert graph.of_layer(0) == ()
    assert graph.attention_of(0) is None
    assert graph.layers == ()
    assert graph_of_taps([]).operations == ()


def test_a_graph_goes_through_json(checkpoints):
    graph = load_model(checkpoints / "qwen2-tiny", dtype=torch.float32).graph
    assert Graph.from_json(json.loads(json.dumps(graph.to_json()))) == graph
