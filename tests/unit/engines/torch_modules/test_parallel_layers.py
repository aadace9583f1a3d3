"""Which taps are found in vLLM's kinds of modules, and how these were called.

vLLM is not installed in CI: modules of the same names stand in.
"""

import json

import pytest
import torch
from torch import nn

from harness.engines.torch_modules import Calls, ModuleRecorder, watched_calls
from harness.engines.torch_modules import find_table as find_fused_table
from harness.engines.torch_modules.parallel_layers import ModuleCall
from harness.formats.taps import Graph, Kind, Operation
from harness.oracle.model import load_model


class Norm(nn.Module):
    def forward(self, x, residual=None):
        return x if residual is None else (x, residual.add_(x))


class Through(nn.Module):
    """As Cohere's norm in vLLM: the residual is returned as it was given."""

    def forward(self, x, residual):
        return x, residual


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.alone, self.paired, self.shared, self.unused = Norm(), Norm(), Norm(), Norm()
        self.through = Through()

    def forward(self, hidden_states):
        x = self.shared(self.shared(self.alone(hidden_states)))
        x, residual = self.paired(x, residual=x + 1)
        return self.through(x + 2, residual)[0]


def test_calls_of_a_forward():
    model = Twice()
    with watched_calls(model, num_rows=31) as forwards:
        model(torch.ones(31, 8))
    (calls,) = forwards
    assert set(calls.by_path) == {"", "alone", "paired", "through"}, "one is called twice, and one never"
    assert calls.by_path["alone"].outputs == ((31, 8),)
    assert calls.by_path["paired"].outputs == ((31, 8), (31, 8))
    assert calls.by_path["through"].outputs == ((31, 8), None), "a residual that is handed through is none"
    assert [calls.by_path[path].is_single for path in ("alone", "paired", "through")] == [True, False, True]
    assert calls.by_path["paired"].argument("residual") == calls.by_path["paired"].argument(0) == (31, 8)
    assert calls.by_path["alone"].argument("residual") is calls.by_path["alone"].argument(1) is None
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_calls_are_told_to_another_process():
    model = Twice()
    with watched_calls(model, num_rows=31) as forwards:
        model(torch.ones(31, 8))
    told = Calls.from_json(json.loads(json.dumps(forwards[0].to_json())))
    assert told.holds(told.by_path["alone"].outputs[0], (8,))
    assert set(told.by_path) == set(forwards[0].by_path)


def test_shapes_with_a_row_for_each_token():
    calls = Calls(31, {})
    assert calls.holds((31, 4, 8), (32,))
    assert calls.holds((1, 31, 32), (4, 8))
    assert calls.holds((31 * 4, 8), (4, 8)), "rows x heads"
    assert not calls.holds((31, 33), (32,))
    assert not calls.holds((32, 31), (32,)), "rows come first"
    assert not calls.holds(None, (32,))
    assert not calls.holds((1, 32), (32,)), "of the last token alone"


class LinearBase(nn.Module):
    def __init__(self, *sizes):
        super().__init__()
        self.output_partition_sizes = list(sizes)


class VocabParallelEmbedding(nn.Module):
    pass


class ParallelLMHead(VocabParallelEmbedding):
    pass


class LogitsProcessor(nn.Module):
    pass


class RMSNorm(nn.Module):
    pass


class Attention(nn.Module):
    pass


def layer(*, has_norm):
    parts = nn.Module()
    if has_norm:
        parts.input_layernorm = RMSNorm()
    parts.self_attn = nn.Module()
    parts.self_attn.qkv_proj = LinearBase(128, 64, 64)
    parts.self_attn.attn = Attention()
    parts.self_attn.o_proj = LinearBase(128)
    parts.post_attention_layernorm = RMSNorm()
    parts.mlp = nn.Module()
    parts.mlp.gate_up_proj = LinearBase(192, 192)
    parts.mlp.down_proj = LinearBase(128)
    return parts


def fake_model(num_layers, *, has_norm=True):
    model = nn.Module()
    model.model = nn.Module()
    model.model.embed_tokens = VocabParallelEmbedding()
    model.model.layers = nn.ModuleList(layer(has_norm=has_norm) for _ in range(num_layers))
    model.model.norm = RMSNorm()
    model.lm_head = ParallelLMHead()
    model.logits_processor = LogitsProcessor()
    return model


def find_table(model, graph, calls=None):
    return find_fused_table(model, graph, fused_sizes=lambda module: module.output_partition_sizes, calls=calls)


def call(*outputs, places=((31, 128),), **names):
    return ModuleCall(places=places, names=names, outputs=outputs)


def calls_of(graph, **others):
    """Calls of the fake model's modules: norms return pairs, but for what `others` say; None: it is not called."""
    calls = {}
    row = (31, 128)
    for path, module in fake_model(len(graph.layers)).named_modules():
        width = sum(getattr(module, "output_partition_sizes", [128]))
        calls[path] = call(row, row) if isinstance(module, RMSNorm) else call((31, width), None)
        if path.endswith("down_proj"):
            calls[path] = call(row, None, places=((31, 192),))
        if isinstance(module, Attention):
            calls[path] = call(row, places=(row, (31, 64), (31, 64)))
    calls["model.layers.0"] = call(row, row, hidden_states=row)
    calls |= {path.replace("__", "."): item for path, item in others.items()}
    return Calls(31, {path: item for path, item in calls.items() if item is not None})


@pytest.fixture(scope="module")
def graph(checkpoints):
    return load_model(checkpoints / "qwen2-tiny", dtype=torch.float32).graph


def test_every_tap_of_a_model_is_found_once(graph):
    model = fake_model(len(graph.layers))
    table = find_table(model, graph)
    taps = [tap for entry in table for tap in entry.taps]
    assert len(taps) == len(set(taps))
    assert {op.tap for op in graph if op.kind.value != "cache"} == set(taps)
    assert ModuleRecorder(model, table).unsupported_taps(graph) == ()


def test_a_fused_product_whose_parts_have_no_names_is_a_gap(graph):
    """As Lfm2-MoE's `in_proj` in vLLM: three parts, and one name."""
    model = fake_model(len(graph.layers))
    model.packed_modules_mapping = {"in_proj": ["in_proj"]}
    model.model.layers[0].short_conv = nn.Module()
    model.model.layers[0].short_conv.in_proj = LinearBase(64, 64, 64)
    shown = call((31, 192), None)
    table = find_table(model, graph, calls_of(graph, model__layers__0__short_conv__in_proj=shown))
    assert all("short_conv" not in entry.module for entry in table)


def test_a_further_embedding_is_a_gap(graph):
    """HF's own may scale what it looks up, as Gemma 4's does, where these engines scale it afterwards."""
    model = fake_model(len(graph.layers))
    model.model.embed_more = VocabParallelEmbedding()
    more = Operation(tap="model.embed_more", kind=Kind.OTHER, shape=(128,))
    table = find_table(model, Graph((*graph, more)), calls_of(graph, model__embed_more=call((31, 128))))
    assert "model.embed_more" not in {tap for entry in table for tap in entry.taps}


def test_norms_of_queries_and_keys_that_come_before_their_product(checkpoints):
    """As in SGLang's Qwen3: what such a norm is given is the product's, and no residual."""
    graph = load_model(checkpoints / "qwen3-tiny", dtype=torch.float32).graph
    model = fake_model(len(graph.layers))
    for item in model.model.layers:
        product = item.self_attn.qkv_proj
        del item.self_attn.qkv_proj
        item.self_attn.q_norm, item.self_attn.k_norm, item.self_attn.qkv_proj = RMSNorm(), RMSNorm(), product
    entries = {entry.module: entry.taps for entry in find_table(model, graph)}
    prefix = "model.layers.1.self_attn."
    assert entries[prefix + "q_norm"] == (prefix + "q_norm",)
    assert entries[prefix + "qkv_proj"] == (prefix + "q_proj", prefix + "k_proj", prefix + "v_proj")
    ModuleRecorder(model, find_table(model, graph))


def test_the_embeddings_ids_are_held_against_the_tokens(graph):
    (entry,) = [entry for entry in find_table(fake_model(len(graph.layers)), graph) if entry.token_ids is not None]
    assert (entry.module, entry.token_ids) == ("model.embed_tokens", 0)


def test_logits_are_of_the_rows_that_are_sampled_from(graph):
    entries = [entry for entry in find_table(fake_model(len(graph.layers)), graph) if entry.is_sampled_only]
    assert [entry.taps for entry in entries] == [("lm_head",)]


def test_what_no_module_shows_is_lacking(graph):
    model = fake_model(len(graph.layers), has_norm=False)
    lacking = ModuleRecorder(model, find_table(model, graph)).unsupported_taps(graph)
    assert "input_layernorm" in lacking
    assert "self_attn.q_proj" not in lacking


def test_calls_that_return_what_classes_promise(graph):
    model = fake_model(len(graph.layers))
    classes, calls = (set(taps_of(find_table(model, graph, seen))) for seen in (None, calls_of(graph)))
    assert classes == calls


def taps_of(table):
    return [tap for entry in table for tap in entry.taps]


def test_a_norm_that_returns_no_residual_is_given_it(graph):
    """As in vLLM's Granite: the residual is multiplied before it is added, and norms add nothing."""
    path = "model.layers.1.post_attention_layernorm"
    table = find_table(fake_model(len(graph.layers)), graph, calls_of(graph, **{path: call((31, 128))}))
    (entry,) = (entry for entry in table if entry.module == path)
    assert entry.inputs == {0: "model.layers.1.attn_residual"}
    assert entry.taps == ("model.layers.1.attn_residual", path)


def test_a_module_that_is_not_called_shows_nothing(graph):
    table = find_table(fake_model(len(graph.layers)), graph, calls_of(graph, **{"model.layers.1.mlp.down_proj": None}))
    recorder = ModuleRecorder(fake_model(len(graph.layers)), table)
    assert recorder.unsupported_taps(graph) == ("model.layers.1.mlp.act", "model.layers.1.mlp.down_proj")


def test_a_value_of_another_shape_is_no_tap(graph):
    path = "model.layers.0.mlp.down_proj"
    table = find_table(fake_model(len(graph.layers)), graph, calls_of(graph, **{path: call((31, 64), None)}))
    assert path not in taps_of(table)


def test_a_layer_that_returns_the_stream_alone_shows_its_output(graph):
    alone, path = call((31, 128), hidden_states=(31, 128)), f"model.layers.{len(graph.layers) - 1}"
    calls = calls_of(graph, **{path: alone, "model.norm": call((31, 128))})
    (entry,) = (entry for entry in find_table(fake_model(len(graph.layers)), graph, calls) if entry.module == path)
    assert entry.taps == (f"{path}.output",)


def test_a_layer_before_a_norm_that_adds_shows_no_output(graph):
    """As the first of Mamba-2 in vLLM: it returns its mixer's rows, and beside them the embedding as it was given."""
    pair = call((31, 128), None, hidden_states=(31, 128))
    table = find_table(fake_model(len(graph.layers)), graph, calls_of(graph, **{"model.layers.0": pair}))
    (shown,) = (entry for entry in table if "model.layers.0.output" in entry.taps)
    assert shown.module == "model.layers.1.input_layernorm"


def with_layer(parts):
    """Return a model of one layer, whose modules are given by their names."""
    model, layer = nn.Module(), nn.Module()
    model.model = nn.Module()
    model.model.layers = nn.ModuleList([layer])
    for name, part in parts.items():
        layer.add_module(name, nn.Module())
        for inner, module in part.items():
            layer.get_submodule(name).add_module(inner, module)
    return model


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.shared_experts = None


def test_experts_with_shared_ones_inside_show_what_the_block_makes():
    """As in vLLM's Qwen2-MoE; without any inside they show what HF's experts do."""
    tap = "model.layers.0.mlp"
    known = Graph(tuple(Operation(tap=item, kind=Kind.OTHER, shape=(128,)) for item in (f"{tap}.experts", tap)))
    model = with_layer({"mlp": {"experts": (experts := Experts())}})
    calls = Calls(31, {f"{tap}.experts": call((31, 128))})
    assert taps_of(find_table(model, known, calls)) == [f"{tap}.experts"]
    experts.shared_experts = nn.Module()
    assert taps_of(find_table(model, known, calls)) == [tap]


def test_queries_that_hf_scales_before_attention_are_no_tap():
    """As in OPT: vLLM gives its attention a scale, and queries as the projection makes them."""
    prefix = "model.layers.0.self_attn."
    kinds = {"query": Kind.OTHER, "key": Kind.COPY, "value": Kind.COPY, "context": Kind.ATTENTION}
    known = Graph(tuple(Operation(tap=prefix + name, kind=kind, shape=(128,)) for name, kind in kinds.items()))
    model = with_layer({"self_attn": {"attn": Attention()}})
    calls = Calls(31, {f"{prefix}attn": call((31, 128), places=((31, 128),) * 3)})
    assert taps_of(find_table(model, known, calls)) == [prefix + name for name in ("key", "value", "context")]


class QKVParallelLinear(LinearBase):
    pass


def test_a_product_that_hf_has_fused_too_may_have_its_rows_in_another_order():
    """As in Bloom and Falcon, where HF's rows go head by head."""
    path = "model.layers.0.self_attention.query_key_value"
    known = Graph((Operation(tap=path, kind=Kind.LINEAR, shape=(384,)),))
    model = with_layer({"self_attention": {"query_key_value": QKVParallelLinear(128, 128, 128)}})
    assert taps_of(find_table(model, known, Calls(31, {path: call((31, 384), None)}))) == []


def test_a_wrapped_product_shows_what_the_wrapper_returns(graph):
    """As in vLLM with LoRA: the wrapper calls the product's method, and never the module itself."""

    class WithLoRA(nn.Module):
        def __init__(self, layer):
            super().__init__()
            self.base_layer = layer

    model = fake_model(len(graph.layers))
    for item in model.model.layers:
        item.mlp.down_proj = WithLoRA(item.mlp.down_proj)
        item.self_attn.qkv_proj = WithLoRA(item.self_attn.qkv_proj)
    assert set(taps_of(find_table(model, graph, calls_of(graph)))) == set(taps_of(find_table(model, graph)))


def test_a_body_that_hf_calls_otherwise():
    """As where vLLM runs HF's own modules: the body is always `model`."""
    known = Graph((Operation(tap="gpt_neox.layers.0.mlp.down", source="gpt_neox.layers.0.mlp.down", kind=Kind.LINEAR),
                   Operation(tap="gpt_neox.norm", source="gpt_neox.norm", kind=Kind.NORM)))  # fmt: skip
    model = with_layer({"mlp": {"down": LinearBase(128)}})
    model.model.norm = RMSNorm()
    assert taps_of(find_table(model, known)) == ["gpt_neox.layers.0.mlp.down", "gpt_neox.norm"]
