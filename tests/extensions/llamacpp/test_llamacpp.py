"""The adapter of llama.cpp, as far as it needs no llama.cpp: batches, nodes, the saved cache, options."""

import struct
from dataclasses import dataclass, field
from math import prod

import pytest
import torch

from harness.engines.stepping import OperatorCost
from harness.errors import Code, HarnessError
from harness.extensions.llamacpp.engine.cache import parse_saved, parse_state, rotations, turned_back
from harness.extensions.llamacpp.engine.context import LlamaSequence, next_batch
from harness.extensions.llamacpp.engine.engine import _has_table
from harness.extensions.llamacpp.engine.graph import halves_of_pairs, pruned_taps, tap_of
from harness.extensions.llamacpp.engine.options import parse_llamacpp_options
from harness.extensions.llamacpp.engine.session import node_cost
from harness.extensions.llamacpp.gguf.architecture import Metadata
from harness.formats.recording import RequestInfo


def sequence(number, num_tokens, prompt_length, num_computed=0):
    request = RequestInfo(id=number, token_ids=list(range(num_tokens)), prompt_length=prompt_length)
    return LlamaSequence(request, number, num_computed)


class TestNextBatch:
    def pieces(self, sequences, chunk_size=None, num_batch=100):
        batch = next_batch(sequences, chunk_size=chunk_size, num_batch=num_batch)
        return [(piece.sequence.number, list(piece.positions)) for piece in batch]

    def test_whole_prompts_and_one_token_each_behind_them(self):
        assert self.pieces([sequence(0, 6, 3), sequence(1, 6, 2, 4)]) == [(1, [4]), (0, [0, 1, 2])]

    def test_a_chunk_is_shared_by_prompts(self):
        assert self.pieces([sequence(0, 9, 3, 1), sequence(1, 9, 8)], chunk_size=4) == [(0, [1, 2]), (1, [0, 1])]

    def test_no_batch_is_larger_than_it_may_be(self):
        many = [sequence(number, 9, 2, 4) for number in range(5)]
        assert len(self.pieces([*many, sequence(9, 9, 8)], num_batch=3)) == 3
        assert self.pieces([sequence(0, 9, 2, 4), sequence(1, 9, 8)], num_batch=3) == [(0, [4]), (1, [0, 1])]

    def test_logits_are_wanted_from_the_last_row_of_the_prompt_on(self):
        (piece,) = next_batch([sequence(0, 5, 3)], chunk_size=None, num_batch=9)
        assert [row[3] for row in piece.rows()] == [False, False, True]


@dataclass
class Node:
    op: str
    name: str = ""
    sources: list["Node"] = field(default_factory=list)

    def source(self, index):
        return self.sources[index] if index < len(self.sources) else None


def weight(name):
    return Node("NONE", name)


@pytest.mark.parametrize(
    ("node", "tap"),
    [
        (Node("GET_ROWS", "embd", [weight("token_embd.weight")]), "model.embed_tokens"),
        (Node("GET_ROWS", "node_110", [weight("node_109")]), None),
        (Node("MUL_MAT", "node_27", [weight("blk.3.attn_output.weight")]), "model.layers.3.self_attn.o_proj"),
        (Node("MUL_MAT", "Qcur-3", [weight("blk.3.attn_q.weight")]), None),  # its bias follows
        (Node("ADD", "Qcur-3", [Node(""), weight("blk.3.attn_q.bias")]), "model.layers.3.self_attn.q_proj"),
        (Node("MUL", "x", [Node(""), weight("blk.3.attn_q_norm.weight")]), "model.layers.3.self_attn.q_norm"),
        (Node("MUL", "result_norm", [Node(""), weight("output_norm.weight")]), "model.norm"),
        (Node("MUL_MAT", "result_output", [weight("token_embd.weight")]), "lm_head"),
        (Node("MUL_MAT", "result_output", [weight("output.weight")]), "lm_head"),
        (Node("MUL_MAT", "kq-3", [weight("cache_k_l3 (view) (permuted)")]), None),
        (Node("ROPE", "Qcur-3"), "model.layers.3.q_rope"),
        (Node("RESHAPE", "Qcur-3"), None),
        (Node("CONT", "kqv_out-3"), "model.layers.3.attention"),
        (Node("ADD", "ffn_inp-3", [Node(""), weight("l_out-2")]), "model.layers.3.attn_residual"),
        (Node("SWIGLU", "ffn_swiglu-3"), "model.layers.3.mlp.act"),
        (Node("ADD", "l_out-3"), "model.layers.3.output"),
    ],
)
def test_nodes_are_told_by_the_weight_that_they_use(node, tap):
    assert tap_of(node, {"blk.3.attn_q.weight", "blk.3.attn_q.bias", "blk.3.attn_output.weight"}) == tap


def test_attention_is_where_its_context_is_turned_back_from_the_basis_of_a_quantised_cache():
    context = Node("FLASH_ATTN_EXT", "kqv_out-3")
    back = Node("MUL_MAT", "node_9", [weight("attn_inp_v_rot"), Node("RESHAPE", "kqv_out-3 (reshaped)", [context])])
    values = Node("MUL_MAT", "node_8", [weight("attn_inp_v_rot"), Node("RESHAPE", "", [Node("MUL_MAT", "Vcur-3")])])
    assert tap_of(back, set(), turns_values=True) == "model.layers.3.attention"
    assert tap_of(context, set(), turns_values=True) is None
    assert tap_of(values, set(), turns_values=True) is None


@dataclass
class Sized:
    """A float32 node, or one of `itemsize` bytes an element."""

    op: str
    shape: tuple[int, ...]
    sources: list["Sized"] = field(default_factory=list)
    itemsize: float = 4

    @property
    def num_bytes(self):
        return round(prod(self.shape) * self.itemsize)


def leaf(*shape, itemsize=4.0):
    return Sized("NONE", shape, itemsize=itemsize)


@pytest.mark.parametrize(
    ("node", "flops", "elementwise", "moved", "stored"),
    [
        (Sized("MUL_MAT", (1, 1, 3, 8), [leaf(1, 1, 8, 32, itemsize=0.5), leaf(1, 1, 3, 32)]),
         2 * 3 * 8 * 32, 0, 8 * 32 // 2 + 4 * (3 * 32 + 3 * 8), 0),
        (Sized("FLASH_ATTN_EXT", (1, 3, 4, 16), [leaf(1, 4, 3, 16), leaf(1, 2, 256, 16), leaf(1, 2, 256, 16)]),
         4 * 4 * 3 * 16 * 256, 0, 4 * (2 * 3 * 4 * 16 + 2 * 2 * 256 * 16), 0),
        (Sized("ADD", (1, 1, 3, 8), [leaf(1, 1, 3, 8), leaf(1, 1, 3, 8)]), 0, 24, 3 * 24 * 4, 0),
        (Sized("GET_ROWS", (1, 1, 3, 8), [leaf(1, 1, 500, 8, itemsize=2.0), leaf(1, 1, 1, 3)]),
         0, 0, 24 * 2 + 24 * 4 + 3 * 4, 0),
        (Sized("SET_ROWS", (1, 1, 256, 8), [leaf(1, 1, 3, 8), leaf(1, 1, 1, 3, itemsize=8.0)], itemsize=2.0),
         0, 0, 24 * 4 + 24 * 2 + 3 * 8, 24 * 2),
    ],
)  # fmt: skip
def test_the_cost_of_a_node_follows_from_its_tensors(node, flops, elementwise, moved, stored):
    cost = OperatorCost(
        name=f"ggml::{node.op}", flops=flops, elementwise_flops=elementwise, bytes_moved=moved, kv_bytes=stored
    )
    assert node_cost(node) == cost


def test_views_cost_nothing():
    assert node_cost(Sized("RESHAPE", (1, 1, 3, 8), [leaf(1, 1, 8, 3)])) is None


@pytest.mark.parametrize(
    ("head_dim", "cache", "sizes"),
    [(32, "Q8_0", (0, 0)), (64, "Q8_0", (64, 64)), (96, "Q8_0", (0, 0)), (128, "Q8_0", (128, 64)), (128, "F16", (0, 0)),
     (192, "Q4_0", (64, 64))],
)  # fmt: skip
def test_heads_of_a_quantised_cache_turn(head_dim, cache, sizes):
    assert rotations(parse_llamacpp_options({"cache_type": cache}), head_dim) == sizes


def test_rows_are_turned_back():
    matrix = torch.ones(1, 1)
    while len(matrix) < 64:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    rows = torch.randn(3, 128)
    turned = (rows.unflatten(1, (-1, 64)) @ matrix / 8).flatten(1)
    assert torch.allclose(turned_back(turned, 64), rows, atol=1e-5)
    assert turned_back(turned, 0) is turned


def test_the_last_layer_is_pruned_behind_attention():
    taps = pruned_taps(4)
    assert {"model.layers.3.attn_residual", "model.layers.3.output", "model.norm", "lm_head"} <= set(taps)
    assert not any(tap.startswith(("model.layers.2", "model.layers.3.self_attn")) for tap in taps)


def test_heads_of_interleaved_pairs():
    assert halves_of_pairs(torch.tensor([[0, 1, 2, 3, 10, 11, 12, 13]]), 4).tolist() == [[0, 2, 1, 3, 10, 12, 11, 13]]


def state(positions, keys, values, *, transposed, streams=1):
    data = struct.pack("<IiI", 1, 0, streams) + struct.pack("<I", len(positions))
    data += b"".join(struct.pack("<iIi", position, 1, 0) for position in positions)
    data += struct.pack("<II", transposed, len(keys))
    for layer in keys:
        data += struct.pack("<iQ", 0, layer.shape[1] * 4) + layer.numpy().tobytes()
    for layer in values:
        head = struct.pack("<iII", 0, 4, layer.shape[1]) if transposed else struct.pack("<iQ", 0, layer.shape[1] * 4)
        data += head + (layer.T.contiguous() if transposed else layer).numpy().tobytes()
    return data


@pytest.mark.parametrize("transposed", [0, 1])
def test_the_cache_is_read_from_a_saved_state(transposed):
    keys, values = [torch.randn(3, 8) for _ in range(2)], [torch.randn(3, 8) for _ in range(2)]
    rows = parse_state(memoryview(state([2, 0, 1], keys, values, transposed=transposed)))
    assert rows.positions.tolist() == [0, 1, 2]
    order = [1, 2, 0]
    assert all(torch.equal(ours, theirs[order]) for ours, theirs in zip(rows.keys, keys, strict=True))
    assert all(torch.equal(ours, theirs[order]) for ours, theirs in zip(rows.values, values, strict=True))


def test_a_state_of_another_layout_is_refused():
    sound = state([0, 1], [torch.zeros(2, 8)], [torch.zeros(2, 8)], transposed=0)
    for data in (sound[:-1], sound + b"x", sound[:12] + b"\xff" * 4 + sound[16:], b""):
        with pytest.raises(HarnessError) as caught:
            parse_state(memoryview(data))
        assert caught.value.code is Code.ENGINE_CANNOT_SERVE


@pytest.mark.parametrize(
    ("metadata", "has_table"),
    [
        ({"general.architecture": "llama"}, True),
        ({"general.architecture": "llama", "llama.expert_count": 0}, True),
        ({"general.architecture": "llama", "llama.expert_count": 8}, False),
        ({"general.architecture": "gemma3"}, False),
    ],
)
def test_what_has_experts_has_no_table(metadata, has_table):
    """Mixtral's files say Llama."""
    assert _has_table(Metadata(metadata, "file")) is has_table


def recurrent(convolutions, recurrences):
    """What `llama_memory_recurrent::state_write` writes of a sequence's one cell."""
    data = struct.pack("<IiIII", 1, 7, 0, 0, len(convolutions))
    for row in (*convolutions, *recurrences):
        data += struct.pack("<iQ", 0, row.nbytes) + row.numpy().tobytes()
    return data


@pytest.mark.parametrize("has_cache", [True, False])
def test_states_are_read_behind_the_cache(has_cache):
    convolutions, recurrences = torch.randn(3, 6), torch.randn(3, 16)
    keys, values = [torch.randn(2, 8)], [torch.randn(2, 8)]
    before = state([0, 1], keys, values, transposed=0) if has_cache else b"head" * 2
    saved = parse_saved(memoryview(before + recurrent(convolutions, recurrences)), has_cache=has_cache, has_states=True)
    for (ours, theirs), *expected in zip(saved.states, convolutions, recurrences, strict=True):
        assert torch.equal(ours, expected[0])
        assert torch.equal(theirs, expected[1])
    assert [torch.equal(key, keys[0]) and torch.equal(value, values[0]) for key, value in saved.cache] == [
        True
    ] * has_cache


@pytest.mark.parametrize("more", [b"", b"x" * 12, b"x"])
def test_a_second_cache_is_not_told_layer_by_layer(more):
    """A model with windows has two."""
    one = state([0, 1], [torch.zeros(2, 8)], [torch.zeros(2, 8)], transposed=0)
    saved = parse_saved(memoryview(one + more), has_cache=True, has_states=False)
    assert len(saved.cache) == (not more)
    assert parse_saved(memoryview(one[:-1]), has_cache=True, has_states=False).cache == []


def test_options():
    options = parse_llamacpp_options({"cache_type": "q8_0", "cache_type_v": "f16", "flash_attention": "on"})
    assert options.cache_names == ("Q8_0", "F16")
    assert options.cache_types == (8, 1)
    assert not parse_llamacpp_options({"repack": "off"}).repack


@pytest.mark.parametrize(
    ("name", "value"),
    [("cache_type", "Q9"), ("threads", "0"), ("threads", "x"), ("flash_attention", "maybe"), ("gguf", "/none.gguf"),
     ("rope_freq_base", "-1"), ("rope_freq_base", "nan"), ("repack", "maybe"), ("type", "Q4_K"), ("nobody", "1")],
)  # fmt: skip
def test_impossible_options_are_refused(name, value):
    with pytest.raises(HarnessError) as caught:
        parse_llamacpp_options({name: value})
    assert caught.value.code is Code.BAD_OPTION
