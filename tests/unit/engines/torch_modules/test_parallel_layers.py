"""Which taps are found in vLLM's kinds of modules. vLLM is not installed in CI: modules of the same names stand in."""

import pytest
import torch
from torch import nn

from harness.engines.torch_modules import ModuleRecorder
from harness.engines.torch_modules import find_table as find_fused_table
from harness.oracle.model import load_model


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
    parts.self_attn.qkv_proj = LinearBase(96, 32, 32)
    parts.self_attn.attn = Attention()
    parts.self_attn.o_proj = LinearBase(96)
    parts.post_attention_layernorm = RMSNorm()
    parts.mlp = nn.Module()
    parts.mlp.gate_up_proj = LinearBase(192, 192)
    parts.mlp.down_proj = LinearBase(96)
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


def find_table(model, graph):
    return find_fused_table(model, graph, fused_sizes=lambda module: module.output_partition_sizes)


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


def test_norms_of_queries_and_keys_that_come_before_their_product(checkpoints):
    """As in SGLang's Qwen3: what such a norm is given is the product's, and no residual."""
    graph = load_model(checkpoints / "qwen3-tiny", dtype=torch.float32).graph
    model = fake_model(len(graph.layers))
    for each in model.model.layers:
        product = each.self_attn.qkv_proj
        del each.self_attn.qkv_proj
        each.self_attn.q_norm, each.self_attn.k_norm, each.self_attn.qkv_proj = RMSNorm(), RMSNorm(), product
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
