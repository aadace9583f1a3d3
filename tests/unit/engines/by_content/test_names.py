"""Names of dumped tensors: like a tap's, and what follows from those of other layers."""

import pytest

from harness.engines.by_content.finder import TapNames, elsewhere
from harness.formats.taps import Graph, Kind, Operation

PATHS = ("model.layers.0.self_attn.q_proj", "model.layers.0.mlp.act", "model.layers.1.mlp.down_proj", "model.layers.1")
GRAPH = Graph(tuple(Operation(tap=path, kind=Kind.LINEAR, source=path) for path in PATHS))


@pytest.mark.parametrize(
    ("known", "layer", "name"),
    [
        ({0: "model.layers.0.self_attn.o_proj.0"}, 3, "model.layers.3.self_attn.o_proj.0"),
        ({2: "blk-2/attn_out.npy"}, 11, "blk-11/attn_out.npy"),
        ({0: "Tensor.add.2.forward.output.0", 1: "Tensor.add.4.forward.output.0"}, 5, "Tensor.add.12.forward.output.0"),
        ({1: "0017_mul.npy", 3: "0037_mul.npy"}, 2, "0027_mul.npy"),
        ({0: "layer00.pt: attn"}, 1, "layer01.pt: attn"),
    ],
)
def test_a_name_follows_from_those_of_other_layers(known, layer, name):
    assert name in elsewhere(known, layer)


def test_names_that_differ_otherwise_tell_nothing():
    assert list(elsewhere({1: "first.npy", 2: "second.npy"}, 3)) == []
    assert list(elsewhere({0: "a.9.npy", 1: "a.2.npy"}, 4)) == []  # a negative number


@pytest.mark.parametrize(
    ("name", "tap"),
    [
        ("Pass00000.pt: model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.q_proj"),
        ("Module.model.layers.1.mlp.down_proj.Linear.forward.0.output.0.pt", "model.layers.1.mlp.down_proj"),
        ("model_layers_1_mlp_down_proj.npy", "model.layers.1.mlp.down_proj"),
        ("model.layers.1.0", "model.layers.1"),
        ("Module.model.layers.1.mlp.down_proj.Linear.forward.0.input.0.pt", None),
        ("model.layers.12.mlp.down_proj", None),
    ],
)
def test_a_name_is_like_the_tap_with_the_longest_path_in_it(name, tap):
    names = TapNames(GRAPH, [name])
    assert [op.tap for op in GRAPH if names.likeness(name, op) == 2] == ([] if tap is None else [tap])
    assert [op.tap for op in GRAPH if names.like(op)] == ([] if tap is None else [tap])


def test_the_number_of_the_layer_makes_a_name_a_little_like():
    names = TapNames(GRAPH, ["blk.0.attn_q", "blk.7.attn_q"])
    assert [names.likeness(f"blk.{layer}.attn_q", GRAPH[PATHS[0]]) for layer in (0, 7)] == [1, 0]
